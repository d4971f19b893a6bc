package live

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

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

// read is a metric as the text has it.
type read struct {
	kind, help string
	samples    []sampled
}

type sampled struct {
	labels map[string]string
	value  float64
}

var (
	comment = regexp.MustCompile(`^# (HELP|TYPE) (\w+) (.*)$`)
	number  = regexp.MustCompile(`^(\w+)\{((?:\w+="(?:[^"\\]|\\.)*",?)+)\} (\S+)$`)
	label   = regexp.MustCompile(`(\w+)="((?:[^"\\]|\\.)*)"`)
)

// gathered reads the text of metrics.
func gathered(t *testing.T, m *metrics) map[string]*read {
	t.Helper()
	out, last := map[string]*read{}, ""
	for line := range strings.Lines(m.text()) {
		line = strings.TrimSuffix(line, "\n")
		if c := comment.FindStringSubmatch(line); c != nil {
			if last = c[2]; c[1] == "HELP" {
				out[last] = &read{help: c[3]}
			} else {
				out[last].kind = c[3]
			}
			continue
		}
		n := number.FindStringSubmatch(line)
		if n == nil || !strings.HasPrefix(n[1], last) {
			t.Fatalf("Prometheus cannot read %q", line)
		}
		x := sampled{labels: map[string]string{}}
		for _, l := range label.FindAllStringSubmatch(n[2], -1) {
			x.labels[l[1]] = l[2]
		}
		var err error
		if x.value, err = strconv.ParseFloat(n[3], 64); err != nil {
			t.Fatal(err)
		}
		out[last].samples = append(out[last].samples, x)
	}
	return out
}

// labels returns the labels of a metric, and their values.
func labels(r *read) (names []string, values map[string][]string) {
	values = map[string][]string{}
	for _, x := range r.samples {
		for name, v := range x.labels {
			if name != "le" && !slices.Contains(values[name], v) {
				values[name] = append(values[name], v)
			}
		}
	}
	return slices.Sorted(maps.Keys(values)), values
}

// Label values are quoted, whatever they have.
func TestLabelsAreQuoted(t *testing.T) {
	m := newMetrics()
	m.begin(Run{Model: "a\\b\"c\nd\xff", Layout: "l", Policies: []string{"p"}}, "v")
	got := gathered(t, m)["stowage_info"].samples[0].labels["model"]
	if want := `a\\b\"c\nd` + "\ufffd"; got != want {
		t.Errorf("the model is %q, want %q", got, want)
	}
}

// A histogram counts a step in all bounds that it does not exceed.
func TestStepSeconds(t *testing.T) {
	m := newMetrics()
	for i, s := range []float64{0.001, 0.0011, 5, 1e6} {
		m.observe(Step{Policy: "p", Number: i + 1, Seconds: s})
	}
	got := map[string]float64{}
	var rest []float64
	for _, x := range gathered(t, m)["stowage_step_seconds"].samples {
		if le := x.labels["le"]; le != "" {
			got[le] = x.value
		} else {
			rest = append(rest, x.value)
		}
	}
	for le, want := range map[string]float64{"0.001": 1, "0.002": 2, "4.096": 2, "8.192": 3, "2097.152": 3, "+Inf": 4} {
		if got[le] != want {
			t.Errorf("%g steps up to %s s, want %g", got[le], le, want)
		}
	}
	if len(got) != 23 || !slices.Equal(rest, []float64{0.001 + 0.0011 + 5 + 1e6, 4}) {
		t.Errorf("%d bounds, sum and count %v", len(got), rest)
	}
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
		want = append(want, fmt.Sprintf("| `%s` | %s | %s | %s |", name, f.kind, strings.Join(names, ", "), f.help))
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
		for _, x := range gathered(t, m)["stowage_spilled_pages_total"].samples {
			n += x.value
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
	if n := gathered(t, m)["stowage_reruns_total"].samples[0].value; n != 3 {
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
		for _, x := range gathered(t, m)[name].samples {
			got = append(got, x.value)
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
				if base, ok := strings.CutSuffix(name, suffix); ok && families[base] != nil && families[base].kind == "histogram" {
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
