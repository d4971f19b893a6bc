// This file owns the files that commands write beside their output. A file is checked
// before the work begins, replaced as a whole, and named when it is there.

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/atomicfile"
)

// flagFile is a file that a flag or an argument names. An empty name means none. A file to
// write without a flag is one that nobody named, in place of that of --out.
type flagFile struct{ flag, name string }

// blame begins an error about writing the file.
func (f flagFile) blame() string {
	if f.flag == "" {
		return ""
	}
	return "--" + f.flag + ": "
}

// another says how to name another file.
func (f flagFile) another() string {
	if f.flag == "" {
		return "give another file with --out"
	}
	return "give another file"
}

// written is the file in an error about two files.
func (f flagFile) written() string {
	if f.flag == "" {
		return "the page"
	}
	return "--" + f.flag
}

// checkFiles returns an error if a file cannot be written, if two flags name the same
// file, or if a file would replace one that the command reads.
func checkFiles(writes []flagFile, reads ...flagFile) error {
	for i, f := range writes {
		switch {
		case f.name == "":
			continue
		case f.name == "-":
			return usagef("--%s - is not standard output; give a file, or /dev/stdout", f.flag)
		case strings.HasSuffix(f.name, string(os.PathSeparator)):
			return usagef("--%s %s is a folder; give a file", f.flag, f.name)
		}
		info, err := os.Stat(f.name)
		if err == nil && info.IsDir() && f.flag == "" {
			return usagef("%s is a folder; %s", f.name, f.another())
		}
		if err == nil && info.IsDir() {
			return usagef("--%s %s is a folder; give a file", f.flag, f.name)
		}
		for _, other := range writes[:i] {
			if sameFile(f.name, other.name) {
				return usagef("%s and %s name the same file, %s; give another file to write", f.written(), other.written(), f.name)
			}
		}
		for _, other := range reads {
			if sameFile(f.name, other.name) {
				remedy := "give another file to write"
				if f.flag == "" {
					remedy = f.another()
				}
				return usagef("%s and %s name the same file, %s; %s", f.written(), other, f.name, remedy)
			}
		}
		if err := atomicfile.Check(f.name); err != nil {
			return usagef("%s%v; %s in a folder that you may write to", f.blame(), err, strings.Replace(f.another(), "another", "a", 1))
		}
	}
	return nil
}

// String returns what a user typed before the name.
func (f flagFile) String() string {
	if f.flag == "" {
		return "an argument"
	}
	return "--" + f.flag
}

// sameFile reports whether two names are those of one regular file, or of one that is not
// there yet.
func sameFile(a, b string) bool {
	if a == "" || b == "" {
		return false
	}
	x, cannot := os.Stat(a)
	y, err := os.Stat(b)
	if cannot != nil || err != nil {
		return cannot != nil && err != nil && realPath(a) == realPath(b)
	}
	return os.SameFile(x, y) && x.Mode().IsRegular()
}

// realPath returns the absolute path of a file behind links. The file need not be there,
// but its folder.
func realPath(name string) string {
	path, err := filepath.EvalSymlinks(name)
	if err != nil {
		dir, cannot := filepath.EvalSymlinks(filepath.Dir(name))
		if cannot != nil {
			dir = filepath.Dir(name)
		}
		path = filepath.Join(dir, filepath.Base(name))
	}
	if full, err := filepath.Abs(path); err == nil {
		return full
	}
	return path
}

// saveFile writes the file of a flag.
func saveFile(f flagFile, write func(io.Writer) error) error {
	err := atomicfile.Write(f.name, write)
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("%s%w; free some space, or %s", f.blame(), err, f.another())
	case err != nil:
		return fmt.Errorf("%s%w", f.blame(), err)
	}
	return nil
}

// written says where a file is: beside the text of a command, or if the output is for a
// program, on standard error. It says nothing without a file, or if the file is the output.
func written(cmd *cobra.Command, forProgram bool, what, file string) {
	if info, err := os.Stat(cmp.Or(file, os.DevNull)); file == "" || err == nil && !info.Mode().IsRegular() {
		return
	}
	out := cmd.OutOrStdout()
	if forProgram {
		out = cmd.ErrOrStderr()
	}
	fmt.Fprintf(out, "%s %s\n", what, file)
}
