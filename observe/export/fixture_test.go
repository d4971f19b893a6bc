// This file owns the traces that the tests export: a normal one, and damaged ones.

package export

import (
	"strconv"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// made builds a trace. Compute begins a piece of work each microsecond, which takes 900 ns,
// and the host decides without delay.
type made struct {
	*trace.Trace
	step, next int
	first      uint64
	inUse      [2]int64
	whole      [2]int64
	host       int64
}

func (m *made) add(e trace.Event) {
	m.host += 10
	e.Rank = m.Header.Rank
	if !e.Kind.Span() {
		e.Time = m.host
	}
	if !e.Kind.Span() && !owned(&e) {
		e.Step, e.First, e.InUse = m.step, m.first, m.inUse
	}
	m.Events = append(m.Events, e)
}

func (m *made) own(what trace.Kind, tier memory.Kind, name string, bytes int64) {
	if m.whole[tier] += bytes; what == trace.Free {
		m.whole[tier] -= 2 * bytes
	}
	m.add(trace.Event{Kind: what, Tier: tier, Name: name, Bytes: bytes, Offset: -1, InUse: m.whole})
}

func (m *made) storage(what trace.Kind, tier memory.Kind, s int, g trace.Event) {
	g.Kind, g.Tier, g.Storage, g.Bytes, g.Offset = what, tier, s, 1000, int64(s)*1024
	if m.inUse[tier] += 1000; what == trace.Free {
		m.inUse[tier] -= 2000
	}
	m.add(g)
}

func (m *made) launch(name string) {
	m.add(trace.Event{Kind: trace.Launch, Stream: "compute", First: m.first, Last: m.first + 1, Name: name, Time: int64(m.first+1) * 1000, Took: 900})
	m.first++
}

func (m *made) copy(tier memory.Kind, stream string) {
	m.add(trace.Event{Kind: trace.Copy, Stream: stream, Tier: tier, Bytes: 1000, Time: int64(m.first+1) * 1000, Took: 100})
}

// aRun returns a trace of training. Each layer saves a storage, which is offloaded and
// reloaded.
func aRun(rank, steps, layers int) *trace.Trace {
	m := &made{Trace: &trace.Trace{Header: trace.Header{Rank: rank, Began: 1_700_000_000_000_000_000 + int64(rank), Compute: "compute"}}}
	m.own(trace.Alloc, memory.Device, "parameters", 1<<20)
	m.own(trace.Alloc, memory.Device, trace.HeapOwner(memory.Device), 4096*int64(layers))
	m.own(trace.Alloc, memory.Host, trace.HeapOwner(memory.Host), 1<<20)
	m.own(trace.Alloc, memory.Device, "rank "+strconv.Itoa(rank)+" shards", 3000)
	m.own(trace.Alloc, memory.Device, "rank "+strconv.Itoa(rank)+" shards", 500)
	m.add(trace.Event{Kind: trace.Decide, Name: "adaptive", Bytes: 5})
	for m.step = range steps {
		m.next = 0
		m.add(trace.Event{Kind: trace.Begin})
		for l := range layers {
			g := trace.Event{Name: "attn", Layer: l, Microbatch: 1}
			if l%2 == 1 {
				g.Name = "mlp"
			}
			m.storage(trace.Alloc, memory.Device, l+1, trace.Event{})
			m.launch("forward")
			save := g
			save.Kind, save.Storage, save.Bytes = trace.Save, l+1, 1000
			m.add(save)
			m.storage(trace.Alloc, memory.Host, l+1, g)
			g.Kind, g.Storage, g.Bytes = trace.Offload, l+1, 1000
			m.add(g)
			m.copy(memory.Host, "offload")
			m.storage(trace.Free, memory.Device, l+1, g)
		}
		for l := layers - 1; l >= 0; l-- {
			g := trace.Event{Kind: trace.Reload, Storage: l + 1, Name: "attn", Layer: l, Microbatch: 1, Bytes: 1000}
			if l%2 == 1 {
				g.Name = "mlp"
			}
			m.storage(trace.Alloc, memory.Device, l+1, g)
			g.Kind = trace.Reload
			m.add(g)
			m.copy(memory.Device, "reload")
			m.storage(trace.Free, memory.Host, l+1, g)
			m.launch("backward")
			m.storage(trace.Free, memory.Device, l+1, g)
		}
		m.add(trace.Event{Kind: trace.End})
	}
	m.own(trace.Free, memory.Device, "rank "+strconv.Itoa(rank)+" shards", 3400)
	return m.Trace
}

// anyTraces draws damaged traces: times that decrease, memory that is freed but was never
// allocated, overlapping places, names that are not text.
func anyTraces(t *rapid.T) (traces []*trace.Trace) {
	number := rapid.OneOf(rapid.Int64Range(0, 20), rapid.Int64())
	near := rapid.OneOf(rapid.Int64Range(-5, 50), rapid.Int64())
	name := rapid.SampledFrom([]string{"", "a", "b", "\xff\x80", trace.HeapOwner(memory.Device), trace.HeapOwner(memory.Host), "unknown"})
	event := rapid.Custom(func(t *rapid.T) trace.Event {
		return trace.Event{
			Kind: trace.Kind(rapid.IntRange(0, int(trace.Work)).Draw(t, "what")), Step: rapid.IntRange(0, 2).Draw(t, "step"),
			Time: near.Draw(t, "time"), Took: near.Draw(t, "took"), Stream: rapid.SampledFrom([]string{"compute", "s", ""}).Draw(t, "stream"),
			First: uint64(number.Draw(t, "first")), Last: uint64(number.Draw(t, "last")), Name: name.Draw(t, "name"),
			Layer: int(near.Draw(t, "layer")), Storage: rapid.IntRange(0, 5).Draw(t, "storage"), Tier: memory.Kind(rapid.IntRange(0, 2).Draw(t, "tier")),
			Offset: near.Draw(t, "offset"), Bytes: near.Draw(t, "bytes"), InUse: [2]int64{number.Draw(t, "device"), number.Draw(t, "host")},
		}
	})
	// In most traces half of the events are about memory.
	memory := rapid.Custom(func(t *rapid.T) trace.Event {
		e := event.Draw(t, "any")
		e.Kind = rapid.SampledFrom([]trace.Kind{trace.Alloc, trace.Alloc, trace.Free, trace.Save}).Draw(t, "sort")
		e.Tier, e.Step = memory.Kind(rapid.IntRange(0, 1).Draw(t, "of")), 0
		return e
	})
	for range rapid.IntRange(0, 3).Draw(t, "ranks") {
		n := rapid.SampledFrom([]int{0, 25}).Draw(t, "n")
		traces = append(traces, &trace.Trace{
			Header: trace.Header{Rank: int(near.Draw(t, "rank")), Began: number.Draw(t, "began"), Compute: "compute"},
			Events: append(rapid.SliceOfN(event, 0, 60).Draw(t, "events"), rapid.SliceOfN(memory, n, n).Draw(t, "memory")...),
		})
	}
	return traces
}
