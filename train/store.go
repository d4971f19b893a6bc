// This file owns parameters that every rank holds whole.

package train

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// store holds a rank's parameters, their gradients and the optimiser's state.
type store interface {
	layer.Store
	// begin and end enclose the work of a step. begin sets all gradients to zero, but for
	// those that the first pass stores, unless evaluate is set.
	begin(s device.Stream, evaluate bool)
	end() error
	// reduce adds up gradients over the ranks that hold the same parameters.
	reduce(s device.Stream)
	// runs returns the memory that the optimiser updates. No run of any rank of the stage
	// has more elements than longest.
	runs() []run
	longest() int
	// cast converts weights to the parameters that passes read, unless the optimiser has
	// done so.
	cast(s device.Stream)
	// load sets and read returns a whole parameter, in fp32. All ranks that share it must
	// call them in the same order. read may use memory for it that is large enough.
	load(k key, values []float32) error
	read(k key, to []float32) ([]float32, error)
	// moments returns the optimiser's state on this rank: all of it, or the part that
	// this rank writes to disk.
	moments(all bool) []momentPart
	close(s device.Stream)
}

// key identifies a parameter by its FSDP unit and its index there.
type key struct{ unit, param int }

// run is a range of weights, with their gradients and moments, that the optimiser updates
// with one call.
type run struct {
	w, m, v, g device.Range
	gtype      kernels.Number
	param      device.Range // the copy that passes read, if its format differs
	ptype      kernels.Number
	noDecay    bool
	counted    bool // whether this copy counts for the norm of all gradients
}

// momentPart is device memory that holds a part of a tensor of the optimiser's state.
type momentPart struct {
	name     string // of the tensor in a checkpoint
	from, of int    // the first element of the part, and the elements of the tensor
	device.Range
}

// file returns the name of the part in a file: that of the tensor, or that followed by
// the first element if the part is not the whole tensor.
func (m momentPart) file() string {
	if memory.Bytes(4*m.of) == m.Len {
		return m.name
	}
	return fmt.Sprintf("%s@%d", m.name, m.from)
}

// class says which other ranks hold a parameter.
type class uint8

const (
	dense  class = iota // all data-parallel ranks of the stage
	expert              // the ranks with the same experts
	shared              // the ranks of the first and of the last stage
	classes
)

// whole is a store that keeps whole parameters. It sorts them by class, so that few calls
// reduce all gradients, and within a class by whether they decay.
type whole struct {
	r      *rank
	units  []*layer.Unit
	at     map[key]memory.Bytes // the offset of each parameter's fp32 weights
	spans  []span
	added  []span // whose gradients begin with zero, because no pass stores them
	sums   reduction
	memory *device.Buffer // w, g, m, v and, if activations are not fp32, the parameters
	size   memory.Bytes   // of each
}

// span is a range of parameters of one class that decay alike.
type span struct {
	class   class
	noDecay bool
	from    memory.Bytes
	n       memory.Bytes
}

const paramAlign = device.Align

// newWhole allocates the store and fills it with zeros.
func newWhole(r *rank, units []*layer.Unit) (*whole, error) {
	w := &whole{r: r, units: units, at: map[key]memory.Bytes{}, sums: reduction{r: r}}
	type item struct {
		key
		class   class
		noDecay bool
		n       memory.Bytes
	}
	var items []item
	for u, unit := range units {
		for i, p := range unit.Params {
			items = append(items, item{key{u, i}, r.class(p), p.NoDecay, memory.Bytes(4 * p.Elements())})
		}
	}
	slices.SortStableFunc(items, func(a, b item) int {
		decay := func(x item) int {
			if x.noDecay {
				return 1
			}
			return 0
		}
		return cmp.Or(cmp.Compare(a.class, b.class), cmp.Compare(decay(a), decay(b)))
	})
	for _, x := range items {
		if n := len(w.spans); n == 0 || w.spans[n-1].class != x.class || w.spans[n-1].noDecay != x.noDecay {
			w.spans = append(w.spans, span{x.class, x.noDecay, w.size, 0})
		}
		w.at[x.key] = w.size
		n := (x.n + paramAlign - 1) / paramAlign * paramAlign
		if !units[x.unit].Stores(x.param) {
			if k := len(w.added) - 1; k >= 0 && w.added[k].from+w.added[k].n == w.size {
				w.added[k].n += n
			} else {
				w.added = append(w.added, span{from: w.size, n: n})
			}
		}
		w.sums.add(x.class, x.unit, x.noDecay, w.size, n)
		w.size += n
		last := &w.spans[len(w.spans)-1]
		last.n = w.size - last.from
	}
	total := 4 * w.size
	if w.narrow() {
		total += w.size / 2
	}
	var err error
	if w.memory, err = r.dev.Alloc(memory.Device, max(total, paramAlign), "parameters"); err != nil {
		return nil, err
	}
	if err := w.sums.open(len(units), w.grads()); err != nil {
		r.s.Free(w.memory)
		return nil, errors.Join(err, w.sums.close())
	}
	r.s.Fill(w.memory.All(), 0)
	return w, nil
}

// narrow reports whether passes read a copy in another format.
func (w *whole) narrow() bool { return w.r.cfg.Number != kernels.F32 }

func (w *whole) grads() device.Range { return w.memory.Slice(w.size, w.size) }

// Use binds units to their memory, which never moves.
func (w *whole) Use(grads bool, units ...*layer.Unit) (func(), error) {
	for _, u := range units {
		i := slices.Index(w.units, u)
		weights := func(p int) device.Range {
			at, n := w.at[key{i, p}], memory.Bytes(u.Params[p].Elements())
			if u.Params[p].Type == kernels.F32 {
				return w.memory.Slice(at, 4*n)
			}
			return w.memory.Slice(4*w.size+at/2, 2*n)
		}
		to := func(p int) device.Range {
			return w.grads().Slice(w.at[key{i, p}], memory.Bytes(4*u.Params[p].Elements()))
		}
		u.Bind(weights, to)
		u.Fresh = w.sums.passes[i] == 0
	}
	if !grads {
		return func() {}, nil
	}
	return func() {
		for _, u := range units {
			w.sums.wrote(slices.Index(w.units, u), w.r.s)
		}
	}, nil
}

func (w *whole) begin(s device.Stream, evaluate bool) {
	if !evaluate {
		w.sums.begin()
		for _, x := range w.added {
			s.Fill(w.grads().Slice(x.from, x.n), 0)
		}
	}
}

func (w *whole) end() error         { return nil }
func (w *whole) cast(device.Stream) {}

// reduce adds up the gradients that were not added up during the backward passes.
func (w *whole) reduce(s device.Stream) { w.sums.end(s) }

func (w *whole) runs() (out []run) {
	for _, sp := range w.spans {
		at := func(i memory.Bytes) device.Range { return w.memory.Slice(i*w.size+sp.from, sp.n) }
		r := run{w: at(0), g: at(1), m: at(2), v: at(3), gtype: kernels.F32, noDecay: sp.noDecay, counted: w.r.counts(sp.class)}
		if w.narrow() {
			r.param, r.ptype = w.memory.Slice(4*w.size+sp.from/2, sp.n/2), w.r.cfg.Number
		}
		out = append(out, r)
	}
	return out
}

func (w *whole) longest() (n int) {
	for _, sp := range w.spans {
		n = max(n, int(sp.n/4))
	}
	return n
}

func (w *whole) place(k key) device.Range {
	return w.memory.Slice(w.at[k], memory.Bytes(4*w.units[k.unit].Params[k.param].Elements()))
}

func (w *whole) load(k key, values []float32) error {
	r := w.place(k)
	w.r.s.Upload(r, bytesOf(values))
	if w.narrow() {
		kernels.Convert(w.r.s, w.memory.Slice(4*w.size+w.at[k]/2, r.Len/2), w.r.cfg.Number, r, kernels.F32)
	}
	return w.r.s.Sync()
}

func (w *whole) read(k key, to []float32) ([]float32, error) {
	r := w.place(k)
	n := int(r.Len / 4)
	if len(to) < n {
		to = make([]float32, n)
	}
	return to[:n], w.r.s.Download(bytesOf(to[:n]), r)
}

// moments returns the moments of each parameter under its name.
func (w *whole) moments(all bool) (out []momentPart) {
	for u, unit := range w.units {
		for i, p := range unit.Params {
			if !all && !w.r.writes(p) {
				continue
			}
			for _, q := range pieces(p) {
				at, n := w.at[key{u, i}]+memory.Bytes(4*q.from), memory.Bytes(4*q.n)
				out = append(out,
					momentPart{q.name + ".exp_avg", 0, q.n, w.memory.Slice(2*w.size+at, n)},
					momentPart{q.name + ".exp_avg_sq", 0, q.n, w.memory.Slice(3*w.size+at, n)})
			}
		}
	}
	return out
}

func (w *whole) close(s device.Stream) {
	_ = w.sums.close() // closing the device reports the same error
	s.Free(w.memory)
}
