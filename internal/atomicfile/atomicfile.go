// Package atomicfile replaces files as a whole: a reader finds the old contents or the
// new ones, and a full disk leaves the old ones.
//
// This file owns the write.
package atomicfile

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// File is a file that is being replaced:
//
//  1. Create makes a temporary file in the same folder.
//  2. Write adds to it.
//  3. Commit renames it. Discard removes it; after Commit it does nothing.
//
// A path that names no regular file, such as /dev/stdout or a pipe, is written directly,
// because it cannot be replaced.
type File struct {
	path string // as given, for errors
	to   string // behind links
	f    *os.File
	b    *bufio.Writer
	temp bool
	mode fs.FileMode
}

// Create begins to replace the file at path. A link stays, and the file that it leads to
// is replaced. Errors of a File name path.
func Create(path string) (*File, error) {
	x := &File{path: path, to: behind(path), temp: true, mode: 0o644}
	var err error
	switch info, cannot := os.Stat(x.to); {
	case cannot == nil && info.IsDir():
		return nil, x.failed(errors.New("it is a folder"))
	case cannot == nil && !info.Mode().IsRegular():
		x.temp = false
		x.f, err = os.OpenFile(x.to, os.O_WRONLY, 0)
	default:
		if cannot == nil {
			x.mode = info.Mode().Perm()
		}
		x.f, err = os.CreateTemp(filepath.Dir(x.to), "."+filepath.Base(x.to)+"-*")
	}
	if err != nil {
		return nil, x.failed(err)
	}
	x.b = bufio.NewWriterSize(x.f, 1<<20)
	return x, nil
}

// behind returns the path that a link leads to, whether or not a file is there.
func behind(path string) string {
	for range 40 { // as many as Linux follows
		target, err := os.Readlink(path)
		if err != nil {
			break
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(path), target)
		}
		path = target
	}
	return path
}

// Write adds to the file.
func (x *File) Write(p []byte) (int, error) { return x.b.Write(p) }

// Commit puts the file in its place. If it returns an error, the old file is as it was.
func (x *File) Commit() error {
	if x.f == nil {
		return nil
	}
	f := x.f
	x.f = nil
	err := x.b.Flush()
	if err == nil && x.temp {
		err = f.Chmod(x.mode)
	}
	if end := f.Close(); err == nil {
		err = end
	}
	if err == nil && x.temp {
		err = os.Rename(f.Name(), x.to)
	}
	if err != nil {
		x.remove(f)
		return x.failed(err)
	}
	return nil
}

// Discard leaves the old file as it was, unless Commit was called.
func (x *File) Discard() {
	if x.f == nil {
		return
	}
	f := x.f
	x.f = nil
	f.Close()
	x.remove(f)
}

func (x *File) remove(f *os.File) {
	if x.temp {
		os.Remove(f.Name())
	}
}

// failed adds the path to an error.
func (x *File) failed(err error) error {
	return fmt.Errorf("cannot write %s: %w", x.path, cause(err))
}

// Check returns the error that [Create] would return. Use it before long work whose
// result goes to the file. It leaves nothing behind.
func Check(path string) error {
	if info, err := os.Stat(path); err == nil && !info.IsDir() && !info.Mode().IsRegular() {
		return nil // opening a pipe could wait for its reader
	}
	f, err := Create(path)
	if err != nil {
		return err
	}
	f.Discard()
	return nil
}

// Write replaces the file at path with what write writes. The error names path.
func Write(path string, write func(io.Writer) error) error {
	f, err := Create(path)
	if err != nil {
		return err
	}
	defer f.Discard()
	if err := write(f); err != nil {
		return f.failed(err)
	}
	return f.Commit()
}

// WriteBytes replaces the file at path with text.
func WriteBytes(path string, text []byte) error {
	return Write(path, func(w io.Writer) error {
		_, err := w.Write(text)
		return err
	})
}

// cause returns an error of the file system without the path, which the sentence has
// already.
func cause(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	var link *os.LinkError
	if errors.As(err, &link) {
		return link.Err
	}
	return err
}
