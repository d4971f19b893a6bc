package export

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// pictureOf exports traces and reads them back.
func pictureOf(t rapid.TB, traces ...*trace.Trace) *picture {
	t.Helper()
	var out bytes.Buffer
	if err := Perfetto(&out, traces); err != nil {
		t.Fatal(err)
	}
	p, err := read(out.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// SPEC S6.5: there is a process for each rank, a track for each stream, and counters of
// memory by tier and group, all on the device's clock.
func TestPerfetto(t *testing.T) {
	const steps, layers = 3, 4
	p := pictureOf(t, aRun(1, steps, layers), aRun(0, steps, layers))
	if want := []string{"rank 0", "rank 1"}; !slices.Equal(p.processes, want) {
		t.Fatalf("processes are %q", p.processes)
	}
	for name, want := range map[string]int{"steps": steps, "stream compute": 2 * layers * steps, "stream offload": layers * steps, "stream reload": layers * steps, "decisions": 1, "groups": 3 * layers * steps} {
		tracks := p.find(name)
		if len(tracks) != 2 {
			t.Errorf("there are %d tracks %q", len(tracks), name)
			continue
		}
		if got := len(tracks[0].slices); got != want {
			t.Errorf("%s has %d slices, not %d", name, got, want)
		}
	}
	// The second rank began a nanosecond later.
	step := p.find("steps")[1].slices[1]
	if want := (shown{name: "step 1", category: "step", begin: 1000*(2*layers+1) + 1, end: 1000*4*layers + 900 + 1}); step.name != want.name || step.begin != want.begin || step.end != want.end {
		t.Errorf("the second step is %+v, not %+v", step, want)
	}
	gone := p.find("stream offload")[0].slices[0]
	if gone.name != "copy to host" || gone.category != "copy" || gone.notes["bytes"] != 1000 || gone.notes["GB/s"] != 10 {
		t.Errorf("a copy is %+v", gone)
	}
	left := p.find("groups")[0].slices[3]
	if left.name != "offload mlp" || left.notes["layer"] != 1 || left.notes["microbatch"] != 1 || left.notes["storage"] != 2 || left.begin != 3000 {
		t.Errorf("a storage is offloaded as %+v", left)
	}
	if len(p.flows) != 2*steps*layers || p.flows[0] != [2]string{"offload mlp", "reload mlp"} {
		t.Errorf("%d arrows, the first is %q", len(p.flows), p.flows[0])
	}
}

// A rank in one of several processes is shown with its machine.
func TestPerfettoHosts(t *testing.T) {
	a, b := aRun(0, 1, 1), aRun(1, 1, 1)
	a.Header.Host, a.Header.Process = "node\xff", 17
	b.Header.Host, b.Header.Process, b.Header.Began = "other", 4, a.Header.Began+1e9 // on the clock of rank 0
	p := pictureOf(t, a, b)
	if want := []string{"rank 0 on node\uFFFD (process 17)", "rank 1 on other (process 4)"}; !slices.Equal(p.processes, want) {
		t.Errorf("processes are %q", p.processes)
	}
	if x, y := p.find("steps")[0].slices[0], p.find("steps")[1].slices[0]; y.begin != x.begin+1e9 {
		t.Errorf("the first step is at %d and %d", x.begin, y.begin)
	}
}

// Counters show what is in use, up to the end of the trace.
func TestPerfettoCounters(t *testing.T) {
	p := pictureOf(t, aRun(0, 2, 4))
	for name, want := range map[string][2]int64{ // the most, and the last
		"all memory":           {1<<20 + 4*4096 + 3500, 1<<20 + 4*4096 + 100},
		"storages of the step": {1000, 0},
		"group attn":           {1000, 0},
		"no group":             {1000, 0},
		"owner parameters":     {1 << 20, 1 << 20},
		"owner shards":         {3500, 100},
	} {
		tracks := p.find(name)
		if len(tracks) == 0 || !tracks[0].counter || len(tracks[0].samples) == 0 {
			t.Errorf("there is no counter %q", name)
			continue
		}
		var most int64
		for _, s := range tracks[0].samples {
			most = max(most, s.value)
		}
		if last := tracks[0].samples[len(tracks[0].samples)-1].value; most != want[0] || last != want[1] {
			t.Errorf("%s is %d at most and %d in the end, not %d", name, most, last, want)
		}
	}
	if host := p.find("storages of the step")[1].samples; slices.MaxFunc(host, func(a, b sample) int { return int(a.value - b.value) }).value != 4000 {
		t.Errorf("the host has %v", host)
	}
}

// Overlapping spans are shown on tracks of one name. Spans inside of others nest.
func TestPerfettoOverlap(t *testing.T) {
	in := &trace.Trace{}
	for i := range int64(40) {
		in.Events = append(in.Events, trace.Event{Kind: trace.Work, Stream: "s", Time: i, Took: 100})
	}
	in.Events = append(in.Events, trace.Event{Kind: trace.Launch, Stream: "s", Name: "inner", Time: 0, Took: 3})
	total, n := int64(0), 0
	tracks := pictureOf(t, in).find("stream s")
	for _, track := range tracks {
		for _, s := range track.slices {
			total += s.end - s.begin
			n++
		}
	}
	if n != 41 || total != 4003 || len(tracks) != 40 || len(tracks[0].slices) != 2 {
		t.Errorf("%d slices of %d ns on %d tracks", n, total, len(tracks))
	}
}

// Spans that begin inside of another, or where it ends, stay on its track, in any order of
// emission.
func TestPerfettoNest(t *testing.T) {
	in := &trace.Trace{Events: []trace.Event{
		{Kind: trace.Launch, Stream: "s", Name: "c", Time: 10, Took: 0},
		{Kind: trace.Launch, Stream: "s", Name: "b", Time: 0, Took: 3},
		{Kind: trace.Launch, Stream: "s", Name: "a", Time: 0, Took: 10},
		{Kind: trace.Launch, Stream: "s", Name: "d", Time: 10, Took: 5},
	}}
	tracks := pictureOf(t, in).find("stream s")
	var got []string
	for _, s := range tracks[0].slices {
		got = append(got, s.name)
	}
	if want := []string{"b", "a", "c", "d"}; len(tracks) != 1 || !slices.Equal(got, want) {
		t.Errorf("on %d tracks slices end in the order %q, not %q", len(tracks), got, want)
	}
}

// No arrow leads from a step that was given up to its rerun.
func TestPerfettoGivenUp(t *testing.T) {
	p := pictureOf(t, &trace.Trace{Events: []trace.Event{
		{Kind: trace.Begin, Step: 1}, {Kind: trace.Offload, Step: 1, Storage: 1}, {Kind: trace.Rerun, Step: 1},
		{Kind: trace.Begin, Step: 1}, {Kind: trace.Reload, Step: 1, Storage: 1}, {Kind: trace.End, Step: 1},
	}})
	if steps := p.find("steps")[0].slices; len(steps) != 2 || len(p.flows) != 0 {
		t.Errorf("there are steps %+v and arrows %q", steps, p.flows)
	}
}

// The export of any trace obeys the rules of Perfetto, and no span is lost.
func TestPerfettoAlwaysValid(t *testing.T) { rapid.Check(t, perfettoValid) }

func FuzzPerfetto(f *testing.F) { f.Fuzz(rapid.MakeFuzz(perfettoValid)) }

func perfettoValid(t *rapid.T) {
	traces := anyTraces(t)
	want := 0
	for _, in := range traces {
		for i := range in.Events {
			if in.Events[i].Kind.Span() {
				want++
			}
		}
	}
	got := 0
	for _, track := range pictureOf(t, traces...).tracks {
		if strings.HasPrefix(track.name, "stream ") {
			got += len(track.slices)
		}
	}
	if got != want {
		t.Fatalf("%d spans became %d slices", want, got)
	}
}

// The reader of these tests finds the errors that trace_processor finds.
func TestReaderPlanted(t *testing.T) {
	for what, plant := range map[string]func(p *packets, s *sequence, on, counts uint64){
		"not described":       func(_ *packets, s *sequence, _, _ uint64) { s.end(99, 1) },
		"without a beginning": func(_ *packets, s *sequence, on, _ uint64) { s.end(on, 1) },
		"open slices":         func(_ *packets, s *sequence, on, _ uint64) { s.event(sliceBegin, on); s.named(1, label{}); s.emit(1) },
		"counter false":       func(_ *packets, s *sequence, on, _ uint64) { s.count(on, 1, 1) },
		"counter true":        func(_ *packets, s *sequence, _, counts uint64) { s.end(counts, 1) },
		"time 1 follows 2":    func(_ *packets, s *sequence, _, counts uint64) { s.count(counts, 2, 1); s.count(counts, 1, 1) },
		"not cleared":         func(p *packets, _ *sequence, _, counts uint64) { (&sequence{p: p, id: 77}).count(counts, 1, 1) },
		"name 5 was not told": func(_ *packets, s *sequence, on, _ uint64) {
			s.names[label{}] = 5
			s.event(3, on)
			s.named(1, label{})
			s.emit(1)
		},
		"parent":         func(p *packets, _ *sequence, _, _ uint64) { p.describe(track{parent: 50, name: "x"}) },
		"without a name": func(_ *packets, s *sequence, on, _ uint64) { s.event(instant, on); s.emit(1) },
		"an arrow ends": func(p *packets, s *sequence, on, _ uint64) {
			s.event(instant, on)
			p.body = fixed(p.body, eventFlowEnd, 1)
			s.emit(1)
		},
		"described before": func(p *packets, _ *sequence, _, _ uint64) { p.tracks = 0; p.describe(track{pid: 1, name: "x"}) },
		"nested too deeply": func(_ *packets, s *sequence, on, _ uint64) {
			for range 600 {
				s.event(sliceBegin, on)
				s.named(1, label{})
				s.emit(1)
			}
		},
		"an event of type 9": func(_ *packets, s *sequence, on, _ uint64) { s.event(9, on); s.emit(1) },
		"follows 5 on track": func(p *packets, s *sequence, _, counts uint64) {
			s.count(counts, 5, 1)
			p.sequence().count(counts, 4, 1)
		},
		"is of no sequence": func(p *packets, _ *sequence, _, counts uint64) { (&sequence{p: p}).count(counts, 1, 1) },
	} {
		var out bytes.Buffer
		w := bufio.NewWriter(&out)
		p := newPackets(w)
		process := p.describe(track{pid: 1, name: "p"})
		on, counts := p.describe(track{parent: process, name: "on"}), p.describe(track{parent: process, name: "counts", bytes: true})
		plant(p, p.sequence(), on, counts)
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		if _, err := read(out.Bytes()); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: the reader says %v", what, err)
		}
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestFullDisk(t *testing.T) {
	for name, write := range map[string]func() error{
		"Perfetto":        func() error { return Perfetto(full{}, []*trace.Trace{aRun(0, 1, 1)}) },
		"memory snapshot": func() error { return MemoryViz(full{}, []*trace.Trace{aRun(0, 1, 1)}) },
	} {
		if err := write(); err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "no space left") {
			t.Errorf("the error is %v", err)
		}
	}
}

// Both formats are the same for a packed trace, whose events are read again and again.
func TestPacked(t *testing.T) {
	var file bytes.Buffer
	w := trace.NewWriter(&file, trace.Header{Rank: 1, Began: 5, Compute: "compute"}, 0)
	for i := range 3000 {
		e := trace.Event{Kind: trace.Kind(i) % (trace.Work + 1), Step: i / 100, Time: int64(i) * 100, First: uint64(i), Last: uint64(i + 1 + i%3), Storage: i % 7, Bytes: int64(i%5) << 10, Offset: int64(i%7) << 12}
		if e.Name = []string{"", "a", "b"}[i%3]; e.Kind.Span() {
			e.Stream, e.Took = []string{"compute", "offload"}[i%2], int64(i%400)
		}
		if i%100 == 0 {
			e.Kind = trace.Begin
		}
		w.Emit(e)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	whole, err1 := trace.Read(bytes.NewReader(file.Bytes()))
	packed, err2 := trace.ReadPacked(bytes.NewReader(file.Bytes()))
	if err1 != nil || err2 != nil || len(whole.Events) != 3000 || packed.Events != nil {
		t.Fatal(err1, err2)
	}
	for name, write := range map[string]func(io.Writer, []*trace.Trace) error{"Perfetto": Perfetto, "MemoryViz": MemoryViz} {
		var want, got bytes.Buffer
		if err := cmp.Or(write(&want, []*trace.Trace{whole}), write(&got, []*trace.Trace{packed})); err != nil || want.Len() < 10_000 || !bytes.Equal(want.Bytes(), got.Bytes()) {
			t.Errorf("%s: %d and %d bytes, %v", name, want.Len(), got.Len(), err)
		}
	}
}

// All that Perfetto shows of a run with something of everything. A change of any name, time
// or note is seen; write it anew with -update if the change is meant.
func TestWholePicture(t *testing.T) {
	in := aRun(1, 2, 2)
	for i, k := range []trace.Kind{trace.Launch, trace.Copy, trace.Work, trace.Wait} {
		in.Events = append(in.Events, trace.Event{Kind: k, Stream: "side", Name: "a name", Tier: memory.Host, Time: int64(5000 + 100*i), Took: int64(10 * (i + 1)), First: 3, Last: 3 + uint64(i)*2, Bytes: int64(70 * i)})
	}
	for _, k := range []trace.Kind{trace.Evict, trace.Late, trace.Recompute, trace.Stash, trace.Restore, trace.Capture, trace.Replay, trace.Rerun, trace.Spill} {
		in.Events = append(in.Events, trace.Event{Kind: k, Name: "g", Chunk: 1, Layer: 2, Microbatch: 3, Storage: 4, Bytes: 5, Step: 1, Time: 9000})
	}
	p := pictureOf(t, in, aRun(0, 1, 1))
	var b strings.Builder
	fmt.Fprintln(&b, p.processes, p.flows)
	for id := uint64(1); id <= uint64(len(p.tracks)); id++ {
		track := p.tracks[id]
		fmt.Fprintf(&b, "%s of %s\n", track.name, track.process)
		for _, s := range track.slices {
			fmt.Fprintf(&b, "  %d-%d %s (%s) %v\n", s.begin, s.end, s.name, s.category, s.notes)
		}
		for _, s := range track.samples {
			fmt.Fprintf(&b, "  %d: %d\n", s.at, s.value)
		}
	}
	golden.Check(t, "perfetto.txt", b.String())
}
