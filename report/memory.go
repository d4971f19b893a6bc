// This file owns memory over time: whose every byte was at which moment.

package report

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/trace"
)

// kind is what sort of memory a band of the stack is, from the bottom upwards.
type kind uint8

const (
	owner   kind = iota // the device gave it out by this name
	other               // and this without one
	group               // saved by groups of this name
	unsaved             // storages of a step that no group has saved
	unused              // held for storages, and free
	kinds
)

// The names of bands that have none of their own.
var unnamed = [kinds]string{other: "not traced", unsaved: "not saved", unused: "unused in pool"}

var tiers = [2]string{"device", "host"}

// band is one colour of the stack.
type band struct {
	tier trace.Tier
	kind kind
	name string
}

// storage is where a storage of the step under way is.
type storage struct {
	bytes [2]int64 // in each tier
	band  [2]int
	in    [2]bool // in the pool
	group string  // that saved it first
	saved bool
}

// ledger is what is in use by whom, from event to event.
// Conservation: total[t] is the sum of now over the bands of tier t.
type ledger struct {
	bands []band
	index map[band]int
	now   []int64
	total [2]int64
	owned [2]int64 // what owners hold, by their own events
	pool  [2]int64
	live  [2]int64 // storages, in the pools
	out   [2]int64 // storages in somebody else's memory
	held  map[int]*storage
	rank  string // that owners have before their names
}

func newLedger(rank int) *ledger {
	return &ledger{index: map[band]int{}, held: map[int]*storage{}, rank: "rank " + strconv.Itoa(rank) + " "}
}

// add changes a band.
func (l *ledger) add(tier trace.Tier, k kind, name string, n int64) int {
	b := band{tier, k, name}
	i, ok := l.index[b]
	if !ok {
		i = len(l.bands)
		l.index[b], l.bands, l.now = i, append(l.bands, b), append(l.now, 0)
	}
	l.change(i, n)
	return i
}

func (l *ledger) change(i int, n int64) {
	l.now[i] += n
	l.total[l.bands[i].tier] += n
}

// clear forgets everything.
func (l *ledger) clear() {
	clear(l.now)
	clear(l.held)
	l.total, l.owned, l.pool, l.live, l.out = [2]int64{}, [2]int64{}, [2]int64{}, [2]int64{}, [2]int64{}
}

// take follows one event.
func (l *ledger) take(m moment) {
	switch {
	case m.Event == nil:
		l.clear()
	case owned(m.Event):
		l.own(m.Event)
	case m.What == trace.Begin || m.What == trace.End:
		for id := range l.held {
			l.leave(id, trace.Device)
			l.leave(id, trace.Host)
		}
		clear(l.held)
	case m.Storage <= 0:
	case m.What == trace.Alloc:
		l.enter(m.Event)
	case m.What == trace.Free:
		l.leave(m.Storage, m.Tier)
	case m.What == trace.Save:
		l.save(m.Event)
	}
}

// own follows memory that the device gave out or got back. What it says is in use beyond
// what the events before said is there too, under no name: a trace may begin late.
func (l *ledger) own(e *trace.Event) {
	n, t := e.Bytes, e.Tier
	if e.What == trace.Free {
		n = -n
	}
	name := strings.TrimPrefix(e.Name, l.rank)
	if name == t.Pool() {
		l.pool[t] += n
		l.settle(t)
	} else {
		l.add(t, owner, name, n)
	}
	l.owned[t] += n
	rest := max(0, e.InUse[t]-l.owned[t])
	l.add(t, other, unnamed[other], rest-l.of(t, other))
}

// of is what a band without a name of its own has now.
func (l *ledger) of(t trace.Tier, k kind) int64 {
	if i, ok := l.index[band{t, k, unnamed[k]}]; ok {
		return l.now[i]
	}
	return 0
}

// settle finds what of a pool is free.
func (l *ledger) settle(t trace.Tier) {
	l.add(t, unused, unnamed[unused], max(0, l.pool[t]-l.live[t])-l.of(t, unused))
}

// enter gives a storage a place in a tier. One without an offset in the pool lies in
// memory of somebody else's.
func (l *ledger) enter(e *trace.Event) {
	s := l.held[e.Storage]
	if s == nil {
		s = &storage{}
		l.held[e.Storage] = s
	}
	l.leave(e.Storage, e.Tier)
	s.bytes[e.Tier], s.in[e.Tier] = e.Bytes, e.Offset >= 0
	switch {
	case s.saved:
		s.band[e.Tier] = l.add(e.Tier, group, s.group, e.Bytes)
	default:
		s.band[e.Tier] = l.add(e.Tier, unsaved, unnamed[unsaved], e.Bytes)
	}
	l.moved(e.Tier, s.in[e.Tier], e.Bytes)
}

// moved counts the bytes of storages, which are part of a pool or beside it.
func (l *ledger) moved(t trace.Tier, in bool, n int64) {
	if !in {
		l.out[t] += n
		return
	}
	l.live[t] += n
	l.settle(t)
}

// leave takes a storage's place away.
func (l *ledger) leave(id int, t trace.Tier) {
	s := l.held[id]
	if s == nil || s.bytes[t] == 0 {
		return
	}
	n := s.bytes[t]
	s.bytes[t] = 0
	l.change(s.band[t], -n)
	l.moved(t, s.in[t], -n)
}

// save gives a storage to the group that saves it first.
func (l *ledger) save(e *trace.Event) {
	s := l.held[e.Storage]
	if s == nil {
		s = &storage{}
		l.held[e.Storage] = s
	}
	if s.saved {
		return
	}
	s.saved, s.group = true, e.Name
	for t, n := range s.bytes {
		if n > 0 {
			l.change(s.band[t], -n)
			s.band[t] = l.add(trace.Tier(t), group, e.Name, n)
		}
	}
}

// memory makes the chart of a timeline, and finds its peak.
func memory(l *timeline, rank, samples int) (m Memory, at int64) {
	book := newLedger(rank)
	s := newSampler(book, l, samples)
	for _, x := range l.memory {
		s.take(x)
	}
	s.finish()
	m = Memory{Time: []float64{}, Series: []Series{}, Events: len(l.memory)}
	for _, t := range s.times {
		m.Time = append(m.Time, millis(t))
	}
	m.Series = stack(book.bands, s.states)
	m.Peak = Peak{Time: millis(s.peak.at), Bytes: s.peak.size[0], Host: s.host}
	if len(l.steps) > 0 {
		m.Peak.Step = l.steps[l.stepAt(s.peak.at)].step
	}
	return m, s.peak.at
}

// most is how many bands of owners, and of groups, a tier has; the smallest of more
// become one.
const most = 12

// stack makes series of states, bottom first: owners, the largest first, then groups,
// then what no group saved, then what is free.
func stack(bands []band, states [][]int64) []Series {
	peaks := make([]int64, len(bands))
	for _, state := range states {
		for i, n := range state {
			peaks[i] = max(peaks[i], n)
		}
	}
	order := make([]int, 0, len(bands))
	for i := range bands {
		if peaks[i] != 0 {
			order = append(order, i)
		}
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(bands[a].tier, bands[b].tier), cmp.Compare(bands[a].kind, bands[b].kind), cmp.Compare(peaks[b], peaks[a]))
	})
	out := []Series{}
	seen := map[band]int{} // by tier and kind
	for _, i := range order {
		b := bands[i]
		sort := band{tier: b.tier, kind: b.kind}
		seen[sort]++
		if seen[sort] <= most {
			out = append(out, Series{Tier: tiers[b.tier], Name: b.name, Saved: b.kind == group, Bytes: make([]int64, len(states))})
		}
		s := &out[len(out)-1]
		if seen[sort] > most {
			s.Name = "others"
		}
		for k, state := range states {
			if i < len(state) {
				s.Bytes[k] += state[i]
			}
		}
	}
	return out
}
