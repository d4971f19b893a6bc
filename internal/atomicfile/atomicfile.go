// Package atomicfile replaces files as a whole: a reader finds the old contents or the
// new ones, and a full disk leaves the old ones.
//
// [Create], [Write] and [WriteBytes] write what a command was asked for: the path may be a
// link or a device, the permissions of an old file stay, and nothing is synced. [Replace]
// writes a file of a program's own so that it also survives a loss of power. [Lock] is for
// those that replace a file by what they read from it and more.
//
// This file owns the write, temporary.go the file that is written before it has its name,
// lock.go the lock.
package atomicfile

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/stowage-dev/stowage/internal/input"
)

// FS is the part of a file system that [Replace] needs.
type FS interface {
	// Create creates a file. It fails if the file exists.
	Create(name string) (Output, error)
	// Rename renames a file atomically and replaces the file that has the new name.
	Rename(from, to string) error
	// RemoveAll removes a file, or a folder with everything in it. It does not fail if
	// there is none.
	RemoveAll(name string) error
	// SyncDir writes the names in a folder to the disk.
	SyncDir(name string) error
}

// Output is a file that is being written.
type Output interface {
	io.WriteCloser
	// Sync writes the data to the disk.
	Sync() error
}

// File is a file that is being replaced:
//
//  1. Create makes a temporary file in the same folder, without a name if the file system
//     can do that, so that a kill leaves nothing behind.
//  2. Write adds to it.
//  3. Commit gives it a name and renames it. Discard removes it; after Commit it does
//     nothing.
//
// A path that names no regular file, such as /dev/stdout or a pipe, is written directly,
// because it cannot be replaced. Create returns an error for a pipe that nothing reads.
type File struct {
	path string                          // as given, for errors
	to   string                          // behind links
	work string                          // the temporary file, or "" if it has no name or the path is written directly
	out  Output                          // nil after Commit and Discard
	link func() (name string, err error) // gives a name to a temporary file without one; may be nil
	b    *bufio.Writer

	chmod   func(f *os.File, mode fs.FileMode) error
	rename  func(from, to string) error
	remove  func(name string) error
	syncDir func(name string) error // nil if neither data nor name are synced
}

// Create begins to replace the file at path. A link stays, and the file that it leads to
// is replaced. Errors of a File name path.
func Create(path string) (*File, error) {
	x := &File{path: path, chmod: (*os.File).Chmod, rename: os.Rename, remove: os.Remove}
	if err := x.create(); err != nil {
		return nil, x.failed(err)
	}
	return x, nil
}

// create opens what is written.
func (x *File) create() error {
	path := x.path
	if info, err := os.Stat(path); err == nil && !info.IsDir() && !info.Mode().IsRegular() {
		// Where the link leads may have no name, as if /dev/stdout is a pipe.
		f, err := openDirectly(path, info.Mode())
		if err != nil {
			return err
		}
		x.out, x.b = f, bufio.NewWriterSize(f, 1<<20)
		return nil
	}
	var err error
	if x.to, err = behind(path); err != nil {
		return err
	}
	info, cannot := os.Stat(x.to)
	switch {
	case cannot == nil && info.IsDir():
		return errors.New("it is a folder")
	case cannot != nil && !errors.Is(cannot, fs.ErrNotExist):
		return cannot
	}
	f, err := x.createTemporary()
	if err != nil {
		return err
	}
	x.out, x.b = f, bufio.NewWriterSize(f, 1<<20)
	if cannot == nil {
		if err := x.chmod(f, info.Mode().Perm()); err != nil {
			x.Discard() // nothing was written
			return err
		}
	}
	return nil
}

// openDirectly opens something that is no regular file, without waiting for somebody to
// read a pipe.
func openDirectly(path string, mode fs.FileMode) (*os.File, error) {
	if mode&fs.ModeNamedPipe == 0 {
		return os.OpenFile(path, os.O_WRONLY, 0)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, syscall.ENXIO) {
		err = errors.New("it is a pipe that nothing reads; read it, or move it")
	}
	return f, err
}

// behind returns the path that a link leads to, whether or not a file is there.
func behind(path string) (string, error) {
	for range 40 { // as many as Linux follows
		target, err := os.Readlink(path)
		if err != nil {
			return path, nil
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(path), target)
		}
		path = target
	}
	return "", syscall.ELOOP
}

// Temporary returns the path of the temporary file, or "" if it has no name. A program that
// a signal ends before Commit removes it.
func (x *File) Temporary() string { return x.work }

// Write adds to the file.
func (x *File) Write(p []byte) (int, error) { return x.b.Write(p) }

// Commit puts the file in its place. If it returns an error, the old file is as it was.
func (x *File) Commit() error {
	if err := x.commit(); err != nil {
		return x.failed(err)
	}
	return nil
}

func (x *File) commit() error {
	if x.out == nil {
		return nil
	}
	out, work := x.out, x.work
	x.out = nil
	err := x.b.Flush()
	if err == nil && x.syncDir != nil {
		err = out.Sync()
	}
	if err == nil && x.link != nil {
		work, err = x.link()
	}
	if e := out.Close(); err == nil {
		err = e
	}
	if work == "" {
		return err
	}
	if err == nil {
		if err = x.rename(work, x.to); errors.Is(err, fs.ErrExist) {
			err = &fs.PathError{Op: "write", Path: x.to, Err: errors.New("it is a folder; move it")}
		}
	}
	if err != nil {
		_ = x.remove(work) // the caller gets the first error
		return err
	}
	if x.syncDir == nil {
		return nil
	}
	return x.syncDir(filepath.Dir(x.to))
}

// Discard leaves the old file as it was, unless Commit was called.
func (x *File) Discard() {
	if x.out == nil {
		return
	}
	_ = x.out.Close() // what was written is not wanted
	x.out = nil
	if x.work != "" {
		_ = x.remove(x.work)
	}
}

// failed adds the path to an error.
func (x *File) failed(err error) error {
	return fmt.Errorf("cannot write %s: %w", x.path, input.Cause(err))
}

// Replace replaces the file with the given name by text, through a temporary file whose
// name follows from it. A reader, a kill and a loss of power find the old contents or the
// new ones, and after Replace has returned only the new ones. Replace returns an
// *fs.PathError about name if the file system fails. Only one process may write to the
// folder at a time.
func Replace(d FS, name string, text []byte) error {
	err := replace(d, name, text)
	if short := input.Cause(err); short != err {
		return &fs.PathError{Op: "write", Path: name, Err: short} // users do not know the other file
	}
	return err
}

func replace(d FS, name string, text []byte) error {
	work := filepath.Join(filepath.Dir(name), "."+filepath.Base(name)+".tmp")
	if err := d.RemoveAll(work); err != nil { // a killed process left it
		return err
	}
	out, err := d.Create(work)
	if err != nil {
		return err
	}
	x := &File{path: name, to: name, work: work, out: out, b: bufio.NewWriter(out), rename: d.Rename, remove: d.RemoveAll, syncDir: d.SyncDir}
	defer x.Discard()
	if _, err := x.Write(text); err != nil {
		return err
	}
	return x.commit()
}

// Check returns the error that [Create] would return. Use it before long work whose
// result goes to the file. It leaves nothing behind.
func Check(path string) error {
	if info, err := os.Stat(path); err == nil && !info.IsDir() && !info.Mode().IsRegular() {
		return nil // a pipe's reader would take closing it for the end
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
