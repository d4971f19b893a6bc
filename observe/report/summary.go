// This file owns reading the figures of a run from summary.json and metrics.jsonl.

package report

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/internal/input"
)

// summary is the content of summary.json.
type summary struct {
	figures []Figure
	ranks   []RankSummary
	policy  string
	profile *profile
}

// profile is what `stowage train --profile` writes. Times and launches are those of one
// step, and shares are in percent.
type profile struct {
	Steps  int     `json:"steps"`
	Timed  float64 `json:"profiled_step_ms"`
	Plain  float64 `json:"step_ms"` // of a step in which nothing was timed
	Work   float64 `json:"work_ms"`
	Model  float64 `json:"model_tflops"`
	MFU    float64 `json:"mfu_percent"`
	Limits struct {
		Product float64 `json:"product_tflops"`
		Format  string  `json:"product_format"`
		Copy    float64 `json:"copy_gbps"`
	} `json:"limits"`
	Kernels []struct {
		Name     string  `json:"name"`
		Millis   float64 `json:"ms"`
		Share    float64 `json:"share_percent"`
		Launches float64 `json:"launches"`
		TFlops   float64 `json:"tflops"`
		GBps     float64 `json:"gbps"`
		Limit    float64 `json:"limit_percent"`
	} `json:"kernels"`
}

// readSummary reads summary.json. Each number and word on its top level becomes a
// figure, so that trainer and benchmarks can write what they like.
func (r *Run) readSummary(dir string) (s summary, found bool) {
	data, wrong := text(dir, SummaryFile)
	if wrong != "" {
		r.miss("%s; the run was stopped or is under way, and peaks come from its metrics and traces", wrong)
		return s, false
	}
	if s.figures = ParseFigures(data); len(s.figures) == 0 {
		r.miss("%s is damaged; peaks come from metrics and traces", SummaryFile)
		return s, true
	}
	var more struct {
		Policy  string          `json:"policy"`
		Ranks   json.RawMessage `json:"by_rank"`
		Profile json.RawMessage `json:"profile"`
	}
	if json.Unmarshal(data, &more) != nil {
		how := "is damaged"
		if errors.Is(json.NewDecoder(bytes.NewReader(data)).Decode(new(any)), io.ErrUnexpectedEOF) {
			how = "ends early"
		}
		r.miss("%s %s; what can be read of it is shown", SummaryFile, how)
	}
	if more.Ranks != nil && json.Unmarshal(more.Ranks, &s.ranks) != nil {
		s.ranks = nil
		r.miss("the ranks in %s are damaged; the choices for groups are not shown", SummaryFile)
	}
	if more.Profile != nil && (json.Unmarshal(more.Profile, &s.profile) != nil || s.profile != nil && len(s.profile.Kernels) == 0) {
		s.profile = nil
		r.miss("the profile in %s is damaged; the times of kernels are not shown", SummaryFile)
	}
	s.policy = more.Policy
	s.figures = slices.DeleteFunc(s.figures, func(f Figure) bool {
		if f.Unit == Text && isNumber(f.Name) {
			r.miss("%s says that %s is %.40q, which is no number; it is left out", SummaryFile, f.Name, f.Text)
			return true
		}
		count := f.Unit == Bytes || f.Unit == Millis || f.Name == "ranks" || f.Name == "steps" || f.Name == "tokens"
		wrong := count && f.Value < 0 || f.Name == "ranks" && len(s.ranks) > 0 && int(f.Value) != len(s.ranks)
		if wrong {
			r.miss("%s says that %s is %.0f, which cannot be; it is left out", SummaryFile, f.Name, f.Value)
		}
		return wrong
	})
	return s, true
}

// upToDate returns a summary, or an empty one if the run went on: a summary is written when a
// run ends, and one that was resumed is under way or was killed.
func (r *Run) upToDate(s summary) summary {
	i := slices.IndexFunc(s.figures, func(f Figure) bool { return f.Name == "steps" })
	n := len(r.Steps.Step)
	if i < 0 || n == 0 || s.figures[i].Value >= float64(r.Steps.Step[n-1]) {
		return s
	}
	r.miss("%s is of step %.0f, but %s goes on to step %d: the run was resumed, and was stopped or is under way; its figures come from metrics and traces",
		SummaryFile, s.figures[i].Value, MetricsFile, r.Steps.Step[n-1])
	return summary{}
}

// labels has the labels of figures that do not follow from their keys.
var labels = map[string]string{
	"peak_device_bytes": "device peak", "peak_host_bytes": "host peak", "step_ratio": "step time relative to the first run", "step_ms": "step time", "final_loss": "final loss",
	"tokens_per_second": "tokens/s", "eval_loss": "loss on held-out text", "params_sha256": "parameters (SHA-256)",
	"seconds": "time of all steps", "budget_bytes": "budget", "offload_peak_bytes": "device peak with offloading", "peak_bytes": "device peak", "host_bytes": "host peak",
	"exchange_ms": "exchanges of experts, in a step", "exchange_hidden_percent": "exchanges of experts behind compute",
	"gather_ms": "gathers of parameters, in a step", "gather_hidden_percent": "gathers of parameters behind compute",
	"reduction_ms": "sums of gradients, in a step", "reduction_hidden_percent": "sums of gradients behind compute",
}

// forecasts maps the key of a forecast to that of the measured figure.
var forecasts = map[string]string{"predicted_device_bytes": "peak_device_bytes", "expected_bytes": "saved_bytes", "predicted_ms": "offload_step_ms"}

// isNumber reports whether the figure of a run is a number by its name.
func isNumber(name string) bool {
	return slices.Contains([]string{"final_loss", "ranks", "reruns", "seconds", "step_ms", "steps", "tokens", "tokens_per_second"}, name) || strings.HasSuffix(name, "_bytes")
}

// ParseFigures returns a figure for each number, string and boolean on the top level of
// a JSON object, in its order. The ending of a key decides the unit: "_bytes", "_ms",
// "_us", "seconds", "ratio" or "_percent". A forecast such as predicted_device_bytes
// becomes the Predicted field of the figure that it belongs to. If the text is damaged,
// ParseFigures returns the figures before the damage.
func ParseFigures(data []byte) []Figure {
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil
	}
	var out []Figure
	said := map[string]float64{}
	for d.More() {
		key, err := d.Token()
		name, ok := key.(string)
		if err != nil || !ok {
			break
		}
		var v any
		if d.Decode(&v) != nil {
			break
		}
		f, ok := figure(name, v)
		if of := forecasts[name]; ok && of != "" && f.Unit != Text {
			said[of] = f.Value
		} else if ok {
			out = append(out, f)
		}
	}
	for i, f := range out {
		if v, ok := said[f.Name]; ok && v != 0 {
			out[i].Predicted = &v
		}
	}
	return out
}

// figure returns the figure for one value. It returns false for objects, lists and
// null.
func figure(name string, v any) (f Figure, ok bool) {
	f = Figure{Name: name, Label: labels[name], Unit: Count}
	if f.Label == "" {
		f.Label = strings.ReplaceAll(name, "_", " ")
	}
	switch v := v.(type) {
	case string:
		f.Unit, f.Text = Text, v
		return f, v != ""
	case bool:
		f.Unit, f.Text = Text, "no"
		if v {
			f.Text, f.Value = "yes", 1
		}
		return f, true
	case json.Number:
		x, err := v.Float64()
		if err != nil {
			return f, false
		}
		f.Value = x
	default:
		return f, false
	}
	for _, e := range []struct {
		ending string
		unit   Unit
		times  float64
	}{{"bytes", Bytes, 1}, {"_ms", Millis, 1}, {"_us", Millis, 1e-3}, {"seconds", Millis, 1e3}, {"ratio", Ratio, 1}, {"_percent", Percent, 1}} {
		if strings.HasSuffix(name, e.ending) && (e.ending != "seconds" || !strings.Contains(name, "per")) {
			f.Unit, f.Value = e.unit, f.Value*e.times
			if labels[name] == "" {
				f.Label = strings.TrimSpace(strings.ReplaceAll(strings.TrimSuffix(strings.TrimSuffix(name, e.ending), "_"), "_", " "))
			}
			break
		}
	}
	if math.IsInf(f.Value, 0) { // JSON has no such number
		return f, false
	}
	if f.Label == "" {
		f.Label = strings.ReplaceAll(name, "_", " ")
	}
	return f, true
}

// apply adds the summary to the run. Without a summary it adds the figures that follow
// from traces and metrics.
func (r *Run) apply(s summary) {
	r.Figures, r.Profile = append(r.Figures, s.figures...), s.profile
	if s.policy != "" {
		r.Name = s.policy
	}
	for _, x := range s.ranks {
		i := slices.IndexFunc(r.Ranks, func(k Rank) bool { return k.Rank == x.Rank })
		if i < 0 {
			// A rank without a trace has its policy and its peak.
			k := NewRank()
			k.Rank = x.Rank
			k.Memory.Peak.Bytes, k.Memory.Peak.Host = x.Device, x.Host
			i, r.Ranks = len(r.Ranks), append(r.Ranks, k)
		}
		k := &r.Ranks[i]
		k.Policy = append(k.Policy, x.Policy...)
		k.Counts = append(k.Counts, x.Figures...)
		k.Pools = append(k.Pools, x.Pools...)
		if x.Predicted > 0 {
			said := float64(x.Predicted)
			k.Counts = append(k.Counts, Figure{Name: "peak_device_bytes", Label: "device peak", Unit: Bytes, Value: float64(x.Device), Predicted: &said})
		}
		if n := len(r.Steps.Millis); x.Step > 0 && n > 0 {
			// The forecast is for steps under the chosen policy: those of the second half.
			late := slices.Sorted(slices.Values(r.Steps.Millis[n/2:]))
			k.Counts = append(k.Counts, Figure{Name: "step_ms", Label: "step time", Unit: Millis, Value: late[len(late)/2], Predicted: &x.Step})
		}
		for _, n := range x.Notes {
			k.Counts = append(k.Counts, Figure{Name: "note", Label: "note", Unit: Text, Text: n})
		}
	}
	slices.SortStableFunc(r.Ranks, func(a, b Rank) int { return a.Rank - b.Rank })
	if len(r.Figures) > 0 {
		return
	}
	dev, host := slices.Max(append(r.Steps.Device, 0)), slices.Max(append(r.Steps.Host, 0)) // traces of a killed run lack their end
	for _, k := range r.Ranks {
		dev, host = max(dev, k.Memory.Peak.Bytes), max(host, k.Memory.Peak.Host)
	}
	if dev+host > 0 {
		r.Figures = append(r.Figures, Figure{Name: "peak_device_bytes", Label: labels["peak_device_bytes"], Unit: Bytes, Value: float64(dev)},
			Figure{Name: "peak_host_bytes", Label: labels["peak_host_bytes"], Unit: Bytes, Value: float64(host)})
	}
	if n := len(r.Steps.Step); n > 0 {
		r.Figures = append(r.Figures, Figure{Name: "steps", Label: "steps", Unit: Count, Value: float64(r.Steps.Step[n-1])},
			Figure{Name: "final_loss", Label: labels["final_loss"], Unit: Count, Value: r.Steps.Loss[n-1]})
	}
}

func newSteps() Steps {
	return Steps{Step: []int{}, Loss: []float64{}, Tokens: []float64{}, Millis: []float64{}, Device: []int64{}, Host: []int64{}, Spills: []int64{}, Reruns: []int{}}
}

// mostSteps is how many steps a chart shows. Of longer runs it shows every n-th step.
const mostSteps = 10_000

// longestStep is a century in seconds. A longer step is an error in the file and could
// overflow in other units.
const longestStep = 100 * 365 * 24 * 3600

// line holds the keys of a line of metrics.jsonl that are shown.
type line struct {
	Step    int      `json:"step"`
	Loss    float64  `json:"loss"`
	Tokens  float64  `json:"tokens_per_second"`
	Seconds float64  `json:"seconds"`
	Device  int64    `json:"device_bytes"` // after the step
	Host    int64    `json:"host_bytes"`
	Most    int64    `json:"peak_device_bytes"` // so far; 0.1.0 did not write it
	MostOut int64    `json:"peak_host_bytes"`
	Spills  int64    `json:"spills"`
	Reruns  int      `json:"reruns"`
	Eval    *float64 `json:"eval_loss"`
}

// mostMetrics is how many bytes are read of metrics.jsonl: some millions of steps.
const mostMetrics = 1 << 30

// readMetrics reads metrics.jsonl. It skips and counts lines that cannot be read, such
// as the last one of a run that was killed.
func (r *Run) readMetrics(dir string) bool {
	f, err := input.Open(filepath.Join(dir, MetricsFile), mostMetrics)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		r.miss("%s is not there; losses and speeds of steps are not shown", MetricsFile)
		return false
	case err != nil:
		r.miss("%s cannot be read: %v; losses and speeds of steps are not shown", MetricsFile, input.Cause(err))
		return false
	}
	defer f.Close()
	lines, bad, err := parseMetrics(f)
	if err != nil {
		r.miss("%s cannot be read to its end: %v", MetricsFile, input.Cause(err))
	}
	switch {
	case len(lines) == 0:
		r.miss("%s has no line that can be read; losses and speeds of steps are not shown", MetricsFile)
	case bad > 0:
		r.miss("%s has %s", MetricsFile, plural(bad, "line that cannot be read", "lines that cannot be read"))
	}
	if n, sorted := len(lines), slices.IsSortedFunc(lines, byStep); n > 0 {
		slices.SortStableFunc(lines, byStep)
		lines = slices.CompactFunc(lines, func(a, b line) bool { return a.Step == b.Step })
		if !sorted || len(lines) < n {
			r.miss("%s was changed: its lines are not in the order of steps; the first line of each step is shown", MetricsFile)
		}
	}
	lost, last := 0, 0
	for _, l := range lines {
		lost, last = lost+max(0, l.Step-last-1), l.Step
	}
	if lost > bad {
		r.miss("%s lacks %s", MetricsFile, plural(lost-bad, "step", "steps"))
	}
	if every := (len(lines) + mostSteps - 1) / mostSteps; every > 1 {
		r.miss("the run has %d steps; the charts show one in %d", len(lines), every)
	}
	r.Steps = stepsOf(lines)
	return true
}

func byStep(a, b line) int { return a.Step - b.Step }

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// parseMetrics returns the lines that can be read and the number of others.
func parseMetrics(in io.Reader) (lines []line, bad int, err error) {
	b := bufio.NewReader(in)
	for {
		text, err := b.ReadBytes('\n')
		if len(bytes.TrimSpace(text)) > 0 {
			var l line
			if json.Unmarshal(text, &l) != nil || l.Step < 1 || math.Abs(l.Seconds) > longestStep {
				bad++
			} else {
				lines = append(lines, l)
			}
		}
		if err == io.EOF {
			return lines, bad, nil
		}
		if err != nil {
			return lines, bad, err
		}
	}
}

// stepsOf returns the charts of all steps, or of every n-th step and the last. Counts
// and peaks of skipped steps are part of the next one; no evaluation is skipped.
func stepsOf(lines []line) Steps {
	s := newSteps()
	every := max(1, (len(lines)+mostSteps-1)/mostSteps)
	var spills, dev, host int64
	for i, l := range lines {
		spills, dev, host = spills+l.Spills, max(dev, l.Device, l.Most), max(host, l.Host, l.MostOut)
		if l.Eval != nil {
			s.HeldAt, s.Held = append(s.HeldAt, l.Step), append(s.Held, *l.Eval)
		}
		if (i+1)%every != 0 && i != len(lines)-1 {
			continue
		}
		s.Step, s.Loss, s.Tokens = append(s.Step, l.Step), append(s.Loss, l.Loss), append(s.Tokens, math.Round(l.Tokens))
		s.Millis = append(s.Millis, math.Round(l.Seconds*1e6)/1e3)
		s.Device, s.Host, s.Spills, s.Reruns = append(s.Device, dev), append(s.Host, host), append(s.Spills, spills), append(s.Reruns, l.Reruns)
		spills, dev, host = 0, 0, 0
	}
	return s
}
