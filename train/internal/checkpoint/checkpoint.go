// Package checkpoint keeps the state of a run on disk. A kill at any moment, a full disk
// or a damaged file loses no more than the steps since the last complete checkpoint.
//
// A run's folder has
//
//	lock                                        held while a run uses the folder
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
// A checkpoint also holds the run's own description of itself, so that it alone is enough
// to resume the run.
//
// This file owns the store, save.go writing, saver.go writing in the background, read.go
// reading, and manifest.go checkpoint.json. The package safetensors owns the format of the other files.
package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/train/internal/disk"
)

// DefaultKeep is how many checkpoints stay if Options.Keep is zero.
const DefaultKeep = 2

const (
	folder    = "checkpoints"
	stepName  = "step-"
	temporary = "tmp-"
)

// Options says where checkpoints are kept, and how many.
type Options struct {
	Dir  string            // the run's folder, which holds "checkpoints"
	Keep int               // how many complete ones stay; zero is DefaultKeep
	Warn func(text string) // gets one sentence for what went wrong and was passed over; nil drops it
	FS   disk.FS           // nil is that of the operating system
	// Lock is the lock of the run's folder if the caller holds it already. The store then
	// leaves it to the caller.
	Lock *disk.Lock
	// Run describes the run to whoever resumes it. Every checkpoint holds it.
	Run json.RawMessage

	pace *pace // of writing; nil is as fast as possible
}

func (o Options) fs() disk.FS {
	if o.FS == nil {
		return disk.OS{}
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
//  3. Close releases the lock. The lock of a process that dies is released too, and that
//     of a store that is merely forgotten is not.
type Store struct {
	Options
	disk disk.FS
	own  bool // the lock is the store's
}

// Open takes the lock unless the caller holds it, and makes the folder of checkpoints. It
// reads and writes nothing before it has the lock.
func Open(o Options) (s *Store, err error) {
	if o.Keep < 0 {
		return nil, fmt.Errorf("expected Keep to be 1 or more, or 0 for the default of %d, got %d", DefaultKeep, o.Keep)
	}
	if o.Keep == 0 {
		o.Keep = DefaultKeep
	}
	s = &Store{Options: o, disk: o.fs(), own: o.Lock == nil}
	if s.own {
		if s.Lock, err = disk.Claim(s.disk, o.Dir); err != nil {
			return nil, err
		}
	}
	if err := makeFolder(s.disk, o.folder()); err != nil {
		err = fmt.Errorf("cannot create the folder %s: %w; choose a folder that you may write to", o.folder(), input.Cause(err))
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Close releases the lock if the store took it.
func (s *Store) Close() error {
	if !s.own {
		return nil
	}
	return s.Lock.Close()
}

// Steps returns the steps that have a checkpoint, from the lowest to the highest. It does
// not verify them. It returns none if the folder does not exist.
func Steps(o Options) ([]int, error) {
	names, err := o.fs().List(o.folder())
	switch {
	case errors.Is(err, syscall.ENOTDIR):
		return nil, fmt.Errorf("%s is no folder; move it, or choose another folder", o.folder())
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("cannot read the folder %s: %w%s", o.folder(), input.Cause(err), input.Denied(err))
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
func makeFolder(d disk.FS, dir string) error {
	if _, err := disk.MakeAll(d, dir); err != nil {
		return err
	}
	if _, err := d.List(dir); err != nil { // it is a file, or a link that leads nowhere
		return err
	}
	run := filepath.Dir(dir)
	if err := d.SyncDir(run); err != nil {
		return err
	}
	if err := d.SyncDir(filepath.Dir(run)); !errors.Is(err, fs.ErrPermission) {
		return err
	}
	return nil
}
