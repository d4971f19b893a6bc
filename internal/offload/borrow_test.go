// This file owns the tests of memory that is borrowed and lent: a loop whose tensors all
// lie in its own allocator's memory.

package offload

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// borrowLoop is a training loop of somebody else's: a layer's output is memory of the
// loop's allocator, which gives freed memory to whoever asks next, in compute's order.
// Every layer saves its input and its output, so that most storages are in two groups.
type borrowLoop struct {
	dev      device.Device
	compute  device.Stream
	m        *Manager
	from, to *device.Buffer
	bytes    []byte
	free     []*device.Buffer
	all      []*device.Buffer
	has      map[*Storage][]*device.Buffer // oldest first
	lends    int                           // until there is nothing to provide; negative is never
	plan     *residency.Plan
	left     int
	most     int         // blocks in use at once, in the step
	drain    func() bool // whether to drain behind a group that was saved, or nil
	graph    device.Graph
}

const (
	lentLayers = 6
	lentSize   = memory.Bytes(1000)
)

var errNothing = errors.New("nothing to provide")

// newBorrowLoop returns what it has made so far also with an error, to be closed.
func newBorrowLoop(dev device.Device) (l *borrowLoop, err error) {
	l = &borrowLoop{dev: dev, lends: -1, has: map[*Storage][]*device.Buffer{}}
	if l.compute, err = dev.NewStream("compute"); err != nil {
		return l, err
	}
	for b, n := range map[**device.Buffer]memory.Bytes{&l.from: (lentLayers + 1) * lentSize, &l.to: 2 * lentLayers * lentSize} {
		if *b, err = dev.Alloc(memory.Device, n, "test"); err != nil {
			return l, err
		}
	}
	l.m, err = New(dev, l.compute, Config{ProvideMemory: l.lend})
	return l, err
}

func (l *borrowLoop) close() (err error) {
	if l.graph != nil {
		err = l.graph.Close()
	}
	if l.m != nil {
		err = errors.Join(err, l.m.Close())
	}
	for _, b := range append(l.all, l.from, l.to) {
		if b != nil {
			l.compute.Free(b)
		}
	}
	if l.compute != nil {
		err = errors.Join(err, l.compute.Close())
	}
	return err
}

// alloc is the loop's allocator. Until now compute may have used the memory: it does.
func (l *borrowLoop) alloc() (*device.Buffer, error) {
	k := len(l.free) - 1
	if k < 0 {
		b, err := l.dev.Alloc(memory.Device, lentSize, "block")
		if err != nil {
			return nil, err
		}
		l.all, l.free, k = append(l.all, b), append(l.free, b), 0
	}
	b := l.free[k]
	l.free = l.free[:k]
	l.most = max(l.most, len(l.all)-k)
	l.compute.Fill(b.All(), 0xdb)
	return b, nil
}

func (l *borrowLoop) lend(s *Storage) (device.Range, error) {
	if l.lends == 0 {
		return device.Range{}, errNothing
	}
	l.lends--
	b, err := l.alloc()
	if err != nil {
		return device.Range{}, err
	}
	l.has[s] = append(l.has[s], b)
	return b.All(), nil
}

// borrow makes the storage of a layer's output.
func (l *borrowLoop) borrow(layer int) (s *Storage, err error) {
	b, err := l.alloc()
	if err != nil {
		return nil, err
	}
	l.compute.Copy(b.All(), l.from.Slice(memory.Bytes(layer)*lentSize, lentSize))
	s, err = l.m.Borrow(b.All(), func() {
		old := l.has[s][0]
		l.has[s] = l.has[s][1:]
		l.left++
		l.compute.Fill(old.All(), 0xdc) // the allocator poisons it, in compute's order
		l.free = append(l.free, old)
	})
	if err == nil {
		l.has[s] = []*device.Buffer{b}
	}
	return s, err
}

func lentGroup(i int) memory.GroupID { return memory.GroupID{Name: "mlp", Layer: i} }

// body issues a step.
func (l *borrowLoop) body() error {
	x, err := l.borrow(0)
	if err != nil {
		return err
	}
	for i := range lentLayers {
		y, err := l.borrow(i + 1)
		if err != nil {
			return err
		}
		if _, err := l.m.Save(lentGroup(i), flat(x), flat(y)); err != nil {
			return err
		}
		if i == 0 {
			x.Free() // nobody but the groups holds it from now on
		}
		y.Free()
		if x = y; l.drain != nil && l.drain() {
			l.m.Drain()
			if n, _ := l.m.machine.Flight(); n != 0 || len(l.all)-len(l.free) != int(l.m.machine.Device().Live())/int(memory.KiB) {
				return fmt.Errorf("%d blocks are in use behind a drain", len(l.all)-len(l.free))
			}
		}
	}
	for i := lentLayers - 1; i >= 0; i-- {
		if err := l.m.Load(lentGroup(i)); err != nil {
			return err
		}
		for k, s := range l.m.Saved(lentGroup(i)) {
			l.compute.Copy(l.to.Slice(memory.Bytes(2*i+k)*lentSize, lentSize), s.Tensor().Range())
		}
		l.m.Release(lentGroup(i))
	}
	return nil
}

func (l *borrowLoop) step() error {
	l.most = 0
	l.m.Begin(l.plan)
	err := l.body()
	if err == nil {
		l.m.machine.Check()
	}
	err = errors.Join(err, l.m.End())
	// A new block is there before it is counted, and what a call lets go is told at its
	// end: that of a Load, which brings two back.
	if counted := int(l.m.Last().Device / memory.KiB); err == nil && (l.most < counted || l.most > counted+2) {
		err = fmt.Errorf("%d blocks are in use at once, and %d are counted", l.most, counted)
	}
	for s, has := range l.has {
		if len(has) > 0 && l.m.err == nil {
			err = errors.Join(err, fmt.Errorf("%v was not left", s.state))
		}
	}
	clear(l.has)
	return err
}

// train runs steps with new contents, and compares.
func (l *borrowLoop) train(steps int, rng *rand.Rand, step func() error) error {
	for i := range steps {
		l.bytes = make([]byte, l.from.Size())
		for j := range l.bytes {
			l.bytes[j] = byte(rng.Uint32())
		}
		l.compute.Upload(l.from.All(), l.bytes)
		before := l.dev.Counters()
		if err := step(); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		if after := l.dev.Counters(); after.HostReads != before.HostReads || after.HostSyncs != before.HostSyncs {
			return fmt.Errorf("step %d: the host has waited", i)
		}
		got := make([]byte, l.to.Size())
		if err := l.compute.Download(got, l.to.All()); err != nil {
			return err
		}
		for k := range 2 * lentLayers {
			at := (k/2 + k%2) * int(lentSize)
			if !bytes.Equal(got[k*int(lentSize):][:lentSize], l.bytes[at:][:lentSize]) {
				return fmt.Errorf("step %d: tensor %d of layer %d is not what was saved", i, k%2, k/2)
			}
		}
	}
	return nil
}

// lentPlans are plans for such a loop: everything or some of it leaves, comes back ahead
// of need or late, by plan or for want of room.
func lentPlans(yield func(string, *residency.Plan) bool) {
	order := &schedule.Schedule{}
	for i := range lentLayers {
		order.Save(lentGroup(i))
	}
	for i := lentLayers - 1; i >= 0; i-- {
		order.Load(lentGroup(i))
	}
	for _, v := range []struct {
		name   string
		leave  func(int) bool
		ahead  int
		device int64
	}{
		{"none leave", func(int) bool { return false }, 0, 0},
		{"all leave, late", func(int) bool { return true }, 0, 0},
		{"all leave, ahead", func(int) bool { return true }, 2, 0},
		{"some leave", func(i int) bool { return i%3 == 0 }, 1, 0},
		{"no room", func(int) bool { return false }, 1, 3 * 1024},
		{"some leave, no room", func(i int) bool { return i%2 == 0 }, 2, 4 * 1024},
	} {
		p := &residency.Plan{Schedule: order, Offload: map[memory.GroupID]bool{}, Prefetch: make([][]memory.GroupID, order.Len()), Device: memory.Bytes(v.device)}
		for i := range lentLayers {
			p.Offload[lentGroup(i)] = v.leave(i)
			if at, _ := order.Loaded(lentGroup(i)); v.ahead > 0 {
				p.Prefetch[at-v.ahead] = append(p.Prefetch[at-v.ahead], lentGroup(i))
			}
		}
		if !yield(v.name, p) {
			return
		}
	}
}

// SPEC S6.4: memory that is not to be had, at whichever lending, loses the step, and the
// error says so; everything that was lent is left once, and the next step is clean.
func TestNothingToProvide(t *testing.T) {
	for name, plan := range lentPlans {
		for n := 0; ; n++ {
			dev := openCPU(t)
			l, err := newBorrowLoop(dev)
			if err != nil {
				t.Fatal(err)
			}
			l.plan, l.lends = plan, n
			err = l.train(1, rand.New(rand.NewPCG(1, 1)), l.step)
			enough := l.lends > 0 || err == nil
			if !enough && (!errors.Is(err, errNothing) || !strings.Contains(err.Error(), "reload")) {
				t.Errorf("%s: providing %d fails: %v", name, n, err)
			}
			if len(l.free) != len(l.all) {
				t.Errorf("%s: providing %d fails and %d of %d blocks are left", name, n, len(l.free), len(l.all))
			}
			l.lends = -1
			if err := errors.Join(l.train(2, rand.New(rand.NewPCG(2, 2)), l.step), l.close(), dev.Close()); err != nil {
				t.Fatalf("%s: behind lending %d: %v", name, n, err)
			}
			if enough {
				break
			}
		}
	}
}

// Whatever can fail is made to fail: the error is the typed one, and everything is given
// back, events included.
func TestLentMayFail(t *testing.T) {
	i := 0
	for name, plan := range lentPlans {
		if i++; testing.Short() && name != "some leave, no room" {
			continue
		}
		sees := []func() func() bool{never, always}[i%2] // the same in every run
		for _, class := range []check.Class{check.Allocs, check.Grows, check.Copies, check.Makes} {
			f, err := check.FailEach(class, 1, cpuDevice, func(dev device.Device) error {
				l, err := newBorrowLoop(&told{Device: dev, over: sees()})
				if err == nil {
					l.plan = plan
					err = l.train(2, rand.New(rand.NewPCG(1, 1)), l.step)
				}
				return errors.Join(err, l.close())
			})
			if err != nil {
				t.Fatal(err)
			}
			if len(f.Wrong) > 0 || f.Survived > 0 && class != check.Grows {
				t.Errorf("%s, %v: %+v", name, class, f)
			}
		}
		for n := 0; ; n++ {
			inner := openCPU(t)
			dev := &few{inner, n}
			l, err := newBorrowLoop(dev)
			if err == nil {
				l.plan = plan
				err = l.train(1, rand.New(rand.NewPCG(1, 1)), l.step)
			}
			all := dev.left >= 0
			if dev.left = 1 << 30; all == errors.As(err, new(*device.DriverError)) {
				t.Fatalf("%s: event %d fails: %v", name, n, err)
			}
			if err := errors.Join(l.train(2, rand.New(rand.NewPCG(2, 2)), l.step), l.close(), inner.Close()); err != nil {
				t.Fatalf("%s: behind event %d: %v", name, n, err)
			}
			if all {
				break
			}
		}
	}
}

// Wrong use panics, with a sentence.
func TestBorrowMisuse(t *testing.T) {
	dev := openCPU(t)
	l, err := newBorrowLoop(dev)
	if err != nil {
		t.Fatal(err)
	}
	l.m.Begin(nil)
	for says, f := range map[string]func(){
		"is allocated":           func() { _, _ = l.m.Alloc(8) },
		"capture the whole step": func() { _, _ = l.m.Capture(func() error { return nil }) },
	} {
		func() {
			defer func() {
				if x := recover(); x == nil || !strings.Contains(fmt.Sprint(x), says) {
					t.Errorf("%s: %v", says, x)
				}
			}()
			f()
		}()
	}
	if err := errors.Join(l.m.End(), l.close(), dev.Close()); err != nil {
		t.Error(err)
	}
}
