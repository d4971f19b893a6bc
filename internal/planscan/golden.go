// This file owns measured peaks: the values that Megatron-LM's functional tests compare, and
// the forecasts beside them.

package planscan

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/config"
)

// Peak is a measured peak beside its forecast. The last rank of the job measured it
// (global_vars.py, _set_tensorboard_writer), so it is a peak of the last pipeline rank.
type Peak struct {
	File      string       `json:"file"` // with the measured values
	Container string       `json:"container"`
	GPU       string       `json:"gpu"`
	GPUs      int          `json:"gpus"`
	Stated    bool         `json:"gpus_stated"` // by a recipe; otherwise they are those of a node
	Measured  memory.Bytes `json:"measured_bytes"`
	Predicted memory.Bytes `json:"predicted_bytes"` // of the last pipeline rank
	Heaviest  memory.Bytes `json:"heaviest_bytes"`  // of the heaviest one
	Last      bool         `json:"heaviest_is_last"`
	Error     float64      `json:"error"` // of Predicted, relative to Measured
}

// Accuracy sums up peaks.
type Accuracy struct {
	Name    string  `json:"name"`
	Peaks   int     `json:"peaks"`
	Within3 float64 `json:"within_3_percent"` // a share, as the others
	Within8 float64 `json:"within_8_percent"`
	Mean    float64 `json:"mean_abs_error"`
	Median  float64 `json:"median_abs_error"`
}

// Golden is what the measured peaks say about the forecasts.
type Golden struct {
	Peaks    []Peak     `json:"peaks"`
	Accuracy []Accuracy `json:"accuracy"`
	Skipped  []Skipped  `json:"skipped"`
}

// Skipped is a measured peak that is not compared.
type Skipped struct {
	File   string `json:"file"`
	Reason string `json:"reason"`
}

// goldenName is the name of a file with measured values: its container and its GPU.
var goldenName = regexp.MustCompile(`^golden_values_(dev|lts)_dgx_([a-z]+[0-9]+)\.json$`)

// Compare compares the forecasts of the planned files with the measured peaks that lie
// beside them. It calls progress after each file.
func (r *Report) Compare(progress func(done, all int)) error {
	g := &Golden{Peaks: []Peak{}, Skipped: []Skipped{}}
	sizes := recipes{}
	for i, row := range r.Rows {
		if row.Planned {
			if err := g.add(row.File, sizes); err != nil {
				return err
			}
		}
		progress(i+1, len(r.Rows))
	}
	g.sum()
	r.Golden = g
	return nil
}

// add adds the peaks of a job.
func (g *Golden) add(file string, sizes recipes) error {
	beside, err := os.ReadDir(filepath.Dir(file))
	if err != nil {
		return fmt.Errorf("%s cannot be read: %w", filepath.Dir(file), input.Cause(err))
	}
	for _, entry := range beside {
		name := goldenName.FindStringSubmatch(entry.Name())
		if name == nil {
			continue
		}
		path := filepath.Join(filepath.Dir(file), entry.Name())
		measured, err := measuredPeak(path)
		if err != nil {
			g.Skipped = append(g.Skipped, Skipped{path, err.Error()})
			continue
		}
		if measured == 0 {
			continue // it has only losses
		}
		p := Peak{File: path, Container: name[1], GPU: name[2], Measured: measured}
		if p.GPUs, err = sizes.gpus(file, p.GPU); err != nil {
			return err
		}
		if p.Stated = p.GPUs > 0; !p.Stated {
			p.GPUs = usualGPUs(filepath.Base(filepath.Dir(file)), p.GPU)
		}
		if p.GPUs == 0 {
			g.Skipped = append(g.Skipped, Skipped{path, "no recipe states its number of GPUs"})
			continue
		}
		if err := p.predict(file); err != nil {
			g.Skipped = append(g.Skipped, Skipped{path, fmt.Sprintf("with %d GPUs: %v", p.GPUs, input.Plain(err))})
			continue
		}
		g.Peaks = append(g.Peaks, p)
	}
	return nil
}

func (p *Peak) predict(file string) error {
	s, _, err := config.Resolve(config.Input{Model: asPath(file), Hardware: p.GPU, GPUs: p.GPUs})
	if err != nil {
		return err
	}
	s.LastReplica = true
	f, err := plan.Predict(s)
	if err != nil {
		return err
	}
	last := len(f.Ranks) - 1
	p.Predicted, p.Heaviest, p.Last = f.Ranks[last].Peak.Expected, f.Ranks[f.Heaviest].Peak.Expected, f.Heaviest == last
	p.Error = float64(p.Predicted)/float64(p.Measured) - 1
	return nil
}

// measuredPeak returns the peak in a file of measured values, or zero if it has none.
// Moments are made at the end of the first step that is not skipped, so the first peak lacks
// them. The next one has them, unless loss scaling skipped the first steps: then memory
// between steps grew later on, and the last peak counts.
func measuredPeak(path string) (memory.Bytes, error) {
	data, err := input.ReadFile(path, input.Settings)
	if err != nil {
		return 0, fmt.Errorf("the file cannot be read: %w", input.Cause(err))
	}
	var metrics map[string]json.RawMessage
	if err := json.Unmarshal(data, &metrics); err != nil {
		return 0, fmt.Errorf("expected a JSON object with measured values: %w", input.Plain(err))
	}
	peaks, between := series(metrics["mem-max-allocated-bytes"]), series(metrics["mem-allocated-bytes"])
	if len(peaks) == 0 {
		return 0, nil
	}
	if n := len(between); n > 0 && between[0] < 0.9*between[n-1] {
		return memory.Bytes(peaks[len(peaks)-1]), nil
	}
	return memory.Bytes(peaks[min(1, len(peaks)-1)]), nil
}

// series returns the numbers of a metric by their steps, without those that are no numbers.
func series(data json.RawMessage) (out []float64) {
	var metric struct {
		Values map[string]any `json:"values"`
	}
	if json.Unmarshal(data, &metric) != nil {
		return nil
	}
	steps := map[int]float64{}
	for key, v := range metric.Values {
		step, err := strconv.Atoi(key)
		if x, ok := v.(float64); ok && err == nil && x > 0 && x < 1<<50 {
			steps[step] = x
		}
	}
	for _, step := range slices.Sorted(maps.Keys(steps)) {
		out = append(out, steps[step])
	}
	return out
}

// recipes has the numbers of GPUs of jobs by the folder of their recipes.
type recipes map[string]map[string]int

// usualGPUs returns how many GPUs a job has that no recipe names any more, or zero if that is
// not known. Tests run on eight, or on a node of four GB200. Releases are larger.
func usualGPUs(test, gpu string) int {
	switch {
	case strings.Contains(test, "release"):
		return 0
	case gpu == "gb200" && strings.HasSuffix(test, "_1node"):
		return 4
	}
	return 8
}

// recipe is how continuous integration runs some jobs.
type recipe struct {
	Spec struct {
		Nodes int `yaml:"nodes"`
		GPUs  int `yaml:"gpus"`
	} `yaml:"spec"`
	Products []struct {
		TestCase []string `yaml:"test_case"`
	} `yaml:"products"`
}

// gpus returns the number of GPUs of a job, or zero if no recipe states it. Recipes lie in
// test_utils/recipes beside the tests: those of GB200 in a folder of their own, and all
// others in that of H100.
func (r recipes) gpus(file, gpu string) (int, error) {
	full, err := filepath.Abs(file)
	if err != nil {
		return 0, err
	}
	if gpu != "gb200" {
		gpu = "h100"
	}
	for dir := filepath.Dir(full); dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
		folder := filepath.Join(dir, "test_utils", "recipes", gpu)
		if info, err := os.Stat(folder); err != nil || !info.IsDir() {
			continue
		}
		if r[folder] == nil {
			if r[folder], err = readRecipes(folder); err != nil {
				return 0, err
			}
		}
		return r[folder][filepath.Base(filepath.Dir(full))], nil
	}
	return 0, nil
}

func readRecipes(folder string) (map[string]int, error) {
	files, err := filepath.Glob(filepath.Join(folder, "*.yaml"))
	if err != nil {
		return nil, err
	}
	out := map[string]int{}
	for _, f := range files {
		data, err := input.ReadFile(f, input.Settings)
		if err != nil {
			return nil, fmt.Errorf("%s cannot be read: %w", f, input.Cause(err))
		}
		var one recipe
		if err := input.UnmarshalYAML(data, &one); err != nil {
			continue // it holds no jobs
		}
		for _, p := range one.Products {
			for _, name := range p.TestCase {
				out[name] = cmp.Or(out[name], one.Spec.Nodes*one.Spec.GPUs)
			}
		}
	}
	return out, nil
}

// sum sums up all peaks, those of each GPU, those of the old container, and those whose
// rank is the heaviest of the forecast.
func (g *Golden) sum() {
	g.Accuracy = []Accuracy{}
	add := func(name string, is func(Peak) bool) {
		var errors []float64
		a := Accuracy{Name: name}
		for _, p := range g.Peaks {
			if !is(p) {
				continue
			}
			e := math.Abs(p.Error)
			errors = append(errors, e)
			a.Mean += e
			if e <= 0.03 {
				a.Within3++
			}
			if e <= 0.08 {
				a.Within8++
			}
		}
		if a.Peaks = len(errors); a.Peaks == 0 {
			return
		}
		n := float64(a.Peaks)
		slices.Sort(errors)
		a.Mean, a.Within3, a.Within8 = a.Mean/n, a.Within3/n, a.Within8/n
		a.Median = (errors[(a.Peaks-1)/2] + errors[a.Peaks/2]) / 2
		g.Accuracy = append(g.Accuracy, a)
	}
	add("all", func(Peak) bool { return true })
	var kinds []string
	for _, p := range g.Peaks {
		kinds = append(kinds, p.GPU)
	}
	slices.Sort(kinds)
	for _, gpu := range slices.Compact(kinds) {
		add(strings.ToUpper(gpu), func(p Peak) bool { return p.GPU == gpu })
	}
	add("old container (lts)", func(p Peak) bool { return p.Container == "lts" })
	add("new container (dev)", func(p Peak) bool { return p.Container == "dev" })
	add("number of GPUs in a recipe", func(p Peak) bool { return p.Stated })
	add("heaviest rank of the forecast", func(p Peak) bool { return p.Last })
}
