// This file owns the file system: an interface with the few operations that checkpoints
// need, so that tests can make any of them fail, and its implementation on disk.

package checkpoint

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// FS is a file system. Its errors match fs.ErrNotExist, fs.ErrExist, fs.ErrPermission and
// syscall.ENOSPC where these apply.
type FS interface {
	// Create creates a file. It fails if the file exists.
	Create(name string) (Output, error)
	// Open opens a file for reading.
	Open(name string) (Input, error)
	// Mkdir creates one folder.
	Mkdir(name string) error
	// SyncDir writes the names in a folder to the disk.
	SyncDir(name string) error
	// List returns the names in a folder, in any order.
	List(name string) ([]string, error)
	// Rename renames a folder atomically within its parent folder.
	Rename(from, to string) error
	// RemoveAll removes a folder with everything in it. It does not fail if there is none.
	RemoveAll(name string) error
	// Lock takes an exclusive lock, which ends when it is closed or the process dies.
	// It returns a LockedError if another process holds the lock.
	Lock(name string) (io.Closer, error)
}

// Output is a file that is being written.
type Output interface {
	io.WriteCloser
	// Sync writes the data to the disk.
	Sync() error
}

// Input is a file that is being read.
type Input interface {
	io.ReaderAt
	io.Closer
	Size() int64
}

// LockedError reports that another process holds the lock.
type LockedError struct{ PID int } // zero if it is not known

func (e *LockedError) Error() string {
	if e.PID == 0 {
		return "another process"
	}
	return fmt.Sprintf("process %d", e.PID)
}

// Disk is the file system of the operating system.
type Disk struct{}

// Create creates a file.
func (Disk) Create(name string) (Output, error) {
	return os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
}

type input struct {
	*os.File
	size int64
}

func (f input) Size() int64 { return f.size }

// Open opens a regular file.
func (Disk) Open(name string) (Input, error) {
	// Opening a pipe would block.
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("expected a regular file at %s", name)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return input{f, info.Size()}, nil
}

// Mkdir creates a folder.
func (Disk) Mkdir(name string) error { return os.Mkdir(name, 0o755) }

// SyncDir writes the names in a folder to the disk.
func (Disk) SyncDir(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// List returns the names in a folder.
func (Disk) List(name string) ([]string, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.Readdirnames(-1)
}

// Rename renames a folder.
func (Disk) Rename(from, to string) error { return os.Rename(from, to) }

// RemoveAll removes a folder with everything in it.
func (Disk) RemoveAll(name string) error { return os.RemoveAll(name) }

// Lock locks a file and writes the process number into it, for people to read. The kernel
// releases the lock when the process ends, so a lock is never stale.
func (Disk) Lock(name string) (io.Closer, error) {
	for {
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o644)
		if err != nil {
			return nil, err
		}
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			defer f.Close()
			if err != syscall.EWOULDBLOCK {
				return nil, err
			}
			text, _ := io.ReadAll(io.LimitReader(f, 20))
			pid, _ := strconv.Atoi(strings.TrimSpace(string(text)))
			return nil, &LockedError{pid}
		}
		// The holder before may have removed the name between the two calls: then
		// this locks a file that nobody else can find.
		ours, err := f.Stat()
		if err != nil {
			f.Close()
			return nil, err
		}
		if there, err := os.Stat(name); err != nil || !os.SameFile(ours, there) {
			f.Close()
			continue
		}
		if err = f.Truncate(0); err == nil {
			_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
		}
		if err != nil {
			os.Remove(name)
			f.Close()
			return nil, err
		}
		return locked{f}, nil
	}
}

type locked struct{ *os.File }

// Close removes the file while it is still locked.
func (l locked) Close() error {
	err := os.Remove(filepath.Clean(l.Name()))
	if e := l.File.Close(); err == nil {
		err = e
	}
	return err
}
