// This file owns the tests of runs whose ranks or layers differ: a stage without experts,
// mixtures that are alike in their width alone.

package train

import (
	"testing"

	"github.com/stowage-dev/stowage/plan/model"
)

// A stage without experts agrees with the others on every step, also on one that is
// rerun.
func TestStageWithoutExperts(t *testing.T) { // SPEC S1.6
	m := mixed()
	m.Layers[0].MoE, m.Layers[0].Dense = nil, &model.Dense{Width: 24, Gated: true}
	c := quick(t, m)
	c.Layout = Layout{PP: 2, VPP: 1, EP: 1, DP: 1}
	want := mustRun(t, c, 4)
	for _, name := range []string{"stash", "offload", "graphs", "reruns"} {
		t.Run(name, func(t *testing.T) {
			again := name == "reruns"
			if c.Memory = namedMemory(t, "stash"); again {
				c.Memory.Sets, c.Memory.Room = 1, 0.01
			} else {
				c.Memory = namedMemory(t, name)
			}
			got := mustRun(t, c, 4)
			if err := got.differs(want); err != nil {
				t.Error(err)
			}
			if again && got.reruns == 0 {
				t.Error("no step was rerun")
			}
		})
	}
}

// Mixtures of one width share buffers, which have room for the one with most rows.
func TestMixturesOfOneWidth(t *testing.T) { // SPEC S1.1
	m := mixed()
	few := *m.Layers[1].MoE
	few.Experts, few.TopK = 2, 1
	for _, first := range []bool{false, true} {
		m.Layers[0].MoE, m.Layers[1].MoE = &few, mixed().Layers[1].MoE
		if first {
			m.Layers[0].MoE, m.Layers[1].MoE = m.Layers[1].MoE, m.Layers[0].MoE
		}
		c := quick(t, m)
		c.Layout = Layout{PP: 1, VPP: 1, EP: 2, DP: 2}
		want := mustRun(t, c, 3)
		c.Memory = namedMemory(t, "stash")
		if err := mustRun(t, c, 3).differs(want); err != nil {
			t.Error(err)
		}
	}
}
