// This file owns the equipment of the layer tests: a model on one rank, its loss, and the
// gradients of its parameters.

package layer

import (
	"cmp"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/devicelog"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// rig is a whole model on one CPU device.
type rig struct {
	t      *testing.T
	dev    device.Device
	s      device.Stream
	rt     *engine.Runtime
	env    *Env
	chunk  *Chunk
	mem    map[*Unit][2]*device.Buffer // weights and gradients
	tokens Tokens
	bufs   []*device.Buffer
	space  *stash.Workspace
	log    *devicelog.Log // of what the device is asked for, if that was wanted
}

// rigOptions says how a rig differs from the plain one.
type rigOptions struct {
	number    kernels.Number
	rows      Rows
	recompute memory.Policy
	settings  func(*Settings)
	seq       int // tokens of a sequence; zero stands for 8
	logged    bool
}

func newRig(t *testing.T, m *model.Model, o rigOptions) *rig {
	t.Helper()
	dev, err := cpu.Open(cpu.Options{Capacity: [memory.Kinds]memory.Bytes{memory.GiB, memory.GiB}})
	ok(t, err)
	r := &rig{t: t, dev: dev, mem: map[*Unit][2]*device.Buffer{}}
	if o.logged {
		r.dev, r.log = devicelog.Wrap(dev)
	}
	s, err := r.dev.NewStream("compute")
	ok(t, err)
	r.s = s
	cfg := engine.Config{Device: r.dev, Compute: s, Policy: o.recompute, Links: memory.Links{Out: 1e10, In: 1e10}}
	if o.rows == Stashed {
		cfg.Stash = &stash.ManagerConfig{}
		cfg.Stash.Store.Page = 4096
		cfg.Stash.Store.Pages[stash.Device], cfg.Stash.Store.Max[stash.Device], cfg.Stash.Store.Max[stash.Host] = 256, 4096, 4096
	}
	r.rt, err = engine.Open(cfg)
	ok(t, err)
	settings := DefaultSettings()
	if o.settings != nil {
		o.settings(&settings)
	}
	shape := Shape{Batch: 2, Seq: cmp.Or(o.seq, 8), Number: o.number}
	shape.Scale = 1 / float32(shape.Tokens())
	r.env = &Env{
		Model: m, Settings: settings, Shape: shape, Expert: Place{0, 1}, Rows: o.rows,
		Table: func(n int) device.Range {
			x := RotaryTable(shape.Seq, n, settings.Theta)
			b := r.alloc(len(x))
			s.Upload(b, floats(x))
			return b
		},
		Balance: func(_ string, experts int, bias bool) Balance {
			b := Balance{Load: r.alloc(experts), Loss: r.alloc(1)}
			if bias {
				b.Bias = r.alloc(experts)
			}
			return b
		},
		Sums: Sums{r.alloc(Ahead(m))},
	}
	r.env.Space = func(width int) *stash.Workspace {
		return r.space
	}
	r.chunk = Build(r.env, Span{0, len(m.Layers), true, true})
	if o.rows == Stashed {
		for _, l := range m.Layers {
			if l.MoE != nil && r.space == nil {
				_, worst := r.env.RowBounds(l.MoE)
				r.space, err = r.rt.NewWorkspace(RowsGroup, 2, stash.Rows(worst), RowTensors(m.Hidden, l.MoE.Width, o.number, stash.Rows(worst))...)
				ok(t, err)
			}
		}
	}
	for _, u := range r.chunk.Units {
		n := 0
		for _, p := range u.Params {
			n += p.Elements()
		}
		r.mem[u] = [2]*device.Buffer{r.alloc(n).Buf, r.alloc(n).Buf}
		for i, p := range u.Params {
			r.set(u, i, p.Values(5, 1))
		}
	}
	ids := make([]uint32, (1+Ahead(m))*shape.Tokens())
	rnd := rand.New(rand.NewPCG(1, 2))
	for i := range ids {
		ids[i] = uint32(rnd.IntN(m.Vocab))
	}
	b := r.alloc(len(ids))
	s.Upload(b, unsafe.Slice((*byte)(unsafe.Pointer(&ids[0])), 4*len(ids)))
	r.tokens = Tokens{b, shape.Tokens()}
	t.Cleanup(r.close)
	return r
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func floats(x []float32) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(&x[0])), 4*len(x)) }

// alloc returns n words that are zero.
func (r *rig) alloc(n int) device.Range {
	b, err := r.dev.Alloc(memory.Device, memory.Bytes(4*n), "test")
	ok(r.t, err)
	r.bufs = append(r.bufs, b)
	r.s.Fill(b.All(), 0)
	return b.All()
}

// place returns the memory of a parameter or its gradient, with four bytes for each
// number.
func (r *rig) place(u *Unit, i, which int) device.Range {
	at := 0
	for _, p := range u.Params[:i] {
		at += p.Elements()
	}
	return r.mem[u][which].Slice(memory.Bytes(4*at), memory.Bytes(4*u.Params[i].Elements()))
}

func (r *rig) set(u *Unit, i int, x []float32) {
	to := r.place(u, i, 0)
	if u.Params[i].Type == kernels.F32 {
		r.s.Upload(to, floats(x))
		return
	}
	tmp := r.alloc(len(x))
	r.s.Upload(tmp, floats(x))
	kernels.Convert(r.s, to.Slice(0, to.Len/2), kernels.BF16, tmp, kernels.F32)
}

// get reads a parameter in fp32, or its gradient if which is 1.
func (r *rig) get(u *Unit, i, which int) []float32 {
	x := make([]float32, u.Params[i].Elements())
	ok(r.t, r.s.Download(floats(x), r.place(u, i, which)))
	return x
}

// Use binds units to the rig's memory.
func (r *rig) Use(grads bool, units ...*Unit) (func(), error) {
	for _, u := range units {
		u.Bind(func(i int) device.Range { return r.place(u, i, 0) }, func(i int) device.Range { return r.place(u, i, 1) })
	}
	return func() {}, nil
}

// step runs the model forward and backward, and returns the loss.
func (r *rig) step() float64 {
	r.t.Helper()
	for _, b := range r.mem {
		r.s.Fill(b[1].All(), 0)
	}
	var aux []device.Range
	for _, b := range r.chunk.blocks {
		for _, p := range b.parts {
			if m, is := p.(*mixture); is {
				aux = append(aux, m.balance.Loss)
				r.s.Fill(m.balance.Loss, 0)
			}
		}
	}
	ok(r.t, r.rt.Step(memory.Key{Microbatches: 1}, func(st *engine.Step) error {
		return Guard(func() {
			r.s.Fill(r.env.Sums.Range, 0)
			p := Pass{Step: st, S: r.s, Shape: r.env.Shape}
			r.chunk.Forward(p, r, r.tokens, Mat{})
			r.chunk.Backward(p, r, r.tokens, Mat{})
		})
	}))
	x := make([]float32, Ahead(r.env.Model))
	ok(r.t, r.s.Download(floats(x), r.env.Sums.Range))
	loss := float64(x[0])
	for _, v := range x[1:] {
		loss += MTPFactor * float64(v) / float64(len(x)-1)
	}
	for _, a := range aux {
		v := make([]float32, 1)
		ok(r.t, r.s.Download(floats(v), a))
		loss += float64(v[0])
	}
	return loss
}

func (r *rig) close() {
	ok(r.t, r.rt.Close())
	for _, b := range r.bufs {
		r.s.Free(b)
	}
	ok(r.t, r.s.Close())
	ok(r.t, r.dev.Close())
}

// checkGradients compares the gradient of every parameter along a random direction with
// the difference of losses. Losses are fp32 and of order 5, so a difference over 2
// epsilon is accurate to about 5e-7/epsilon. Parameters are made larger first, so that
// every one matters.
func checkGradients(t *testing.T, m *model.Model, o rigOptions) {
	t.Helper()
	r := newRig(t, m, o)
	rnd := rand.New(rand.NewPCG(3, 4))
	for _, u := range r.chunk.Units {
		for i, p := range u.Params {
			if p.init == normal || p.init == scaled {
				x := r.get(u, i, 0)
				for k := range x {
					x[k] = float32(0.3 * rnd.NormFloat64())
				}
				r.set(u, i, x)
			}
		}
	}
	r.step()
	type dir struct {
		u *Unit
		i int
		d []float32
		g float64
	}
	var dirs []dir
	for _, u := range r.chunk.Units {
		for i := range u.Params {
			g := r.get(u, i, 1)
			d, norm := make([]float32, len(g)), 0.0
			for k := range d {
				d[k] = float32(rnd.NormFloat64())
				norm += float64(g[k]) * float64(g[k])
			}
			// The direction is close to the gradient, so that the difference is large.
			sum := 0.0
			for k := range d {
				d[k] = float32(float64(g[k])/math.Max(math.Sqrt(norm), 1e-30) + 0.3*float64(d[k])/math.Sqrt(float64(len(d))))
				sum += float64(d[k]) * float64(g[k])
			}
			dirs = append(dirs, dir{u, i, d, sum})
		}
	}
	for _, d := range dirs {
		x := r.get(d.u, d.i, 0)
		const eps = 4e-3
		at := func(by float32) float64 {
			y := make([]float32, len(x))
			for k := range y {
				y[k] = x[k] + by*d.d[k]
			}
			r.set(d.u, d.i, y)
			return r.step()
		}
		// Two widths cancel the error of second order.
		wide, narrow := (at(2*eps)-at(-2*eps))/(4*eps), (at(eps)-at(-eps))/(2*eps)
		want := (4*narrow - wide) / 3
		r.set(d.u, d.i, x)
		if math.Abs(d.g-want) > 4e-4+0.01*math.Abs(want) {
			t.Errorf("%s: gradient along a direction %.6g, differences %.6g", d.u.Params[d.i].Name, d.g, want)
		} else {
			t.Logf("%s: %.6g, %.6g", d.u.Params[d.i].Name, d.g, want)
		}
	}
}
