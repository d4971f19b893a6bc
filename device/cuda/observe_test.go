//go:build linux

// This file tests what an observer is told, on the made-up driver and on a GPU.

package cuda

import (
	"sync"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/devicetest"
	"github.com/stowage-dev/stowage/memory"
)

// told keeps what an observer is told.
type told struct {
	mu    sync.Mutex
	works map[string][]device.Work // by stream
	inUse [memory.Kinds]memory.Bytes
}

func (o *told) WorkDone(w device.Work) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.works == nil {
		o.works = map[string][]device.Work{}
	}
	o.works[w.Stream] = append(o.works[w.Stream], w)
}

func (o *told) MemoryChanged(kind memory.Kind, owner string, bytes, current memory.Bytes) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.inUse[kind] += bytes; o.inUse[kind] != current || owner == "" {
		panic("what is in use is not what was taken")
	}
}

// SPEC S6.5, S6.3: a device that is watched is still a device.
func TestConformanceWatched(t *testing.T) {
	devicetest.Run(t, func(t *testing.T) device.Device {
		d, _ := openFake(t, Options{CopyKernel: copyLaunch, Observe: &told{}})
		return d
	})
}

// watched runs launches, copies, waits and a graph, and looks at what was told.
func watched(t *testing.T, d *Device, o *told) {
	compute, out := newStream(t, d, "compute"), newStream(t, d, "out")
	b, h := alloc(t, d, memory.Device, 32<<20), alloc(t, d, memory.Host, 32<<20)
	e, err := d.NewEvent(0)
	if err != nil {
		t.Fatal(err)
	}
	compute.Launch(addLaunch(b.All(), 1)) // its code is loaded
	compute.BeginCapture()
	compute.Launch(addLaunch(b.All(), 1))
	g, err := compute.EndCapture()
	if err != nil {
		t.Fatal(err)
	}
	synced(t, d)
	from, first := device.Now(), compute.Issued()
	for range 40 {
		compute.Launch(addLaunch(b.All(), 1))
	}
	compute.Record(e)
	out.Wait(e)
	for range 3 {
		out.Copy(h.All(), b.All())
	}
	out.Record(e)
	compute.Wait(e)
	compute.Replay(g)
	synced(t, d)
	to := device.Now()
	if got := compute.Issued() - first; got != 42 {
		t.Errorf("%d pieces of work were issued; want 42", got)
	}
	o.check(t, "compute", from, to, first)
	o.check(t, "out", from, to, 0)
	kinds := map[device.WorkKind]int{}
	var last device.Work
	for _, w := range o.works["compute"] {
		if w.First >= first {
			kinds[w.Kind] += int(w.Last - w.First)
			last = w
		}
	}
	if kinds[device.Mixed] != 40 || kinds[device.Waited] != 1 || kinds[device.Replayed] != 1 || last.Kind != device.Replayed {
		t.Errorf("compute did %v", kinds)
	}
	copies, waited := o.works["out"][1:], o.works["out"][0]
	if waited.Kind != device.Waited || len(copies) != 3 {
		t.Fatalf("the copy stream did %+v", o.works["out"])
	}
	for _, w := range copies {
		if w.Kind != device.Copied || w.Bytes != h.Size() || w.To != memory.Host || w.Begin < waited.End {
			t.Errorf("a copy was told as %+v", w)
		}
	}
	for _, free := range []*device.Buffer{b, h} {
		compute.Free(free)
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
}

// check holds what was told of a stream against what must be: pieces in order, times
// that do not overlap and lie where the host saw them. Half a microsecond is what the
// driver's figures are rounded to.
func (o *told) check(t *testing.T, name string, from, to int64, first uint64) {
	t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	const blur = int64(50 * time.Microsecond) // of the two clocks
	var last device.Work
	for _, w := range o.works[name] {
		if w.First < first {
			continue
		}
		if w.First < last.Last || w.Last <= w.First || w.End < w.Begin || w.Begin < last.End-500 {
			t.Errorf("%s: %+v comes after %+v", name, w, last)
		}
		if w.Begin < from-blur || w.End > to+blur {
			t.Errorf("%s: %+v lies outside of %d to %d", name, w, from, to)
		}
		last = w
	}
}

// What is told as one has neither the bytes nor the name of its first piece.
func TestObserverOfBatches(t *testing.T) {
	o := &told{}
	d, _ := openFake(t, Options{Observe: o})
	defer closeDevice(t, d)
	s, b := newStream(t, d, "s"), alloc(t, d, memory.Device, 4096)
	for range 2 {
		s.Fill(b.All(), 1)
	}
	synced(t, d)
	if w := o.works["s"]; len(w) != 1 || w[0].Kind != device.Mixed || w[0].Last != w[0].First+2 || w[0].Bytes != 0 || w[0].Name != "" {
		t.Errorf("two fills were told as %+v", w)
	}
	s.Free(b)
}

// SPEC S6.5: launches are told in batches, copies, waits and replays one by one, in
// the order of issue and on the host's clock.
func TestObserver(t *testing.T) {
	o := &told{}
	d, _ := openFake(t, Options{Observe: o})
	defer closeDevice(t, d)
	watched(t, d, o)
}

// The same on a GPU.
func TestObserverOnGPU(t *testing.T) {
	o := &told{}
	d := open(t, Options{Observe: o})
	defer closeDevice(t, d)
	watched(t, d, o)
	var copied time.Duration
	for _, w := range o.works["out"] {
		if w.Kind == device.Copied {
			copied += time.Duration(w.End - w.Begin)
		}
	}
	launch := func(s device.Stream) time.Duration {
		_, wall := leastCost(t, s.(*stream), 64, func() { s.Launch(device.NewLaunch(emptyKernel, 1, 32)) })
		return wall
	}
	plain := open(t, Options{})
	defer closeDevice(t, plain)
	t.Logf("an empty launch takes the host %v, watched %v", launch(newStream(t, plain, "plain")), launch(newStream(t, d, "watched")))
	t.Logf("3 copies of 32 MiB to the host: %v; the reference is known to %v", copied, time.Duration(d.watch.least/2))
	if rate := 3 * float64(32<<20) / copied.Seconds(); rate < 1e9 || rate > 1e12 {
		t.Errorf("copies ran at %.3g bytes a second: their times are wrong", rate)
	}
}

// A long run changes its reference, and no time jumps.
func TestObserverReference(t *testing.T) {
	o := &told{}
	d, _ := openFake(t, Options{Observe: o})
	defer closeDevice(t, d)
	s := newStream(t, d, "s")
	d.watch.serves = time.Microsecond
	first := d.watch.ref
	b := alloc(t, d, memory.Host, 64)
	if o.inUse[memory.Host] != d.Memory().Kind[memory.Host].Current || o.inUse[memory.Host] < 64 {
		t.Errorf("%v is told to be in use", o.inUse)
	}
	from := device.Now()
	for range 200 {
		s.Upload(b.All(), make([]byte, 64))
		synced(t, s)
	}
	o.check(t, "s", from, device.Now(), 0)
	if len(o.works["s"]) != 200 || d.watch.ref == first {
		t.Errorf("%d of 200 uploads were told, with the reference %d after %d", len(o.works["s"]), d.watch.ref, first)
	}
	if made := len(d.watch.all); made > 20 {
		t.Errorf("%d events were made", made)
	}
	s.Free(b)
}

// A device that fails tells what it did before, and ends.
func TestObserverOfFailure(t *testing.T) {
	o := &told{}
	d, f := openFake(t, Options{Observe: o})
	s := newStream(t, d, "s")
	b := alloc(t, d, memory.Device, 4096)
	s.Fill(b.All(), 1)
	synced(t, s)
	f.mu.Lock()
	f.fail["cuLaunchKernel"] = errLaunchFailure
	f.mu.Unlock()
	s.Launch(addLaunch(b.All(), 1))
	if s.Sync() == nil {
		t.Error("the failure was lost")
	}
	s.Free(b)
	_ = d.Close()
	if n := len(o.works["s"]); n == 0 {
		t.Error("nothing was told")
	}
}
