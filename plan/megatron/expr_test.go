package megatron

import (
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/input/inputtest"
)

func TestLayerPattern(t *testing.T) {
	for _, c := range []struct {
		text string
		n    int
		want string
	}{
		{"1", 3, "111"},
		{"2", 5, "10101"},
		{"([0]*3+[1]*11)", 14, "00011111111111"},
		{"[0]*1 + [1]*1", 2, "01"},
		{"([1]*3+[0]*1)*3", 12, "111011101110"},
		{"[0,1,1]", 3, "011"},
		{"(([0]))*2+[1]", 3, "001"},
		{"[]*5+[1]", 1, "1"},
	} {
		got, err := layerPattern("moe-layer-freq", c.text, c.n)
		if err != nil {
			t.Errorf("%s: %v", c.text, err)
			continue
		}
		bits := ""
		for _, b := range got {
			bits += map[bool]string{true: "1", false: "0"}[b]
		}
		if bits != c.want {
			t.Errorf("%s is %s, want %s", c.text, bits, c.want)
		}
	}
	for text, want := range map[string]string{
		"0":                        "must be positive",
		"-1":                       "must be positive",
		"[0]*3+[1]*5":              "describes 8 layers, but --num-layers is 4",
		"[0]*2+[2]*2":              "0 or 1, not 2",
		"[0]*2+":                   "a list such as",
		"[0]*2)":                   "does not belong there",
		"([0]*4":                   "')' is missing",
		"[0 1 1":                   "']' is missing",
		"[0,1":                     "']' is missing",
		"[0]*99999999999999999999": "a number up to",
		"[0]*60000*60000":          "more than 65536 layers",
		"[0]*60000" + strings.Repeat("+[0]*60000", 400): "more than 65536 layers",
		"__import__('os')":                "a list such as",
		strings.Repeat("(", 1000) + "[0]": "too deeply",
	} {
		if _, err := layerPattern("moe-layer-freq", text, 4); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40s: error %v, want %q", text, err, want)
		}
	}
}

func TestLastOfEach(t *testing.T) {
	got, err := lastOfEach("linear-attention-freq", "4", 8)
	if err != nil || !slices.Equal(got, []bool{true, true, true, false, true, true, true, false}) {
		t.Errorf("every fourth: %v, %v", got, err)
	}
}

func TestPatternRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		marks := rapid.SliceOfN(rapid.Bool(), 1, 30).Draw(t, "marks")
		got, err := layerPattern("moe-layer-freq", formatPattern(marks), len(marks))
		if err != nil || !slices.Equal(got, marks) {
			t.Fatalf("%v is written as %s and read as %v (%v)", marks, formatPattern(marks), got, err)
		}
	})
}

func FuzzLayerPattern(f *testing.F) {
	for _, s := range []string{"2", "([0]*3+[1]*11)", "[0,1]*7", "(((", "[1]*1*1*1", "[]"} {
		f.Add(s, 14)
	}
	f.Fuzz(func(t *testing.T, s string, n int) {
		defer inputtest.Bound(t, len(s))()
		n = min(max(n, 0), 1000)
		if got, err := layerPattern("f", s, n); err == nil && len(got) != n {
			t.Fatalf("%q gives %d layers of %d", s, len(got), n)
		}
	})
}

func FuzzHybridPattern(f *testing.F) {
	for _, s := range []string{"M-M-M*-", "M-M-|M*-E/MM/MM", "/", "E//*E", `M\|M`, "|"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		defer inputtest.Bound(t, len(s))()
		p, err := parsePattern(s)
		if err != nil {
			return
		}
		again, err := parsePattern(p.String())
		if err != nil || again.String() != p.String() || !slices.Equal(again.stages, p.stages) || again.depth != p.depth {
			t.Fatalf("%q is %+v, read again as %+v (%v)", s, p, again, err)
		}
	})
}
