// This file owns memory over time: which owner or group holds how many bytes.

package report

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// kind orders the bands of the stack, from the bottom up.
type kind uint8

const (
	owner   kind = iota // memory of an owner
	other               // memory that the device counts and no event explains
	group               // storages that groups of one name have saved
	unsaved             // storages that no group has saved
	unused              // the free part of the heaps for storages
	kinds
)

// unnamed has the names of the bands that belong to no owner or group.
var unnamed = [kinds]string{other: "not traced", unsaved: "not saved", unused: "unused in heap"}

var tiers = [2]string{"device", "host"}

// band is one band of the stack.
type band struct {
	tier memory.Kind
	kind kind
	name string
}

// storage is a storage of the current step.
type storage struct {
	bytes [2]int64 // in each tier
	band  [2]int
	in    [2]bool // whether it lies in the heap
	group string  // the group that saved it first
	saved bool
}

// ledger counts who uses how many bytes, event by event.
//
// Conservation: total[t] is the sum of now over the bands of tier t.
type ledger struct {
	bands []band
	index map[band]int
	now   []int64
	total [2]int64
	owned [2]int64 // bytes of all owners
	pool  [2]int64 // bytes of the heaps
	live  [2]int64 // bytes of storages in the heaps
	out   [2]int64 // bytes of storages in borrowed memory
	held  map[int]*storage
	rank  string // the prefix that names of owners may have
}

func newLedger(rank int) *ledger {
	return &ledger{index: map[band]int{}, held: map[int]*storage{}, rank: "rank " + strconv.Itoa(rank) + " "}
}

// add adds n bytes to a band and returns its index.
func (l *ledger) add(tier memory.Kind, k kind, name string, n int64) int {
	b := band{tier, k, name}
	i, ok := l.index[b]
	if !ok {
		i = len(l.bands)
		l.index[b], l.bands, l.now = i, append(l.bands, b), append(l.now, 0)
	}
	l.change(i, n)
	return i
}

// change adds n bytes to the band with an index.
func (l *ledger) change(i int, n int64) {
	l.now[i] += n
	l.total[l.bands[i].tier] += n
}

// clear empties the ledger.
func (l *ledger) clear() {
	clear(l.now)
	clear(l.held)
	l.total, l.owned, l.pool, l.live, l.out = [2]int64{}, [2]int64{}, [2]int64{}, [2]int64{}, [2]int64{}
}

// apply applies an event.
func (l *ledger) apply(m moment) {
	switch {
	case m.Event == nil:
		l.clear()
	case owned(m.Event):
		l.own(m.Event)
	case m.Kind == trace.Begin || m.Kind == trace.End:
		for id := range l.held {
			l.remove(id, memory.Device)
			l.remove(id, memory.Host)
		}
		clear(l.held)
	case m.Storage <= 0:
	case m.Kind == trace.Alloc:
		l.place(m.Event)
	case m.Kind == trace.Free:
		l.remove(m.Storage, m.Tier)
	case m.Kind == trace.Save:
		l.save(m.Event)
	}
}

// own applies an event about memory of an owner. A trace may begin late: bytes that the
// device has in use and no event explains go to the band "not traced".
func (l *ledger) own(e *trace.Event) {
	n, t := e.Bytes, e.Tier
	if e.Kind == trace.Free {
		n = -n
	}
	name := strings.TrimPrefix(e.Name, l.rank)
	if name == trace.HeapOwner(t) {
		l.pool[t] += n
		l.settle(t)
	} else {
		l.add(t, owner, name, n)
	}
	l.owned[t] += n
	rest := max(0, e.InUse[t]-l.owned[t])
	l.add(t, other, unnamed[other], rest-l.unnamedBytes(t, other))
}

// unnamedBytes returns the bytes of a band that belongs to no owner or group.
func (l *ledger) unnamedBytes(t memory.Kind, k kind) int64 {
	if i, ok := l.index[band{t, k, unnamed[k]}]; ok {
		return l.now[i]
	}
	return 0
}

// settle updates the free part of a heap.
func (l *ledger) settle(t memory.Kind) {
	l.add(t, unused, unnamed[unused], max(0, l.pool[t]-l.live[t])-l.unnamedBytes(t, unused))
}

// place gives a storage a place in a tier. A storage without an offset lies in borrowed
// memory.
func (l *ledger) place(e *trace.Event) {
	s := l.held[e.Storage]
	if s == nil {
		s = &storage{}
		l.held[e.Storage] = s
	}
	l.remove(e.Storage, e.Tier)
	s.bytes[e.Tier], s.in[e.Tier] = e.Bytes, e.Offset >= 0
	switch {
	case s.saved:
		s.band[e.Tier] = l.add(e.Tier, group, s.group, e.Bytes)
	default:
		s.band[e.Tier] = l.add(e.Tier, unsaved, unnamed[unsaved], e.Bytes)
	}
	l.count(e.Tier, s.in[e.Tier], e.Bytes)
}

// count adds n bytes of a storage that lies in the heap or outside of it.
func (l *ledger) count(t memory.Kind, in bool, n int64) {
	if !in {
		l.out[t] += n
		return
	}
	l.live[t] += n
	l.settle(t)
}

// remove takes a storage's place in a tier away.
func (l *ledger) remove(id int, t memory.Kind) {
	s := l.held[id]
	if s == nil || s.bytes[t] == 0 {
		return
	}
	n := s.bytes[t]
	s.bytes[t] = 0
	l.change(s.band[t], -n)
	l.count(t, s.in[t], -n)
}

// save assigns a storage to the first group that saves it.
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
			s.band[t] = l.add(memory.Kind(t), group, e.Name, n)
		}
	}
}

// memoryOf returns memory over time, and the time of its peak.
func memoryOf(l *timeline, rank, samples int) (m Memory, at int64) {
	book := newLedger(rank)
	s := newSampler(book, l, samples)
	l.eachChange(s.apply)
	s.finish()
	m = Memory{Time: []float64{}, Series: []Series{}, Events: l.changes}
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

// most is how many bands of owners, and of groups, a tier shows. The rest becomes one
// band.
const most = 12

// stack returns the bands as series, the lowest first. Bands of one kind are sorted by
// size, the largest first.
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
