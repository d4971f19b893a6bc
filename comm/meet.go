// This file owns how calls find each other. Every rank puts its call down; the
// one that completes a collective or a pair compares the calls, issues the work of
// all of them and lets the others go.

package comm

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/device"
)

type kind uint8

const (
	allGather kind = iota
	reduceScatter
	allReduce
	allToAll
	allToAllV
	broadcast
	barrier
	send
	recv
	exchange
)

func (k kind) String() string {
	return [...]string{"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "all-to-all-v", "broadcast", "barrier", "send", "receive", "exchange"}[k]
}

// pair tells whether the call passes messages between two ranks each, and is not
// one of all ranks.
func (k kind) pair() bool { return k >= send }

// sig is what must be the same on all ranks.
type sig struct {
	kind  kind
	t     Type
	op    Op
	root  int
	bytes device.Bytes
}

// call is one rank's call while it waits for the others'.
type call struct {
	sig
	waiting    bool
	s          device.Stream
	dst, src   device.Range
	send, recv []Part
	since      time.Time
}

// group is the ranks of a communicator. A rank waits in at most one call, and
// leaves it once the call is issued or cannot be any more.
type group struct {
	w       *world
	ranks   []int          // as the world numbers them
	events  []device.Event // one a rank: a mark is waited for before it is made anew
	timers  []*time.Timer  // one a rank, if there is a limit to patience
	sources []device.Range // of the reduction being issued
	some    []device.Range // those of one of its launches, if it needs several
	rests   map[restKey][]device.Access
	scratch scratch

	mu    sync.Mutex
	wake  sync.Cond
	calls []call
	ends  [][]end    // by rank, of the messages in its call
	moves []move     // of the call being issued
	made  []uint64   // calls of each rank, for messages
	quit  []int      // ranks that have closed, the first one first
	lost  []*Failure // of ranks whose calls were not made
	wrong string     // what the ranks do not agree on
	other bool       // other groups are to be woken up
}

// groupOf makes a group; the caller holds the world's lock.
func (w *world) groupOf(ranks []int) (*group, error) {
	n := len(ranks)
	g := &group{
		w: w, ranks: ranks, sources: make([]device.Range, n), rests: map[restKey][]device.Access{},
		calls: make([]call, n), ends: make([][]end, n), made: make([]uint64, n), lost: make([]*Failure, n),
	}
	g.wake.L = &g.mu
	for r, rank := range ranks {
		e, err := w.devs[rank].NewEvent(0)
		if err != nil {
			_ = g.release()
			return nil, err
		}
		g.events = append(g.events, e)
		if w.o.Patience > 0 {
			t := time.AfterFunc(time.Hour, func() { g.tired(r) })
			t.Stop()
			g.timers = append(g.timers, t)
		}
	}
	if err := g.newScratch(); err != nil {
		_ = g.release()
		return nil, err
	}
	w.groups[g] = struct{}{}
	return g, nil
}

// name is a rank's call in words.
func (g *group) name(r int) string {
	c := &g.calls[r]
	s := fmt.Sprintf("%v #%d", c.kind, g.made[r])
	switch c.kind {
	case reduceScatter, allReduce:
		s += fmt.Sprintf(" of %d bytes (%v, %v)", c.bytes, c.t, c.op)
	case barrier, allToAllV:
	case send, recv, exchange:
		s += g.messages(r)
	case broadcast:
		s += fmt.Sprintf(" of %d bytes from rank %d", c.bytes, g.ranks[c.root])
	default:
		s += fmt.Sprintf(" of %d bytes a rank", c.bytes)
	}
	return s
}

// meet makes a rank's call of all ranks: it comes back when their work is issued,
// or will never be.
func (g *group) meet(r int, c call) {
	g.mu.Lock()
	defer g.unlock()
	g.enter(r, c)
	g.attend(r)
}

// enter puts a rank's call down.
func (g *group) enter(r int, c call) {
	if slices.Contains(g.quit, r) {
		panic(fmt.Sprintf("comm: %v on rank %d after it closed the communicator", c.kind, g.ranks[r]))
	}
	if g.calls[r].waiting {
		panic(fmt.Sprintf("comm: %v on rank %d, which waits in %s; a rank makes one call at a time", c.kind, g.ranks[r], g.name(r)))
	}
	c.waiting = true
	g.calls[r] = c
	g.made[r]++
}

// attend issues what a rank's call completes, and waits for what it does not.
func (g *group) attend(r int) {
	l := g.w.lockstep.Load()
	if l != nil {
		l.idle = 0
	}
	if g.hopeless(r) == nil && g.agree(r) && g.complete(r) {
		g.issue(r)
	}
	if g.calls[r].waiting {
		g.await(r, l)
	}
	if g.wrong != "" {
		panic(g.wrong)
	}
}

// unlock passes news on to other groups; that takes the world's lock first.
func (g *group) unlock() {
	other := g.other
	g.other = false
	g.mu.Unlock()
	if other {
		g.w.rouse()
	}
}

// await waits until the rank's call is issued or hopeless.
func (g *group) await(r int, l *lockstep) {
	c := &g.calls[r]
	if g.timers != nil && l == nil {
		c.since = time.Now()
		g.timers[r].Reset(g.w.o.Patience)
	}
	for c.waiting && g.wrong == "" {
		if why := g.hopeless(r); why != nil {
			if g.lost[r] == nil {
				g.lost[r] = &Failure{Rank: g.ranks[r], Call: g.name(r), By: why.By, Err: why.Err}
			}
			break
		}
		if l == nil {
			g.wake.Wait()
			continue
		}
		g.mu.Unlock()
		stuck := !l.yield(g.ranks[r])
		g.mu.Lock()
		if stuck && c.waiting {
			g.giveUp(g.ranks[r], fmt.Errorf("rank %d waits in %s and no other rank can go on", g.ranks[r], g.name(r)))
		}
	}
	c.waiting = false
	if l != nil {
		l.idle = 0
	}
}

// giveUp makes the world fail with the group's lock held; unlock wakes everybody.
func (g *group) giveUp(by int, err error) {
	g.w.failed.CompareAndSwap(nil, &Failure{By: by, Err: err})
	g.other = true
}

// hopeless says why a rank's call can never be issued, or nil.
func (g *group) hopeless(r int) *Failure {
	if f := g.w.failed.Load(); f != nil {
		return f
	}
	for _, p := range g.quit {
		if g.needs(r, p) {
			return &Failure{By: g.ranks[p], Err: fmt.Errorf("rank %d has closed the communicator", g.ranks[p])}
		}
	}
	for p, rank := range g.ranks {
		if g.w.driven[rank].back.Load() && g.needs(r, p) && !g.calls[p].waiting {
			g.giveUp(rank, fmt.Errorf("the function of rank %d has returned", rank))
			return g.w.failed.Load()
		}
	}
	return nil
}

// needs tells whether a rank's call needs one of another rank.
func (g *group) needs(r, p int) bool {
	if g.calls[r].kind.pair() {
		return g.open(r, p)
	}
	return p != r
}

// tired gives up for a rank that has waited too long.
func (g *group) tired(r int) {
	g.mu.Lock()
	defer g.unlock()
	c := &g.calls[r]
	if waited := time.Since(c.since); c.waiting && waited >= g.w.o.Patience {
		a := &Absent{Rank: g.ranks[r], Call: g.name(r), Waited: g.w.o.Patience}
		for p := range g.calls {
			there := g.calls[p].waiting && !g.calls[p].kind.pair() // in the same collective
			if g.needs(r, p) && !there {
				a.Ranks = append(a.Ranks, g.ranks[p])
			}
		}
		g.giveUp(g.ranks[r], a)
	}
}

// agree compares a rank's call with those that others wait in. Calls that can
// never meet are a programmer's error, on every rank.
func (g *group) agree(r int) bool {
	c := &g.calls[r]
	if c.kind.pair() && !g.match(r) {
		return false
	}
	for p := range g.calls {
		o := &g.calls[p]
		if p == r || !o.waiting {
			continue
		}
		ok := c.sig == o.sig
		if c.kind.pair() || o.kind.pair() { // neither goes on before the other
			ok = !g.needs(r, p) || !g.needs(p, r)
		}
		if !ok {
			g.disagree("comm: rank %d calls %s where rank %d calls %s; all ranks make the same calls in the same order", g.ranks[r], g.name(r), g.ranks[p], g.name(p))
			return false
		}
	}
	return true
}

// disagree makes every rank of the group panic, and calls of others hopeless.
func (g *group) disagree(format string, args ...any) {
	g.wrong = fmt.Sprintf(format, args...)
	g.giveUp(g.ranks[0], fmt.Errorf("ranks do not agree: %s", g.wrong))
}

// complete tells whether there is something to issue.
func (g *group) complete(r int) bool {
	if g.calls[r].kind.pair() {
		return len(g.moves) > 0
	}
	for p := range g.calls {
		if !g.calls[p].waiting {
			return false
		}
	}
	return true
}

// concerns tells whether a rank takes part in what the call of another issues.
func (g *group) concerns(r, p int) bool {
	return !g.calls[r].kind.pair() || slices.ContainsFunc(g.moves, func(m move) bool { return m.from == p || m.to == p })
}

// issue puts the work of a complete call on the streams and lets its ranks go. If
// that panics, on a closed stream for instance, nobody is left waiting.
func (g *group) issue(r int) {
	if g.capturesPartly(r) {
		return
	}
	done := false
	defer func() {
		if !done {
			g.calls[r].waiting = false
			g.giveUp(g.ranks[r], fmt.Errorf("rank %d panicked in %s", g.ranks[r], g.name(r)))
		}
	}()
	g.work(r)
	done = true
	pair := g.calls[r].kind.pair()
	for p := range g.calls {
		if g.concerns(r, p) && (!pair || g.passed(p)) {
			g.calls[p] = call{sig: g.calls[p].sig}
		}
	}
	g.moves = g.moves[:0]
	g.wake.Broadcast()
}

// capturesPartly finds streams of a call of which some capture and some do not:
// events would draw the others into the capture.
func (g *group) capturesPartly(r int) bool {
	with, without := -1, -1
	for p := range g.calls {
		if !g.concerns(r, p) {
			continue
		}
		if g.calls[p].s.Capturing() {
			with = p
		} else {
			without = p
		}
	}
	if with >= 0 && without >= 0 {
		g.disagree("comm: in %s the stream of rank %d captures and that of rank %d does not; let all ranks' streams join one capture", g.name(r), g.ranks[with], g.ranks[without])
		return true
	}
	return false
}
