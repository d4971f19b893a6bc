// This file owns what a run writes for its report beside its figures: forecasts, the
// choice for every group with its reason, and the machine.

package run

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/sysinfo"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/train"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// notes collects what a run's report compares: the first forecasts, spilled pages and
// the times of steps.
type notes struct {
	said    []train.DeviceForecast
	spilled int64     // pages so far
	took    []float64 // seconds of steps
	before  []peak    // of the ranks, in the parts of the run before
	written []peak    // in the metrics
}

// line returns a step's line of the metrics.
func (a *notes) line(t *train.Trainer, m train.Metrics) line {
	ranks := peaksOf(t, a.before)
	l := line{Step: m.Step + 1, Metrics: m, Speed: float64(m.Tokens) / m.Seconds, Spills: a.spills(t.Summaries()), peak: fullest(ranks)}
	if !slices.Equal(ranks, a.written) {
		l.Ranks, a.written = ranks, ranks
	}
	return l
}

// noteForecasts keeps the first forecasts that the trainer can make.
func (a *notes) noteForecasts(t *train.Trainer) {
	if a.said == nil {
		a.said = t.Forecasts()
	}
}

// highest returns the forecast peak of the fullest rank, or zero.
func (a *notes) highest() (n int64) {
	for _, p := range a.said {
		n = max(n, int64(p.Device))
	}
	return n
}

// stepTime returns the median time of a step in milliseconds.
func (a *notes) stepTime() float64 { return 1e3 * median(slices.Clone(a.took)) }

// spills returns the pages that were spilled since the last call.
func (a *notes) spills(ranks []memory.Summary) (n int64) {
	for _, s := range ranks {
		if s.Stash != nil {
			n += s.Stash.Spilled
		}
	}
	n, a.spilled = n-a.spilled, n
	return n
}

// rankSummaries returns the figures of every rank.
func (a *notes) rankSummaries(t *train.Trainer) (out []report.RankSummary) {
	peaks, decisions := peaksOf(t, a.before), t.Decisions()
	for i, s := range t.Summaries() {
		r := report.RankSummary{Rank: i, Device: peaks[i].Device, Host: peaks[i].Host, Policy: choices(s, decisions[i])}
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

// groupNames returns the names of the groups of all ranks.
func groupNames(ranks []report.RankSummary) (names []string) {
	for _, r := range ranks {
		for _, g := range r.Policy {
			names = append(names, g.Group)
		}
	}
	return names
}

// withoutEffect returns a remark on each module that the options name and that is none of
// the groups of any rank, and on a fraction that offloads nothing or does not apply.
func (j *Job) withoutEffect(groups []string) (notes []error) {
	saved := func(module string) bool {
		return slices.ContainsFunc(groups, func(g string) bool { return policy.RowsNamed(g, module) })
	}
	o := &j.Options
	for _, x := range []struct {
		choice  memory.Choice
		modules []string
	}{{memory.Offload, o.Offload}, {memory.Recompute, o.Recompute}, {memory.Stash, o.Stash}} {
		for _, name := range x.modules {
			named := []string{name}
			if m, _ := memory.LookupModule(name); x.choice == memory.Recompute && m.Recomputes != nil {
				named = m.Recomputes
			}
			// A module without groups is recomputed in any case.
			if len(named) > 0 && !slices.ContainsFunc(named, saved) {
				notes = append(notes, &memory.ModuleError{Choice: x.choice, Module: name, Problem: "has no effect, because this model saves nothing under that name", Remedy: "leave it out"})
			}
		}
	}
	offload := o.Offload
	if offload == nil {
		offload = j.config.Memory.Offload // those of the policy
	}
	// The fraction does not concern rows in pages: all of them are offloaded if they are
	// named.
	rows := slices.IndexFunc(offload, func(m string) bool { return slices.Contains(memory.RowModules(), m) && saved(m) })
	switch asked := fmt.Sprintf("%g", o.Fraction); {
	case o.Fraction < 1 && rows >= 0 && j.config.Memory.Rows == layer.Stashed:
		notes = append(notes, &memory.SettingError{Setting: "Fraction", Asked: asked, Problem: "does not apply to " + offload[rows] + ", whose rows are all offloaded", Remedy: "leave that module out to keep them in device memory"})
	case o.Fraction == 0 && rows < 0 && slices.ContainsFunc(offload, saved):
		notes = append(notes, &memory.SettingError{Setting: "Fraction", Asked: asked, Problem: "offloads nothing of the modules that are named", Remedy: "give 1 to offload all of them"})
	}
	return notes
}

// choices returns the policy table of a rank, with the reasons of its decision.
func choices(s memory.Summary, d *policy.Decision) []report.PolicyRow {
	out := []report.PolicyRow{}
	for _, g := range s.Groups {
		c := report.PolicyRow{Group: g.Name, Units: map[string]int{}, Saved: int64(g.Bytes), Moved: int64(g.Moved)}
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
		switch {
		case d == nil:
			words = []string{"not decided yet"}
		case d.Nothing || len(words) == 0:
			words = []string{"keep: nothing needs its memory"}
		}
		c.Reason = strings.Join(words, "; ")
		out = append(out, c)
	}
	return out
}

// environment describes the machine and the command of a run.
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
		"cpu": m.CPU.Model, "threads": threads, "memory": m.Memory.Total.Short(), "instructions": strings.Join(has, " "),
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
