// This file owns reading: it finds the newest checkpoint that verifies and warns of each
// that does not.

package checkpoint

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"sync"
	"syscall"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/train/internal/checkpoint/safetensors"
	"github.com/stowage-dev/stowage/train/internal/disk"
)

// ErrNone is matched by the error of Latest if there is no checkpoint at all, not even a
// damaged one.
var ErrNone = errors.New("there is no checkpoint")

// maxManifest limits what is read before anything is checked.
const maxManifest = 64 << 20

// Checkpoint is a checkpoint that verified: every file has the right length and
// checksum, and every header is valid.
type Checkpoint struct {
	Meta
	Ranks int
	Path  string // its folder
	disk  disk.FS
}

// Latest verifies checkpoints from the highest step down and returns the first that is
// complete. It warns of each damaged checkpoint that it skips. It changes nothing and
// needs no lock. It returns an error that matches ErrNone if there is no checkpoint, and
// another error if all are damaged, or if one cannot be read before a complete one is found:
// that one may be whole, and a run that went on from an older one would write over it.
func Latest(o Options) (*Checkpoint, error) {
	steps, err := Steps(o)
	if err != nil {
		return nil, err
	}
	if len(steps) == 0 {
		return nil, fmt.Errorf("%w in %s: start a new run, or resume from another folder", ErrNone, o.folder())
	}
	for i, step := range slices.Backward(steps) {
		c, err := open(o, step)
		if err == nil {
			return c, nil
		}
		path := filepath.Join(o.folder(), nameOf(step))
		if isRefused(err) {
			err = fmt.Errorf("the checkpoint %s may be whole and was not read: %w%s", path, err, input.Denied(err))
			if i > 0 {
				return nil, fmt.Errorf("%w; then resume again, or move the checkpoint out of %s to resume from an older one", err, o.folder())
			}
			return nil, fmt.Errorf("%w; then resume again", err)
		}
		o.warn("skipping the checkpoint %s: %v", path, err)
	}
	if len(steps) == 1 {
		return nil, fmt.Errorf("the only checkpoint in %s is damaged: start a new run in another folder", o.folder())
	}
	return nil, fmt.Errorf("all %d checkpoints in %s are damaged: start a new run in another folder", len(steps), o.folder())
}

// isRefused reports whether a file that is there was not read, so that it may be whole: a
// missing permission, too many open files, a disk that does not answer, another version.
func isRefused(err error) bool {
	var refused syscall.Errno
	var other *otherVersion
	return errors.As(err, &other) || errors.As(err, &refused) && refused != syscall.ENOENT && refused != syscall.ENOTDIR
}

// open verifies the checkpoint of one step.
func open(o Options, step int) (*Checkpoint, error) {
	d, path := o.fs(), filepath.Join(o.folder(), nameOf(step))
	f, err := d.Open(filepath.Join(path, manifestName))
	if err != nil {
		return nil, fmt.Errorf("%s cannot be opened: %w", manifestName, input.Cause(err))
	}
	defer f.Close()
	if f.Size() > maxManifest {
		return nil, fmt.Errorf("%s has %d bytes; expected at most %d", manifestName, f.Size(), maxManifest)
	}
	text, err := io.ReadAll(io.NewSectionReader(f, 0, f.Size()))
	if err != nil {
		return nil, fmt.Errorf("%s cannot be read: %w", manifestName, input.Cause(err))
	}
	m, err := parseManifest(text, step)
	if err != nil {
		return nil, err
	}
	errs := make([]error, len(m.Files))
	var wait sync.WaitGroup
	for i, want := range m.Files {
		wait.Go(func() { errs[i] = verify(d, filepath.Join(path, want.Name), want) })
	}
	wait.Wait()
	for i, err := range errs {
		if err != nil {
			return nil, fmt.Errorf("%s %w", m.Files[i].Name, err)
		}
	}
	return &Checkpoint{Meta: m.Meta, Ranks: m.Ranks, Path: path, disk: d}, nil
}

// verify reads a whole file and compares its length, checksum and header.
func verify(d disk.FS, path string, want File) error {
	f, err := d.Open(path)
	if err != nil {
		return fmt.Errorf("cannot be opened: %w", input.Cause(err))
	}
	defer f.Close()
	if f.Size() != want.Bytes {
		return fmt.Errorf("has %d bytes; expected %d", f.Size(), want.Bytes)
	}
	h := sha256.New()
	if _, err := io.CopyBuffer(h, io.NewSectionReader(f, 0, f.Size()), make([]byte, min(buffer, f.Size()+1))); err != nil {
		return fmt.Errorf("cannot be read: %w", input.Cause(err))
	}
	if hex.EncodeToString(h.Sum(nil)) != want.SHA256 {
		return errors.New("is damaged: its checksum does not match")
	}
	if _, err := safetensors.NewReader(f, f.Size()); err != nil {
		return fmt.Errorf("is damaged: %w", err)
	}
	return nil
}

// Tensors is an open file of a checkpoint.
type Tensors struct {
	*safetensors.Reader
	io.Closer
}

// Model opens the weights of a rank. It panics if the checkpoint has no such rank.
func (c *Checkpoint) Model(rank int) (*Tensors, error) { return c.tensors(model, rank) }

// Optim opens the optimiser's state of a rank. It panics if the checkpoint has no such
// rank.
func (c *Checkpoint) Optim(rank int) (*Tensors, error) { return c.tensors(optim, rank) }

func (c *Checkpoint) tensors(k kind, rank int) (*Tensors, error) {
	if rank < 0 || rank >= c.Ranks {
		panic(fmt.Sprintf("checkpoint: rank %d is not one of the checkpoint's %d", rank, c.Ranks))
	}
	path := filepath.Join(c.Path, fileName(k, rank, c.Ranks))
	f, err := c.disk.Open(path)
	if err != nil {
		return nil, fmt.Errorf("cannot open %s: %w", path, input.Cause(err))
	}
	r, err := safetensors.NewReader(f, f.Size())
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("cannot read %s: %w", path, input.Cause(err))
	}
	return &Tensors{r, f}, nil
}
