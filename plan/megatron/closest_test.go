// This file owns the tests of the nearest setup that flags can ask for.

package megatron

import (
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

func uneven(t *testing.T) *plan.Setup {
	t.Helper()
	m, err := model.Preset("mixtral-8x7b")
	if err != nil {
		t.Fatal(err)
	}
	s := &plan.Setup{
		Model: m, Layout: plan.Layout{World: 32, PP: 4, EP: 8, ETP: 1}, Batch: plan.Batch{Micro: 1, Global: 64, Seq: 4096},
		Offload: plan.Offload{Modules: []string{"moe_act", "expert_fc1"}, ByBytes: true, Fractions: []float64{0.75, 0.4, 0, 0}},
	}
	s.Optimizer.Distributed = true
	s.Kernels = plan.Kernels{GroupedGEMM: true, PermuteFusion: true, Dispatcher: "alltoall"}
	if s, err = s.Normalise(); err != nil {
		t.Fatal(err)
	}
	return s
}

// What flags ask for instead of a share for each rank needs no more memory, and later ranks
// keep as many bytes as possible.
func TestClosest(t *testing.T) {
	s := uneven(t)
	own, err := plan.Predict(s)
	if err != nil {
		t.Fatal(err)
	}
	c := Closest(s)
	if c.Offload.Fractions != nil || c.Offload.ByBytes || c.Offload.Fraction < 0.75 || c.Offload.Delta == 0 {
		t.Errorf("the closest is %+v", c.Offload)
	}
	p, err := plan.Predict(c)
	if err != nil {
		t.Fatal(err)
	}
	if needs(p) > needs(own) {
		t.Errorf("the flags take %d, the setup %d", needs(p), needs(own))
	}
	if less := *c; true {
		less.Offload.Delta = 0
		if q, err := plan.Predict(&less); err != nil || hosts(q) <= hosts(p) {
			t.Errorf("a delta of %d leaves %d in host memory, none %d (%v)", c.Offload.Delta, hosts(p), hosts(q), err)
		}
	}
	s.Budget = needs(own) + 4<<30
	if wide := Closest(s); wide.Offload.Delta <= c.Offload.Delta {
		t.Errorf("with more room the delta is %d, with less %d", wide.Offload.Delta, c.Offload.Delta)
	}
	flags := Flags(s)
	for _, name := range []string{"--activation-offload-fraction", "--delta-offload-bytes-across-pp-ranks"} {
		if !slices.Contains(flags, name) {
			t.Errorf("%s is not among %v", name, flags)
		}
	}
	if lost := Unsaid(s); len(lost) != 1 || !strings.Contains(lost[0], "every rank") {
		t.Errorf("unsaid are %q", lost)
	}
}

func hosts(p *plan.Forecast) (n memory.Bytes) {
	for _, r := range p.Ranks {
		n += r.Host
	}
	return n
}

// Setups that flags can express are unchanged.
func TestClosestIsItself(t *testing.T) {
	for name, o := range map[string]plan.Offload{
		"nothing": {}, "all": {Modules: []string{"moe_act"}, ByBytes: true},
		"groups": {Modules: []string{"moe_act"}, Fraction: 0.5}, "idle": {Fractions: []float64{1, 0, 0, 0}},
	} {
		s := uneven(t)
		s.Offload = o
		if c := Closest(s); c != s {
			t.Errorf("%s: %+v became %+v", name, o, c.Offload)
		}
	}
}
