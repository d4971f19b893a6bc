// This file owns the fit: the published runs, the errors of forecasts, and the search for
// the figures of rates.go.

package cost

import (
	"bufio"
	"flag"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/model"
)

// run is one published run.
type run struct {
	name           string
	model          *Model
	tokens, tflops float64 // of one GPU in a second
}

func published(t testing.TB) (runs []run) {
	t.Helper()
	f, err := os.Open("testdata/throughput.csv")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if line := lines.Text(); !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, "model,") {
			runs = append(runs, parseRun(t, strings.Split(line, ",")))
		}
	}
	return runs
}

func parseRun(t testing.TB, f []string) run {
	n := func(i int) int {
		v, err := strconv.Atoi(f[i])
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	m, g := testModel(t, f[0]), testGPU(t, f[1])
	s := &plan.Setup{
		Model: m, Hardware: g,
		Layout: plan.Layout{World: n(3), TP: n(7), PP: n(8), CP: n(9), VPP: n(10), EP: n(11), ETP: 1, SequenceParallel: n(7) > 1},
		Batch:  plan.Batch{Global: n(4), Micro: n(5), Seq: n(6)},
	}
	s.Optimizer.Distributed = true
	s.Kernels.Loss = "te"
	s.Precision.Compute = map[string]plan.Format{"bf16": plan.BF16, "fp8": plan.FP8, "mxfp8": plan.MXFP8, "nvfp4": plan.NVFP4}[f[2]]
	if n(12) > 0 {
		s.Layout.FSDP.Shard = plan.ShardParameters
	}
	s.Layout.OverlapEP = f[15] == "1"
	s.Kernels.Dispatcher = f[16]
	s.Recompute.Modules = strings.Fields(f[14])
	s.Graph.Scopes = map[string][]string{"scoped": {"attn", "mamba", "moe_router", "moe_preprocess"}, "full": {"full_iteration"}}[f[13]]
	cm, err := New(s)
	if err != nil {
		t.Fatal(err)
	}
	return run{name: strings.Join(f[:16], ","), model: cm, tokens: float64(n(18)), tflops: float64(n(19))}
}

// testModel returns a preset, or n layers of it from layer a on if the name is "name:a+n".
func testModel(t testing.TB, name string) *model.Model {
	name, part, cut := strings.Cut(name, ":")
	m, err := model.Preset(name)
	if err != nil {
		t.Fatal(err)
	}
	if cut {
		var first, n int
		if _, err := fmt.Sscanf(part, "%d+%d", &first, &n); err != nil {
			t.Fatal(err)
		}
		m.Layers, m.MTP = m.Layers[first:first+n], nil
	}
	return m
}

// testGPU returns built-in hardware. A B300 is a GB300 in nodes of eight.
func testGPU(t testing.TB, name string) *hardware.GPU {
	eight := name == "b300"
	if eight {
		name = "gb300"
	}
	g, err := hardware.ByName(name)
	if err != nil {
		t.Fatal(err)
	}
	if eight {
		g.FastGroup = 8
	}
	return g
}

// off returns the error of a forecast as a logarithm: 0.1 is 10 % too fast.
func (r run) off(rates efficiencies) float64 {
	r.model.setEfficiencies(rates)
	return math.Log(r.model.Step(r.model.Policy().Passes).Tokens / float64(r.model.setup.Layout.World) / r.tokens)
}

func loss(runs []run, rates efficiencies) (sum float64) {
	for _, r := range runs {
		sum += math.Abs(r.off(rates))
	}
	return sum / float64(len(runs))
}

// knobs are the figures that are fitted, with the range each may lie in. The
// ranges keep apart what the runs alone cannot: memory below 60 % of its
// bandwidth would make up for everything else, and tensor parallelism that costs
// nothing would make a search over layouts take all of it.
func knobs(r *efficiencies) (at []*float64, lo, hi []float64) {
	add := func(p *float64, l, h float64) { at, lo, hi = append(at, p), append(lo, l), append(hi, h) }
	for i := range 2 {
		add(&r.Hopper[i], 0.4, 0.85)
	}
	for i := range 3 {
		add(&r.Blackwell[i], 0.3, 0.85)
	}
	add(&r.Attention, 0.4, 0.8)
	add(&r.Memory, 0.6, 0.9)
	add(&r.Link, 0.6, 0.95)
	add(&r.ExposedTP, 0.1, 1)
	add(&r.ExposedEP, 0, 1)
	add(&r.ExposedPlain, 0, 4)
	add((*float64)(&r.Launch), 0, 300e-6)
	add((*float64)(&r.LaunchExpert), 0, 400e-6)
	add(&r.Ultra, 0.8, 1.4)
	return at, lo, hi
}

// fit changes one figure at a time by shrinking steps as long as that helps.
func fit(runs []run, r efficiencies, step float64) efficiencies {
	best := loss(runs, r)
	at, lo, hi := knobs(&r)
	for ; step > 0.01; step /= 2 {
		for again := true; again; {
			again = false
			for i, p := range at {
				for _, s := range []float64{step, -step} {
					was := *p
					*p = min(max(was+s*(hi[i]-lo[i]), lo[i]), hi[i])
					if l := loss(runs, r); l < best-1e-6 {
						best, again = l, true
					} else {
						*p = was
					}
				}
			}
		}
	}
	return r
}

var refit = flag.Bool("fit", false, "fit the figures of rates.go again, with each model left out in turn (minutes)")

// The figures of rates.go predict the published runs as well as they claim, and no small
// change of one of them is much better.
func TestFigures(t *testing.T) {
	runs := published(t)
	r := fitted()
	now := loss(runs, r)
	var offs []float64
	for _, x := range runs {
		offs = append(offs, x.off(r))
		t.Logf("%-75s %+.2f", x.name, offs[len(offs)-1])
	}
	slices.Sort(offs)
	t.Logf("%d runs: mean error %.3f, half of them from %+.2f to %+.2f, all from %+.2f to %+.2f", len(runs), now, offs[len(offs)/4], offs[len(offs)*3/4], offs[0], offs[len(offs)-1])
	if now > 0.125 {
		t.Errorf("the mean error is %.3f; rates.go says 0.12", now)
	}
	at, lo, hi := knobs(&r)
	for i, p := range at {
		was := *p
		for _, s := range []float64{0.03, -0.03} {
			*p = min(max(was+s*(hi[i]-lo[i]), lo[i]), hi[i])
			if l := loss(runs, r); l < now-0.002 {
				t.Errorf("moving figure %d from %g to %g lowers the error from %.4f to %.4f; run with -fit", i, was, *p, now, l)
			}
		}
		*p = was
	}
}

// TestFit prints the result of a new fit, and how well a fit without the runs of a model
// predicts them.
func TestFit(t *testing.T) {
	if !*refit {
		t.Skip("fitting takes minutes; run with -fit")
	}
	runs := published(t)
	r := fit(runs, fitted(), 0.1)
	t.Logf("%+v: mean error %.4f", r, loss(runs, r))
	family := func(x run) string {
		name, _, _ := strings.Cut(x.name, ",")
		name, _, _ = strings.Cut(name, ":")
		return name
	}
	models := map[string][]run{}
	for _, x := range runs {
		models[family(x)] = append(models[family(x)], x)
	}
	var sum float64
	for _, name := range slices.Sorted(maps.Keys(models)) {
		rest := slices.DeleteFunc(slices.Clone(runs), func(x run) bool { return family(x) == name })
		own := models[name]
		without := loss(own, fit(rest, fitted(), 0.1))
		sum += without * float64(len(own))
		t.Logf("%-25s %2d runs: error %.3f without them, %.3f with", name, len(own), without, loss(own, r))
	}
	t.Logf("left out one model at a time: mean error %.4f", sum/float64(len(runs)))
}

// The count of operations agrees with that of the published TFLOP/s, except for gpt-oss,
// whose count changed between releases, and Nemotron's.
func TestFlops(t *testing.T) {
	for _, x := range published(t) {
		s := x.model.setup
		ratio := tokenFlops(s.Model, s.Batch.Seq) * x.tokens / 1e12 / x.tflops
		allowed := 0.025
		if strings.HasPrefix(x.name, "gpt-oss") || strings.HasPrefix(x.name, "nemotron") {
			allowed = 0.3
		}
		if x.tflops > 0 && math.Abs(ratio-1) > allowed {
			t.Errorf("%s: counted %.3f of the published operations", x.name, ratio)
		}
	}
}
