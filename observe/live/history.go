// This file owns the report of a run from memory alone. It serves runs without a folder
// and runs whose folder cannot be read.

package live

import (
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/observe/report"
)

// mostKept is how many steps of a policy are kept, at about 100 bytes each. When they
// are full, every other one is dropped and the stride doubles.
const mostKept = 8192

// history holds the steps of a run so far.
type history struct {
	run  Run
	kept map[string]*kept
}

// kept holds steps of one policy.
type kept struct {
	figures report.Steps // but Spills are those up to each step
	stride  int          // every stride-th step is kept
	last    Step
}

func newHistory() *history { return &history{kept: map[string]*kept{}} }

func (h *history) add(s Step) {
	k := h.kept[s.Policy]
	if k == nil || s.Number <= k.last.Number { // the policy starts again
		k = &kept{stride: 1}
		h.kept[s.Policy] = k
	}
	k.last = s
	f := &k.figures
	if s.Held != nil {
		if len(f.Held) == mostKept { // keep every other one of the older ones
			f.HeldAt, f.Held = thin(f.HeldAt), thin(f.Held)
		}
		f.HeldAt, f.Held = append(f.HeldAt, s.Number), append(f.Held, *s.Held)
	}
	if (s.Number-1)%k.stride != 0 {
		return
	}
	var device, host, spills int64
	for _, r := range s.Ranks {
		device, host, spills = max(device, r.Device.Peak), max(host, r.Host.Peak), spills+r.Spilled
	}
	f.Step, f.Loss, f.Tokens = append(f.Step, s.Number), append(f.Loss, s.Loss), append(f.Tokens, s.Speed())
	f.Millis, f.Device, f.Host = append(f.Millis, 1000*s.Seconds), append(f.Device, device), append(f.Host, host)
	f.Spills, f.Reruns = append(f.Spills, spills), append(f.Reruns, s.Reruns)
	if len(f.Step) >= mostKept {
		k.stride *= 2
		f.Step, f.Loss, f.Tokens, f.Millis = thin(f.Step), thin(f.Loss), thin(f.Tokens), thin(f.Millis)
		f.Device, f.Host, f.Spills, f.Reruns = thin(f.Device), thin(f.Host), thin(f.Spills), thin(f.Reruns)
	}
}

// thin keeps every other value, beginning with the first.
func thin[T any](x []T) []T {
	for i := range (len(x) + 1) / 2 {
		x[i] = x[2*i]
	}
	return x[:(len(x)+1)/2]
}

// report returns the report of the run so far.
func (h *history) report() *report.Report {
	r := &report.Report{Title: "Stowage", Missing: []string{}}
	if h.run.Model != "" {
		r.Title = h.run.Model + " on " + h.run.Layout
	}
	for _, policy := range h.run.Policies {
		k := h.kept[policy]
		if k == nil {
			continue
		}
		run := report.Run{
			Name: policy, Environment: map[string]string{}, Figures: k.summary(), Steps: k.copy(), Ranks: []report.Rank{},
			Missing: []string{"Memory over time and streams are not shown; write the run to a folder to see them."},
		}
		if k.stride > 1 {
			run.Missing = append(run.Missing, fmt.Sprintf("One step in %d is shown; write the run to a folder to see all.", k.stride))
		}
		r.Runs = append(r.Runs, run)
	}
	if r.Runs == nil {
		r.Runs, r.Missing = []report.Run{}, append(r.Missing, "The first step has not ended yet.")
	}
	return r
}

// copy returns the steps in slices of their own.
func (k *kept) copy() (f report.Steps) {
	f = k.figures
	f.Step, f.Loss, f.Tokens, f.Millis = slices.Clone(f.Step), slices.Clone(f.Loss), slices.Clone(f.Tokens), slices.Clone(f.Millis)
	f.Device, f.Host, f.Spills, f.Reruns = slices.Clone(f.Device), slices.Clone(f.Host), slices.Clone(f.Spills), slices.Clone(f.Reruns)
	f.HeldAt, f.Held = slices.Clone(f.HeldAt), slices.Clone(f.Held)
	for i := len(f.Spills) - 1; i > 0; i-- {
		f.Spills[i] -= k.figures.Spills[i-1] // since the one before
	}
	return f
}

// summary returns figures with the keys of summary.json.
func (k *kept) summary() []report.Figure {
	s := k.last
	var device, host int64
	for _, r := range s.Ranks {
		device, host = max(device, r.Device.Peak), max(host, r.Host.Peak)
	}
	return []report.Figure{
		{Name: "steps", Label: "steps", Unit: report.Count, Value: float64(s.Number)},
		{Name: "final_loss", Label: "loss", Unit: report.Count, Value: s.Loss},
		{Name: "peak_device_bytes", Label: "device peak", Unit: report.Bytes, Value: float64(device)},
		{Name: "peak_host_bytes", Label: "host peak", Unit: report.Bytes, Value: float64(host)},
		{Name: "tokens_per_second", Label: "tokens/s", Unit: report.Count, Value: s.Speed()},
		{Name: "reruns", Label: "steps rerun", Unit: report.Count, Value: float64(s.Reruns)},
	}
}
