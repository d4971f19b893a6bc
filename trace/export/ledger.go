// This file owns what is alive. A trace may have dropped events, and its owners give
// back other amounts than they took; what the ledger tells is consistent all the same.

package export

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/trace"
)

// holding is a piece of memory, from its taking to its giving back.
type holding struct {
	// Event took it. Its bytes may be less, when an owner gave back a part, and its group
	// is the one that saved it.
	trace.Event
	number int // in the order of taking

	addr int64 // where the memory snapshot puts it; zero is nowhere
	own  bool  // in a segment of its own
}

type (
	storage struct {
		step, number int
		tier         trace.Tier
	}
	owner struct {
		name string
		tier trace.Tier
	}
)

// ledger holds what is alive: each took is followed by at most one gave of the same
// holding, whose bytes have not changed, and which is not used after that.
type ledger struct {
	took, gave func(*holding)
	prefix     string // that owners may have before their names: the rank
	// groups are those of storages that are yet to be saved, where that is known
	// beforehand. Else a storage is given back when it is saved, and taken as its group's.
	groups   map[int]*trace.Event
	storages map[storage]*holding
	owners   map[owner][]*holding
	taken    int
	spare    []*holding
}

func newLedger(rank int, took, gave func(*holding)) *ledger {
	return &ledger{took: took, gave: gave, prefix: "rank " + strconv.Itoa(rank) + " ", storages: map[storage]*holding{}, owners: map[owner][]*holding{}}
}

// apply takes the next event.
func (l *ledger) apply(e *trace.Event) {
	switch {
	case e.What == trace.Begin || e.What == trace.End:
		l.forget()
	case e.What == trace.Save && e.Storage != 0 && l.groups == nil:
		l.save(e)
	case e.What != trace.Alloc && e.What != trace.Free:
	case e.Tier > trace.Host || e.Bytes <= 0:
	case e.Storage == 0 && e.What == trace.Alloc:
		key := l.owner(e)
		l.owners[key] = append(l.owners[key], l.take(e))
	case e.Storage == 0:
		l.giveBack(l.owner(e), e.Bytes)
	default:
		key := storage{e.Step, e.Storage, e.Tier}
		if h := l.storages[key]; h != nil {
			delete(l.storages, key)
			l.give(h)
		}
		if e.What == trace.Alloc {
			l.storages[key] = l.take(e)
		}
	}
}

// forget ends the lives of the step's storages.
func (l *ledger) forget() {
	left := slices.SortedFunc(maps.Values(l.storages), func(a, b *holding) int { return cmp.Compare(a.number, b.number) })
	for _, h := range left {
		l.give(h)
	}
	clear(l.storages)
}

func (l *ledger) owner(e *trace.Event) owner {
	return owner{strings.TrimPrefix(e.Name, l.prefix), e.Tier}
}

// save makes a storage its first group's.
func (l *ledger) save(e *trace.Event) {
	for _, tier := range []trace.Tier{trace.Device, trace.Host} {
		if h := l.storages[storage{e.Step, e.Storage, tier}]; h != nil && h.Name == "" {
			l.gave(h)
			h.belong(e)
			l.took(h)
		}
	}
}

func (h *holding) belong(e *trace.Event) {
	h.Name, h.Chunk, h.Layer, h.Microbatch = e.Name, e.Chunk, e.Layer, e.Microbatch
}

func (l *ledger) take(e *trace.Event) *holding {
	h := &holding{}
	if n := len(l.spare); n > 0 {
		h, l.spare = l.spare[n-1], l.spare[:n-1]
	}
	l.taken++
	*h = holding{Event: *e, number: l.taken}
	if g := l.groups[e.Storage]; e.Storage == 0 {
		h.Name = l.owner(e).name
	} else if g != nil && h.Name == "" {
		h.belong(g)
	}
	l.took(h)
	return h
}

func (l *ledger) give(h *holding) {
	l.gave(h)
	l.spare = append(l.spare, h)
}

// alive lists what is, in the order of taking.
func (l *ledger) alive() []*holding {
	all := slices.Collect(maps.Values(l.storages))
	for _, held := range l.owners {
		all = append(all, held...)
	}
	slices.SortFunc(all, func(a, b *holding) int { return cmp.Compare(a.number, b.number) })
	return all
}

// recent is how many holdings of an owner are looked at for one of the same size.
const recent = 64

// giveBack gives back bytes of an owner: what was taken last in one piece of that size,
// or else what was taken last, the rest of the last piece staying.
func (l *ledger) giveBack(key owner, bytes int64) {
	held := l.owners[key]
	for i := len(held) - 1; i >= max(0, len(held)-recent); i-- {
		if held[i].Bytes == bytes {
			l.give(held[i])
			l.owners[key] = append(held[:i], held[i+1:]...)
			return
		}
	}
	for bytes > 0 && len(held) > 0 {
		h := held[len(held)-1]
		rest := h.Event
		held = held[:len(held)-1]
		l.give(h)
		rest.Bytes, bytes = rest.Bytes-bytes, bytes-rest.Bytes
		if rest.Bytes > 0 {
			held = append(held, l.take(&rest))
		}
	}
	l.owners[key] = held
}
