// This file tests the engine on a simulated library. None of it needs a GPU.

package nccl

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/commtest"
	"github.com/stowage-dev/stowage/internal/comm/nccl/nccltest"
	"github.com/stowage-dev/stowage/memory"
)

func openCPU(rank int) (device.Device, error) {
	return cpu.Open(cpu.Options{Ordinal: rank, Capacity: [memory.Kinds]memory.Bytes{256 * memory.MiB, 64 * memory.MiB}})
}

// noted returns what is told of a rank's calls, or is nil.
var noted func(rank int) func(call string)

// open makes a world of ranks, each with a library of its own, and perhaps an order of its
// GPU.
func open(t *testing.T, devs []device.Device, libs []*nccltest.Library, orders ...*Order) ([]comm.Comm, error) {
	t.Helper()
	hosts := make([]device.Device, len(devs))
	for r := range hosts {
		d, err := openCPU(r)
		if err != nil {
			t.Fatal(err)
		}
		hosts[r] = d
		t.Cleanup(func() {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	_, all, err := openOn(t, hosts, devs, libs, orders...)
	return all, err
}

// openOn makes a world whose ranks reach each other over host devices. It returns their host
// communicators as well, which belong to the world if it could be opened.
func openOn(t *testing.T, hosts, devs []device.Device, libs []*nccltest.Library, orders ...*Order) (local, all []comm.Comm, err error) {
	t.Helper()
	if local, err = comm.NewLocal(hosts, comm.Options{}); err != nil {
		t.Fatal(err)
	}
	all = make([]comm.Comm, len(devs))
	errs := make([]error, len(devs))
	var ranks sync.WaitGroup
	for r := range devs {
		o := Options{Host: local[r], HostDevice: hosts[r]}
		if noted != nil {
			o.Note = noted(r)
		}
		if orders != nil {
			o.Order = orders[r]
		}
		ranks.Go(func() { all[r], errs[r] = Open(libs[r], devs[r], o) })
	}
	ranks.Wait()
	return local, all, errors.Join(errs...)
}

var errTest = errors.New("nccl: a communicator: remote process exited")

// Ranks on a simulated library pass the suite under the race checker.
func TestConformance(t *testing.T) {
	for _, n := range []int{2, 3} {
		t.Run(fmt.Sprintf("%d ranks", n), func(t *testing.T) {
			var held []int
			for r := range n {
				held = append(held, r)
			}
			commtest.Run(t, commtest.World{
				Size: n, Held: held, OwnOrder: true, Large: 300 * memory.KiB,
				Device: func(rank int) (device.Device, error) {
					d, err := openCPU(rank)
					if err == nil { // ranks do not know each other, as in processes
						d = check.New(check.Options{Report: func(err error) { t.Error(err) }}).Wrap(d)
					}
					return d, err
				},
				Open: func(devs []device.Device) ([]comm.Comm, error) { return open(t, devs, nccltest.Libraries(n, 2)) },
			})
		})
	}
}

// place is a rank of a test.
type place struct {
	device.Device
	c comm.Comm
	s device.Stream
	b *device.Buffer
}

// world opens a world that the test closes.
func openWorld(t *testing.T, libs []*nccltest.Library) (places []*place, devs []device.Device) {
	t.Helper()
	for r := range libs {
		d, err := openCPU(r)
		if err != nil {
			t.Fatal(err)
		}
		p := &place{Device: d}
		if p.s, err = d.NewStream("compute"); err != nil {
			t.Fatal(err)
		}
		if p.b, err = d.Alloc(memory.Device, 4096, "test"); err != nil {
			t.Fatal(err)
		}
		p.s.Fill(p.b.All(), 0x40)
		places, devs = append(places, p), append(devs, d)
		t.Cleanup(func() {
			p.s.Free(p.b)
			if err := errors.Join(p.s.Close(), d.Close()); err != nil {
				t.Error(err)
			}
		})
	}
	return places, devs
}

// run opens a world, runs f on all ranks, and closes it.
func run(t *testing.T, libs []*nccltest.Library, f func(p *place) error) error {
	t.Helper()
	places, devs := openWorld(t, libs)
	all, err := open(t, devs, libs)
	if err != nil {
		return err
	}
	errs := make([]error, 2*len(places))
	var ranks sync.WaitGroup
	for r, p := range places {
		p.c = all[r]
		ranks.Go(func() {
			errs[2*r] = f(p)
			errs[2*r+1] = p.c.Close()
		})
	}
	ranks.Wait()
	return errors.Join(errs...)
}

// wait makes calls until the communicator fails.
func wait(p *place) error {
	for {
		p.c.Barrier(p.s)
		if err := errors.Join(p.s.Sync(), p.c.Err()); err != nil {
			return err
		}
	}
}

// An error that NCCL meets behind a call, or in one, ends all ranks with its words, and all
// communicators are aborted.
func TestErrors(t *testing.T) {
	for _, at := range []string{"poll", "allReduce", "group", "group, and cannot end"} {
		t.Run(at, func(t *testing.T) {
			libs := nccltest.Libraries(2, 0)
			at, stays := strings.CutSuffix(at, ", and cannot end")
			if stays {
				libs[1].Fail("abort", errTest)
			}
			err := run(t, libs, func(p *place) error {
				sub, err := p.c.Split([]int{0, 1})
				if err != nil {
					return err
				}
				defer sub.Close()
				p.c.Barrier(p.s)
				if err := p.s.Sync(); err != nil {
					return err
				}
				if p.c.Rank() == 1 {
					libs[1].Fail(at, errTest)
				}
				err = wait(p)
				if !strings.Contains(err.Error(), "rank 1 gave up: "+errTest.Error()) {
					t.Errorf("rank %d: %v", p.c.Rank(), err)
				}
				for _, c := range []comm.Comm{p.c, sub} { // nobody waits any longer, if NCCL has ended it or not
					select {
					case <-c.(*group).gone:
					case <-time.After(30 * time.Second):
						t.Errorf("rank %d: a communicator that has failed is not over", p.c.Rank())
					}
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
			for r, l := range libs {
				if n := strings.Count(strings.Join(l.Calls(), ","), "abort"); n != 2 {
					t.Errorf("rank %d aborts %d communicators: %v", r, n, l.Calls())
				}
			}
		})
	}
}

// A rank that gives up ends the others that wait for it on the device, where the host can
// do nothing, in whatever communicator they wait, also if they have closed it since.
func TestRankGivesUp(t *testing.T) {
	for _, where := range []string{"all ranks", "a split", "a closed split"} {
		called := make(chan struct{})
		err := run(t, nccltest.Libraries(2, 0), func(p *place) error {
			c := p.c
			if where != "all ranks" {
				var err error
				if c, err = p.c.Split([]int{0, 1}); err != nil {
					return err
				}
			}
			if p.c.Rank() == 1 {
				<-called
				p.c.Abort(errors.New("the disk is full"))
				return nil
			}
			c.AllReduce(p.s, p.b.Slice(0, 8), p.b.Slice(0, 8), comm.F32, comm.Sum)
			if where == "a closed split" {
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			}
			close(called)
			var f *comm.Failure
			if err := errors.Join(p.s.Sync(), c.Err()); !errors.As(err, &f) || f.By != 1 || !strings.HasPrefix(f.Call, "all-reduce #1 of 8 bytes") {
				t.Errorf("%s: rank 0: %v", where, err)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// So it is if all ranks have made the call and closed the communicator: the rank that gives
// up may never come to the call on its device.
func TestRankGivesUpInFlight(t *testing.T) {
	closed, over := make(chan struct{}), make(chan struct{})
	err := run(t, nccltest.Libraries(2, 0), func(p *place) error {
		c, err := p.c.Split([]int{0, 1})
		if err != nil {
			return err
		}
		if p.c.Rank() == 1 {
			p.s.Host(func() { <-over })
		}
		c.AllReduce(p.s, p.b.Slice(0, 8), p.b.Slice(0, 8), comm.F32, comm.Sum)
		if err := errors.Join(c.Err(), c.Close()); err != nil { // the calls are compared
			return err
		}
		if p.c.Rank() == 1 {
			<-closed
			p.c.Abort(errors.New("the disk is full"))
			return nil
		}
		close(closed)
		defer close(over)
		var f *comm.Failure
		if err := errors.Join(p.s.Sync(), c.Err()); !errors.As(err, &f) || f.By != 1 {
			t.Errorf("rank 0: %v", err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// A rank that closes a communicator tells the others only when its calls have ended: one that
// has made one more call aborts the communicator in NCCL.
func TestCloseInFlight(t *testing.T) {
	called := make(chan struct{})
	err := run(t, nccltest.Libraries(2, 0), func(p *place) error {
		c, err := p.c.Split([]int{0, 1})
		if err != nil {
			return err
		}
		if p.c.Rank() == 0 {
			p.s.Host(func() { <-called })
		}
		c.AllReduce(p.s, p.b.Slice(0, 8), p.b.Slice(0, 8), comm.F32, comm.Max)
		if p.c.Rank() == 0 {
			if err := c.Close(); err != nil {
				return err
			}
		} else {
			c.Barrier(p.s)
			select {
			case <-c.(*group).gone: // too early
			case <-time.After(100 * time.Millisecond):
			}
			close(called)
			var f *comm.Failure
			if err := c.Err(); !errors.As(err, &f) || f.By != 0 || f.Call != "barrier #2" || !strings.Contains(err.Error(), "has closed the communicator") {
				t.Errorf("rank 1: %v", err)
			}
			if err := c.Close(); err != nil {
				return err
			}
		}
		p.c.Barrier(p.s)
		return errors.Join(p.s.Sync(), p.c.Err())
	})
	if err != nil {
		t.Error(err)
	}
}

// A library that does not start on one rank, or a host device that cannot make what a rank needs,
// is an error on all. Nothing stays open on the hosts.
func TestOpenFails(t *testing.T) {
	fails := func(libs []*nccltest.Library, words string, first, second *check.Checker) {
		t.Helper()
		_, devs := openWorld(t, libs)
		reached := false
		hosts := func(hosts ...device.Device) error {
			local, cs, err := openOn(t, hosts, devs, libs)
			reached = true
			if cs[0] != nil || cs[1] != nil || strings.Count(fmt.Sprint(err), words) < 2 {
				t.Errorf("%s: %v", words, err)
			}
			return errors.Join(local[0].Close(), local[1].Close())
		}
		err := check.On(func() (device.Device, error) { return openCPU(0) }, func(a device.Device) error {
			return check.On(func() (device.Device, error) { return openCPU(1) }, func(b device.Device) error { return hosts(a, b) })(second)
		})(first)
		if err != nil || !reached {
			t.Errorf("%s: the hosts: %v", words, err)
		}
	}
	for _, at := range []string{"id", "init"} {
		for rank := range 2 {
			if at == "id" && rank > 0 {
				continue // only the first rank makes one
			}
			libs := nccltest.Libraries(2, 0)
			libs[rank].Fail(at, errTest)
			fails(libs, errTest.Error(), check.New(check.Options{}), check.New(check.Options{}))
		}
	}
	for rank := range 2 {
		// The first event is that of the host communicator, which is made before. Then come the event of the
		// watched communicator and the stream of letters.
		for n := 1; n <= 2; n++ {
			checkers := []*check.Checker{check.New(check.Options{}), check.New(check.Options{})}
			checkers[rank] = check.New(check.Options{Faults: []check.Fault{{Class: check.Makes, N: n, Do: check.Fail}}})
			fails(nccltest.Libraries(2, 0), "because of a check.Fault", checkers[0], checkers[1])
		}
	}
}

// A part of the ranks that cannot be made is an error on all of them, and the world ends with nothing left open on the
// hosts.
func TestSplitFails(t *testing.T) {
	for rank := range 2 {
		// After what Open makes come the event of the part, that of its watched communicator, and its stream of letters.
		for n := 3; n <= 5; n++ {
			checkers := []*check.Checker{check.New(check.Options{}), check.New(check.Options{})}
			checkers[rank] = check.New(check.Options{Faults: []check.Fault{{Class: check.Makes, N: n, Do: check.Fail}}})
			libs := nccltest.Libraries(2, 0)
			_, devs := openWorld(t, libs)
			hosts := func(hosts ...device.Device) error {
				_, cs, err := openOn(t, hosts, devs, libs)
				if err != nil {
					return err
				}
				var ranks sync.WaitGroup
				for r, c := range cs {
					ranks.Go(func() {
						if sub, err := c.Split([]int{0, 1}); err == nil || sub != nil {
							t.Errorf("rank %d has a part of the ranks, though call %d of rank %d failed: %v", r, n, rank, err)
						}
						_ = c.Close() // which fails for the same reason, or does not
					})
				}
				ranks.Wait()
				return nil
			}
			err := check.On(func() (device.Device, error) { return openCPU(0) }, func(a device.Device) error {
				return check.On(func() (device.Device, error) { return openCPU(1) }, func(b device.Device) error { return hosts(a, b) })(checkers[1])
			})(checkers[0])
			if err != nil {
				t.Errorf("call %d of rank %d fails: %v", n, rank, err)
			}
		}
	}
}

// Graphs that were not closed end before their communicators.
func TestGraphsEndFirst(t *testing.T) {
	libs := nccltest.Libraries(2, 1)
	err := run(t, libs, func(p *place) error {
		g, err := p.c.(comm.Capturer).Capture(p.s, func() error { p.c.Barrier(p.s); return nil })
		if err != nil {
			return err
		}
		for range 3 {
			err = errors.Join(err, g.Replay())
		}
		if g.Nodes() != 1 {
			t.Errorf("the graph has %d nodes", g.Nodes())
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if got, want := libs[0].Calls(), []string{"init 1 of 2", "allReduce 1", "allReduce 1", "allReduce 1", "finalize", "destroy"}; !slices.Equal(got, want) {
		t.Errorf("the library is called with %v", got)
	}
}

// What one rank cannot capture no rank captures, all for the same reason, and the
// communicator goes on.
func TestCaptureRefused(t *testing.T) {
	err := run(t, nccltest.Libraries(2, 0), func(p *place) error {
		_, err := p.c.(comm.Capturer).Capture(p.s, func() error {
			p.c.Barrier(p.s)
			if p.c.Rank() == 1 {
				p.s.Upload(p.b.Slice(0, 4), make([]byte, 4))
			}
			return nil
		})
		var refused *device.CaptureError
		if !errors.As(err, &refused) || refused.Stream != "compute" {
			t.Errorf("rank %d: %v", p.c.Rank(), err)
		}
		p.c.Barrier(p.s)
		return errors.Join(p.s.Sync(), p.c.Err())
	})
	if err != nil {
		t.Error(err)
	}
}

// A body that fails ends the communicator on all ranks.
func TestCaptureFails(t *testing.T) {
	_ = run(t, nccltest.Libraries(2, 0), func(p *place) error {
		_, err := p.c.(comm.Capturer).Capture(p.s, func() error {
			p.c.Barrier(p.s)
			if p.c.Rank() == 1 {
				return errors.New("no idea")
			}
			return nil
		})
		if err == nil || !strings.Contains(err.Error(), "no idea") {
			t.Errorf("rank %d: %v", p.c.Rank(), err)
		}
		return nil
	})
}

// Large groups compare calls with one other rank only, which still finds the rank that
// disagrees and tells all.
func TestManyRanksDisagree(t *testing.T) {
	const n = mostCompared + 1
	_ = run(t, nccltest.Libraries(n, 0), func(p *place) error {
		p.c.Barrier(p.s)
		if err := errors.Join(p.s.Sync(), p.c.Err()); err != nil {
			t.Errorf("rank %d: %v", p.c.Rank(), err)
		}
		if _, err := p.c.Gather(nil); err != nil { // all ranks know that the barrier was made
			t.Errorf("rank %d: %v", p.c.Rank(), err)
		}
		size := memory.Bytes(64)
		if p.c.Rank() == 5 {
			size = 128
		}
		p.c.AllReduce(p.s, p.b.Slice(0, size), p.b.Slice(0, size), comm.F32, comm.Sum)
		if err := errors.Join(p.s.Sync(), p.c.Err()); err == nil || !strings.Contains(err.Error(), "ranks do not agree: comm: rank") || !strings.Contains(err.Error(), "all-reduce #3 of 128 bytes") {
			t.Errorf("rank %d: %v", p.c.Rank(), err)
		}
		return nil
	})
}

// A rank whose device has no room for what Open needs is an error on all.
func TestOpenWithoutMemory(t *testing.T) {
	libs := nccltest.Libraries(2, 0)
	_, devs := openWorld(t, libs)
	full, err := cpu.Open(cpu.Options{Capacity: [memory.Kinds]memory.Bytes{4 * memory.KiB, memory.MiB}})
	if err != nil {
		t.Fatal(err)
	}
	all, err := full.Alloc(memory.Device, 4*memory.KiB, "everything")
	if err != nil {
		t.Fatal(err)
	}
	devs[1] = full
	cs, err := open(t, devs, libs)
	if cs[0] != nil || cs[1] != nil || strings.Count(fmt.Sprint(err), "comm scratch") != 2 {
		t.Errorf("opened %v: %v", cs, err)
	}
	s, err := full.NewStream("end")
	if err != nil {
		t.Fatal(err)
	}
	s.Free(all)
	if err := errors.Join(s.Close(), full.Close()); err != nil {
		t.Error(err)
	}
}

// other is the assistant that was there before.
type other struct {
	cuda.Assist
	kernel   *device.Kernel
	launched int
	closed   bool
}

func (o *other) Takes(k *device.Kernel) bool { return k == o.kernel }
func (o *other) Launch(*device.Kernel, []uint64, uintptr) (bool, error) {
	o.launched++
	return true, nil
}
func (o *other) Close() { o.closed = true }

// gpuStream is a stream of a GPU, which asks the assistant about a launch.
type gpuStream struct {
	device.Stream
	cuda.Assist
}

func (l gpuStream) Launch(x device.Launch) {
	if l.Takes(x.Kernel) {
		_, _ = l.Assist.Launch(x.Kernel, x.Args(), 7)
	}
}

func (l gpuStream) Close() error { return nil }

// The assistant takes work of NCCL while it is issued, and leaves all else to the one that was
// there before.
func TestAssist(t *testing.T) {
	before := &other{kernel: &device.Kernel{Name: "theirs"}}
	a, err := Assist(func() (cuda.Assist, error) { return before, nil })()
	if err != nil {
		t.Fatal(err)
	}
	on := uintptr(0)
	launch(gpuStream{Assist: a}, "test", nil, func(stream uintptr) { on = stream })
	if on != 7 || before.launched != 0 {
		t.Errorf("the work ran on stream %d, and %d times elsewhere", on, before.launched)
	}
	for _, k := range []*device.Kernel{before.kernel, {Name: "another"}} {
		if got := a.Takes(k); got != (k == before.kernel) {
			t.Errorf("%s is taken: %v", k.Name, got)
		}
	}
	gpuStream{Assist: a}.Launch(device.NewLaunch(before.kernel, 1, 1))
	if a.Close(); before.launched != 1 || !before.closed {
		t.Errorf("%+v", before)
	}
	for _, open := range []func() (cuda.Assist, error){nil, func() (cuda.Assist, error) { return nil, &device.Unsupported{What: "a library"} }} {
		a, err := Assist(open)()
		if err != nil || a.Takes(before.kernel) {
			t.Errorf("without another one: %v", err)
		}
		a.Close()
	}
	if _, err := Assist(func() (cuda.Assist, error) { return nil, errTest })(); !errors.Is(err, errTest) {
		t.Errorf("an error of the other one: %v", err)
	}
}
