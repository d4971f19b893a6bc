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

// Buffers that mixtures share have room for the one with most rows, wherever it stands.
func TestRowsOfSharedBuffers(t *testing.T) {
	few, many := *mixed().Layers[0].MoE, *mixed().Layers[0].MoE
	few.TopK, many.TopK = 1, 3
	other := many
	other.Width, other.TopK = 20, 4
	var want [2]int
	for i, order := range [][]*model.MoE{{&few, &many, &other}, {&many, &few, &other}, {&other, &few, &many}} {
		m := mixed()
		m.Layers = append(m.Layers, m.Layers[0])
		for k := range m.Layers {
			m.Layers[k].MoE = order[k]
		}
		c := quick(t, m)
		c.Layout, c.Memory = Layout{PP: 1, VPP: 1, EP: 2, DP: 2}, namedMemory(t, "stash")
		tr, err := New(c)
		if err != nil {
			t.Fatal(err)
		}
		rows, worst := tr.ranks[0].setRows(many.Width)
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
		if i == 0 {
			want = [2]int{rows, worst}
			tokens := c.Batch.Micro * c.Batch.Seq
			if worst != 2*tokens*min(many.TopK, many.Experts/2) || rows < tokens*many.TopK {
				t.Errorf("%d rows, %d at worst", rows, worst)
			}
		} else if got := [2]int{rows, worst}; got != want {
			t.Errorf("in order %d: %v, want %v", i, got, want)
		}
	}
}
