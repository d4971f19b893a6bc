package planvalidate

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/input/inputtest"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

func checkedIn(t testing.TB) []byte {
	t.Helper()
	data, err := os.ReadFile("testdata/measured_cases.json")
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func report(t testing.TB) *Report {
	t.Helper()
	r, err := File(checkedIn(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// How near forecasts must be to what was measured, by kind. SPEC S6.1
func TestAccuracy(t *testing.T) {
	r := report(t)
	most := map[string]float64{
		"peak/per stage": 0.002, "peak/moe large": 0.025, "peak/moe small": 0.02, "peak/dense": 0.015,
		"peak/hybrid": 0.03, "peak/fsdp": 0.04, "peak/offload": 0.035, "saving/offload": 0.06, "reserved/per stage": 0.02,
	}
	seen := map[string]bool{}
	var static, rows float64
	for _, k := range r.Kinds {
		key := fmt.Sprintf("%s/%s", k.Quantity, k.Kind)
		seen[key] = true
		if limit, ok := most[key]; ok && k.MeanAbsError > limit {
			t.Errorf("%s: mean absolute error %.2f %%, want at most %.1f %%", key, 100*k.MeanAbsError, 100*limit)
		}
		if k.Quantity == Static {
			static += k.MeanAbsError * float64(k.Rows)
			rows += float64(k.Rows)
		}
	}
	for key := range most {
		if !seen[key] {
			t.Errorf("no case is of the kind %s", key)
		}
	}
	if static/rows > 0.02 {
		t.Errorf("static: mean absolute error %.2f %%, want at most 2 %%", 100*static/rows)
	}
	if len(r.FalseFits) > 0 {
		t.Errorf("said to fit, yet ran out of memory: %v", r.FalseFits)
	}
	var peaks, within int
	for _, row := range r.Rows {
		switch row.Quantity {
		case Peak:
			peaks++
			if row.Within {
				within++
			}
		case Saving:
			if e := row.Error(); row.Kind == "offload" && (e < -0.1 || e > 0.1) {
				t.Errorf("%s: what offloading saves is %+.1f %% off", row.ID, 100*e)
			}
		}
	}
	if float64(within) < 0.9*float64(peaks) {
		t.Errorf("%d of %d peaks lie in their bands, want nine in ten", within, peaks)
	}
}

// Nine cases in ten are modelled, every one with arguments among them, and each
// of the others says why it is not. Kinds add up to all cases.
func TestModelled(t *testing.T) {
	r := report(t)
	if r.Cases != 122 || 10*r.Modelled < 9*r.Cases || r.Modelled+len(r.Skipped) != r.Cases {
		t.Errorf("%d of %d cases modelled, %d skipped", r.Modelled, r.Cases, len(r.Skipped))
	}
	modelled, skipped := 0, 0
	for _, n := range r.Counts {
		modelled, skipped = modelled+n.Modelled, skipped+n.Skipped
	}
	if modelled != r.Modelled || skipped != len(r.Skipped) {
		t.Errorf("%+v do not add up to %d and %d", r.Counts, r.Modelled, len(r.Skipped))
	}
	for _, s := range r.Skipped {
		if len(s.Reason) < 20 || strings.Contains(s.ID, "@") {
			t.Errorf("%s is skipped: %q", s.ID, s.Reason)
		}
	}
}

// The page of all figures.
func TestPage(t *testing.T) {
	golden.Check(t, "../../../docs/PLANNER_CASES.md", "# Predicted beside measured\n\nWritten by `go test ./internal/planvalidate -update`; the formulas are in [PLANNER.md](PLANNER.md).\n\n"+report(t).Markdown())
}

func TestRefusesOtherFiles(t *testing.T) {
	for _, text := range []string{"", "[]", "{}", `{"cases": 1}`, `{"cases": []}`} {
		if _, err := File([]byte(text), nil); err == nil {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// one runs a single case.
func one(t testing.TB, kind, text string) *Report {
	t.Helper()
	r, err := File([]byte(`{"`+kind+`": [`+text+`]}`), nil)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

const llama = `"model": {"name": "Llama-3-70B"}, "gpu": "H100", "n_gpus": 32, "parallelism": {"TP": 4, "PP": 4, "VPP": 5}, "batch": {"MBS": 1, "GBS": 32, "seq": 4096}`

func TestReasons(t *testing.T) {
	for _, c := range []struct{ kind, text, why string }{
		{"external_cases", `{"id": "a", ` + llama + `}`, "nothing was measured"},
		{"cases", `{"id": "a", "gpu": "H100", "n_gpus": 8, "measured": {"mem_max_allocated_bytes_last": 5}}`, "no args"},
		{"cases", `{"id": "a", "gpu": "H100", "args": {"num-layers": 2}, "measured": {"mem_max_allocated_bytes_last": 5}}`, "number of GPUs"},
		{"cases", `{"id": "a", "gpu": "abacus", "n_gpus": 8, "args": {"num-layers": 2}, "measured": {"mem_max_allocated_bytes_last": 5}}`, "abacus"},
		{"cases", `{"id": "a", "gpu": "H100", "n_gpus": 8, "args": {"perform-rl-step": true}, "measured": {"mem_max_allocated_bytes_last": 5}}`, "reinforcement"},
		{"cases", `{"id": "a", "gpu": "H100", "n_gpus": 8, "args": {"export-kd-teacher-load": "x"}, "measured": {"mem_max_allocated_bytes_last": 5}}`, "teacher"},
		{"cases", `{"id": "a", "gpu": "H100", "n_gpus": 8, "args": {"enable-hyper-connections": true}, "measured": {"mem_max_allocated_bytes_last": 5}}`, "residual streams"},
		{"cases", `{"id": "a", "gpu": "H100", "n_gpus": 8, "args": {"tokenizer-type": "Own"}, "measured": {"mem_max_allocated_bytes_last": 5}}`, "vocabulary of Own"},
		{"external_cases", `{"id": "a", "measured": {"peak_GB": 5}, "batch": {"seq": 128}}`, "names no model"},
		{"external_cases", `{"id": "a", "model": {"name": "Unheard-of-7B"}, "n_gpus": 8, "batch": {"seq": 128}, "measured": {"peak_GB": 5}}`, "Unheard-of-7B"},
		{"external_cases", `{"id": "a", "model": {"name": "Llama-3-8B"}, "batch": {"seq": 128}, "measured": {"peak_GB": 5}}`, "neither its layout"},
		{"external_cases", `{"id": "a", "model": {"name": "Llama-3-8B, DualPipeV"}, "n_gpus": 8, "batch": {"seq": 128}, "measured": {"peak_GB": 5}}`, "DualPipe"},
		{"external_cases", `{"id": "a", ` + llama + `, "measured": {"tflops": 5}}`, "not of a kind"},
		{"external_cases", `{"id": "a", ` + llama + `, "recompute": ["norms"], "measured": {"peak_GB": 5}}`, "norms"},
		{"external_cases", `{"id": "a", ` + llama + `, "measured": {"per_pp_stage": [{"pp_rank": 9, "max_allocated_MiB": 5}]}}`, "rank 9"},
		{"external_cases", `{"id": "a", "model": {"name": "Llama-3-8B"}, "n_gpus": 8, "measured": {"peak_GB": 5}}`, "not of a kind"},
		{"external_cases", `{"id": "a", ` + llama + `, "measured": {"peak_GB": 5}}, {"id": "b", ` + llama + `, "measured": {"peak_GB": 6}}`, "same stated facts"},
	} {
		r := one(t, c.kind, c.text)
		if r.Modelled != 0 || len(r.Skipped) == 0 || !strings.Contains(r.Skipped[0].Reason, c.why) {
			t.Errorf("%s: %+v, want %q", c.text, r.Skipped, c.why)
		}
	}
}

// Figures in every unit, and what becomes of a run that ran out of memory.
func TestFigures(t *testing.T) {
	for _, c := range []struct {
		measured string
		quantity Quantity
		bytes    memory.Bytes
	}{
		{`"peak_allocated_GB": 50`, Peak, 50e9}, {`"peak_allocated_GiB": 50`, Peak, 50 << 30}, {`"rank0_peak_GB": 50`, Peak, 50e9},
		{`"peak_reserved_GiB": 60`, Reserved, 60 << 30}, {`"mem_allocated_GB": 40`, Static, 40e9},
		{`"peak_GB": 50, "status": "OOM on rank 0"`, Fits, 0},
		{`"weights_grads_GB": 30`, Model, 30e9}, {`"main_weights_optimizer_GB": 30`, State, 30e9},
	} {
		r := one(t, "external_cases", `{"id": "a", `+llama+`, "measured": {`+c.measured+`}}`)
		if len(r.Rows) != 1 || r.Rows[0].Quantity != c.quantity || r.Rows[0].Measured != c.bytes {
			t.Errorf("%s: %+v, skipped %+v", c.measured, r.Rows, r.Skipped)
		}
	}
	both := one(t, "external_cases", `{"id": "a", `+llama+`, "offload": ["core_attn"], "measured": {"peak_MiB_before": 60000, "peak_MiB_after": 50000}}`)
	if len(both.Rows) != 3 {
		t.Fatalf("%+v", both.Rows)
	}
	for _, row := range both.Rows {
		if row.Quantity == Saving && row.Measured != 10000<<20 {
			t.Errorf("%+v", row)
		}
		if row.Kind != "offload" || row.Predicted <= 0 {
			t.Errorf("%+v", row)
		}
	}
}

// The peak that is compared: the second one logged, unless memory between steps
// grew afterwards because the first steps were skipped.
func TestGoldenPeak(t *testing.T) {
	for _, c := range []struct {
		first, last float64
		want        float64
	}{{100, 100, 200}, {100, 105, 200}, {70, 100, 300}} {
		m := map[string]float64{"mem_allocated_bytes_first": c.first, "mem_allocated_bytes_last": c.last, "mem_max_allocated_bytes_second_logged": 200, "mem_max_allocated_bytes_last": 300}
		got, rank, ok := golden_(m)
		if got != c.want || rank != lastRank || !ok {
			t.Errorf("%v: %v on rank %d", m, got, rank)
		}
	}
}

func golden_(m map[string]float64) (float64, int, bool) {
	return goldenPeak(func(k string) (float64, bool) { v, ok := m[k]; return v, ok })
}

// Models by name: presets whatever the punctuation, reductions, further heads.
func TestNamedModels(t *testing.T) {
	for _, c := range []struct {
		name           string
		layers, mtp    int
		moe            int
		experts, dense int
	}{
		{"Llama-3-70B SFT", 80, 0, 0, 0, 80},
		{"DeepSeek-V3", 61, 0, 58, 256, 3},
		{"DeepSeek-V3 685B", 61, 1, 58, 256, 3},
		{"DeepSeek-V3 proxy, 14 layers", 14, 0, 14, 256, 0},
		{"Qwen3-30B-A3B cut to 4 layers, 2 experts", 4, 0, 4, 2, 0},
		{"Nemotron-3-Nano-30B-A3B, 52-layer hybrid", 52, 0, 23, 128, 0},
		{"Nemotron-3.5-Lightning hybrid MoE + 2 MTP", 52, 2, 23, 128, 0},
	} {
		m, err := (&modelFacts{Name: c.name}).model()
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		moe, experts, dense, mtp := 0, 0, 0, 0
		for _, l := range m.Layers {
			if l.MoE != nil {
				moe++
				experts = l.MoE.Experts
			}
			if l.Dense != nil {
				dense++
			}
		}
		if m.MTP != nil {
			mtp = m.MTP.Depth
		}
		if len(m.Layers) != c.layers || moe != c.moe || experts != c.experts || dense != c.dense || mtp != c.mtp {
			t.Errorf("%s: %d layers, %d MoE with %d experts, %d dense, %d further heads", c.name, len(m.Layers), moe, experts, dense, mtp)
		}
	}
}

// A job of unstated size gets the fewest GPUs that could hold it.
func TestSmallest(t *testing.T) {
	facts := func(layers int) record {
		var c record
		text := fmt.Sprintf(`{"model": {"name": "DeepSeek-V3, %d layers"}, "gpu": "H100", "parallelism": {"PP": 4, "EP": 16}, "batch": {"seq": 4096}}`, layers)
		if err := json.Unmarshal([]byte(text), &c); err != nil {
			t.Fatal(err)
		}
		return c
	}
	for layers, want := range map[int]int{8: 64, 14: 128} {
		s, err := fromFacts(facts(layers))
		if err != nil {
			t.Fatal(err)
		}
		if s.Layout.World != want {
			t.Errorf("%d layers: %d GPUs, want %d", layers, s.Layout.World, want)
		}
	}
}

// Unstated vocabularies: by tokenizer, or by the preset with the same layers.
func TestVocabulary(t *testing.T) {
	args := `"hidden-size": 4096, "num-attention-heads": 32, "ffn-hidden-size": 14336, "seq-length": 128, "max-position-embeddings": 128, "micro-batch-size": 1, "global-batch-size": 8, "bf16": true`
	for _, c := range []struct {
		more string
		want int
	}{
		{`, "num-layers": 32`, 50257}, {`, "num-layers": 8, "tokenizer-type": "GPTSentencePieceTokenizer"`, 256000},
		{`, "num-layers": 32, "tokenizer-type": "GPTSentencePieceTokenizer", "num-experts": 8, "swiglu": true`, 32000},
		{`, "num-layers": 32, "tokenizer-type": "TikTokenizer", "vocab-size": 1234`, 1234},
	} {
		var r record
		if err := json.Unmarshal([]byte(`{"gpu": "H100", "n_gpus": 8, "args": {`+args+c.more+`}}`), &r); err != nil {
			t.Fatal(err)
		}
		s, err := fromArgs(r)
		if err != nil {
			t.Fatal(err)
		}
		if s.Model.Vocab != c.want {
			t.Errorf("%s: %d words, want %d", c.more, s.Model.Vocab, c.want)
		}
	}
}

func TestSharedExperts(t *testing.T) {
	m := &model.Model{Layers: []model.Layer{{MoE: &model.MoE{Experts: 128}}}}
	for world, want := range map[int]int{8: 8, 16: 16, 12: 8} {
		if got := shareExperts(m, plan.Layout{World: world, PP: 1, ETP: 1}); got != want {
			t.Errorf("%d GPUs: ep %d, want %d", world, got, want)
		}
	}
}

func FuzzFile(f *testing.F) {
	f.Add([]byte(`{"external_cases": [{"id": "a", ` + llama + `, "measured": {"peak_GB": 5}}]}`))
	f.Add([]byte(`{"cases": [{"id": "a", "gpu": "H100", "n_gpus": 8, "args": {"hidden-size": 64, "num-layers": 2, "num-attention-heads": 4, "seq-length": 128, "micro-batch-size": 1}, "measured": {"mem_max_allocated_bytes_last": 5}}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		defer inputtest.Bound(t, len(data))()
		if len(data) > 4096 {
			return
		}
		r, err := File(data, nil)
		if err != nil {
			return
		}
		if r.Modelled+len(r.Skipped) != r.Cases {
			t.Errorf("%d modelled and %d skipped of %d", r.Modelled, len(r.Skipped), r.Cases)
		}
		if r.Markdown() == "" {
			t.Error("no page")
		}
	})
}

// The further runs that docs/PLANNER.md speaks of: no kind is worse than it says
// there by more than a little.
func TestFurtherRuns(t *testing.T) {
	data, err := os.ReadFile("testdata/further_cases.json")
	if err != nil {
		t.Fatal(err)
	}
	r, err := File(data, nil)
	if err != nil {
		t.Fatal(err)
	}
	if r.Modelled < 267 || len(r.FalseFits) > 0 || r.MeanAbsError > 0.014 {
		t.Errorf("%d modelled, %d false fits, mean error %g", r.Modelled, len(r.FalseFits), r.MeanAbsError)
	}
	limits := map[string]float64{"dense": 0.008, "moe small": 0.024, "moe large": 0.016, "hybrid": 0.012, "fsdp": 0.031, "offload": 0.059}
	for _, k := range r.Kinds {
		if limit, ok := limits[k.Kind]; k.Quantity == Peak && (!ok || k.MeanAbsError > limit) {
			t.Errorf("%s: mean error %g, the limit is %g", k.Kind, k.MeanAbsError, limit)
		}
	}
}

// A caller learns how many cases are done, also of those that are skipped.
// Cases that state the same and measured different figures are told apart by nothing, whatever their names and notes are.
func TestIndistinctCases(t *testing.T) {
	figures := func(n float64) map[string]any { return map[string]any{"peak": n} }
	got := indistinct([]record{
		{ID: "a", GPU: "h100", Measured: figures(1), Note: "the first run"}, {ID: "b", GPU: "h100", Measured: figures(2), Note: "the second run"},
		{ID: "c", GPU: "a100", Measured: figures(1)}, {ID: "d", GPU: "a100", Measured: figures(1), Note: "again"},
		{ID: "e", GPU: "a100", GPUs: 8, Measured: figures(3)},
	})
	if want := map[string]bool{"a": true, "b": true}; !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestProgress(t *testing.T) {
	var done []int
	r, err := File(checkedIn(t), func(n, all int) {
		if done = append(done, n); n > all || all == 0 {
			t.Errorf("%d of %d cases are done", n, all)
		}
	})
	all := r.Cases + len(r.Throughput) + len(r.TimeSkipped)
	if err != nil || len(done) != all || len(r.Skipped) == 0 {
		t.Fatalf("%d calls for %d cases and rows, %v", len(done), all, err)
	}
	for i, n := range done {
		if n != i+1 {
			t.Fatalf("the calls were %v", done)
		}
	}
}

// What is read of each measured figure: quantity, bytes and rank.
func TestUnits(t *testing.T) {
	var b strings.Builder
	show := func(what string, m map[string]any) {
		figures, err := measured(record{Args: map[string]any{}, Measured: m})
		fmt.Fprintln(&b, what, err)
		for _, f := range figures {
			fmt.Fprintf(&b, "  %s %d rank %d %q %v %q\n", f.quantity, f.bytes, f.rank, f.what, f.without, f.module)
		}
	}
	for _, u := range units {
		show(u.key, map[string]any{u.key: 2.5})
	}
	show("golden", map[string]any{"mem_max_allocated_bytes_second_logged": 7., "mem_allocated_bytes_last": 5., "mem_allocated_bytes_first": 5., "mem_max_allocated_bytes_last": 9.})
	show("stages", map[string]any{"per_pp_stage": []any{map[string]any{"pp_rank": 1., "max_allocated_MiB": 3., "max_reserved_MiB": 4.}, map[string]any{"pp_rank": 2., "max_allocated_MiB": 5.}}})
	show("savings", map[string]any{"swiglu_saves_GB": 1., "layernorm_saves_GB": 2., "other_saves_GB": 3.})
	show("offloading", map[string]any{"peak_MiB_before": 10., "peak_MiB_after": 4.})
	show("OOM", map[string]any{"status": "OOM", "peak_GB": 80., "mem_allocated_GB": 60.})
	show("nothing", map[string]any{"loss": 4.})
	golden.Check(t, "units.txt", b.String())
}
