// This file owns the two engines of the tests: one sharded by a pipeline, and one whole
// on every rank, which is the reference. The second uses nothing of the package and only
// the barrier of comm.

package fsdp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

func (r *rank) groups() []RankGroup {
	all := []RankGroup{{Name: "dense", Comm: r.comms[0], Op: comm.Mean}, {Name: "experts", Comm: r.comms[1], Op: comm.Sum}}
	for i := range all {
		if r.c.touched {
			all[i].Comm = touched{all[i].Comm}
		}
	}
	return all
}

func (r *rank) config() Config {
	return Config{
		Rank: r.comms[0].Rank(), Groups: r.groups(), Units: r.units, Pool: r.c.kind, Fallback: r.c.fallback,
		Prefetch: r.c.prefetch, Behind: r.c.behind, GradComm: r.c.gradComm, MainGrads: r.c.mainGrads,
	}
}

// sharded drives a pipeline, and checks that nothing moves once it has a plan.
type sharded struct {
	r     *rank
	p     *Pipeline
	step  Step
	m     *device.Buffer // momentum
	key   memory.Key
	n     int // leases in this step
	at    map[place]uintptr
	moved error
}

type place struct {
	key   memory.Key
	lease int
}

// watch compares the address of a lease with its address in the last step under its key.
func (e *sharded) watch(r device.Range) {
	at := place{e.key, e.n}
	e.n++
	if params, grads, known := e.p.plans(e.key); !known || params.Dynamic+grads.Dynamic > 0 {
		return
	}
	if was, seen := e.at[at]; seen && was != r.Addr() && e.moved == nil {
		e.moved = fmt.Errorf("lease %d of a step (%v) moved from %#x to %#x", at.lease, at.key, was, r.Addr())
	}
	e.at[at] = r.Addr()
}

func newSharded(r *rank) (engine, error) {
	p, err := New(r.dev, r.config())
	if err != nil {
		return nil, err
	}
	e := &sharded{r: r, p: p, at: map[place]uintptr{}}
	if e.m, err = r.alloc(int(4 * p.layout.elements)); err != nil {
		return e, err
	}
	r.compute.Fill(e.m.All(), 0)
	return e, nil
}

func (e *sharded) begin(key memory.Key) {
	e.step, e.key, e.n = e.p.Begin(key, e.r.compute), key, 0
}

func (e *sharded) end() error { return errors.Join(e.step.End(), e.moved) }

func (e *sharded) use(unit int) (func(int) device.Range, func(), error) {
	u, err := e.step.Use(unit, e.r.compute)
	if err == nil {
		e.watch(u.Param(0))
	}
	return u.Param, u.Done, err
}

func (e *sharded) grad(unit int) (func(int) device.Range, func(), error) {
	g, err := e.step.Grad(unit, e.r.compute)
	if err == nil {
		e.watch(g.Param(0))
	}
	return g.Param, g.Done, err
}

func (e *sharded) optimise() {
	for _, s := range e.p.Shards() {
		b := e.p.layout.blocks[s.Unit][s.Bucket]
		e.r.launch(&momentum, "wrw", ranges{s.Weights, s.Grads, e.m.Slice(memory.Bytes(4*b.at), s.Weights.Len)}, typeFlag(e.r.c.mainGrads), uint64(b.shard))
	}
	e.p.Cast(e.r.compute)
}

func (e *sharded) load(unit, param int, values []float32) error { return e.p.Load(unit, param, values) }

// read assembles a parameter from the pieces of all ranks. It does not wait for them, as
// Read would.
func (e *sharded) read(unit, param int, which Copy) ([]float32, error) {
	of := e.r.units[unit].Params[param]
	all, found := make([]float32, of.Elements()), int64(0)
	for _, m := range e.r.members[of.Group] {
		r := e.r.w.ranks[m]
		for _, s := range r.e.(*sharded).p.Shards() {
			for _, piece := range s.Pieces {
				if s.Unit != unit || piece.Param != param {
					continue
				}
				src, t := s.Weights, FP32
				switch which {
				case Params:
					src, t = s.Params, of.Type
				case Grads:
					src, t = s.Grads, e.r.c.mainGrads
				}
				part, err := r.download(src.Slice(memory.Bytes(piece.At)*t.Size, memory.Bytes(piece.Elements)*t.Size), t)
				if err != nil {
					return nil, err
				}
				found += int64(copy(all[piece.From:], part))
			}
		}
	}
	if found != of.Elements() {
		return nil, fmt.Errorf("%d elements of parameter %q of unit %d are on some rank, of %d", found, of.Name, unit, of.Elements())
	}
	return all, nil
}

func (e *sharded) close() error { return e.p.Close() }

// plain keeps everything whole on every rank. Each rank adds up the gradients of all
// ranks in place.
type plain struct {
	r *rank
	p [][]whole // by unit and parameter
}

// whole is one parameter.
type whole struct {
	weights, params, main, grad, sum, m device.Range
	n                                   uint64
}

func newPlain(r *rank) (engine, error) {
	e := &plain{r: r}
	for _, u := range r.units {
		var ps []whole
		for _, p := range u.Params {
			w := whole{n: uint64(p.Elements())}
			for _, x := range []struct {
				to   *device.Range
				size memory.Bytes
			}{{&w.weights, 4}, {&w.params, p.Type.Size}, {&w.main, r.c.mainGrads.Size}, {&w.grad, r.c.gradComm.Size}, {&w.sum, r.c.gradComm.Size}, {&w.m, 4}} {
				b, err := r.alloc(int(memory.Bytes(p.Elements()) * x.size))
				if err != nil {
					return e, err
				}
				*x.to = b.All()
				r.compute.Fill(*x.to, 0)
			}
			ps = append(ps, w)
		}
		e.p = append(e.p, ps)
	}
	return e, nil
}

func (e *plain) each(do func(unit, i int, w whole)) {
	for u, ps := range e.p {
		for i, w := range ps {
			do(u, i, w)
		}
	}
}

func (e *plain) begin(key memory.Key) {
	if key.Phase == memory.Train {
		e.each(func(_, _ int, w whole) { e.r.compute.Fill(w.main, 0) })
	}
}

func (e *plain) end() error { return nil }

func (e *plain) use(unit int) (func(int) device.Range, func(), error) {
	return func(i int) device.Range { return e.p[unit][i].params }, func() {}, nil
}

func (e *plain) grad(unit int) (func(int) device.Range, func(), error) {
	for _, w := range e.p[unit] {
		e.r.compute.Fill(w.grad, 0)
	}
	return func(i int) device.Range { return e.p[unit][i].grad }, func() {
		e.r.comms[0].Barrier(e.r.compute)
		for i, w := range e.p[unit] {
			group := e.r.units[unit].Params[i].Group
			all := ranges{w.sum}
			for _, p := range e.r.members[group] {
				all = append(all, e.r.w.ranks[p].e.(*plain).p[unit][i].grad)
			}
			e.r.launch(&combine, "wrrrr"[:len(all)], all, typeFlag(e.r.c.gradComm), uint64(len(all)-1), uint64(e.r.groups()[group].Op), w.n)
		}
		e.r.comms[0].Barrier(e.r.compute)
		for _, w := range e.p[unit] {
			e.r.launch(&accumulate, "wr", ranges{w.main, w.sum}, typeFlag(e.r.c.mainGrads), typeFlag(e.r.c.gradComm), w.n)
		}
	}, nil
}

func (e *plain) optimise() {
	e.each(func(u, i int, w whole) {
		e.r.launch(&momentum, "wrw", ranges{w.weights, w.main, w.m}, typeFlag(e.r.c.mainGrads), w.n)
		e.cast(u, i)
	})
}

func (e *plain) cast(u, i int) {
	w := e.p[u][i]
	if e.r.units[u].Params[i].Type == BF16 {
		e.r.launch(&castDown, "wr", ranges{w.params, w.weights}, w.n)
		return
	}
	e.r.compute.Copy(w.params, w.weights)
}

func (e *plain) load(u, i int, values []float32) error {
	var raw []byte
	for _, v := range values {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(v))
	}
	e.r.compute.Upload(e.p[u][i].weights, raw)
	e.cast(u, i)
	return nil
}

func (e *plain) read(u, i int, which Copy) ([]float32, error) {
	w := e.p[u][i]
	src, t := w.weights, FP32
	switch which {
	case Params:
		src, t = w.params, e.r.units[u].Params[i].Type
	case Grads:
		src, t = w.main, e.r.c.mainGrads
	}
	return e.r.download(src, t)
}

func (e *plain) close() error { return nil }

// driver runs a function on every rank.
type driver func([]comm.Comm, func(comm.Comm) error) error

// world is all ranks of a run.
type world struct {
	c     setup
	devs  []device.Device
	comms []comm.Comm
	ranks []*rank
	drive driver
}

// each runs a function on every rank.
func (w *world) each(do func(r *rank) error) error {
	return w.drive(w.comms, func(x comm.Comm) error { return do(w.ranks[x.Rank()]) })
}

// train trains on one device for each rank of the setup, and returns what each of them
// read at the end.
func (c setup) train(open func() (device.Device, error), drive driver, body func(w *world) error) (out [][]float32, err error) {
	w := &world{c: c, ranks: make([]*rank, c.ranks), drive: drive}
	defer func() {
		for _, d := range w.devs {
			// After a failure, memory that was not freed is expected.
			if e := d.Close(); err == nil {
				err = e
			}
		}
	}()
	for range c.ranks {
		d, err := open()
		if err != nil {
			return nil, err
		}
		w.devs = append(w.devs, d)
	}
	if w.comms, err = comm.NewLocal(w.devs, comm.Options{}); err != nil {
		return nil, err
	}
	err = drive(w.comms, func(x comm.Comm) (err error) {
		w.ranks[x.Rank()], err = newRank(w, x)
		return err
	})
	if err == nil {
		err = body(w)
	}
	out = make([][]float32, c.ranks)
	for i, r := range w.ranks {
		if err != nil {
			break
		}
		if out[i], err = r.read(r.e.read); err == nil && r.collected != nil && differ(out[i], r.collected) >= 0 {
			err = fmt.Errorf("rank %d: Read gives other numbers than its shards hold", i)
		}
	}
	for _, r := range w.ranks {
		if r != nil {
			err = errors.Join(err, r.close())
		}
	}
	for _, x := range w.comms {
		err = errors.Join(err, x.Close())
	}
	for _, d := range w.devs {
		for _, u := range d.Memory().Kind {
			if c.left != nil {
				*c.left += u.Current - u.Pending
			}
		}
	}
	return out, err
}

// trainAndCollect is the usual body.
func trainAndCollect(w *world) error { return errors.Join(w.each(steps), w.each(collect)) }

// collect reads all parameters through the pipeline.
func collect(r *rank) (err error) {
	if e, ok := r.e.(*sharded); ok {
		r.collected, err = r.read(e.p.Read)
	}
	return err
}

// steps trains for some steps, on a frozen device if possible.
func steps(r *rank) error {
	if err := r.initialise(); err != nil {
		return err
	}
	if r.c.kind != bucket.Dynamic && r.c.fallback != bucket.DynamicMemory {
		r.dev.Freeze()
	}
	for step := range r.c.steps {
		r.feed(step)
		if err := r.step(); err != nil {
			return err
		}
	}
	return r.compute.Sync()
}
