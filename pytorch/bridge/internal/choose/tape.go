// This file owns the step as the solver reads it.

package choose

import (
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// unit returns the name of a unit.
func (r *Request) unit(i int) memory.Unit {
	return memory.Unit{Name: r.Units[i].Name, Layer: r.Units[i].Layer}
}

// profile returns the step for the solver. Storages that are saved are borrowed: their
// memory is counted until compute is ordered after their copies. Others are temporaries.
// Empty storages are left out.
func (r *Request) profile() *policy.Profile {
	p := &policy.Profile{Units: make(map[memory.Unit]policy.Facts, len(r.Units)), Drag: r.Drag}
	for i, u := range r.Units {
		p.Units[r.unit(i)] = policy.Facts{CanOffload: u.Offload, Recompute: u.Recompute}
	}
	w := newWriter(r)
	for i := range r.Ops {
		w.op(i)
	}
	p.Tape = residency.Tape{Ops: w.ops, Span: r.Span}
	return p
}

// writer writes a tape. The machine numbers storages in the order in which they are taken.
type writer struct {
	r      *Request
	ops    []residency.Op
	number []int // of each storage on the tape, or -1
	last   []int // the last event that saves each storage, or -1
	given  []bool
	count  int
}

func newWriter(r *Request) *writer {
	n := len(r.Storages)
	w := &writer{r: r, number: make([]int, n), last: make([]int, n), given: make([]bool, n), ops: make([]residency.Op, 0, 2*len(r.Ops))}
	for i := range n {
		w.number[i], w.last[i] = -1, -1
	}
	for i, op := range r.Ops {
		for _, id := range op.Storages {
			w.last[id] = i
		}
		if op.Kind == "give" {
			w.given[*op.Storage] = true
		}
	}
	return w
}

func (w *writer) op(i int) {
	op := &w.r.Ops[i]
	switch op.Kind {
	case "take":
		w.take(*op.Storage, op)
	case "give":
		w.give(*op.Storage, op)
	case "save":
		w.save(i, op)
	case "load":
		w.ops = append(w.ops, residency.Op{Kind: residency.OpLoad, Group: w.group(op), At: op.At})
	case "release":
		w.ops = append(w.ops, residency.Op{Kind: residency.OpRelease, Group: w.group(op), At: op.At})
	}
}

func (w *writer) group(op *Op) memory.GroupID {
	u := w.r.unit(*op.Unit)
	return memory.GroupID{Name: u.Name, Layer: u.Layer, Microbatch: op.Microbatch}
}

func (w *writer) take(id int, op *Op) {
	n := w.r.Storages[id]
	if n == 0 || w.number[id] >= 0 {
		return
	}
	kind := residency.OpTake
	if w.last[id] >= 0 {
		kind = residency.OpBorrow
	}
	w.ops = append(w.ops, residency.Op{Kind: kind, ID: w.count, Bytes: n, At: op.At})
	w.number[id] = w.count
	w.count++
}

func (w *writer) give(id int, op *Op) {
	if n := w.number[id]; n >= 0 {
		w.ops = append(w.ops, residency.Op{Kind: residency.OpGive, ID: n, At: op.At})
	}
}

// save takes the storages that nobody took, and gives back those that it is the last to
// save, unless an event says when.
func (w *writer) save(i int, op *Op) {
	items := make([]residency.Item, 0, len(op.Storages))
	for k, id := range op.Storages {
		if w.take(id, op); w.number[id] >= 0 {
			items = append(items, residency.Item{ID: w.number[id], Stay: len(op.Stay) > 0 && op.Stay[k]})
		}
	}
	w.ops = append(w.ops, residency.Op{Kind: residency.OpSave, Group: w.group(op), Items: items, At: op.At})
	for _, id := range op.Storages {
		if w.last[id] == i && !w.given[id] {
			w.give(id, op)
		}
	}
}
