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

// open makes a world of ranks, each with a library of its own, and perhaps an order of its
// GPU.
func open(t *testing.T, devs []device.Device, libs []*nccltest.Library, orders ...*Order) ([]comm.Comm, error) {
	t.Helper()
	n := len(devs)
	hosts := make([]device.Device, n)
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
	local, err := comm.NewLocal(hosts, comm.Options{})
	if err != nil {
		t.Fatal(err)
	}
	all, errs := make([]comm.Comm, n), make([]error, n)
	var ranks sync.WaitGroup
	for r := range devs {
		o := Options{Host: local[r], HostDevice: hosts[r]}
		if orders != nil {
			o.Order = orders[r]
		}
		ranks.Go(func() { all[r], errs[r] = Open(libs[r], devs[r], o) })
	}
	ranks.Wait()
	return all, errors.Join(errs...)
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

// All ranks make the calls of all communicators in the order in which they were issued,
// whatever streams these are on, and the ends of communicators come last.
func TestOneOrder(t *testing.T) {
	libs := nccltest.Libraries(2, 0)
	err := run(t, libs, func(p *place) error {
		sub, err := p.c.Split([]int{1, 0})
		if err != nil {
			return err
		}
		side, err := p.NewStream("side")
		if err != nil {
			return err
		}
		for i := range memory.Bytes(20) {
			p.c.AllReduce(p.s, p.b.Slice(0, 4*i+4), p.b.Slice(0, 4*i+4), comm.F32, comm.Max)
			sub.Broadcast(side, p.b.Slice(2048, 100+i), 0)
		}
		return errors.Join(p.c.Err(), sub.Err(), p.Sync(), sub.Close(), side.Close())
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"init 1 of 2", "init 2 of 2"}
	for i := range 20 {
		want = append(want, fmt.Sprintf("allReduce %d", i+1), fmt.Sprintf("broadcast %d", 100+i))
	}
	want = append(want, "finalize", "destroy", "finalize", "destroy")
	for r, l := range libs {
		if got := l.Calls(); !slices.Equal(got, want) {
			t.Errorf("rank %d calls %v", r, got)
		}
	}
}

// Ranks that issue calls of two communicators in different orders would wait for each other
// for ever on their devices, each in the call that the other comes to later. All are told,
// whatever calls lie between, and calls of a communicator that ends early do not matter. SPEC S7.2
func TestRanksCross(t *testing.T) {
	for _, calls := range [][2]string{{"ab", "ba"}, {"abcab", "bacab"}, {"aaaab", "abaaa"}, {"acm", "amc"}} {
		err := run(t, nccltest.Libraries(2, 0), func(p *place) error {
			cs := map[rune]comm.Comm{'a': p.c}
			streams := map[rune]device.Stream{'m': p.s}
			for _, name := range "abc" {
				s, err := p.NewStream(string(name))
				if err != nil {
					return err
				}
				defer s.Close()
				streams[name] = s
				if name == 'a' {
					continue
				}
				c, err := p.c.Split([]int{1, 0})
				if err != nil {
					return err
				}
				defer c.Close()
				cs[name] = c
			}
			for _, name := range calls[p.c.Rank()] {
				switch r := p.b.Slice(0, 8); {
				case name != 'm':
					cs[name].AllReduce(streams[name], r, r, comm.F32, comm.Max)
				case p.c.Rank() == 0:
					p.c.Send(streams[name], r, 1)
				default:
					p.c.Recv(streams[name], r, 0)
				}
			}
			late := time.AfterFunc(30*time.Second, func() { p.c.Abort(errors.New("ranks wait for ever")) })
			defer late.Stop()
			err := p.Sync()
			for _, c := range cs {
				err = errors.Join(err, c.Err())
			}
			if err == nil || !strings.Contains(err.Error(), "ranks do not agree: comm: rank") || !strings.Contains(err.Error(), "make the calls of all communicators in the same order on all ranks") {
				t.Errorf("%v: rank %d: %v", calls, p.c.Rank(), err)
			}
			return nil
		})
		if err != nil && !strings.Contains(err.Error(), "same order") {
			t.Error(err)
		}
	}
}

// pieces is memory that was mapped in two pieces.
type pieces struct{}

func (pieces) Chunks(r device.Range) []device.Range {
	return []device.Range{r.Slice(0, 1000), r.Slice(1000, r.Len-1000)}
}

// Memory is registered with a communicator piece by piece, and deregistered when its owner
// says so. What NCCL does not take, and what no link reaches, is used as any other. SPEC S7.2
func TestRegister(t *testing.T) {
	for _, refused := range []error{nil, errTest} {
		libs := nccltest.Libraries(2, 0)
		err := run(t, libs, func(p *place) error {
			sub, err := p.c.Split([]int{0, 1})
			if err != nil {
				return err
			}
			own, err := p.c.Split([]int{p.c.Rank()})
			if err != nil {
				return err
			}
			libs[p.c.Rank()].Fail("register", refused)
			whole := comm.Register(p.b.Slice(0, 64), nil, sub, own)
			mem := p.b.Mem
			p.b.Mem = pieces{}
			parts := comm.Register(p.b.Slice(0, 3000), p.c)
			p.b.Mem = mem
			empty := comm.Register(p.b.Slice(0, 0), p.c)
			p.c.AllReduce(p.s, p.b.Slice(0, 64), p.b.Slice(0, 64), comm.F32, comm.Max)
			err = errors.Join(p.Sync(), p.c.Err())
			empty()
			parts()
			whole()
			return errors.Join(err, sub.Close(), own.Close())
		})
		if err != nil {
			t.Fatal(err)
		}
		want := []string{"init 1 of 2", "init 2 of 2", "register 64", "register 1000", "register 2000", "allReduce 16", "deregister 1000", "deregister 2000", "deregister 64", "finalize", "destroy", "finalize", "destroy"}
		if refused != nil {
			want = slices.DeleteFunc(want, func(s string) bool { return strings.Contains(s, "register") })
		}
		for r, l := range libs {
			if got := l.Calls(); !slices.Equal(got, want) {
				t.Errorf("rank %d calls %v", r, got)
			}
		}
	}
}

// Memory may be registered with a communicator that has failed: nothing happens.
func TestRegisterAfterFailure(t *testing.T) {
	libs := nccltest.Libraries(2, 0)
	_ = run(t, libs, func(p *place) error {
		before := comm.Register(p.b.Slice(0, 64), p.c)
		if p.c.Rank() == 1 {
			p.c.Abort(errTest)
		}
		_ = wait(p)
		comm.Register(p.b.Slice(0, 128), p.c)()
		before()
		return nil
	})
	for r, l := range libs {
		if got, want := l.Calls()[1:], "register 64"; got[0] != want || slices.Contains(got, "register 128") || slices.Contains(got, "deregister 64") {
			t.Errorf("rank %d calls %v", r, got)
		}
	}
}

// Two worlds that share a GPU issue their calls in one order, though their streams know
// nothing of each other: the second waits until the first has none in flight. SPEC S7.2
func TestWorldsShareAGPU(t *testing.T) {
	libs := nccltest.Libraries(2, 0)
	var worlds [2][]comm.Comm
	var places [2][]*place
	orders := []*Order{{}, {}}
	for i := range worlds {
		var devs []device.Device
		places[i], devs = openWorld(t, libs)
		var err error
		if worlds[i], err = open(t, devs, libs, orders...); err != nil {
			t.Fatal(err)
		}
	}
	var ranks sync.WaitGroup
	for r := range libs {
		a, b := places[0][r], places[1][r]
		ranks.Go(func() {
			for i := range memory.Bytes(3) {
				a.s.Host(func() { time.Sleep(20 * time.Millisecond) }) // the first world is late
				worlds[0][r].AllReduce(a.s, a.b.Slice(0, 4*i+4), a.b.Slice(0, 4*i+4), comm.F32, comm.Max)
				worlds[1][r].Broadcast(b.s, b.b.Slice(0, 100+i), 0)
			}
			if err := errors.Join(a.Sync(), b.Sync(), worlds[0][r].Close(), worlds[1][r].Close()); err != nil {
				t.Error(err)
			}
		})
	}
	ranks.Wait()
	want := []string{"init 1 of 2", "init 2 of 2", "allReduce 1", "broadcast 100", "allReduce 2", "broadcast 101", "allReduce 3", "broadcast 102", "finalize", "destroy", "finalize", "destroy"}
	for r, l := range libs {
		if got := l.Calls(); !slices.Equal(got, want) {
			t.Errorf("rank %d calls %v", r, got)
		}
		if orders[r].last != nil {
			t.Errorf("rank %d keeps a world that was closed", r)
		}
	}
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

// A library that does not start on one rank is an error on all.
func TestOpenFails(t *testing.T) {
	for _, at := range []string{"id", "init"} {
		for rank := range 2 {
			if at == "id" && rank > 0 {
				continue // only the first rank makes one
			}
			libs := nccltest.Libraries(2, 0)
			libs[rank].Fail(at, errTest)
			_, devs := openWorld(t, libs)
			cs, err := open(t, devs, libs)
			if cs[0] != nil || cs[1] != nil || strings.Count(fmt.Sprint(err), errTest.Error()) < 2 {
				t.Errorf("%s on rank %d: %v", at, rank, err)
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
