// This file owns the tests of figures: what the ending of a key makes of a number.

package report

import (
	"fmt"
	"testing"
)

// A time is the same in every unit that a key may end with, and no ending changes another
// figure. The label is the key without its ending.
func TestUnitsOfFigures(t *testing.T) {
	for ending, x := range map[string]struct {
		value float64
		want  Figure
	}{
		"_us":      {1500, Figure{Unit: Millis, Value: 1.5}},
		"_ms":      {1.5, Figure{Unit: Millis, Value: 1.5}},
		"_seconds": {0.0015, Figure{Unit: Millis, Value: 1.5}},
		"_bytes":   {7, Figure{Unit: Bytes, Value: 7}},
		"_percent": {7, Figure{Unit: Percent, Value: 7}},
		"_ratio":   {7, Figure{Unit: Ratio, Value: 7}},
	} {
		for name, label := range map[string]string{"x": "x", "a_b": "a b"} {
			x.want.Name, x.want.Label = name+ending, label
			if got := ParseFigures(fmt.Appendf(nil, `{%q: %g}`, name+ending, x.value)); len(got) != 1 || got[0] != x.want {
				t.Errorf("%g %s is %+v, want %+v", x.value, name+ending, got, x.want)
			}
		}
	}
	for _, name := range []string{"steps", "tokens_per_second", "tokens_per_seconds", "bus"} {
		if got := ParseFigures(fmt.Appendf(nil, `{%q: 7}`, name)); len(got) != 1 || got[0].Unit != Count || got[0].Value != 7 {
			t.Errorf("7 %s is %+v", name, got)
		}
	}
}
