// This file tests that a trace is read back as it was written: complete, cut off or
// damaged. It also measures the cost of writing.

package trace_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/input/inputtest"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

const kinds = int(trace.Work) + 1

func TestKinds(t *testing.T) {
	seen := map[string]bool{}
	for k := range trace.Kind(kinds) {
		if name := k.String(); seen[name] || strings.HasPrefix(name, "Kind") {
			t.Errorf("kind %d is named %q, like another one or not at all", k, name)
		} else {
			seen[name] = true
		}
	}
	if trace.Kind(kinds).String() != "Kind(24)" || trace.Kind(kinds).Span() {
		t.Error("an unknown kind has a name or is a span")
	}
	if trace.Spill.Span() || !trace.Launch.Span() || !trace.Work.Span() {
		t.Error("spans are not told from decisions")
	}
}

// The numbers of kinds are those of trace files: a change makes old traces unreadable.
func TestKindNumbers(t *testing.T) {
	for kind, want := range map[trace.Kind]int{
		trace.Begin: 0, trace.End: 1, trace.Save: 2, trace.Offload: 3, trace.Reload: 4, trace.Load: 5, trace.Release: 6,
		trace.Evict: 7, trace.Late: 8, trace.Recompute: 9, trace.Capture: 10, trace.Replay: 11, trace.Rerun: 12, trace.Decide: 13,
		trace.Alloc: 14, trace.Free: 15, trace.Stash: 16, trace.Restore: 17, trace.Spill: 18,
		trace.Launch: 19, trace.Copy: 20, trace.Graph: 21, trace.Wait: 22, trace.Work: 23,
	} {
		if int(kind) != want {
			t.Errorf("%v is written as %d, but earlier versions wrote %d", kind, kind, want)
		}
	}
}

// drawn draws an event with arbitrary fields.
func drawn(t *rapid.T) trace.Event {
	number := rapid.Int64()
	name := rapid.SampledFrom([]string{"", "core_attn", "mlp", "compute", "offload", "\x00", "gemm"})
	whole := func(label string) int { return int(number.Draw(t, label)) }
	return trace.Event{
		Kind: trace.Kind(rapid.IntRange(0, kinds-1).Draw(t, "what")), Rank: whole("rank"), Step: whole("step"),
		Time: number.Draw(t, "time"), Took: number.Draw(t, "took"), Stream: name.Draw(t, "stream"),
		First: rapid.Uint64().Draw(t, "first"), Last: rapid.Uint64().Draw(t, "last"), Name: name.Draw(t, "name"),
		Chunk: whole("chunk"), Layer: whole("layer"), Microbatch: whole("microbatch"),
		Storage: whole("storage"), Tier: memory.Kind(rapid.IntRange(0, 1).Draw(t, "tier")), Offset: number.Draw(t, "offset"),
		Bytes: number.Draw(t, "bytes"), InUse: [2]int64{number.Draw(t, "device"), number.Draw(t, "host")},
	}
}

// SPEC S6.5: all emitted events are read back. A trace that is cut off anywhere gives the
// events before that point unchanged, and Cut is set.
func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := trace.Header{Rank: rapid.IntRange(0, 9).Draw(t, "rank"), Began: rapid.Int64().Draw(t, "began"), Compute: "compute", Budget: rapid.Int64().Draw(t, "budget")}
		if rapid.Bool().Draw(t, "spread") {
			h.Run, h.Host = rapid.StringN(0, 9, 64).Draw(t, "run"), rapid.SampledFrom([]string{"", "compute", "node-7"}).Draw(t, "host")
			h.Ranks, h.Process = rapid.IntRange(0, 9).Draw(t, "ranks"), rapid.IntRange(0, 1<<22).Draw(t, "process")
			h.Offset, h.Within = rapid.Int64().Draw(t, "offset"), rapid.Int64().Draw(t, "within")
		}
		var b bytes.Buffer
		w := trace.NewWriter(&b, h, 0)
		var want []trace.Event
		for range rapid.IntRange(0, 40).Draw(t, "events") {
			e := drawn(t)
			want = append(want, e)
			w.Emit(e)
		}
		if err := w.Close(); err != nil || w.Dropped() != 0 {
			t.Fatal(err, w.Dropped())
		}
		got, err := trace.Read(bytes.NewReader(b.Bytes()))
		if err != nil || got.Cut != nil || got.Dropped != 0 || got.Header != h || !slices.Equal(got.Events, want) {
			t.Fatalf("read %+v, %v; want %+v, %+v", got, err, h, want)
		}
		at := rapid.IntRange(0, b.Len()-1).Draw(t, "cut")
		part, err := trace.Read(bytes.NewReader(b.Bytes()[:at]))
		if err == nil && (part.Cut == nil || part.Header != h || !slices.Equal(part.Events, want[:len(part.Events)])) {
			t.Fatalf("cut at %d of %d: %+v", at, b.Len(), part)
		}
		if said := fmt.Sprint(part, err); strings.Contains(said, "EOF") {
			t.Fatalf("cut at %d of %d: %s", at, b.Len(), said)
		}
		bad := slices.Clone(b.Bytes())
		bad[at] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
		part, err = trace.Read(bytes.NewReader(bad))
		if err == nil && (part.Cut == nil || part.Header != h || !slices.Equal(part.Events, want[:len(part.Events)])) {
			t.Fatalf("damaged at %d of %d: %+v", at, b.Len(), part)
		}
	})
}

// Names that are parts of one string are told apart.
func TestNamesThatBeginAlike(t *testing.T) {
	const whole = "expert_fc1"
	var b bytes.Buffer
	w := trace.NewWriter(&b, trace.Header{}, 0)
	var want []string
	for n := range 3 * len(whole) {
		name := whole[:n%len(whole)+1]
		want = append(want, name)
		w.Emit(trace.Event{Kind: trace.Save, Name: name})
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	tr, err := trace.Read(&b)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range tr.Events {
		got = append(got, e.Name)
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// SPEC S6.5: the trace of a run that was stopped has all steps that had ended.
func TestStopped(t *testing.T) {
	var b bytes.Buffer
	w := trace.NewWriter(&b, trace.Header{}, 0)
	for step := range 3 {
		w.Emit(trace.Event{Kind: trace.Begin, Step: step})
		w.Emit(trace.Event{Kind: trace.End, Step: step})
	}
	w.Emit(trace.Event{Kind: trace.Begin, Step: 3})
	got, err := trace.Read(&b)
	if err != nil || len(got.Events) != 6 || got.Cut == nil || !strings.Contains(got.Cut.Error(), "not closed") {
		t.Errorf("%+v, %v", got, err)
	}
}

// SPEC S6.5: a trace is never longer than its limit. Dropped events are counted, and the
// borders of steps are dropped last.
func TestLimit(t *testing.T) {
	var short bytes.Buffer // a block for each step, whose frame counts too
	w := trace.NewWriter(&short, trace.Header{}, 64<<10)
	for i := 0; w.Dropped() == 0; i++ {
		w.Emit(trace.Event{Kind: trace.End, Step: i})
	}
	if err := w.Close(); err != nil || short.Len() > 64<<10 {
		t.Errorf("a trace of short steps has %d bytes, %v", short.Len(), err)
	}
	for _, limit := range []int64{1000, 4 << 10, 256 << 10, 1 << 20} {
		var b bytes.Buffer
		w := trace.NewWriter(&b, trace.Header{Compute: "compute"}, limit)
		const steps, each = 200, 1000
		for i := range steps {
			w.Emit(trace.Event{Kind: trace.Begin, Step: i, Time: int64(i * each)})
			for k := range each {
				w.Emit(trace.Event{Kind: trace.Launch, Time: int64(i*each + k), Took: int64(k * k), Name: strings.Repeat("n", k%7), Stream: "compute"})
			}
			w.Emit(trace.Event{Kind: trace.End, Step: i, Time: int64(i*each + each)})
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if int64(b.Len()) > limit {
			t.Errorf("%d bytes were written of at most %d", b.Len(), limit)
		}
		got, err := trace.Read(&b)
		if err != nil || got.Cut != nil {
			t.Fatal(err, got.Cut)
		}
		if int(got.Dropped)+len(got.Events) != steps*(each+2) || got.Dropped != w.Dropped() {
			t.Errorf("limit %d: %d events and %d dropped of %d", limit, len(got.Events), got.Dropped, steps*(each+2))
		}
		borders := 0
		for _, e := range got.Events {
			if !e.Kind.Span() {
				borders++
			}
		}
		if limit >= 256<<10 && borders != 2*steps {
			t.Errorf("limit %d: %d borders of steps are left of %d", limit, borders, 2*steps)
		}
	}
}

// Several goroutines can write one trace.
func TestManyGoroutines(t *testing.T) {
	var b bytes.Buffer
	w := trace.NewWriter(&b, trace.Header{}, 0)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 2000 {
				w.Emit(trace.Event{Kind: trace.Copy, Stream: "s" + string(rune('0'+g)), First: uint64(i), Last: uint64(i + 1)})
			}
		})
	}
	wg.Wait()
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := trace.Read(&b)
	if err != nil || got.Cut != nil {
		t.Fatal(err, got.Cut)
	}
	next := map[string]uint64{}
	for _, e := range got.Events {
		if e.First != next[e.Stream] {
			t.Fatalf("%+v, want number %d", e, next[e.Stream])
		}
		next[e.Stream]++
	}
	if len(next) != 8 {
		t.Errorf("%v", next)
	}
}

type full struct{ after int }

func (f *full) Write(p []byte) (int, error) {
	if f.after--; f.after < 0 {
		return 0, errors.New("the disk is full")
	}
	return len(p), nil
}

func TestFirstErrorSticks(t *testing.T) {
	for after := range 3 {
		w := trace.NewWriter(&full{after}, trace.Header{}, 0)
		w.Emit(trace.Event{Kind: trace.End})
		w.Emit(trace.Event{Kind: trace.End})
		if err := w.Close(); err == nil || err.Error() != "the disk is full" || w.Close() == nil {
			t.Errorf("after %d writes: %v", after, err)
		}
	}
	if _, err := trace.Read(strings.NewReader("not a trace, although it is long enough")); err == nil {
		t.Error("something else was read")
	}
}

// Events after Close are dropped, and long names are cut.
func TestAfterTheEnd(t *testing.T) {
	var b bytes.Buffer
	w := trace.NewWriter(&b, trace.Header{}, 0)
	w.Emit(trace.Event{Kind: trace.Save, Name: strings.Repeat("x", 1<<20)})
	w.Emit(trace.Event{Kind: trace.Kind(kinds)})
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	w.Emit(trace.Event{})
	got, err := trace.Read(&b)
	if err != nil || len(got.Events) != 1 || len(got.Events[0].Name) != 256 || w.Dropped() != 2 {
		t.Errorf("%d, %v", w.Dropped(), err)
	}
}

type list []trace.Event

func (l *list) Emit(e trace.Event) { *l = append(*l, e) }

func TestSince(t *testing.T) {
	var l list
	trace.Since(100, &l).Emit(trace.Event{Time: 150, Took: 3})
	if want := (list{{Time: 50, Took: 3}}); !reflect.DeepEqual(l, want) {
		t.Errorf("%+v", l)
	}
}

// SPEC S6.5: decisions are placed on compute's clock by its spans, evenly within a span.
// Spans and memory of owners keep their own times.
func TestClock(t *testing.T) {
	tr := &trace.Trace{Header: trace.Header{Compute: "compute"}, Events: []trace.Event{
		{Kind: trace.Save, First: 2, Time: 1},
		{Kind: trace.Launch, Stream: "compute", First: 0, Last: 1, Time: 100, Took: 10},
		{Kind: trace.Copy, Stream: "offload", First: 2, Last: 3, Time: 5, Took: 1},
		{Kind: trace.Work, Stream: "compute", First: 2, Last: 6, Time: 200, Took: 40},
		{Kind: trace.Launch, Stream: "compute", First: 6, Last: 7, Time: 260, Took: 5},
	}}
	c := tr.Clock()
	for first, want := range map[uint64]int64{0: 100, 1: 110, 2: 200, 3: 210, 5: 230, 6: 260, 7: 265, 99: 265} {
		if got := c.Of(&trace.Event{Kind: trace.Save, First: first}); got != want {
			t.Errorf("piece %d began at %d; want %d", first, got, want)
		}
	}
	memory := trace.Event{Kind: trace.Alloc, Name: "parameters", Time: 7}
	if c.Of(&tr.Events[0]) != 200 || c.Of(&tr.Events[2]) != 5 || c.Of(&memory) != 7 {
		t.Error("an event lies elsewhere")
	}
	tr.Events = append(tr.Events, trace.Event{Kind: trace.Graph, Stream: "compute", First: 7, Last: 8, Time: 300, Took: 100})
	for i := range 4 {
		tr.Events = append(tr.Events, trace.Event{Kind: trace.Alloc, Storage: 1 + i, First: 7, Time: int64(10 + 8*i)})
	}
	c, last := tr.Clock(), int64(299)
	for _, e := range tr.Events[6:] {
		at := c.Of(&e)
		if at <= last || at >= 400 {
			t.Errorf("%+v of a graph from 300 to 400 lies at %d, the one before at %d", e, at, last)
		}
		last = at
	}
	if c.Of(&tr.Events[6]) != 300 {
		t.Error("the first decision of a graph is not at its beginning")
	}
	tr.Events = tr.Events[:1]
	if c := tr.Clock(); c.Of(&tr.Events[0]) != 1 {
		t.Error("without spans the host's time counts")
	}
	if (&trace.Trace{}).Clock().Of(&trace.Event{Kind: trace.Save, First: 3, Time: 4}) != 4 {
		t.Error("an empty trace has a clock of its own")
	}
}

// FuzzRead checks that no bytes crash the reader, and that what it reads can be written
// again.
func FuzzRead(f *testing.F) {
	var b bytes.Buffer
	w := trace.NewWriter(&b, trace.Header{Rank: 1, Began: 2, Compute: "compute"}, 0)
	w.Emit(trace.Event{Kind: trace.Begin, Step: 1, Offset: -1})
	w.Emit(trace.Event{Kind: trace.Copy, Stream: "offload", Name: "x", First: math.MaxUint64})
	w.Emit(trace.Event{Kind: trace.End, Step: 1})
	_ = w.Close()
	f.Add(b.Bytes())
	f.Add(b.Bytes()[:20])
	b.Reset()
	h := trace.Header{Rank: 3, Began: 2, Compute: "compute", Run: "r", Ranks: 4, Host: "node", Process: 7, Offset: -9, Within: 5}
	_ = trace.NewWriter(&b, h, 0).Close()
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		defer inputtest.Bound(t, len(data))()
		got, err := trace.Read(bytes.NewReader(data))
		if err != nil {
			return
		}
		var again bytes.Buffer
		w := trace.NewWriter(&again, got.Header, 1<<30)
		for _, e := range got.Events {
			w.Emit(e)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		back, err := trace.Read(&again)
		if err != nil || back.Cut != nil || back.Header != got.Header || !slices.Equal(back.Events, got.Events) {
			t.Fatalf("%+v was read again as %+v, %v", got, back, err)
		}
	})
}

// plausible returns the i-th event of a made-up training run.
func plausible(i int) trace.Event {
	e := trace.Event{Kind: trace.Launch, Time: int64(i) * 1500, Took: 900 + int64(i%97), Stream: "compute", First: uint64(i), Last: uint64(i + 1), Name: kernels[i%len(kernels)]}
	switch i % 4 {
	case 1:
		e = trace.Event{Kind: trace.Alloc, Step: i / 10000, Time: int64(i) * 1500, First: uint64(i), Name: "core_attn", Layer: i / 16 % 24, Storage: i%5000 + 1, Offset: int64(i%5000) << 20, Bytes: 1 << 20, InUse: [2]int64{int64(i%512) << 20, 0}}
	case 2:
		e.Kind, e.Stream, e.Name, e.Bytes, e.Tier = trace.Copy, "offload", "", 1<<20, memory.Host
	}
	return e
}

var kernels = []string{"gemm", "rms_norm", "softmax", "gemm", "rotary", "stash"}

// SPEC S6.5: a million events are written at under 100 ns each, and no event allocates.
func BenchmarkEmit(b *testing.B) {
	events := make([]trace.Event, 1<<16)
	for i := range events {
		events[i] = plausible(i)
	}
	var n counter
	b.ReportAllocs()
	w := trace.NewWriter(&n, trace.Header{Compute: "compute"}, 1<<40)
	for i := 0; b.Loop(); i++ {
		w.Emit(events[i%len(events)])
	}
	if err := w.Close(); err != nil || w.Dropped() > 0 {
		b.Fatal(err, w.Dropped())
	}
	b.ReportMetric(float64(n)/float64(b.N), "B/event")
}

type counter int64

func (c *counter) Write(p []byte) (int, error) { *c += counter(len(p)); return len(p), nil }

func TestNoAllocationPerEvent(t *testing.T) {
	w := trace.NewWriter(io.Discard, trace.Header{Compute: "compute"}, 1<<40)
	i := 0
	if n := testing.AllocsPerRun(20000, func() { w.Emit(plausible(i)); i++ }); n != 0 {
		t.Errorf("%v allocations an event", n)
	}
}

func BenchmarkRead(b *testing.B) {
	const events = 1_000_000
	var data bytes.Buffer
	w := trace.NewWriter(&data, trace.Header{Compute: "compute"}, 1<<40)
	for i := range events {
		w.Emit(plausible(i))
	}
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		got, err := trace.Read(bytes.NewReader(data.Bytes()))
		if err != nil || len(got.Events) != events {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/events, "ns/event")
}

// A packed trace has the same events, any number of times, and takes hardly more memory
// than its file, however many events a byte holds.
func TestReadPacked(t *testing.T) {
	for name, event := range map[string]func(i int) trace.Event{
		"plausible": plausible,
		"dense": func(i int) trace.Event {
			return trace.Event{Kind: trace.Launch, Stream: "compute", First: 1, Last: 2, Time: int64(i)}
		},
	} {
		const events = 100_000
		var file bytes.Buffer
		w := trace.NewWriter(&file, trace.Header{Rank: 3, Compute: "compute"}, 1<<40)
		for i := range events {
			w.Emit(event(i))
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		data := file.Bytes()
		whole, err := trace.Read(bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		packed, err := trace.ReadPacked(bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		clock := packed.Clock()
		runtime.ReadMemStats(&after)
		if got := int(after.TotalAlloc - before.TotalAlloc); got > 20*len(data) {
			t.Errorf("%s: %d bytes took %d to read, %d times as many", name, len(data), got, got/len(data))
		} else {
			t.Logf("%s: %.1f times the file", name, float64(got)/float64(len(data)))
		}
		of := whole.Clock()
		for range 2 {
			i := 0
			for e := range packed.All() {
				if *e != whole.Events[i] || clock.Of(e) != of.Of(&whole.Events[i]) {
					t.Fatalf("%s: event %d is %+v, want %+v", name, i, *e, whole.Events[i])
				}
				i++
			}
			if i != events || len(whole.Events) != events || packed.Events != nil {
				t.Errorf("%s: %d, %d and %d events", name, i, len(whole.Events), len(packed.Events))
			}
			for range packed.All() {
				break // the next one begins anew
			}
		}
	}
}

// In a trace that is full for others there is room for what reports cannot do without:
// borders of steps, decisions, reruns and pages.
func TestRoomForWhatMatters(t *testing.T) {
	var b bytes.Buffer
	w := trace.NewWriter(&b, trace.Header{}, 64<<10)
	for i := 0; w.Dropped() == 0; i++ {
		w.Emit(trace.Event{Kind: trace.Launch, Time: int64(i), Name: fmt.Sprint(i)})
	}
	if err := w.Close(); err != nil || b.Len() < 15<<12-1<<10 || b.Len() > 15<<12 { // fifteen sixteenths, but for the room of one event
		t.Errorf("a trace that is full of others has %d bytes, %v", b.Len(), err)
	}
	b.Reset()
	w = trace.NewWriter(&b, trace.Header{}, 64<<10)
	for i := 0; w.Dropped() == 0; i++ {
		w.Emit(trace.Event{Kind: trace.Launch, Time: int64(i), Name: fmt.Sprint(i)})
	}
	before := w.Dropped()
	var kept []trace.Kind
	for k := range trace.Kind(255) {
		w.Emit(trace.Event{Kind: k, Step: 7})
		if after := w.Dropped(); after == before {
			kept = append(kept, k)
		} else {
			before = after
		}
	}
	if want := []trace.Kind{trace.Begin, trace.End, trace.Decide, trace.Rerun, trace.Spill}; len(kept) != len(want) {
		t.Errorf("kept %v, want %v", kept, want)
	} else {
		for _, k := range want {
			if !slices.Contains(kept, k) {
				t.Errorf("%v is dropped", k)
			}
		}
	}
	if err := w.Close(); err != nil || b.Len() > 64<<10 {
		t.Errorf("%d bytes, %v", b.Len(), err)
	}
}

// Each field of a header is kept though all others are zero.
func TestHeaderFieldByField(t *testing.T) {
	for i := range reflect.TypeFor[trace.Header]().NumField() {
		var h trace.Header
		f := reflect.ValueOf(&h).Elem().Field(i)
		if f.Kind() == reflect.String {
			f.SetString("a name")
		} else {
			f.SetInt(-7)
		}
		var b bytes.Buffer
		w := trace.NewWriter(&b, h, 0)
		w.Emit(trace.Event{Kind: trace.Begin})
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if got, err := trace.Read(&b); err != nil || got.Header != h || len(got.Events) != 1 {
			t.Errorf("%+v is read as %+v, %v", h, got, err)
		}
	}
}
