// Package disk is the file system that runs are kept on: an interface with the few
// operations that run folders and checkpoints need, its implementation by the operating
// system ([OS]), the lock of a run's folder ([Claim]), and files that are replaced as a
// whole ([WriteFile]). Package disktest implements the same interface in memory, for
// tests that kill processes, cut the power and let processes take turns.
//
// This file owns the interface and what is built on it.
package disk

import (
	"errors"
	"io"
	"io/fs"
	"path/filepath"
	"syscall"

	"github.com/stowage-dev/stowage/internal/atomicfile"
)

// FS is a file system. Its errors match fs.ErrNotExist, fs.ErrExist, fs.ErrPermission and
// syscall.ENOSPC where these apply.
type FS interface {
	// Create creates a file. It fails if the file exists.
	Create(name string) (Output, error)
	// Append cuts a file to the given size and opens it for writing at its end. It creates
	// the file if there is none. Another name of the file keeps the old contents.
	Append(name string, size int64) (Output, error)
	// Open opens a regular file for reading.
	Open(name string) (Input, error)
	// Exists reports whether there is something under a name. It does not follow a link.
	Exists(name string) (bool, error)
	// Mkdir creates one folder.
	Mkdir(name string) error
	// SyncDir writes the names in a folder to the disk.
	SyncDir(name string) error
	// List returns the names in a folder, in any order.
	List(name string) ([]string, error)
	// Rename renames a file or a folder atomically. It replaces a file, but no folder that
	// holds something.
	Rename(from, to string) error
	// Remove removes a file or an empty folder.
	Remove(name string) error
	// RemoveAll removes a file, or a folder with everything in it. It does not fail if
	// there is none.
	RemoveAll(name string) error
	// OpenLock opens the file of a lock and creates it if there is none. It returns an
	// error for everything but a regular file.
	OpenLock(name string) (f LockFile, created bool, err error)
}

// Output is a file that is being written.
type Output = atomicfile.Output

// Input is a file that is being read.
type Input interface {
	io.ReaderAt
	io.Closer
	Size() int64
}

// LockFile is the open file of a lock. The lock ends when the file is closed or the
// process dies. Nothing else ends it; the garbage collector does not close the file.
type LockFile interface {
	// TryLock takes the lock. It reports false if another open file has it.
	TryLock() (bool, error)
	// Current reports whether the name still leads to this file.
	Current() (bool, error)
	// Shared reports whether the file has another name too.
	Shared() (bool, error)
	// Read returns the beginning of the file.
	Read() ([]byte, error)
	// Write replaces the contents of the file.
	Write(text []byte) error
	Close() error
}

// ReadFile reads a file of at most so many bytes.
func ReadFile(d FS, name string, most int64) ([]byte, error) {
	f, err := d.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.NewSectionReader(f, 0, min(f.Size(), most)))
}

// WriteFile replaces a file as a whole: a reader, a kill and a loss of power find the old
// contents or the new ones, and after WriteFile has returned only the new ones. Only one
// process may write to the folder at a time.
func WriteFile(d FS, name string, text []byte) error { return atomicfile.Replace(d, name, text) }

// SyncAll writes a file, or a folder with everything in it, to the disk. No other process
// may write to it.
func SyncAll(d FS, name string) error {
	names, err := d.List(name)
	if errors.Is(err, syscall.ENOTDIR) {
		return syncFile(d, name)
	}
	if err != nil {
		return err
	}
	for _, inner := range names {
		if err := SyncAll(d, filepath.Join(name, inner)); err != nil {
			return err
		}
	}
	return d.SyncDir(name)
}

func syncFile(d FS, name string) error {
	in, err := d.Open(name)
	if err != nil {
		return err
	}
	size := in.Size()
	if err := in.Close(); err != nil {
		return err
	}
	out, err := d.Append(name, size)
	if err != nil {
		return err
	}
	return errors.Join(out.Sync(), out.Close())
}

// MakeAll makes a folder and those above it, and returns those that it made, the
// innermost last. It syncs each before it uses it.
func MakeAll(d FS, dir string) (made []string, err error) {
	err = d.Mkdir(dir)
	parent := filepath.Dir(dir)
	if errors.Is(err, fs.ErrNotExist) && parent != dir {
		if made, err = MakeAll(d, parent); err != nil {
			return made, err
		}
		err = d.Mkdir(dir)
	}
	switch {
	case errors.Is(err, fs.ErrExist):
		return made, nil // if it is a file, using it says so
	case err != nil:
		return made, err
	}
	return append(made, dir), d.SyncDir(parent)
}
