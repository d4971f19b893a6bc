package planview

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/memory"
)

// sample is a report with something of everything. Its figures are made up by a
// rule, so that the picture has a shape: 1F1B on rank 1 of 8.
func sample() *Report {
	const gib = 1 << 30
	r := &Report{
		Version: Version, Command: "stowage plan --model deepseek-v3 --gpu h100 --gpus 256 --pp 8 --ep 32 --gbs 1024",
		Model:    Model{Name: "deepseek-v3", Layers: 61, Hidden: 7168, Vocab: 129280, Parameters: 671026419200, Experts: 256, TopK: 8, MTP: 1},
		Hardware: &Hardware{Name: "h100", Memory: 80 * gib, Usable: 74 * gib}, Budget: 74 * gib, BudgetFrom: "what an h100 leaves",
		Setup: Setup{
			GPUs: 256, TP: 1, PP: 8, VPP: 1, CP: 1, EP: 32, ETP: 1, DP: 32, EDP: 1, Shard: "optimizer", MicroBatch: 1, GlobalBatch: 1024, Seq: 4096, Microbatches: 32,
			Precision: "bf16", Optimizer: "adam, distributed", Loss: "te", Recompute: "selective", RecomputeModules: []string{"moe_act", "layernorm"},
			OffloadModules: []string{"core_attn"}, OffloadFraction: 0.5, Routing: "skewed", Imbalance: 1.1,
		},
		Heaviest: 1, Fits: true, Spare: 3 * gib,
	}
	names := []string{"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "router"}
	for i := range r.Setup.PP {
		live := memory.Bytes(8 - i)
		k := Rank{Rank: i, Holds: fmt.Sprintf("layers %d-%d", 8*i, 8*i+7), At: "in the backward of microbatch 0, layer 7", Host: live * gib / 4}
		bytes := []memory.Bytes{12 * gib, 6 * gib, 9 * gib, gib / 2, 4 * live * gib, 2 * gib, 0, 0}
		var sum memory.Bytes
		for c, name := range []string{"weights", "gradients", "optimizer", "fixed", "activations", "transient", "pools", "graphs"} {
			sum += bytes[c]
			k.Causes = append(k.Causes, Cause{name, bytes[c]})
			k.Items = append(k.Items, Item{Cause: name, Name: "all of it", Bytes: bytes[c], Static: c < 4})
		}
		for g, name := range names {
			k.Groups = append(k.Groups, Group{Name: name, Bytes: memory.Bytes(g+1) * gib / 72, Live: int(live) * 8, Total: memory.Bytes(g+1) * live * gib / 9, Away: gib / 8})
		}
		k.Peak = Band{sum * 98 / 100, sum, sum * 102 / 100}
		k.Reserved = Band{sum * 101 / 100, sum * 105 / 100, sum * 109 / 100}
		k.Static = Band{27 * gib, 27*gib + gib/2, 28 * gib}
		r.Ranks = append(r.Ranks, k)
	}
	r.Peak, r.Reserved = r.Ranks[1].Peak, r.Ranks[1].Reserved
	live := memory.Bytes(0)
	for i := range 64 {
		back := i >= 7 && (i < 57 && i%2 == 1 || i >= 57)
		if !back {
			live++
		}
		p := Point{Microbatch: i / 2, Backward: back, What: "layer 7", Static: 27*gib + gib/2, Live: 4 * live * gib}
		if back {
			p.Transient = 2 * gib
			live--
		}
		for g := range names {
			p.Groups = append(p.Groups, p.Live*memory.Bytes(g+1)/36)
		}
		r.Timeline = append(r.Timeline, p)
	}
	r.decide()
	return r
}

// decide adds to a sample what a search found.
func (r *Report) decide() {
	const gib = 1 << 30
	r.Decisions = []Decision{
		{
			Group: "core_attn", Choice: "offload", Bytes: 537 << 20, Window: 0.0121, Copy: 0.0097, Reason: "537 MB move to host memory (core_attn), the copy hides",
			Chosen:   []Alternative{{"offload core_attn", "537 MB a layer, window 12.1 ms, copy 9.7 ms: hides; 50 % on ranks 0 to 7"}},
			Rejected: []Alternative{{"recompute", "frees nothing: its inputs stay"}},
		},
		{Group: "moe_act", Choice: "recompute", Bytes: 268 << 20, Window: 0.0121, Copy: 0.0049, Cost: 0.0002, Reason: "0.2 ms a layer"},
		{Group: "attn_norm", Choice: "keep", Bytes: 56 << 20, Reason: "it fits <b>as it is</b> & costs nothing"},
	}
	r.Search = &Search{
		Over: "layout", Tried: 48, Possible: 512, Unfit: 37, BarePeak: 80 * gib, BareStep: 8.9,
		Best: []Candidate{
			{Name: "PP 8 EP 32 DP 32, microbatch 1", Policy: "offload core_attn", Step: 9.1, Peak: 58 * gib, Reason: "the fastest that fits"},
			{Name: "PP 16 EP 16 DP 16, microbatch 1", Policy: "everything kept", Step: 10.2, Peak: 60 * gib, Reason: "12.1 % slower: 1.1 s more in waiting in the pipeline"},
		},
		Shares: []Share{{Rank: 0, Fraction: 0.5, Host: gib, Step: gib, Link: 0.3}}, Pools: []Pool{{Name: "host slab of offloaded groups", Bytes: gib}},
	}
	r.Time = &Time{Step: 9.1, Bubble: 1.2, Update: 0.05, Recompute: 0.21, Copies: 0.1, Tokens: 460000, TFLOPS: 410}
	r.Flags = []Flags{{For: "megatron", Text: "--recompute-granularity selective --recompute-modules moe_act layernorm"}, {For: "stowage", Text: "--policy offload=core_attn", Notes: []string{"stowage train has no VPP"}}}
	r.Warnings = []string{"--tp-comm-overlap is not part of the forecast"}
}

func written(t testing.TB, r *Report) string {
	t.Helper()
	var b bytes.Buffer
	if err := r.WritePage(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestPage(t *testing.T) {
	page := written(t, sample())
	golden.Check(t, "page.html", page)
	inside := strings.ReplaceAll(page, `href="#`, "") // links within the page
	for _, bad := range []string{"http:", "https:", "src=", "href=", "@import", "ZgotmplZ", "<b>as it is</b>"} {
		if strings.Contains(inside, bad) {
			t.Errorf("the page contains %q", bad)
		}
	}
}

// Names of the report, once given, stay: scripts read them.
func TestReportNames(t *testing.T) {
	text, err := json.MarshalIndent(sample(), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	seen := map[string]bool{}
	for _, m := range regexp.MustCompile(`"(\w+)":`).FindAllStringSubmatch(string(text), -1) {
		if !seen[m[1]] {
			seen[m[1]] = true
			names = append(names, m[1])
		}
		if m[1] != strings.ToLower(m[1]) {
			t.Errorf("the name %s is not in small letters", m[1])
		}
	}
	golden.Check(t, "names.txt", strings.Join(names, "\n")+"\n")
}

// A report with nothing in it still makes a page.
func TestEmptyReport(t *testing.T) {
	page := written(t, &Report{})
	if strings.Contains(page, `id="chart"`) || strings.Contains(page, `id="data"`) || strings.Contains(page, "NaN") || !strings.Contains(page, "does not say whether the job fits") {
		t.Errorf("an empty report gives %s", page)
	}
}

// The bars of a rank add up to its share of the scale, nothing is wider than the
// picture, and the timeline's topmost line reaches the peak.
func TestGeometry(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.Map(rapid.Int64Range(0, 1<<42), func(n int64) memory.Bytes { return memory.Bytes(n) })
		r := &Report{Budget: size.Draw(t, "budget")}
		for i := range rapid.IntRange(1, 5).Draw(t, "ranks") {
			k := Rank{Rank: i}
			for _, n := range rapid.SliceOfN(size, 8, 8).Draw(t, "causes") {
				k.Causes = append(k.Causes, Cause{Name: fmt.Sprint(len(k.Causes)), Bytes: n})
				k.Peak.Expected += n
			}
			k.Peak.High = k.Peak.Expected
			k.Reserved = Band{k.Peak.Expected, k.Peak.Expected + 5, k.Peak.Expected + 9 + size.Draw(t, "at most")}
			k.Groups = []Group{{Name: "a"}, {Name: "b"}}
			r.Ranks = append(r.Ranks, k)
		}
		r.Heaviest = rapid.IntRange(0, len(r.Ranks)-1).Draw(t, "heaviest")
		if near := r.Ranks[r.Heaviest].Reserved; rapid.Bool().Draw(t, "close") {
			r.Budget = rapid.SampledFrom([]memory.Bytes{near.Low, near.Expected, near.High - 1, near.High}).Draw(t, "near")
		}
		b := makeBars(r)
		for i, row := range b.Rows {
			width := 0.0
			for _, p := range row.Parts {
				width += p.Width
			}
			want := 100 * float64(r.Ranks[i].Peak.Expected) / float64(b.Scale)
			k := &r.Ranks[i]
			if row.Over != (r.Budget > 0 && k.Reserved.High > r.Budget) || row.Heaviest != (i == r.Heaviest) || row.Rank != k {
				t.Fatalf("rank %d of %+v is drawn as %+v", i, k, row)
			}
			place := func(n memory.Bytes) float64 { return 100 * float64(n) / float64(b.Scale) }
			if row.Low != place(k.Reserved.Low) || row.High != place(k.Reserved.High) || row.Reserved != place(5) || b.Budget != place(r.Budget) {
				t.Fatalf("rank %d of %+v is drawn as %+v on a scale of %d", i, k, row, b.Scale)
			}
			if width > 100 || width < want-1e-6 || width > want+1e-6 || row.High > 100 || b.Budget > 100 {
				t.Fatalf("rank %d is %g wide, want %g; it ends at %g, the budget at %g", i, width, want, row.High, b.Budget)
			}
		}
		for range rapid.IntRange(1, 20).Draw(t, "passes") {
			g := []memory.Bytes{size.Draw(t, "a"), size.Draw(t, "b")}
			r.Timeline = append(r.Timeline, Point{Static: size.Draw(t, "static"), Transient: size.Draw(t, "transient"), Live: g[0] + g[1], Groups: g})
		}
		line := makeTimeline(r)
		for _, p := range r.Timeline {
			if p.Bytes() > r.Timeline[line.Peak].Bytes() {
				t.Fatalf("pass %d is not the peak", line.Peak)
			}
		}
		if line.PeakY < 0 || line.PeakY > 100 || line.Budget > 100 {
			t.Fatalf("the peak is at %g, the budget at %g", line.PeakY, line.Budget)
		}
		if len(line.Areas) > 0 {
			if y := fmt.Sprintf("V%d", height-int((1-line.PeakY/100)*height+0.5)); r.Timeline[line.Peak].Bytes() > 1<<36 && !strings.Contains(line.Areas[0].Path, y) {
				t.Fatalf("the topmost area does not reach the peak at %s: %s", y, line.Areas[0].Path)
			}
		}
	})
}

func TestWords(t *testing.T) {
	for got, want := range map[string]string{
		Size(0): "0 B", Size(1023): "1023 B", Size(1536): "1.5 KiB", Size(5 << 20): "5.0 MiB", Size(3 << 30): "3.00 GiB", Size(-3 << 30): "-3.00 GiB",
		Seconds(0): "0", Seconds(1.5): "1.50 s", Seconds(0.0019): "1.90 ms", Seconds(42e-6): "42 µs", Seconds(0.31): "310 ms", Seconds(0.0121): "12.1 ms", MiB(537 << 20): "537 MiB",
		Count(671026419200): "671.0B", Count(8030261248): "8.0B", Count(1_500_000): "1.5M", Count(2e12): "2.0T", Count(12): "12",
		Count(1e6): "1.0M", Count(999_999): "999999", placeWords("mlp"): "mlp", placeWords("layer 1 mlp, mlp"): "layer 1 mlp", placeWords("layer 1, mlp"): "layer 1, mlp",
		clip(""): "none", clip(strings.Repeat("x", 36)): strings.Repeat("x", 36), clip(strings.Repeat("é", 37)): strings.Repeat("é", 35) + "…",
		Offloaded(Setup{OffloadModules: []string{"moe_act"}, OffloadFraction: 1}): "moe_act", Parallel(Setup{SequenceParallel: true, TP: 1, Shard: "gradients"}): "TP 1, PP 0, VPP 0, CP 0, EP 0, ETP 0, DP 0, sharded gradients",
		shareWords([]Share{{Rank: 0}, {Rank: 1, Fraction: 0.5}, {Rank: 2, Fraction: 0.5}, {Rank: 3, Fraction: 1}}): "0 % on rank 0, 50 % on ranks 1 to 2, 100 % on rank 3", shareWords([]Share{{Rank: 0}, {Rank: 1}}): "",
		packFlags(strings.Repeat("--flag-of-twenty-four-00 \\\n", 8) + "end"): "  " + strings.Repeat("--flag-of-twenty-four-00 ", 3) + "\\\n  " + strings.Repeat("--flag-of-twenty-four-00 ", 3) + "\\\n  " + strings.Repeat("--flag-of-twenty-four-00 ", 2) + "end\n",
		GiB(3 << 29): "1.50", words(nil): "none", words([]string{"a", "b"}): "a, b",
		Offloaded(Setup{OffloadModules: []string{"moe_act"}, OffloadFractions: []float64{0.75, 0.25, 0}}): "moe_act, 0 to 0.75 of them by rank",
		Routed(sample().Setup): "skewed, 1.1 x the mean on the fullest expert rank", Routed(Setup{Routing: "balanced", Imbalance: 1}): "balanced",
		Offloaded(sample().Setup): "core_attn, 0.5 of them", Recomputed(Setup{Recompute: "full"}): "full", Recomputed(Setup{Recompute: "full", RecomputeLayers: 3}): "full, the first 3 layers of each stage", Recomputed(sample().Setup): "moe_act, layernorm",
		Parallel(Setup{TP: 2, PP: 1, VPP: 1, CP: 1, EP: 1, ETP: 1, DP: 4, SequenceParallel: true, Shard: "none"}): "TP 2, PP 1, VPP 1, CP 1, EP 1, ETP 1, DP 4, sequence parallel",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// The legend names the causes that any rank holds, in the order and the colours of the bars.
func TestLegend(t *testing.T) {
	r := &Report{Ranks: []Rank{
		{Causes: []Cause{{"a", 1}, {"b", 0}, {"c", 0}, {"d", 2}, {"e", 0}}}, {Causes: []Cause{{"a", 1}, {"b", 3}, {"c", 0}, {"d", 0}, {"e", 5}}},
	}}
	if got := fmt.Sprint(makeBars(r).Legend); got != "[{a 0} {b 1} {d 3} {e 4}]" {
		t.Errorf("the legend is %s", got)
	}
}
