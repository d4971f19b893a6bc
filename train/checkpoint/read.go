// This file owns reading: the newest checkpoint that verifies, with a sentence
// for each that does not.

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

	"github.com/stowage-dev/stowage/train/checkpoint/safetensors"
)

// ErrNone is matched by the error of Latest where there is no checkpoint, neither
// whole nor damaged.
var ErrNone = errors.New("there is no checkpoint")

// maxManifest bounds what is read before anything is checked.
const maxManifest = 64 << 20

// Checkpoint is one that verified: every file has its length and checksum, and
// every header is sound.
type Checkpoint struct {
	Meta
	Ranks int
	Path  string // its folder
	disk  FS
}

// Latest verifies checkpoints from the highest step down and gives the first that
// is whole. It passes over damaged ones with a warning each, changes nothing and
// needs no lock.
func Latest(o Options) (*Checkpoint, error) {
	steps, err := Steps(o)
	if err != nil {
		return nil, err
	}
	if len(steps) == 0 {
		return nil, fmt.Errorf("%w in %s: start a run without resuming, or give the folder of another one", ErrNone, o.folder())
	}
	for _, step := range slices.Backward(steps) {
		c, err := open(o, step)
		if err == nil {
			return c, nil
		}
		o.warn("the checkpoint %s is passed over: %v", filepath.Join(o.folder(), nameOf(step)), err)
	}
	return nil, fmt.Errorf("no checkpoint in %s is whole, of %d: start a run without resuming in another folder", o.folder(), len(steps))
}

// open verifies the checkpoint of one step.
func open(o Options, step int) (*Checkpoint, error) {
	disk, path := o.fs(), filepath.Join(o.folder(), nameOf(step))
	f, err := disk.Open(filepath.Join(path, manifestName))
	if err != nil {
		return nil, fmt.Errorf("%s cannot be opened: %w", manifestName, cause(err))
	}
	defer f.Close()
	if f.Size() > maxManifest {
		return nil, fmt.Errorf("%s has %d bytes, more than %d", manifestName, f.Size(), maxManifest)
	}
	text, err := io.ReadAll(io.NewSectionReader(f, 0, f.Size()))
	if err != nil {
		return nil, fmt.Errorf("%s cannot be read: %w", manifestName, cause(err))
	}
	m, err := parseManifest(text, step)
	if err != nil {
		return nil, err
	}
	errs := make([]error, len(m.Files))
	var wait sync.WaitGroup
	for i, want := range m.Files {
		wait.Go(func() { errs[i] = verify(disk, filepath.Join(path, want.Name), want) })
	}
	wait.Wait()
	for i, err := range errs {
		if err != nil {
			return nil, fmt.Errorf("%s %w", m.Files[i].Name, err)
		}
	}
	return &Checkpoint{Meta: m.Meta, Ranks: m.Ranks, Path: path, disk: disk}, nil
}

// verify reads the whole file.
func verify(disk FS, path string, want file) error {
	f, err := disk.Open(path)
	if err != nil {
		return fmt.Errorf("cannot be opened: %w", cause(err))
	}
	defer f.Close()
	if f.Size() != want.Bytes {
		return fmt.Errorf("has %d bytes instead of %d", f.Size(), want.Bytes)
	}
	h := sha256.New()
	if _, err := io.CopyBuffer(h, io.NewSectionReader(f, 0, f.Size()), make([]byte, min(buffer, f.Size()+1))); err != nil {
		return fmt.Errorf("cannot be read: %w", cause(err))
	}
	if hex.EncodeToString(h.Sum(nil)) != want.SHA256 {
		return errors.New("is damaged: its checksum is wrong")
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

// Model opens the weights of a rank, from zero. A rank that is not there panics.
func (c *Checkpoint) Model(rank int) (*Tensors, error) { return c.tensors(model, rank) }

// Optim opens the optimiser's state of a rank.
func (c *Checkpoint) Optim(rank int) (*Tensors, error) { return c.tensors(optim, rank) }

func (c *Checkpoint) tensors(k kind, rank int) (*Tensors, error) {
	if rank < 0 || rank >= c.Ranks {
		panic(fmt.Sprintf("checkpoint: rank %d is not one of the checkpoint's %d", rank, c.Ranks))
	}
	path := filepath.Join(c.Path, fileName(k, rank, c.Ranks))
	f, err := c.disk.Open(path)
	if err != nil {
		return nil, fmt.Errorf("cannot open %s: %w", path, cause(err))
	}
	r, err := safetensors.NewReader(f, f.Size())
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("cannot read %s: %w", path, err)
	}
	return &Tensors{r, f}, nil
}
