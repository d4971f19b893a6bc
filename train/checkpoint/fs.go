// This file owns the file system: the few operations that checkpoints need, so
// that tests can fail any of them, and the disk.

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

// FS is a file system. Errors that mean a missing or an existing file, a full disk
// or a missing right match fs.ErrNotExist, fs.ErrExist, syscall.ENOSPC and so on.
type FS interface {
	// Create makes a file that must not exist.
	Create(name string) (Output, error)
	// Open opens a file for reading.
	Open(name string) (Input, error)
	// Mkdir makes one folder.
	Mkdir(name string) error
	// SyncDir returns when the names in a folder are on the disk.
	SyncDir(name string) error
	// List gives the names in a folder, in any order.
	List(name string) ([]string, error)
	// Rename gives a folder another name beside it, at once.
	Rename(from, to string) error
	// RemoveAll removes a folder with all in it; one that is not there is fine.
	RemoveAll(name string) error
	// Lock takes a lock that no other holder gets until it is closed or its
	// process has died. It fails with a LockedError if there is one.
	Lock(name string) (io.Closer, error)
}

// Output is a file that is written.
type Output interface {
	io.WriteCloser
	// Sync returns when the data are on the disk.
	Sync() error
}

// Input is a file that is read.
type Input interface {
	io.ReaderAt
	io.Closer
	Size() int64
}

// LockedError says that another process holds the lock.
type LockedError struct{ PID int } // zero if it is not known

func (e *LockedError) Error() string {
	if e.PID == 0 {
		return "another process"
	}
	return fmt.Sprintf("process %d", e.PID)
}

// Disk is the file system of the machine.
type Disk struct{}

// Create makes a file.
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
	// A pipe of that name would block the opening.
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", name)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return input{f, info.Size()}, nil
}

// Mkdir makes a folder.
func (Disk) Mkdir(name string) error { return os.Mkdir(name, 0o755) }

// SyncDir syncs a folder.
func (Disk) SyncDir(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// List lists a folder.
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

// RemoveAll removes a folder.
func (Disk) RemoveAll(name string) error { return os.RemoveAll(name) }

// Lock locks a file that holds the number of the process. The lock is the kernel's
// and ends with its process, so that there is no stale one to recognise; the number
// is for people.
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
