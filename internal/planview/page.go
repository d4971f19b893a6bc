// This file owns the page as a whole: its template, style and script, and the
// words in which figures are shown.

package planview

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/internal/pagestyle"
	"github.com/stowage-dev/stowage/memory"
)

var (
	//go:embed page.html
	pageHTML string
	//go:embed page.css
	pageCSS string
	//go:embed page.js
	pageJS string
)

// view is what the template sees.
type view struct {
	*Report
	Bars     bars
	Over     timeline
	Settings []setting
	// HostWords is about the host memory of a node. It is empty if nothing is pinned.
	HostWords string
	// AnswerWords are about the value that the command asked for.
	AnswerWords []string
	HostLacks   bool // whether only host memory is too small
	Style       template.CSS
	Script      template.JS
}

// WritePage writes the report as one HTML file that sends no request.
func (r *Report) WritePage(w io.Writer) error {
	t, err := template.New("page").Funcs(template.FuncMap{
		"gib": GiB, "mib": MiB, "size": Size, "seconds": Seconds, "band": bandWords, "count": Count, "join": strings.Join, "list": words,
	}).Parse(pageHTML)
	if err != nil {
		panic("page: the embedded template does not parse: " + err.Error())
	}
	v := &view{
		Report: r, Bars: makeBars(r), Over: makeTimeline(r), Settings: settings(r),
		Style: template.CSS(pagestyle.CSS() + pageCSS), Script: template.JS(pageJS), HostLacks: r.Missing == 0 && r.Node.lacks(),
	}
	if r.Node != nil && r.Node.Pinned > 0 {
		v.HostWords = r.Node.words()
	}
	if r.Answer != nil {
		v.AnswerWords = r.Answer.words()
	}
	return t.Execute(w, v)
}

// GiB formats bytes as a number of GiB.
func GiB(n memory.Bytes) string { return fmt.Sprintf("%.2f", float64(n)/(1<<30)) }

// MiB formats bytes as a whole number of MiB, or of KiB if there is less than one.
func MiB(n memory.Bytes) string {
	if 0 < n && n < memory.MiB {
		return fmt.Sprintf("%.0f KiB", float64(n)/float64(memory.KiB))
	}
	return fmt.Sprintf("%.0f MiB", float64(n)/float64(memory.MiB))
}

// Size formats bytes with a unit that leaves a short number.
func Size(n memory.Bytes) string { return n.Short() }

// Seconds formats a time with a unit that leaves a short number.
func Seconds(t float64) string {
	switch m := max(t, -t); {
	case t == 0:
		return "0"
	case m >= 1:
		return fmt.Sprintf("%.2f s", t)
	case m >= 0.1:
		return fmt.Sprintf("%.0f ms", t*1e3)
	case m >= 1e-2:
		return fmt.Sprintf("%.1f ms", t*1e3)
	case m >= 1e-3:
		return fmt.Sprintf("%.2f ms", t*1e3)
	}
	return fmt.Sprintf("%.0f µs", t*1e6)
}

// Count formats a large number with M, B or T.
func Count(n int64) string {
	for _, u := range []struct {
		over   float64
		letter string
	}{{1e12, "T"}, {1e9, "B"}, {1e6, "M"}} {
		if float64(n) >= u.over {
			return fmt.Sprintf("%.1f%s", float64(n)/u.over, u.letter)
		}
	}
	return fmt.Sprint(n)
}

func bandWords(b Band) string { return GiB(b.Low) + " to " + GiB(b.High) + " GiB" }

// words joins a list. An empty list is "none".
func words(list []string) string {
	if len(list) == 0 {
		return "none"
	}
	return strings.Join(list, ", ")
}

// setting is one line of the setup.
type setting struct{ Name, Value string }

func settings(r *Report) []setting {
	s := r.Setup
	out := []setting{
		{"Model", r.Model.words()},
		{"GPUs", fmt.Sprint(s.GPUs)},
		{"Parallel", Parallel(s)},
		{"Batch", fmt.Sprintf("%d sequences of %d tokens a step, %d a microbatch: %d microbatches", s.GlobalBatch, s.Seq, s.MicroBatch, s.Microbatches)},
		{"Precision", s.Precision},
		{"Optimiser", s.Optimizer},
		{"Loss", s.Loss},
		{"Recompute", Recomputed(s)},
		{"Offload", Offloaded(s)},
		{"Stash", words(s.StashModules)},
		{"Graphs", words(s.GraphScopes)},
	}
	if s.Routing != "" {
		out = append(out, setting{"Routing", Routed(s)})
	}
	if h := r.Hardware; h != nil {
		out[1].Value = fmt.Sprintf("%d x %s, %s each, %s usable", s.GPUs, h.Name, Size(h.Memory), Size(h.Usable))
		if h.Free > 0 {
			out[1].Value += ", " + Size(h.Free) + " measured to be free"
		}
	}
	return out
}

// Parallel describes the degrees of parallelism.
func Parallel(s Setup) string {
	text := fmt.Sprintf("TP %d, PP %d, VPP %d, CP %d, EP %d, ETP %d, DP %d", s.TP, s.PP, s.VPP, s.CP, s.EP, s.ETP, s.DP)
	if s.SequenceParallel && s.TP > 1 {
		text += ", sequence parallel"
	}
	if s.Shard != "none" {
		text += ", sharded " + s.Shard
	}
	return text
}

// Recomputed describes what is recomputed.
func Recomputed(s Setup) string {
	switch {
	case s.Recompute == "selective":
		return words(s.RecomputeModules)
	case s.RecomputeLayers == 1:
		return s.Recompute + ", the first layer of each stage"
	case s.RecomputeLayers > 1:
		return fmt.Sprintf("%s, the first %d layers of each stage", s.Recompute, s.RecomputeLayers)
	}
	return s.Recompute
}

// Routed describes how tokens are assumed to reach experts.
func Routed(s Setup) string {
	if s.Imbalance == 1 {
		return s.Routing
	}
	return fmt.Sprintf("%s, %.3g x the mean on the fullest expert rank", s.Routing, s.Imbalance)
}

// Offloaded describes what is offloaded.
func Offloaded(s Setup) string {
	text := words(s.OffloadModules)
	if len(s.OffloadFractions) > 0 {
		return fmt.Sprintf("%s, %.3g to %.3g of them by rank", text, slices.Min(s.OffloadFractions), slices.Max(s.OffloadFractions))
	}
	if len(s.OffloadModules) > 0 && s.OffloadFraction < 1 {
		text += fmt.Sprintf(", %.3g of them", s.OffloadFraction)
	}
	return text
}
