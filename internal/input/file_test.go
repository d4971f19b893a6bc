package input_test

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stowage-dev/stowage/internal/input"
)

// pipe makes a named pipe and returns its name.
func pipe(t *testing.T) string {
	name := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(name, 0o600); err != nil {
		t.Skip(err)
	}
	return name
}

// What is no file is an error at once: nothing waits, and nothing is read without end.
func TestNoFile(t *testing.T) {
	dir, err := os.MkdirTemp("", "s") // the path of a socket is short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	socket, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	large := filepath.Join(t.TempDir(), "large")
	if err := os.WriteFile(large, make([]byte, 101), 0o600); err != nil {
		t.Fatal(err)
	}
	wanted := map[string]string{
		"/dev/zero":                   "it is a device; expected a file",
		"/dev/null":                   "it is a device; expected a file",
		pipe(t):                       "it is a pipe that nothing writes to; expected a file",
		socket.Addr().String():        "it is a socket; expected a file",
		dir:                           "it is a folder; expected a file",
		large:                         "it is larger than 100 B, the most that is read of such a file",
		filepath.Join(dir, "missing"): "no such file or directory",
	}
	if _, err := os.Stat("/dev/tty"); err == nil { // without a terminal it cannot be opened
		wanted["/dev/tty"] = "it is a device; expected a file"
	}
	for name, want := range wanted {
		_, err := input.ReadFile(name, 100)
		var path *fs.PathError
		if !errors.As(err, &path) || path.Path != name || input.Cause(err).Error() != want {
			t.Errorf("%s: %v, want %s", name, err, want)
		}
	}
}

func TestReadFile(t *testing.T) {
	name := filepath.Join(t.TempDir(), "f")
	for _, size := range []int{0, 1, 511, 512, 513, 5000} {
		want := bytes.Repeat([]byte{'x'}, size)
		if err := os.WriteFile(name, want, 0o600); err != nil {
			t.Fatal(err)
		}
		for _, most := range []int64{int64(size), int64(size) + 1, 0} {
			if most == 0 && size == 0 {
				continue
			}
			if got, err := input.ReadFile(name, most); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d bytes within %d: %d, %v", size, most, len(got), err)
			}
		}
	}
	// Such files have no size.
	if got, err := input.ReadFile("/proc/self/status", 1<<20); err != nil && !errors.Is(err, fs.ErrNotExist) || err == nil && len(got) == 0 {
		t.Errorf("%d, %v", len(got), err)
	}
}

// A pipe that a program writes to is read like a file, and within the limit.
func TestPipe(t *testing.T) {
	for _, size := range []int{3, 100_000} {
		name := pipe(t)
		// A file that is open for both does not wait for a reader.
		w, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		f, err := input.Open(name, 1000)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_, _ = w.Write(make([]byte, size))
			w.Close()
		}()
		var got bytes.Buffer
		_, err = got.ReadFrom(f)
		switch {
		case size < 1000 && (err != nil || got.Len() != size):
			t.Errorf("%d of %d bytes, %v", got.Len(), size, err)
		case size > 1000 && (err == nil || !strings.Contains(err.Error(), "larger than 1000 B") || got.Len() != 1000):
			t.Errorf("%d bytes, %v", got.Len(), err)
		}
		f.Close()
		w.Close()
	}
}

// An error names the limit of the shell that it comes from.
func TestCause(t *testing.T) {
	for err, want := range map[error]string{
		&fs.PathError{Op: "open", Path: "p", Err: unix.EMFILE}:            "too many open files (ulimit -n allows no more)",
		&os.LinkError{Op: "rename", Old: "p", New: "q", Err: unix.EACCES}: "permission denied",
		&fs.PathError{Op: "write", Path: "p", Err: unix.EFBIG}:            "file too large (ulimit -f allows no more)",
	} {
		if got := input.Cause(err); got.Error() != want || !errors.Is(got, errors.Unwrap(err)) {
			t.Errorf("%v gives %v", err, got)
		}
	}
}

// Removing a folder that cannot be listed fails with an error of the listing inside that of the
// removal, which has a path of its own.
func TestCauseOfANestedError(t *testing.T) {
	inner := &fs.PathError{Op: "readdirent", Path: "old", Err: unix.EMFILE}
	for _, err := range []error{&fs.PathError{Op: "unlinkat", Path: "/run/old", Err: inner}, &os.LinkError{Op: "rename", Old: "a", New: "b", Err: inner}} {
		if got := input.Cause(err); !errors.Is(got, unix.EMFILE) || got.Error() != "too many open files (ulimit -n allows no more)" {
			t.Errorf("the cause of %v is %v", err, got)
		}
	}
}

func TestDenied(t *testing.T) {
	for err, want := range map[error]string{
		&fs.PathError{Op: "open", Path: "p", Err: unix.EACCES}: "; give this user the right to it",
		&fs.PathError{Op: "open", Path: "p", Err: unix.EPERM}:  "; give this user the right to it",
		&fs.PathError{Op: "open", Path: "p", Err: unix.EROFS}:  "; choose a folder that can be written to",
		&fs.PathError{Op: "open", Path: "p", Err: unix.EIO}:    "",
		fs.ErrNotExist: "",
	} {
		if got := input.Denied(err); got != want {
			t.Errorf("%v gives %q, want %q", err, got, want)
		}
	}
}

// A file may have as many bytes as the limit, and one more is an error that names it, whether the
// size is known before or not.
func TestLimitOfBytes(t *testing.T) {
	name := filepath.Join(t.TempDir(), "file")
	for _, x := range []struct {
		size, most int
		open, read bool
	}{{9, 10, true, true}, {10, 10, true, true}, {11, 10, false, false}, {11, 0, true, true}, {0, 10, true, true}} {
		if err := os.WriteFile(name, make([]byte, x.size), 0o644); err != nil {
			t.Fatal(err)
		}
		f, err := input.Open(name, int64(x.most))
		if (err == nil) != x.open {
			t.Fatalf("%+v: %v", x, err)
		}
		if err != nil {
			var path *fs.PathError
			if !errors.As(err, &path) || path.Path != name || path.Op != "open" || !strings.Contains(err.Error(), "it is larger than") {
				t.Errorf("%+v: %v", x, err)
			}
			continue
		}
		if f.Size() != int64(x.size) {
			t.Errorf("%+v has size %d", x, f.Size())
		}
		got, err := io.ReadAll(f)
		if len(got) != x.size || err != nil {
			t.Errorf("%+v: %d bytes, %v", x, len(got), err)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
	// The file grows after it was opened.
	for _, piece := range []int{1, 7, 11, 100} {
		if err := os.WriteFile(name, make([]byte, 5), 0o644); err != nil {
			t.Fatal(err)
		}
		f, err := input.Open(name, 10)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, make([]byte, 25), 0o644); err != nil {
			t.Fatal(err)
		}
		total := 0
		for err == nil {
			var n int
			n, err = f.Read(make([]byte, piece))
			total += n
		}
		var path *fs.PathError
		if total != 10 || !errors.As(err, &path) || path.Path != name || path.Op != "read" || !strings.Contains(err.Error(), "it is larger than") {
			t.Errorf("in pieces of %d: %d bytes, %v", piece, total, err)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Only a name that may be one of a hub, or an address, gets the hint.
func TestHub(t *testing.T) {
	for name, want := range map[string]bool{
		"org/model": true, "org/model/": true, "https://x.y/config.json": true, "model": false, "model/": false,
		"a/config.json": false, "a/config.yaml": false, "a/config.yml": false, "a/config.toml": true,
	} {
		if got := input.Hub(name, fs.ErrNotExist) != ""; got != want {
			t.Errorf("%s has a hint: %v", name, got)
		}
		if input.Hub(name, fs.ErrPermission) != "" {
			t.Errorf("%s has a hint though it is there", name)
		}
	}
}

// A pointer of Git LFS stands for a file that was not fetched.
func TestPointer(t *testing.T) {
	name := filepath.Join(t.TempDir(), "f")
	const text = "version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 7\n"
	for text, pointer := range map[string]bool{text: true, text + strings.Repeat("x", 2000): false, "version 1\n": false, " " + text: false} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		_, err := input.ReadFile(name, 0)
		var path *fs.PathError
		if (err != nil) != pointer || pointer && (!errors.As(err, &path) || !strings.Contains(err.Error(), "git lfs pull")) {
			t.Errorf("%.30q: %v", text, err)
		}
	}
}
