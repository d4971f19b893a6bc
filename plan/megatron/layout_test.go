package megatron

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/input/inputtest"
)

func TestParseLayout(t *testing.T) {
	for _, c := range []struct {
		text string
		want string // layers of each stage, with what else it holds
	}{
		{"Et*3|(tt|)*6L", "E3 2 2 2 2 2 2 L0"},
		{`Et*3\\\\|\\\\(tt\\\\|\\\\)*6L`, "E3 2 2 2 2 2 2 L0"},
		{"Et*2|(tt|)*5t|tmL", "E2 2 2 2 2 2 1 L1m1"},
		{"Ettt|(tt|)*29,m|L", "E3" + strings.Repeat(" 2", 29) + " 0m1 L0"},
		{"EtL", "EL1"},
		{"E|t*4|L", "E0 4 L0"},
		{"E(t|t)*2L", "E1 2 L1"},
		{"E||tL", "E0 0 L1"},
	} {
		pieces, err := parseLayout(c.text)
		if err != nil {
			t.Errorf("%s: %v", c.text, err)
			continue
		}
		words := []string{}
		for _, p := range pieces {
			w := ""
			if p.Embedding {
				w += "E"
			}
			if p.Loss {
				w += "L"
			}
			w += fmt.Sprint(p.Layers)
			if p.MTP > 0 {
				w += fmt.Sprintf("m%d", p.MTP)
			}
			words = append(words, w)
		}
		if got := strings.Join(words, " "); got != c.want {
			t.Errorf("%s is %s, want %s", c.text, got, c.want)
		}
	}
}

func TestLayoutRefused(t *testing.T) {
	for text, want := range map[string]string{
		"":                    "E must stand once",
		"tt|tL":               "E must stand once",
		"Ett|tt":              "L must stand once",
		"Et|EtL":              "E must stand once",
		"EtL|t":               "L must stand once",
		"Etx|L":               `"x" is none of E`,
		"E(tt|L":              "'(' is not closed",
		"Ett)|L":              "none of E",
		"Et*|L":               "'*' must be followed by a number",
		"Et*99999999999999|L": "'*' must be followed by a number",
		"E(t*60000)*60000|L":  "more than 65536 layers",
		"E(|)*5000L":          "more than 4096 stages",
		"E" + strings.Repeat("(t*60000)*1", 400) + "L": "more than 65536 layers",
		"EtmtL":                   "each in its place",
		"Etm|tL":                  "t must not come after m",
		"Etm|mL":                  "all m must stand in one stage",
		"E(((((t)*2)*2)*2)*2)*L":  "'*' must be followed by a number",
		strings.Repeat("(", 9999): "is not closed",
	} {
		if _, err := parseLayout(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40q: error %v, want %q", text, err, want)
		}
	}
}

func drawPieces(t *rapid.T, layers int) []piece {
	pieces := make([]piece, rapid.IntRange(1, 12).Draw(t, "stages"))
	for range layers {
		pieces[rapid.IntRange(0, len(pieces)-1).Draw(t, "at")].Layers++
	}
	return addEnds(pieces, 0)
}

// Writing and reading layouts are inverse, and so are stages and pieces.
func TestLayoutRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pieces := drawPieces(t, rapid.IntRange(0, 40).Draw(t, "layers"))
		depth := rapid.IntRange(0, 3).Draw(t, "depth")
		holder := len(pieces) - 1
		for holder > 0 && pieces[holder].Layers == 0 && rapid.Bool().Draw(t, "earlier") {
			holder--
		}
		pieces[holder].MTP = depth
		text := formatLayout(pieces)
		again, err := parseLayout(text)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(again, pieces) {
			t.Fatalf("%v written as %q is read as %v", pieces, text, again)
		}
		if back := piecesOf(stagesOf(pieces), depth); !slices.Equal(back, pieces) {
			t.Fatalf("%v through stages is %v", pieces, back)
		}
	})
}

// A suggestion is a layout of the requested size, and no stage has more than one layer more
// than another.
func TestSuggestLayout(t *testing.T) {
	if got := suggestLayout(61, 16, 1); got != "Et*3|(t*4|)*13t*3|t*3mL" {
		t.Errorf("61 layers on 16 stages: %s", got)
	}
	rapid.Check(t, func(t *rapid.T) {
		layers, stages, depth := rapid.IntRange(1, 200).Draw(t, "layers"), rapid.IntRange(1, 64).Draw(t, "stages"), rapid.IntRange(0, 2).Draw(t, "depth")
		text := suggestLayout(layers, stages, depth)
		pieces, err := layoutPieces(text, layers, stages, depth)
		if err != nil || len(pieces) != stages {
			t.Fatalf("%s: %v", text, err)
		}
		least, most := layers, 0
		for _, p := range pieces {
			least, most = min(least, p.Layers), max(most, p.Layers)
		}
		if most-least > 1 {
			t.Fatalf("%s is uneven", text)
		}
	})
}

func FuzzParseLayout(f *testing.F) {
	for _, s := range []string{"Et*3|(tt|)*6L", `Et*3\\|\\(tt\\|\\)*6L`, "Et*2|(tt|)*5t|tmL", "E(((t)*2|)*3)*2L", "E,t,,|L", "(*", "E|||L", "t*0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		defer inputtest.Bound(t, len(s))()
		pieces, err := parseLayout(s)
		if err != nil {
			return
		}
		again, err := parseLayout(formatLayout(pieces))
		if err != nil || !slices.Equal(again, pieces) {
			t.Fatalf("%q is %v, written as %q, read as %v (%v)", s, pieces, formatLayout(pieces), again, err)
		}
	})
}
