// This file owns temporary files. One without a name goes away with the process that wrote
// it, however that ends; only file systems that lack those get one with a name.

package atomicfile

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// createTemporary creates the temporary file of x in the folder of its target, and sets
// link or work.
func (x *File) createTemporary() (*os.File, error) {
	if f := createUnnamed(filepath.Dir(x.to)); f != nil {
		x.link = func() (string, error) {
			var name string
			err := withNewName(x.to, func(n string) error {
				name = n
				return giveName(f, n)
			})
			if err != nil {
				return "", err
			}
			return name, nil
		}
		return f, nil
	}
	return x.createNamedTemporary()
}

// createNamedTemporary is createTemporary on a file system without files that have no name.
func (x *File) createNamedTemporary() (*os.File, error) {
	f, err := createNamed(x.to)
	if err == nil {
		x.work = f.Name()
	}
	return f, err
}

// createUnnamed creates a file without a name, or returns nil if it cannot. The
// permissions are those of any new file.
func createUnnamed(dir string) *os.File {
	if unnamed == 0 {
		return nil
	}
	f, err := os.OpenFile(dir, os.O_RDWR|unnamed, 0o666)
	if err != nil {
		return nil
	}
	// Without /proc the file could not get a name later.
	if _, err := os.Stat(procName(f)); err != nil {
		f.Close() // nothing was written
		return nil
	}
	return f
}

// procName returns a path that leads to an open file.
func procName(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// createNamed creates a file with a new name beside path. Its permissions are those of any
// new file: os.CreateTemp would give it fewer, and the umask cannot be read safely.
func createNamed(path string) (f *os.File, err error) {
	err = withNewName(path, func(name string) error {
		f, err = os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666)
		return err
	})
	return f, err
}

// longest is the most bytes of a name that a temporary name repeats. Linux allows names of
// 255 bytes, and a temporary one has up to twelve more.
const longest = 200

// withNewName calls create with names beside path until one does not exist yet.
func withNewName(path string, create func(name string) error) (err error) {
	base := filepath.Base(path)
	if len(base) > longest {
		base = strings.ToValidUTF8(base[:longest], "")
	}
	prefix := filepath.Join(filepath.Dir(path), "."+base+"-")
	for range 100 {
		if err = create(prefix + strconv.FormatUint(uint64(rand.Uint32()), 10)); !errors.Is(err, fs.ErrExist) {
			break
		}
	}
	return err
}
