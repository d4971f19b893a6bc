// This file owns ranks in one process: it makes their communicators and implements the
// calls, which check their arguments and then meet the calls of the other ranks.

package comm

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Options configures ranks in one process.
type Options struct {
	// Patience is how long a rank waits for others in a call before the communicator
	// fails. Zero means for ever.
	Patience time.Duration

	scratch memory.Bytes // of a rank, for more sources than a launch takes
}

// NewLocal makes a communicator of ranks in one process. Rank i works on device i. Ranks
// may share a device. All devices must be of one kind and able to access each other's
// memory, as GPUs are that were opened with each other as peers.
//
// Each rank is a goroutine of the caller. A call waits on the host until the ranks that it
// concerns have made theirs; the last one issues the work of all. It never waits for a
// device: only events order the work on the streams.
//
// Reductions are deterministic: they combine elements in the order of ranks, in fp32, and
// round once at the end, whatever the timing and the number of threads. A maximum is a NaN
// if any element is.
func NewLocal(devs []device.Device, o Options) ([]Comm, error) {
	return newWorld(devs, ranksBelow(len(devs)), o)
}

// NewPartial is NewLocal for some ranks of a world, and returns their communicators in the
// order of ranks. Rank i is present if devs[i] is not nil. Forecasts use it: present ranks
// allocate and issue what they would with all ranks, but nothing waits for absent ranks.
// In a collective, an absent rank i is taken to call what rank like[i] calls, which must be
// present, or else what the first present rank of the group calls. So present ranks read
// its data instead, and an AllReduce gives zeros. Messages pass between present ranks only.
func NewPartial(devs []device.Device, like []int) ([]Comm, error) {
	if len(like) != len(devs) {
		panic(fmt.Sprintf("comm: %d devices and %d ranks to be like; give one of each for every rank", len(devs), len(like)))
	}
	return newWorld(devs, like, Options{})
}

func newWorld(devs []device.Device, like []int, o Options) ([]Comm, error) {
	if len(devs) == 0 || o.Patience < 0 {
		return nil, fmt.Errorf("comm: expected at least one device and a Patience of zero or more, got %d devices and %v; give one device for each rank, and zero to wait for ever", len(devs), o.Patience)
	}
	w := &world{devs: devs, like: like, o: o, groups: map[*group]struct{}{}, driven: make([]driven, len(devs))}
	g, err := w.newGroup(ranksBelow(len(devs)))
	if err != nil {
		return nil, err
	}
	var all []Comm
	for _, r := range g.here {
		all = append(all, &Local{g, r})
	}
	return all, nil
}

func ranksBelow(n int) []int {
	rs := make([]int, n)
	for i := range rs {
		rs[i] = i
	}
	return rs
}

// world is the state that all communicators of the same ranks share.
type world struct {
	devs     []device.Device // nil for a rank that is absent
	like     []int           // by rank: the rank whose calls stand for those of an absent one
	o        Options
	failed   atomic.Pointer[Failure]
	lockstep atomic.Pointer[lockstep]
	driven   []driven // by rank

	mu     sync.Mutex // taken before a group's
	groups map[*group]struct{}
	splits []*split
}

// split is a communicator that only some of its ranks have received so far.
type split struct {
	parent *group
	ranks  []int
	taken  []bool
	g      *group
	err    error
}

// Local is one rank's end of a group of ranks in one process.
type Local struct {
	g    *group
	rank int
}

var _ Comm = (*Local)(nil)

func (c *Local) Rank() int { return c.rank }
func (c *Local) Size() int { return len(c.g.calls) }

// Split does not wait for other ranks. The first rank that calls it makes the
// communicator. The i-th call of each rank with a list returns its end of the i-th one.
func (c *Local) Split(ranks []int) (Comm, error) {
	mine := c.caller().Split(ranks)
	w := c.g.w
	w.mu.Lock()
	defer w.mu.Unlock()
	i := slices.IndexFunc(w.splits, func(s *split) bool {
		return s.parent == c.g && slices.Equal(s.ranks, ranks) && !s.taken[mine]
	})
	if i < 0 {
		i = len(w.splits)
		s := &split{parent: c.g, ranks: slices.Clone(ranks), taken: make([]bool, len(ranks))}
		world := make([]int, len(ranks))
		for k, r := range ranks {
			world[k] = c.g.ranks[r]
			s.taken[k] = w.devs[world[k]] == nil
		}
		s.g, s.err = w.groupOf(world)
		w.splits = append(w.splits, s)
	}
	s := w.splits[i]
	s.taken[mine] = true
	if !slices.Contains(s.taken, false) {
		w.splits = slices.Delete(w.splits, i, i+1)
	}
	if s.err != nil {
		return nil, s.err
	}
	return &Local{s.g, mine}, nil
}

func (w *world) newGroup(ranks []int) (*group, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.groupOf(ranks)
}

// Abort makes all communicators of the same ranks fail.
func (c *Local) Abort(err error) {
	rank := c.g.ranks[c.rank]
	c.g.w.fail(rank, fmt.Errorf("rank %d gave up: %w", rank, err))
}

// fail keeps the first failure and wakes all ranks. The caller holds no lock.
func (w *world) fail(by int, err error) {
	w.failed.CompareAndSwap(nil, &Failure{By: by, Err: err})
	w.wakeAll()
}

// wakeAll wakes the ranks of all groups.
func (w *world) wakeAll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for g := range w.groups {
		g.mu.Lock()
		g.wake.Broadcast()
		g.mu.Unlock()
	}
}

func (c *Local) Err() error {
	c.g.mu.Lock()
	defer c.g.mu.Unlock()
	if f := c.g.lost[c.rank]; f != nil {
		return f
	}
	if f := c.g.w.failed.Load(); f != nil {
		return &Failure{Rank: c.g.ranks[c.rank], By: f.By, Err: f.Err}
	}
	return nil
}

// Close releases what the communicator holds when the last rank has closed it.
func (c *Local) Close() error {
	g := c.g
	g.mu.Lock()
	if slices.Contains(g.quit, c.rank) {
		g.mu.Unlock()
		panic(fmt.Sprintf("comm: rank %d closes its communicator twice; close it once", g.ranks[c.rank]))
	}
	g.quit = append(g.quit, c.rank)
	last := len(g.quit) == len(g.here)
	g.wake.Broadcast()
	g.mu.Unlock()
	if !last {
		return nil
	}
	g.w.mu.Lock()
	delete(g.w.groups, g)
	g.w.mu.Unlock()
	return g.release()
}

func (c *Local) AllGather(s device.Stream, dst, src device.Range) {
	c.caller().AllGather(s, dst, src)
	c.g.meet(c.rank, call{sig: sig{kind: allGather, bytes: src.Len}, s: s, dst: dst, src: src})
}

func (c *Local) ReduceScatter(s device.Stream, dst, src device.Range, t Type, op Op) {
	c.caller().ReduceScatter(s, dst, src, t, op)
	c.g.meet(c.rank, call{sig: sig{kind: reduceScatter, bytes: dst.Len, t: t, op: op}, s: s, dst: dst, src: src})
}

func (c *Local) AllReduce(s device.Stream, dst, src device.Range, t Type, op Op) {
	c.caller().AllReduce(s, dst, src, t, op)
	c.g.meet(c.rank, call{sig: sig{kind: allReduce, bytes: dst.Len, t: t, op: op}, s: s, dst: dst, src: src})
}

func (c *Local) AllToAll(s device.Stream, dst, src device.Range) {
	c.caller().AllToAll(s, dst, src)
	c.g.meet(c.rank, call{sig: sig{kind: allToAll, bytes: src.Len / memory.Bytes(c.Size())}, s: s, dst: dst, src: src})
}

func (c *Local) AllToAllV(s device.Stream, dst, src device.Range, send, recv []Part) {
	c.caller().AllToAllV(s, dst, src, send, recv)
	c.g.meet(c.rank, call{sig: sig{kind: allToAllV}, s: s, dst: dst, src: src, send: send, recv: recv})
}

func (c *Local) Broadcast(s device.Stream, r device.Range, root int) {
	c.caller().Broadcast(s, r, root)
	c.g.meet(c.rank, call{sig: sig{kind: broadcast, bytes: r.Len, root: root}, s: s, dst: r})
}

func (c *Local) Barrier(s device.Stream) {
	c.caller().Barrier(s)
	c.g.meet(c.rank, call{sig: sig{kind: barrier}, s: s})
}

func (c *Local) Gather(b []byte) ([][]byte, error) {
	g := c.g
	g.mu.Lock()
	defer g.unlock()
	g.enter(c.rank, call{sig: sig{kind: gather}, said: slices.Clone(b)})
	g.attend(c.rank)
	if f := g.lost[c.rank]; f != nil {
		return nil, f
	}
	return slices.Clone(g.heard), nil
}

// caller returns what checks the rank's calls.
func (c *Local) caller() Caller {
	return Caller{Rank: c.rank, Size: len(c.g.ranks), World: c.g.ranks[c.rank]}
}

// release closes the events and frees the scratch memory.
func (g *group) release() (err error) {
	for _, t := range g.timers {
		t.Stop()
	}
	for _, e := range g.events {
		if e != nil {
			err = errors.Join(err, e.Close())
		}
	}
	for _, x := range g.reducers {
		if x != nil {
			err = errors.Join(err, x.Close())
		}
	}
	return err
}
