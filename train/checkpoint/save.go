// This file owns writing: all of a checkpoint beside the others, then its name,
// then the removal of what is too old.

package checkpoint

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/stowage-dev/stowage/train/checkpoint/safetensors"
)

// buffer is the memory of a file that is written or verified: enough that calls of
// the system cost nothing beside the copying.
const buffer = 1 << 20

// Shard is one file of a rank.
type Shard struct {
	Tensors []safetensors.Tensor // what it will hold
	// Write calls w.Write for every tensor in the order of Tensors, with data in
	// pieces of any size that Write does not keep. An error ends the checkpoint.
	Write func(w *safetensors.Writer) error
}

// Rank is what one rank saves. Ranks write at the same time, a rank its model
// before its optimiser.
type Rank struct{ Model, Optim Shard }

// Save writes a checkpoint of all ranks and removes those beyond Keep. After an
// error the checkpoints are those from before it. A step that has a whole
// checkpoint of the same layout and data is not written again. Damaged ones of this
// step or a later one go; a whole one of a later step is an error.
func (s *Store) Save(meta Meta, ranks []Rank) error {
	if meta.Step < 0 || len(ranks) == 0 {
		panic(fmt.Sprintf("checkpoint: step %d of %d ranks cannot be saved", meta.Step, len(ranks)))
	}
	there, damaged, err := s.later(meta)
	if there || err != nil {
		return err
	}
	s.clean()
	work := filepath.Join(s.folder(), temporary+nameOf(meta.Step))
	need, err := s.write(work, meta, ranks)
	if err == nil {
		err = s.publish(work, meta.Step, slices.Contains(damaged, meta.Step))
	}
	if err != nil {
		s.remove(work)
		return s.failed(meta.Step, need, err)
	}
	s.prune(meta.Step, damaged)
	return nil
}

// later looks at the checkpoints from this step on. There are some only if a run
// went back to an older one or another run was here.
func (s *Store) later(meta Meta) (there bool, damaged []int, err error) {
	steps, err := Steps(s.Options)
	if err != nil {
		return false, nil, err
	}
	for _, step := range steps {
		if step < meta.Step {
			continue
		}
		c, err := open(s.Options, step)
		switch {
		case err != nil:
			damaged = append(damaged, step)
		case step == meta.Step && same(c.Layout, meta.Layout) && same(c.Data, meta.Data):
			return true, nil, nil
		default:
			return false, nil, fmt.Errorf("%s has a checkpoint of step %d of another run already: resume from it, or give another folder", s.folder(), step)
		}
	}
	return false, damaged, nil
}

// same compares JSON but for white space.
func same(a, b json.RawMessage) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

// write writes all of a checkpoint into a new folder and gives the bytes that its
// tensors take.
func (s *Store) write(work string, meta Meta, ranks []Rank) (need int64, err error) {
	layouts := make([][kinds]*safetensors.Layout, len(ranks))
	for i, r := range ranks {
		for k, shard := range r.shards() {
			// Tools of Hugging Face open only files that name their framework.
			layouts[i][k] = safetensors.NewLayout(map[string]string{"format": "pt"}, shard.Tensors)
			need += layouts[i][k].Size()
		}
	}
	if err := s.disk.Mkdir(work); err != nil {
		return need, err
	}
	m := manifest{Version: Version, Meta: meta, Ranks: len(ranks), Files: make([]file, len(ranks)*int(kinds))}
	errs := make([]error, len(ranks))
	var wait sync.WaitGroup
	for i, r := range ranks {
		wait.Go(func() {
			for k, shard := range r.shards() {
				name := fileName(kind(k), i, len(ranks))
				l := layouts[i][k]
				sum, err := s.writeFile(filepath.Join(work, name), l.Size(), func(w io.Writer) error { return shard.write(w, l) })
				if err != nil {
					errs[i] = err
					return
				}
				m.Files[i*int(kinds)+k] = file{name, l.Size(), sum}
			}
		})
	}
	wait.Wait()
	for _, err := range errs {
		if err != nil {
			return need, err // one sentence is enough: they mostly have one reason
		}
	}
	text, err := m.encode()
	if err != nil {
		panic(fmt.Sprintf("checkpoint: the layout, the settings or the data state is not JSON: %v", err))
	}
	if _, err := s.writeFile(filepath.Join(work, manifestName), int64(len(text)), func(w io.Writer) error { _, err := w.Write(text); return err }); err != nil {
		return need, err
	}
	return need, s.disk.SyncDir(work)
}

func (r Rank) shards() [kinds]Shard { return [kinds]Shard{model: r.Model, optim: r.Optim} }

// write checks that nothing is missing only after the data went through: a writer
// that failed before has its own error.
func (d Shard) write(out io.Writer, l *safetensors.Layout) error {
	w, err := safetensors.NewWriter(out, l)
	if err == nil && d.Write != nil {
		err = d.Write(w)
	}
	if err == nil {
		w.Close()
	}
	return err
}

// writeFile writes a file of that size until it is on the disk and gives its checksum.
func (s *Store) writeFile(path string, size int64, fill func(io.Writer) error) (sum string, err error) {
	f, err := s.disk.Create(path)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	b := bufio.NewWriterSize(f, int(min(buffer, size)))
	err = fill(io.MultiWriter(h, b))
	if e := b.Flush(); err == nil {
		err = e
	}
	if err == nil {
		err = f.Sync()
	}
	if e := f.Close(); err == nil {
		err = e
	}
	return hex.EncodeToString(h.Sum(nil)), err
}

// publish gives the folder its name, in the place of a damaged one if there is one.
func (s *Store) publish(work string, step int, replace bool) error {
	if replace {
		s.discard(step)
	}
	final := filepath.Join(s.folder(), nameOf(step))
	if err := s.disk.Rename(work, final); err != nil {
		return err
	}
	err := s.disk.SyncDir(s.folder())
	if err != nil {
		// The name may or may not outlive a loss of power; away with it.
		s.discard(step)
	}
	return err
}

// prune removes the damaged checkpoints and those beyond Keep.
func (s *Store) prune(step int, damaged []int) {
	steps, err := Steps(s.Options)
	if err != nil {
		s.warn("old checkpoints stay: %v", err)
		return
	}
	steps = slices.DeleteFunc(steps, func(n int) bool { return n > step })
	for _, n := range append(damaged, steps[:max(0, len(steps)-s.Keep)]...) {
		if n != step {
			s.discard(n)
		}
	}
}

// discard removes a checkpoint. It loses its name first, so that a kill in between
// leaves no half of it under the name of a whole.
func (s *Store) discard(step int) {
	name := nameOf(step)
	gone := filepath.Join(s.folder(), temporary+"old-"+name)
	if err := s.disk.Rename(filepath.Join(s.folder(), name), gone); err != nil {
		s.warn("cannot remove the checkpoint %s: %v; remove it by hand", filepath.Join(s.folder(), name), cause(err))
		return
	}
	s.remove(gone)
}

// clean removes what a killed run left.
func (s *Store) clean() {
	names, err := s.disk.List(s.folder())
	if err != nil {
		s.warn("cannot look for what an earlier run left in %s: %v", s.folder(), cause(err))
	}
	for _, name := range names {
		if strings.HasPrefix(name, temporary) {
			s.remove(filepath.Join(s.folder(), name))
		}
	}
}

func (s *Store) remove(path string) {
	if err := s.disk.RemoveAll(path); err != nil {
		s.warn("cannot remove %s: %v; remove it by hand", path, cause(err))
	}
}

// failed is the one sentence about a checkpoint that could not be written.
func (s *Store) failed(step int, need int64, err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fmt.Errorf("the checkpoint of step %d takes %d MiB and does not fit into %s: %w; make room or give another folder, earlier checkpoints are whole", step, need>>20+1, s.folder(), cause(err))
	}
	return fmt.Errorf("cannot write the checkpoint of step %d in %s: %w; earlier checkpoints are whole", step, s.folder(), cause(err))
}
