// This file owns the file system of the operating system.

package disk

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"syscall"
)

// OS is the file system of the operating system. The zero value is ready for use.
type OS struct {
	// Calls makes the system calls on which it depends what outlives a loss of power and
	// who holds a lock. Tests record them or let them fail; nil is the operating system.
	Calls *Calls
}

// Calls are system calls.
type Calls struct {
	OpenFile func(name string, flag int, perm fs.FileMode) (*os.File, error)
	Write    func(f *os.File, p []byte) (int, error)
	Sync     func(f *os.File) error
	Close    func(f *os.File) error
	Mkdir    func(name string, perm fs.FileMode) error
	Rename   func(from, to string) error
	Remove   func(name string) error

	Open  func(name string, flag int, perm uint32) (fd int, err error)
	Flock func(fd, how int) error
}

// SystemCalls returns the calls of the operating system.
func SystemCalls() Calls {
	return Calls{
		OpenFile: os.OpenFile, Write: (*os.File).Write, Sync: (*os.File).Sync, Close: (*os.File).Close, Mkdir: os.Mkdir, Rename: os.Rename, Remove: os.Remove,
		Open: syscall.Open, Flock: syscall.Flock,
	}
}

var systemCalls = SystemCalls()

func (d OS) calls() *Calls {
	if d.Calls == nil {
		return &systemCalls
	}
	return d.Calls
}

// output is a file whose system calls go through Calls.
type output struct {
	f     *os.File
	calls *Calls
}

func (o output) Write(p []byte) (int, error) { return o.calls.Write(o.f, p) }
func (o output) Sync() error                 { return o.calls.Sync(o.f) }
func (o output) Close() error                { return o.calls.Close(o.f) }

// Create creates a file.
func (d OS) Create(name string) (Output, error) {
	f, err := d.calls().OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return nil, err
	}
	return output{f, d.calls()}, nil
}

// Append cuts a regular file to the given size and opens it for writing at its end. It
// copies a file that has another name too, which keeps the old contents.
func (d OS) Append(name string, size int64) (Output, error) {
	f, err := d.calls().OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_APPEND|syscall.O_NONBLOCK, 0o644)
	if err != nil {
		return nil, err
	}
	info, err := regular(f)
	if err == nil && linked(info) {
		f.Close()
		if err := d.separate(name, size); err != nil {
			return nil, err
		}
		return d.Append(name, size)
	}
	if err == nil {
		err = f.Truncate(size)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return output{f, d.calls()}, nil
}

// linked reports whether a file has several names.
func linked(info fs.FileInfo) bool {
	s, ok := info.Sys().(*syscall.Stat_t)
	return ok && s.Nlink > 1
}

// separate replaces a file by a copy of its first bytes, of at most size.
func (d OS) separate(name string, size int64) error {
	in, err := d.Open(name)
	if err != nil {
		return err
	}
	defer in.Close()
	text, err := io.ReadAll(io.NewSectionReader(in, 0, size))
	if err != nil {
		return err
	}
	return WriteFile(d, name, text)
}

type openFile struct {
	*os.File
	size int64
}

func (f openFile) Size() int64 { return f.size }

// Open opens a regular file.
func (d OS) Open(name string) (Input, error) {
	// Opening a pipe would block.
	f, err := d.calls().OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := regular(f)
	if err != nil {
		f.Close()
		return nil, err
	}
	return openFile{f, info.Size()}, nil
}

// regular returns an error unless a file is a regular one.
func regular(f *os.File) (fs.FileInfo, error) {
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("it is no regular file; move it")
	}
	return info, err
}

// Exists reports whether there is something under a name.
func (OS) Exists(name string) (bool, error) {
	_, err := os.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// Mkdir creates a folder.
func (d OS) Mkdir(name string) error { return d.calls().Mkdir(name, 0o755) }

// SyncDir writes the names in a folder to the disk.
func (d OS) SyncDir(name string) error {
	f, err := d.calls().OpenFile(name, os.O_RDONLY|syscall.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return d.calls().Sync(f)
}

// List returns the names in a folder.
func (d OS) List(name string) ([]string, error) {
	f, err := d.calls().OpenFile(name, os.O_RDONLY|syscall.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.Readdirnames(-1)
}

// Rename renames a file or a folder.
func (d OS) Rename(from, to string) error { return d.calls().Rename(from, to) }

// Remove removes a file or an empty folder.
func (d OS) Remove(name string) error { return d.calls().Remove(name) }

// RemoveAll removes a file, or a folder with everything in it.
func (OS) RemoveAll(name string) error { return os.RemoveAll(name) }

// lockFile is the file of a lock. It holds a number instead of an *os.File, which the
// garbage collector would close.
type lockFile struct {
	fd    int
	name  string
	calls *Calls
}

// OpenLock opens the file of a lock. It follows no link and never shortens a file.
func (d OS) OpenLock(name string) (file LockFile, created bool, err error) {
	const flags = syscall.O_RDWR | syscall.O_NOFOLLOW | syscall.O_CLOEXEC | syscall.O_NONBLOCK
	f := &lockFile{name: name, calls: d.calls()}
	f.fd, err = retry(func() (int, error) { return f.calls.Open(name, flags|syscall.O_CREAT|syscall.O_EXCL, 0o644) })
	if created = err == nil; errors.Is(err, fs.ErrExist) {
		f.fd, err = retry(func() (int, error) { return f.calls.Open(name, flags, 0) })
	}
	switch {
	case errors.Is(err, syscall.ELOOP) && isLink(name): // otherwise the folder's own links are a ring
		return nil, false, &NotALockError{name, "is a link"}
	case errors.Is(err, syscall.EISDIR):
		return nil, false, &NotALockError{name, "is a folder"}
	case err != nil:
		return nil, false, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	var s syscall.Stat_t
	if err = syscall.Fstat(f.fd, &s); err == nil && s.Mode&syscall.S_IFMT != syscall.S_IFREG {
		err = &NotALockError{name, "is no regular file"}
	}
	if err != nil {
		f.Close()
		return nil, false, err
	}
	return f, created, nil
}

func isLink(name string) bool {
	info, err := os.Lstat(name)
	return err == nil && info.Mode()&fs.ModeSymlink != 0
}

// retry calls a function again if a signal interrupted it.
func retry(call func() (int, error)) (n int, err error) {
	for {
		if n, err = call(); !errors.Is(err, syscall.EINTR) {
			return n, err
		}
	}
}

// TryLock takes the lock, which belongs to the open file.
func (f *lockFile) TryLock() (bool, error) {
	_, err := retry(func() (int, error) { return 0, f.calls.Flock(f.fd, syscall.LOCK_EX|syscall.LOCK_NB) })
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, err
}

// Current compares the file with what the name leads to now.
func (f *lockFile) Current() (bool, error) {
	var ours, there syscall.Stat_t
	if err := syscall.Fstat(f.fd, &ours); err != nil {
		return false, err
	}
	err := syscall.Lstat(f.name, &there)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && ours.Dev == there.Dev && ours.Ino == there.Ino, err
}

// Shared reports whether the file has another name too.
func (f *lockFile) Shared() (bool, error) {
	var s syscall.Stat_t
	err := syscall.Fstat(f.fd, &s)
	return s.Nlink > 1, err
}

// Read returns the beginning of the file, enough to see that it is no lock.
func (f *lockFile) Read() ([]byte, error) {
	text := make([]byte, longestOwner+4)
	n, err := retry(func() (int, error) { return syscall.Pread(f.fd, text, 0) })
	return text[:max(n, 0)], err
}

// Write replaces the contents.
func (f *lockFile) Write(text []byte) error {
	if _, err := retry(func() (int, error) { return 0, syscall.Ftruncate(f.fd, 0) }); err != nil || len(text) == 0 {
		return err
	}
	_, err := retry(func() (int, error) { return syscall.Pwrite(f.fd, text, 0) })
	return err
}

// Close closes the file, which ends the lock.
func (f *lockFile) Close() error { return syscall.Close(f.fd) }
