// This file owns the steps that the tests work on.

package policy

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// module is a module of a layer of a made-up model.
type module struct {
	name     string
	bytes    memory.Bytes
	forward  time.Duration
	backward time.Duration
}

// record is the step of a rank: every module takes its storage, works, saves it
// and gives it back; backward loads it, works and releases it.
func record(passes []schedule.Pass, layers int, modules ...module) *Profile {
	return recordShared(passes, layers, false, modules...)
}

// recordShared is a step in which a module may also save what the module before it
// in the same layer did, its input: a storage of two groups.
func recordShared(passes []schedule.Pass, layers int, shared bool, modules ...module) *Profile {
	p := &Profile{Units: map[memory.Unit]Facts{}}
	emit := func(op residency.Op) { op.At = p.Tape.Span; p.Tape.Ops = append(p.Tape.Ops, op) }
	id := 0
	for _, pass := range passes {
		for i := range layers * len(modules) {
			if pass.Backward {
				i = layers*len(modules) - 1 - i
			}
			m := modules[i%len(modules)]
			g := memory.GroupID{Name: m.name, Chunk: pass.Chunk, Layer: i / len(modules), Microbatch: pass.Microbatch}
			if pass.Backward {
				emit(residency.Op{Kind: residency.OpLoad, Group: g})
				p.Tape.Span += m.backward
				emit(residency.Op{Kind: residency.OpRelease, Group: g})
				continue
			}
			emit(residency.Op{Kind: residency.OpTake, ID: id, Bytes: memory.Bytes(m.bytes)})
			p.Tape.Span += m.forward
			items := []residency.Item{{ID: id}}
			if shared && i%len(modules) > 0 {
				items = append(items, residency.Item{ID: id - 1})
			}
			emit(residency.Op{Kind: residency.OpSave, Group: g, Items: items})
			if len(items) > 1 {
				emit(residency.Op{Kind: residency.OpGive, ID: id - 1})
			}
			if !shared || (i+1)%len(modules) == 0 {
				emit(residency.Op{Kind: residency.OpGive, ID: id})
			}
			id++
			p.Units[g.Unit()] = Facts{CanOffload: true, Recompute: m.forward}
		}
	}
	return p
}

// single is the passes of one microbatch.
var single = []schedule.Pass{{}, {Backward: true}}

func passes(t testing.TB, p schedule.Pipeline, rank int) []schedule.Pass {
	t.Helper()
	list, err := p.Passes(rank)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

const ms = time.Millisecond

// cfg is a machine with room for everything, where bytes are bytes.
var cfg = residency.Config{Device: noLimit, Host: noLimit, Align: 1}

// slow is a link of a byte a millisecond each way.
var slow = memory.Links{Out: 1000, In: 1000}

// drawProfile is a small step of any shape, with at most so many units.
func drawProfile(t *rapid.T, most int) *Profile {
	var list []schedule.Pass
	chunks := 1
	if rapid.Bool().Draw(t, "pipeline") {
		pipe := schedule.Pipeline{Ranks: rapid.IntRange(1, 3).Draw(t, "ranks"), Chunks: 1, Microbatches: rapid.IntRange(1, 4).Draw(t, "microbatches")}
		if pipe.Ranks > 1 {
			chunks = rapid.IntRange(1, 2).Draw(t, "chunks")
			pipe.Chunks = chunks
		}
		list, _ = pipe.Passes(rapid.IntRange(0, pipe.Ranks-1).Draw(t, "rank"))
	} else {
		list = single
	}
	names := []string{"attn_norm", "core_attn", "moe_act"}
	var modules []module
	for _, n := range names[:rapid.IntRange(1, 3).Draw(t, "modules")] {
		d := time.Duration(rapid.IntRange(1, 50).Draw(t, "work"))
		modules = append(modules, module{n, memory.Bytes(rapid.Int64Range(1, 40).Draw(t, "bytes")), d * ms, 2 * d * ms})
	}
	p := recordShared(list, rapid.IntRange(1, min(3, most/(chunks*len(modules)))).Draw(t, "layers"), rapid.Bool().Draw(t, "inputs"), modules...)
	p.Base = memory.Bytes(rapid.Int64Range(0, 20).Draw(t, "base"))
	for u, f := range p.Units {
		f.CanOffload = u.Name != "attn_norm" || u.Layer != 1
		if u.Name == "core_attn" && u.Layer == 0 {
			f.Recompute = 0
		}
		p.Units[u] = f
	}
	if len(modules) == 3 && rapid.Bool().Draw(t, "rows") {
		page := memory.Bytes(rapid.Int64Range(1, 20).Draw(t, "page"))
		p = withRows(p, "moe_act", page, rapid.IntRange(1, 3).Draw(t, "sets"))
	}
	return p
}

// withRows is a step in which the stash holds what a module saves, in so many sets of
// one workspace. What the module takes is a temporary then.
func withRows(p *Profile, name string, page memory.Bytes, sets int) *Profile {
	q := &Profile{Base: p.Base, Units: map[memory.Unit]Facts{}, Rows: &Rows{Page: page, Need: map[memory.GroupID]schedule.Pages{}, Sets: []int{sets}, Ahead: 1}}
	for u, f := range p.Units {
		if q.Units[u] = f; u.Name == name {
			q.Units[u] = Facts{Rows: true, CanOffload: true}
		}
	}
	sizes := map[int]memory.Bytes{}
	for _, op := range p.Tape.Ops {
		if op.Kind == residency.OpTake {
			sizes[op.ID] = op.Bytes
		}
		if op.Group.Name != name {
			q.Tape.Ops = append(q.Tape.Ops, op)
			continue
		}
		switch op.Kind {
		case residency.OpSave:
			q.Rows.Need[op.Group] = schedule.PagesOf(page, sizes[op.Items[0].ID])
			lease := residency.Op{Kind: residency.OpRowLease, Group: op.Group, At: op.At}
			q.Tape.Ops = append(q.Tape.Ops, lease)
			op.Kind, op.Items = residency.OpRowSave, nil
		case residency.OpLoad:
			op.Kind = residency.OpRowReturn
		case residency.OpRelease:
			op.Kind = residency.OpRowDone
		}
		q.Tape.Ops = append(q.Tape.Ops, op)
	}
	q.Tape.Span = p.Tape.Span
	return q
}

func drawLinks(t *rapid.T) memory.Links {
	l := memory.Links{Out: float64(rapid.IntRange(100, 3000).Draw(t, "out")), In: float64(rapid.IntRange(100, 3000).Draw(t, "in"))}
	if rapid.Bool().Draw(t, "shared") {
		l.Both = max(l.Out, l.In) * rapid.Float64Range(1, 2).Draw(t, "both")
	}
	l.Latency = time.Duration(rapid.IntRange(0, 3).Draw(t, "latency")) * ms
	return l
}
