// This file tests errors that the system returns and what is read at most.

package disk

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// Every error of a lock's file reaches the caller.
func TestErrorsOfALockFile(t *testing.T) {
	f := &lockFile{fd: -1, name: filepath.Join(t.TempDir(), "lock"), calls: OS{}.calls()}
	for name, call := range map[string]func() error{
		"TryLock": func() error { ok, err := f.TryLock(); return unless(ok, err) }, "Current": func() error { ok, err := f.Current(); return unless(ok, err) },
		"Shared": func() error { ok, err := f.Shared(); return unless(ok, err) }, "Read": func() error { text, err := f.Read(); return unless(len(text) > 0, err) },
		"Write": func() error { return f.Write([]byte("1")) }, "Write nothing": func() error { return f.Write(nil) },
	} {
		if err := call(); !errors.Is(err, syscall.EBADF) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A file that can be read alone cannot be written to, and one that has gone is not current.
	if err := os.WriteFile(f.name, []byte("12345\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var err error
	if f.fd, err = syscall.Open(f.name, syscall.O_RDONLY|syscall.O_CLOEXEC, 0); err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(f.fd)
	if text, err := f.Read(); err != nil || string(text) != "12345\n" {
		t.Errorf("%q, %v", text, err)
	}
	if f.Write(nil) == nil || f.Write([]byte("1")) == nil {
		t.Error("a file that can only be read was written")
	}
	if current, err := f.Current(); !current || err != nil {
		t.Errorf("current: %t, %v", current, err)
	}
	f.name = filepath.Join(f.name, "below a file")
	if current, err := f.Current(); current || !errors.Is(err, syscall.ENOTDIR) {
		t.Errorf("current: %t, %v", current, err)
	}
}

// unless returns an error, or one that says that there is a result although there must be none.
func unless(result bool, err error) error {
	if result {
		return errors.New("there is a result")
	}
	return err
}

// Calls that a signal interrupts are made again, and others are not.
func TestRetry(t *testing.T) {
	calls := 0
	n, err := retry(func() (int, error) {
		if calls++; calls < 3 {
			return -1, syscall.EINTR
		}
		return 7, syscall.ENOSPC
	})
	if n != 7 || !errors.Is(err, syscall.ENOSPC) || calls != 3 {
		t.Errorf("%d, %v after %d calls", n, err, calls)
	}
}

// Files are read to a limit, and what cannot be opened or cut is an error that names it.
func TestErrorsOfFiles(t *testing.T) {
	dir := t.TempDir()
	name, missing := filepath.Join(dir, "f"), filepath.Join(dir, "no", "f")
	if err := os.WriteFile(name, []byte("0123456789"), 0o600); err != nil {
		t.Fatal(err)
	}
	for most, want := range map[int64]string{0: "", 4: "0123", 10: "0123456789", 99: "0123456789"} {
		if got, err := ReadFile(OS{}, name, most); err != nil || string(got) != want {
			t.Errorf("at most %d bytes: %q, %v", most, got, err)
		}
	}
	if out, err := (OS{}).Append(name, -1); err == nil || out != nil {
		t.Errorf("cut to less than nothing: %v", err)
	}
	if got, _ := os.ReadFile(name); string(got) != "0123456789" {
		t.Errorf("the file holds %q", got)
	}
	for what, err := range map[string]error{
		"read": second(ReadFile(OS{}, missing, 9)), "append": second(OS{}.Append(missing, 0)), "open": second(OS{}.Open(missing)), "create": second(OS{}.Create(missing)),
		"list": second(OS{}.List(missing)), "sync": OS{}.SyncDir(missing), "sync all": SyncAll(OS{}, missing), "lock": third(OS{}.OpenLock(missing)), "write": WriteFile(OS{}, missing, nil),
		"a lock": third(OS{}.OpenLock(filepath.Join(name, "below a file"))),
	} {
		var path *fs.PathError
		if !errors.As(err, &path) || path.Path == "" || filepath.Dir(path.Path) == "." {
			t.Errorf("%s: %#v", what, err)
		}
	}
	_, _, err := OS{}.OpenLock(missing)
	if want := "open " + missing + ": no such file or directory"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func second[T any](_ T, err error) error { return err }

func third[T, U any](_ T, _ U, err error) error { return err }

// A folder that another process holds is refused with that process, and one whose lock is
// something else with what it is, both as they are.
func TestRefusalsAsTheyAre(t *testing.T) {
	dir := t.TempDir()
	l, err := Claim(OS{}, dir)
	if err != nil {
		t.Fatal(err)
	}
	var held *LockedError
	if _, err := Claim(OS{}, dir); !errors.As(err, &held) || err != error(held) || held.PID != os.Getpid() || held.Dir != dir {
		t.Errorf("%#v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, LockName), []byte("a letter\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var strange *NotALockError
	if _, err := Claim(OS{}, dir); !errors.As(err, &strange) || err != error(strange) {
		t.Errorf("%#v", err)
	}
}
