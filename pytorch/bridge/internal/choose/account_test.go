// This file owns the tests of memory: it is counted, not placed.

package choose

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// drawRequest is a step of any order, in which groups share storages.
func drawRequest(t *rapid.T) *Request {
	r := &Request{Offload: true, Recompute: true, Links: &Links{Out: 1e9, In: 1e9}}
	below := func(n int, what string) int { return rapid.IntRange(0, n-1).Draw(t, what) }
	for i := range 1 + below(3, "units") {
		r.Units = append(r.Units, Unit{Name: "u", Layer: i, Offload: rapid.Bool().Draw(t, "offload"), Recompute: time.Duration(below(5, "recompute"))})
	}
	type held struct{ unit, microbatch, stage int }
	var groups []held
	var loose, open []int // storages that were taken and not given, and saved ones without a give
	uses := make([]int, len(r.Units))
	add := func(n int64) int { r.Storages = append(r.Storages, memory.Bytes(n)); return len(r.Storages) - 1 }
	for range below(30, "ops") {
		r.Span += time.Duration(below(20, "work"))
		size := int64(below(12, "bytes"))
		switch below(5, "what") {
		case 0:
			id := add(size)
			loose = append(loose, id)
			r.Ops = append(r.Ops, Op{Kind: "take", Storage: &id, At: r.Span})
		case 1:
			if len(loose) > 0 {
				i := below(len(loose), "give")
				id := loose[i]
				loose = append(loose[:i:i], loose[i+1:]...)
				r.Ops = append(r.Ops, Op{Kind: "give", Storage: &id, At: r.Span})
			}
		case 2, 3:
			u := below(len(r.Units), "unit")
			ids := []int{add(size)}
			if len(loose) > 0 && rapid.Bool().Draw(t, "taken") {
				ids = append(ids, loose[below(len(loose), "which")])
			}
			if len(open) > 0 && rapid.Bool().Draw(t, "shared") {
				ids = append(ids, open[below(len(open), "shares")])
			}
			open = append(open, ids[0])
			r.Ops = append(r.Ops, Op{Kind: "save", Unit: &u, Microbatch: uses[u], Storages: ids, At: r.Span})
			groups = append(groups, held{u, uses[u], 0})
			uses[u]++
		case 4:
			if len(groups) > 0 {
				i := below(len(groups), "group")
				g := &groups[i]
				if g.stage == 2 {
					continue
				}
				r.Ops = append(r.Ops, Op{Kind: []string{"load", "release"}[g.stage], Unit: &g.unit, Microbatch: g.microbatch, At: r.Span})
				g.stage++
			}
		}
	}
	r.Limit = 1 + memory.Bytes(below(80, "limit"))
	return r
}

// live returns the bytes that storages hold after every event with everything kept: each
// counts from its take, or else its first save, to its give, or else its last save, and as
// long as a group that saved it is not released.
func (r *Request) live() []memory.Bytes {
	type span struct{ from, to int }
	n := len(r.Storages)
	owner, given, holds := make([]span, n), make([]bool, n), make([][]int, n)
	for i := range owner {
		owner[i] = span{-1, -1}
	}
	released := map[groupKey]int{}
	for i, op := range r.Ops {
		switch op.Kind {
		case "take":
			owner[*op.Storage] = span{i, len(r.Ops)}
		case "give":
			owner[*op.Storage].to, given[*op.Storage] = i, true
		case "release":
			released[groupKey{*op.Unit, op.Microbatch}] = i
		}
	}
	for i, op := range r.Ops {
		for _, id := range op.Storages {
			if owner[id].from < 0 {
				owner[id].from = i
			}
			if !given[id] {
				owner[id].to = i // held during the save
			}
			end := len(r.Ops)
			if at, known := released[groupKey{*op.Unit, op.Microbatch}]; known {
				end = at
			}
			holds[id] = append(holds[id], i, end)
		}
	}
	sums := make([]memory.Bytes, len(r.Ops))
	for i := range sums {
		for id, size := range r.Storages {
			in := owner[id].from >= 0 && owner[id].from <= i && i < owner[id].to
			for k := 0; k < len(holds[id]); k += 2 {
				in = in || holds[id][k] <= i && i < holds[id][k+1]
			}
			if in {
				sums[i] += size
			}
		}
	}
	return sums
}

// SPEC S6.4: with everything kept, the account is the sum of what is alive, after every
// event of any step: there are no holes, no rounding, and nothing is counted twice.
func TestAccountIsTheSum(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := drawRequest(t)
		if err := r.check(); err != nil {
			t.Fatal(err)
		}
		want := r.live()
		m := residency.New(residency.Config{Device: residency.Unlimited, Host: residency.Unlimited, Align: 1, Borrowed: true}, &silent{}, nil)
		w := newWriter(r)
		for i := range r.Ops {
			from := len(w.ops)
			w.op(i)
			tape := residency.Tape{Ops: w.ops[from:]}
			if err := tape.Run(m, func(residency.Op) {}); err != nil {
				t.Fatal(err)
			}
			if m.Check(); m.Device().Live() != want[i] {
				t.Fatalf("after op %d of %+v: %d bytes are counted, %d are alive", i, r, m.Device().Live(), want[i])
			}
		}
	})
}

// silent does nothing.
type silent struct{ marks residency.Mark }

func (x *silent) Record(residency.Lane) residency.Mark { x.marks++; return x.marks }
func (x *silent) After(residency.Lane, residency.Mark) {}
func (x *silent) Out(*residency.Storage)               {}
func (x *silent) In(*residency.Storage)                {}
func (x *silent) ReturnMemory(*residency.Storage)      {}
func (x *silent) ProvideMemory(*residency.Storage)     {}

// Any step is answered: within its limit, or with the smallest that would do.
func TestAnyStep(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := drawRequest(t)
		if err := answered(r); err != nil {
			t.Fatalf("%+v: %v", r, err)
		}
	})
}
