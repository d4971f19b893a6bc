// Package checkpoint keeps the state of a run on disk. A kill at any moment, a full disk
// or a damaged file loses no more than the steps since the last complete checkpoint.
//
// A run's folder has
//
//	checkpoints/lock                            held while a run writes
//	checkpoints/step-00000123/checkpoint.json   step, layout, settings, checksums
//	checkpoints/step-00000123/model-00001-of-00004.safetensors
//	checkpoints/step-00000123/optim-00001-of-00004.safetensors
//	checkpoints/tmp-...                         what is being written or removed
//
// Save writes a checkpoint under a temporary name and renames it when all of it is on
// the disk. A folder whose name begins with "step-" is therefore complete, unless the
// disk damaged it later; checksums detect that. No file points to the newest checkpoint:
// it is the highest step that verifies. Save removes old checkpoints only after a new one
// is complete.
//
// This file owns the store and its lock.
package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// DefaultKeep is how many checkpoints stay if Options.Keep is zero.
const DefaultKeep = 2

const (
	folder    = "checkpoints"
	lockName  = "lock"
	stepName  = "step-"
	temporary = "tmp-"
)

// Options says where checkpoints are kept, and how many.
type Options struct {
	Dir  string            // the run's folder, which holds "checkpoints"
	Keep int               // how many complete ones stay; zero is DefaultKeep
	Warn func(text string) // gets one sentence for what went wrong and was passed over; nil drops it
	FS   FS                // nil is the disk
}

func (o Options) fs() FS {
	if o.FS == nil {
		return Disk{}
	}
	return o.FS
}

func (o Options) folder() string { return filepath.Join(o.Dir, folder) }

func (o Options) warn(format string, args ...any) {
	if o.Warn != nil {
		o.Warn(fmt.Sprintf(format, args...))
	}
}

// Store is the right to write a run's checkpoints. One goroutine uses it at a
// time:
//
//  1. Open takes the lock. It fails if another run holds it.
//  2. Save writes a checkpoint. A run may call it any number of times.
//  3. Close releases the lock. The lock of a process that dies is released too.
type Store struct {
	Options
	disk FS
	lock io.Closer
}

// Open makes missing folders and takes the lock. It writes nothing else. If it fails, it
// leaves nothing behind except the folders.
func Open(o Options) (*Store, error) {
	if o.Keep < 0 {
		return nil, fmt.Errorf("expected Keep to be 1 or more, or 0 for the default of %d, got %d", DefaultKeep, o.Keep)
	}
	if o.Keep == 0 {
		o.Keep = DefaultKeep
	}
	s := &Store{Options: o, disk: o.fs()}
	if err := makeFolder(s.disk, o.folder()); err != nil {
		return nil, fmt.Errorf("cannot create the folder %s: %w; choose a folder that you may write to", o.folder(), cause(err))
	}
	lock, err := s.disk.Lock(filepath.Join(o.folder(), lockName))
	var held *LockedError
	switch {
	case errors.As(err, &held):
		return nil, fmt.Errorf("%s is in use by %v: wait until it ends, stop it, or choose another folder", o.Dir, held)
	case err != nil:
		return nil, fmt.Errorf("cannot lock %s: %w; choose a folder that you may write to", o.folder(), cause(err))
	}
	s.lock = lock
	return s, nil
}

// Close releases the lock.
func (s *Store) Close() error {
	if err := s.lock.Close(); err != nil {
		return fmt.Errorf("cannot unlock %s: %w", s.folder(), cause(err))
	}
	return nil
}

// Steps returns the steps that have a checkpoint, from the lowest to the highest. It does
// not verify them. It returns none if the folder does not exist.
func Steps(o Options) ([]int, error) {
	names, err := o.fs().List(o.folder())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("cannot read the folder %s: %w", o.folder(), cause(err))
	}
	var steps []int
	for _, name := range names {
		digits, ok := strings.CutPrefix(name, stepName)
		step, err := strconv.Atoi(digits)
		if ok && err == nil && step >= 0 && name == nameOf(step) {
			steps = append(steps, step)
		}
	}
	slices.Sort(steps)
	return steps, nil
}

// Latest opens the newest checkpoint of the store that verifies; see [Latest].
func (s *Store) Latest() (*Checkpoint, error) { return Latest(s.Options) }

func nameOf(step int) string { return fmt.Sprintf("%s%08d", stepName, step) }

// makeFolder makes the folder of checkpoints. Another program may have made the folder
// above it, and that folder may not be on the disk yet: without the two syncs, a loss of
// power could remove it with all checkpoints in it. A missing right to read the folder
// above prevents its sync, but not writing here, so that error is ignored.
func makeFolder(disk FS, dir string) error {
	if err := makeAll(disk, dir); err != nil {
		return err
	}
	run := filepath.Dir(dir)
	if err := disk.SyncDir(run); err != nil {
		return err
	}
	if err := disk.SyncDir(filepath.Dir(run)); !errors.Is(err, fs.ErrPermission) {
		return err
	}
	return nil
}

// makeAll makes a folder and those above it. It syncs each before it uses it.
func makeAll(disk FS, dir string) error {
	err := disk.Mkdir(dir)
	switch parent := filepath.Dir(dir); {
	case err == nil:
		return disk.SyncDir(parent)
	case errors.Is(err, fs.ErrExist):
		return nil // if it is a file, using it says so
	case errors.Is(err, fs.ErrNotExist) && parent != dir:
		if err := makeAll(disk, parent); err != nil {
			return err
		}
		if err := disk.Mkdir(dir); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		return disk.SyncDir(parent)
	}
	return err
}

// cause removes the operation and the path that the os package puts before an error. The
// errors of this package name the path themselves.
func cause(err error) error {
	var path *fs.PathError
	var link *os.LinkError
	switch {
	case errors.As(err, &path):
		return path.Err
	case errors.As(err, &link):
		return link.Err
	}
	return err
}
