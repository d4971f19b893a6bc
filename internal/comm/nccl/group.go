// This file owns communicators: the numbers of their calls, their errors, Split and Close.

package nccl

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/letter"
	"github.com/stowage-dev/stowage/internal/launcher"
	"github.com/stowage-dev/stowage/internal/nccl"
)

// group is this rank's end of a communicator. Its life cycle:
//
//  1. open: calls are made; the goroutine of audit compares them.
//  2. lost (perhaps): it has failed, calls do nothing, and the watcher kills what is in NCCL.
//  3. quit: Close was called. The calls in flight go on.
//  4. ended: the world was closed, and with it what is in NCCL.
type group struct {
	w     *world
	ranks []int // numbered as in the world
	me    int
	words string // its ranks

	// A group of one rank has none of these.
	host    comm.Comm // for messages between hosts
	watched comm.Comm // for the audit alone
	c       nccl.Comm

	calls  sync.Mutex    // held while the library uses c
	dead   bool          // c was ended; guarded by calls
	aimed  bool          // it is being killed; only the watcher uses it
	blamed bool          // its error is being looked into; only the watcher uses it
	gone   chan struct{} // closed when c was ended

	// Only the audit uses these.
	hs       device.Stream
	out, in  *device.Buffer
	audited  chan struct{} // closed when the audit has ended
	auditErr error

	mu    sync.Mutex
	wake  sync.Cond
	made  uint64     // calls of this rank
	queue []*audited // calls that are not compared yet, in order
	lost  *comm.Failure
	quit  bool
	busy  bool // it has quit, and calls of this rank are in flight
}

var (
	_ comm.Capturer  = (*group)(nil)
	_ comm.Registrar = (*group)(nil)
)

// newGroup makes a group of several ranks from its communicator of hosts, or of one rank.
// All its ranks must call it.
func (w *world) newGroup(host comm.Comm, ranks []int, me int) (g *group, err error) {
	g = &group{w: w, ranks: ranks, me: me, host: host, audited: make(chan struct{}), gone: make(chan struct{})}
	g.wake.L = &g.mu
	if g.words = launcher.Ranks(ranks); len(ranks) == w.o.Host.Size() {
		g.words = "all ranks"
	}
	if len(ranks) == 1 {
		close(g.audited)
		return g, nil
	}
	all := make([]int, len(ranks))
	for i := range all {
		all[i] = i
	}
	if g.watched, err = host.Split(all); err != nil {
		g.Abort(err) // the others wait for this rank, here and below
		return nil, err
	}
	if g.hs, err = w.o.HostDevice.NewStream("comm letters"); err == nil {
		err = g.connect()
	} else {
		g.Abort(err)
	}
	if err != nil {
		if g.hs != nil {
			err = errors.Join(err, g.hs.Close())
		}
		return nil, errors.Join(err, g.watched.Close())
	}
	w.mu.Lock()
	w.groups = append(w.groups, g)
	w.mu.Unlock()
	go g.audit()
	return g, nil
}

// connect makes the communicator in NCCL.
func (g *group) connect() error {
	var id nccl.ID
	var err error
	if g.me == 0 {
		id, err = g.w.lib.NewID()
	}
	if id, err = share(g.host, id, err); err != nil {
		return err
	}
	launch(g.w.side, "connect", nil, func(uintptr) {
		if g.c, err = g.w.lib.Init(len(g.ranks), id, g.me); err == nil {
			err = g.settle(func() bool { return g.host.Err() != nil })
		}
	})
	synced := g.w.side.Sync() // the launch is over, or the device has failed without it
	if err = errors.Join(synced, err); err == nil {
		err = g.host.Err() // another rank failed, and this one stopped waiting for it
	} else {
		g.Abort(err) // the others wait for this rank
	}
	if err == nil {
		_, err = share(g.host, id, nil)
	}
	if err != nil && g.c != 0 {
		_ = g.kill()
	}
	return err
}

func (g *group) Rank() int { return g.me }
func (g *group) Size() int { return len(g.ranks) }

func (g *group) alone() bool { return len(g.ranks) == 1 }

func (g *group) caller() comm.Caller {
	return comm.Caller{Rank: g.me, Size: len(g.ranks), World: g.ranks[g.me]}
}

// enter numbers a call and has it compared with those of other ranks. It returns nil if the
// communicator has failed: the call does nothing then. It panics if the rank has closed the
// communicator.
//
// The caller holds the order of issue, but for Gather, which is no call of NCCL.
func (g *group) enter(sig letter.Signature, peer int, sends, recvs []part) *letter.Call {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.quit {
		panic(fmt.Sprintf("comm: %v is called on rank %d after it closed the communicator", sig.Kind, g.ranks[g.me]))
	}
	g.made++
	c := &letter.Call{Signature: sig, Number: g.made, Peer: peer}
	if g.lost == nil {
		if err := g.trouble(); err != nil {
			g.loseLocked(failureOf(err))
		}
	}
	if g.lost != nil {
		if g.lost.Call == "" {
			g.lost.Call = c.Name(g.ranks)
		}
		return nil
	}
	if !g.alone() && sig.Kind != letter.Gather {
		g.w.issued++
		g.queue = append(g.queue, &audited{*c, g.w.issued, sends, recvs})
		g.wake.Broadcast()
	}
	return c
}

func (g *group) note(c *letter.Call) {
	if g.w.o.Note != nil {
		g.w.o.Note(fmt.Sprintf("%v %d of %s", c.Kind, c.Number, g.words))
	}
}

// trouble returns the error of the communicators of hosts.
func (g *group) trouble() error {
	if g.alone() {
		return g.w.o.Host.Err()
	}
	if err := g.watched.Err(); err != nil {
		return err
	}
	return g.host.Err()
}

// lose notes that the communicator has failed. The first failure counts. It names the first
// call that not all ranks are known to have made.
func (g *group) lose(f *comm.Failure) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.loseLocked(f)
	g.wake.Broadcast()
}

func (g *group) loseLocked(f *comm.Failure) {
	if g.lost != nil {
		return
	}
	g.lost = &comm.Failure{Rank: g.ranks[g.me], By: f.By, Err: f.Err}
	if len(g.queue) > 0 {
		g.lost.Call = g.queue[0].call.Name(g.ranks)
	}
}

// mostKilling is how long the end of a communicator that has failed is waited for.
const mostKilling = 5 * time.Second

// Err waits until the calls so far are compared. If the communicator has failed, it waits for
// its end in NCCL, which may wait for all work of the device: calls of other communicators
// that came before that would never end.
func (g *group) Err() error {
	g.mu.Lock()
	for len(g.queue) > 0 && g.lost == nil {
		g.wake.Wait()
	}
	lost, quit := g.lost != nil, g.quit
	g.mu.Unlock()
	if lost {
		if !g.alone() {
			select {
			case <-g.gone:
			case <-time.After(mostKilling):
			}
		}
		return g.failed()
	}
	if quit {
		return nil
	}
	if err := g.trouble(); err != nil {
		f := failureOf(err)
		return &comm.Failure{Rank: g.ranks[g.me], By: f.By, Err: f.Err}
	}
	return nil
}

// Abort makes all communicators of this world fail, in all processes.
func (g *group) Abort(err error) { g.w.o.Host.Abort(err) }

func (g *group) Split(ranks []int) (comm.Comm, error) {
	mine := g.caller().Split(ranks)
	world := make([]int, len(ranks))
	for i, r := range ranks {
		world[i] = g.ranks[r]
	}
	if len(ranks) == 1 {
		return g.w.newGroup(nil, world, mine)
	}
	host, err := g.host.Split(ranks)
	if err != nil {
		g.Abort(err) // others wait for this rank
		return nil, err
	}
	sub, err := g.w.newGroup(host, world, mine)
	if err != nil {
		return nil, errors.Join(err, host.Close())
	}
	return sub, nil
}

// Close ends the communicator. What it has in NCCL ends with the world, because the other
// ranks may still have calls in flight. That of all ranks waits for the calls in flight and
// for the other ranks to close theirs.
func (g *group) Close() error {
	g.leave()
	if g == g.w.root {
		return g.w.close()
	}
	return nil
}

// leave has the audit tell the other ranks that this one closes the communicator, once its
// calls have ended. A rank that has made one more call aborts the communicator then, which
// ends those in flight, too.
func (g *group) leave() {
	g.w.order.mu.Lock()
	defer g.w.order.mu.Unlock()
	g.mu.Lock()
	if g.quit {
		g.mu.Unlock()
		panic(fmt.Sprintf("comm: rank %d closes its communicator twice; close it once", g.ranks[g.me]))
	}
	g.quit, g.busy = true, g.made > 0
	g.wake.Broadcast()
	g.mu.Unlock()
	g.w.behind.Wait(g.w.turn)
	g.w.behind.Host(func() { // unlike a Sync it says nothing to the host, which may have more to wait for
		g.mu.Lock()
		defer g.mu.Unlock()
		g.busy = false
		g.wake.Broadcast()
	})
}

// Gather goes through the hosts.
func (g *group) Gather(b []byte) ([][]byte, error) {
	c := g.enter(letter.Signature{Kind: letter.Gather}, 0, nil, nil)
	if c == nil {
		return nil, g.Err()
	}
	g.note(c)
	if g.alone() {
		return [][]byte{slices.Clone(b)}, nil
	}
	all, err := g.host.Gather(b)
	if err != nil {
		g.lose(failureOf(err))
		return nil, g.Err()
	}
	return all, nil
}
