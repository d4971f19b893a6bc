// Package nccl is the engine of collectives over NCCL: each rank is a process of its own
// with a GPU of its own.
//
// The library puts its work on the caller's stream. Bytes are moved and numbers are added
// by NCCL, in an order of its own, which is the same in every run of a layout. All calls of
// a process on a GPU are issued in one order, by one thread at a time, and each runs after
// the one before it, whatever streams and communicators they are on: two communicators that
// ranks entered in different orders would wait for each other for ever. Ranks that issue the
// calls of two communicators in different orders fail with a sentence.
//
// Hosts have a communicator of their own, over MPI. It passes the ids of communicators, the
// messages of Gather, the news of ranks that give up, and a letter for each call, so that
// ranks that disagree fail with a sentence. A communicator that has failed is aborted, which
// ends the calls that the device waits in.
//
// This file owns what the communicators of a process share, from Open to the last Close;
// group.go communicators, calls.go the calls, launch.go how a call reaches the library,
// capture.go graphs, register.go memory that NCCL was told of, audit.go the comparison of calls.
package nccl

import (
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// Options configures a world.
type Options struct {
	// Host is a communicator of the hosts of all ranks. Its streams are those of
	// HostDevice. The world closes it.
	Host       comm.Comm
	HostDevice device.Device
	// Order is shared by all worlds of this process that use the same GPU. It may be nil if
	// there are no others.
	Order *Order
	// Note is told of every call when its turn to be compared comes: "all-to-all 12". It must
	// return at once.
	Note func(call string)
}

// Order is the order in which a process issues work of NCCL on a GPU. Work of two
// communicators that began in another order on another GPU, where there is room for one of
// them at a time, would wait for each other for ever.
type Order struct {
	mu   sync.Mutex // held while a call is put on its stream, by one thread
	last *world     // whose calls may be in flight
}

// take waits until no other world has calls in flight: streams of different devices have no
// other order.
func (o *Order) take(w *world) {
	if o.last != nil && o.last != w {
		_ = o.last.turn.Sync() // it ends if that world fails
	}
	o.last = w
}

// leave forgets a world whose calls have ended.
func (o *Order) leave(w *world) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.last == w {
		o.last = nil
	}
}

// world is the state that all communicators of this process share.
type world struct {
	lib    Library
	dev    device.Device
	o      Options
	root   *group
	side   device.Stream  // on which communicators are made
	behind device.Stream  // which waits for the calls of communicators that were closed
	spot   *device.Buffer // what barriers add up

	order  *Order
	turn   device.Event // behind the last call outside of captures
	inner  device.Event // behind the last call of the capture
	joint  bool         // a capture is under way
	begun  bool         // it has calls
	graphs map[*graph]struct{}
	issued uint64 // calls so far

	mu      sync.Mutex
	met     map[int][]meeting // by rank: the last calls that were compared with it
	groups  []*group          // those of several ranks, in the order in which they were made
	stop    chan struct{}
	stopped chan struct{}
}

// Open makes a communicator of all ranks of the hosts' communicator, each on its device. All
// of them must call it. The device must have been opened with [Assist].
func Open(lib Library, dev device.Device, o Options) (_ comm.Comm, err error) {
	w := &world{lib: lib, dev: dev, o: o, order: o.Order, graphs: map[*graph]struct{}{}, met: map[int][]meeting{}, stop: make(chan struct{}), stopped: make(chan struct{})}
	if w.order == nil {
		w.order = &Order{}
	}
	ranks := make([]int, o.Host.Size())
	for i := range ranks {
		ranks[i] = i
	}
	if _, err = share(o.Host, 0, w.allocate()); err == nil {
		w.root, err = w.newGroup(o.Host, ranks, o.Host.Rank())
	}
	if err != nil {
		return nil, errors.Join(err, w.release())
	}
	go w.watch()
	return w.root, nil
}

// share gives all ranks what the first one has, or the error of the first one that has one.
func share[T any](c comm.Comm, v T, own error) (T, error) {
	type said struct {
		Value T
		Err   string
	}
	mine := said{Value: v}
	if own != nil {
		mine.Err = own.Error()
	}
	all, err := everyone(c, mine)
	if err != nil || own != nil {
		return v, errors.Join(own, err)
	}
	for _, x := range all {
		if x.Err != "" {
			return v, errors.New(x.Err)
		}
	}
	return all[0].Value, nil
}

// everyone returns what all ranks have.
func everyone[T any](c comm.Comm, mine T) ([]T, error) {
	text, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	texts, err := c.Gather(text)
	if err != nil {
		return nil, err
	}
	all := make([]T, len(texts))
	for r, text := range texts {
		if err := json.Unmarshal(text, &all[r]); err != nil {
			return nil, fmt.Errorf("comm: cannot read what rank %d says: %w; run the same version of the program everywhere", r, err)
		}
	}
	return all, nil
}

func (w *world) allocate() (err error) {
	if w.turn, err = w.dev.NewEvent(0); err != nil {
		return err
	}
	if w.inner, err = w.dev.NewEvent(0); err != nil {
		return err
	}
	if w.side, err = w.dev.NewStream("nccl"); err != nil {
		return err
	}
	if w.behind, err = w.dev.NewStream("nccl close"); err != nil {
		return err
	}
	if w.spot, err = w.dev.Alloc(memory.Device, 256, "comm scratch"); err != nil {
		return err
	}
	w.side.Fill(w.spot.All(), 0)
	return w.side.Sync()
}

// release gives back what allocate took.
func (w *world) release() (err error) {
	if w.spot != nil {
		w.side.Free(w.spot)
	}
	for _, s := range []device.Stream{w.side, w.behind} {
		if s != nil {
			err = errors.Join(err, s.Close())
		}
	}
	for _, e := range []device.Event{w.turn, w.inner} {
		if e != nil {
			err = errors.Join(err, e.Close())
		}
	}
	return err
}

// live returns the groups that are open or whose calls may be in flight.
func (w *world) live() []*group {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]*group{}, w.groups...)
}

// How often the watcher looks for failures of other ranks, and asks NCCL for its own.
const (
	lookEvery = 5 * time.Millisecond
	askEvery  = 20 // times lookEvery
)

// watch ends what NCCL waits in if a communicator fails. The host may wait for the device
// then and can do nothing itself.
func (w *world) watch() {
	defer close(w.stopped)
	var helpers sync.WaitGroup
	defer helpers.Wait()
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	for n := 1; ; n++ {
		select {
		case <-w.stop:
			return
		case <-ticker.C:
		}
		for _, g := range w.live() {
			g.mu.Lock()
			failed, quit := g.lost != nil, g.quit
			g.mu.Unlock()
			switch {
			case failed && !g.aimed:
				g.aimed = true
				helpers.Go(func() { _ = g.kill() }) // it may wait for another one's kernels
			case failed:
			case !quit && n%askEvery == 0 && g.calls.TryLock(): // others may end what this rank has left
				var err error
				if !g.dead {
					_, err = w.lib.Poll(g.c)
				}
				g.calls.Unlock()
				if err != nil && !g.blamed {
					g.blamed = true
					helpers.Go(func() { g.blame(err) })
				}
			}
			err := w.o.Host.Err() // a group that was closed has calls in flight, too
			if !quit && err == nil {
				err = g.trouble()
			}
			if err != nil {
				g.lose(failureOf(err))
			}
		}
	}
}

// close ends the world after the calls in flight. Hosts leave first, which waits until all
// ranks have closed: NCCL may still pass their data.
func (w *world) close() error {
	err := w.dev.Sync() // calls in flight end, unless the device has failed
	w.order.leave(w)
	failed := err != nil || w.o.Host.Err() != nil
	for g := range w.graphs { // NCCL waits for ever for graphs that use a communicator
		_ = g.graph.Close()
	}
	for _, g := range w.live() {
		g.mu.Lock()
		g.quit = true
		g.wake.Broadcast()
		g.mu.Unlock()
		if failed {
			g.lose(&comm.Failure{Err: errors.New("the communicator of all ranks was closed")})
		}
		<-g.audited
		err = errors.Join(err, g.auditErr)
	}
	err = errors.Join(err, w.o.Host.Close())
	close(w.stop)
	<-w.stopped
	for _, g := range w.live() {
		g.mu.Lock()
		lost := g.lost != nil
		g.mu.Unlock()
		if e := g.end(lost || failed, mostEnding); !failed {
			err = errors.Join(err, e)
		}
	}
	return errors.Join(err, w.release())
}
