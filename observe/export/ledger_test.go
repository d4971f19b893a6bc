// This file tests the ledger against sums: what is taken and given back is what events say,
// and a storage is that of the group that saved it first.

package export

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

func TestLedgerAddsUp(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		got, want := map[string]int64{}, map[string]int64{}
		name := func(h *holding) string { return fmt.Sprint(h.Tier, h.Storage != 0, h.Name) }
		l := newLedger(0, func(h *holding) { got[name(h)] += h.Bytes }, func(h *holding) { got[name(h)] -= h.Bytes })
		type key struct {
			storage int
			tier    memory.Kind
		}
		held, group := map[key]int64{}, map[int]string{}
		for range rapid.IntRange(1, 40).Draw(r, "events") {
			tier := memory.Kind(rapid.IntRange(0, 1).Draw(r, "tier"))
			bytes := rapid.Int64Range(1, 6).Draw(r, "bytes")
			owner := rapid.SampledFrom([]string{"a", "b"}).Draw(r, "owner")
			id := rapid.IntRange(1, 3).Draw(r, "storage")
			total := fmt.Sprint(tier, false, owner)
			stored := func(tier memory.Kind) string { return fmt.Sprint(tier, true, group[id]) }
			switch rapid.IntRange(0, 5).Draw(r, "what") {
			case 0, 1:
				l.apply(&trace.Event{Kind: trace.Alloc, Name: "rank 0 " + owner, Tier: tier, Bytes: bytes})
				want[total] += bytes
			case 2:
				bytes = min(bytes, want[total])
				l.apply(&trace.Event{Kind: trace.Free, Name: owner, Tier: tier, Bytes: bytes})
				want[total] -= bytes
			case 3:
				if held[key{id, tier}] == 0 {
					l.apply(&trace.Event{Kind: trace.Alloc, Storage: id, Name: group[id], Tier: tier, Bytes: bytes})
					held[key{id, tier}] = bytes
					want[stored(tier)] += bytes
				}
			case 4:
				if n := held[key{id, tier}]; n > 0 {
					l.apply(&trace.Event{Kind: trace.Free, Storage: id, Name: group[id], Tier: tier, Bytes: n})
					delete(held, key{id, tier})
					want[stored(tier)] -= n
				}
			case 5:
				if held[key{id, 0}]+held[key{id, 1}] == 0 {
					continue
				}
				l.apply(&trace.Event{Kind: trace.Save, Storage: id, Name: owner})
				if group[id] == "" {
					for _, tier := range []memory.Kind{memory.Device, memory.Host} {
						want[fmt.Sprint(tier, true, "")] -= held[key{id, tier}]
						want[fmt.Sprint(tier, true, owner)] += held[key{id, tier}]
					}
					group[id] = owner
				}
			}
			for k := range want {
				if got[k] != want[k] {
					r.Fatalf("%s holds %d, want %d", k, got[k], want[k])
				}
			}
		}
		l.apply(&trace.Event{Kind: trace.End})
		for k, n := range got {
			if k == fmt.Sprint(memory.Device, true, "a") && n != 0 {
				r.Fatalf("%d bytes of storages are left", n)
			}
		}
	})
}

// The groups that are known ahead are those that save a storage first, in its step.
func TestLookAhead(t *testing.T) {
	events := []trace.Event{
		{Kind: trace.Save, Storage: 1, Name: "first", Layer: 3}, {Kind: trace.Save, Storage: 1, Name: "second"}, {Kind: trace.Save, Name: "none"},
		{Kind: trace.Save, Storage: 2, Name: "other"}, {Kind: trace.Begin}, {Kind: trace.Save, Storage: 3, Name: "next step"},
	}
	i := 0
	groups := map[int]*trace.Event{9: {Name: "step before"}}
	lookAhead(groups, func() (*trace.Event, bool) {
		if i == len(events) {
			return nil, false
		}
		i++
		return &events[i-1], true
	})
	if len(groups) != 2 || groups[1].Name != "first" || groups[1].Layer != 3 || groups[2].Name != "other" || i != 5 {
		t.Errorf("%d events were read: %+v", i, groups)
	}
}

// Of the last holdings of an owner the one of the size that is given back ends, and of those
// before it none.
func TestRecentHoldings(t *testing.T) {
	for others, want := range map[int]string{0: "7", recent - 1: "7", recent: "1 1 1 1 1 1 1"} {
		var gave []string
		l := newLedger(0, func(*holding) {}, func(h *holding) { gave = append(gave, fmt.Sprint(h.Bytes)) })
		l.apply(&trace.Event{Kind: trace.Alloc, Name: "o", Bytes: 7})
		for range others {
			l.apply(&trace.Event{Kind: trace.Alloc, Name: "o", Bytes: 1})
		}
		l.apply(&trace.Event{Kind: trace.Free, Name: "o", Bytes: 7})
		if got := strings.Join(gave, " "); got != want {
			t.Errorf("behind %d others: %s, want %s", others, got, want)
		}
	}
}

// A storage belongs to the first group that saves it.
func TestFirstGroup(t *testing.T) {
	var took []string
	l := newLedger(0, func(h *holding) { took = append(took, h.Name) }, func(*holding) {})
	l.apply(&trace.Event{Kind: trace.Alloc, Storage: 1, Bytes: 7})
	for _, group := range []string{"a", "b"} {
		l.apply(&trace.Event{Kind: trace.Save, Storage: 1, Name: group})
	}
	if got := strings.Join(took, ","); got != ",a" {
		t.Errorf("it was taken as %q", got)
	}
}
