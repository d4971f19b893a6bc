// This file owns ranks in one process: making communicators of them, and the
// calls, which check what they are given and then meet the other ranks' calls.

package comm

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stowage-dev/stowage/device"
)

// Options configure ranks in one process.
type Options struct {
	// Patience is how long a rank waits in a call for the others before it gives
	// up for all; zero stands for ever.
	Patience time.Duration

	scratch device.Bytes // of a rank, for more sources than a launch takes
}

// NewLocal makes a communicator of ranks in one process. Rank i works on device
// i; ranks may share a device, and all devices must be of one kind and reach each
// other's memory.
//
// Each rank is a goroutine of the caller. A call waits, on the host, until the
// ranks it concerns have made theirs; the last one issues the work of all. It
// never waits for a device: on the streams only events order the work.
//
// Reductions are deterministic: elements are combined in the order of ranks, in
// fp32, and rounded once at the end, whatever the timing and the number of threads.
// The maximum is a NaN if there is one.
func NewLocal(devs []device.Device, o Options) ([]Comm, error) {
	if len(devs) == 0 || o.Patience < 0 {
		return nil, fmt.Errorf("comm: %d devices and a patience of %v; give one device for each rank and a positive time, or zero to wait for ever", len(devs), o.Patience)
	}
	if o.scratch == 0 {
		o.scratch = device.MiB
	}
	w := &world{devs: devs, o: o, groups: map[*group]struct{}{}, driven: make([]driven, len(devs))}
	g, err := w.newGroup(ranksBelow(len(devs)))
	if err != nil {
		return nil, err
	}
	all := make([]Comm, len(devs))
	for r := range all {
		all[r] = &Local{g, r}
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

// world is what all communicators of the same ranks share.
type world struct {
	devs     []device.Device
	o        Options
	failed   atomic.Pointer[Failure]
	lockstep atomic.Pointer[lockstep]
	driven   []driven // by rank

	mu     sync.Mutex // taken before a group's
	groups map[*group]struct{}
	splits []*split
}

// split is a communicator that some of its ranks have asked for.
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

// Split does not wait: the first rank to come makes the communicator, and every
// rank's i-th call with a list gets its end of the i-th one.
func (c *Local) Split(ranks []int) (Comm, error) {
	mine := slices.Index(ranks, c.rank)
	bad := mine < 0
	for i, r := range ranks {
		bad = bad || r < 0 || r >= c.Size() || slices.Contains(ranks[:i], r)
	}
	if bad {
		panic(fmt.Sprintf("comm: rank %d splits off %v; the list names itself and others of the %d ranks, each once", c.rank, ranks, c.Size()))
	}
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

// Abort makes the world fail.
func (c *Local) Abort(err error) {
	rank := c.g.ranks[c.rank]
	c.g.w.fail(rank, fmt.Errorf("rank %d gave up: %w", rank, err))
}

// fail keeps the first failure and wakes everybody up. No lock is held.
func (w *world) fail(by int, err error) {
	w.failed.CompareAndSwap(nil, &Failure{By: by, Err: err})
	w.rouse()
}

func (w *world) rouse() {
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

// Close gives back what the communicator holds once the last rank has closed.
func (c *Local) Close() error {
	g := c.g
	g.mu.Lock()
	if slices.Contains(g.quit, c.rank) {
		g.mu.Unlock()
		panic(fmt.Sprintf("comm: rank %d closes its communicator twice", g.ranks[c.rank]))
	}
	g.quit = append(g.quit, c.rank)
	last := len(g.quit) == c.Size()
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
	c.must(allGather, s, dst, src)
	own := src.Len * device.Bytes(c.rank)
	if dst.Len != src.Len*device.Bytes(c.Size()) {
		c.misuse(allGather, "%d bytes of each rank do not fill %d bytes", src.Len, dst.Len)
	}
	if overlap(dst, src) && src.Addr() != dst.Addr()+uintptr(own) {
		c.misuse(allGather, "the source is neither the rank's own place in the destination nor apart from it")
	}
	c.g.meet(c.rank, call{sig: sig{kind: allGather, bytes: src.Len}, s: s, dst: dst, src: src})
}

func (c *Local) ReduceScatter(s device.Stream, dst, src device.Range, t Type, op Op) {
	c.must(reduceScatter, s, dst, src)
	c.numbers(reduceScatter, dst, src, t, op)
	own := dst.Len * device.Bytes(c.rank)
	if src.Len != dst.Len*device.Bytes(c.Size()) {
		c.misuse(reduceScatter, "%d bytes are not a part of %d bytes for each rank", src.Len, dst.Len)
	}
	if overlap(dst, src) && dst.Addr() != src.Addr()+uintptr(own) {
		c.misuse(reduceScatter, "the destination is neither the rank's own place in the source nor apart from it")
	}
	c.g.meet(c.rank, call{sig: sig{kind: reduceScatter, bytes: dst.Len, t: t, op: op}, s: s, dst: dst, src: src})
}

func (c *Local) AllReduce(s device.Stream, dst, src device.Range, t Type, op Op) {
	c.must(allReduce, s, dst, src)
	c.numbers(allReduce, dst, src, t, op)
	if src.Len != dst.Len {
		c.misuse(allReduce, "%d bytes cannot become %d bytes", src.Len, dst.Len)
	}
	if overlap(dst, src) && dst.Addr() != src.Addr() {
		c.misuse(allReduce, "the two ranges are neither the same nor apart")
	}
	c.g.meet(c.rank, call{sig: sig{kind: allReduce, bytes: dst.Len, t: t, op: op}, s: s, dst: dst, src: src})
}

func (c *Local) AllToAll(s device.Stream, dst, src device.Range) {
	c.must(allToAll, s, dst, src)
	if src.Len != dst.Len || src.Len%device.Bytes(c.Size()) != 0 || overlap(dst, src) {
		c.misuse(allToAll, "%s to %s: they must be apart, of equal length, and of a part for each of %d ranks", src, dst, c.Size())
	}
	c.g.meet(c.rank, call{sig: sig{kind: allToAll, bytes: src.Len / device.Bytes(c.Size())}, s: s, dst: dst, src: src})
}

func (c *Local) AllToAllV(s device.Stream, dst, src device.Range, send, recv []Part) {
	c.must(allToAllV, s, dst, src)
	if len(send) != c.Size() || len(recv) != c.Size() || overlap(dst, src) {
		c.misuse(allToAllV, "%d parts of %s to %d parts of %s: there must be one for each of %d ranks, and the ranges apart", len(send), src, len(recv), dst, c.Size())
	}
	for i := range send {
		c.inside("send", i, send[i], src)
		c.inside("recv", i, recv[i], dst)
		for k := range i {
			if recv[i].Off < recv[k].Off+recv[k].Len && recv[k].Off < recv[i].Off+recv[i].Len {
				c.misuse(allToAllV, "the parts received from ranks %d and %d overlap", k, i)
			}
		}
	}
	c.g.meet(c.rank, call{sig: sig{kind: allToAllV}, s: s, dst: dst, src: src, send: send, recv: recv})
}

func (c *Local) Broadcast(s device.Stream, r device.Range, root int) {
	c.must(broadcast, s, r, device.Range{})
	c.member(broadcast, root)
	c.g.meet(c.rank, call{sig: sig{kind: broadcast, bytes: r.Len, root: root}, s: s, dst: r})
}

func (c *Local) Barrier(s device.Stream) {
	c.must(barrier, s, device.Range{}, device.Range{})
	c.g.meet(c.rank, call{sig: sig{kind: barrier}, s: s})
}

func (c *Local) misuse(k kind, format string, args ...any) {
	panic(fmt.Sprintf("comm: %v on rank %d: %s", k, c.g.ranks[c.rank], fmt.Sprintf(format, args...)))
}

// must panics here, on the rank that made the mistake, where issuing the work
// would panic on whichever rank came last. No memory stands for no bytes.
func (c *Local) must(k kind, s device.Stream, dst, src device.Range) {
	if s == nil {
		c.misuse(k, "there is no stream")
	}
	for _, r := range [...]device.Range{dst, src} {
		if r != (device.Range{}) {
			device.CheckAccess(device.Reads(r))
		}
	}
}

func (c *Local) numbers(k kind, dst, src device.Range, t Type, op Op) {
	if t > BF16 || op > Max {
		c.misuse(k, "%v and %v are not known", t, op)
	}
	size := t.Size()
	for _, r := range [...]device.Range{dst, src} {
		if r.Len%size != 0 || r.Len > 0 && r.Addr()%uintptr(size) != 0 {
			c.misuse(k, "%s is no run of numbers of %d bytes", r, size)
		}
	}
}

func (c *Local) member(k kind, rank int) {
	if rank < 0 || rank >= c.Size() {
		c.misuse(k, "there is no rank %d among %d", rank, c.Size())
	}
}

func (c *Local) inside(name string, i int, p Part, r device.Range) {
	if p.Off < 0 || p.Len < 0 || p.Off > r.Len-p.Len {
		c.misuse(allToAllV, "%s[%d] is bytes [%d,%d), which lie outside of %s", name, i, p.Off, p.Off+p.Len, r)
	}
}

// overlap tells whether two ranges share a byte.
func overlap(a, b device.Range) bool {
	return a.Len > 0 && b.Len > 0 && a.Addr() < b.Addr()+uintptr(b.Len) && b.Addr() < a.Addr()+uintptr(a.Len)
}

// release closes the events and frees the scratch.
func (g *group) release() (err error) {
	for _, t := range g.timers {
		t.Stop()
	}
	for _, e := range g.events {
		err = errors.Join(err, e.Close())
	}
	return errors.Join(err, g.scratch.release())
}
