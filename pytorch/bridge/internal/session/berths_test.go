// This file owns tests of which storages with rows get no berth.

package session

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

// SPEC S6.4: what a backward pass needs at once is not worth a berth, as long as it is no
// more than the largest; also in the middle of a step, and of what was saved last.
func TestNotWorthBerths(t *testing.T) {
	of := map[rune]*rows{}
	for i, b := range "abcdef" {
		of[b] = &rows{bytes: []uint64{4, 2, 1, 4, 2, 1}[i]}
	}
	for _, x := range []struct{ turns, stays string }{
		{"", ""},
		{"+a", "0"},
		{"+a-a", "1"},
		{"+a+b+c+d+e+f-f-e-d-c-b-a", "000011"}, // 1+2, not 7
		{"+a+d-d-a", "01"},
		{"+a+b+c-c-b-a", "011"},
		{"+a+b+d-b-d-a", "000"},           // not in turn
		{"+a-a+b-b+c-c+d-d", "1111"},      // microbatches
		{"+a+b+c-c+d-d-b-a", "0011"},      // c, then d
		{"+a+b+c+d+e+f-f-e", "000011"},    // the rest is never needed
		{"+a+d+b-b-d-a+e+f-f-e", "00111"}, // 2, not 6; then 1+2
		{"+a+b-b+c+d-d-c-a", "0101"},      // 2; then 4, not 5
	} {
		var turns []turn
		for i := 0; i < len(x.turns); i += 2 {
			turns = append(turns, turn{x.turns[i] == '+', of[rune(x.turns[i+1])]})
		}
		got := ""
		for _, stays := range notWorthBerths(turns) {
			got += map[bool]string{false: "0", true: "1"}[stays]
		}
		if got != x.stays {
			t.Errorf("%s: %s stay, want %s", x.turns, got, x.stays)
		}
	}
}

// The same by another rule, for any order: a storage stays if it and those that came back
// since the last save were each the last that was saved of those not back, and take no more
// than the largest together.
func TestNotWorthBerthsInAnyOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(8, 9))
	stayed := 0
	for range 3000 {
		var turns []turn
		var most uint64
		var out []*rows // saved and not needed again
		for range 2 + rng.IntN(14) {
			if k := len(out); k == 0 || rng.IntN(2) == 0 {
				r := &rows{bytes: 1 + rng.Uint64N(6)}
				most, out, turns = max(most, r.bytes), append(out, r), append(turns, turn{true, r})
			} else {
				i := k - 1
				if rng.IntN(4) == 0 {
					i = rng.IntN(k)
				}
				turns, out = append(turns, turn{false, out[i]}), slices.Delete(out, i, i+1)
			}
		}
		var want []bool
		var live []*rows
		place, onTop := map[*rows]int{}, make([]bool, len(turns))
		for i, x := range turns {
			if x.saved {
				place[x.of], live, want = len(want), append(live, x.of), append(want, false)
				continue
			}
			if onTop[i] = len(live) > 0 && live[len(live)-1] == x.of; !onTop[i] {
				continue
			}
			live = live[:len(live)-1]
			fits, bytes := true, uint64(0)
			for k := i; !turns[k].saved; k-- {
				fits, bytes = fits && onTop[k], bytes+turns[k].of.bytes
			}
			want[place[x.of]] = fits && bytes <= most
		}
		got := notWorthBerths(turns)
		if !slices.Equal(got, want) {
			t.Fatalf("%+v: %v, want %v", turns, got, want)
		}
		if slices.Contains(got, true) {
			stayed++
		}
	}
	if stayed == 0 {
		t.Error("nothing stayed")
	}
}

// SPEC S6.4: a step without rows, such as one of other data under the same key, says nothing of
// those that have some.
func TestStepsWithoutRowsTeachNothing(t *testing.T) {
	p := newPlayer(t, rand.New(rand.NewPCG(1, 1)), Config{Device: "cpu", Live: 1})
	for i, stashed := range []int{3, 0, 2, 2} { // the last is needed at once, as the first step shows
		p.begin("a")
		for range 3 {
			row := 24
			if i == 1 {
				row = 0
			}
			r := p.fresh(0, 24*40, row)
			r.rows = 40
			p.ok(p.save("moe", []*record{r}, false))
		}
		got := 0
		for _, r := range p.s.order {
			if r.choice == memory.Stash {
				got++
			}
		}
		if got != stashed {
			t.Errorf("step %d stashed %d storages; want %d", i, got, stashed)
		}
		for n := 2; n >= 0; n-- {
			p.ok(p.load(p.open[n]))
		}
		p.ok(p.end(false))
		p.check()
	}
	p.close()
}
