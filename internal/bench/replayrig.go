// This file owns what a replay runs on: a manager with its workspace, and random bytes in
// place of the experts' rows.

package bench

import (
	"cmp"
	"encoding/binary"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/routing"
)

// expertGroup is the name of the groups of a replay.
const expertGroup = "expert_fc1"

// replayAhead is how many loads ahead the manager restores.
const replayAhead = 1

// replayRig replays one expert rank. The forward pass of a group copies as many rows as the
// counts say from random bytes, which differ in each step. The backward pass must find
// their checksum in its set.
type replayRig struct {
	o       ReplayOptions
	rank    int
	sched   *schedule.Schedule
	place   map[memory.GroupID]int
	compute device.Stream
	m       *stash.Manager
	w       *stash.Workspace

	random *device.Buffer
	rows   *device.Buffer // a uint64 for each group: the routing of this step
	found  *device.Buffer // a uint64 for each group: the rows at its backward pass
	sums   *device.Buffer // two uint64 for each tensor: given and found
	room   []routing.Rows // of the sets that groups had in this step

	setBytes memory.Bytes
}

func newReplayRig(dev device.Device, o ReplayOptions, rank int) (r *replayRig, err error) {
	r = &replayRig{o: o, rank: rank, place: map[memory.GroupID]int{}}
	defer func() {
		if err != nil {
			_ = r.close() // the first error says more
			r = nil
		}
	}()
	passes, err := o.Pipeline.Passes(o.Stage)
	if err != nil {
		return r, err
	}
	r.sched = schedule.Expand(passes, o.layers(), expertGroup)
	for i := range r.sched.Len() {
		if e := r.sched.At(i); !e.Load {
			r.place[e.Group] = len(r.place)
		}
	}
	r.room = make([]routing.Rows, len(r.place))
	if r.compute, err = dev.NewStream("replay"); err != nil {
		return r, err
	}
	groups := memory.Bytes(len(r.place))
	for _, b := range []struct {
		to   **device.Buffer
		size memory.Bytes
	}{
		{&r.random, memory.Bytes(o.Trace.Worst())*o.Width + period},
		{&r.rows, 8 * groups}, {&r.found, 8 * groups}, {&r.sums, 16 * groups * memory.Bytes(o.Tensors)},
	} {
		if *b.to, err = dev.Alloc(memory.Device, b.size, "replay"); err != nil {
			return r, err
		}
	}
	randomise(r.compute, r.random.All(), uint64(rank))
	return r, r.manage(dev)
}

// manage makes the manager. Its pools begin empty, because the first step shows what is
// needed.
func (r *replayRig) manage(dev device.Device) error {
	o := r.o
	tensors := make([]stash.Tensor, o.Tensors)
	for i := range tensors {
		tensors[i] = stash.Tensor{Name: fmt.Sprintf("tensor %d", i), Row: o.Width, MaxRows: stash.Rows(o.Trace.Worst())}
	}
	worst, err := stash.NewLayout(tensors...)
	if err != nil {
		return err
	}
	need := worst.Pages(o.Page, stash.Rows(o.Trace.Worst()))
	most := r.sched.Peak(func(memory.GroupID) schedule.Pages { return need })
	record := (kernels.StashRecordSize(o.Tensors, uint64(need)) + device.Align - 1) / device.Align * device.Align
	// Records are made again after sets have moved, at most once a step.
	cfg := stash.Config{Page: o.Page, Records: record * memory.Bytes(len(r.place)*(o.Trace.Steps()+1))}
	cfg.Max[stash.Device] = most
	if o.Pool > 0 {
		cfg.Max[stash.Device] = min(most, schedule.Pages(o.Pool/o.Page))
		cfg.Max[stash.Host] = most
	}
	if r.m, err = stash.NewManager(dev, r.compute, stash.ManagerConfig{Store: cfg, Rank: r.rank, Ahead: replayAhead}); err != nil {
		return err
	}
	for i := range tensors {
		tensors[i].MaxRows = min(tensors[i].MaxRows, o.MaxRows)
	}
	r.setBytes = worst.Size * memory.Bytes(o.Sets)
	r.w, err = r.m.NewWorkspace("experts", o.Sets, stash.Rows(o.Trace.Worst()), tensors...)
	return err
}

func (r *replayRig) close() (first error) {
	if r.m != nil {
		first = r.m.Close()
	}
	for _, b := range []*device.Buffer{r.random, r.rows, r.found, r.sums} {
		if b != nil {
			r.compute.Free(b)
		}
	}
	if r.compute != nil {
		first = cmp.Or(first, r.compute.Sync(), r.compute.Close())
	}
	return first
}

// step replays one step and adds its losses to the figures.
func (r *replayRig) step(step int, f *ReplayFigures) error {
	raw := make([]byte, 8*len(r.place))
	for g, i := range r.place {
		binary.LittleEndian.PutUint64(raw[8*i:], uint64(r.o.rows(step, r.rank, g)))
	}
	r.compute.Upload(r.rows.All(), raw)
	err := r.m.Step(memory.Key{Microbatches: r.o.Trace.Microbatches}, func(int) error {
		r.compute.Fill(r.sums.All(), 0)
		r.compute.Fill(r.found.All(), 0)
		for i := range r.sched.Len() {
			if e := r.sched.At(i); e.Load {
				r.backward(step, e.Group)
			} else {
				r.forward(step, e.Group)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return r.compare(step, f)
}

// source returns the random bytes of a tensor of a group in a step.
func (r *replayRig) source(step, tensor int, g memory.GroupID) device.Range {
	x := uint64(step)<<40 ^ uint64(r.place[g])<<8 ^ uint64(tensor)
	x = (x ^ x>>29) * 0x9e3779b97f4a7c15
	at := memory.Bytes(x>>32) % (period / device.Align) * device.Align
	return r.random.Slice(at, memory.Bytes(r.o.rows(step, r.rank, g))*r.o.Width)
}

// sum returns the place of a tensor's checksum, as given or as found.
func (r *replayRig) sum(tensor int, g memory.GroupID, found bool) device.Range {
	at := 2 * (r.place[g]*r.o.Tensors + tensor)
	if found {
		at++
	}
	return r.sums.Slice(memory.Bytes(8*at), 8)
}

func (r *replayRig) forward(step int, g memory.GroupID) {
	s := r.w.Forward(g)
	at := memory.Bytes(8 * r.place[g])
	r.compute.Copy(s.Counts(), r.rows.Slice(at, 8))
	r.room[r.place[g]] = routing.Rows(s.Tensor(0).Len / r.o.Width)
	for i := range r.o.Tensors {
		src := r.source(step, i, g)
		if n := min(src.Len, s.Tensor(i).Len); n > 0 {
			r.compute.Copy(s.Tensor(i).Slice(0, n), src.Slice(0, n))
			r.compute.Launch(kernels.ChecksumLaunch(r.sum(i, g, false), src))
		}
	}
	s.Saved()
}

func (r *replayRig) backward(step int, g memory.GroupID) {
	s := r.w.Backward(g)
	r.compute.Copy(r.found.Slice(memory.Bytes(8*r.place[g]), 8), s.Counts())
	for i := range r.o.Tensors {
		n := min(memory.Bytes(r.o.rows(step, r.rank, g))*r.o.Width, s.Tensor(i).Len)
		if n > 0 {
			r.compute.Launch(kernels.ChecksumLaunch(r.sum(i, g, true), s.Tensor(i).Slice(0, n)))
		}
	}
	s.Done()
}

// compare reads what the backward passes of the step found.
func (r *replayRig) compare(step int, f *ReplayFigures) error {
	found, sums := make([]byte, r.found.Size()), make([]byte, r.sums.Size())
	if err := r.compute.Download(found, r.found.All()); err != nil {
		return err
	}
	if err := r.compute.Download(sums, r.sums.All()); err != nil {
		return err
	}
	for g, i := range r.place {
		want := r.o.rows(step, r.rank, g)
		there := min(routing.Rows(binary.LittleEndian.Uint64(found[8*i:])), r.room[i])
		f.Dropped += max(want-there, 0)
		for t := range r.o.Tensors {
			at := 16 * (i*r.o.Tensors + t)
			if binary.LittleEndian.Uint64(sums[at:]) != binary.LittleEndian.Uint64(sums[at+8:]) {
				f.Wrong++
			}
		}
	}
	return nil
}
