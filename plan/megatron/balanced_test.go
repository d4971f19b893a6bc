// This file owns the tests of layers that do not divide over the stages.

package megatron

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/plan/model"
)

// Layers that do not divide over the stages are divided as users do by hand. A note has the
// layout, and the flags ask for it. SPEC S6.1
func TestUnevenLayersAreDivided(t *testing.T) {
	for name, want := range map[string]map[[2]int]string{
		"deepseek-v3":   {{8, 1}: "Et*8|(t*8|)*6t*5mL", {16, 1}: "Et*4|(t*4|)*14tmL", {4, 4}: "Et*4|(t*4|)*14tmL", {8, 4}: "Et|(tt|)*30mL", {5, 1}: "Et*13|(t*13|)*3t*9mL"},
		"llama-3-8b":    {{5, 1}: "Et*7|(t*7|)*3t*4L", {3, 2}: "Et*6|(t*6|)*4ttL"},
		"nemotron-h-8b": {{3, 1}: "Et*18|t*18|t*16L"},
	} {
		m, err := model.Preset(name)
		if err != nil {
			t.Fatal(err)
		}
		for sizes, layout := range want {
			args := map[string]any{"bf16": true, "micro-batch-size": 1, "seq-length": 4096, "pipeline-model-parallel-size": sizes[0], "num-virtual-stages-per-pipeline-rank": sizes[1]}
			s, warnings, err := FromArgs(args, Options{Model: m, GPUs: sizes[0]})
			if err != nil {
				t.Errorf("%s %v: %v", name, sizes, err)
				continue
			}
			if i := slices.IndexFunc(warnings, func(w Warning) bool { return strings.Contains(w.Text, `"`+layout+`"`) }); i < 0 {
				t.Errorf("%s %v: %q is not among the notes %v", name, sizes, layout, warnings)
			}
			last := s.Layout.Stages[len(s.Layout.Stages)-1]
			for i, st := range s.Layout.Stages[:len(s.Layout.Stages)-1] {
				if st.Last-st.First < last.Last-last.First || st.MTP || st.Loss {
					t.Errorf("%s %v: stage %d is %+v, the last %+v", name, sizes, i, st, last)
				}
			}
			again, _, err := FromArgs(asArgs(t, s), Options{GPUs: sizes[0]})
			if err != nil || name != "nemotron-h-8b" && !reflect.DeepEqual(again.Layout.Stages, s.Layout.Stages) {
				t.Errorf("%s %v: the flags give %+v, %v", name, sizes, again, err)
			}
		}
	}
}

// What no layout can do is an error, and so is a file of arguments that Megatron-LM would
// refuse.
func TestUnevenLayersRefused(t *testing.T) {
	m, err := model.Preset("deepseek-v3")
	if err != nil {
		t.Fatal(err)
	}
	args := map[string]any{"bf16": true, "micro-batch-size": 1, "seq-length": 4096, "pipeline-model-parallel-size": 64}
	if _, _, err := FromArgs(args, Options{Model: m, GPUs: 64}); err == nil || !strings.Contains(err.Error(), "use 61") {
		t.Errorf("64 stages: %v", err)
	}
	args["pipeline-model-parallel-size"], args["decoder-first-pipeline-num-layers"] = 8, 4
	if _, _, err := FromArgs(args, Options{Model: m, GPUs: 8}); err == nil || !strings.Contains(err.Error(), "decoder-first") {
		t.Errorf("4 layers in the first of 8 stages: %v", err)
	}
	if _, _, err := FromArgs(small("pipeline-model-parallel-size", 7, "global-batch-size", 2), Options{GPUs: 14}); err == nil {
		t.Error("7 stages of 8 layers, from a file: no error")
	}
}
