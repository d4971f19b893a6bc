// Package input reads files that users name. It bounds what such a file can cost, so that
// a mistyped path or a hostile file ends in a sentence and neither hangs nor takes the
// machine's memory.
//
// This file owns opening and reading files, yaml.go parsing YAML, json.go the words
// for JSON that cannot be read, and number.go numbers. Package
// encoding/json bounds depth itself and takes memory in proportion to the text, so the
// size of a file is all that JSON needs.
package input

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"strings"
	"syscall"

	"github.com/stowage-dev/stowage/memory"
)

// Settings is the most bytes of a file of settings: options, arguments, a config.json.
const Settings = 4 << 20

// errors of things that are no files. The sentence around them names the path.
var (
	errDevice   = errors.New("it is a device; expected a file")
	errSocket   = errors.New("it is a socket; expected a file")
	errNoWriter = errors.New("it is a pipe that nothing writes to; expected a file")
	errFolder   = errors.New("it is a folder; expected a file")
	errPointer  = errors.New("it is a pointer of Git LFS in the place of a file; get the file with git lfs pull")
)

// mostPointer is more than a pointer of Git LFS has.
const mostPointer = 1024

// CheckPointer returns an error if the text of a file is that of a pointer of Git LFS, which stands for a file that was
// not fetched.
func CheckPointer(text []byte) error {
	if len(text) < mostPointer && bytes.HasPrefix(text, []byte("version https://git-lfs.")) {
		return errPointer
	}
	return nil
}

// tooLarge reports a file beyond the limit of its reader.
type tooLarge struct{ most int64 }

func (e tooLarge) Error() string {
	return fmt.Sprintf("it is larger than %s, the most that is read of such a file", memory.Bytes(e.most).Short())
}

// File is a file that is open for reading. Reads beyond its limit fail.
type File struct {
	f    *os.File
	name string
	size int64 // of a regular file, else 0
	left int64
	most int64
	pipe bool
	some bool // whether anything was read
}

// Open opens a file of at most most bytes; 0 stands for no limit. It returns an error at
// once if the name is that of a device, a socket or a folder, or if a regular file is too
// large. A pipe is read if a program has it open for writing, as a shell's <(command)
// has; Open does not wait for one. All errors are of type *fs.PathError.
func Open(name string, most int64) (*File, error) {
	if most == 0 {
		most = math.MaxInt64 - 1
	}
	// Without O_NONBLOCK the kernel waits until somebody writes to a pipe.
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, syscall.ENXIO) { // a socket, or a device that is not there
		if info, cannot := os.Stat(name); cannot == nil && check(info, most) != nil {
			err = &fs.PathError{Op: "open", Path: name, Err: check(info, most)}
		}
	}
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil {
		err = check(info, most)
	}
	if err != nil {
		f.Close() // nothing was written
		return nil, &fs.PathError{Op: "open", Path: name, Err: Cause(err)}
	}
	in := &File{f: f, name: name, left: most, most: most, pipe: info.Mode()&fs.ModeNamedPipe != 0}
	if info.Mode().IsRegular() {
		in.size = info.Size()
	}
	return in, nil
}

// check returns an error if something cannot be read as a file.
func check(info fs.FileInfo, most int64) error {
	switch mode := info.Mode(); {
	case mode.IsDir():
		return errFolder
	case mode&fs.ModeDevice != 0:
		return errDevice
	case mode&fs.ModeSocket != 0:
		return errSocket
	case mode.IsRegular() && info.Size() > most:
		return tooLarge{most}
	}
	return nil
}

// Read reads from the file. It returns an error in place of the first byte beyond the
// limit.
func (f *File) Read(p []byte) (int, error) {
	if int64(len(p)) > f.left+1 {
		p = p[:f.left+1]
	}
	n, err := f.f.Read(p)
	if int64(n) > f.left {
		return int(f.left), &fs.PathError{Op: "read", Path: f.name, Err: tooLarge{f.most}}
	}
	f.left -= int64(n)
	f.some = f.some || n > 0
	if err == io.EOF && f.pipe && !f.some {
		err = &fs.PathError{Op: "read", Path: f.name, Err: errNoWriter}
	}
	return n, err
}

// Size returns the size of a regular file, and 0 for a pipe.
func (f *File) Size() int64 { return f.size }

// Close closes the file.
func (f *File) Close() error { return f.f.Close() }

// WithoutMark returns a text without the mark that some editors put before UTF-8.
func WithoutMark(text []byte) []byte { return bytes.TrimPrefix(text, []byte("\ufeff")) }

// ReadFile returns the text in a file of at most most bytes, under the rules of Open. It
// leaves out the mark that some editors put before UTF-8.
func ReadFile(name string, most int64) ([]byte, error) {
	f, err := Open(name, most)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	// One byte more than the size finds the end without growing.
	data := make([]byte, 0, f.size+1)
	for {
		n, err := f.Read(data[len(data):cap(data)])
		data = data[:len(data)+n]
		if err == io.EOF {
			if err := CheckPointer(data); err != nil {
				return nil, &fs.PathError{Op: "read", Path: name, Err: err}
			}
			return WithoutMark(data), nil
		}
		if err != nil {
			return nil, err
		}
		if len(data) == cap(data) {
			data = append(data, 0)[:len(data)]
		}
	}
}

// Cause returns an error of the file system without the operation and the path that the os
// package puts before it, for a sentence that names the path itself. It names the limit of
// the shell that the error comes from.
func Cause(err error) error {
	var path *fs.PathError
	var link *os.LinkError
	switch {
	case errors.As(err, &path):
		err = path.Err
	case errors.As(err, &link):
		err = link.Err
	}
	if inner, ok := err.(*fs.PathError); ok { // os.RemoveAll puts the error of a listing into its own
		err = inner.Err
	}
	switch err {
	case syscall.EMFILE:
		return fmt.Errorf("%w (ulimit -n allows no more)", err)
	case syscall.EFBIG:
		return fmt.Errorf("%w (ulimit -f allows no more)", err)
	}
	return err
}

// Denied returns what to do about a file of a run that may not be read or written, as the end of a sentence. It returns
// nothing if another thing is wrong.
func Denied(err error) string {
	switch {
	case errors.Is(err, fs.ErrPermission):
		return "; give this user the right to it"
	case errors.Is(err, syscall.EROFS):
		return "; choose a folder that can be written to"
	}
	return ""
}

// Hub returns a hint, as the end of a sentence, about the file of a model that is not there
// and that may be meant as a name at a hub, such as org/model, or as an address.
func Hub(name string, err error) string {
	known := strings.HasSuffix(name, ".json") || strings.HasSuffix(name, ".yaml") || strings.HasSuffix(name, ".yml")
	if known && !strings.Contains(name, "://") || !strings.Contains(strings.TrimSuffix(name, "/"), "/") || !errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	return "; nothing is downloaded, so give a folder with its config.json"
}
