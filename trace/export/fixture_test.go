// This file owns the traces that the tests export: one as a run writes it, and others
// as no run should.

package export

import (
	"strconv"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/trace"
)

// made is a trace under way: compute does a piece of work every microsecond, each 900 ns
// long, and the host decides everything as fast as it can.
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
	if !e.What.Span() {
		e.Time = m.host
	}
	if !e.What.Span() && !owned(&e) {
		e.Step, e.First, e.InUse = m.step, m.first, m.inUse
	}
	m.Events = append(m.Events, e)
}

func (m *made) own(what trace.What, tier trace.Tier, name string, bytes int64) {
	if m.whole[tier] += bytes; what == trace.Free {
		m.whole[tier] -= 2 * bytes
	}
	m.add(trace.Event{What: what, Tier: tier, Name: name, Bytes: bytes, Offset: -1, InUse: m.whole})
}

func (m *made) storage(what trace.What, tier trace.Tier, s int, g trace.Event) {
	g.What, g.Tier, g.Storage, g.Bytes, g.Offset = what, tier, s, 1000, int64(s)*1024
	if m.inUse[tier] += 1000; what == trace.Free {
		m.inUse[tier] -= 2000
	}
	m.add(g)
}

func (m *made) launch(name string) {
	m.add(trace.Event{What: trace.Launch, Stream: "compute", First: m.first, Last: m.first + 1, Name: name, Time: int64(m.first+1) * 1000, Took: 900})
	m.first++
}

func (m *made) copy(tier trace.Tier, stream string) {
	m.add(trace.Event{What: trace.Copy, Stream: stream, Tier: tier, Bytes: 1000, Time: int64(m.first+1) * 1000, Took: 100})
}

// aRun is a trace of training: every layer saves a storage, which leaves and comes back.
func aRun(rank, steps, layers int) *trace.Trace {
	m := &made{Trace: &trace.Trace{Header: trace.Header{Rank: rank, Began: 1_700_000_000_000_000_000 + int64(rank), Compute: "compute"}}}
	m.own(trace.Alloc, trace.Device, "parameters", 1<<20)
	m.own(trace.Alloc, trace.Device, trace.Device.Pool(), 4096*int64(layers))
	m.own(trace.Alloc, trace.Host, trace.Host.Pool(), 1<<20)
	m.own(trace.Alloc, trace.Device, "rank "+strconv.Itoa(rank)+" shards", 3000)
	m.own(trace.Alloc, trace.Device, "rank "+strconv.Itoa(rank)+" shards", 500)
	m.add(trace.Event{What: trace.Decide, Name: "adaptive", Bytes: 5})
	for m.step = range steps {
		m.next = 0
		m.add(trace.Event{What: trace.Begin})
		for l := range layers {
			g := trace.Event{Name: "attn", Layer: l, Microbatch: 1}
			if l%2 == 1 {
				g.Name = "mlp"
			}
			m.storage(trace.Alloc, trace.Device, l+1, trace.Event{})
			m.launch("forward")
			save := g
			save.What, save.Storage, save.Bytes = trace.Save, l+1, 1000
			m.add(save)
			m.storage(trace.Alloc, trace.Host, l+1, g)
			g.What, g.Storage, g.Bytes = trace.Leave, l+1, 1000
			m.add(g)
			m.copy(trace.Host, "offload")
			m.storage(trace.Free, trace.Device, l+1, g)
		}
		for l := layers - 1; l >= 0; l-- {
			g := trace.Event{What: trace.Return, Storage: l + 1, Name: "attn", Layer: l, Microbatch: 1, Bytes: 1000}
			if l%2 == 1 {
				g.Name = "mlp"
			}
			m.storage(trace.Alloc, trace.Device, l+1, g)
			g.What = trace.Return
			m.add(g)
			m.copy(trace.Device, "reload")
			m.storage(trace.Free, trace.Host, l+1, g)
			m.launch("backward")
			m.storage(trace.Free, trace.Device, l+1, g)
		}
		m.add(trace.Event{What: trace.End})
	}
	m.own(trace.Free, trace.Device, "rank "+strconv.Itoa(rank)+" shards", 3400)
	return m.Trace
}

// anyTraces are traces that are damaged in every way: times that run backwards, memory
// given back that nobody took, places that overlap, names that are no text.
func anyTraces(t *rapid.T) (traces []*trace.Trace) {
	number := rapid.OneOf(rapid.Int64Range(0, 20), rapid.Int64())
	near := rapid.OneOf(rapid.Int64Range(-5, 50), rapid.Int64())
	name := rapid.SampledFrom([]string{"", "a", "b", "\xff\x80", trace.Device.Pool(), trace.Host.Pool(), "unknown"})
	event := rapid.Custom(func(t *rapid.T) trace.Event {
		return trace.Event{
			What: trace.What(rapid.IntRange(0, int(trace.Work)).Draw(t, "what")), Step: rapid.IntRange(0, 2).Draw(t, "step"),
			Time: near.Draw(t, "time"), Took: near.Draw(t, "took"), Stream: rapid.SampledFrom([]string{"compute", "s", ""}).Draw(t, "stream"),
			First: uint64(number.Draw(t, "first")), Last: uint64(number.Draw(t, "last")), Name: name.Draw(t, "name"),
			Layer: int(near.Draw(t, "layer")), Storage: rapid.IntRange(0, 5).Draw(t, "storage"), Tier: trace.Tier(rapid.IntRange(0, 2).Draw(t, "tier")),
			Offset: near.Draw(t, "offset"), Bytes: near.Draw(t, "bytes"), InUse: [2]int64{number.Draw(t, "device"), number.Draw(t, "host")},
		}
	})
	// Half of what most traces have is memory.
	memory := rapid.Custom(func(t *rapid.T) trace.Event {
		e := event.Draw(t, "any")
		e.What = rapid.SampledFrom([]trace.What{trace.Alloc, trace.Alloc, trace.Free, trace.Save}).Draw(t, "sort")
		e.Tier, e.Step = trace.Tier(rapid.IntRange(0, 1).Draw(t, "of")), 0
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
