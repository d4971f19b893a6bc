// This file owns writing: it writes a checkpoint under a temporary name, renames it, and
// then removes checkpoints that are too old. One process prepares and commits a checkpoint;
// every process writes the files of its ranks in between.

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
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/train/internal/checkpoint/safetensors"
	"github.com/stowage-dev/stowage/train/internal/disk"
)

// buffer is the size of the buffer of a file that is written or verified. It is large
// enough that system calls cost nothing compared with copying.
const buffer = 1 << 20

// Shard describes one file of a rank.
type Shard struct {
	Tensors []safetensors.Tensor // what it will hold
	// Write must call w.Write for every tensor in the order of Tensors. Data may be
	// passed in pieces of any size; w does not keep them. Save fails if Write returns
	// an error.
	Write func(w *safetensors.Writer) error
}

// Rank is what one rank saves. Ranks write at the same time. Each writes its model before
// its optimiser.
type Rank struct {
	Index        int // the number of the rank in the run
	Model, Optim Shard
}

// Draft is a checkpoint that is being written. Its life:
//
//  1. Prepare makes its folder, under a temporary name.
//  2. Write writes the files of some ranks, in each process that has ranks.
//  3. Commit gives the folder its name once all files are on the disk, or removes it.
//
// A draft that is never committed stays under its temporary name; the next Prepare removes
// it. Other processes get the exported fields as JSON.
type Draft struct {
	Name  string // of its folder
	Step  int
	Ranks int // of the run

	meta    Meta
	damaged []int // checkpoints that are replaced or removed
}

// Save writes a checkpoint of all ranks and removes the oldest beyond Keep. If it returns
// an error, the earlier checkpoints are unchanged. Save writes nothing if the step has a
// complete checkpoint of the same layout and data already. It removes damaged checkpoints
// of this step and of later ones. It returns an error if a later step has a complete
// checkpoint.
func (s *Store) Save(meta Meta, ranks []Rank) error {
	d, err := s.Prepare(meta, len(ranks))
	if d == nil || err != nil {
		return err
	}
	files, err := s.Write(d, ranks)
	return s.Commit(d, files, err)
}

// Prepare begins a checkpoint of so many ranks. It removes drafts that were left. It
// returns nil if nothing needs to be written, and an error as Save does.
func (s *Store) Prepare(meta Meta, ranks int) (*Draft, error) {
	if meta.Step < 0 || ranks < 1 {
		panic(fmt.Sprintf("checkpoint: step %d of %d ranks cannot be saved", meta.Step, ranks))
	}
	if err := s.Lock.Held(); err != nil {
		return nil, err
	}
	if meta.Run == nil {
		meta.Run = s.Run
	}
	there, damaged, err := s.later(meta)
	if there || err != nil {
		return nil, err
	}
	s.clean()
	// A process of a run that was killed may still write to its draft. It does not find this one.
	d := &Draft{fmt.Sprintf("%s%s-%08x", temporary, nameOf(meta.Step), rand.Uint32()), meta.Step, ranks, meta, damaged}
	work := s.work(d)
	if err := s.disk.Mkdir(work); err != nil {
		s.remove(work)
		return nil, s.failed(d.Step, 0, err)
	}
	return d, nil
}

// work returns the folder of a draft.
func (o Options) work(d *Draft) string { return filepath.Join(o.folder(), d.Name) }

// Commit completes a checkpoint whose files are all on the disk, in the order of ranks. If
// writing some of them failed, it removes the draft and returns that error.
func (s *Store) Commit(d *Draft, files []File, failed error) error {
	work := s.work(d)
	if failed == nil {
		failed = s.complete(d, files)
	}
	var lost *disk.LostError
	if held := s.Lock.Held(); errors.As(held, &lost) {
		return held // the folder may be another process's, with all that is in it
	} else if failed == nil && held != nil {
		failed = s.failed(d.Step, 0, held)
	}
	if failed == nil {
		if err := s.publish(work, d.Step, slices.Contains(d.damaged, d.Step)); err != nil {
			failed = s.failed(d.Step, 0, err)
		}
	}
	if failed != nil {
		s.remove(work)
		return failed
	}
	s.prune(d.Step, d.damaged)
	return nil
}

// complete writes the manifest after it has seen that every file is there, which it is not
// if a process writes to another disk.
func (s *Store) complete(d *Draft, files []File) error {
	work, need := s.work(d), int64(0)
	m := manifest{Version: Version, Meta: d.meta, Ranks: d.Ranks, Files: files}
	if err := m.checkFiles(); err != nil {
		panic(fmt.Sprintf("checkpoint: what was written %v", err))
	}
	for _, f := range files {
		need += f.Bytes
		if there, err := s.disk.Exists(filepath.Join(work, f.Name)); err != nil {
			return s.failed(d.Step, need, err)
		} else if !there {
			return fmt.Errorf("cannot write the checkpoint of step %d: %s was written, but is not in %s; choose a folder that all machines share%s", d.Step, f.Name, s.folder(), s.earlier(d.Step))
		}
	}
	text, err := m.encode()
	if err != nil {
		panic(fmt.Sprintf("checkpoint: the layout, the settings or the data state is not JSON: %v", err))
	}
	_, err = s.writeFile(filepath.Join(work, manifestName), int64(len(text)), func(w io.Writer) error { _, err := w.Write(text); return err })
	if err == nil {
		err = s.disk.SyncDir(work)
	}
	if err != nil {
		return s.failed(d.Step, need, err)
	}
	return nil
}

// later examines the checkpoints of this step and of later ones. They exist only if this
// run resumed from an older checkpoint or another run used the folder.
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
			return false, nil, fmt.Errorf("%s already has a checkpoint of step %d of another run: resume from it, or choose another folder", s.folder(), step)
		}
	}
	return false, damaged, nil
}

// same reports whether two JSON values are equal apart from white space.
func same(a, b json.RawMessage) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

// Write writes the files of some ranks of a draft, given in rising order, and syncs them.
// It needs no lock. It returns the files in the order of ranks.
func (o Options) Write(d *Draft, ranks []Rank) ([]File, error) {
	layouts := make([][kinds]*safetensors.Layout, len(ranks))
	need := int64(0)
	for i, r := range ranks {
		for k, shard := range r.shards() {
			// Tools of Hugging Face open only files that name their framework.
			layouts[i][k] = safetensors.NewLayout(map[string]string{"format": "pt"}, shard.Tensors)
			need += layouts[i][k].Size()
		}
	}
	files := make([]File, len(ranks)*int(kinds))
	errs := make([]error, len(ranks))
	var wait sync.WaitGroup
	for i, r := range ranks {
		wait.Go(func() {
			for k, shard := range r.shards() {
				name := fileName(kind(k), r.Index, d.Ranks)
				l := layouts[i][k]
				sum, err := o.writeFile(filepath.Join(o.work(d), name), l.Size(), func(w io.Writer) error { return shard.write(w, l) })
				if err != nil {
					errs[i] = err
					return
				}
				files[i*int(kinds)+k] = File{name, l.Size(), sum}
			}
		})
	}
	wait.Wait()
	for _, err := range errs {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("cannot write the checkpoint of step %d: there is no folder %s on this machine; choose a folder that all machines share%s", d.Step, o.work(d), o.earlier(d.Step))
		}
		if err != nil {
			return nil, o.failed(d.Step, need, err) // one sentence is enough: they mostly have one reason
		}
	}
	return files, nil
}

func (r Rank) shards() [kinds]Shard { return [kinds]Shard{model: r.Model, optim: r.Optim} }

// write writes the tensors of a shard. It checks last that none is missing, because an
// earlier error of the writer is the better message.
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

// writeFile writes a file of the given size, syncs it and returns its checksum.
func (o Options) writeFile(path string, size int64, fill func(io.Writer) error) (sum string, err error) {
	f, err := o.fs().Create(path)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	b := bufio.NewWriterSize(f, int(min(buffer, size)))
	var sums io.Writer = h
	if o.pace != nil {
		sums = pacedWriter{h, o.pace}
	}
	err = fill(io.MultiWriter(sums, b))
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

// publish gives the folder its final name. It replaces a damaged checkpoint of the step.
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
		s.warn("cannot remove old checkpoints: %v", err)
		return
	}
	steps = slices.DeleteFunc(steps, func(n int) bool { return n > step })
	for _, n := range append(damaged, steps[:max(0, len(steps)-s.Keep)]...) {
		if n != step {
			s.discard(n)
		}
	}
}

// Tidy removes what a run that was killed left behind its last checkpoint, which is of the
// given step and complete: drafts, and checkpoints beyond Keep. A run with steps left need not
// call it, because its next Save does the same.
func (s *Store) Tidy(step int) error {
	if err := s.Lock.Held(); err != nil {
		return err
	}
	s.clean()
	s.prune(step, nil)
	return nil
}

// discard removes a checkpoint. It renames the folder first, so that a kill in between
// leaves no incomplete checkpoint under the name of a complete one.
func (s *Store) discard(step int) {
	name := nameOf(step)
	gone := filepath.Join(s.folder(), temporary+"old-"+name)
	if err := s.disk.Rename(filepath.Join(s.folder(), name), gone); err != nil {
		s.warn("cannot remove the checkpoint %s: %v; remove it by hand", filepath.Join(s.folder(), name), input.Cause(err))
		return
	}
	s.remove(gone)
}

// clean removes temporary folders that a killed run left.
func (s *Store) clean() {
	names, err := s.disk.List(s.folder())
	if err != nil {
		s.warn("cannot look for temporary files of an earlier run in %s: %v", s.folder(), input.Cause(err))
	}
	for _, name := range names {
		if strings.HasPrefix(name, temporary) {
			s.remove(filepath.Join(s.folder(), name))
		}
	}
}

func (s *Store) remove(path string) {
	if err := s.disk.RemoveAll(path); err != nil {
		s.warn("cannot remove %s: %v; remove it by hand", path, input.Cause(err))
	}
}

// failed returns the error for a checkpoint that could not be written.
func (o Options) failed(step int, need int64, err error) error {
	if full := errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT); full && need > 0 {
		return fmt.Errorf("the checkpoint of step %d needs %d MiB, but there is not enough space for %s: %w; %s, or choose another folder%s", step, need>>20+1, o.folder(), input.Cause(err), disk.MakeRoom(o.folder()), o.earlier(step))
	}
	return fmt.Errorf("cannot write the checkpoint of step %d to %s: %w%s", step, o.folder(), input.Cause(err), o.earlier(step))
}

// earlier ends the error of a checkpoint with what remains: earlier ones, if there are any.
func (o Options) earlier(step int) string {
	steps, err := Steps(o)
	switch {
	case err != nil:
		return "; earlier checkpoints, if any, are complete"
	case slices.ContainsFunc(steps, func(s int) bool { return s != step }):
		return "; earlier checkpoints are complete"
	}
	return ""
}
