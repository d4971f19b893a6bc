package report

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// A detailed step has its storages, where they were, and what streams did. SPEC S5.4, S6.5
func TestDetails(t *testing.T) {
	r := NewRank(&small(0).t)
	var why []string
	for _, d := range r.Details {
		why = append(why, d.Why)
	}
	if !slices.Equal(why, []string{"first", "peak", "last"}) {
		t.Fatalf("details are %q", why)
	}
	d := r.Details[1]
	if d.Step != 2 || d.Begin != 7 || d.End != 13.9 || len(d.Storages) != 2 || d.Cut+d.CutStorages != 0 {
		t.Fatalf("the step with the peak is %+v", d)
	}
	stays, left := d.Storages[0], d.Storages[1]
	if stays.Group != "qkv_linear" || stays.Layer != 2 || stays.Bytes != 2*mib || !slices.Equal(stays.Stays, []Stay{{"device", 7, 13.9}}) {
		t.Errorf("the storage that stays is %+v", stays)
	}
	want := []Stay{{"device", 8, 9}, {"out", 9, 10}, {"host", 10, 11}, {"in", 11, 12}, {"device", 12, 13}}
	if left.Group != "core_attn" || left.Offset != 2*mib || !slices.Equal(left.Stays, want) {
		t.Errorf("the storage that leaves is %+v", left)
	}
	if len(d.Streams) != 3 || d.Streams[0].Name != "compute" {
		t.Fatalf("streams are %+v", d.Streams)
	}
	c := d.Streams[0]
	if len(c.Begin) != 7 || c.Names[c.Of[1]] != "attention" || c.Begin[1] != 8 || c.Took[1] != 0.9 || c.What[1] != "launch" || math.Abs(c.Busy-6.3/6.9) > 1e-3 {
		t.Errorf("compute is %+v", c)
	}
}

// A storage is where its memory is, and counts as on its way while it has both. Its size is the
// largest that it had on the device.
func TestStays(t *testing.T) {
	const dev, host = memory.Device, memory.Host
	for name, x := range map[string]struct {
		events []trace.Event
		want   string
	}{
		"kept":     {[]trace.Event{{Kind: trace.Alloc, Bytes: 8}, {Kind: trace.Free}}, "8: device 0-1"},
		"for good": {[]trace.Event{{Kind: trace.Alloc, Bytes: 8}}, "8: device 0-9"},
		"offloaded": {[]trace.Event{
			{Kind: trace.Alloc, Bytes: 8}, {Kind: trace.Alloc, Tier: host, Bytes: 8}, {Kind: trace.Free, Tier: dev}, {Kind: trace.Alloc, Bytes: 4}, {Kind: trace.Load, Name: "g"},
			{Kind: trace.Free, Tier: host}, {Kind: trace.Free},
		}, "8: device 0-1, out 1-2, host 2-3, in 3-4, device 4-6"},
		"needed before it left": {[]trace.Event{
			{Kind: trace.Alloc, Bytes: 8}, {Kind: trace.Alloc, Tier: host, Bytes: 8}, {Kind: trace.Free, Tier: host}, {Kind: trace.Free},
		}, "8: device 0-1, out 1-2, device 2-3"},
		"on the host at the end": {[]trace.Event{
			{Kind: trace.Alloc, Bytes: 8}, {Kind: trace.Offload}, {Kind: trace.Free}, {Kind: trace.Free, Tier: host},
		}, "8: device 0-1, out 1-2, host 2-3"},
	} {
		l := newLives(9e6)
		for i, e := range x.events {
			if e.Kind != trace.Load {
				e.Storage = 1
			}
			if e.Name = "g"; i > 0 && e.Kind != trace.Load {
				e.Name = ""
			}
			l.follow(moment{int64(i) * 1e6, &e})
		}
		all, _ := l.storages()
		got := ""
		for _, s := range all {
			got += fmt.Sprintf("%d: ", s.Bytes)
			for i, y := range s.Stays {
				got += fmt.Sprintf("%s%s %g-%g", []string{"", ", "}[min(i, 1)], y.Where, y.Begin, y.End)
			}
		}
		if got != x.want {
			t.Errorf("%s: %s, want %s", name, got, x.want)
		}
	}
}

// The largest storages are shown, and all others are counted, those too that were not followed.
func TestManyStorages(t *testing.T) {
	l := newLives(9)
	for i := range mostLives + 5 {
		for range 2 {
			l.follow(moment{1, &trace.Event{Kind: trace.Alloc, Storage: i + 1, Bytes: int64(1 + i%8), Offset: int64(i)}})
		}
	}
	all, cut := l.storages()
	if len(all) != mostStorages || cut != mostLives+5-mostStorages || all[0].Bytes != 8 || all[len(all)-1].Bytes != 8 {
		t.Errorf("%d are shown, of %d to %d bytes, and %d are not", len(all), all[len(all)-1].Bytes, all[0].Bytes, cut)
	}
}

// The figures of a run that was resumed are those of its last part.
func TestBudgetOfParts(t *testing.T) {
	part := func(budget int64) *trace.Trace { return &trace.Trace{Header: trace.Header{Budget: budget}} }
	for want, parts := range map[int64][]*trace.Trace{5: {part(5)}, 7: {part(5), part(7)}, 8: {part(5), part(8), part(0)}} {
		if got := NewRank(parts...).Budget; got != want {
			t.Errorf("the budget is %d, want %d", got, want)
		}
	}
}

// Time without a step is a pause. Steps that overlap leave none between them.
func TestPausesOfSteps(t *testing.T) {
	l := &timeline{steps: []border{{begin: 2, end: 10}, {begin: 5, end: 8}, {begin: 12, end: 15}}}
	if got, want := l.pauses(0, 20), []pause{{0, 2, 0}, {10, 12, 2}, {15, 20, 4}}; !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got := (&timeline{}).pauses(0, 20); len(got) != 0 {
		t.Errorf("%+v without a step", got)
	}
}

// A storage that is never reloaded or never freed ends with its step.
func TestUnfinishedStep(t *testing.T) {
	s := small(0)
	for i, e := range s.t.Events {
		if e.Kind == trace.Offload && e.Step == 3 {
			s.t.Events = s.t.Events[:i+1]
			break
		}
	}
	r := NewRank(&s.t)
	d := r.Details[len(r.Details)-1]
	if d.Step != 3 || len(d.Storages) != 2 {
		t.Fatalf("the last step is %+v", d)
	}
	for _, x := range d.Storages {
		if n := len(x.Stays); n == 0 || x.Stays[n-1].End < x.Stays[n-1].Begin {
			t.Errorf("a storage is %+v", x)
		}
	}
}

// A span that ends where a step begins, or begins where it ends, is none of the step's.
func TestSpansBesideAStep(t *testing.T) {
	w := &work{border: border{begin: 10, end: 20}, all: map[string]*Stream{}}
	for _, x := range [][2]int64{{0, 10}, {20, 5}, {9, 2}, {19, 2}, {10, 10}} {
		w.add(moment{x[0], &trace.Event{Kind: trace.Launch, Stream: "s", Time: x[0], Took: x[1]}})
	}
	if out, cut := w.streams(); w.count != 3 || cut != 0 || len(out) != 1 || out[0].Busy != 1.2 {
		t.Errorf("%d spans, of which %d are cut, on %+v", w.count, cut, out)
	}
}

// At equal times memory of owners comes first, in which storages lie. A part that is resumed
// counts as a change.
func TestOrderOfChanges(t *testing.T) {
	part := func() *trace.Trace {
		return &trace.Trace{Events: []trace.Event{
			{Kind: trace.Begin, Step: 1, Time: 3}, {Kind: trace.Alloc, Storage: 1, Bytes: 4, Time: 5}, {Kind: trace.Alloc, Name: "owner", Bytes: 8, Time: 5}, {Kind: trace.Free, Name: "owner", Bytes: 8, Time: 6},
			{Kind: trace.End, Step: 1, Time: 7},
		}}
	}
	for n, want := range []string{"", "begin 0,alloc 0,alloc 1,free 0,end 0", "begin 0,alloc 0,alloc 1,free 0,end 0,again,begin 0,alloc 0,alloc 1,free 0,end 0"} {
		parts := []*trace.Trace{part(), part()}[:n]
		l := newTimeline(make([]int64, n), parts)
		var words []string
		l.eachChange(func(m moment) {
			if m.Event == nil {
				words = append(words, "again")
			} else {
				words = append(words, fmt.Sprintf("%v %d", m.Kind, m.Storage))
			}
		})
		if got := strings.Join(words, ","); got != want || l.changes != len(words) {
			t.Errorf("%d parts: %d changes, %s, want %s", n, l.changes, got, want)
		}
	}
}

// A step that was captured whole lasts as long as its graph.
func TestCapturedStep(t *testing.T) {
	s := newScribe(0)
	s.work("before")
	for step := 1; step <= 2; step++ {
		s.decide(trace.Event{Kind: trace.Begin, Step: step})
		s.decide(trace.Event{Kind: trace.Alloc, Step: step, Storage: 1, Bytes: mib})
		s.decide(trace.Event{Kind: trace.End, Step: step})
		s.t.Events = append(s.t.Events, trace.Event{Kind: trace.Graph, Stream: "compute", First: s.piece, Last: s.piece + 1, Time: int64(s.piece) * 1e6, Took: 8e5})
		s.piece++
	}
	r := NewRank(&s.t)
	if want := []StepTime{{1, 1, 1.8}, {2, 2, 2.8}}; !slices.Equal(r.Steps, want) {
		t.Errorf("steps lie at %+v", r.Steps)
	}
	for _, d := range r.Details {
		if len(d.Streams) != 1 || d.Streams[0].Busy != 1 || d.Streams[0].What[0] != "graph" || len(d.Storages) != 1 {
			t.Errorf("a step is %+v", d)
		}
	}
}

// If there are too many spans, the shortest are left out and counted. Shares include them.
func TestCutSpans(t *testing.T) {
	s := newScribe(0)
	s.decide(trace.Event{Kind: trace.Begin, Step: 1})
	for i := range mostSpans + 100 {
		took := int64(1000)
		if i%201 == 0 && i < 201*100 {
			took = 500
		}
		s.t.Events = append(s.t.Events, trace.Event{Kind: trace.Launch, Stream: "compute", First: s.piece, Last: s.piece + 1, Time: int64(s.piece) * 1000, Took: took})
		s.piece++
	}
	s.decide(trace.Event{Kind: trace.End, Step: 1})
	d := NewRank(&s.t).Details[0]
	if d.Cut != 100 || len(d.Streams[0].Begin) != mostSpans || slices.Min(d.Streams[0].Took) != 0.001 || d.Streams[0].Busy < 0.99 {
		t.Errorf("%d spans were cut, %d are left of at least %g ms, busy %g", d.Cut, len(d.Streams[0].Begin), slices.Min(d.Streams[0].Took), d.Streams[0].Busy)
	}
}

// Rates add up to the copied bytes in each direction.
func TestRates(t *testing.T) {
	s := small(0)
	s.copies("compute", memory.Host, 0, 1000, 5*mib) // reads a result, and moves nothing
	for i := range s.t.Events {
		if e := &s.t.Events[i]; e.Stream == "reload" && e.Time > 1e7 {
			e.Stream = "reload 12"
		}
	}
	r := NewRank(&s.t)
	if len(r.Rates.Time) != rateSlots {
		t.Fatalf("%d times", len(r.Rates.Time))
	}
	width := r.Rates.Time[rateSlots-1] / (rateSlots - 1) / 1e3
	for name, rates := range map[string][]float64{"out": r.Rates.Out, "in": r.Rates.In} {
		var all float64
		for _, x := range rates {
			all += x * width
		}
		if math.Abs(all-4*mib) > 0.01*mib {
			t.Errorf("%g bytes went %s", all, name)
		}
	}
	if none := NewRank(); len(none.Rates.Time) != 0 || none.Details == nil || none.Memory.Series == nil {
		t.Errorf("of nothing there is %+v", none)
	}
}

func TestCounts(t *testing.T) {
	got := map[string]float64{}
	for _, f := range NewRank(&small(0).t).Counts {
		got[f.Name] = f.Value
	}
	if got["copies_out"] != 3 || got["copies_in"] != 3 || got["out_bytes"] != 4*mib {
		t.Errorf("counts are %v", got)
	}
	if _, ok := got["evicted"]; ok {
		t.Errorf("nothing was evicted in %v", got)
	}
}

// A span counts for a step as far as it lies inside: a stream is busy for no more than all
// of a step.
func TestSpansAcrossBorders(t *testing.T) {
	for name, c := range map[string]struct {
		at, took int64
		want     float64
	}{
		"inside":          {110, 20, 0.2},
		"from before":     {50, 60, 0.1},
		"to after":        {190, 60, 0.1},
		"all around":      {0, 1000, 1},
		"right before it": {50, 50, 0},
		"right after it":  {200, 50, 0},
	} {
		for _, kind := range []trace.Kind{trace.Launch, trace.Wait} {
			w := &work{border: border{begin: 100, end: 200}, all: map[string]*Stream{}}
			w.add(moment{c.at, &trace.Event{Kind: kind, Stream: "s", Took: c.took}})
			busy, waits := 0.0, 0.0
			if s, _ := w.streams(); len(s) > 0 {
				busy, waits = s[0].Busy, s[0].Waits
			}
			if got := map[trace.Kind]float64{trace.Launch: busy, trace.Wait: waits}; got[kind] != c.want || busy+waits != c.want {
				t.Errorf("%v %s: busy for %g and waits for %g of the step, want %g", kind, name, busy, waits, c.want)
			}
		}
	}
}
