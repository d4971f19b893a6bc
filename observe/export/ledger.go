// This file owns the ledger of what is alive. A trace may have dropped events, and owners
// may give back other amounts than they took; what the ledger reports is consistent
// nevertheless.

package export

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// holding is a piece of memory from its allocation to its release.
type holding struct {
	// Event is the allocation. Its bytes are fewer if the owner has given back a part, and
	// its group is the one that saved the storage.
	trace.Event
	number int // in the order of allocation

	addr int64 // its address in the memory snapshot; zero if it has none
	own  bool  // whether it has a segment of its own
}

type (
	storage struct {
		step, number int
		tier         memory.Kind
	}
	owner struct {
		name string
		tier memory.Kind
	}
)

// ledger holds what is alive. It calls took for each new holding and gave at most once
// when the holding ends. In between its bytes do not change; afterwards it is reused.
type ledger struct {
	took, gave func(*holding)
	prefix     string // the rank, which names of owners may begin with
	// groups are the groups of storages that will be saved, if they are known beforehand. If
	// not, a storage ends when it is saved and begins again as its group's.
	groups   map[int]*trace.Event
	storages map[storage]*holding
	owners   map[owner][]*holding
	taken    int
	spare    []*holding
}

func newLedger(rank int, took, gave func(*holding)) *ledger {
	return &ledger{took: took, gave: gave, prefix: "rank " + strconv.Itoa(rank) + " ", storages: map[storage]*holding{}, owners: map[owner][]*holding{}}
}

// apply applies the next event.
func (l *ledger) apply(e *trace.Event) {
	switch {
	case e.Kind == trace.Begin || e.Kind == trace.End:
		l.endStep()
	case e.Kind == trace.Save && e.Storage != 0 && l.groups == nil:
		l.save(e)
	case e.Kind != trace.Alloc && e.Kind != trace.Free:
	case e.Tier > memory.Host || e.Bytes <= 0:
	case e.Storage == 0 && e.Kind == trace.Alloc:
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
		if e.Kind == trace.Alloc {
			l.storages[key] = l.take(e)
		}
	}
}

// endStep releases the storages of the step.
func (l *ledger) endStep() {
	left := slices.SortedFunc(maps.Values(l.storages), func(a, b *holding) int { return cmp.Compare(a.number, b.number) })
	for _, h := range left {
		l.give(h)
	}
	clear(l.storages)
}

// owner returns the owner of an event, without the rank.
func (l *ledger) owner(e *trace.Event) owner {
	return owner{strings.TrimPrefix(e.Name, l.prefix), e.Tier}
}

// save assigns a storage to the first group that saves it.
func (l *ledger) save(e *trace.Event) {
	for _, tier := range []memory.Kind{memory.Device, memory.Host} {
		if h := l.storages[storage{e.Step, e.Storage, tier}]; h != nil && h.Name == "" {
			l.gave(h)
			h.belong(e)
			l.took(h)
		}
	}
}

// belong makes a group the owner of the holding.
func (h *holding) belong(e *trace.Event) {
	h.Name, h.Chunk, h.Layer, h.Microbatch = e.Name, e.Chunk, e.Layer, e.Microbatch
}

// take adds a holding.
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

// give removes a holding.
func (l *ledger) give(h *holding) {
	l.gave(h)
	l.spare = append(l.spare, h)
}

// alive returns all holdings in the order of allocation.
func (l *ledger) alive() []*holding {
	all := slices.Collect(maps.Values(l.storages))
	for _, held := range l.owners {
		all = append(all, held...)
	}
	slices.SortFunc(all, func(a, b *holding) int { return cmp.Compare(a.number, b.number) })
	return all
}

// recent is how many holdings of an owner are searched for one of the same size.
const recent = 64

// giveBack releases bytes of an owner: the latest holding of that size, or, if there is
// none, as many of the latest holdings as needed. The last of them keeps its rest.
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
