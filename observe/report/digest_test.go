// This file owns digests of what is made of many traces.

package report

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// drawn returns a trace of steps in which storages are saved, moved and freed in any order, with
// spans on three streams. The numbers of a stretch are alike, as those of a run are.
func drawn(rng *rand.Rand, rank int) *trace.Trace {
	s := newScribe(rank)
	s.t.Header.Budget = rng.Int64N(3) * 64 * kib
	s.own(memory.Device, "parameters", 5*kib)
	s.own(memory.Device, trace.HeapOwner(memory.Device), 64*kib)
	s.own(memory.Host, trace.HeapOwner(memory.Host), 48*kib)
	s.own(memory.Device, "stash pages", 9*kib)
	names := []string{"qkv_linear", "core_attn", "moe_act", ""}
	kinds := []trace.Kind{trace.Alloc, trace.Alloc, trace.Alloc, trace.Free, trace.Free, trace.Save, trace.Save, trace.Offload, trace.Reload, trace.Load, trace.Release, trace.Evict, trace.Late, trace.Recompute, trace.Capture, trace.Replay, trace.Rerun, trace.Decide, trace.Stash, trace.Restore, trace.Spill}
	for step := 1; step <= 1+rng.IntN(6); step++ {
		s.decide(trace.Event{Kind: trace.Begin, Step: step})
		for range rng.IntN(40) {
			storage := rng.IntN(5)
			e := trace.Event{
				Kind: kinds[rng.IntN(len(kinds))], Step: step, Storage: storage, Name: names[rng.IntN(len(names))], Layer: rng.IntN(3), Chunk: rng.IntN(2), Microbatch: rng.IntN(2),
				Tier: memory.Kind(rng.IntN(2)), Offset: int64(storage) * 8 * kib, Bytes: int64(1+storage) * kib,
			}
			switch rng.IntN(6) {
			case 0:
				s.work([]string{"linear", "attention", "router"}[rng.IntN(3)])
			case 1:
				s.copies([]string{"offload", "reload"}[rng.IntN(2)], e.Tier, s.now+rng.Int64N(5e5), rng.Int64N(2e6), e.Bytes)
			case 2:
				s.own(e.Tier, []string{"workspace", "stash pages", "rank 0 shards"}[rng.IntN(3)], (rng.Int64N(5)-2)*kib)
			case 3:
				s.t.Events = append(s.t.Events, trace.Event{Kind: []trace.Kind{trace.Graph, trace.Wait, trace.Work}[rng.IntN(3)], Stream: "compute", Name: "step", Time: s.now, Took: rng.Int64N(1e6), First: s.piece, Last: s.piece + uint64(rng.IntN(4))})
			default:
				s.decide(e)
			}
		}
		if rng.IntN(8) > 0 {
			s.decide(trace.Event{Kind: trace.End, Step: step})
		}
		s.now += rng.Int64N(3e6)
	}
	return &s.t
}

// Digests of each part of the reports of many traces. A change of any field of a part is seen; the
// other tests say what the fields mean. Write the digests anew with -update if the change is meant.
func TestDigests(t *testing.T) {
	var b strings.Builder
	for i := range 60 {
		rng := rand.New(rand.NewPCG(uint64(i), 7))
		parts := []*trace.Trace{drawn(rng, i%3)}
		if i%4 == 0 {
			parts = append(parts, drawn(rng, i%3))
		}
		text, err := json.Marshal(NewRank(parts...))
		var fields map[string]json.RawMessage
		if err == nil {
			err = json.Unmarshal(text, &fields)
		}
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "trace %d:", i)
		for _, name := range slices.Sorted(maps.Keys(fields)) {
			sum := sha256.Sum256(fields[name])
			fmt.Fprintf(&b, " %s %x", name, sum[:4])
		}
		fmt.Fprintln(&b)
	}
	golden.Check(t, "digests.txt", b.String())
}
