// This file owns the fit: the errors of forecasts of published runs, the search for the
// figures of rates.go, and what the figures are if one model is left out.

package cost

import (
	"encoding/json"
	"flag"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/planruns"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/model"
)

// run is one published run with its time model.
type run struct {
	planruns.Run
	model *Model
}

// published returns the published runs. Runs with the same settings share a model.
func published(t testing.TB) (runs []run) {
	t.Helper()
	models := map[*plan.Setup]*Model{}
	for _, r := range planruns.All() {
		if models[r.Setup] == nil {
			models[r.Setup] = newModel(t, r.Setup)
		}
		runs = append(runs, run{r, models[r.Setup]})
	}
	return runs
}

func testModel(t testing.TB, name string) *model.Model {
	m, err := model.Preset(name)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func testGPU(t testing.TB, name string) *hardware.GPU {
	g, err := hardware.ByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// errors returns how far forecasts are off: 0.1 is 10 % too fast.
func errors(runs []run, rates efficiencies) []float64 {
	forecasts := map[*Model]float64{}
	var all []float64
	for _, r := range runs {
		f, ok := forecasts[r.model]
		if !ok {
			r.model.setEfficiencies(rates)
			f = r.model.Step(r.model.Policy().Passes).Tokens / float64(r.model.setup.Layout.World)
			forecasts[r.model] = f
		}
		all = append(all, f/r.Tokens-1)
	}
	return all
}

// loss returns the mean absolute logarithm of predicted over measured tokens.
func loss(runs []run, rates efficiencies) (sum float64) {
	for _, e := range errors(runs, rates) {
		sum += math.Abs(math.Log1p(e))
	}
	return sum / float64(len(runs))
}

// sizes returns the mean and the largest absolute error.
func sizes(errors []float64) (mean, worst float64) {
	for _, e := range errors {
		mean += math.Abs(e) / float64(len(errors))
		worst = max(worst, math.Abs(e))
	}
	return mean, worst
}

// knobs are the figures that are fitted, with the range each may lie in.
func knobs(r *efficiencies) (at []*float64, lo, hi []float64) {
	add := func(p *float64, l, h float64) { at, lo, hi = append(at, p), append(lo, l), append(hi, h) }
	for i := range r.Hopper {
		add(&r.Hopper[i], 0.4, 0.85)
	}
	for i := range r.Blackwell {
		add(&r.Blackwell[i], 0.3, 0.85)
	}
	add(&r.Ultra, 0.8, 1.4)
	add(&r.Attention, 0.4, 1)
	add(&r.Scan, 0.005, 0.6)
	for i := range r.Memory {
		add(&r.Memory[i], 0.4, 0.9)
	}
	add((*float64)(&r.Launch), 0, 300e-6)
	add((*float64)(&r.LaunchExpert), 0, 200e-6)
	add(&r.Overlapped, 1, 2)
	add((*float64)(&r.Gap), 0, 100e-6)
	return at, lo, hi
}

// start returns the figures that a fit begins with: round guesses that know no run.
func start() efficiencies {
	return efficiencies{
		Hopper: [2]float64{0.6, 0.6}, Blackwell: [3]float64{0.6, 0.6, 0.6}, Ultra: 1, Attention: 0.7, Scan: 0.1,
		Memory: [2]float64{0.7, 0.7}, Launch: 200e-6, LaunchExpert: 50e-6, Overlapped: 1.5, Gap: 20e-6,
	}
}

// fit changes one figure at a time by shrinking steps as long as that helps.
func fit(runs []run, r efficiencies) efficiencies {
	best := loss(runs, r)
	at, lo, hi := knobs(&r)
	for step := 0.1; step > 0.01; step /= 2 {
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

// The figures of rates.go predict the published runs as well as they claim.
func TestFigures(t *testing.T) {
	runs := published(t)
	all := errors(runs, fitted())
	for i, x := range runs {
		t.Logf("%-150s %-8s %+.3f", x.Settings, x.Release, all[i])
	}
	mean, worst := sizes(all)
	t.Logf("%d runs: mean error %.4f, worst %.4f", len(runs), mean, worst)
	if mean > 0.055 || worst > 0.25 {
		t.Errorf("the mean error is %.4f and the worst %.4f; rates.go says less than 0.055 and 0.25", mean, worst)
	}
}

const leftOutFile = "testdata/leftout.json"

// Figures that were fitted without the runs of a model predict them as well as rates.go
// claims. The figures are checked in, because fitting takes minutes.
func TestLeftOut(t *testing.T) {
	data, err := os.ReadFile(leftOutFile)
	if os.IsNotExist(err) {
		t.Skip("run with -fit first")
	}
	if err != nil {
		t.Fatal(err)
	}
	without := map[string]efficiencies{}
	if err := json.Unmarshal(data, &without); err != nil {
		t.Fatal(err)
	}
	var all []float64
	models := byModel(published(t))
	for _, name := range slices.Sorted(maps.Keys(models)) {
		figures, ok := without[name]
		if !ok {
			t.Fatalf("%s has no figures without %s; run with -fit", leftOutFile, name)
		}
		own := errors(models[name], figures)
		mean, worst := sizes(own)
		t.Logf("%-28s %2d runs: mean error %.3f, worst %.3f", name, len(own), mean, worst)
		all = append(all, own...)
	}
	mean, worst := sizes(all)
	t.Logf("left out one model at a time: mean error %.4f, worst %.4f", mean, worst)
	if mean > 0.065 || worst > 0.32 {
		t.Errorf("the mean error is %.4f and the worst %.4f; rates.go says less than 0.065 and 0.32", mean, worst)
	}
}

func byModel(runs []run) map[string][]run {
	models := map[string][]run{}
	for _, x := range runs {
		models[x.Model] = append(models[x.Model], x)
	}
	return models
}

// TestFit prints the result of a new fit, and writes the figures of fits without the runs
// of each model.
func TestFit(t *testing.T) {
	if !*refit {
		t.Skip("fitting takes minutes; run with -fit")
	}
	runs := published(t)
	r := fit(runs, start())
	mean, worst := sizes(errors(runs, r))
	t.Logf("%+v: mean error %.4f, worst %.4f", r, mean, worst)
	without := map[string]efficiencies{}
	for name := range byModel(runs) {
		rest := slices.DeleteFunc(slices.Clone(runs), func(x run) bool { return x.Model == name })
		without[name] = fit(rest, start())
	}
	data, err := json.MarshalIndent(without, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(leftOutFile, append(data, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}

// The count of operations agrees with that of the published TFLOP/s, except for gpt-oss,
// whose count changed between releases, and Nemotron's.
func TestFlops(t *testing.T) {
	for _, x := range published(t) {
		s := x.model.setup
		ratio := tokenFlops(s.Model, s.Batch.Seq) * x.Tokens / 1e12 / x.TFLOPS
		allowed := 0.025
		if strings.HasPrefix(x.Model, "gpt-oss") || strings.HasPrefix(x.Model, "nemotron") {
			allowed = 0.3
		}
		if x.TFLOPS > 0 && math.Abs(ratio-1) > allowed {
			t.Errorf("%s: counted %.3f of the published operations", x.Settings, ratio)
		}
	}
}
