package plan

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/plan/model"
)

// words returns stages as a layout string of Megatron-LM.
func words(stages []Stage) string {
	var parts []string
	for _, s := range stages {
		w := strings.Repeat("t", s.Last-s.First)
		if s.Embedding {
			w = "E" + w
		}
		if s.MTP {
			w += "m"
		}
		if s.Loss {
			w += "L"
		}
		parts = append(parts, w)
	}
	return strings.Join(parts, "|")
}

func TestDefaultStages(t *testing.T) {
	deep, err := model.Preset("deepseek-v3")
	if err != nil {
		t.Fatal(err)
	}
	many := func(n int, w string) string { return strings.TrimSuffix(strings.Repeat(w+"|", n), "|") }
	ts := func(n int) string { return strings.Repeat("t", n) }
	for _, c := range []struct {
		layers, stages int
		want           string
	}{
		{8, 4, "Ett|tt|tt|ttmL"},
		{14, 4, "Etttt|tttt|tttt|ttmL"},
		// Megatron-Bridge's layouts of DeepSeek-V3.
		{61, 4, "E" + many(3, ts(16)) + "|" + ts(13) + "mL"},
		{61, 8, "E" + many(7, ts(8)) + "|" + ts(5) + "mL"},
		{61, 16, "E" + many(15, ts(4)) + "|tmL"},
		{61, 32, "Et|" + many(30, "tt") + "|mL"},
	} {
		m := *deep
		m.Layers = m.Layers[:c.layers]
		if got := words(DefaultStages(&m, c.stages, 1)); got != c.want {
			t.Errorf("%d layers on %d stages: %s, want %s", c.layers, c.stages, got, c.want)
		}
	}
}

// All layers are present and in order, with both ends, whatever the numbers.
func TestDefaultStagesHoldAll(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		layers, pp, vpp := rapid.IntRange(1, 130).Draw(t, "layers"), rapid.IntRange(1, 16).Draw(t, "pp"), rapid.IntRange(1, 6).Draw(t, "vpp")
		m := &model.Model{}
		dense := rapid.IntRange(0, layers).Draw(t, "dense")
		for i := range layers {
			l := model.Layer{Dense: &model.Dense{Width: 1}}
			if i >= dense {
				l = model.Layer{MoE: &model.MoE{Experts: 1, TopK: 1, Width: 1}}
			}
			m.Layers = append(m.Layers, l)
		}
		if rapid.Bool().Draw(t, "mtp") {
			m.MTP = &model.MTP{Depth: 1}
		}
		stages := DefaultStages(m, pp, vpp)
		if len(stages) != pp*vpp || !stages[0].Embedding || !stages[len(stages)-1].Loss {
			t.Fatal(words(stages))
		}
		at, heads := 0, 0
		for _, s := range stages {
			if s.First != at || s.Last < s.First {
				t.Fatal(words(stages))
			}
			at = s.Last
			if s.MTP {
				heads++
			}
		}
		if at != layers || heads != 1 {
			t.Fatalf("%d of %d layers, %d stages with heads: %s", at, layers, heads, words(stages))
		}
	})
}

func TestCheckNamesTheNearest(t *testing.T) {
	for _, c := range []struct {
		set  func(*Setup)
		want []string
	}{
		{func(s *Setup) { s.Model = nil }, []string{"no model"}},
		{func(s *Setup) { s.Layout.World = 100 }, []string{"world 100", "8", "nearest"}},
		{func(s *Setup) { s.Layout.TP = 3; s.Layout.World = 24 }, []string{"attention heads", "tp 3", "nearest tp is 2"}},
		{func(s *Setup) { s.Layout.EP = 24; s.Layout.World = 192 }, []string{"experts", "ep 24", "nearest ep is"}},
		{func(s *Setup) { s.Batch.Global = 100 }, []string{"global-batch-size 100", "32", "96"}},
		{func(s *Setup) { s.Batch.Seq = -1 }, []string{"seq-length is -1"}},
		{func(s *Setup) { s.Batch.Micro = -2 }, []string{"micro-batch-size is -2"}},
		{func(s *Setup) { s.Layout.CP = 4; s.Batch.Seq = 4098 }, []string{"seq-length 4098", "4100"}},
		{func(s *Setup) { s.Recompute.Modules = []string{"norm"} }, []string{"recompute module", `"norm"`, "layernorm"}},
		{func(s *Setup) { s.Offload.Modules = []string{"attn_proj"} }, []string{"attn_proj", "core_attn"}},
		{func(s *Setup) { s.Offload.Fraction = 1.5 }, []string{"offload fraction 1.5", "nearest is 1"}},
		{func(s *Setup) { s.Layout.PP, s.Layout.World = 1, 256 }, []string{"vpp 4", "pp to 2"}},
		{func(s *Setup) { s.Layout.Stages = make([]Stage, 3) }, []string{"3 stages", "32"}},
		{func(s *Setup) { s.Layout.FSDP.Pool = "ring" }, []string{"pool", `"ring"`, "max"}},
		{func(s *Setup) { s.Graph.Scopes = []string{"all"} }, []string{"graph scope", `"all"`}},
	} {
		s := deepSeek(t)
		c.set(s)
		err := s.Check()
		if err == nil {
			t.Errorf("no error; want one with %q", c.want)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%q does not say %q", err, w)
			}
		}
		if strings.Contains(fmt.Sprint(err), "\n") {
			t.Errorf("%q is more than one sentence", err)
		}
	}
}
