package disk

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stowage-dev/stowage/internal/leak"
)

// recorded returns system calls that are written to a log and then made. The one whose
// entry is in broken fails.
func recorded(dir string, log *[]string, broken string) *Calls {
	real := SystemCalls()
	short := func(name string) string {
		if rel, err := filepath.Rel(dir, name); err == nil {
			return rel
		}
		return name
	}
	note := func(words ...string) error {
		call := strings.Join(words, " ")
		*log = append(*log, call)
		if call == broken {
			return syscall.EIO
		}
		return nil
	}
	return &Calls{
		OpenFile: func(name string, flag int, perm fs.FileMode) (*os.File, error) {
			what := "open"
			if flag&os.O_CREATE != 0 {
				what = "create"
			}
			return fine(note(what, short(name)), func() (*os.File, error) { return real.OpenFile(name, flag, perm) })
		},
		Write: func(f *os.File, p []byte) (int, error) {
			return fine(note("write", short(f.Name())), func() (int, error) { return real.Write(f, p) })
		},
		Sync:  func(f *os.File) error { return errors.Join(note("fsync", short(f.Name())), real.Sync(f)) },
		Close: func(f *os.File) error { return errors.Join(note("close", short(f.Name())), real.Close(f)) },
		Mkdir: func(name string, perm fs.FileMode) error {
			return errors.Join(note("mkdir", short(name)), real.Mkdir(name, perm))
		},
		Rename: func(from, to string) error {
			if err := note("rename", short(from), short(to)); err != nil {
				return err
			}
			return real.Rename(from, to)
		},
		Remove: func(name string) error { return errors.Join(note("remove", short(name)), real.Remove(name)) },
		Open: func(name string, flag int, perm uint32) (int, error) {
			if flag&syscall.O_NOFOLLOW == 0 || flag&syscall.O_TRUNC != 0 || flag&syscall.O_CLOEXEC == 0 {
				return 0, fmt.Errorf("the lock is opened with %#x", flag)
			}
			return fine(note("open", short(name)), func() (int, error) { return real.Open(name, flag, perm) })
		},
		Flock: func(fd, how int) error { return errors.Join(note("flock"), real.Flock(fd, how)) },
	}
}

func fine[T any](err error, call func() (T, error)) (x T, _ error) {
	if err != nil {
		return x, err
	}
	return call()
}

// What the real disk is asked to do, in order: data are synced before the name that leads
// to them, and each folder after a name in it changed.
func TestSystemCalls(t *testing.T) {
	dir := t.TempDir()
	var log []string
	d := OS{recorded(dir, &log, "")}
	check := func(what string, want ...string) {
		t.Helper()
		if !slices.Equal(log, want) {
			t.Errorf("%s:\n%s\nwant\n%s", what, strings.Join(log, "\n"), strings.Join(want, "\n"))
		}
		log = nil
	}
	l, err := Claim(d, filepath.Join(dir, "a", "run"))
	if err != nil {
		t.Fatal(err)
	}
	check("claiming a new folder",
		"mkdir a/run", "mkdir a", "open .", "fsync .", "mkdir a/run", "open a", "fsync a", "open a/run/lock", "flock")
	file := filepath.Join(dir, "a", "run", "config")
	if err := WriteFile(d, file, []byte("x")); err != nil {
		t.Fatal(err)
	}
	check("replacing a file",
		"create a/run/.config.tmp", "write a/run/.config.tmp", "fsync a/run/.config.tmp", "close a/run/.config.tmp", "rename a/run/.config.tmp a/run/config", "open a/run", "fsync a/run")
	out, err := d.Append(file, 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := out.Write([]byte("y")); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(out.Sync(), out.Close()); err != nil {
		t.Fatal(err)
	}
	check("appending", "create a/run/config", "write a/run/config", "fsync a/run/config", "close a/run/config")
	if text, err := os.ReadFile(file); err != nil || string(text) != "xy" {
		t.Errorf("the file has %q, %v", text, err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	// Each call that fails is an error, and leaves the file that was there.
	for _, broken := range []string{
		"create a/run/.config.tmp", "write a/run/.config.tmp", "fsync a/run/.config.tmp", "close a/run/.config.tmp", "rename a/run/.config.tmp a/run/config", "open a/run", "fsync a/run",
	} {
		d := OS{recorded(dir, &log, broken)}
		err := WriteFile(d, file, []byte("new"))
		text, _ := os.ReadFile(file)
		if named := strings.HasSuffix(broken, " a/run"); !errors.Is(err, syscall.EIO) || string(text) != "xy" && !named {
			t.Errorf("%s fails: %v, and the file has %q", broken, err, text)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, "a/run/.*")); len(left) > 0 {
			t.Errorf("%s fails and leaves %q", broken, left)
		}
		if err := os.WriteFile(file, []byte("xy"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// Something else under the name of a lock is refused and left as it is.
func TestNotALock(t *testing.T) {
	dir := t.TempDir()
	precious := filepath.Join(dir, "precious")
	for what, make := range map[string]func(lock string) error{
		"is a link":                         func(lock string) error { return os.Symlink(precious, lock) },
		"that has another name":             func(lock string) error { return os.Link(precious, lock) },
		"is no regular file":                func(lock string) error { return syscall.Mkfifo(lock, 0o644) },
		"holds something else than a proce": func(lock string) error { return os.WriteFile(lock, []byte("12 parsecs"), 0o644) },
		"lock of a run: it is a folder;":    func(lock string) error { return os.Mkdir(lock, 0o755) },
	} {
		if err := os.WriteFile(precious, []byte("years of work"), 0o644); err != nil {
			t.Fatal(err)
		}
		run := filepath.Join(dir, "run")
		lock := filepath.Join(run, LockName)
		if err := errors.Join(os.Mkdir(run, 0o755), make(lock)); err != nil {
			t.Fatal(err)
		}
		before, _ := os.Lstat(lock)
		l, err := Claim(OS{}, run)
		var strange *NotALockError
		if !errors.As(err, &strange) || err.Error() != strange.Error() || !strings.Contains(err.Error(), what) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, %v", what, l, err)
		}
		after, statErr := os.Lstat(lock)
		if text, err := os.ReadFile(precious); err != nil || string(text) != "years of work" || statErr != nil || before.Size() != after.Size() {
			t.Errorf("%s: the other file has %q, %v, and the lock is %v", what, text, err, after)
		}
		if err := os.RemoveAll(run); err != nil {
			t.Fatal(err)
		}
	}
}

// A folder is copied with hard links: both can be used, also at once, and a lock that is
// held stays held.
func TestCopyWithHardLinks(t *testing.T) {
	dir := t.TempDir()
	run, backup := filepath.Join(dir, "run"), filepath.Join(dir, "backup")
	first, err := Claim(OS{}, run)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Mkdir(backup, 0o755), os.Link(filepath.Join(run, LockName), filepath.Join(backup, LockName))); err != nil {
		t.Fatal(err)
	}
	var held *LockedError
	for _, dir := range []string{run, backup} {
		if l, err := Claim(OS{}, dir); !errors.As(err, &held) {
			t.Fatalf("%s is locked, and was claimed with %v, %v", dir, l, err)
		}
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	a, err := Claim(OS{}, backup)
	if err != nil {
		t.Fatal(err)
	}
	b, err := Claim(OS{}, run)
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{run, backup} {
		if l, err := Claim(OS{}, dir); !errors.As(err, &held) || held.PID != os.Getpid() {
			t.Errorf("%s was claimed twice: %v, %v", dir, l, err)
		}
	}
	if err := errors.Join(a.Held(), b.Held(), a.Close(), b.Close()); err != nil {
		t.Error(err)
	}
}

// Writing to a file leaves the copy of it that a hard link made.
func TestAppendBesideAHardLink(t *testing.T) {
	for _, size := range []int64{0, 3, 6, 8} {
		dir := t.TempDir()
		file, backup := filepath.Join(dir, "metrics"), filepath.Join(dir, "backup")
		if err := errors.Join(os.WriteFile(file, []byte("before"), 0o644), os.Link(file, backup)); err != nil {
			t.Fatal(err)
		}
		out, err := OS{}.Append(file, size)
		if err != nil {
			t.Fatal(err)
		}
		_, err = out.Write([]byte("+"))
		text, _ := os.ReadFile(file)
		kept, _ := os.ReadFile(backup)
		if want := ("before\x00\x00"[:size] + "+"); errors.Join(err, out.Close()) != nil || string(text) != want || string(kept) != "before" {
			t.Errorf("cut to %d: the file has %q, want %q; the copy has %q, %v", size, text, want, kept, err)
		}
	}
}

// A lock that nothing points to is held until the process ends.
func TestLockIsNotCollected(t *testing.T) {
	dir := t.TempDir()
	fd := func() int {
		l, err := Claim(OS{}, dir)
		if err != nil {
			t.Fatal(err)
		}
		return l.file.(*lockFile).fd
	}()
	defer syscall.Close(fd)
	for range 3 {
		runtime.GC()
		runtime.Gosched()
	}
	var held *LockedError
	if l, err := Claim(OS{}, dir); !errors.As(err, &held) || held.PID != os.Getpid() {
		t.Errorf("the lock was taken twice: %v, %v", l, err)
	}
}

// A lock that has ended names no process, and one that is abandoned leaves nothing.
func TestEndOfALock(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	for _, end := range []func(*Lock) error{(*Lock).Abandon, (*Lock).Close} {
		l, err := Claim(OS{}, dir)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, LockName)
		if text, err := os.ReadFile(path); err != nil || string(text) != fmt.Sprintln(os.Getpid()) {
			t.Errorf("a lock that is held has %q, %v", text, err)
		}
		if err := end(l); err != nil {
			t.Error(err)
		}
		if text, err := os.ReadFile(path); len(text) > 0 || err != nil && exists(dir) {
			t.Errorf("a lock that has ended has %q, %v", text, err)
		}
	}
	if !exists(filepath.Join(dir, LockName)) {
		t.Error("closing a lock removed its file")
	}
}

// What an abandoned lock made is removed while the lock is held: the next process would lose
// its own.
func TestAbandonWhileHeld(t *testing.T) {
	calls, removed := SystemCalls(), 0
	dir := filepath.Join(t.TempDir(), "run")
	calls.Remove = func(name string) error {
		removed++
		fd, err := syscall.Open(filepath.Join(dir, LockName), syscall.O_RDWR, 0)
		if err == nil {
			err = errors.Join(syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB), syscall.Close(fd))
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && removed == 1 {
			t.Errorf("%s is removed while another process can take the lock: %v", name, err)
		}
		return os.Remove(name)
	}
	l, err := Claim(OS{Calls: &calls}, dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Abandon(); err != nil || removed != 2 || exists(dir) {
		t.Errorf("%d removed, %v", removed, err)
	}
}

// A lock whose file somebody removed leaves the lock of the process that has the folder now.
func TestAbandonALostLock(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	path := filepath.Join(dir, LockName)
	lost, err := Claim(OS{}, dir)
	if err == nil {
		err = os.Remove(path)
	}
	if err != nil {
		t.Fatal(err)
	}
	l, err := Claim(OS{}, dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := lost.Abandon(); err != nil {
		t.Error(err)
	}
	if err := l.Held(); err != nil {
		t.Error(err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

// A lock holds the number of a process, or nothing.
func TestOwner(t *testing.T) {
	for text, want := range map[string]int{"": 0, "\x00\x00\n": 0, "7": 7, "123456\n": 123456, "0": -1, "-7\n": -1, "7 8": -1, "x": -1, "99999999999999999999": -1} {
		if pid, ok := owner([]byte(text)); ok != (want >= 0) || ok && pid != want {
			t.Errorf("%q: %d, %v", text, pid, ok)
		}
	}
}

// Whatever lies at a path, and whichever call fails, nothing stays open but what the caller
// gets.
func TestNothingStaysOpen(t *testing.T) {
	dir := t.TempDir()
	paths := []string{os.DevNull, dir, filepath.Join(dir, "none"), filepath.Join(dir, "none", "none"), filepath.Join(dir, "link"), filepath.Join(dir, "twin")}
	if err := os.WriteFile(filepath.Join(dir, "twin"), []byte("text"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Link(filepath.Join(dir, "twin"), filepath.Join(dir, "other")), os.Symlink("nowhere", filepath.Join(dir, "link"))); err != nil {
		t.Fatal(err)
	}
	before := leak.Files()
	ended := func(f interface{ Close() error }, err error) {
		if err == nil {
			f.Close()
		}
	}
	for fails := range 12 {
		n := 0
		faulty := func() error {
			if n++; n == fails {
				return syscall.EIO
			}
			return nil
		}
		c := SystemCalls()
		c.OpenFile = func(name string, flag int, perm fs.FileMode) (*os.File, error) {
			if err := faulty(); err != nil {
				return nil, err
			}
			return os.OpenFile(name, flag, perm)
		}
		c.Sync = func(*os.File) error { return faulty() }
		c.Write = func(f *os.File, p []byte) (int, error) { return len(p), faulty() }
		c.Flock = func(fd, how int) error { return cmp.Or(faulty(), syscall.Flock(fd, how)) }
		d := OS{&c}
		for _, path := range paths {
			for what, use := range map[string]func(){
				"Create": func() { ended(d.Create(path)) },
				"Append": func() { ended(d.Append(path, 2)) },
				"Open":   func() { ended(d.Open(path)) },
				"OpenLock": func() {
					f, _, err := d.OpenLock(path)
					ended(f, err)
				},
				"SyncDir": func() { _ = d.SyncDir(path) },
				"List":    func() { _, _ = d.List(path) },
				"Claim":   func() { ended(Claim(d, path)) },
				"Write":   func() { _ = WriteFile(d, path, []byte("text")) },
			} {
				if path == os.DevNull && what == "Write" {
					continue // it would be replaced
				}
				n = 0
				if use(); len(leak.Since(before)) > 0 {
					t.Fatalf("%s of %s with fault %d leaves %v open", what, path, fails, leak.Since(before))
				}
			}
		}
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// Many claims of a folder at once: one at a time has it, also while others make and remove
// folder and lock. SPEC S9.2
func TestClaimsAtOnce(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	var inside atomic.Int32
	var wait sync.WaitGroup
	for i := range 4 {
		wait.Go(func() {
			for round := 0; round < 25; {
				l, err := Claim(OS{}, dir)
				var held *LockedError
				if err != nil {
					if !errors.As(err, &held) {
						t.Errorf("refused with %v", err)
						return
					}
					runtime.Gosched()
					continue
				}
				if n := inside.Add(1); n > 1 {
					t.Errorf("%d have the lock", n)
				}
				if err := l.Held(); err != nil {
					t.Error(err)
				}
				round++
				runtime.Gosched()
				inside.Add(-1)
				end := l.Abandon
				if (i+round)%3 == 0 {
					end = l.Close
				}
				if err := end(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wait.Wait()
}

// A pipe under the name of a file does not block.
func TestPipes(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := (OS{}).Open(pipe); err == nil {
		t.Error("a pipe was opened for reading")
	}
	if _, err := (OS{}).Append(pipe, 0); err == nil {
		t.Error("a pipe was opened for writing")
	}
}

// An error names the file that was to be written, not the one that would take its place.
func TestWriteFileNamesTheFile(t *testing.T) {
	name := filepath.Join(t.TempDir(), "config")
	if err := os.MkdirAll(filepath.Join(name, "folder"), 0o755); err != nil {
		t.Fatal(err)
	}
	err := WriteFile(OS{}, name, []byte("x"))
	if err == nil || err.Error() != "write "+name+": it is a folder; move it" {
		t.Errorf("it says %v", err)
	}
}

// A folder that cannot be made is not said to vanish.
func TestClaimWithoutPlace(t *testing.T) {
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink("nowhere", link); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{link, "/proc/x"} {
		if _, err := Claim(OS{}, dir); err == nil || !strings.Contains(err.Error(), "cannot create the folder "+dir) {
			t.Errorf("%s: %v", dir, err)
		}
	}
}

// A folder whose links are a ring is not said to have a strange lock.
func TestClaimOfARing(t *testing.T) {
	ring := filepath.Join(t.TempDir(), "ring")
	if err := os.Symlink("ring", ring); err != nil {
		t.Fatal(err)
	}
	if _, err := Claim(OS{}, ring); !errors.Is(err, syscall.ELOOP) || !strings.HasPrefix(err.Error(), "cannot lock "+ring+": ") {
		t.Errorf("it says %v", err)
	}
}

// What is not there is no error of Exists, and all else is one of Exists, Open, List and SyncDir.
func TestNamesThatLeadNowhere(t *testing.T) {
	dir := t.TempDir()
	file, d := filepath.Join(dir, "file"), OS{}
	if err := os.WriteFile(file, []byte("text"), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{dir: true, file: true, filepath.Join(dir, "none"): false, filepath.Join(dir, "none", "x"): false} {
		if there, err := d.Exists(name); there != want || err != nil {
			t.Errorf("%s is there: %v, %v", name, there, err)
		}
	}
	long := filepath.Join(dir, strings.Repeat("x", 300))
	for _, name := range []string{filepath.Join(file, "x"), long} { // through a file; too long
		if there, err := d.Exists(name); there || err == nil {
			t.Errorf("%s is there: %v, %v", name, there, err)
		}
	}
	for _, name := range []string{filepath.Join(dir, "none"), long} {
		if f, err := d.Open(name); err == nil || f != nil {
			t.Errorf("%s is opened: %v, %v", name, f, err)
		}
	}
	for _, name := range []string{filepath.Join(dir, "none"), file} {
		if names, err := d.List(name); err == nil || names != nil {
			t.Errorf("%s has %v, %v", name, names, err)
		}
		if err := d.SyncDir(name); err == nil {
			t.Errorf("%s is synced as a folder", name)
		}
	}
	if f, err := d.Open(dir); err == nil || f != nil || !strings.Contains(err.Error(), "no regular file") {
		t.Errorf("a folder is opened: %v, %v", f, err)
	}
	f, err := d.Open(file)
	if err != nil || f.Size() != 4 {
		t.Fatalf("%v, %v", f, err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"/", filepath.Join(dir, "a", "b")} {
		made, err := MakeAll(d, name)
		if want := strings.Count(strings.TrimPrefix(name, dir), "/"); err != nil || name != "/" && len(made) != want || name == "/" && len(made) != 0 {
			t.Errorf("%s: made %v, %v", name, made, err)
		}
	}
}
