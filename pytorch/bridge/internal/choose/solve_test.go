// This file owns the tests of answers for models of many equal blocks.

package choose

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

var limits = []float64{0.95, 0.85, 0.7, 0.5, 0.3, 0.2}

func solved(t *testing.T, r *Request) *Answer {
	t.Helper()
	a, err := r.Solve(Machine{Host: residency.Unlimited})
	if err != nil {
		t.Fatal(err)
	}
	if a.Peak > r.Limit || a.Step != a.Before+a.Again+a.Waiting && a.Step < a.Before+a.Again {
		t.Errorf("a limit of %d: %+v", r.Limit, a)
	}
	return a
}

// count returns how many units of a name have a choice.
func count(r *Request, a *Answer, name string, c memory.Choice) (n int) {
	for i, u := range r.Units {
		if u.Name == name && a.Choices[i] == c {
			n++
		}
	}
	return n
}

// fluid returns the time of a step if storages could be cut at will: the link takes what it
// moves in a forward pass, and the cheapest bytes of what else must go are recomputed.
func (m model) fluid(r *Request, a *Answer) time.Duration {
	gone := float64(a.BeforePeak-r.Limit) - r.Links.Out*m.forward.Seconds()
	total := a.Before
	for _, x := range []struct {
		bytes memory.Bytes
		time  time.Duration
	}{{m.saved / 3, m.cheap}, {2 * m.saved / 3, m.rest}} {
		part := min(max(gone/float64(x.bytes), 0), 1)
		total += time.Duration(part * float64(m.blocks*m.microbatches) * float64(x.time))
		gone -= float64(x.bytes)
	}
	return total
}

// SPEC S5.2 S5.5: the answer for equal blocks offloads what the link hides and recomputes
// the cheapest of the rest. It is close to what is possible at all, and a larger limit is
// never slower.
func TestEqualBlocks(t *testing.T) {
	for _, m := range []model{dense(24, 1), dense(96, 4)} {
		scale := time.Duration(m.blocks / 24)
		m.cheap, m.rest = m.cheap/scale, m.rest/scale
		last := time.Duration(0)
		for _, share := range limits {
			r := m.request(share)
			a := solved(t, r)
			t.Logf("%d blocks, %d microbatches, %.0f %%: %v of %v, %d tried", m.blocks, m.microbatches, 100*share, a.Step, a.Before, a.Tried)
			if ideal := m.fluid(r, a); float64(a.Step) > 1.02*float64(ideal) {
				t.Errorf("%d blocks, %.0f %%: %v, and %v are possible", m.blocks, 100*share, a.Step, ideal)
			}
			if float64(a.Step) < 0.99*float64(last) {
				t.Errorf("%d blocks, %.0f %%: %v, less than the %v of a larger limit", m.blocks, 100*share, a.Step, last)
			}
			last = max(last, a.Step)
			if share > 0.5 {
				continue
			}
			if most := r.Links.Out * m.forward.Seconds() * float64(m.microbatches); float64(a.Moved) < 0.85*most {
				t.Errorf("%d blocks, %.0f %%: %v are offloaded, and the link hides %v", m.blocks, 100*share, a.Moved, memory.Bytes(most))
			}
			if n := count(r, a, "cheap", memory.Recompute); n < m.blocks*9/10 {
				t.Errorf("%d blocks, %.0f %%: %d of the cheap units are recomputed", m.blocks, 100*share, n)
			}
		}
	}
}

// Measured times differ a little between equal blocks and between microbatches. That does
// not lead the search astray.
func TestMeasuredTimes(t *testing.T) {
	m := dense(32, 3)
	const share = 0.4
	exact, r := solved(t, m.request(share)), m.request(share)
	random := rand.New(rand.NewPCG(1, 2))
	noise := func(d time.Duration) time.Duration { return time.Duration(float64(d) * (0.97 + 0.06*random.Float64())) }
	for i := range r.Units {
		r.Units[i].Recompute = noise(r.Units[i].Recompute)
	}
	was, at := time.Duration(0), time.Duration(0)
	for i := range r.Ops {
		step := r.Ops[i].At - was
		was, at = r.Ops[i].At, at+noise(step)
		r.Ops[i].At = at
	}
	r.Span = at
	got := solved(t, r)
	if x, y := float64(got.Step)/float64(got.Before), float64(exact.Step)/float64(exact.Before); x > 1.01*y {
		t.Errorf("%.0f %%: a step is longer by a factor of %.3f, and by %.3f with exact times", 100*share, x, y)
	}
}

// What is not allowed is not chosen.
func TestAllowed(t *testing.T) {
	m := dense(24, 1)
	r := m.request(0.6)
	r.Offload = false
	a := solved(t, r)
	if slices.Contains(a.Choices, memory.Offload) || a.Moved != 0 || a.Again == 0 {
		t.Errorf("without offloading: %+v", a)
	}
	r = m.request(0.6)
	r.Recompute = false
	b := solved(t, r)
	if slices.Contains(b.Choices, memory.Recompute) || b.Again != 0 || b.Waiting == 0 {
		t.Errorf("without recomputing: %+v", b)
	}
	r = m.request(0.6)
	if both := solved(t, r); both.Step > a.Step || both.Step > b.Step {
		t.Errorf("%v with both, %v and %v with one of them", both.Step, a.Step, b.Step)
	}
	// A host that holds little: the rest is recomputed.
	little, err := m.request(0.6).Solve(Machine{Host: memory.GiB})
	if err != nil || little.Moved > memory.GiB || little.Peak > r.Limit || little.Step < a.Step-a.Step/10 {
		t.Errorf("%+v, %v", little, err)
	}
}

// SPEC S5.5: copies that slow compute down are worth less than recomputing cheap bytes, and
// worth more than recomputing dear ones.
func TestDrag(t *testing.T) {
	const share = 0.8
	free := solved(t, dense(24, 1).request(share))
	r := dense(24, 1).request(share)
	r.Drag = 0.3
	a := solved(t, r)
	cost := func(a *Answer) time.Duration { return a.Step + time.Duration(r.Drag*float64(a.Copying)) }
	t.Logf("without: %v moved, %v again, %v; with: %v moved, %v again, %v", free.Moved, free.Again, cost(free), a.Moved, a.Again, cost(a))
	if a.Moved >= free.Moved/2 || cost(a) >= cost(free) {
		t.Errorf("%v are offloaded for a step of %v, and without a drag %v and %v", a.Moved, cost(a), free.Moved, cost(free))
	}
	r.Drag = 0.01
	if b := solved(t, r); b.Moved <= a.Moved {
		t.Errorf("%v are offloaded with hardly any drag, and %v with much of it", b.Moved, a.Moved)
	}
}

// A caller that asks often asks for brief answers, which are nearly as good.
func TestEffort(t *testing.T) {
	r := dense(24, 1).request(0.5)
	r.Offload = false
	all := solved(t, r)
	r.Effort = 1.0 / 16
	if brief := solved(t, r); 8*brief.Tried > all.Tried || float64(brief.Step) > 1.02*float64(all.Step) {
		t.Errorf("%d candidates give a step of %v, and %d give %v", brief.Tried, brief.Step, all.Tried, all.Step)
	}
}
