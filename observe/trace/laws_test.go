// This file owns the laws: a trace that keeps them passes, and every way to break one is
// found.

package trace_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// lawful returns the events of two steps on a watched device: owners take memory, storages
// come, leave, come back and go, and two streams work.
func lawful() []trace.Event {
	const dev, host = memory.Device, memory.Host
	owner := func(k trace.Kind, name string, tier memory.Kind, n int64, d, h int64) trace.Event {
		return trace.Event{Kind: k, Name: name, Tier: tier, Bytes: n, InUse: [2]int64{d, h}}
	}
	on := func(k trace.Kind, id int, tier memory.Kind, n int64, d, h int64) trace.Event {
		return trace.Event{Kind: k, Storage: id, Tier: tier, Bytes: n, InUse: [2]int64{d, h}}
	}
	span := func(k trace.Kind, stream string, first, last uint64, at, took int64) trace.Event {
		return trace.Event{Kind: k, Stream: stream, First: first, Last: last, Time: at, Took: took}
	}
	list := []trace.Event{
		owner(trace.Alloc, "weights", dev, 1000, 1000, 0), owner(trace.Alloc, "weights", dev, 24, 1024, 0),
		owner(trace.Alloc, "copies", host, 300, 1024, 300),
	}
	for step := range 2 {
		at := int64(step) * 100_000
		first := uint64(step) * 10
		list = append(list,
			trace.Event{Kind: trace.Begin, Step: step},
			on(trace.Alloc, 1, dev, 100, 100, 0), on(trace.Alloc, 2, dev, 50, 150, 0), on(trace.Save, 1, dev, 100, 150, 0),
			span(trace.Launch, "compute", first, first+3, at, 4000),
			on(trace.Alloc, 1, host, 100, 150, 100), on(trace.Offload, 1, dev, 100, 150, 100), on(trace.Free, 1, dev, 100, 50, 100),
			span(trace.Copy, "out", first, first+1, at+1000, 2000),
			on(trace.Alloc, 1, dev, 100, 150, 100), on(trace.Reload, 1, host, 100, 150, 100), on(trace.Free, 1, host, 100, 150, 0),
			on(trace.Load, 0, dev, 0, 150, 0),
			span(trace.Work, "compute", first+3, first+4, at+4000, 500),
			span(trace.Launch, "compute", first+4, first+5, at+4500-900, 500), // times are rounded
			on(trace.Free, 2, dev, 50, 100, 0), on(trace.Free, 1, dev, 100, 0, 0),
			trace.Event{Kind: trace.End, Step: step, Bytes: 150, Offset: 100},
		)
	}
	return append(list, owner(trace.Free, "weights", dev, 1024, 0, 300), owner(trace.Free, "copies", host, 300, 0, 0))
}

// SPEC S6.5: each event that says something else than the events around it is found.
func TestLaws(t *testing.T) {
	if err := (&trace.Trace{Events: lawful()}).Check(); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		what string
		at   func(e trace.Event) bool
		to   func(e *trace.Event)
	}{
		{"other bytes in use on the device", func(e trace.Event) bool { return !e.Kind.Span() }, func(e *trace.Event) { e.InUse[0]++ }},
		{"fewer bytes in use on the device", func(e trace.Event) bool { return !e.Kind.Span() }, func(e *trace.Event) { e.InUse[0]-- }},
		{"other bytes in use on the host", func(e trace.Event) bool { return !e.Kind.Span() }, func(e *trace.Event) { e.InUse[1]++ }},
		{"a place of another size", func(e trace.Event) bool { return e.Kind == trace.Alloc || e.Kind == trace.Free }, func(e *trace.Event) { e.Bytes++ }},
		{"a smaller place", func(e trace.Event) bool { return e.Kind == trace.Alloc || e.Kind == trace.Free }, func(e *trace.Event) { e.Bytes-- }},
		{"a place in another tier", func(e trace.Event) bool { return e.Kind == trace.Alloc || e.Kind == trace.Free }, func(e *trace.Event) { e.Tier = 1 - e.Tier }},
		{"a place of another storage", func(e trace.Event) bool { return e.Kind == trace.Free && e.Storage > 0 }, func(e *trace.Event) { e.Storage += 7 }},
		{"memory of another owner", func(e trace.Event) bool { return e.Kind == trace.Free && e.Storage == 0 }, func(e *trace.Event) { e.Name += "?" }},
		{"a copy of a storage that has no place", func(e trace.Event) bool { return e.Kind == trace.Offload || e.Kind == trace.Reload }, func(e *trace.Event) { e.Storage += 7 }},
		{"a copy of more than its place", func(e trace.Event) bool { return e.Kind == trace.Offload || e.Kind == trace.Reload }, func(e *trace.Event) { e.Bytes++ }},
		{"a copy in the other direction", func(e trace.Event) bool { return e.Kind == trace.Offload }, func(e *trace.Event) { e.Kind, e.Storage = trace.Reload, 3 }},
		{"another peak", func(e trace.Event) bool { return e.Kind == trace.End }, func(e *trace.Event) { e.Bytes-- }},
		{"a higher peak", func(e trace.Event) bool { return e.Kind == trace.End }, func(e *trace.Event) { e.Bytes++ }},
		{"another peak on the host", func(e trace.Event) bool { return e.Kind == trace.End }, func(e *trace.Event) { e.Offset-- }},
		{"no beginning", func(e trace.Event) bool { return e.Kind == trace.Begin }, func(e *trace.Event) { e.Kind = trace.Save }},
		{"no end", func(e trace.Event) bool { return e.Kind == trace.End && e.Step == 0 }, func(e *trace.Event) { e.Kind, e.Bytes, e.Offset = trace.Save, 0, 0 }},
		{"two ends", func(e trace.Event) bool { return e.Kind == trace.Begin && e.Step == 1 }, func(e *trace.Event) { e.Kind, e.Bytes, e.Offset = trace.End, 150, 100 }},
		{"an empty span", func(e trace.Event) bool { return e.Kind.Span() }, func(e *trace.Event) { e.Last = e.First }},
		{"a span that ends before it begins", func(e trace.Event) bool { return e.Kind.Span() }, func(e *trace.Event) { e.Took = -1 }},
		{"a span too early", func(e trace.Event) bool { return e.Kind.Span() && e.First%10 > 0 }, func(e *trace.Event) { e.Time -= 1001 }},
		{"a span whose work comes before that of the last", func(e trace.Event) bool { return e.Kind.Span() && e.First%10 > 0 }, func(e *trace.Event) { e.First-- }},
		{"an unknown kind", func(trace.Event) bool { return true }, func(e *trace.Event) { e.Kind = trace.Work + 1 }},
		{"an unknown tier", func(e trace.Event) bool { return true }, func(e *trace.Event) { e.Tier = memory.Host + 1 }},
	} {
		found := false
		for i, e := range lawful() {
			if !x.at(e) {
				continue
			}
			found = true
			list := lawful()
			x.to(&list[i])
			if err := (&trace.Trace{Events: list}).Check(); err == nil {
				t.Errorf("event %d, %+v: %s was not found", i, e, x.what)
			}
		}
		if !found {
			t.Errorf("%s: there is no such event", x.what)
		}
	}
	for i, e := range lawful()[:len(lawful())-3] { // without the last, nothing follows that could differ
		if lawful()[i+1].Kind == trace.End {
			continue // which frees the rest
		}
		if k := e.Kind; k.Span() || k == trace.Save || k == trace.Load || k == trace.Offload || k == trace.Reload {
			continue
		}
		if err := (&trace.Trace{Events: slices.Delete(lawful(), i, i+1)}).Check(); err == nil {
			t.Errorf("nobody misses event %d, %+v", i, e)
		}
	}
	for _, x := range []trace.Trace{{Dropped: 1}, {Cut: errors.New("cut")}} {
		if x.Check() == nil {
			t.Errorf("a trace that is not complete was checked: %+v", x)
		}
	}
}

// A storage is copied to a place that it has in the other tier. A step begins with nothing, and
// its peaks are its own.
func TestLawsOfCopies(t *testing.T) {
	for _, x := range []struct {
		kind trace.Kind
		tier memory.Kind // where the storage has a place
		ok   bool
	}{{trace.Offload, memory.Host, true}, {trace.Offload, memory.Device, false}, {trace.Reload, memory.Device, true}, {trace.Reload, memory.Host, false}} {
		var inUse [2]int64
		inUse[x.tier] = 8
		list := []trace.Event{
			{Kind: trace.Begin},
			{Kind: trace.Alloc, Storage: 1, Tier: x.tier, Bytes: 8, InUse: inUse},
			{Kind: x.kind, Storage: 1, Bytes: 8, InUse: inUse},
		}
		if err := (&trace.Trace{Events: list}).Check(); (err == nil) != x.ok {
			t.Errorf("%v with a place in %v: %v", x.kind, x.tier, err)
		}
	}
	left := []trace.Event{ // what the first step leaves is not in use in the second
		{Kind: trace.Begin}, {Kind: trace.Alloc, Storage: 1, Bytes: 8, InUse: [2]int64{8}}, {Kind: trace.End, Bytes: 8},
		{Kind: trace.Begin}, {Kind: trace.Alloc, Storage: 1, Bytes: 5, InUse: [2]int64{5}}, {Kind: trace.End, Bytes: 5},
	}
	if err := (&trace.Trace{Events: left}).Check(); err != nil {
		t.Error(err)
	}
}
