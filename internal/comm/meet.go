// This file owns how calls meet. Every rank enters its call. The rank that completes a
// collective or a pair compares the calls, issues the work of all of them and lets the
// others return.

package comm

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
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
	gather
	beginCapture
	endCapture
	replay
	send
	recv
	exchange
)

func (k kind) String() string {
	return [...]string{"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "all-to-all-v", "broadcast", "barrier", "gather", "begin-capture", "end-capture", "replay", "send", "receive", "exchange"}[k]
}

// pair reports whether the call passes messages between two ranks. Other calls concern all
// ranks.
func (k kind) pair() bool { return k >= send }

// sig is the part of a call that must be the same on all ranks.
type sig struct {
	kind  kind
	t     Type
	op    Op
	root  int
	bytes memory.Bytes
	graph *together
}

// call is one rank's call while it waits for the calls of others.
type call struct {
	sig
	waiting    bool
	s          device.Stream
	dst, src   device.Range
	send, recv []Part
	said       []byte // of a gather
	since      time.Time
}

// group is the state of a communicator's ranks. A rank waits in at most one call. It
// returns when the call is issued or can never be issued.
type group struct {
	w        *world
	ranks    []int          // numbered as in the world
	here     []int          // the ranks that are present, which are all but in forecasts
	absent   []absentee     // the others
	events   []device.Event // one for each rank; always waited for before it is recorded again
	timers   []*time.Timer  // one for each rank, if Patience is limited
	sources  []device.Range // of the reduction being issued
	reducers []*Reducer     // one for each rank

	mu    sync.Mutex
	wake  sync.Cond
	calls []call
	ends  [][]end    // by rank, of the messages in its call
	moves []move     // of the call being issued
	heard [][]byte   // what the ranks said in the last gather
	joint *together  // the capture that was begun last
	made  []uint64   // by rank: the number of its calls, for errors
	quit  []int      // ranks that have closed, in order
	lost  []*Failure // by rank: why its call was not made
	wrong string     // what the ranks do not agree on
	other bool       // unlock must wake other groups
}

// absentee is a rank that is absent, and the present rank whose calls stand for its own.
type absentee struct{ rank, like int }

// groupOf makes a group. The caller holds the world's lock.
func (w *world) groupOf(ranks []int) (*group, error) {
	n := len(ranks)
	g := &group{
		w: w, ranks: ranks, sources: make([]device.Range, n),
		events: make([]device.Event, n), reducers: make([]*Reducer, n), calls: make([]call, n), ends: make([][]end, n), made: make([]uint64, n), lost: make([]*Failure, n),
	}
	g.wake.L = &g.mu
	for r, rank := range ranks {
		if w.devs[rank] == nil {
			continue
		}
		g.here = append(g.here, r)
		var err error
		if g.events[r], err = w.devs[rank].NewEvent(0); err != nil {
			_ = g.release()
			return nil, err
		}
		if w.o.Patience > 0 {
			t := time.AfterFunc(time.Hour, func() { g.timeOut(r) })
			t.Stop()
			g.timers = append(g.timers, t)
		}
	}
	for r, rank := range ranks {
		if w.devs[rank] == nil {
			g.absent = append(g.absent, absentee{r, max(g.here[0], slices.Index(ranks, w.like[rank]))})
			continue
		}
		var err error
		if g.reducers[r], err = NewReducer(w.devs[rank], n, w.o.scratch); err != nil {
			_ = g.release()
			return nil, err
		}
	}
	w.groups[g] = struct{}{}
	return g, nil
}

// name describes a rank's call.
func (g *group) name(r int) string {
	c := &g.calls[r]
	s := fmt.Sprintf("%v #%d", c.kind, g.made[r])
	switch c.kind {
	case reduceScatter, allReduce:
		s += fmt.Sprintf(" of %d bytes (%v, %v)", c.bytes, c.t, c.op)
	case barrier, gather, beginCapture, endCapture, replay, allToAllV:
	case send, recv, exchange:
		s += g.messages(r)
	case broadcast:
		s += fmt.Sprintf(" of %d bytes from rank %d", c.bytes, g.ranks[c.root])
	default:
		s += fmt.Sprintf(" of %d bytes a rank", c.bytes)
	}
	return s
}

// meet makes a rank's call of all ranks. It returns when the work is issued, or can never
// be issued.
func (g *group) meet(r int, c call) {
	g.mu.Lock()
	defer g.unlock()
	g.enter(r, c)
	g.attend(r)
}

// enter records a rank's call. It panics if the rank has closed the communicator or waits
// in another call.
func (g *group) enter(r int, c call) {
	if slices.Contains(g.quit, r) {
		panic(fmt.Sprintf("comm: %v is called on rank %d after it closed the communicator", c.kind, g.ranks[r]))
	}
	if g.calls[r].waiting {
		panic(fmt.Sprintf("comm: %v is called on rank %d, which waits in %s; a rank makes one call at a time", c.kind, g.ranks[r], g.name(r)))
	}
	c.waiting = true
	g.calls[r] = c
	g.made[r]++
}

// attend issues the work that a rank's call completes, or waits until another rank's call
// completes it.
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

// unlock releases the group's lock and then wakes other groups, which needs the world's
// lock, if a rank gave up.
func (g *group) unlock() {
	other := g.other
	g.other = false
	g.mu.Unlock()
	if other {
		g.w.wakeAll()
	}
}

// await waits until the rank's call is issued or can never be.
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
			g.giveUp(g.ranks[r], fmt.Errorf("rank %d waits in %s, and no other rank can go on", g.ranks[r], g.name(r)))
		}
	}
	c.waiting = false
	if l != nil {
		l.idle = 0
	}
}

// giveUp makes the world fail while the group's lock is held. unlock wakes all ranks.
func (g *group) giveUp(by int, err error) {
	g.w.failed.CompareAndSwap(nil, &Failure{By: by, Err: err})
	g.other = true
}

// hopeless returns why a rank's call can never be issued, or nil.
func (g *group) hopeless(r int) *Failure {
	if f := g.w.failed.Load(); f != nil {
		return f
	}
	for _, p := range g.quit {
		if g.needs(r, p) {
			return &Failure{By: g.ranks[p], Err: fmt.Errorf("rank %d has closed the communicator", g.ranks[p])}
		}
	}
	for _, p := range g.here {
		rank := g.ranks[p]
		if g.w.driven[rank].back.Load() && g.needs(r, p) && !g.calls[p].waiting {
			g.giveUp(rank, fmt.Errorf("the function of rank %d has returned", rank))
			return g.w.failed.Load()
		}
	}
	return nil
}

// needs reports whether the call of rank r needs a call of rank p.
func (g *group) needs(r, p int) bool {
	if g.calls[r].kind.pair() {
		return g.open(r, p)
	}
	return p != r
}

// timeOut gives up for a rank that has waited longer than Patience.
func (g *group) timeOut(r int) {
	g.mu.Lock()
	defer g.unlock()
	c := &g.calls[r]
	if waited := time.Since(c.since); c.waiting && waited >= g.w.o.Patience {
		a := &Absent{Rank: g.ranks[r], Call: g.name(r), Waited: g.w.o.Patience}
		for _, p := range g.here {
			there := g.calls[p].waiting && !g.calls[p].kind.pair() // in the same collective
			if g.needs(r, p) && !there {
				a.Ranks = append(a.Ranks, g.ranks[p])
			}
		}
		g.giveUp(g.ranks[r], a)
	}
}

// agree compares a rank's call with the calls that others wait in. Calls that can never
// meet are a programmer's error and make every rank panic.
func (g *group) agree(r int) bool {
	c := &g.calls[r]
	if c.kind.pair() && !g.match(r) {
		return false
	}
	for _, p := range g.here {
		o := &g.calls[p]
		if p == r || !o.waiting {
			continue
		}
		ok := c.sig == o.sig
		if c.kind.pair() || o.kind.pair() { // neither goes on before the other
			ok = !g.needs(r, p) || !g.needs(p, r)
		}
		if !ok {
			g.disagree("comm: rank %d calls %s, but rank %d calls %s; make the same calls in the same order on all ranks", g.ranks[r], g.name(r), g.ranks[p], g.name(p))
			return false
		}
	}
	return true
}

// disagree makes every rank of the group panic, and calls of other groups fail.
func (g *group) disagree(format string, args ...any) {
	g.wrong = fmt.Sprintf(format, args...)
	g.giveUp(g.ranks[0], fmt.Errorf("ranks do not agree: %s", g.wrong))
}

// complete reports whether there is work to issue.
func (g *group) complete(r int) bool {
	if g.calls[r].kind.pair() {
		return len(g.moves) > 0
	}
	for _, p := range g.here {
		if !g.calls[p].waiting {
			return false
		}
	}
	return true
}

// concerns reports whether rank p takes part in what the call of rank r issues.
func (g *group) concerns(r, p int) bool {
	return !g.calls[r].kind.pair() || slices.ContainsFunc(g.moves, func(m move) bool { return m.from == p || m.to == p })
}

// issue puts the work of a complete call on the streams and lets its ranks return. No rank
// keeps waiting if that panics, for example on a closed stream.
func (g *group) issue(r int) {
	if g.calls[r].kind != gather && g.capturesPartly(r) {
		return
	}
	done := false
	defer func() {
		if !done {
			g.calls[r].waiting = false
			g.giveUp(g.ranks[r], fmt.Errorf("rank %d panicked in %s", g.ranks[r], g.name(r)))
		}
	}()
	for _, a := range g.absent {
		g.calls[a.rank] = g.calls[a.like]
	}
	g.work(r)
	done = true
	pair := g.calls[r].kind.pair()
	for _, p := range g.here {
		if g.concerns(r, p) && (!pair || g.passed(p)) {
			g.calls[p] = call{sig: g.calls[p].sig}
		}
	}
	g.moves = g.moves[:0]
	g.wake.Broadcast()
}

// capturesPartly reports whether only some streams of a call are being captured. Events
// would draw the others into the capture.
func (g *group) capturesPartly(r int) bool {
	with, without := -1, -1
	for _, p := range g.here {
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
		g.disagree("comm: in %s, the stream of rank %d is being captured and that of rank %d is not; make the streams of all ranks join one capture", g.name(r), g.ranks[with], g.ranks[without])
		return true
	}
	return false
}
