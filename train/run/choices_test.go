// This file owns tests of the policy table: what it says of each group, and why.

package run

import (
	"testing"

	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/memory"
)

func TestChoicesSayWhy(t *testing.T) {
	unit := func(name string, layer int, c memory.Choice, why string) policy.Reason {
		return policy.Reason{UnitForecast: policy.UnitForecast{Unit: memory.Unit{Name: name, Layer: layer}, Choice: c}, Why: why}
	}
	s := memory.Summary{Groups: []memory.GroupSummary{
		{Name: "core_attn", Bytes: 70, Moved: 30, Units: map[memory.Choice]int{memory.Keep: 1, memory.Offload: 2}},
		{Name: "mlp", Bytes: 9},
	}}
	reasons := []policy.Reason{
		unit("core_attn", 0, memory.Offload, "it hides"), unit("core_attn", 1, memory.Offload, "it hides"), unit("core_attn", 2, memory.Keep, "it is last"),
	}
	for _, x := range []struct {
		d    *policy.Decision
		want [2]string
	}{
		{nil, [2]string{"not decided yet", "not decided yet"}},
		{&policy.Decision{Nothing: true, Reasons: reasons}, [2]string{"keep: nothing needs its memory", "keep: nothing needs its memory"}},
		{&policy.Decision{Reasons: reasons[:2]}, [2]string{"offload: it hides", "keep: nothing needs its memory"}},
		{&policy.Decision{Reasons: reasons}, [2]string{"2 offload: it hides; 1 keep: it is last", "keep: nothing needs its memory"}},
	} {
		rows := choices(s, x.d)
		if len(rows) != 2 || rows[0].Reason != x.want[0] || rows[1].Reason != x.want[1] {
			t.Errorf("%+v; want %q", rows, x.want)
			continue
		}
		if r := rows[0]; r.Group != "core_attn" || r.Saved != 70 || r.Moved != 30 || r.Units["keep"] != 1 || r.Units["offload"] != 2 || rows[1].Saved != 9 {
			t.Errorf("%+v", rows)
		}
	}
}
