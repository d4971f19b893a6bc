// This file tests what an observer is told.

package cpu_test

import (
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

// told keeps what an observer is told, and holds it against what must be: of one stream
// pieces come in order and do not overlap, and memory in use is what was taken.
type told struct {
	t     testing.TB
	mu    sync.Mutex
	works map[string][]device.Work
	inUse [memory.Kinds]memory.Bytes
}

func (o *told) WorkDone(w device.Work) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.works == nil {
		o.works = map[string][]device.Work{}
	}
	all := o.works[w.Stream]
	if w.Begin > w.End || w.Last != w.First+1 || w.End > device.Now() {
		o.t.Errorf("told of %+v", w)
	}
	if n := len(all); n > 0 && (w.First < all[n-1].Last || w.Begin < all[n-1].End) {
		o.t.Errorf("%+v comes after %+v", w, all[n-1])
	}
	o.works[w.Stream] = append(all, w)
}

func (o *told) MemoryChanged(kind memory.Kind, owner string, bytes, current memory.Bytes) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.inUse[kind] += bytes; o.inUse[kind] != current || owner == "" || bytes == 0 {
		o.t.Errorf("%d bytes for %q leave %d of kind %v in use; want %d", bytes, owner, current, kind, o.inUse[kind])
	}
}

// SPEC S6.5: what two streams did is told with true times and sizes, and that one has
// waited for the other; everything is told before Sync returns.
func TestObserver(t *testing.T) {
	o := &told{t: t}
	d, err := cpu.Open(cpu.Options{Observe: o})
	if err != nil {
		t.Fatal(err)
	}
	stream := func(name string) device.Stream {
		s, err := d.NewStream(name)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	compute, out := stream("compute"), stream("out")
	b, err := d.Alloc(memory.Device, 1<<20, "tensors")
	if err != nil {
		t.Fatal(err)
	}
	h, err := d.Alloc(memory.Host, 1<<20, "tensors away")
	if err != nil {
		t.Fatal(err)
	}
	e, err := d.NewEvent(0)
	if err != nil {
		t.Fatal(err)
	}
	const slept = 5 * time.Millisecond
	gate := make(chan struct{}) // a wait for work that is over by then is none
	sleep := device.NewLaunch(&device.Kernel{Name: "sleep", Go: func(*device.Launch) { <-gate; time.Sleep(slept) }}, 1, 1)
	from := device.Now()
	compute.Launch(sleep)
	compute.Fill(b.All(), 7)
	compute.Record(e)
	out.Wait(e)
	close(gate)
	out.Copy(h.All(), b.All())
	row := device.Rect{Range: b.Slice(0, 16), Pitch: 64, Rows: 4}
	out.Copy2D(device.Rect{Range: h.Slice(0, 16), Pitch: 32, Rows: 4}, row)
	compute.BeginCapture()
	compute.Launch(sleep)
	compute.Fill(b.All(), 8)
	if n := compute.Issued(); n != 2 {
		t.Errorf("%d pieces were issued beside the capture; want 2", n)
	}
	g, err := compute.EndCapture()
	if err != nil {
		t.Fatal(err)
	}
	compute.Replay(g)
	if err := out.Download(make([]byte, 100), h.Slice(0, 100)); err != nil {
		t.Fatal(err)
	}
	out.Upload(b.Slice(0, 10), make([]byte, 10))
	compute.Host(func() {})
	if err := d.Sync(); err != nil {
		t.Fatal(err)
	}
	to := device.Now()
	want := map[string][]device.Work{
		"compute": {
			{Kind: device.Launched, Name: "sleep"}, {Kind: device.Copied, Bytes: 1 << 20, To: memory.Device},
			{Kind: device.Replayed}, {Kind: device.Launched, Name: "host callback"},
		},
		"out": {
			{Kind: device.Waited}, {Kind: device.Copied, Bytes: 1 << 20, To: memory.Host}, {Kind: device.Copied, Bytes: 64, To: memory.Host},
			{Kind: device.Copied, Bytes: 100, To: memory.Host}, {Kind: device.Copied, Bytes: 10, To: memory.Device},
		},
	}
	o.mu.Lock()
	for name, works := range want {
		got := slices.Clone(o.works[name])
		for i := range got {
			if got[i].First != uint64(i) || got[i].Begin < from || got[i].End > to {
				t.Errorf("%s: piece %d is %+v", name, i, got[i])
			}
			got[i].Stream, got[i].First, got[i].Last, got[i].Begin, got[i].End = "", 0, 0, 0, 0
		}
		if !slices.Equal(got, works) {
			t.Errorf("%s did %+v; want %+v", name, got, works)
		}
	}
	took := func(name string, i int) time.Duration {
		return time.Duration(o.works[name][i].End - o.works[name][i].Begin)
	}
	if took("compute", 0) < slept || took("compute", 2) < slept || took("out", 0) < slept/2 {
		t.Errorf("kernel, graph and wait took %v, %v and %v; the kernel sleeps for %v", took("compute", 0), took("compute", 2), took("out", 0), slept)
	}
	if o.works["out"][1].Begin < o.works["compute"][1].End {
		t.Error("the copy began before what it waited for was over")
	}
	o.mu.Unlock()
	compute.Free(b)
	out.Free(h)
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if o.inUse != [memory.Kinds]memory.Bytes{} {
		t.Errorf("%v is in use in the end", o.inUse)
	}
}

// The time in which a stream had nothing to do belongs to no piece of work, and a piece that
// was in the queue begins where the one before ends. Inside a bubble the clock is exact.
func TestIdleTimeIsNoWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := &told{t: t}
		d := open(t, cpu.Options{Observe: o})
		s := stream(t, d, "s")
		const work, idle = 3 * time.Millisecond, time.Second
		for range 2 {
			for range 2 {
				s.Host(func() { time.Sleep(work) })
			}
			if err := s.Sync(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(idle)
		}
		var gaps, took []time.Duration
		all := o.works["s"]
		for i, w := range all {
			took = append(took, time.Duration(w.End-w.Begin))
			if i > 0 {
				gaps = append(gaps, time.Duration(w.Begin-all[i-1].End))
			}
		}
		if !slices.Equal(took, []time.Duration{work, work, work, work}) || !slices.Equal(gaps, []time.Duration{0, idle, 0}) {
			t.Errorf("pieces of %v took %v, with gaps of %v", work, took, gaps)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
}

// A stream that waits for its own event has nothing to wait for: no work is issued.
func TestWaitForOneself(t *testing.T) {
	d := open(t, cpu.Options{})
	a, b := stream(t, d, "a"), stream(t, d, "b")
	e, err := d.NewEvent(0)
	if err != nil {
		t.Fatal(err)
	}
	gate := make(chan struct{})
	a.Host(func() { <-gate })
	a.Record(e)
	own, other := a.Issued(), b.Issued()
	a.Wait(e)
	b.Wait(e)
	if a.Issued() != own || b.Issued() != other+1 {
		t.Errorf("waits issued %d pieces on the stream itself and %d on another; want 0 and 1", a.Issued()-own, b.Issued()-other)
	}
	close(gate)
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// Every kind of work is told with its bytes and where they went, whichever kinds of memory
// it is between.
func TestObserverTellsEveryCopy(t *testing.T) {
	o := &told{t: t}
	d := open(t, cpu.Options{Observe: o})
	s := stream(t, d, "s")
	var want []device.Work
	add := func(n memory.Bytes, to memory.Kind) {
		i := uint64(len(want))
		want = append(want, device.Work{Kind: device.Copied, Stream: "s", First: i, Last: i + 1, Bytes: n, To: to})
	}
	bufs := map[memory.Kind][2]*device.Buffer{}
	for _, k := range []memory.Kind{memory.Device, memory.Host} {
		bufs[k] = [2]*device.Buffer{alloc(t, d, k, 1000), alloc(t, d, k, 1000)}
	}
	for _, to := range []memory.Kind{memory.Device, memory.Host} {
		dst := bufs[to][0]
		for _, from := range []memory.Kind{memory.Device, memory.Host} {
			src := bufs[from][1]
			s.Copy(dst.Slice(0, 11), src.Slice(0, 11))
			add(11, to)
			s.Copy2D(device.Rect{Range: dst.Slice(0, 7), Pitch: 10, Rows: 3}, device.Rect{Range: src.Slice(0, 7), Pitch: 20, Rows: 3})
			add(21, to)
		}
		s.Fill(dst.Slice(1, 13), 1)
		add(13, to)
		s.Upload(dst.Slice(2, 17), make([]byte, 17))
		add(17, to)
		if err := s.Download(make([]byte, 19), dst.Slice(3, 19)); err != nil {
			t.Fatal(err)
		}
		add(19, memory.Host)
	}
	for _, pair := range bufs {
		s.Free(pair[0])
		s.Free(pair[1])
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	got := o.works["s"]
	for i := range got {
		got[i].Begin, got[i].End = 0, 0
	}
	if !slices.Equal(got, want) {
		t.Errorf("told of %+v, want %+v", got, want)
	}
}
