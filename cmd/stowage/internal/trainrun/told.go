// This file owns what is written of a run for its report beside what it came to: what
// was predicted, what was chosen for which group and why, and where it ran.

package trainrun

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/stowage-dev/stowage"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/sysinfo"
	"github.com/stowage-dev/stowage/plan/page"
	"github.com/stowage-dev/stowage/policy"
	"github.com/stowage-dev/stowage/report"
	"github.com/stowage-dev/stowage/train"
)

// ahead is what was known of a run before most of it: predictions count from the first
// step that they can be made from.
type ahead struct {
	said    []train.Prediction
	spilled int64     // pages, so far
	took    []float64 // seconds of steps
}

// look notes predictions as soon as there are any.
func (a *ahead) look(t *train.Trainer) {
	if a.said == nil {
		a.said = t.Predicted()
	}
}

// most is the prediction for the fullest rank, or zero.
func (a *ahead) most() (n int64) {
	for _, p := range a.said {
		n = max(n, int64(p.Device))
	}
	return n
}

// step is the time of a step, in milliseconds: the middle of all of them.
func (a *ahead) step() float64 { return 1e3 * middle(slices.Clone(a.took)) }

// spills are the pages that were spilled since it was asked last.
func (a *ahead) spills(t *train.Trainer) (n int64) {
	for _, s := range t.Summaries() {
		if s.Stash != nil {
			n += int64(s.Stash.Spilled)
		}
	}
	n, a.spilled = n-a.spilled, n
	return n
}

// ranks are what ranks came to.
func (a *ahead) ranks(t *train.Trainer) (out []report.RankSummary) {
	usage, decisions := t.Usage(), t.Decisions()
	for i, s := range t.Summaries() {
		r := report.RankSummary{Rank: i, Device: int64(usage[i].Kind[device.Accel].Peak), Host: int64(usage[i].Kind[device.Host].Peak), Policy: choices(s, decisions[i])}
		if i < len(a.said) {
			r.Predicted = int64(a.said[i].Device)
		}
		if d := decisions[i]; d != nil {
			r.Step, r.Notes = d.Forecast.Step.Seconds()*1e3, d.Notes
		}
		if st := s.Stash; st != nil {
			for _, x := range []struct {
				name, label string
				n           int
			}{
				{"stashed_pages", "pages stashed", int(st.Stashed)}, {"spilled_pages", "pages spilled to the host", int(st.Spilled)},
				{"demand_pages", "pages that a step needed at most", int(st.Demand)}, {"growths", "times that pools grew", st.Growths},
			} {
				r.Figures = append(r.Figures, report.Figure{Name: x.name, Label: x.label, Unit: report.Count, Value: float64(x.n)})
			}
		}
		out = append(out, r)
	}
	return out
}

// choices is the policy table of a rank, with the reasons that the decision gives.
func choices(s stowage.Summary, d *policy.Decision) []report.Choice {
	out := []report.Choice{}
	for _, g := range s.Groups {
		c := report.Choice{Group: g.Name, Units: map[string]int{}, Saved: int64(g.Bytes), Moved: int64(g.Moved)}
		for choice, n := range g.Units {
			c.Units[choice.String()] = n
		}
		var words []string
		counts := map[string]int{}
		if d != nil {
			for _, r := range d.Reasons {
				if r.Name != g.Name {
					continue
				}
				word := fmt.Sprintf("%v: %s", r.Choice, r.Why)
				if counts[word]++; counts[word] == 1 {
					words = append(words, word)
				}
			}
		}
		for i, w := range words {
			if len(words) > 1 {
				words[i] = fmt.Sprintf("%d %s", counts[w], w)
			}
		}
		if d == nil || d.Nothing || len(words) == 0 {
			words = append(words[:0], "keep: nothing asks for its memory")
		}
		c.Reason = strings.Join(words, "; ")
		out = append(out, c)
	}
	return out
}

// environment is where and how a run was made.
func (j *Job) environment(runs ...string) report.Environment {
	m := sysinfo.Read()
	env := report.Environment{Command: j.machine.Command, Began: time.Now().UTC().Format(time.RFC3339), Runs: runs}
	var has []string
	for _, f := range m.CPU.Features {
		if f.Has {
			has = append(has, f.Name)
		}
	}
	threads := fmt.Sprint(m.CPU.Threads)
	if m.CPU.Quota > 0 {
		threads += fmt.Sprintf(", of which %.1f are granted", m.CPU.Quota)
	}
	env.Machine = map[string]string{
		"cpu": m.CPU.Model, "threads": threads, "memory": page.Size(int64(m.Memory.Total)), "instructions": strings.Join(has, " "),
		"os": runtime.GOOS + "/" + runtime.GOARCH, "go": runtime.Version(), "stowage": j.machine.Version, "device": j.Options.Device,
		"model": j.config.Model.Name, "layout": j.layout(),
	}
	for k, v := range env.Machine {
		if strings.TrimSpace(v) == "" {
			delete(env.Machine, k)
		}
	}
	return env
}
