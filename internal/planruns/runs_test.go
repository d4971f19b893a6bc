package planruns

import (
	"testing"

	"github.com/stowage-dev/stowage/plan"
)

// Every run has a setup that the planner accepts, a release and a throughput.
func TestAll(t *testing.T) {
	runs := All()
	if len(runs) < 140 {
		t.Fatalf("%d runs", len(runs))
	}
	seen := map[string]bool{}
	for _, r := range runs {
		if _, err := r.Setup.Normalise(); err != nil {
			t.Errorf("%s: %v", r.Settings, err)
		}
		if r.Release == "" || r.Tokens <= 0 || r.Model == "" {
			t.Errorf("%+v", r)
		}
		if key := r.Release + r.Settings; seen[key] {
			t.Errorf("%s is twice in release %s", r.Settings, r.Release)
		} else {
			seen[key] = true
		}
	}
}

// A row becomes the settings that its recipe names.
func TestSettings(t *testing.T) {
	for _, r := range All() {
		if r.Release != "26.06" || r.Model != "deepseek-v3" || r.Setup.Hardware.Name != "gb300" {
			continue
		}
		s := r.Setup
		if s.Precision.Compute != plan.MXFP8 || !s.Precision.ParamGather || !s.Precision.Attention || !s.Precision.OutputLayer ||
			!s.Kernels.OpFuser || s.Kernels.Dispatcher != "hybridep" || !s.Layout.OverlapEP || s.Layout.VPP != 8 ||
			len(s.Stash.Modules) == 0 || len(s.Graph.Scopes) != 1 || len(s.Recompute.Modules) != 0 {
			t.Errorf("%s became %+v", r.Settings, s)
		}
		return
	}
	t.Fatal("release 26.06 has no DeepSeek-V3 on GB300")
}
