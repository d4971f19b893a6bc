// This file owns errors that must not be lost, what ranks are told of them, and figures of
// unlike groups: chunks, microbatches, berths of several shapes.

package stash

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// failing is a device that fails what it is told to.
type failing struct {
	device.Device
	reserve, grow, sync, download, backdrop error
}

type failingStream struct {
	device.Stream
	d *failing
}

func (d *failing) NewStream(name string) (device.Stream, error) {
	s, err := d.Device.NewStream(name)
	return failingStream{s, d}, err
}

func (d *failing) Reserve(k memory.Kind, n memory.Bytes, owner string) (*device.Buffer, error) {
	if d.reserve != nil {
		return nil, d.reserve
	}
	return d.Device.Reserve(k, n, owner)
}

func (d *failing) Grow(b *device.Buffer, n memory.Bytes) error {
	if d.grow != nil && n > b.Size() {
		return d.grow
	}
	return d.Device.Grow(b, n)
}

func (d *failing) Backdrop(b *device.Buffer) error {
	if d.backdrop != nil {
		return d.backdrop
	}
	return d.Device.Backdrop(b)
}

func (s failingStream) Sync() error { return errors.Join(s.Stream.Sync(), s.d.sync) }

func (s failingStream) Download(dst []byte, src device.Range) error {
	return errors.Join(s.Stream.Download(dst, src), s.d.download)
}

var errLost = errors.New("the device is lost")

// A tier that gets smaller waits, and gets new memory: what fails there is returned, and the
// manager can be closed.
func TestResizeReturnsErrors(t *testing.T) {
	for name, set := range map[string]func(*failing){
		"sync": func(d *failing) { d.sync = errLost }, "reserve": func(d *failing) { d.reserve = errLost }, "grow": func(d *failing) { d.grow = errLost },
	} {
		d := &failing{Device: openCPU(t)}
		r := newSmall(t, d, tight(4, 0, 10, 0))
		set(d)
		if err := r.m.SetDevicePages(2); !errors.Is(err, errLost) {
			t.Errorf("%s: %v", name, err)
		}
		*d = failing{Device: d.Device}
	}
	// A tier without pages has addresses for one, and may have some again.
	r := newSmall(t, openCPU(t), tight(4, 0, 10, 0))
	for _, n := range []schedule.Pages{0, 3, 0} {
		if err := r.m.SetDevicePages(n); err != nil || r.m.store.Pages(Device) != n {
			t.Errorf("%d pages, want %d: %v", r.m.store.Pages(Device), n, err)
		}
	}
	r.m.store.cfg.Max[Device] = 0
	r.m.store.pages[Device] = 1
	if err := r.m.SetDevicePages(0); err != nil {
		t.Error(err)
	}
}

// Fewer sets need new memory, too.
func TestFewerSetsReturnErrors(t *testing.T) {
	for name, set := range map[string]func(*failing){
		"sync": func(d *failing) { d.sync = errLost }, "reserve": func(d *failing) { d.reserve = errLost }, "grow": func(d *failing) { d.grow = errLost },
	} {
		d := &failing{Device: openCPU(t)}
		c := roomy(PagesOnly)
		c.MoreSets = 2
		r := newSmall(t, d, c)
		w := r.space("a", 0, 10)
		if err := r.m.SetMore(2); err != nil {
			t.Fatal(err)
		}
		set(d)
		if err := r.m.SetMore(1); !errors.Is(err, errLost) || len(w.slots) != 2 {
			t.Errorf("%s: %d sets, %v", name, len(w.slots), err)
		}
		*d = failing{Device: d.Device}
	}
}

// A report that cannot be read ends the step on all ranks, which are told who could not and
// why. So does a demand that cannot be met.
func TestRanksAreToldWhy(t *testing.T) {
	for name, x := range map[string]struct {
		host     bool // there is a second store
		download error
		pages    schedule.Pages
		why      string
	}{
		"one report":     {false, errLost, 10, "the device is lost"},
		"two reports":    {true, errLost, 10, "the device is lost"},
		"too few pages":  {false, nil, 1, "{g 0 1 0}"},
		"nothing amiss":  {false, nil, 10, ""},
		"nothing amiss2": {true, nil, 10, ""},
	} {
		d := &failing{Device: openCPU(t)}
		c := tight(1, 0, x.pages, 0)
		c.Mode, c.Rank = PagesOnly, 6
		if x.host {
			c.HostPages, c.HostMax = 1, 4
		}
		var told []Outcome
		c.Reduce = func(v Outcome) (Outcome, error) { told = append(told, v); return v, nil }
		r := newSmall(t, d, c)
		w := r.space("a", 0, 10)
		step := func(rows int) error {
			return r.m.Step(memory.Key{}, func(int) error {
				d.download = x.download
				r.pass(w, rows, 1)
				return nil
			})
		}
		err := step(3)
		d.download = nil
		last := told[len(told)-1]
		if x.why == "" {
			if err != nil || last.Failed {
				t.Errorf("%s: %v, %+v", name, err, last)
			}
			continue
		}
		if err == nil || x.download != nil && !errors.Is(err, x.download) || !last.Failed || !last.Final || last.Rank != 6 || last.Why == "" || x.download != nil && last.Why != x.why {
			t.Errorf("%s: %v, %+v", name, err, last)
		}
	}
}

// What the ranks cannot agree on is an error, of a step that went well and of one that did
// not.
func TestRanksCannotAgree(t *testing.T) {
	apart, bad := errors.New("a rank is gone"), errors.New("bad batch")
	for _, body := range []error{nil, bad} {
		c := roomy(PagesOnly)
		c.Reduce = func(v Outcome) (Outcome, error) { return v, apart }
		r := newSmall(t, openCPU(t), c)
		w := r.space("a", 0, 10)
		err := r.m.Step(memory.Key{}, func(int) error { r.pass(w, 1, 1); return body })
		if !errors.Is(err, apart) || body != nil && !errors.Is(err, body) || r.m.Stats().Steps != 0 {
			t.Errorf("%v after %v; %d steps went well", err, body, r.m.Stats().Steps)
		}
	}
}

// An overflow that another rank could not mend has that rank's number and words.
func TestOverflowOfAnotherRank(t *testing.T) {
	for _, final := range []bool{true, false} {
		c := roomy(PagesOnly)
		c.Rank = 1
		c.Reduce = func(Outcome) (Outcome, error) {
			return Outcome{Failed: true, Final: final, Rank: 5, Why: "it is full"}, nil
		}
		r := newSmall(t, openCPU(t), c)
		w := r.space("a", 0, 10)
		err := r.m.Step(memory.Key{}, func(int) error { r.pass(w, 1, 1); return nil })
		want := "rank 5: it is full"
		if !final {
			want = "rank 5: the rerun of a step failed as well: it is full"
		}
		var over *Overflow
		if !errors.As(err, &over) || over.Rank != 5 || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// A tier that cannot grow is told of once, with its pages and the reason.
func TestGrowthThatFailsIsLogged(t *testing.T) {
	const page = 4 * memory.KiB
	var text strings.Builder
	c := tight(1, 0, 100, 0)
	c.Log = slog.New(slog.NewTextHandler(&text, nil))
	d := &scarce{openCPU(t), PagesOwner, page}
	r := newSmall(t, d, c)
	for range 2 {
		if err := r.m.follow(r.m.store, Device, twice{}, 3, 0); err == nil {
			t.Error("it grew")
		}
	}
	if s := text.String(); strings.Count(s, "\n") != 1 || !strings.Contains(s, "a tier could not grow") || !strings.Contains(s, "tier=device pages=6 err=") {
		t.Error(s)
	}
}

// A replay under a key whose step is not the one that was issued last needs at most the pages
// of all groups together.
func TestDemandOfAnUnknownStep(t *testing.T) {
	r := newSmall(t, openCPU(t), roomy(PagesOnly))
	w := r.space("a", 0, 10)
	if err := r.m.Step(memory.Key{}, func(int) error { r.pass(w, 3, 1, 2, 3); return nil }); err != nil {
		t.Fatal(err)
	}
	st, what := r.m.store, r.m.current
	rep := Report{Need: []schedule.Pages{3, 3, 3}}
	if n := r.m.demand(st, rep, what); n != 9 {
		t.Errorf("a step whose groups are all saved at once needs %d pages", n)
	}
	part := &issue{&schedule.Schedule{}, map[memory.GroupID]*Record{{Name: "g", Layer: 1}: what.records[memory.GroupID{Name: "g", Layer: 1}]}}
	for _, x := range []struct {
		over uint64
		of   *issue
		want schedule.Pages
	}{{1, part, 10}, {0, part, 0}, {1, nil, 10}, {0, nil, 0}, {1, what, 10}} {
		rep := Report{Need: []schedule.Pages{2, 3, 5}}
		rep.Overflows = x.over
		if n := r.m.demand(st, rep, x.of); n != x.want {
			t.Errorf("%d overflows of a step with %v: %d pages, want %d", x.over, x.of, n, x.want)
		}
	}
}

// Groups are traced with all their numbers, and stashes and restores in pairs.
func TestTraceOfGroups(t *testing.T) {
	c := roomy(PagesOnly)
	var got []string
	c.Emit = func(e trace.Event) {
		if e.Kind != trace.Spill {
			got = append(got, fmt.Sprint(e.Kind, " ", memory.GroupID{Name: e.Name, Chunk: e.Chunk, Layer: e.Layer, Microbatch: e.Microbatch}))
		}
	}
	r := newSmall(t, openCPU(t), c)
	w := r.space("a", 0, 10)
	g, h := memory.GroupID{Name: "g", Chunk: 1, Layer: 2, Microbatch: 3}, memory.GroupID{Name: "h", Chunk: 4, Layer: 5, Microbatch: 6}
	err := r.m.Step(memory.Key{}, func(int) error {
		w.Forward(g).Saved()
		w.Forward(h).Saved()
		w.Backward(h).Done()
		w.Backward(g).Done()
		return nil
	})
	want := fmt.Sprint([]string{fmt.Sprint(trace.Stash, " ", g), fmt.Sprint(trace.Stash, " ", h), fmt.Sprint(trace.Restore, " ", h), fmt.Sprint(trace.Restore, " ", g)})
	if err != nil || fmt.Sprint(got) != want {
		t.Errorf("%v, want %s; %v", got, want, err)
	}
}

// witness notes the calls of a step with the waits between them.
type witness struct{ got []string }

func (w *witness) Called(c Call, g memory.GroupID, space int) {
	w.got = append(w.got, fmt.Sprint(c, g.Layer, "@", space))
}
func (w *witness) Waited() { w.got = append(w.got, "waited") }

// A watcher is told every call with its workspace, and of the waits of leases and restores.
func TestWatcher(t *testing.T) {
	c := roomy(PagesOnly)
	x := &witness{}
	c.Watch = x
	r := newSmall(t, openCPU(t), c)
	a, b := r.space("a", 0, 10), r.space("b", 0, 10)
	err := r.m.Step(memory.Key{}, func(int) error { r.pass(a, 1, 1); r.pass(b, 1, 2); return nil })
	if want := "[0 1@0 waited 1 1@0 2 1@0 waited 3 1@0 0 2@1 waited 1 2@1 2 2@1 waited 3 2@1]"; err != nil || fmt.Sprint(x.got) != want {
		t.Errorf("%v, want %s; %v", x.got, want, err)
	}
}

// Without Place all groups have their rows in the first store, also if there are two.
func TestNobodyPlaces(t *testing.T) {
	c := tight(1, 0, 20, 0)
	c.HostPages, c.HostMax = 1, 20
	r := newSmall(t, openCPU(t), c)
	w := r.space("a", 0, 10)
	if err := r.m.Step(memory.Key{}, func(int) error { r.pass(w, 3, 1, 2); return nil }); err != nil {
		t.Fatal(err)
	}
	if s := r.m.Stats(); s.Host != 0 || s.Stashed == 0 {
		t.Errorf("%+v", s)
	}
	if err := r.m.Expect(0); err != nil || r.m.store.Pages(Host) != 0 {
		t.Errorf("%d host pages, %v", r.m.store.Pages(Host), err)
	}
}

// A sizer that makes no sense is refused.
func TestSizersAreChecked(t *testing.T) {
	dev := openCPU(t)
	compute, err := dev.NewStream("compute")
	if err != nil {
		t.Fatal(err)
	}
	c := roomy(Auto)
	c.Sizer = senseless{}
	if m, err := NewManager(dev, compute, c); m != nil || err != errLost {
		t.Error(err)
	}
	if err := errors.Join(compute.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

type senseless struct{ schedule.Sizer }

func (senseless) Check() error { return errLost }

// Berths of several shapes: their memory is the sum, what is missed is told of berths that
// hold alone, and one that holds grows whether or not it should stay.
func TestBerthsOfSeveralShapes(t *testing.T) {
	l := libraryOn(t, openCPU(t), 0)
	settle := func(stays bool) Missed {
		t.Helper()
		missed, err := l.h.Settle(func(*Berth) bool { return stays })
		if err != nil {
			t.Fatal(err)
		}
		l.h.Begin()
		return missed
	}
	if m := settle(false); m != (Missed{}) || l.h.Size() != 0 {
		t.Errorf("without berths %+v, %v", m, l.h.Size())
	}
	var put []func(int64) *Berth
	for _, s := range []rowShape{{4096, 10}, {8192, 10}, {12288, 10}} {
		mem, p := l.putter(t, s)
		defer l.compute.Free(mem)
		put = append(put, p)
	}
	for _, p := range put {
		p(2)
	}
	if m := settle(false); m != (Missed{}) {
		t.Errorf("berths without memory missed %+v", m)
	}
	if n := l.h.Size(); n != 3*(4096+8192+12288) {
		t.Errorf("three berths of three rows take %v", n)
	}
	for i, p := range put {
		p(int64(4 + i))
	}
	if m := settle(true); m.Asked != 4*4096+5*8192+6*12288 || m.Had != 3*(4096+8192+12288) {
		t.Errorf("%+v is missed", m)
	}
	if n := l.h.Size(); n != 5*4096+6*8192+7*12288 {
		t.Errorf("three berths take %v", n)
	}
}

// A berth that cannot grow for another reason than memory is an error; for want of memory it
// stays empty, or keeps what it has if no rows were lost.
func TestBerthsCannotGrow(t *testing.T) {
	full := &device.OutOfMemory{Kind: memory.Device}
	for _, x := range []struct {
		err   error
		drop  bool // of the backdrop
		holds bool // before
		lost  bool
		ok    bool
	}{
		{full, false, false, false, true}, {full, true, false, false, true}, {errLost, false, false, false, false}, {errLost, true, false, false, false},
		{full, false, true, false, true}, {full, false, true, true, false}, {errLost, false, true, false, false},
	} {
		d := &failing{Device: openCPU(t)}
		l := libraryOn(t, d, 0)
		mem, put := l.putter(t, rowShape{4096, 100})
		b := put(64)
		stay := func(*Berth) bool { return false }
		if x.holds {
			if _, err := l.h.Settle(stay); err != nil {
				t.Fatal(err)
			}
			l.h.Begin()
			rows := int64(b.room) - 1
			if x.lost {
				rows = int64(b.room) + 1
			}
			put(rows)
		}
		room := b.room
		if x.drop {
			d.backdrop = x.err
		} else {
			d.grow = x.err
		}
		_, err := l.h.Settle(stay)
		if (err == nil) != x.ok || !x.ok && !errors.Is(err, x.err) || b.room != room || b.Holds() != x.holds {
			t.Errorf("%+v: %v, room for %d, had %d", x, err, b.room, room)
		}
		*d = failing{Device: d.Device, download: errLost}
		if _, err := l.h.Settle(stay); !errors.Is(err, errLost) {
			t.Errorf("%+v: a note that cannot be read: %v", x, err)
		}
		d.download = nil
		l.compute.Free(mem)
	}
}

// Rows that are assumed: of several groups the one with the most rows is told of, with the
// first of its tensors that is too small, be it the first or the last. One that is dropped counts.
func TestAssumedRowsOfSeveralGroups(t *testing.T) {
	for _, x := range []struct {
		max   []Rows
		limit Rows
	}{{[]Rows{5, 50, 50}, 5}, {[]Rows{50, 50, 6}, 6}, {[]Rows{50, 7, 8}, 7}} {
		for _, drop := range []bool{false, true} {
			c := roomy(PagesOnly)
			c.Store.Assume = func(g memory.GroupID) Rows { return Rows(10 * g.Layer) }
			r := newSmall(t, openCPU(t), c)
			var ts []Tensor
			for i, n := range x.max {
				ts = append(ts, Tensor{Name: fmt.Sprint(i), Row: 16, MaxRows: n})
			}
			w, err := r.m.NewWorkspace("a", 1, 0, ts...)
			if err != nil {
				t.Fatal(err)
			}
			err = r.m.Step(memory.Key{}, func(int) error {
				for _, i := range rand.Perm(4) {
					if s := w.Forward(memory.GroupID{Name: "g", Layer: i}); drop {
						s.Drop()
					} else {
						s.Saved()
					}
				}
				return nil
			})
			if want := fmt.Sprintf("received 30 rows and its buffer holds %d", x.limit); err == nil || !strings.Contains(err.Error(), fmt.Sprint(memory.GroupID{Name: "g", Layer: 3})+" "+want) {
				t.Errorf("%v, want %s", err, want)
			}
		}
	}
}

// A step runs again after its first attempt that failed, and after its second if the first
// broke a stack. What earlier steps did does not matter. SPEC S1.6
func TestAttempts(t *testing.T) {
	ok, failed, broke := Outcome{}, Outcome{Failed: true, Why: "it is full"}, Outcome{Failed: true, Broke: true, Why: "a stack"}
	c := roomy(PagesOnly)
	var said []Outcome
	c.Reduce = func(Outcome) (v Outcome, _ error) {
		v, said = said[0], said[1:]
		return v, nil
	}
	r := newSmall(t, openCPU(t), c)
	w := r.space("a", 0, 10)
	rng := rand.New(rand.NewPCG(17, 131))
	for range 60 {
		said = nil
		for range 4 {
			said = append(said, []Outcome{ok, failed, broke}[rng.IntN(3)])
		}
		drawn := said
		want := 1
		if drawn[0].Failed {
			want = 2
			if drawn[1].Failed && drawn[0].Broke {
				want = 3
			}
		}
		before, attempts := r.m.Stats(), 0
		err := r.m.Step(memory.Key{}, func(attempt int) error {
			if attempt != attempts {
				t.Errorf("attempt %d has number %d", attempts, attempt)
			}
			attempts++
			r.pass(w, 1, 1)
			return nil
		})
		st := r.m.Stats()
		if well := !drawn[want-1].Failed; attempts != want || (err == nil) != well || st.Reruns-before.Reruns != want-1 || (st.Steps > before.Steps) != well {
			t.Errorf("%v: %d attempts, want %d: %v; %+v", drawn, attempts, want, err, st)
		}
	}
}
