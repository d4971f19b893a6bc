// This file owns the tests of temporary files.

package atomicfile

import (
	"bufio"
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
		out, err := createNamed(path)
		if err != nil {
			t.Fatal(err)
		}
		f := &File{path: path, to: path, work: out.Name(), out: out, b: bufio.NewWriter(out), rename: os.Rename, remove: os.Remove}
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
