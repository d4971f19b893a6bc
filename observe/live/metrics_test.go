package live

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"

	"github.com/stowage-dev/stowage/internal/golden"
)

// docs is the folder of documents.
var docs = filepath.Join("..", "..", "docs")

// told returns metrics that all have a value.
func told() *metrics {
	m := newMetrics()
	m.begin(Run{Model: "tiny", Layout: "one rank", Policies: []string{"stash"}, Steps: 100, From: 3}, "v1")
	held := 1.0
	s := sample("stash", 40)
	s.Held = &held
	m.observe(s)
	return m
}

func gathered(t *testing.T, m *metrics) (out map[string]*dto.MetricFamily) {
	t.Helper()
	all, err := m.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out = map[string]*dto.MetricFamily{}
	for _, f := range all {
		out[f.GetName()] = f
	}
	return out
}

// labels returns the labels of a family, and the values of those that have few.
func labels(f *dto.MetricFamily) (names []string, values map[string][]string) {
	values = map[string][]string{}
	for _, m := range f.GetMetric() {
		for _, l := range m.GetLabel() {
			if v := values[l.GetName()]; !slices.Contains(v, l.GetValue()) {
				values[l.GetName()] = append(v, l.GetValue())
			}
		}
	}
	return slices.Sorted(maps.Keys(values)), values
}

// The table of docs/METRICS.md lists exactly the metrics of the program.
func TestMetricsAreDocumented(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(docs, "METRICS.md"))
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	families := gathered(t, told())
	for _, name := range slices.Sorted(maps.Keys(families)) {
		f := families[name]
		names, _ := labels(f)
		want = append(want, fmt.Sprintf("| `%s` | %s | %s | %s |", name, strings.ToLower(f.GetType().String()), strings.Join(names, ", "), f.GetHelp()))
	}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "| `stowage_") {
			got = append(got, strings.TrimSpace(line))
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("docs/METRICS.md must have these rows:\n%s", strings.Join(want, "\n"))
	}
	_, values := labels(families["stowage_memory_bytes"])
	for _, v := range append(slices.Concat(values[byTier], values[byKind]), "out", "in") {
		if !strings.Contains(string(text), "`"+v+"`") {
			t.Errorf("docs/METRICS.md does not say what %s is", v)
		}
	}
}

// The golden file has names and values as Prometheus reads them.
func TestMetrics(t *testing.T) {
	s, c := served(t)
	defer s.Close()
	for n := 1; n <= 2; n++ {
		s.Step(sample("none", n))
	}
	_, body, _ := get(t, c, s.URL()+"metrics")
	golden.Check(t, "metrics.txt", body)
}

// Counters never decrease, and count all trainers of a policy.
func TestCountersGrow(t *testing.T) {
	m := newMetrics()
	spilled := func() (n float64) {
		for _, x := range gathered(t, m)["stowage_spilled_pages_total"].GetMetric() {
			n += x.GetCounter().GetValue()
		}
		return n
	}
	step := func(n int, pages int64, reruns int) {
		m.observe(Step{Policy: "budget", Number: n, Seconds: 1, Tokens: 1, Reruns: reruns, Ranks: []Rank{{Spilled: pages}}})
	}
	for i, x := range []struct {
		step   int
		pages  int64
		reruns int
		want   float64
	}{{1, 5, 0, 5}, {2, 5, 1, 5}, {3, 9, 1, 9}, {1, 2, 1, 11}, {2, 4, 2, 13}} {
		if step(x.step, x.pages, x.reruns); spilled() != x.want {
			t.Errorf("after %d: %g, want %g", i, spilled(), x.want)
		}
	}
	if n := gathered(t, m)["stowage_reruns_total"].GetMetric()[0].GetCounter().GetValue(); n != 3 {
		t.Errorf("%g reruns, want 1 and 2", n)
	}
}

// A run that was resumed is as far as it was, before its first step.
func TestMetricsOfAResumedRun(t *testing.T) {
	m := newMetrics()
	m.begin(Run{Model: "m", Layout: "l", Policies: []string{"a", "b"}, Steps: 90, From: 40}, "v")
	m.observe(Step{Policy: "b", Number: 41, Seconds: 1})
	for name, want := range map[string][]float64{"stowage_step": {40, 41}, "stowage_steps": {90, 90}, "stowage_info": {1, 1}} {
		var got []float64
		for _, x := range gathered(t, m)[name].GetMetric() {
			got = append(got, x.GetGauge().GetValue())
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
}

// SPEC S6.5
// The queries of the dashboard use existing metrics and labels, and the dashboard shows
// each metric.
func TestDashboard(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(docs, "grafana.json"))
	if err != nil {
		t.Fatal(err)
	}
	var board any
	if err := json.Unmarshal(text, &board); err != nil {
		t.Fatal(err)
	}
	families := gathered(t, told())
	used := map[string]bool{}
	exprs := queries(board)
	if len(exprs) < 8 {
		t.Fatalf("only %d queries", len(exprs))
	}
	for _, q := range exprs {
		found := metricOf.FindAllStringSubmatch(q, -1)
		if len(found) == 0 {
			t.Errorf("%q has no metric", q)
		}
		for _, m := range found {
			name := m[1]
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				if base, ok := strings.CutSuffix(name, suffix); ok && families[base].GetType() == dto.MetricType_HISTOGRAM {
					name = base
				}
			}
			f := families[name]
			if f == nil {
				t.Errorf("%q: there is no %s", q, m[1])
				continue
			}
			used[name] = true
			names, values := labels(f)
			for _, l := range labelOf.FindAllStringSubmatch(m[2], -1) {
				if !slices.Contains(names, l[1]) && l[1] != "job" && l[1] != "instance" {
					t.Errorf("%q: %s has no label %s", q, name, l[1])
				}
				if l[2] == "=" && !strings.HasPrefix(l[3], "$") && !slices.Contains(values[l[1]], l[3]) {
					t.Errorf("%q: %s of %s is never %s", q, l[1], name, l[3])
				}
			}
		}
	}
	for name := range families {
		if !used[name] {
			t.Errorf("the dashboard does not show %s", name)
		}
	}
}

var (
	metricOf = regexp.MustCompile(`\b(stowage_[a-z_]+)(?:\{([^}]*)\})?`)
	labelOf  = regexp.MustCompile(`(\w+)(=~|!~|!=|=)"([^"]*)"`)
)

// queries returns all values of "expr" in panels and of "query" in variables.
func queries(v any) (out []string) {
	switch v := v.(type) {
	case map[string]any:
		for key, x := range v {
			if s, ok := x.(string); ok && key == "expr" {
				out = append(out, s)
			}
			out = append(out, queries(x)...)
		}
	case []any:
		for _, x := range v {
			out = append(out, queries(x)...)
		}
	}
	return out
}
