// This file owns the tests of groups that share a storage, or are loaded more than once.

package session

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

// sharing are the configurations of these tests: nothing leaves, one of two groups leaves,
// both do, or as much as a limit asks for, which is less than all take.
var sharing = map[string]Config{
	"keep":  {Device: "cpu"},
	"one":   {Device: "cpu", Policy: map[string]memory.Choice{"mlp": memory.Offload, "attn": memory.Keep}},
	"both":  {Device: "cpu", Policy: map[string]memory.Choice{"mlp": memory.Offload, "attn": memory.Offload}},
	"limit": {Device: "cpu", Limit: 5500},
}

// fast are links that bring everything back in no time, so that what leaves depends on the
// choices alone.
var fast = memory.Links{Out: 1e15, In: 1e15, Both: 1e15}

// orders returns all orders of the numbers below n.
func orders(n int) [][]int {
	if n == 0 {
		return [][]int{{}}
	}
	var all [][]int
	for _, o := range orders(n - 1) {
		for at := range n {
			all = append(all, slices.Insert(slices.Clone(o), at, n-1))
		}
	}
	return all
}

// whole reports whether a storage is in the caller's memory with the bytes that were saved.
func (r *record) whole() bool { return r.mem != nil && bytes.Equal(r.mem, r.want) }

// SPEC S6.4: groups that share a storage may be loaded and released in any order, each as
// often as the caller likes. What is loaded stays until the last of its groups is released, and is
// returned once for each time it was borrowed.
func TestGroupsThatShareAStorage(t *testing.T) {
	for name, cfg := range sharing {
		cfg.Links = fast
		p := newPlayer(t, rand.New(rand.NewPCG(1, 1)), cfg)
		for _, order := range orders(3) {
			for loads := range 3 {
				what := fmt.Sprintf("%s, order %v, %d loads", name, order, loads)
				p.begin("a")
				shared, one, two := p.fresh(0, 3000, 0), p.fresh(0, 2000, 0), p.fresh(0, 1000, 0)
				p.ok(p.save("mlp", []*record{one, shared}, false))
				p.ok(p.save("attn", []*record{shared}, false))
				p.ok(p.save("mlp", []*record{shared, two}, false))
				all := slices.Clone(p.open)
				for k, i := range order {
					for range loads {
						_, returned, err := p.s.Load(all[i].n)
						p.ok(err)
						p.free(returned)
						for _, r := range all[i].records {
							if !r.whole() {
								t.Fatalf("%s: storage %d is not what it was in group %d", what, r.id, i)
							}
						}
					}
					p.ok(p.release(all[i]))
					switch {
					case k == len(order)-1: // that of the own ones depends on when they left
						if loads > 0 && shared.mem != nil {
							t.Errorf("%s: the shared storage is here after its last group", what)
						}
					case loads > 0 && !shared.whole():
						t.Errorf("%s: the shared storage is gone with group %d, and another needs it", what, i)
					}
				}
				p.ok(p.end(false))
			}
		}
		p.close()
	}
}

// SPEC S6.4: a second load of a group changes nothing: it lists the same storages as held, asks for
// no memory, returns none, and one release is enough.
func TestLoadsOfOneGroup(t *testing.T) {
	for name, cfg := range sharing {
		cfg.Links = fast
		p := newPlayer(t, rand.New(rand.NewPCG(1, 1)), cfg)
		for step := range 4 {
			p.begin("a")
			one, two := p.fresh(0, 3000, 0), p.fresh(0, 2000, 0)
			p.ok(p.save("mlp", []*record{one, two}, false))
			p.ok(p.save("attn", []*record{two}, false))
			for _, g := range slices.Clone(p.open) {
				held, returned, err := p.s.Load(g.n)
				p.ok(err)
				p.free(returned)
				provided := p.total.provided
				for range 3 {
					again, returned, err := p.s.Load(g.n)
					p.ok(err)
					if !slices.Equal(again, held) || len(returned) > 0 || p.total.provided != provided {
						t.Errorf("%s, step %d: another load of group %d holds %v and returns %v, and asks for memory %d times; the first one holds %v", name, step, g.n, again, returned, p.total.provided-provided, held)
					}
				}
				p.ok(p.release(g))
			}
			if n := len(p.heap.live); n > 0 {
				t.Errorf("%s, step %d: %d blocks are here after all groups were released", name, step, n)
			}
			p.ok(p.end(false))
		}
		p.close()
	}
}

// SPEC S6.4: a storage that is saved once more after it came back is the same storage, for which
// nothing is borrowed, until its last group is released; then its number means another one.
func TestSavedAgainAfterALoad(t *testing.T) {
	for name, cfg := range sharing {
		cfg.Links = fast
		p := newPlayer(t, rand.New(rand.NewPCG(1, 1)), cfg)
		for step := range 4 {
			p.begin("a")
			r := p.fresh(0, 3000, 0)
			p.ok(p.save("mlp", []*record{r}, false))
			_, returned, err := p.s.Load(1)
			p.ok(err)
			p.free(returned)
			if !r.whole() {
				t.Fatalf("%s, step %d: it did not come back", name, step)
			}
			p.ok(p.save("attn", []*record{r}, false))
			first, second := p.open[0], p.open[1]
			p.ok(p.release(first))
			p.ok(p.load(second))
			p.ok(p.release(second))
			other := p.fresh(r.id, 700, 0)
			p.ok(p.save("mlp", []*record{other}, false))
			p.ok(p.load(p.open[0]))
			p.ok(p.release(p.open[0]))
			p.ok(p.end(false))
		}
		p.close()
	}
}

// SPEC S6.4: rows that several groups save are counted, stashed and listed once, however often
// their groups are loaded, and their berth is read until the last group is released.
func TestRowsThatGroupsShare(t *testing.T) {
	p := newPlayer(t, rand.New(rand.NewPCG(1, 1)), Config{Device: "cpu", Live: 1})
	for _, order := range orders(3) {
		p.begin(fmt.Sprint(order)) // a key that learned nothing: all rows are worth a berth
		shared, own := p.fresh(0, 24*40, 24), p.fresh(0, 24*40, 24)
		shared.rows, own.rows = 30, 20
		p.ok(p.save("moe", []*record{shared}, false))
		p.ok(p.save("fc1", []*record{shared, own}, false))
		p.ok(p.save("fc2", []*record{shared}, false))
		all := slices.Clone(p.open)
		if len(p.s.order) != 2 || shared.mem != nil || own.mem != nil {
			t.Fatalf("%d storages have rows, and %v and %v are here", len(p.s.order), shared.mem != nil, own.mem != nil)
		}
		for k, i := range order {
			for range 2 {
				p.ok(p.load(all[i]))
			}
			p.ok(p.release(all[i]))
			if _, err := p.s.Rows(shared.id); (err == nil) != (k < len(order)-1) {
				t.Errorf("order %v: after %d groups: %v", order, k+1, err)
			}
		}
		if n := len(p.s.turns); n != 4 {
			t.Errorf("order %v: %d turns; want both saved and both needed once", order, n)
		}
		p.ok(p.end(false))
		text, err := p.s.Stats()
		p.ok(err)
		var x Stats
		p.ok(json.Unmarshal(text, &x))
		if n := x.Rows; len(n) != 2 || n[0].Name != "fc1" || n[0].Storages != 1 || n[1].Name != "moe" || n[1].Storages != 1 {
			t.Errorf("order %v: %+v", order, n)
		}
		if !p.check() {
			t.Error("there was too little room")
		}
	}
	p.close()
}

// SPEC S6.4: a group that names a storage twice has it once.
func TestAStorageTwiceInAGroup(t *testing.T) {
	for name, cfg := range sharing {
		cfg.Links = fast
		p := newPlayer(t, rand.New(rand.NewPCG(1, 1)), cfg)
		for range 3 {
			p.begin("a")
			r := p.fresh(0, 3000, 0)
			x := Storage{ID: r.id, Address: address(r.mem), Bytes: 3000}
			n, returned, err := p.s.Save("mlp", []Storage{x, x})
			p.ok(err)
			p.free(returned)
			_, returned, err = p.s.Load(n)
			p.ok(err)
			p.free(returned)
			if !r.whole() {
				t.Errorf("%s: it is not what it was", name)
			}
			returned, err = p.s.Release(n)
			p.ok(err)
			if p.free(returned); r.mem != nil {
				t.Errorf("%s: it is here after its release", name)
			}
			p.ok(p.end(false))
		}
		p.close()
	}
}

// SPEC S6.4: once a step is planned, a storage stays that any of its groups says must, though the
// one before it did not say so. One of the same size that need not leaves.
func TestSharedStoragesThatStay(t *testing.T) {
	p := newPlayer(t, rand.New(rand.NewPCG(1, 1)), Config{Device: "cpu", Limit: 9000, Links: fast})
	for step := range 4 {
		p.begin("a")
		stays, leaves := p.fresh(0, 3000, 0), p.fresh(0, 3000, 0)
		p.ok(p.save("mlp", []*record{stays}, false))
		p.ok(p.save("mlp", []*record{stays}, true))
		p.ok(p.save("mlp", []*record{leaves}, false))
		for range 4 {
			p.ok(p.save("attn", []*record{p.fresh(0, 1000, 0)}, false))
		}
		if step > 0 && (stays.mem == nil || leaves.mem != nil) {
			t.Errorf("step %d: the storage that stays is here: %t; the other one: %t", step, stays.mem != nil, leaves.mem != nil)
		}
		for i := len(p.open) - 1; i >= 0; i-- {
			p.ok(p.load(p.open[i]))
			p.ok(p.release(p.open[i]))
		}
		p.ok(p.end(false))
	}
	p.close()
}

// SPEC S6.4: of a storage that was saved before only the number is read, whatever else is said of it.
func TestOnlyNumbersOfSharedStorages(t *testing.T) {
	p := newPlayer(t, rand.New(rand.NewPCG(1, 1)), Config{Device: "cpu", Live: 1})
	p.begin("a")
	rows, plain := p.fresh(0, 24*40, 24), p.fresh(0, 100, 0)
	rows.rows = 30
	p.ok(p.save("moe", []*record{rows, plain}, false))
	n, returned, err := p.s.Save("fc2", []Storage{{ID: rows.id, Address: 1, Bytes: 1, Rows: 3}, {ID: plain.id, Address: 1, Bytes: 1, Rows: 3, RowBytes: 7}})
	p.ok(err)
	p.free(returned)
	p.ok(p.load(p.open[0]))
	p.ok(p.release(p.open[0]))
	if _, err := p.s.Rows(rows.id); err != nil {
		t.Error(err)
	}
	returned, err = p.s.Release(n)
	p.ok(err)
	p.free(returned)
	p.ok(p.end(false))
	p.close()
}
