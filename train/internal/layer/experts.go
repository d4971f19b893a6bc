// This file owns the routed experts, and where their rows are held.

package layer

import (
	"encoding/binary"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// Rows says which memory rows get whose number only the device knows.
type Rows uint8

const (
	// With Exact the host waits for the number, as eager frameworks do.
	Exact Rows = iota
	// With Padded each expert has room for every token that may choose it.
	Padded
	// With Stashed rows are computed in buffers that all layers share, and the live ones
	// are held in pages.
	Stashed
)

// RowsGroup is the name of the group that is stashed: the input rows of experts, the input
// of their activation, and the weights of rows.
const RowsGroup = "fused_group_mlp"

// experts are the routed experts of a layer on one rank. They save
//
//	dispatch    the tables of the dispatcher
//	expert_fc1  their input rows, with their weights
//	moe_act     the input of their activation
//
// If rows are stashed, the last two are one group. The output of the activation is never
// saved, because its backward pass computes it.
type experts struct {
	*dispatcher
	rows     Rows
	assumed  int // rows if none are counted; zero counts them
	fc1, fc2 weight
	hidden   int // columns of a row
	width    int
	space    func(width int) *stash.Workspace
}

// RowTensors returns the tensors of the stashed group, for a workspace.
func RowTensors(hidden, width int, number kernels.Number, rows stash.Rows) []stash.Tensor {
	size := number.Size()
	return []stash.Tensor{
		{Name: "rows", Row: size * memory.Bytes(hidden), MaxRows: rows},
		{Name: "act", Row: 2 * size * memory.Bytes(width), MaxRows: rows},
		{Name: "weights", Row: 4, MaxRows: rows},
	}
}

// held has the rows of a microbatch.
type held struct {
	t       *tables
	x, h, w nn.Matrix
	rows    int              // that they have room for
	set     *stash.Set       // that holds them, or nil
	tab     *engine.Tensor   // the tensor that holds t
	made    []*engine.Tensor // x and w, if they have memory of their own
	done    func()           // frees everything but the tables
}

// forward computes y = plus + the experts' part. Beside runs while rows travel to the
// experts, and plus while they travel back.
func (e *experts) forward(p *Pass, y, xn nn.Matrix, index, weight device.Range, beside func(), plus func() nn.Matrix) {
	k := e.room(p)
	came := e.announce(p, k.t, index)
	rows, weights := k.t.send(p, xn, false), k.t.send(p, nn.NewMatrix(weight, kernels.F32, e.tokens*e.topK, 1), true)
	beside()
	if e.rows == Stashed {
		e.sort(p, k.t, index, came, k.set.Counts().Slice(0, 8), 0)
		p.save("dispatch", k.tab)
	} else {
		e.sortOwn(p, &k, index, came, &rows)
	}
	k.t.take(p, k.x, rows, false)
	k.t.take(p, k.w, weights, true)
	var a Mat // the output of the activation
	if e.rows == Stashed {
		a = p.New(k.rows, e.width)
		e.first(p, k.h, a.Matrix, k.x, k.w, k.t)
	} else {
		a = e.saveOwn(p, &k)
	}
	out := p.New(k.rows, e.hidden)
	nn.GroupedGemm(p.S, nn.Experts{A: a.Matrix, B: e.fc2.w(), C: out.Matrix, TransB: true, Seg: k.t.segments(), Expect: k.t.expect()})
	a.Free()
	k.done()
	back := k.t.giveBack(p, out, nn.Matrix{}, false)
	k.t.collect(p, y, back, plus())
	k.tab.Free() // not before: a saved table need not stay on the device
}

// first computes the experts' first product h, and the output of the activation if a has
// memory.
func (e *experts) first(p *Pass, h, a, x, w nn.Matrix, t *tables) {
	nn.GatedGemm(p.S, nn.GatedProduct{A: x, B: e.fc1.w(), C: h, Y: a, Weight: w.Range, Seg: t.segments(), Expect: t.expect()})
}

// room returns the memory for the rows of a microbatch as far as it is known before rows are
// sorted: tables, and a set of shared buffers if rows are stashed.
func (e *experts) room(p *Pass) (k held) {
	switch e.rows {
	case Stashed:
		set := p.Step.Lease(e.space(e.width), p.id(RowsGroup))
		k = e.held(p, set)
		k.done = func() {
			if p.Evaluate {
				set.Drop()
			} else {
				set.Saved()
			}
		}
	case Padded:
		k.rows = e.Padded()
	default:
		k.rows = e.Worst()
	}
	k.tab = p.words(e.words(k.rows))
	k.t = e.view(k.tab.Range(), k.rows)
	return k
}

// held returns the matrices of a set.
func (e *experts) held(p *Pass, set *stash.Set) (k held) {
	k.set, k.rows = set, int(set.Tensor(2).Len/4)
	k.x = nn.NewMatrix(set.Tensor(0), p.Number, k.rows, e.hidden)
	k.h = nn.NewMatrix(set.Tensor(1), p.Number, k.rows, 2*e.width)
	k.w = nn.NewMatrix(set.Tensor(2), kernels.F32, k.rows, 1)
	return k
}

// sortOwn sorts rows, which were sent, into memory of their own.
func (e *experts) sortOwn(p *Pass, k *held, index device.Range, came arrivals, sent *parcel) {
	slot := 0
	if e.rows == Padded {
		slot = e.slot()
	}
	count := p.bytes(8)
	e.sort(p, k.t, index, came, count.Range(), slot)
	p.save("dispatch", k.tab)
	if e.rows == Exact {
		var n [8]byte
		must(p.S.Download(n[:], count.Range()))
		if e.comm != nil {
			must(e.comm.Err()) // a rank that fails in the exchange leaves no counts
		}
		rows := binary.LittleEndian.Uint64(n[:])
		if rows > uint64(e.Worst()) {
			must(fmt.Errorf("layer: the experts of this rank were sent %d rows, but at most %d are possible; a rank must have sent wrong counts", rows, e.Worst()))
		}
		k.rows = max(1, e.assumed, int(rows))
	}
	count.Free()
	k.t.source = k.t.source.Slice(0, memory.Bytes(4*k.rows))
	sent.arrived() // what was sent makes room for what it becomes
	x, w := p.New(k.rows, e.hidden), p.newOf(kernels.F32, k.rows, 1)
	k.x, k.w = x.Matrix, w.Matrix
	k.done = func() {
		x.Free()
		w.Free()
	}
	k.made = []*engine.Tensor{x.t, w.t}
}

// saveOwn saves rows that have memory of their own, and computes the input of the activation.
// It returns its output.
func (e *experts) saveOwn(p *Pass, k *held) (a Mat) {
	p.save("expert_fc1", k.made...)
	var h Mat
	rows := k.rows
	p.run("moe_act", func(again bool) []*engine.Tensor {
		h = p.New(rows, 2*e.width)
		if again {
			d, g := p.load("dispatch"), p.load("expert_fc1")
			defer d.Done()
			defer g.Done()
			e.first(p, h.Matrix, nn.Matrix{}, g.mat(0, p.Number, rows, e.hidden), nn.Matrix{}, e.view(d.Range(0), e.roomOf(d.Range(0))))
		} else {
			a = p.New(rows, e.width)
			e.first(p, h.Matrix, a.Matrix, k.x, k.w, k.t)
		}
		return []*engine.Tensor{h.t}
	})
	k.h = h.Matrix
	done := k.done
	k.done = func() {
		done()
		h.Free()
	}
	return a
}

// roomOf returns how many rows fit into tables of a size.
func (e *experts) roomOf(r device.Range) int { return int(r.Len/4) - e.words(0) }

// backward computes the gradients of the tokens' rows and of their weights. Beside runs while
// the gradients of the output travel to the experts. The gradients of the first weights are
// computed while those of the rows travel back.
func (e *experts) backward(p *Pass, dxn nn.Matrix, dweight device.Range, dy nn.Matrix, beside func()) {
	tab := p.load("dispatch")
	t := e.view(tab.Range(0), e.roomOf(tab.Range(0)))
	sent := t.send(p, dy, false)
	beside()
	var k held
	var x, h group
	if e.rows == Stashed {
		k = e.held(p, p.Step.Restore(e.space(e.width), p.id(RowsGroup)))
	} else {
		x, h = p.load("expert_fc1"), p.load("moe_act")
		k.rows = int(x.Range(1).Len / 4)
		k.x = x.mat(0, p.Number, k.rows, e.hidden)
		k.w = x.mat(1, kernels.F32, k.rows, 1)
		k.h = h.mat(0, p.Number, k.rows, 2*e.width)
		t.source = t.source.Slice(0, memory.Bytes(4*k.rows))
	}
	sent.arrived() // what was sent makes room for what it becomes
	dout := p.New(k.rows, e.hidden)
	t.take(p, dout.Matrix, sent, false)
	a, dw, sums := p.New(k.rows, e.width), p.newOf(kernels.F32, k.rows, 1), p.words(nn.TileSums(k.rows, e.width))
	seg := t.segments()
	nn.GatedGemmGrad(p.S, nn.GatedProductGrad{
		A: dout.Matrix, B: e.fc2.w(), DX: k.h, X: k.h, Y: a.Matrix, Weight: k.w.Range, DWeight: dw.Range, Sums: sums.Range(), Seg: seg, Expect: t.expect(),
	})
	sums.Free()
	dpairs := nn.NewMatrix(dweight, kernels.F32, e.tokens*e.topK, 1)
	weights := t.giveBack(p, dw, dpairs, true)
	nn.GroupedGrad(p.S, nn.ExpertsGrad{A: dout.Matrix, B: a.Matrix, C: e.fc2.dw(), Seg: seg, First: e.fc2.first(), Expect: t.expect()})
	a.Free()
	nn.GroupedGemm(p.S, nn.Experts{A: k.h, B: e.fc1.w(), C: dout.Matrix, Seg: seg, Expect: t.expect()})
	rows := t.giveBack(p, dout, dxn, false)
	nn.GroupedGrad(p.S, nn.ExpertsGrad{A: k.h, B: k.x, C: e.fc1.dw(), Seg: seg, First: e.fc1.first(), Expect: t.expect()})
	if e.rows == Stashed {
		k.set.Done()
	} else {
		h.Done()
		x.Done()
	}
	t.collectPairs(p, dpairs, weights)
	t.collect(p, dxn, rows, nn.Matrix{})
	tab.Done()
}
