// This file owns a rank of the tests, which trains a model with either engine.

package fsdp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// engine holds a rank's parameters: sharded, or whole on every rank.
type engine interface {
	begin(key memory.Key)
	use(unit int) (at func(int) device.Range, done func(), err error)
	grad(unit int) (at func(int) device.Range, done func(), err error)
	end() error
	optimise()
	load(unit, param int, values []float32) error
	read(unit, param int, which Copy) ([]float32, error)
	close() error
}

// rank trains a model on one device.
type rank struct {
	*model
	w       *world
	c       setup
	dev     device.Device
	compute device.Stream
	comms   []comm.Comm // dense, experts, and those that share two experts
	members [][]int     // of each
	e       engine
	bufs    []*device.Buffer

	tokens       *device.Buffer // of all microbatches
	loss         *device.Buffer
	act, dact    []device.Range
	all, choices device.Range // of the ranks that share experts
	part, dpart  device.Range
	mine         device.Range
	micro        int

	params, grads map[int]func(int) device.Range // of units entered
	done          map[int]func()
	collected     []float32
}

func newRank(w *world, world comm.Comm) (r *rank, err error) {
	c, dev := w.c, w.devs[world.Rank()]
	r = &rank{model: newModel(c.model, c.param, int64(2/c.ep)), w: w, c: c, dev: dev}
	r.params, r.grads, r.done = map[int]func(int) device.Range{}, map[int]func(int) device.Range{}, map[int]func(){}
	if r.compute, err = dev.NewStream("compute"); err != nil {
		return r, err
	}
	if err = r.split(world); err != nil {
		return r, err
	}
	const row = 4 * length * width
	sizes := []struct {
		to   *device.Range
		size int
	}{
		{&r.all, 2 * row * c.ep}, {&r.choices, 8 * length * (c.ep + 1)}, {&r.part, row * c.ep},
		{&r.dpart, 4 * length * (width + 1) * c.ep}, {&r.mine, 4 * length * (width + 1)},
	}
	r.act, r.dact = make([]device.Range, r.acts), make([]device.Range, r.acts)
	for i := range r.acts {
		sizes = append(sizes, struct {
			to   *device.Range
			size int
		}{&r.act[i], row}, struct {
			to   *device.Range
			size int
		}{&r.dact[i], row})
	}
	for _, x := range sizes {
		b, err := r.alloc(x.size)
		if err != nil {
			return r, err
		}
		*x.to = b.All()
	}
	if r.tokens, err = r.alloc(4 * (length + 2) * c.microbatches); err != nil {
		return r, err
	}
	if r.loss, err = r.alloc(4); err != nil {
		return r, err
	}
	if c.plain {
		r.e, err = newPlain(r)
	} else {
		r.e, err = newSharded(r)
	}
	return r, err
}

// split makes the communicators. Dense parameters lie on all ranks, and experts on the
// ranks that have the same ones. Neighbours have different experts.
func (r *rank) split(world comm.Comm) error {
	var all, same, together []int
	for p := range world.Size() {
		all = append(all, p)
		if p%r.c.ep == world.Rank()%r.c.ep {
			same = append(same, p)
		}
		if p/r.c.ep == world.Rank()/r.c.ep {
			together = append(together, p)
		}
	}
	r.comms, r.members = []comm.Comm{world}, [][]int{all, same, together}
	for _, ranks := range [][]int{same, together} {
		c, err := world.Split(ranks)
		if err != nil {
			return err
		}
		r.comms = append(r.comms, c)
	}
	return nil
}

func (r *rank) alloc(size int) (*device.Buffer, error) {
	b, err := r.dev.Alloc(memory.Device, memory.Bytes(size), "activations")
	if err == nil {
		r.bufs = append(r.bufs, b)
	}
	return b, err
}

func (r *rank) close() (err error) {
	if r.e != nil {
		err = r.e.close()
	}
	for _, b := range r.bufs {
		r.compute.Free(b)
	}
	for _, c := range r.comms[min(1, len(r.comms)):] {
		err = errors.Join(err, c.Close())
	}
	if r.compute != nil {
		err = errors.Join(err, r.compute.Close())
	}
	return err
}

// initialise sets all parameters to the same values in every run.
func (r *rank) initialise() error {
	for u, unit := range r.units {
		for i, p := range unit.Params {
			who := uint64(0)
			if p.Group == experts {
				who = uint64(r.comms[2].Rank()) + 1
			}
			rng := rand.New(rand.NewPCG(uint64(u)<<8|uint64(i), who))
			values := make([]float32, p.Elements())
			for k := range values {
				values[k] = float32(rng.NormFloat64()) * 0.4
			}
			if err := r.e.load(u, i, values); err != nil {
				return err
			}
		}
	}
	return nil
}

// feed uploads the tokens of a step, which differ between ranks.
func (r *rank) feed(step int) {
	rng := rand.New(rand.NewPCG(uint64(step)<<8|uint64(r.comms[0].Rank()), 77))
	var raw []byte
	for range (length + 2) * r.c.microbatches {
		raw = binary.LittleEndian.AppendUint32(raw, rng.Uint32N(vocab))
	}
	r.compute.Upload(r.tokens.Slice(0, memory.Bytes(len(raw))), raw)
}

func (r *rank) key() memory.Key { return memory.Key{Microbatches: r.c.microbatches} }

// step runs one training step without waiting.
func (r *rank) step() error {
	before := r.dev.Counters()
	if err := r.issue(); err != nil {
		return err
	}
	if after := r.dev.Counters(); after.HostSyncs != before.HostSyncs || after.HostReads != before.HostReads {
		return fmt.Errorf("the host waited %d times and looked %d times", after.HostSyncs-before.HostSyncs, after.HostReads-before.HostReads)
	}
	return nil
}

// issue issues a step: forward and backward for every microbatch, then the
// optimiser.
func (r *rank) issue() error {
	r.e.begin(r.key())
	for r.micro = range r.c.microbatches {
		if err := r.forward(); err != nil {
			return errors.Join(err, r.e.end())
		}
		if err := r.backward(); err != nil {
			return errors.Join(err, r.e.end())
		}
	}
	if err := r.e.end(); err != nil {
		return err
	}
	r.e.optimise()
	return nil
}

// evaluate issues a forward pass alone.
func (r *rank) evaluate() error {
	r.e.begin(memory.Key{Phase: memory.Evaluate, Microbatches: 1})
	r.micro = 0
	return errors.Join(r.forward(), r.e.end())
}

func (r *rank) forward() (err error) {
	for i := range r.pass {
		switch x := &r.pass[i]; {
		case x.do != nil:
			x.do(r, x, false)
		case x.leave:
			r.penalise(x.unit, false)
			r.done[x.unit]()
		default:
			if r.params[x.unit], r.done[x.unit], err = r.e.use(x.unit); err != nil {
				return err
			}
			r.penalise(x.unit, false)
		}
	}
	return nil
}

// penalise adds a unit's penalty to the loss, or to the gradients.
func (r *rank) penalise(unit int, backward bool) {
	for i, p := range r.units[unit].Params {
		w, n := r.params[unit](i), uint64(p.Elements())
		if backward {
			r.launch(&penaltyBackward, "rw", ranges{w, r.grads[unit](i)}, typeFlag(p.Type), typeFlag(r.c.gradComm), n)
		} else {
			r.launch(&penalty, "rw", ranges{w, r.loss.All()}, typeFlag(p.Type), n)
		}
	}
}

func (r *rank) backward() error {
	for _, d := range r.dact {
		r.compute.Fill(d, 0)
	}
	for i := len(r.pass) - 1; i >= 0; i-- {
		switch x := &r.pass[i]; {
		case x.do != nil:
			x.do(r, x, true)
		case !x.leave:
			r.penalise(x.unit, true)
			r.done[x.unit]()
		default:
			params, used, err := r.e.use(x.unit)
			if err != nil {
				return err
			}
			grads, written, err := r.e.grad(x.unit)
			if err != nil {
				return err
			}
			r.params[x.unit], r.grads[x.unit] = params, grads
			r.penalise(x.unit, false) // a reading, at once
			r.done[x.unit] = func() {
				written()
				used()
			}
		}
	}
	return nil
}

// read returns all parameters, including gradients.
func (r *rank) read(one func(unit, param int, which Copy) ([]float32, error)) (all []float32, err error) {
	for u, unit := range r.units {
		for i := range unit.Params {
			for _, which := range []Copy{Weights, Params, Grads} {
				values, err := one(u, i, which)
				if err != nil {
					return nil, err
				}
				all = append(all, values...)
			}
		}
	}
	return all, nil
}

// download returns numbers of the device.
func (r *rank) download(src device.Range, t bucket.Type) ([]float32, error) {
	raw := make([]byte, src.Len)
	if err := r.compute.Download(raw, src); err != nil {
		return nil, err
	}
	out := make([]float32, 0, len(raw))
	for len(raw) > 0 {
		if t == FP32 {
			out, raw = append(out, math.Float32frombits(binary.LittleEndian.Uint32(raw))), raw[4:]
		} else {
			out, raw = append(out, math.Float32frombits(uint32(binary.LittleEndian.Uint16(raw))<<16)), raw[2:]
		}
	}
	return out, nil
}

// token returns the tokens of the current microbatch.
func (r *rank) token(n int) device.Range {
	return r.tokens.Slice(memory.Bytes(4*(length+2)*r.micro), memory.Bytes(4*n))
}

// launch issues a kernel with the ranges that it reads and writes, and its other
// arguments.
func (r *rank) launch(k *device.Kernel, order string, ranges []device.Range, args ...uint64) {
	l := device.NewLaunch(k, 1, 1)
	for i, x := range ranges {
		if order[i] == 'r' {
			l.Read(x)
		} else {
			l.Write(x)
		}
	}
	for _, a := range args {
		l.Arg(a)
	}
	r.compute.Launch(l)
}
