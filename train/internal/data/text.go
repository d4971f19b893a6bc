// Package data gives a model bytes to train on: text from a file, a folder or the
// sample that is built in, cut into windows that come in an order which depends on
// the seed alone. A batch follows from the number of its step, so that there is no
// position to save beside it.
//
// This file owns the text.
package data

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/stowage-dev/stowage/internal/input"
)

//go:embed sample/opticks.txt.gz
var sample []byte

// SampleName is the name of the text that is built in.
const SampleName = "Newton's Opticks"

// maxText is what is read into memory at most: more is hardly text that someone
// wants to train a model of this program on.
const maxText = 8 << 30

// Text is bytes to train on. It does not change.
type Text struct {
	name  string
	bytes []byte
	sum   string
}

// NewText computes a text of bytes, which must not change any more.
func NewText(name string, b []byte) *Text {
	h := sha256.Sum256(b)
	return &Text{name, b, hex.EncodeToString(h[:])}
}

// Name says where the text comes from.
func (t *Text) Name() string { return t.name }

// Len is the length in bytes.
func (t *Text) Len() int { return len(t.bytes) }

// SHA256 is the checksum of the bytes, in hexadecimal digits.
func (t *Text) SHA256() string { return t.sum }

// Split divides a text: the share of it that is held out, from 0 to below 1, is its end.
// That of 0 is nil. A text that was divided otherwise has another checksum, so that no
// run is resumed on what it held out before.
func (t *Text) Split(share float64) (rest, held *Text, err error) {
	switch n := int(share * float64(len(t.bytes))); {
	case !(share >= 0 && share < 1):
		return nil, nil, fmt.Errorf("%g of %s cannot be held out: give a share from 0 to below 1", share, t.name)
	case n == 0:
		return t, nil, nil
	default:
		at := len(t.bytes) - n
		return NewText(t.name, t.bytes[:at]), NewText(t.name+" (held out)", t.bytes[at:]), nil
	}
}

// Open reads a file, or all files of a folder and those below it, one after the
// other in the order of their paths. In a folder it skips names that begin with a
// dot. It reads links to files, except to those that it reads anyway, and returns an error
// for whatever else is no file, so that nothing is left out unnoticed. No path is the sample that is built in.
func Open(path string) (*Text, error) {
	if path == "" {
		return openSample()
	}
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("there is nothing at %s: give a text file or a folder with text files", path)
	case err != nil:
		return nil, unreadable(path, err)
	case info.Mode().IsRegular():
		return read(path, []source{{path: path, size: info.Size()}})
	case !info.IsDir():
		return nil, fmt.Errorf("%s is neither a file nor a folder: give a text file or a folder with text files", path)
	}
	files, err := list(path)
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("the folder %s has no files, hidden ones aside: put text files into it or give another one", path)
	}
	return read(path, files)
}

func openSample() (*Text, error) {
	z, err := gzip.NewReader(bytes.NewReader(sample))
	if err != nil {
		return nil, fmt.Errorf("the built-in sample is damaged: %w; build the program anew", err)
	}
	text, err := io.ReadAll(z)
	if err != nil {
		return nil, fmt.Errorf("the built-in sample is damaged: %w; build the program anew", err)
	}
	return NewText(SampleName, text), nil
}

type source struct {
	path string
	size int64
	link bool
	file struct{ device, inode uint64 }
}

// list gives the files of a folder. The order is that of the paths with slashes,
// byte by byte: the same on every machine. A link to a file that is listed without it is left
// out, as are all links but the first to one that is not: what is read twice would be both
// trained on and held out.
func list(root string) (files []source, err error) {
	// The walk does not follow a link, even if that is all there is.
	if target, err := filepath.EvalSymlinks(root); err == nil {
		root = target
	}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		hidden := path != root && strings.HasPrefix(d.Name(), ".")
		switch {
		case err != nil:
			return unreadable(path, err)
		case hidden && d.IsDir():
			return fs.SkipDir
		case hidden || d.IsDir():
			return nil
		}
		info, err := os.Stat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return fmt.Errorf("%s is a link to nothing: mend it, or remove it", path)
		case err != nil:
			return unreadable(path, err)
		case info.IsDir():
			return fmt.Errorf("%s is a link to a folder, which is not followed: give that folder, or remove the link", path)
		case !info.Mode().IsRegular():
			return fmt.Errorf("%s is neither a file nor a folder: remove it, or begin its name with a dot to leave it out", path)
		}
		f := source{path: path, size: info.Size(), link: d.Type()&fs.ModeSymlink != 0}
		if s, ok := info.Sys().(*syscall.Stat_t); ok {
			f.file.device, f.file.inode = uint64(s.Dev), s.Ino
		}
		files = append(files, f)
		return nil
	})
	slices.SortFunc(files, func(a, b source) int {
		return strings.Compare(filepath.ToSlash(a.path), filepath.ToSlash(b.path))
	})
	listed := map[any]bool{}
	for _, f := range files {
		if !f.link {
			listed[f.file] = true
		}
	}
	files = slices.DeleteFunc(files, func(f source) bool {
		again := f.link && listed[f.file]
		listed[f.file] = true
		return again
	})
	return files, err
}

func read(name string, files []source) (*Text, error) {
	total := int64(0)
	for _, f := range files {
		if total += f.size; total > maxText {
			return nil, fmt.Errorf("%s has more than %d GiB of text, which is read into memory: give a part of it", name, maxText>>30)
		}
	}
	text := bytes.NewBuffer(make([]byte, 0, total+bytes.MinRead))
	for _, f := range files {
		if f.size == 0 {
			if hasText(f.path) {
				return nil, fmt.Errorf("%s has text but no size, as files of the kernel have: copy it, and give the copy", f.path)
			}
			continue
		}
		in, err := os.Open(f.path)
		if err != nil {
			return nil, unreadable(f.path, err)
		}
		before := text.Len()
		_, err = text.ReadFrom(in)
		in.Close()
		if err != nil {
			return nil, unreadable(f.path, err)
		}
		if err := input.CheckPointer(text.Bytes()[before:]); err != nil {
			return nil, fmt.Errorf("%s cannot be read: %w", f.path, err)
		}
	}
	if text.Len() == 0 {
		return nil, fmt.Errorf("%s has no text, not one byte: give a text file or a folder with text files", name)
	}
	return NewText(name, text.Bytes()), nil
}

// hasText reports whether a file without a size has text. It does not wait, as some files
// of the kernel do.
func hasText(path string) bool {
	in, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer in.Close()
	n, _ := in.Read(make([]byte, 1))
	return n > 0
}

// unreadable returns the error about a file that cannot be read.
func unreadable(path string, err error) error {
	return fmt.Errorf("%s cannot be read: %w; make it readable or give another path", path, input.Cause(err))
}
