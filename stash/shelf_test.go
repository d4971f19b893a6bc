// This file owns the shelf's tests: a loop whose tensors lie in memory that it uses again
// as soon as it may.

package stash

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/schedule"
)

// shelved are the shapes of a step's tensors: rows that fill pages, and that fill nothing.
var shelved = []rowShape{{24, 40}, {4096, 3}, {1000, 7}, {24, 40}, {2, 1}, {40, 300}, {24, 40}, {13, 11}}

// untouched is what lies behind the rows.
const untouched = 0xee

// library is a loop: the forward pass copies a tensor from where the test has prepared
// it, the backward pass copies it to where the test looks. Two buffers do for all.
type library struct {
	dev                device.Device
	compute            device.Stream
	h                  *Shelf
	from, counts, seen *device.Buffer
	work, back         [2]*device.Buffer
	count              *device.Buffer
	rows               []int64
	bytes              []byte
}

const berth = 12288 // bytes for a tensor

// newLibrary returns what it has made so far also with an error, to be closed.
func newLibrary(dev device.Device, cfg Config) (l *library, err error) {
	l = &library{dev: dev}
	if l.compute, err = dev.NewStream("compute"); err != nil {
		return l, err
	}
	n := device.Bytes(len(shelved))
	for _, b := range []struct {
		to   **device.Buffer
		size device.Bytes
	}{{&l.from, n * berth}, {&l.seen, n * berth}, {&l.counts, 8 * n}, {&l.count, 8}, {&l.work[0], berth}, {&l.work[1], berth}, {&l.back[0], berth}, {&l.back[1], berth}} {
		if *b.to, err = dev.Alloc(device.Accel, b.size, "test"); err != nil {
			return l, err
		}
	}
	l.h, err = NewShelf(dev, l.compute, cfg)
	return l, err
}

func (l *library) close() (err error) {
	if l.h != nil {
		err = l.h.Close()
	}
	for _, b := range []*device.Buffer{l.from, l.seen, l.counts, l.count, l.work[0], l.work[1], l.back[0], l.back[1]} {
		if b != nil {
			l.compute.Free(b)
		}
	}
	if l.compute != nil {
		err = errors.Join(err, l.compute.Close())
	}
	return err
}

// fill draws the next step's rows and contents: of all, of none and of some.
func (l *library) fill(rng *rand.Rand) {
	l.rows = make([]int64, len(shelved))
	for i, s := range shelved {
		l.rows[i] = []int64{0, int64(s.limit), rng.Int64N(int64(s.limit) + 1)}[min(rng.IntN(6), 2)]
	}
	l.bytes = make([]byte, berth*len(shelved))
	for i := range l.bytes {
		l.bytes[i] = byte(rng.Uint32())
	}
	l.compute.Upload(l.from.All(), l.bytes)
	l.upload()
}

func (l *library) upload() {
	var raw []byte
	for _, n := range l.rows {
		raw = append(raw, asBytes(&n)...)
	}
	l.compute.Upload(l.counts.All(), raw)
}

func at(b *device.Buffer, i int) device.Range {
	return b.Slice(device.Bytes(i)*berth, shelved[i].size())
}

func (s rowShape) size() device.Bytes { return s.row * device.Bytes(s.limit) }

// step issues a step. What was put is left one later; what comes back does so one ahead.
func (l *library) step() error {
	l.h.Begin()
	items := make([]*Item, len(shelved))
	for i, s := range shelved {
		mem := l.work[i%2].Slice(0, s.size())
		l.compute.Copy(mem, at(l.from, i))
		l.compute.Copy(l.count.All(), l.counts.Slice(device.Bytes(8*i), 8))
		var err error
		if items[i], err = l.h.Put(mem, l.count.All(), s.row, s.limit); err != nil {
			l.h.End()
			return err
		}
		if i > 0 {
			l.h.Away(items[i-1])
			l.compute.Fill(l.work[(i-1)%2].All(), 3)
		}
	}
	for i := len(items) - 1; i >= 0; i-- {
		if i == len(items)-1 {
			l.get(items, i)
		}
		if i > 0 {
			l.get(items, i-1)
		}
		l.h.Use(items[i])
		l.compute.Copy(at(l.seen, i), l.back[i%2].Slice(0, shelved[i].size()))
	}
	l.h.End()
	for i := range 2 { // all of it is the loop's again
		l.compute.Fill(l.work[i].All(), 1)
		l.compute.Fill(l.back[i].All(), 2)
	}
	return nil
}

func (l *library) get(items []*Item, i int) {
	mem := l.back[i%2].Slice(0, shelved[i].size())
	l.compute.Fill(mem, untouched)
	l.h.Get(items[i], mem)
}

// need is the pages that the step's rows take.
func (l *library) need() (pages schedule.Pages) {
	page := l.h.Store().Page()
	for i, s := range shelved {
		pages += schedule.Pages((device.Bytes(l.rows[i])*s.row + page - 1) / page)
	}
	return pages
}

// compare tells whether the rows came back, and nothing else.
func (l *library) compare() error {
	got := make([]byte, len(l.bytes))
	if err := l.compute.Download(got, l.seen.All()); err != nil {
		return err
	}
	pages, ok, err := l.h.Need()
	if err != nil {
		return err
	}
	if want := l.need(); pages != want || !ok {
		return fmt.Errorf("%d pages were asked for, and found %v; want %d", pages, ok, want)
	}
	for i, s := range shelved {
		live := int(s.row) * int(l.rows[i])
		rows, rest := got[i*berth:][:live], got[i*berth:][live:s.size()]
		if !bytes.Equal(rows, l.bytes[i*berth:][:live]) || !bytes.Equal(rest, bytes.Repeat([]byte{untouched}, len(rest))) {
			return fmt.Errorf("tensor %d, of which %d bytes are live: other rows came back, or more was written", i, live)
		}
	}
	return nil
}

func (l *library) train(steps int, rng *rand.Rand, step func() error) error {
	for i := range steps {
		l.fill(rng)
		if err := step(); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		if err := l.compare(); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
	}
	return nil
}

func pages(device_, host, most schedule.Pages) Config {
	return Config{Page: 4 * device.KiB, Pages: [Tiers]schedule.Pages{device_, host}, Max: [Tiers]schedule.Pages{most, host}}
}

func libraryOn(t *testing.T, dev device.Device, cfg Config) *library {
	t.Helper()
	l, err := newLibrary(dev, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(l.close(), dev.Close()); err != nil {
			t.Error(err)
		}
	})
	return l
}

// shelving is a program for the checker.
func shelving(steps int) check.Program {
	return check.On(cpuDevice, func(dev device.Device) error {
		l, err := newLibrary(dev, pages(8, 20, 8)) // some go to the host
		if err == nil {
			err = l.train(steps, rand.New(rand.NewPCG(1, 1)), l.step)
		}
		return errors.Join(err, l.close())
	})
}

// SPEC S6.4, S6.2: under any schedule the rows come back, and the checker finds nothing;
// without any one of its waits the shelf is caught.
func TestShelfUnderAnySchedule(t *testing.T) {
	seeds := 10
	if testing.Short() {
		seeds = 3
	}
	if err := check.Explore(check.Options{}, seeds, shelving(3)); err != nil {
		t.Fatal(err)
	}
	edges, err := check.EveryEdge(0, shelving(2))
	if err != nil {
		t.Fatal(err)
	}
	if t.Log(edges); edges.Caught != edges.Total || edges.Total == 0 {
		t.Error("a wait that nobody misses")
	}
}

// SPEC S6.4: on every device, step after step, and with no more records than the largest
// step has tensors of a shape.
func TestShelfOnEveryDevice(t *testing.T) {
	onDevices(t, func(t *testing.T, open func(testing.TB) device.Device) {
		l := libraryOn(t, open(t), pages(64, 0, 64))
		rng := rand.New(rand.NewPCG(2, 2))
		if err := l.train(1, rng, l.step); err != nil {
			t.Fatal(err)
		}
		before := l.dev.Memory().Kind
		if err := l.train(6, rng, l.step); err != nil {
			t.Fatal(err)
		}
		if after := l.dev.Memory().Kind; l.h.made != len(shelved) || len(l.h.store.records) != len(shelved) || after != before {
			t.Errorf("%d records, memory %v and then %v", len(l.h.store.records), before, after)
		}
		reads, waits := l.dev.Counters().HostReads, l.dev.Counters().HostSyncs
		l.fill(rng)
		if err := l.step(); err != nil {
			t.Fatal(err)
		}
		if c := l.dev.Counters(); c.HostReads != reads || c.HostSyncs != waits {
			t.Error("the host has waited in a step")
		}
	})
}

// SPEC S6.4: a captured step replays with other rows and contents; one of new shapes is
// refused before anything is captured.
func TestCapturedShelf(t *testing.T) {
	onDevices(t, func(t *testing.T, open func(testing.TB) device.Device) {
		l := libraryOn(t, open(t), pages(64, 0, 64))
		rng := rand.New(rand.NewPCG(3, 3))
		l.fill(rng)
		l.compute.BeginCapture()
		first := l.step()
		g, err := l.compute.EndCapture()
		if first == nil || !strings.Contains(first.Error(), "before the capture") {
			t.Errorf("a first step was captured: %v", first)
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := g.Close(); err != nil {
			t.Fatal(err)
		}
		if err := l.train(2, rng, l.step); err != nil {
			t.Fatal(err)
		}
		l.compute.BeginCapture()
		if err := l.step(); err != nil {
			t.Fatal(err)
		}
		if g, err = l.compute.EndCapture(); err != nil {
			t.Fatal(err)
		}
		replay := func() error { l.compute.Replay(g); return nil }
		if err := errors.Join(l.train(4, rng, replay), l.train(1, rng, l.step), l.train(1, rng, replay), g.Close()); err != nil {
			t.Fatal(err)
		}
	})
}

// SPEC S6.4: without pages, or with too few, a step tells how many it takes; with those
// it is run again. Counts beyond a tensor's rows are told from that.
func TestShelfOverflow(t *testing.T) {
	onDevices(t, func(t *testing.T, open func(testing.TB) device.Device) {
		for _, begin := range []schedule.Pages{0, 3} {
			l := libraryOn(t, open(t), pages(begin, 0, 256))
			l.fill(rand.New(rand.NewPCG(4, 4)))
			if err := l.step(); err != nil {
				t.Fatal(err)
			}
			need, ok, err := l.h.Need()
			if err != nil || ok || need != l.need() || need <= 3 {
				t.Fatalf("%d pages are needed, found %v, %v; want %d", need, ok, err, l.need())
			}
			if err := errors.Join(l.h.Store().Grow(l.compute, Device, need), l.step(), l.compare()); err != nil {
				t.Error(err)
			}
			for _, rows := range []int64{41, -1} {
				l.rows[3] = rows
				l.upload()
				if err := l.step(); err != nil {
					t.Fatal(err)
				}
				var many *TooManyRows
				if _, _, err := l.h.Need(); !errors.As(err, &many) || many.Rows != rows || many.Limit != 40 {
					t.Errorf("%d rows: %v", rows, err)
				}
			}
			l.rows[3] = 40
			l.upload()
			if err := errors.Join(l.step(), l.compare()); err != nil {
				t.Error(err)
			}
		}
	})
}

// Whatever can fail is made to fail: the error is the typed one, and everything is given
// back.
func TestShelfMayFail(t *testing.T) {
	program := func(faults ...check.Fault) (*check.Checker, [device.Kinds]device.KindUsage, error) {
		ck := check.New(check.Options{Faults: faults})
		inner, err := cpuDevice()
		if err != nil {
			t.Fatal(err)
		}
		dev := ck.Wrap(inner)
		l, err := newLibrary(dev, pages(64, 0, 64))
		if err == nil {
			err = l.train(2, rand.New(rand.NewPCG(1, 1)), l.step)
		}
		err = errors.Join(err, l.close())
		used := dev.Memory().Kind
		return ck, used, errors.Join(err, dev.Close())
	}
	whole, _, err := program()
	if err != nil {
		t.Fatal(err)
	}
	for _, class := range []check.Class{check.Allocs, check.Grows, check.Copies, check.Launches} {
		calls := whole.Count(class)
		for n := range calls {
			_, used, err := program(check.Fault{Class: class, N: n, Do: check.Fail})
			if !errors.As(err, new(*device.OutOfMemory)) && !errors.As(err, new(*device.DriverError)) {
				t.Errorf("%v %d fails: %v", class, n, err)
			}
			for k, u := range used {
				if u.Current != u.Pending {
					t.Errorf("%v %d fails and leaves %v of %s memory", class, n, u.Current-u.Pending, device.Kind(k))
				}
			}
		}
		if calls == 0 {
			t.Errorf("no calls of class %v", class)
		}
	}
}

const plenty = 1 << 30

// fewEvents is a device that has so many events and no more.
type fewEvents struct {
	device.Device
	left int
}

func (d *fewEvents) NewEvent(f device.EventFlags) (device.Event, error) {
	if d.left--; d.left < 0 {
		return nil, &device.DriverError{Call: "NewEvent", Code: 2}
	}
	return d.Device.NewEvent(f)
}

// A device that has no event left, at whatever call, is an error of the step, and the
// next one is clean.
func TestShelfWithoutEvents(t *testing.T) {
	for n := 0; ; n++ {
		inner, err := cpuDevice()
		if err != nil {
			t.Fatal(err)
		}
		dev := &fewEvents{inner, n}
		l, err := newLibrary(dev, pages(64, 0, 64))
		if err == nil {
			err = l.train(1, rand.New(rand.NewPCG(1, 1)), l.step)
		}
		all := dev.left >= 0
		dev.left = plenty
		if all == errors.As(err, new(*device.DriverError)) {
			t.Fatalf("event %d fails: %v", n, err)
		}
		if l.h == nil {
			t.Fatal(err)
		}
		made := l.h.made
		if err := errors.Join(l.train(2, rand.New(rand.NewPCG(2, 2)), l.step), l.close(), inner.Close()); err != nil {
			t.Fatalf("behind event %d: %v", n, err)
		}
		if l.h.made != len(shelved) || made > len(shelved) {
			t.Fatalf("behind event %d: %d records", n, l.h.made)
		}
		if all {
			break
		}
	}
}
