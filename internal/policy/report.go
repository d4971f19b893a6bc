// This file owns the reasons for a decision and their table.

package policy

import (
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/stowage-dev/stowage/memory"
)

// Reason says why a unit has its choice.
type Reason struct {
	UnitForecast
	Why string `json:"why"`
}

// explain sets the reasons of a decision.
func (d *Decision) explain(why func(UnitForecast) string) {
	d.Reasons = make([]Reason, len(d.Forecast.Units))
	for i, f := range d.Forecast.Units {
		// Show the recorded bytes and window: a stashed unit has fewer bytes, and a
		// recomputed unit has no window.
		f.Bytes, f.Window = d.Before.Units[i].Bytes, d.Before.Units[i].Window
		d.Reasons[i] = Reason{f, why(f)}
	}
}

// why returns the reason as one clause without numbers, so that equal units share a line.
func why(f UnitForecast, facts Facts, l memory.Links, nothing bool, allowed Allowed) string {
	mayOffload, mayRecompute := allowed.Offload && facts.CanOffload, allowed.Recompute && facts.Recompute > 0
	takes := float64(f.Bytes)/l.Out + float64(f.Bytes)/l.In + 2*l.Latency.Seconds()
	switch f.Choice {
	case memory.Stash:
		if f.Moved > 0 {
			return "its rows take the device pages that are left, and then host pages"
		}
		return "its rows stay in device pages"
	case memory.Recompute:
		if mayOffload {
			return "recomputing it costs less than its copies would"
		}
		return "it may not be offloaded, and recomputing it makes the room"
	case memory.Offload:
		switch {
		case facts.Rows && f.Hidden >= 0.999:
			return "its rows go to host pages, and the copies hide"
		case facts.Rows:
			return "its rows go to host pages: device memory is worth more elsewhere"
		case f.Hidden >= 0.999:
			return "its copies hide in the window"
		case mayRecompute:
			return "waiting for its copies costs less than recomputing it"
		}
		return "compute waits for its copies, and nothing cheaper makes the room"
	case memory.Keep:
		switch {
		case nothing:
			return "everything fits"
		case !mayOffload && !mayRecompute:
			return "it may neither be offloaded nor recomputed"
		case mayOffload && takes > f.Window.Seconds():
			return "its copies do not fit in the window, and the budget is met without it"
		}
		return "the budget is met without it"
	}
	panic(fmt.Sprintf("policy: there is no reason for the choice %v", f.Choice))
}

// merged is one line of the table: the reason of equal units of several layers.
type merged struct {
	Reason
	layers []int
}

func (d *Decision) merge() (list []*merged) {
	for _, r := range d.Reasons {
		var same *merged
		for _, m := range list {
			if m.Name == r.Name && m.Chunk == r.Chunk && m.Choice == r.Choice && m.Why == r.Why && m.Bytes == r.Bytes {
				same = m
			}
		}
		if same == nil {
			list = append(list, &merged{r, []int{r.Layer}})
			continue
		}
		same.layers = append(same.layers, r.Layer)
		same.Moved += r.Moved
		same.Window = min(same.Window, r.Window)
		same.Copies += r.Copies
		same.Waiting += r.Waiting
		same.Again += r.Again
	}
	return list
}

// ranges formats numbers such as 0-3,5.
func ranges(ns []int) string {
	var parts []string
	for i := 0; i < len(ns); {
		j := i
		for j+1 < len(ns) && ns[j+1] == ns[j]+1 {
			j++
		}
		if parts = append(parts, fmt.Sprint(ns[i])); j > i {
			parts[len(parts)-1] += fmt.Sprintf("-%d", ns[j])
		}
		i = j + 1
	}
	return strings.Join(parts, ",")
}

// Text returns the decision as a table for people. A line shows equal units: the bytes of a
// group, the bytes that are offloaded in a step, the shortest window, the time of copies,
// the time that compute waits for them or recomputes, and the reason.
func (d *Decision) Text() string {
	if d == nil {
		return "nothing is decided yet\n"
	}
	var b strings.Builder
	f := d.Forecast
	fmt.Fprintf(&b, "rank %d: ", d.Rank)
	if d.Nothing {
		b.WriteString("nothing to do: ")
	}
	b.WriteString(size(f.Extent))
	if d.Budget > 0 {
		fmt.Fprintf(&b, " of a budget of %s", size(d.Budget))
	}
	if !d.Nothing {
		fmt.Fprintf(&b, " (%s with everything kept), %s on the host", size(d.Before.Extent), size(f.Host+memory.Bytes(f.HostPages+f.Spilled)*f.PageBytes))
	}
	b.WriteString("\n")
	fmt.Fprintf(&b, "step %v: compute %v, waiting %v; link busy %v out, %v in\n", short(f.Step), short(f.Compute), short(f.Waiting), short(f.OutBusy), short(f.InBusy))
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "module\tchunk\tlayers\tgroup\tmoved\twindow\tcopies\thidden\twaiting\trecompute\tchoice\twhy")
	for _, m := range d.merge() {
		hidden := "-"
		if m.Copies > 0 {
			hidden = fmt.Sprintf("%.0f%%", 100*max(0, 1-float64(m.Waiting)/float64(m.Copies)))
		}
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\t%v\t%v\t%s\t%v\t%v\t%v\t%s\n", m.Name, m.Chunk, ranges(m.layers), size(m.Bytes), size(m.Moved),
			short(m.Window), short(m.Copies), hidden, short(m.Waiting), short(m.Again), m.Choice, m.Why)
	}
	w.Flush()
	for _, n := range d.Notes {
		fmt.Fprintf(&b, "note: %s\n", n)
	}
	return b.String()
}

// short rounds a duration for people, such as 5m13.53048s to 5m14s.
func short(d time.Duration) time.Duration {
	switch {
	case d >= time.Minute:
		return d.Round(time.Second)
	case d >= 10*time.Second:
		return d.Round(100 * time.Millisecond)
	case d >= time.Second:
		return d.Round(10 * time.Millisecond)
	}
	return d.Round(10 * time.Microsecond)
}

// size formats a number of bytes for people.
func size(n memory.Bytes) string {
	switch {
	case n == 0:
		return "0"
	case n < 1<<20:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	case n < 1<<30:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%.2f GiB", float64(n)/(1<<30))
}
