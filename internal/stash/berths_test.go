// This file owns the tests of berths: a loop whose tensors lie in memory that it uses again
// as soon as it may.

package stash

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/memory"
)

// shelved are the shapes of a step's tensors: rows that fill pages, and that fill nothing.
var shelved = []rowShape{{24, 40}, {4096, 3}, {1000, 7}, {24, 40}, {2, 1}, {40, 300}, {24, 40}, {13, 11}}

// library is a loop: the forward pass copies a tensor from where the test has prepared
// it, the backward pass copies it to where the test looks. One buffer does for all.
type library struct {
	dev                device.Device
	compute            device.Stream
	h                  *Berths
	from, counts, seen *device.Buffer
	work, count        *device.Buffer
	rows               []int64
	bytes              []byte
	held               []bool // whether a berth had the tensor in the last step
}

const berth = 12288 // bytes for a tensor

// newLibrary returns what it has made so far also with an error, to be closed.
func newLibrary(dev device.Device, live float64) (l *library, err error) {
	l = &library{dev: dev, held: make([]bool, len(shelved))}
	if l.compute, err = dev.NewStream("compute"); err != nil {
		return l, err
	}
	n := memory.Bytes(len(shelved))
	for _, b := range []struct {
		to   **device.Buffer
		size memory.Bytes
	}{{&l.from, n * berth}, {&l.seen, n * berth}, {&l.counts, 8 * n}, {&l.count, 8}, {&l.work, berth}} {
		if *b.to, err = dev.Alloc(memory.Device, b.size, "test"); err != nil {
			return l, err
		}
	}
	l.h, err = NewBerths(dev, l.compute, live)
	return l, err
}

func (l *library) close() (err error) {
	if l.h != nil {
		l.h.Close()
	}
	for _, b := range []*device.Buffer{l.from, l.seen, l.counts, l.count, l.work} {
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
	return b.Slice(memory.Bytes(i)*berth, shelved[i].size())
}

func (s rowShape) size() memory.Bytes { return s.row * memory.Bytes(s.limit) }

// step issues a step. Memory is used again as soon as it may; a tensor that stays is looked
// at at once.
func (l *library) step() error {
	l.h.Begin()
	berths := make([]*Berth, len(shelved))
	for i, s := range shelved {
		mem := l.work.Slice(0, s.size())
		l.compute.Copy(mem, at(l.from, i))
		l.compute.Copy(l.count.All(), l.counts.Slice(memory.Bytes(8*i), 8))
		b, err := l.h.Save(mem, l.count.All(), s.row, s.limit)
		if err != nil {
			return err
		}
		berths[i], l.held[i] = b, b != nil && b.Holds()
		if !l.held[i] {
			l.compute.Copy(at(l.seen, i), mem)
		}
		l.compute.Fill(l.work.All(), 3)
		l.compute.Fill(l.count.All(), 3)
	}
	for i := len(berths) - 1; i >= 0; i-- {
		if l.held[i] {
			whole := l.dev.Borrow(memory.Device, berths[i].Addr(), shelved[i].size(), "whole")
			l.compute.Copy(at(l.seen, i), whole.All())
		}
	}
	return nil
}

// settle gives berths what the step had, and tells whether there was room.
func (l *library) settle() (bool, error) {
	missed, err := l.h.Settle(func(*Berth) bool { return false })
	if (missed.Asked > missed.Had) != (missed.Asked > 0) {
		return false, fmt.Errorf("%v were asked for, and there were %v", missed.Asked, missed.Had)
	}
	return missed.Asked == 0, err
}

// compare tells whether the rows are there, and zeros behind them; all of a tensor that
// stayed.
func (l *library) compare() error {
	got := make([]byte, len(l.bytes))
	if err := l.compute.Download(got, l.seen.All()); err != nil {
		return err
	}
	for i, s := range shelved {
		want := bytes.Clone(l.bytes[i*berth:][:s.size()])
		if l.held[i] {
			clear(want[int(s.row)*int(l.rows[i]):])
		}
		if !bytes.Equal(got[i*berth:][:s.size()], want) {
			return fmt.Errorf("tensor %d, of which %d rows are live, held %v: something else is there", i, l.rows[i], l.held[i])
		}
	}
	return nil
}

// train runs steps, those that lacked room again.
func (l *library) train(steps int, rng *rand.Rand, step func() error) error {
	for i := range steps {
		l.fill(rng)
		for turn := range 2 {
			if err := step(); err != nil {
				return fmt.Errorf("step %d: %w", i, err)
			}
			ok, err := l.settle()
			if err == nil && ok {
				err = l.compare()
			} else if err == nil && turn == 1 {
				err = errors.New("it lacks room twice")
			}
			if err != nil {
				return fmt.Errorf("step %d: %w", i, err)
			}
			if ok {
				break
			}
		}
	}
	return nil
}

func libraryOn(t *testing.T, dev device.Device, live float64) *library {
	t.Helper()
	l, err := newLibrary(dev, live)
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

// SPEC S6.4, S6.2: everything that berths do is declared, under any schedule.
func TestBerthsUnderAnySchedule(t *testing.T) {
	program := check.On(cpuDevice, func(dev device.Device) error {
		l, err := newLibrary(dev, 0)
		if err == nil {
			err = l.train(4, rand.New(rand.NewPCG(1, 1)), l.step)
		}
		return errors.Join(err, l.close())
	})
	if err := check.Explore(check.Options{}, 3, program); err != nil {
		t.Fatal(err)
	}
}

// SPEC S6.4: on every device, step after step, counted first or with a share to begin
// with; once all rows of every tensor were seen nothing grows, and the host never waits
// in a step.
func TestBerthsOnEveryDevice(t *testing.T) {
	onDevices(t, func(t *testing.T, open func(testing.TB) device.Device) {
		for _, live := range []float64{0, 0.3, 1} {
			l := libraryOn(t, open(t), live)
			rng := rand.New(rand.NewPCG(2, 2))
			if err := l.train(8, rng, l.step); err != nil {
				t.Fatal(err)
			}
			for i, s := range shelved {
				l.rows[i] = int64(s.limit)
			}
			l.upload()
			if err := l.step(); err != nil {
				t.Fatal(err)
			}
			if _, err := l.settle(); err != nil {
				t.Fatal(err)
			}
			before := l.dev.Memory().Kind
			if err := l.train(3, rng, l.step); err != nil {
				t.Fatal(err)
			}
			if after := l.dev.Memory().Kind; len(l.h.all) != len(shelved) || after != before || slices.Contains(l.held, false) {
				t.Errorf("%d berths, memory %v and then %v, held %v", len(l.h.all), before, after, l.held)
			}
			reads, waits := l.dev.Counters().HostReads, l.dev.Counters().HostSyncs
			l.fill(rng)
			if err := l.step(); err != nil {
				t.Fatal(err)
			}
			if c := l.dev.Counters(); c.HostReads != reads || c.HostSyncs != waits {
				t.Error("the host has waited in a step")
			}
		}
	})
}

// SPEC S6.4: a captured step replays with other rows and contents, also with berths that
// have grown since; one that puts more than the steps before it keeps that where it is.
func TestCapturedBerths(t *testing.T) {
	onDevices(t, func(t *testing.T, open func(testing.TB) device.Device) {
		l := libraryOn(t, open(t), 0)
		rng := rand.New(rand.NewPCG(3, 3))
		capture := func() device.Graph {
			l.compute.BeginCapture()
			err := l.step()
			g, failed := l.compute.EndCapture()
			if err := errors.Join(err, failed); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := g.Close(); err != nil {
					t.Error(err)
				}
			})
			return g
		}
		replay := func(g device.Graph) func() error {
			return func() error { l.compute.Replay(g); return nil }
		}
		first := capture()
		if slices.Contains(l.held, true) {
			t.Error("a berth holds what was never seen")
		}
		if err := l.train(2, rng, replay(first)); err != nil {
			t.Fatal(err)
		}
		l.fill(rng)
		for i := range l.rows {
			l.rows[i] = 1
		}
		l.upload()
		if err := l.step(); err != nil {
			t.Fatal(err)
		}
		if _, err := l.settle(); err != nil {
			t.Fatal(err)
		}
		second := capture()
		if slices.Contains(l.held, false) {
			t.Error("a berth that was seen holds nothing")
		}
		grown := l.h.Size()
		if err := errors.Join(l.train(6, rng, replay(second)), l.train(1, rng, l.step), l.train(2, rng, replay(second))); err != nil {
			t.Fatal(err)
		}
		if l.h.Size() == grown {
			t.Error("nothing has grown")
		}
	})
}

// SPEC S6.4: a tensor gets the first berth of its shape that is not taken, in a capture the
// first that has memory, and there none rather than a new one. Berths are compared with a
// list of what each should be.
func TestWhichBerth(t *testing.T) {
	type model struct{ taken, holds, seen bool }
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 5))
		l := libraryOn(t, openCPU(t), 0)
		l.fill(rng)
		shape := shelved[0]
		var berths []*Berth
		var want []model
		captured := false
		save := func() {
			b, err := l.h.Save(l.work.Slice(0, shape.size()), l.counts.Slice(0, 8), shape.row, shape.limit)
			if err != nil {
				t.Fatal(err)
			}
			at := slices.IndexFunc(want, func(x model) bool { return !x.taken && (x.holds || !captured) })
			switch {
			case at < 0 && captured:
				if b != nil {
					t.Fatalf("seed %d: a berth in a capture, with none to have: %+v", seed, want)
				}
				return
			case at < 0:
				at = len(want)
				berths, want = append(berths, b), append(want, model{})
			}
			want[at].taken, want[at].seen = true, true
			if b != berths[at] || b.Holds() != want[at].holds {
				t.Fatalf("seed %d: berth %d with memory %v, want %d of %+v", seed, slices.Index(berths, b), b.Holds(), at, want)
			}
		}
		for range 40 {
			switch draw := rng.IntN(10); {
			case draw < 5:
				save()
			case draw < 7 && len(berths) > 0:
				i := rng.IntN(len(berths))
				berths[i].Release()
				want[i].taken = false
			case draw == 7 && !captured:
				l.compute.BeginCapture()
				captured = true
			case draw == 8 && captured:
				g, err := l.compute.EndCapture()
				if err := errors.Join(err, g.Close()); err != nil {
					t.Fatal(err)
				}
				captured = false
			case draw == 9 && !captured:
				stay := map[*Berth]bool{}
				for i, b := range berths {
					stay[b] = rng.IntN(2) == 0
					want[i].holds = want[i].holds || want[i].seen && !stay[b]
					want[i].taken, want[i].seen = false, false
				}
				if _, err := l.h.Settle(func(b *Berth) bool { return stay[b] }); err != nil {
					t.Fatal(err)
				}
				l.h.Begin()
			}
		}
		if captured {
			g, err := l.compute.EndCapture()
			if err := errors.Join(err, g.Close()); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// SPEC S6.4: Settle has waited for everything, so that a captured step can be replayed on
// any stream behind it, and finds the berths that have grown.
func TestReplayOnAnotherStream(t *testing.T) {
	program := check.On(cpuDevice, func(dev device.Device) error {
		l, err := newLibrary(dev, 0.1)
		if err != nil {
			return errors.Join(err, l.close())
		}
		other, err := dev.NewStream("other")
		if err != nil {
			return errors.Join(err, l.close())
		}
		rng := rand.New(rand.NewPCG(5, 5))
		l.fill(rng)
		if err = l.step(); err == nil { // berths are there, with some room
			l.compute.BeginCapture()
			err = l.step()
			g, failed := l.compute.EndCapture()
			if err = errors.Join(err, failed); err == nil {
				err = errors.Join(elsewhere(l, other, g, rng), g.Close())
			}
		}
		return errors.Join(err, other.Close(), l.close())
	})
	if err := check.Explore(check.Options{}, 3, program); err != nil {
		t.Fatal(err)
	}
}

// elsewhere replays a step on another stream, twice: the first time it lacks room.
func elsewhere(l *library, other device.Stream, g device.Graph, rng *rand.Rand) error {
	l.fill(rng)
	for i, s := range shelved {
		l.rows[i] = int64(s.limit)
	}
	l.upload()
	if err := l.compute.Sync(); err != nil {
		return err
	}
	for _, want := range []bool{false, true} {
		other.Replay(g)
		if err := other.Sync(); err != nil {
			return err
		}
		if ok, err := l.settle(); err != nil || ok != want {
			return fmt.Errorf("there is room: %v, want %v: %w", ok, want, err)
		}
	}
	return l.compare()
}

// putter returns a tensor of one shape, and a function that saves it with a number of rows.
func (l *library) putter(t *testing.T, s rowShape) (*device.Buffer, func(rows int64) *Berth) {
	t.Helper()
	mem, err := l.dev.Alloc(memory.Device, s.size(), "test")
	if err != nil {
		t.Fatal(err)
	}
	return mem, func(rows int64) *Berth {
		t.Helper()
		l.compute.Upload(l.count.All(), asBytes(&rows))
		b, err := l.h.Save(mem.All(), l.count.All(), s.row, s.limit)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
}

// SPEC S6.4: a berth that is left is taken by the next tensor; what the one before lacked
// is not forgotten. What is not worth a berth gets none. It grows before it is full.
func TestBerths(t *testing.T) {
	l := libraryOn(t, openCPU(t), 0)
	s := rowShape{64, 1000}
	mem, put := l.putter(t, s)
	settle := func(stays ...*Berth) Missed {
		t.Helper()
		missed, err := l.h.Settle(func(b *Berth) bool { return slices.Contains(stays, b) })
		if err != nil {
			t.Fatal(err)
		}
		l.h.Begin()
		return missed
	}
	a, b := put(100), put(200)
	if settle(b); a == b || !a.Holds() || b.Holds() {
		t.Error("of two that are taken, the second is not worth it")
	}
	if put(10) != a {
		t.Error("the berth that holds is not taken first")
	}
	a.Release()
	if put(500) != a {
		t.Error("a berth that was left is not taken again")
	}
	a.Release()
	put(10)
	if missed := settle(); missed.Asked != 64*500 || missed.Had != 64*107 {
		t.Errorf("%+v is missing", missed)
	}
	if b.Holds() {
		t.Error("a berth that no tensor took since has memory")
	}
	room := a.room
	put(int64(room) - 1)
	if missed := settle(); missed.Asked != 0 || a.room <= room {
		t.Errorf("a berth for %d rows had %d, and is for %d now, %+v", room, room-1, a.room, missed)
	}
	for _, rows := range []int64{1001, -1} {
		put(rows)
		var many *TooManyRows
		if _, err := l.h.Settle(func(*Berth) bool { return false }); !errors.As(err, &many) || many.Rows != rows || many.Limit != 1000 {
			t.Errorf("%d rows: %v", rows, err)
		}
		settle()
	}
	l.compute.Free(mem)
}

// Whatever can fail is made to fail: the error is the typed one, everything is given back,
// and where there is no memory to grow tensors stay where they are.
func TestBerthsMayFail(t *testing.T) {
	every := 1
	if testing.Short() {
		every = 5
	}
	for _, live := range []float64{0, 0.5} {
		for _, class := range []check.Class{check.Allocs, check.Grows, check.Copies, check.Launches, check.Makes} {
			f, err := check.FailEach(class, every, cpuDevice, func(dev device.Device) error {
				l, err := newLibrary(dev, live)
				if err == nil {
					err = l.train(3, rand.New(rand.NewPCG(1, 1)), l.step)
				}
				return errors.Join(err, l.close())
			})
			if err != nil {
				t.Fatal(err)
			}
			if len(f.Wrong) > 0 || f.Calls == 0 || (f.Survived > 0) != (class == check.Grows) {
				t.Errorf("%v: %+v", class, f)
			}
		}
	}
}
