package input

import "testing"

func TestNumbers(t *testing.T) {
	for _, c := range []struct {
		text  string
		whole bool
		x     float64
		ok    bool
	}{
		{"8", true, 8, true}, {"+8", true, 8, true}, {"-8", true, -8, true}, {"008", true, 8, true}, {"8.", false, 8, true}, {".5", false, .5, true}, {"-1.5e-3", false, -1.5e-3, true}, {"1E3", false, 1000, true},
		{"99999999999999999999", true, 1e20, true}, {"1e-999", false, 0, true},
		{"", false, 0, false}, {".", false, 0, false}, {"-", false, 0, false}, {" 8", false, 0, false}, {"8 ", false, 0, false}, {"8\n", false, 0, false}, {"0x10", false, 0, false}, {"0b1", false, 0, false},
		{"0o7", false, 0, false}, {"1_000", false, 0, false}, {"0x1p-3", false, 0, false}, {"1_0e1", false, 0, false}, {"1e", false, 0, false}, {"1e5.5", false, 0, false}, {"1e999", false, 0, false},
		{"nan", false, 0, false}, {"inf", false, 0, false}, {"+Inf", false, 0, false}, {"infinity", false, 0, false}, {"٣", false, 0, false}, {"３", false, 0, false}, {"½", false, 0, false}, {"1,5", false, 0, false}, {"--8", false, 0, false},
	} {
		if got := IsWhole(c.text); got != c.whole {
			t.Errorf("IsWhole(%q) is %t", c.text, got)
		}
		if x, ok := Number(c.text); ok != c.ok || ok && x != c.x {
			t.Errorf("Number(%q) is %g, %t, want %g, %t", c.text, x, ok, c.x, c.ok)
		}
	}
}
