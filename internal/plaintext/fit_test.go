package plaintext_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stowage-dev/stowage/internal/plaintext"
)

const ranks = `memory of each pipeline rank at its peak, GiB
  rank  weights    grads    optim  allocated       ±  reserved
     0     3.49     6.99    16.40      46.64    3.73     49.44
*    1     3.25     6.50    16.22      46.91    3.75     49.73
`

func TestFit(t *testing.T) {
	for name, c := range map[string]struct {
		text  string
		width int
		want  string
	}{
		"short": {"one\n\n  two  three\n", 80, "one\n\n  two  three\n"},
		"prose": {"note: a sentence that is longer than forty columns are\nand another line\n", 40,
			"note: a sentence that is longer than\n  forty columns are\nand another line\n"},
		"broken before": {"  " + strings.Repeat("word ", 19) + "word\n    and its rest\nnext\n", 60,
			"  " + strings.Repeat("word ", 10) + "word\n    " + strings.Repeat("word ", 8) + "word and its\n    rest\nnext\n"},
		"broken before, wider": {"  " + strings.Repeat("word ", 19) + "word\n    and its rest\n", 120,
			"  " + strings.Repeat("word ", 19) + "word and its rest\n"},
		"table, fewer blanks": {ranks, 58, `memory of each pipeline rank at its peak, GiB
  rank  weights  grads  optim  allocated     ±  reserved
     0     3.49   6.99  16.40      46.64  3.73     49.44
*    1     3.25   6.50  16.22      46.91  3.75     49.73
`},
		"table, one blank": {ranks, 50, `memory of each pipeline rank at its peak, GiB
  rank weights grads optim allocated    ± reserved
     0    3.49  6.99 16.40     46.64 3.73    49.44
*    1    3.25  6.50 16.22     46.91 3.75    49.73
`},
		"table, divided": {ranks, 45, `memory of each pipeline rank at its peak, GiB
  rank  weights  grads  optim  allocated
     0     3.49   6.99  16.40      46.64
*    1     3.25   6.50  16.22      46.91

  rank     ±  reserved
     0  3.73     49.44
*    1  3.75     49.73
`},
		"table with long names": {"run                             kind      predicted   measured\nDeepSeek-V3 256 x GB200 MXFP8   moe            3955       4000\n", 50,
			"run\n    kind  predicted  measured\nDeepSeek-V3 256 x GB200 MXFP8\n    moe        3955      4000\n"},
		"a heading for two columns": {`model               fixed           max         arena       recorded
a             7.10   100%    7.10  123%   3.55   100%    3.55   100%
b            10.06     8%   10.06    8%   3.55     8%    3.55     8%
`, 40, `model         fixed          max
a       7.10   100%   7.10  123%
b      10.06     8%  10.06    8%

model        arena     recorded
a      3.55   100%  3.55   100%
b      3.55     8%  3.55     8%
`},
		"two tables": {`  cause         what                                           GiB
  weights       weights                                       3.25
  fixed         gradients returned by fused products          0.41
  group                   a layer   live        GiB  offloaded  recomputed
  attn_norm                32 MiB     23       0.72       0.00        0.00
`, 60, `  cause    what                                   GiB
  weights  weights                               3.25
  fixed    gradients returned by fused products  0.41
  group      a layer  live   GiB  offloaded  recomputed
  attn_norm   32 MiB    23  0.72       0.00        0.00
`},
		"table with prose": {"group       a layer   decision      reason\nattn_norm    32 MiB   keep          kept; recomputing it would free more than it costs to wait for it\n", 60,
			"group      a layer  decision  reason\nattn_norm   32 MiB  keep      kept; recomputing it would\n                              free more than it costs to\n                              wait for it\n"},
		"flags": {"  --num-layers 32 --hidden-size 4096 --bf16 \\\n  --swiglu --seq-length 8 --lr 1\n", 40,
			"  --num-layers 32 --hidden-size 4096 \\\n  --bf16 --swiglu --seq-length 8 --lr 1\n"},
		"a word that is longer": {"see /a/path/that/is/longer/than/the/terminal/has/columns/at/all now\n", 40,
			"see\n  /a/path/that/is/longer/than/the/terminal/has/columns/at/all\n  now\n"},
	} {
		if got := plaintext.Fit(c.text, c.width); got != c.want {
			t.Errorf("%s:\n%s\nwant\n%s", name, got, c.want)
		}
	}
}

func TestFitHelp(t *testing.T) {
	help := `Measure this machine through the same device that training uses. The results
are kept.

Usage:
  stowage bench [flags]

Examples:
  stowage bench offload --model deepseek-v3 --layers 6 --json

Flags:
      --size sizes   sizes to copy, separated by commas,
                     of any number
  -h, --help         help
`
	if got := plaintext.FitHelp(help, 80); got != help {
		t.Errorf("what fits changes:\n%s", got)
	}
	want := `Measure this machine through the same device
that training uses. The results are kept.

Usage:
  stowage bench [flags]

Examples:
  stowage bench offload --model deepseek-v3 \
    --layers 6 --json

Flags:
      --size sizes
          sizes to copy, separated by commas, of
          any number
  -h, --help         help
`
	if got := plaintext.FitHelp(help, 48); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	for _, width := range []int{0, 1, 39} {
		if plaintext.FitHelp(help, width) != plaintext.FitHelp(help, 40) || plaintext.Fit(help, width) != plaintext.Fit(help, 40) {
			t.Errorf("help for %d columns is not that of the fewest", width)
		}
	}
}

// Text of any kind keeps its words, and lines are too long only for the sake of a word.
func FuzzFit(f *testing.F) {
	for _, text := range []string{ranks, "", "\n\n", strings.Repeat(" ", 200) + "\n", strings.Repeat("a  ", 50) + "\n", strings.Repeat("a", 79) + "  \t\n", "x \\\n", strings.Repeat("word ", 9) + "\\", "é  漢  ß\n", strings.Repeat("word ", 40) + "\n  " + strings.Repeat("w", 90)} {
		f.Add(text, 50, false)
		f.Add(text, 80, true)
	}
	f.Fuzz(func(t *testing.T, text string, width int, help bool) {
		text = strings.ToValidUTF8(text, "")
		fit := plaintext.Fit
		if help {
			fit = plaintext.FitHelp
		}
		got := fit(text, width)
		if !help && !strings.Contains(text, "  ") && !strings.Contains(text, `\`) && !slices.Equal(strings.Fields(got), strings.Fields(text)) && !strings.Contains(text, "stowage") {
			t.Errorf("the words of %q changed: %q", text, got)
		}
		for _, line := range strings.Split(got, "\n") {
			if n := utf8.RuneCountInString(line); n > max(width, 40) && len(strings.Fields(line)) > 2 && !strings.Contains(line, "  ") && !strings.Contains(text, "\t") {
				t.Errorf("%d columns of %d: %q", n, width, line)
			}
		}
	})
}

// Drawn commands, over several lines and in one, keep their words at every width, and no line
// is wider, because all words are short. Every line but the last ends with a backslash.
func TestCommandsFit(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	word := func(most int) string { return strings.Repeat("x", 1+r.IntN(most)) }
	for range 100 {
		lines := []string{"stowage " + word(9)}
		indent := strings.Repeat(" ", 2*r.IntN(4))
		several := r.IntN(2) == 0
		for range 1 + r.IntN(12) {
			flag := "--" + word(12)
			for range r.IntN(9) {
				flag += " " + word(9)
			}
			if several {
				lines = append(lines, flag)
			} else {
				lines[0] += " " + flag
			}
		}
		text := indent + strings.Join(lines, " \\\n"+indent) + "\n"
		for width := 40; width <= 120; width += 1 + r.IntN(7) {
			got := strings.Split(strings.TrimSuffix(plaintext.Fit(text, width), "\n"), "\n")
			var words []string
			for i, line := range got {
				whole, goesOn := strings.CutSuffix(line, ` \`)
				words = append(words, strings.Fields(whole)...)
				if n := utf8.RuneCountInString(line); n > width || goesOn == (i == len(got)-1) {
					t.Fatalf("width %d: line %d has %d columns:\n%s\nof\n%s", width, i+1, n, strings.Join(got, "\n"), text)
				}
			}
			if want := strings.Fields(strings.ReplaceAll(text, ` \`, "")); !slices.Equal(words, want) {
				t.Fatalf("width %d: the words %q became %q", width, want, words)
			}
		}
	}
}
