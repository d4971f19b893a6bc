// This file owns the tests of replacing files.

package atomicfile

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "a")
	for _, text := range []string{"first", "second"} {
		if err := WriteBytes(file, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(file); err != nil || string(got) != text {
			t.Fatalf("the file has %q, %v; want %q", got, err, text)
		}
	}
	failed := errors.New("no more ink")
	err := Write(file, func(w io.Writer) error {
		_, _ = io.WriteString(w, "half")
		return failed
	})
	if !errors.Is(err, failed) || !strings.Contains(err.Error(), file) {
		t.Errorf("the error is %v", err)
	}
	if got, _ := os.ReadFile(file); string(got) != "second" {
		t.Errorf("a failed write left %q", got)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("files left behind: %v", left)
	}
	err = WriteBytes(filepath.Join(dir, "nowhere", "a"), nil)
	if err == nil || strings.Count(err.Error(), "nowhere") != 1 {
		t.Errorf("the error is %v", err)
	}
}

// Whatever fails, the old file stays, nothing else is left, and nothing stays open.
func TestNothingIsLeftByAFailure(t *testing.T) {
	failed := errors.New("broken")
	for what, fail := range map[string]func(*File){
		"rename": func(x *File) { x.rename = func(string, string) error { return failed } },
		"link": func(x *File) {
			if x.link != nil {
				x.link = func() (string, error) { return "", failed }
			} else {
				x.rename = func(string, string) error { return failed }
			}
		},
		"write":  func(x *File) { x.b.Reset(broken{failed}) },
		"folder": func(x *File) { x.syncDir = func(string) error { return failed } },
		"sync":   func(x *File) { x.syncDir, x.out = func(string) error { return nil }, unsynced{x.out, failed} },
		"close":  func(x *File) { x.out = unclosed{x.out, failed} },
	} {
		dir := t.TempDir()
		file := filepath.Join(dir, "a")
		if err := WriteBytes(file, []byte("old")); err != nil {
			t.Fatal(err)
		}
		x, err := Create(file)
		if err != nil {
			t.Fatal(err)
		}
		fail(x)
		if _, err := io.WriteString(x, "new"); err != nil {
			t.Fatal(err)
		}
		if err := x.Commit(); !errors.Is(err, failed) || !strings.Contains(err.Error(), file) {
			t.Errorf("%s: the error is %v", what, err)
		}
		x.Discard() // as callers defer it
		want := "old"
		if what == "folder" {
			want = "new" // it is there already
		}
		text, err := os.ReadFile(file)
		left, _ := os.ReadDir(dir)
		if string(text) != want || err != nil || len(left) != 1 {
			t.Errorf("%s: the file has %q, %v, and the folder %v", what, text, err, left)
		}
	}
}

// A file whose permissions cannot be given to the new one stays, and nothing else is left.
func TestPermissionsThatCannotBeGiven(t *testing.T) {
	file := filepath.Join(t.TempDir(), "a")
	if err := WriteBytes(file, []byte("old")); err != nil {
		t.Fatal(err)
	}
	failed := errors.New("no permissions here")
	made := -1
	x := &File{path: file, remove: os.Remove, chmod: func(f *os.File, _ os.FileMode) error {
		made = int(f.Fd())
		return failed
	}}
	err := x.create()
	if _, closed := unix.FcntlInt(uintptr(made), unix.F_GETFD, 0); !errors.Is(err, failed) || !errors.Is(closed, unix.EBADF) {
		t.Errorf("%v; the new file is closed: %v", err, closed)
	}
	text, err := os.ReadFile(file)
	if left, _ := os.ReadDir(filepath.Dir(file)); string(text) != "old" || err != nil || len(left) != 1 {
		t.Errorf("the file has %q, %v, and the folder %v", text, err, left)
	}
}

type broken struct{ err error }

func (b broken) Write([]byte) (int, error) { return 0, b.err }

type unsynced struct {
	Output
	err error
}

func (u unsynced) Sync() error { return u.err }

type unclosed struct {
	Output
	err error
}

func (u unclosed) Close() error { return errors.Join(u.Output.Close(), u.err) }

// A check finds what a write would, and leaves nothing behind.
func TestCheck(t *testing.T) {
	dir := t.TempDir()
	for path, want := range map[string]string{
		filepath.Join(dir, "a"): "", "/dev/null": "",
		dir:                                "it is a folder",
		filepath.Join(dir, "none", "a"):    "no such file or directory",
		filepath.Join("/dev", "null", "a"): "not a directory",
	} {
		err := Check(path)
		if (err == nil) != (want == "") || err != nil && !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("files left behind: %v", left)
	}
}

// A device is written to and not replaced; a link stays, and so do permissions.
func TestWhatStays(t *testing.T) {
	if err := WriteBytes("/dev/null", []byte("x")); err != nil {
		t.Error(err)
	}
	if info, err := os.Stat("/dev/null"); err != nil || info.Mode().IsRegular() {
		t.Fatalf("/dev/null is %v, %v", info.Mode(), err)
	}
	if err := WriteBytes("/dev/full", []byte("x")); err == nil || !strings.Contains(err.Error(), "cannot write /dev/full: no space left") {
		t.Errorf("the error is %v", err)
	}
	dir := t.TempDir()
	file, link, nowhere := filepath.Join(dir, "a"), filepath.Join(dir, "link"), filepath.Join(dir, "nowhere")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, target := range map[string]string{link: "a", nowhere: "b"} {
		if err := os.Symlink(target, name); err != nil {
			t.Fatal(err)
		}
		if err := WriteBytes(name, []byte(target)); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(dir, target))
		if info, _ := os.Lstat(name); err != nil || string(text) != target || info.Mode()&os.ModeSymlink == 0 {
			t.Errorf("%s: %q, %v, %v", name, text, err, info.Mode())
		}
	}
	if info, _ := os.Stat(file); info.Mode().Perm() != 0o600 {
		t.Errorf("the permissions are %v", info.Mode())
	}
}

// A new file has the permissions that the umask leaves, and a replaced one keeps its own.
func TestPermissions(t *testing.T) {
	for mask, want := range map[int]os.FileMode{0o022: 0o644, 0o077: 0o600, 0o002: 0o664} {
		before := unix.Umask(mask)
		file := filepath.Join(t.TempDir(), "a")
		err := WriteBytes(file, []byte("new"))
		unix.Umask(before)
		info, cannot := os.Stat(file)
		if err != nil || cannot != nil || info.Mode().Perm() != want {
			t.Fatalf("umask %03o: %v, %v, %v", mask, info, err, cannot)
		}
		if err := errors.Join(os.Chmod(file, 0o640), WriteBytes(file, []byte("newer"))); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o640 {
			t.Errorf("a replaced file: %v, %v", info.Mode(), err)
		}
	}
}

// A pipe is written if something reads it. Nothing waits for a reader.
func TestPipe(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Skip(err)
	}
	if err := WriteBytes(pipe, []byte("text")); err == nil || !strings.HasSuffix(err.Error(), "pipe: it is a pipe that nothing reads; read it, or move it") {
		t.Errorf("without a reader: %v", err)
	}
	in, err := os.OpenFile(pipe, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if err := WriteBytes(pipe, []byte("text")); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(in); string(got) != "text" || err != nil {
		t.Errorf("the reader got %q, %v", got, err)
	}
}

// A link to a pipe that has no name is written, as /dev/stdout is in `command | less`.
func TestPipeWithoutName(t *testing.T) {
	in, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	link := filepath.Join(t.TempDir(), "link")
	err = os.Symlink(fmt.Sprintf("/proc/self/fd/%d", out.Fd()), link)
	if err == nil {
		err = Check(link)
	}
	if err == nil {
		err = WriteBytes(link, []byte("text"))
	}
	out.Close()
	if got, _ := io.ReadAll(in); err != nil || string(got) != "text" {
		t.Errorf("got %q, %v", got, err)
	}
}
