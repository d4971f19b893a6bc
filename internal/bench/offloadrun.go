// This file owns the issue of a synthetic step through the runtime. Its kernels have known
// durations, write what is saved, and check in the backward pass what is loaded.

package bench

import (
	"cmp"
	"encoding/binary"
	"errors"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// runner runs a step repeatedly through one runtime.
type runner struct {
	step   *step
	dev    device.Device
	s      device.Stream
	rt     *engine.Runtime
	key    memory.Key
	scopes memory.Scopes
	mem    *device.Buffer // clock, seed, row counts and checksums
	rows   device.Range
	sums   device.Range
	base   map[memory.GroupID]int // of a group's first tensor
	stamps [2]device.Event
	issued Issued                                    // of the last step
	space  *stash.Workspace                          // of the stashed module, or nil
	spoil  func(g memory.GroupID, rs []device.Range) // tests plant faults here
}

// word is the size of seeds, row counts and checksums.
const word = memory.Bytes(8)

// newRunner returns a runner. The caller closes the runtime.
func newRunner(dev device.Device, s device.Stream, st *step, open func() (*engine.Runtime, error), scopes memory.Scopes) (r *runner, err error) {
	r = &runner{step: st, dev: dev, s: s, scopes: scopes, base: map[memory.GroupID]int{}}
	r.key.Microbatches = len(st.passes) / 2 / len(st.chunks)
	defer func() {
		if err != nil {
			_ = r.close() // the first error says more
			r = nil
		}
	}()
	n := 0
	for _, p := range st.passes {
		for i, l := range st.chunks[p.Chunk] {
			for j := range l {
				if !p.Backward {
					r.base[group(p, i, &l[j])] = n
					n += len(l[j].saved)
				}
			}
		}
	}
	counts := make([]byte, 0)
	for c := range st.chunks {
		for l := range st.chunks[c] {
			counts = binary.LittleEndian.AppendUint64(counts, uint64(st.liveRows(c, l)))
		}
	}
	if r.mem, err = dev.Alloc(memory.Device, kernels.ClockBytes+word*memory.Bytes(1+n)+memory.Bytes(len(counts)), "bench"); err != nil {
		return r, err
	}
	r.rows = r.mem.Slice(kernels.ClockBytes+word, memory.Bytes(len(counts)))
	r.sums = r.mem.Slice(r.rows.Off+r.rows.Len, word*memory.Bytes(n))
	s.Fill(r.mem.All(), 0)
	s.Upload(r.rows, counts)
	for i := range r.stamps {
		if r.stamps[i], err = dev.NewEvent(device.Timing); err != nil {
			return r, err
		}
	}
	if r.rt, err = open(); err != nil {
		return r, err
	}
	if st.row > 0 {
		// The buffers hold twice the rows of balanced routing.
		if r.space, err = r.rt.NewWorkspace(StashedModule, 3, 0, stash.Tensor{Name: "rows", Row: st.row, MaxRows: 2 * st.rows}); err != nil {
			return r, err
		}
	}
	return r, s.Sync()
}

func (r *runner) close() (first error) {
	if r.rt != nil {
		first = r.rt.Close()
	}
	if r.mem != nil {
		r.s.Free(r.mem)
	}
	first = cmp.Or(first, r.s.Sync())
	for _, e := range r.stamps {
		if e != nil {
			first = cmp.Or(first, e.Close())
		}
	}
	return first
}

// warmSteps run before anything is measured: one is recorded, one warms graphs up, one
// captures them, and one follows. If steps are recorded again, more of them run.
const warmSteps, mostWarmSteps = 4, 12

// warmUp lets the runtime learn the step. It first runs one step under another key, which
// loads kernels and touches memory for the first time. That step must not be recorded.
func (r *runner) warmUp() error {
	key := r.key
	defer func() { r.key = key }()
	r.key.Shape = "warm-up"
	for i := 0; i < 1+warmSteps || i < mostWarmSteps && r.rt.Decision(key) == nil; i++ {
		if _, _, err := r.run(0); err != nil {
			var low *memory.BudgetError
			var full *residency.Full
			switch {
			case errors.As(err, &low):
				err = &OffloadRefused{low}
			case errors.As(err, &full):
				err = &OffloadRefused{full}
			}
			return err
		}
		r.key = key
	}
	return nil
}

func (r *runner) clock() device.Range { return r.mem.Slice(0, kernels.ClockBytes) }
func (r *runner) seed() device.Range  { return r.mem.Slice(kernels.ClockBytes, word) }

// run runs one step with a seed. It returns the step's time on the device and the checksums
// of everything that it loaded, tensor by tensor.
func (r *runner) run(seed uint64) (took time.Duration, sums []byte, err error) {
	r.s.Upload(r.seed(), binary.LittleEndian.AppendUint64(nil, seed))
	r.s.Record(r.stamps[0])
	before := r.dev.Counters()
	if err := r.rt.Step(r.key, r.issue); err != nil {
		return 0, nil, err
	}
	after := r.dev.Counters()
	r.issued = Issued{after.Launches - before.Launches, after.Copies - before.Copies, after.Replays - before.Replays, after.HostSyncs - before.HostSyncs, after.HostReads - before.HostReads}
	r.s.Record(r.stamps[1])
	sums = make([]byte, r.sums.Len)
	if err := r.s.Download(sums, r.sums); err != nil {
		return 0, nil, err
	}
	took, err = r.stamps[1].Since(r.stamps[0])
	return took, sums, err
}

// issue issues one step.
func (r *runner) issue(s *engine.Step) error {
	r.s.Fill(r.sums, 0)
	for _, p := range r.step.passes {
		layers := r.step.chunks[p.Chunk]
		for k := range layers {
			at := k
			if p.Backward {
				at = len(layers) - 1 - k
			}
			if err := r.layer(s, p, at, layers[at]); err != nil {
				return err
			}
		}
	}
	return nil
}

// layer issues a layer part by part.
func (r *runner) layer(s *engine.Step, p schedule.Pass, at int, ms []module) error {
	parts := parts(ms, r.scopes)
	for k := range parts {
		part := parts[k]
		if p.Backward {
			part = parts[len(parts)-1-k]
		}
		scope, captured := part[0].half.scope(r.scopes)
		if !captured {
			if err := r.issueHalf(s, p, at, part); err != nil {
				return err
			}
			continue
		}
		pass := engine.Pass{Chunk: p.Chunk, Layer: at, Microbatch: p.Microbatch, Backward: p.Backward}
		// A scope saves what it makes, and nothing else needs it.
		if _, err := s.Scope(scope, pass, func() ([]*engine.Tensor, error) { return nil, r.issueHalf(s, p, at, part) }); err != nil {
			return err
		}
	}
	return nil
}

// parts groups the modules of a layer: those that one scope captures, or that form one
// half.
func parts(ms []module, captured memory.Scopes) (parts [][]module) {
	scope := func(m module) any {
		if s, ok := m.half.scope(captured); ok {
			return s
		}
		return m.half
	}
	for from, to := 0, 1; to <= len(ms); to++ {
		if to == len(ms) || scope(ms[to]) != scope(ms[from]) {
			parts = append(parts, ms[from:to])
			from = to
		}
	}
	return parts
}

func (r *runner) issueHalf(s *engine.Step, p schedule.Pass, at int, ms []module) (err error) {
	for k := range ms {
		m := &ms[k]
		if p.Backward {
			m = &ms[len(ms)-1-k]
		}
		g := group(p, at, m)
		switch {
		case m.forward == 0 && len(m.saved) == 0: // communication: it computes nothing
		case r.step.stashes(m):
			r.stashed(s, g, m, p.Backward)
		case p.Backward:
			err = r.backward(s, g, m)
		default:
			err = r.forward(s, g, m)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// beginModule begins the duration of a module, and waitModule waits for its end.
func (r *runner) beginModule()               { r.s.Launch(kernels.MarkLaunch(r.clock())) }
func (r *runner) waitModule(d time.Duration) { r.s.Launch(kernels.WaitLaunch(r.clock(), d)) }

func (r *runner) noise(g memory.GroupID, i int, to device.Range) {
	r.s.Launch(kernels.NoiseLaunch(to, r.seed(), uint64(r.base[g]+i)))
}

func (r *runner) check(g memory.GroupID, rs ...device.Range) {
	if r.spoil != nil {
		r.spoil(g, rs)
	}
	for i, t := range rs {
		r.s.Launch(kernels.ChecksumLaunch(r.sums.Slice(word*memory.Bytes(r.base[g]+i), word), t))
	}
}

// forward issues the forward pass of a module, which makes what is saved; the
// runtime may ask for it once more before the backward pass.
func (r *runner) forward(s *engine.Step, g memory.GroupID, m *module) error {
	if len(m.saved) == 0 {
		r.beginModule()
		r.waitModule(m.forward)
		return nil
	}
	var made []*engine.Tensor
	err := s.Run(g, func(to *engine.Group) error {
		var xs []*engine.Tensor
		for _, t := range m.saved {
			x, err := s.New(t.bytes)
			if err != nil {
				return err
			}
			xs = append(xs, x)
		}
		r.beginModule() // behind what compute waits for to have the memory: that is no work
		for i, x := range xs {
			r.noise(g, i, x.Range())
			to.Save(x)
		}
		r.waitModule(m.forward)
		if !to.Recomputing() {
			made = xs
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, x := range made {
		x.Free()
	}
	return nil
}

// backward issues the backward pass of a module.
func (r *runner) backward(s *engine.Step, g memory.GroupID, m *module) error {
	var loaded *engine.Loaded
	var rs []device.Range
	if len(m.saved) > 0 {
		var err error
		if loaded, err = s.Load(g); err != nil {
			return err
		}
		for i := range loaded.Len() {
			rs = append(rs, loaded.Range(i))
		}
	}
	r.beginModule()
	r.check(g, rs...)
	r.waitModule(m.backward)
	if loaded != nil {
		loaded.Done()
	}
	return nil
}

// stashed issues either pass of the module whose rows are counted on the device.
func (r *runner) stashed(s *engine.Step, g memory.GroupID, m *module, backward bool) {
	live := memory.Bytes(r.step.liveRows(g.Chunk, g.Layer)) * r.step.row
	if backward {
		set := s.Restore(r.space, g)
		r.beginModule()
		r.check(g, set.Tensor(0).Slice(0, live))
		r.waitModule(m.backward)
		set.Done()
		return
	}
	set := s.Lease(r.space, g)
	r.beginModule()
	r.s.Copy(set.Counts().Slice(0, word), r.rows.Slice(word*memory.Bytes(r.step.layerOf(g.Chunk, g.Layer)), word))
	r.noise(g, 0, set.Tensor(0).Slice(0, live))
	r.waitModule(m.forward)
	set.Saved()
}
