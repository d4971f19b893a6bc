// This file owns the tests of temporary files.

package atomicfile

import (
	"bufio"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// A process that is killed before Commit leaves nothing behind, because its temporary file
// has no name.
func TestNothingIsLeftByAKill(t *testing.T) {
	dir := t.TempDir()
	if f := createUnnamed(dir); f == nil {
		t.Skip("this file system has no files without a name")
	} else if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := Create(filepath.Join(dir, "a"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write([]byte("text")); err != nil {
		t.Fatal(err)
	}
	if err := f.b.Flush(); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); len(left) != 0 || err != nil || f.Temporary() != "" {
		t.Errorf("a kill would leave %v, %v, %q", left, err, f.Temporary())
	}
	if err := f.Commit(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "a"))
	if left, _ := os.ReadDir(dir); string(text) != "text" || err != nil || len(left) != 1 {
		t.Errorf("the file has %q, %v, and the folder %v", text, err, left)
	}
}

// On a file system without unnamed files the temporary file has a name until Commit or
// Discard.
func TestNamedTemporary(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	for _, commit := range []bool{false, true} {
		f := &File{path: path, to: path, rename: os.Rename, remove: os.Remove}
		out, err := f.createNamedTemporary()
		if err != nil {
			t.Fatal(err)
		}
		if left, _ := os.ReadDir(dir); len(left) != 1 || f.Temporary() != filepath.Join(dir, left[0].Name()) || f.link != nil {
			t.Errorf("the temporary file is %q, and the folder has %v", f.Temporary(), left)
		}
		f.out, f.b = out, bufio.NewWriter(out)
		if _, err := f.Write([]byte("text")); err != nil {
			t.Fatal(err)
		}
		if commit {
			if err := f.Commit(); err != nil {
				t.Fatal(err)
			}
		}
		f.Discard()
		left, _ := os.ReadDir(dir)
		if text, _ := os.ReadFile(path); commit && (string(text) != "text" || len(left) != 1) || !commit && len(left) != 0 {
			t.Errorf("commit %v: the file has %q, and the folder %v", commit, text, left)
		}
	}
}

// A temporary name that is taken is not used, and another error is not tried again.
func TestNewNames(t *testing.T) {
	full := errors.New("full")
	for tries, want := range map[int]error{1: nil, 2: nil, 100: nil, 101: fs.ErrExist, 7: full} {
		names := map[string]bool{}
		err := withNewName("folder/a", func(name string) error {
			names[name] = true
			if dir, base := filepath.Split(name); dir != "folder/" || !strings.HasPrefix(base, ".a-") {
				t.Errorf("a name is %s", name)
			}
			if len(names) < tries {
				return fs.ErrExist
			}
			return want
		})
		if !errors.Is(err, want) || len(names) != min(tries, 100) {
			t.Errorf("%d names were tried, want %d; %v, want %v", len(names), min(tries, 100), err, want)
		}
	}
}

// A file may have a name of any length up to the longest that there is.
func TestLongName(t *testing.T) {
	dir := t.TempDir()
	long := filepath.Join(dir, strings.Repeat("ä", 127))
	for n := 190; n <= 255; n++ {
		for _, letter := range []string{"a", "ä"} {
			path := filepath.Join(dir, strings.Repeat("b", n%len(letter))+strings.Repeat(letter, n/len(letter)))
			if err := WriteBytes(path, []byte("text")); err != nil {
				t.Fatalf("a name of %d bytes: %v", n, err)
			}
			f, err := createNamed(path)
			if err != nil {
				t.Fatalf("a name of %d bytes: %v", n, err)
			}
			if err := f.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	if err := Check(long + "ää"); err == nil || !strings.HasSuffix(err.Error(), "file name too long") {
		t.Errorf("a name that is too long: %v", err)
	}
}

// A file behind as many links as Linux follows is replaced.
func TestChainOfLinks(t *testing.T) {
	dir := t.TempDir()
	name := func(i int) string { return filepath.Join(dir, strconv.Itoa(i)) }
	for i := range 39 {
		if err := os.Symlink(strconv.Itoa(i), name(i+1)); err != nil {
			t.Fatal(err)
		}
	}
	if err := WriteBytes(name(39), []byte("x")); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(name(0)); err != nil || string(text) != "x" {
		t.Errorf("%q, %v", text, err)
	}
}

// A link that leads to itself is an error, and stays.
func TestLinkToItself(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	if err := os.Symlink("b", a); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("a", b); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{Check(a), WriteBytes(a, []byte("x"))} {
		if err == nil || !strings.HasSuffix(err.Error(), "too many levels of symbolic links") {
			t.Errorf("the error is %v", err)
		}
	}
	for _, link := range []string{a, b} {
		if _, err := os.Readlink(link); err != nil {
			t.Error(err)
		}
	}
}

// folder is a file system of which a call fails, and every later one as well if the process is killed by it.
type folder struct {
	left  int // calls until then
	once  bool
	calls []string
	err   error // what failed
}

var errKilled = errors.New("killed")

func (f *folder) call(what, name string) error {
	f.calls = append(f.calls, what)
	if f.left--; f.left >= 0 || f.once && f.err != nil {
		return nil
	}
	f.err = &fs.PathError{Op: what, Path: name, Err: errKilled}
	return f.err
}

func (f *folder) Create(name string) (Output, error) {
	if err := f.call("create", name); err != nil {
		return nil, err
	}
	out, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	return output{out, f}, err
}

func (f *folder) Rename(from, to string) error {
	if err := f.call("rename", from); err != nil {
		return err
	}
	return os.Rename(from, to)
}

func (f *folder) RemoveAll(name string) error {
	if err := f.call("remove", name); err != nil {
		return err
	}
	return os.RemoveAll(name)
}

func (f *folder) SyncDir(name string) error { return f.call("sync folder", name) }

// output is a file in a folder. What it was told is not on the disk if a call fails, or half of it.
type output struct {
	*os.File
	f *folder
}

func (o output) Write(p []byte) (int, error) {
	if err := o.f.call("write", o.Name()); err != nil {
		n, _ := o.File.Write(p[:len(p)/2])
		return n, err
	}
	return o.File.Write(p)
}

func (o output) Sync() error { return o.f.call("sync", o.Name()) }

func (o output) Close() error {
	return errors.Join(o.f.call("close", o.Name()), o.File.Close())
}

// long is a text that is written in several pieces.
var long = []byte(strings.Repeat("new", 5000))

// A process that is killed at any call of Replace leaves the old text or the new one, and the next process replaces it,
// whatever the killed one left beside it.
func TestReplaceAfterAKill(t *testing.T) {
	for calls := 0; ; calls++ {
		dir := t.TempDir()
		name := filepath.Join(dir, "a")
		if err := Replace(&folder{left: 100}, name, []byte("old")); err != nil {
			t.Fatal(err)
		}
		killed := Replace(&folder{left: calls}, name, long)
		if text, err := os.ReadFile(name); err != nil || string(text) != "old" && string(text) != string(long) {
			t.Errorf("killed after %d calls: %.20q, %v", calls, text, err)
		}
		if err := Replace(&folder{left: 100}, name, []byte("last")); err != nil {
			t.Errorf("after a process that was killed after %d calls: %v", calls, err)
		}
		text, err := os.ReadFile(name)
		if left, _ := os.ReadDir(dir); err != nil || string(text) != "last" || len(left) != 1 {
			t.Errorf("after a process that was killed after %d calls: %.20q, %v, and %v is left", calls, text, err, left)
		}
		if killed == nil {
			break
		}
	}
}

// If any one call of Replace fails, the error says so and names the file that was asked for alone. The file has the old
// text, or the new one if only syncing the folder has failed, and nothing is left beside it.
func TestReplaceWhenOneCallFails(t *testing.T) {
	for _, text := range [][]byte{[]byte("new"), long} {
		for calls := 0; ; calls++ {
			dir := t.TempDir()
			name := filepath.Join(dir, "a")
			if err := os.WriteFile(name, []byte("old"), 0o600); err != nil {
				t.Fatal(err)
			}
			f := &folder{left: calls, once: true}
			err := Replace(f, name, text)
			if f.err == nil {
				if err != nil || calls < 7 {
					t.Errorf("without a failure: %v, %v", err, f.calls)
				}
				break
			}
			failed, want := f.calls[calls], "old"
			if failed == "sync folder" {
				want = string(text)
			}
			var said *fs.PathError
			if !errors.As(err, &said) || !errors.Is(err, errKilled) || err.Error() != "write "+name+": killed" {
				t.Errorf("%s failed: %v", failed, err)
			}
			got, err := os.ReadFile(name)
			if left, _ := os.ReadDir(dir); err != nil || string(got) != want || len(left) != 1 {
				t.Errorf("%s failed: %.20q, %v, and %v is left", failed, got, err, left)
			}
		}
	}
}
