// This file owns the table of everything that searches say of a few unlike setups under several
// budgets. Write it anew with -update if a change is meant.

package search

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/cost"
	"github.com/stowage-dev/stowage/plan/model"
)

// show writes a value as JSON with numbers of five digits, which do not depend on the processor.
func show(t *testing.T, b *strings.Builder, v any) {
	var tree any
	text, err := json.Marshal(v)
	if err == nil {
		err = json.Unmarshal(text, &tree)
	}
	if err != nil {
		t.Fatal(err)
	}
	var round func(v any) any
	round = func(v any) any {
		switch v := v.(type) {
		case map[string]any:
			for k, x := range v {
				v[k] = round(x)
			}
		case []any:
			for i, x := range v {
				v[i] = round(x)
			}
		case float64:
			if v != math.Trunc(v) || math.Abs(v) > 1<<50 {
				return fmt.Sprintf("%.5g", v)
			}
		}
		return v
	}
	if text, err = json.Marshal(round(tree)); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(b, "    %s\n", text)
}

func (r *Result) write(t *testing.T, b *strings.Builder) {
	p := r.Setup
	fmt.Fprintf(b, "  budget %d of %d, nothing %t, %d tried, host: %q, reason: %q\n", r.Budget, p.Budget, r.Nothing, r.Tried, r.HostCost, r.Reason)
	for _, v := range []any{p.Recompute, p.Offload, p.Stash, r.Before, r.After, r.Ranks, r.Pools} {
		show(t, b, v)
	}
	for _, m := range r.Modules {
		show(t, b, m)
	}
	for _, o := range r.Others {
		fmt.Fprintf(b, "  other: %s\n", o.Reason)
		show(t, b, []any{o.Setup.Recompute, o.Setup.Offload, o.After})
	}
}

func TestTable(t *testing.T) {
	var b strings.Builder
	for _, c := range []struct {
		name   string
		change func(s *plan.Setup)
	}{
		{"as it is", func(*plan.Setup) {}},
		{"a slow link", func(s *plan.Setup) { s.Hardware.HostOut, s.Hardware.HostIn, s.Hardware.HostBoth = 4e9, 5e9, 6e9 }},
		{"little host memory", func(s *plan.Setup) { s.HostMemory = 3 << 30 }},
		{"no host memory", func(s *plan.Setup) { s.HostMemory, s.Optimizer.OffloadFraction = 1<<30, 1 }},
		{"rows of a fixed capacity", func(s *plan.Setup) {
			s.Stash.RankCapacity, s.Kernels.Dispatcher, s.Kernels.OpFuser = 2, "hybridep", true
		}},
		{"graphs", func(s *plan.Setup) { s.Graph.Scopes = []string{"attn", "moe_router"} }},
		{"chunks", func(s *plan.Setup) { s.Layout.VPP = 2 }},
		{"fp8 of unlike layers", func(s *plan.Setup) {
			s.Precision.Compute = plan.FP8
			s.Model.Layers = append([]model.Layer{s.Model.Layers[0], s.Model.Layers[0], s.Model.Layers[0], s.Model.Layers[0]}, s.Model.Layers[4:]...)
		}},
	} {
		s := small(t)
		m, g := *s.Model, *s.Hardware
		s.Model, s.Hardware = &m, &g
		c.change(s)
		peak := peakOf(t, s)
		shares := []float64{1.1, 0.96, 0.8, 0.4}
		if c.name == "no host memory" {
			shares = shares[2:3]
		}
		for _, share := range shares {
			fmt.Fprintf(&b, "%s, %g of the peak\n", c.name, share)
			r, err := Policy(s, Options{Budget: memory.Bytes(share * float64(peak))})
			if err != nil {
				fmt.Fprintf(&b, "  %v\n", err)
				continue
			}
			r.write(t, &b)
		}
		if c.name == "as it is" || c.name == "rows of a fixed capacity" {
			for _, share := range []float64{0.7, 0.1} {
				if share < 0.5 && c.name != "as it is" {
					continue // all layouts again
				}
				s := *s
				s.Model.Layers, s.Layout.World = s.Model.Layers[:4], 8
				var told []string
				r, err := Layout(&s, Options{Budget: memory.Bytes(share * float64(peak)), Micro: []int{1, 2}, Top: 3, Progress: func(done, all int) { told = append(told, fmt.Sprint(done, " of ", all)) }})
				fmt.Fprintf(&b, "%s, layouts: %s\n", c.name, strings.Join(told, ", "))
				if err != nil {
					fmt.Fprintf(&b, "  %v\n", err)
					continue
				}
				fmt.Fprintf(&b, "  %d possible, %d searched, %d do not fit\n", r.Possible, r.Searched, r.Unfit)
				for _, o := range r.Best {
					fmt.Fprintf(&b, "  %s, %.4g slower: %s\n", o.Name(), o.Slower, o.Reason)
					show(t, &b, o.Layout)
					show(t, &b, []any{o.Policy.Setup.Recompute, o.Policy.Setup.Offload, o.Policy.After})
				}
			}
		}
	}
	golden.Check(t, "table.txt", b.String())
}

// Words for layouts, sizes, times, shares and the two ways to hold rows.
func TestTableOfWords(t *testing.T) {
	result := func(total cost.Seconds) *Result { return &Result{After: Outcome{Step: cost.Step{Total: total}}} }
	stash := plan.Stash{RankCapacity: 1.5, Modules: []string{"a", "b"}}
	golden.Check(t, "words.txt", fmt.Sprintln(
		layoutName(plan.Layout{World: 128, TP: 2, PP: 2, VPP: 3, EP: 4, ETP: 5, CP: 8}, 6), "\n", layoutName(plan.Layout{World: 4, TP: 1, PP: 1, VPP: 1, EP: 1, ETP: 1, CP: 1}, 1), "\n",
		duration(10), duration(9.994), duration(1), duration(0.999), duration(0.1), duration(0.0999), duration(0), "\n",
		mebibytes(10<<30), mebibytes(10<<30-1), mebibytes(10<<20), mebibytes(10<<20-1<<18), mebibytes(0), "\n",
		enough(1<<30), enough(1<<30+1), gibibytes(1<<30+1), percent(0.125), "\n", fractions([]int{0, parts, parts, parts / 2}), "\n",
		stashVerdict(stash, result(2), result(1)), "\n", stashVerdict(stash, result(2), result(3)), "\n", stashVerdict(stash, result(2), result(2)), "\n",
		stashVerdict(stash, nil, result(3)), "\n", stashVerdict(stash, result(3), nil), "\n",
		&TooSmall{Budget: 1 << 30, Least: 2<<30 + 1, Rank: 3, Policy: "p"}, "\n", &TooSmall{Budget: 1 << 30, Policy: "q", Node: &plan.Node{Room: 3 << 30, Pinned: 4<<30 + 1}},
	))
}

// Few microbatches have the peaks of all, whatever is left of the last group, and none is left out where
// each leaves something behind.
func TestFewMicrobatchesFill(t *testing.T) {
	fewer := 0
	for _, pp := range []int{1, 2, 4} {
		for _, vpp := range []int{1, 2} {
			for _, group := range []int{0, 3, 5} {
				for _, mbs := range []int{8, 13, 21, 22, 25} {
					s := tiny(t)
					s.Layout.PP, s.Layout.VPP, s.Layout.GroupSize = pp, vpp, group
					s.Batch.Global = mbs * s.Batch.Micro * s.Layout.World / pp
					s, err := s.Normalise()
					if err != nil {
						continue // no such pipeline
					}
					want, err := plan.Predict(s)
					if err != nil {
						t.Fatal(err)
					}
					few := filled(s)
					got, err := plan.Predict(few)
					if err != nil {
						t.Fatal(err)
					}
					for r := range want.Ranks {
						if got.Ranks[r].Reserved != want.Ranks[r].Reserved {
							t.Errorf("PP %d, VPP %d, groups of %d: rank %d needs %v with %d microbatches and %v with %d",
								pp, vpp, group, r, want.Ranks[r].Reserved, mbs, got.Ranks[r].Reserved, few.Microbatches())
						}
					}
					if few.Microbatches() < mbs {
						fewer++
					}
					s.Kernels.DeferEmbeddingWgrad = true
					if n := filled(s).Microbatches(); n != mbs {
						t.Errorf("%d of %d microbatches with deferred gradients", n, mbs)
					}
				}
			}
		}
	}
	if fewer == 0 {
		t.Error("never fewer")
	}
}
