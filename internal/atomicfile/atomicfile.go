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

// Write replaces the file at path with what write writes. It writes a temporary file in
// the same folder and renames it. The error names path.
func Write(path string, write func(io.Writer) error) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return fmt.Errorf("cannot write %s: %w", path, cause(err))
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
			err = fmt.Errorf("cannot write %s: %w", path, cause(err))
		}
	}()
	b := bufio.NewWriterSize(f, 1<<20)
	if err = write(b); err == nil {
		err = b.Flush()
	}
	if err == nil {
		err = f.Chmod(0o644)
	}
	if end := f.Close(); err == nil {
		err = end
	}
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
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
