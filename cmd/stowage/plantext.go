// This file owns the tables of a plan as people read them, for a terminal of 100
// columns.

package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/plan/page"
)

// planWidth is the number of columns that lines stay within.
const planWidth = 100

// causeWords are the heads of the columns; the words of the JSON are too long.
var causeWords = map[string]string{
	"gradients": "grads", "optimizer": "optim", "activations": "activ", "transient": "trans",
}

// planText prints everything about one setup. Ranks lists those whose parts are
// shown.
func planText(w io.Writer, r *page.Report, detail []int) {
	planHead(w, r)
	rankTable(w, r)
	verdict(w, r)
	for _, rank := range detail {
		rankParts(w, rankOf(r, rank))
	}
	decisionTable(w, r.Decisions)
	searchText(w, r.Search)
	timeText(w, r.Time)
	for _, f := range r.Flags {
		if f.For == "megatron" {
			fmt.Fprintf(w, "\nflags for Megatron-LM (--flags maxtext and --flags stowage print the others)\n%s", packFlags(f.Text))
			notes(w, f.Notes)
		}
	}
	notes(w, r.Warnings)
}

func planHead(w io.Writer, r *page.Report) {
	s, m := r.Setup, r.Model
	text := fmt.Sprintf("%s: %d layers, hidden %d, %s parameters", m.Name, m.Layers, m.Hidden, page.Count(m.Parameters))
	if m.Experts > 0 {
		text += fmt.Sprintf(", %d of %d experts a token", m.TopK, m.Experts)
	}
	if r.Hardware != nil {
		text += fmt.Sprintf("; %d x %s", s.GPUs, r.Hardware.Name)
	} else {
		text += fmt.Sprintf("; %d GPUs", s.GPUs)
	}
	fmt.Fprint(w, wrap(text, ""))
	fmt.Fprint(w, wrap(fmt.Sprintf("%s; %s; %s", page.Parallel(s), s.Precision, s.Optimizer), ""))
	fmt.Fprintf(w, "%d sequences of %d a step, %d a microbatch: %d microbatches\n", s.GlobalBatch, s.Seq, s.MicroBatch, s.Microbatches)
	policy := fmt.Sprintf("recompute %s; offload %s; stash %s", page.Recomputed(s), page.Offloaded(s), listWords(s.StashModules))
	if s.Routing != "" {
		policy += "; routing " + page.Routed(s)
	}
	fmt.Fprint(w, wrap(policy, ""))
}

func listWords(list []string) string {
	if len(list) == 0 {
		return "none"
	}
	return strings.Join(list, ", ")
}

// rankTable has a line for each rank. Causes that no rank has are left out, as
// are ranks that hold and need the same as the one before them.
func rankTable(w io.Writer, r *page.Report) {
	var shown []int
	for c := range r.Ranks[0].Causes {
		if slices.ContainsFunc(r.Ranks, func(k page.Rank) bool { return k.Causes[c].Bytes >= 1<<20 }) {
			shown = append(shown, c)
		}
	}
	host := slices.ContainsFunc(r.Ranks, func(k page.Rank) bool { return k.Host > 0 })
	fmt.Fprintf(w, "\nmemory of each pipeline rank at its peak, GiB\n %5s", "rank")
	for _, c := range shown {
		name := r.Ranks[0].Causes[c].Name
		if short, ok := causeWords[name]; ok {
			name = short
		}
		fmt.Fprintf(w, "  %7s", name)
	}
	fmt.Fprintf(w, "  %9s  %6s  %8s", "allocated", "±", "reserved")
	if host {
		fmt.Fprintf(w, "  %6s", "host")
	}
	fmt.Fprintln(w)
	for _, k := range r.Ranks {
		mark := " "
		if k.Rank == r.Heaviest {
			mark = "*"
		}
		fmt.Fprintf(w, "%s%5d", mark, k.Rank)
		for _, c := range shown {
			fmt.Fprintf(w, "  %7s", page.GiB(k.Causes[c].Bytes))
		}
		fmt.Fprintf(w, "  %9s  %6s  %8s", page.GiB(k.Peak.Expected), page.GiB(max(k.Peak.High-k.Peak.Expected, k.Peak.Expected-k.Peak.Low)), page.GiB(k.Reserved.Expected))
		if host {
			fmt.Fprintf(w, "  %6s", page.GiB(k.Host))
		}
		fmt.Fprintln(w)
	}
}

func verdict(w io.Writer, r *page.Report) {
	k := rankOf(r, r.Heaviest)
	fmt.Fprintf(w, "\n%s", wrap(fmt.Sprintf("* rank %d (%s) is the heaviest: %s GiB allocated (%s to %s), %s reserved (%s to %s); peak %s",
		k.Rank, k.Holds, page.GiB(k.Peak.Expected), page.GiB(k.Peak.Low), page.GiB(k.Peak.High),
		page.GiB(k.Reserved.Expected), page.GiB(k.Reserved.Low), page.GiB(k.Reserved.High), k.At), "  "))
	switch {
	case r.Budget == 0:
		fmt.Fprintln(w, "no budget: name --gpu or --budget to hear whether it fits")
	case r.Fits:
		fmt.Fprintf(w, "FITS: up to %s of %s GiB (%s), %s GiB to spare\n", page.GiB(r.Reserved.High), page.GiB(r.Budget), r.BudgetFrom, page.GiB(r.Spare))
	default:
		if r.Reserved.Expected <= r.Budget {
			fmt.Fprint(w, wrap(fmt.Sprintf("MAY NOT FIT: %s GiB are expected and up to %s possible of %s (%s), %s GiB too many",
				page.GiB(r.Reserved.Expected), page.GiB(r.Reserved.High), page.GiB(r.Budget), r.BudgetFrom, page.GiB(r.Missing)), ""))
		} else {
			fmt.Fprintf(w, "DOES NOT FIT: up to %s of %s GiB (%s), %s GiB are missing\n", page.GiB(r.Reserved.High), page.GiB(r.Budget), r.BudgetFrom, page.GiB(r.Missing))
		}
		if r.Search == nil && r.Hardware != nil {
			fmt.Fprintln(w, "--search policy looks for the fastest memory policy that fits, --search layout for a layout")
		}
	}
}

// rankParts shows what a rank's memory consists of.
func rankParts(w io.Writer, k *page.Rank) {
	fmt.Fprintf(w, "\nrank %d, %s\n  %-12s  %-40s  %8s\n", k.Rank, k.Holds, "cause", "what", "GiB")
	for _, it := range k.Items {
		if it.Cause != "activations" {
			fmt.Fprintf(w, "  %-12s  %-40s  %8s\n", it.Cause, it.Name, page.GiB(it.Bytes))
		}
	}
	if len(k.Groups) == 0 {
		return
	}
	fmt.Fprintf(w, "  %-18s  %11s  %5s  %9s  %9s  %10s\n", "group", "a layer", "live", "GiB", "offloaded", "recomputed")
	for _, g := range k.Groups {
		if g.Total+g.Away+g.Dropped == 0 {
			continue
		}
		fmt.Fprintf(w, "  %-18s  %11s  %5d  %9s  %9s  %10s\n", g.Name, page.Size(g.Bytes), g.Live, page.GiB(g.Total), page.GiB(g.Away), page.GiB(g.Dropped))
	}
}

func decisionTable(w io.Writer, all []page.Decision) {
	if len(all) == 0 {
		return
	}
	fmt.Fprintf(w, "\n%-15s  %9s  %8s  %8s  %-9s  %s\n", "group", "a layer", "window", "copy", "decision", "reason")
	for _, d := range all {
		head := fmt.Sprintf("%-15s  %9s  %8s  %8s  %-9s  ", d.Group, page.MB(d.Bytes), orDash(d.Window), orDash(d.Copy), d.Choice)
		fmt.Fprint(w, hang(head, d.Reason))
	}
}

// orDash writes a time, or a dash where there is none.
func orDash(t float64) string {
	if t == 0 {
		return "-"
	}
	return page.Seconds(t)
}

func searchText(w io.Writer, s *page.Search) {
	if s == nil {
		return
	}
	if s.Nothing {
		fmt.Fprintln(w, "\nnothing has to be moved or computed again: it fits as it is")
	} else {
		fmt.Fprintf(w, "\nwithout a memory policy: %s GiB at the peak, %s a step\n", page.GiB(s.BarePeak), page.Seconds(s.BareStep))
	}
	if s.Over == "layout" {
		fmt.Fprint(w, wrap(fmt.Sprintf("%d layouts divide the model; %d were searched, of which %d do not fit, and the rest cannot be faster", s.Possible, s.Tried, s.Unfit), ""))
		for _, c := range s.Best {
			fmt.Fprint(w, wrap(fmt.Sprintf("%s, %s GiB  %s; %s: %s", page.Seconds(c.Step), page.GiB(c.Peak), c.Name, c.Policy, c.Reason), "  "))
		}
	} else if !s.Nothing {
		fmt.Fprintf(w, "%d policies were compared\n", s.Tried)
	}
	if shares := shareWords(s.Shares); shares != "" {
		fmt.Fprint(w, wrap("offloaded at least: "+shares, ""))
	}
}

// shareWords says what each rank must offload, ranks with the same together.
func shareWords(all []page.Share) string {
	var out []string
	some := false
	for i := 0; i < len(all); {
		j := i
		for j+1 < len(all) && all[j+1].Fraction == all[i].Fraction {
			j++
		}
		where := fmt.Sprintf("rank %d", all[i].Rank)
		if j > i {
			where = fmt.Sprintf("ranks %d to %d", all[i].Rank, all[j].Rank)
		}
		out = append(out, fmt.Sprintf("%.0f %% on %s", 100*all[i].Fraction, where))
		some = some || all[i].Fraction > 0
		i = j + 1
	}
	if !some {
		return ""
	}
	return strings.Join(out, ", ")
}

func timeText(w io.Writer, t *page.Time) {
	if t == nil {
		return
	}
	fmt.Fprintf(w, "\nstep %s: %.0f TFLOP/s a GPU, %s tokens/s\nof it bubble %s, replicas %s, optimiser %s\n",
		page.Seconds(t.Step), t.TFLOPS, page.Count(int64(t.Tokens)), page.Seconds(t.Bubble), page.Seconds(t.Replicas), page.Seconds(t.Update))
	fmt.Fprintf(w, "the memory policy costs %s (%.1f %%): recomputation %s, copies that do not hide %s\n",
		page.Seconds(t.PolicySeconds()), 100*t.PolicySeconds()/t.Step, page.Seconds(t.Recompute), page.Seconds(t.Copies))
}

func notes(w io.Writer, all []string) {
	for _, n := range all {
		fmt.Fprint(w, wrap("note: "+n, ""))
	}
}

// packFlags puts flags that stand one a line, as a shell reads them, into as few
// lines.
func packFlags(text string) string {
	var b strings.Builder
	column := 0
	for i, flag := range strings.Split(text, " \\\n") {
		n := len([]rune(flag))
		switch {
		case i == 0:
			b.WriteString("  ")
			column = 2
		case column+1+n+2 > planWidth:
			b.WriteString(" \\\n  ")
			column = 2
		default:
			b.WriteByte(' ')
			column++
		}
		b.WriteString(flag)
		column += n
	}
	b.WriteByte('\n')
	return b.String()
}

// wrap breaks text into lines; all begin with the indentation, and those after
// the first with two columns more.
func wrap(text, indent string) string { return fold(text, indent, indent+"  ") }

// hang breaks text into lines beside a head.
func hang(head, text string) string {
	return fold(text, head, strings.Repeat(" ", len([]rune(head))))
}

func fold(text, first, indent string) string {
	var b strings.Builder
	column := 0
	for i, word := range strings.Fields(text) {
		n := len([]rune(word))
		switch {
		case i == 0:
			b.WriteString(first)
			column = len([]rune(first))
		case column+1+n > planWidth:
			b.WriteString("\n" + indent)
			column = len(indent)
		default:
			b.WriteByte(' ')
			column++
		}
		b.WriteString(word)
		column += n
	}
	b.WriteByte('\n')
	return b.String()
}
