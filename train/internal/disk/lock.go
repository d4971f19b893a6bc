// This file owns the lock of a run's folder.

package disk

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"github.com/stowage-dev/stowage/internal/input"
)

// LockName is the file in a run's folder that is locked. It stays when the lock ends: a
// file that is removed could be locked by a process that nobody else can see.
const LockName = "lock"

// longestOwner is the length of the longest contents of a lock: a process number.
const longestOwner = 20

// LockedError reports that another process holds the lock of a folder.
type LockedError struct {
	Dir string
	PID int // zero if it is not known
}

// Error says who uses the folder and what to do.
func (e *LockedError) Error() string {
	who := "another process"
	if e.PID > 0 {
		who = fmt.Sprintf("process %d", e.PID)
	}
	return fmt.Sprintf("%s is in use by %s: wait until it ends, stop it, or choose another folder", e.Dir, who)
}

// NotALockError reports that the name of a lock is taken by something else, which is left
// as it is.
type NotALockError struct{ Path, Why string }

// Error says what is there and what to do.
func (e *NotALockError) Error() string {
	return fmt.Sprintf("%s is not the lock of a run: it %s; move it, or choose another folder", e.Path, e.Why)
}

// LostError reports that somebody removed the file of a lock that is held. Another
// process may have taken a lock of its own, so the folder is no longer this process's.
type LostError struct{ Dir string }

// Error says what happened and what to do.
func (e *LostError) Error() string {
	return fmt.Sprintf("somebody removed %s while a run used the folder, and another process may write to it now; stop the others, and resume the run", filepath.Join(e.Dir, LockName))
}

// Lock is the right to write to a folder:
//
//  1. Claim takes it.
//  2. Held returns a *LostError if somebody removed the file of the lock.
//  3. Close or Abandon ends it. The lock of a process that dies ends too; nothing else
//     ends it.
type Lock struct {
	disk FS
	dir  string
	file LockFile
	made []string // what Claim made, the innermost last
}

// claims limits how often Claim begins anew because another process removed the folder or
// the lock that it gave up.
const claims = 100

// Claim makes a folder if it is missing and takes its lock. It reads and changes nothing
// else. It returns a *LockedError if another process holds the lock. If it fails, it
// removes the folders that it made and that nobody else uses.
func Claim(d FS, dir string) (l *Lock, err error) {
	l = &Lock{disk: d, dir: filepath.Clean(dir)}
	var missing error
	for range claims {
		made, err := MakeAll(d, l.dir)
		l.made = append(l.made, made...)
		what := "create the folder"
		if err == nil {
			var ok bool
			what = "lock"
			if ok, err = l.take(); ok {
				return l, nil
			}
		}
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			missing = err
			continue
		}
		l.removeMade()
		var held *LockedError
		var strange *NotALockError
		if errors.As(err, &held) || errors.As(err, &strange) {
			return nil, err
		}
		return nil, fmt.Errorf("cannot %s %s: %w; choose a folder that you may write to", what, l.dir, input.Cause(err))
	}
	if len(l.made) == 0 && missing != nil { // nothing vanished, because nothing could be made
		return nil, fmt.Errorf("cannot create the folder %s: %w; if it is a link, create the folder that it names, or choose a folder that can be created", l.dir, input.Cause(missing))
	}
	l.removeMade()
	return nil, fmt.Errorf("the folder %s vanishes again and again: another process removes it; choose another folder", l.dir)
}

// take tries to take the lock. It returns false and no error if the file was removed
// meanwhile or had another name.
func (l *Lock) take() (ok bool, err error) {
	path := filepath.Join(l.dir, LockName)
	file, created, err := l.disk.OpenLock(path)
	if err != nil {
		return false, err
	}
	defer func() {
		if !ok {
			file.Close()
		}
	}()
	mine, err := file.TryLock()
	if err != nil {
		return false, err
	}
	text, err := file.Read()
	if err != nil {
		return false, err
	}
	pid, isOwner := owner(text)
	if !mine {
		return false, &LockedError{l.dir, pid}
	}
	// The process that held it before may have removed the name between opening and
	// locking: then this locks a file that nobody else can find.
	if current, err := file.Current(); err != nil || !current {
		return false, err
	}
	shared, err := file.Shared()
	switch {
	case err != nil:
		return false, err
	case !isOwner && shared:
		return false, &NotALockError{path, "is a file that has another name too"}
	case !isOwner:
		return false, &NotALockError{path, "holds something else than a process number"}
	case shared:
		// The folder was copied with hard links, and the copy has the same file. Each gets
		// a lock of its own. Nobody else removes the name while this process has the lock.
		return false, l.disk.Remove(path)
	}
	_ = file.Write([]byte(strconv.Itoa(os.Getpid()) + "\n")) // for people; a full disk does not prevent the lock
	l.file = file
	if created {
		l.made = append(l.made, path)
	}
	return true, nil
}

// owner returns the process in the contents of a lock, and whether a lock has such
// contents.
func owner(text []byte) (pid int, ok bool) {
	text = bytes.Trim(text, "\x00 \n") // zeros are what a loss of power may leave
	if len(text) == 0 {
		return 0, true
	}
	pid, err := strconv.Atoi(string(text))
	return pid, err == nil && pid > 0
}

// Dir returns the folder that is locked.
func (l *Lock) Dir() string { return l.dir }

// Held returns a *LostError if the lock's file was removed or replaced.
func (l *Lock) Held() error {
	current, err := l.file.Current()
	switch {
	case err != nil:
		return fmt.Errorf("cannot check the lock of %s: %w", l.dir, input.Cause(err))
	case !current:
		return &LostError{l.dir}
	}
	return nil
}

// Close ends the lock. Its file stays.
func (l *Lock) Close() error {
	_ = l.file.Write(nil) // a wrong number is for people, and they see it only while another process begins
	if err := l.file.Close(); err != nil {
		return fmt.Errorf("cannot unlock %s: %w", l.dir, input.Cause(err))
	}
	return nil
}

// Abandon ends the lock and removes what Claim made, unless something else is in it.
func (l *Lock) Abandon() error {
	if l.Held() == nil {
		l.removeMade() // the lock first, while it is held
	}
	return l.Close()
}

// removeMade removes what Claim made. A folder that holds something stays.
func (l *Lock) removeMade() {
	for i := len(l.made) - 1; i >= 0; i-- {
		_ = l.disk.Remove(l.made[i])
	}
	l.made = nil
}
