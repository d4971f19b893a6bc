// This file owns the tests of several goroutines that use one device.

package devicetest

import (
	"bytes"
	"fmt"
	"sync"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var concurrentCases = []testCase{
	{name: "AStreamEach", fn: testStreamEach},
	{name: "OneStreamForAll", fn: testOneStreamForAll},
	{name: "OneGraphForAll", fn: testOneGraphForAll},
	{name: "Relay", fn: testRelay},
	{name: "Grow", fn: testConcurrentGrow},
}

// together runs fn in n goroutines and collects their errors. It ends the test from the
// test's own goroutine.
func (e *env) together(n int, fn func(i int) error) {
	e.Helper()
	e.within("goroutines that share the device", func() error {
		var wg sync.WaitGroup
		errs := make([]error, n)
		for i := range n {
			wg.Go(func() {
				defer func() {
					if p := recover(); p != nil {
						errs[i] = fmt.Errorf("goroutine %d: panic: %v", i, p)
					}
				}()
				errs[i] = fn(i)
			})
		}
		wg.Wait()
		for _, err := range errs {
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// testStreamEach: goroutines that open, allocate, work, capture, replay, wait,
// free and close on their own do not disturb each other.
func testStreamEach(e *env) {
	e.together(4, func(i int) error {
		s, err := e.dev.NewStream(fmt.Sprint("worker ", i))
		if err != nil {
			return err
		}
		for round := range 5 {
			if err := workAlone(e.dev, s, i*10+round); err != nil {
				return fmt.Errorf("worker %d, round %d: %w", i, round, err)
			}
		}
		return s.Close()
	})
	for _, k := range bothKinds {
		if u := e.dev.Memory().Kind[k]; u.Current != 0 || u.Pending != 0 || u.Peak == 0 {
			e.Errorf("%v memory ends as %+v", k, u)
		}
	}
}

// workAlone does a little of everything on one stream.
func workAlone(d device.Device, s device.Stream, seed int) error {
	const n = 2048
	x, err := d.Alloc(memory.Device, n, "worker")
	if err != nil {
		return err
	}
	h, err := d.Alloc(memory.Host, n, "worker")
	if err != nil {
		return err
	}
	s.Upload(x.All(), pattern(seed, n))
	s.Fill(h.All(), byte(seed))
	s.BeginCapture()
	s.Launch(mix(x.All(), h.All(), uint64(seed)))
	s.Copy(h.All(), x.All())
	g, err := s.EndCapture()
	if err != nil {
		return err
	}
	wx, wh := pattern(seed, n), filled(byte(seed), n)
	for range 4 {
		s.Replay(g)
		mixBytes(wx, wh, uint64(seed))
		copy(wh, wx)
	}
	got := make([]byte, n)
	if err := s.Download(got, h.All()); err != nil {
		return err
	}
	if !bytes.Equal(got, wh) {
		return fmt.Errorf("four replays: %s", firstDifference(got, wh))
	}
	s.Free(x)
	s.Free(h)
	if err := g.Close(); err != nil {
		return err
	}
	return s.Sync()
}

// testOneStreamForAll: a stream takes work from any goroutine, each piece whole.
func testOneStreamForAll(e *env) {
	s := e.stream("shared")
	const workers, each, n = 4, 50, 512
	x := e.alloc(memory.Device, workers*n)
	src := e.allocWith(s, memory.Device, pattern(1, n))
	s.Fill(x.All(), 0)
	e.together(workers, func(i int) error {
		for j := range each {
			s.Launch(mix(x.Slice(memory.Bytes(i)*n, n), src.All(), uint64(j)))
		}
		return s.Sync()
	})
	want := make([]byte, workers*n)
	for i := range workers {
		for j := range each {
			mixBytes(want[i*n:(i+1)*n], pattern(1, n), uint64(j))
		}
	}
	e.want(s, x.All(), want, "issued by four goroutines")
}

// testOneGraphForAll: replays of one graph from many goroutines never overlap.
func testOneGraphForAll(e *env) {
	s, b, _ := e.threeStreams()
	const workers, each = 4, 20
	x := e.cells(s, 2)
	g := e.capture(s, func() {
		x.mix(s, 0, 1, 1)
		e.order(s, b)
		x.mix(b, 1, 0, 2)
		e.order(b, s)
	})
	var ss []device.Stream
	for range workers {
		ss = append(ss, e.stream("worker"))
	}
	e.together(workers, func(i int) error {
		for range each {
			ss[i].Replay(g)
		}
		return ss[i].Sync()
	})
	for range workers * each {
		for _, op := range x.ops {
			op()
		}
	}
	x.check(s, "replayed by four goroutines")
}

// testRelay: goroutines hand a buffer on by event; the channel orders the host,
// the event the device, and no host wait is needed.
func testRelay(e *env) {
	const runners, rounds, n = 4, 10, 1024
	var ss []device.Stream
	var done []device.Event
	turn := make([]chan struct{}, runners)
	for i := range runners {
		ss, done = append(ss, e.stream("runner")), append(done, e.event(0))
		turn[i] = make(chan struct{}, 1)
	}
	x, y := e.allocWith(ss[0], memory.Device, pattern(1, n)), e.allocWith(ss[0], memory.Device, pattern(2, n))
	turn[0] <- struct{}{}
	e.together(runners, func(i int) error {
		before, next := (i+runners-1)%runners, (i+1)%runners
		for r := range rounds {
			<-turn[i]
			ss[i].Wait(done[before])
			ss[i].Launch(mix(x.All(), y.All(), uint64(r*runners+i)))
			ss[i].Record(done[i])
			turn[next] <- struct{}{}
		}
		return nil
	})
	want := pattern(1, n)
	for r := range runners * rounds {
		mixBytes(want, pattern(2, n), uint64(r))
	}
	e.sync(ss...)
	e.want(ss[0], x.All(), want, "handed around by goroutines")
}

// testConcurrentGrow: goroutines that grow one buffer, each to sizes of its own,
// leave it at the largest, and the ledger with exactly that.
func testConcurrentGrow(e *env) {
	const workers, steps, step = 4, 100, 1000
	s := e.stream("s")
	for _, k := range bothKinds {
		for range 5 {
			b := e.reserve(k, workers*steps*step, "pool")
			e.together(workers, func(i int) error {
				for j := range steps {
					if err := e.dev.Grow(b, memory.Bytes(j*workers+i+1)*step); err != nil {
						return err
					}
				}
				return nil
			})
			if b.Size() != workers*steps*step {
				e.Errorf("grown by four goroutines to %v it has %v", b.Max(), b.Size())
			}
			e.wantKind("grown by four goroutines", k, b.Size(), 0, b.Size())
			s.Fill(b.All(), 1)
			s.Free(b)
			e.sync(s)
			e.wantKind("freed after that", k, 0, 0, workers*steps*step)
		}
	}
}
