// This file owns the text of a report.

package planview

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/internal/plaintext"
)

// causeWords are short headings of columns for causes with long names.
var causeWords = map[string]string{
	"gradients": "grads", "optimizer": "optim", "activations": "activ", "transient": "trans",
}

// Hints tell a reader of the text what to ask next, in the words of the program that
// writes it.
type Hints struct {
	NoBudget   string // there is no budget that the job could fit
	TooLarge   string // the job does not fit, and nothing was searched
	OtherFlags string // there are flags for programs other than Megatron-LM
	AllFlags   string // only the flags that change are shown
}

// WriteText writes the report for a terminal. detail lists the ranks whose parts it
// shows.
func (r *Report) WriteText(w io.Writer, detail []int, hints Hints) {
	writeAnswer(w, r.Answer)
	writeHead(w, r)
	writeRanks(w, r)
	writeVerdict(w, r, hints)
	for _, rank := range detail {
		writeParts(w, r.rank(rank))
	}
	writeDecisions(w, r.Decisions)
	writeSearch(w, r.Search)
	writeTime(w, r.Time)
	for _, f := range r.Flags {
		if f.For == "megatron" {
			writeFlags(w, f, hints)
		}
	}
	writeNotes(w, r.Warnings)
}

// words describes the model. A token of a mixture uses only some of its parameters.
func (m Model) words() string {
	text := fmt.Sprintf("%s: %d layers, hidden %d, %s parameters", m.Name, m.Layers, m.Hidden, Count(m.Parameters))
	if m.Experts > 0 && m.Active > 0 {
		text += fmt.Sprintf(", %s active, %d of %d experts", Count(m.Active), m.TopK, m.Experts)
	}
	return text
}

func writeHead(w io.Writer, r *Report) {
	s, m := r.Setup, r.Model
	text := m.words()
	if r.Hardware != nil {
		text += fmt.Sprintf("; %d x %s", s.GPUs, r.Hardware.Name)
	} else {
		text += fmt.Sprintf("; %d GPUs", s.GPUs)
	}
	fmt.Fprint(w, Wrap(text, ""))
	fmt.Fprint(w, Wrap(fmt.Sprintf("%s; %s; %s", Parallel(s), s.Precision, s.Optimizer), ""))
	fmt.Fprintf(w, "%d sequences of %d a step, %d a microbatch: %d microbatches\n", s.GlobalBatch, s.Seq, s.MicroBatch, s.Microbatches)
	policy := fmt.Sprintf("recompute %s; offload %s; stash %s", Recomputed(s), Offloaded(s), words(s.StashModules))
	if s.Routing != "" {
		policy += "; routing " + Routed(s)
	}
	fmt.Fprint(w, Wrap(policy, ""))
}

// writeRanks writes a line for each rank. It leaves out causes that hold less than
// 1 MiB on every rank.
func writeRanks(w io.Writer, r *Report) {
	var shown []int
	for c := range r.Ranks[0].Causes {
		if slices.ContainsFunc(r.Ranks, func(k Rank) bool { return k.Causes[c].Bytes >= 1<<20 }) {
			shown = append(shown, c)
		}
	}
	host := slices.ContainsFunc(r.Ranks, func(k Rank) bool { return k.Host > 0 })
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
			fmt.Fprintf(w, "  %7s", GiB(k.Causes[c].Bytes))
		}
		fmt.Fprintf(w, "  %9s  %6s  %8s", GiB(k.Peak.Expected), GiB(max(k.Peak.High-k.Peak.Expected, k.Peak.Expected-k.Peak.Low)), GiB(k.Reserved.Expected))
		if host {
			fmt.Fprintf(w, "  %6s", GiB(k.Host))
		}
		fmt.Fprintln(w)
	}
}

func writeVerdict(w io.Writer, r *Report, hints Hints) {
	k := r.rank(r.Heaviest)
	fmt.Fprintf(w, "\n%s", Wrap(fmt.Sprintf("* rank %d (%s) is the heaviest: %s GiB allocated (%s to %s), %s reserved (%s to %s); peak %s",
		k.Rank, k.Holds, GiB(k.Peak.Expected), GiB(k.Peak.Low), GiB(k.Peak.High),
		GiB(k.Reserved.Expected), GiB(k.Reserved.Low), GiB(k.Reserved.High), k.At), "  "))
	switch {
	case r.Budget == 0:
		fmt.Fprintf(w, "no budget: %s\n", hints.NoBudget)
	case r.Missing == 0 && r.Node.lacks():
		fmt.Fprint(w, Wrap(fmt.Sprintf("DOES NOT FIT: host memory is too small, though device memory is enough (up to %s GiB reserved of %s, %s)", GiB(r.Reserved.High), GiB(r.Budget), r.BudgetFrom), ""))
	case r.Fits:
		fmt.Fprint(w, Wrap(fmt.Sprintf("FITS: up to %s GiB reserved of %s (%s), %s GiB to spare", GiB(r.Reserved.High), GiB(r.Budget), r.BudgetFrom, GiB(r.Spare)), ""))
	default:
		if r.Reserved.Expected <= r.Budget {
			fmt.Fprint(w, Wrap(fmt.Sprintf("MAY NOT FIT: %s GiB reserved are expected and up to %s are possible of %s (%s), %s GiB too many",
				GiB(r.Reserved.Expected), GiB(r.Reserved.High), GiB(r.Budget), r.BudgetFrom, GiB(r.Missing)), ""))
		} else {
			fmt.Fprint(w, Wrap(fmt.Sprintf("DOES NOT FIT: up to %s GiB reserved of %s (%s), %s GiB are missing", GiB(r.Reserved.High), GiB(r.Budget), r.BudgetFrom, GiB(r.Missing)), ""))
		}
	}
	if r.Budget > 0 && !r.Fits && r.Search == nil && r.Hardware != nil {
		fmt.Fprintln(w, hints.TooLarge)
	}
	if n := r.Node; n != nil && n.Pinned > 0 {
		fmt.Fprint(w, Wrap("host memory: "+n.words(), ""))
	}
}

// lacks reports whether the node has less memory than its ranks pin.
func (n *Node) lacks() bool { return n != nil && n.Missing > 0 }

// words compares what the ranks of a node pin with what it has.
func (n *Node) words() string {
	text := fmt.Sprintf("%s GiB pinned by the %d GPUs of node %d", GiB(n.Pinned), n.GPUs, n.Number)
	if n.GPUs == 1 {
		text = fmt.Sprintf("%s GiB pinned by the GPU of node %d", GiB(n.Pinned), n.Number)
	}
	switch {
	case n.Room == 0:
		return text + "; what a node has is not known"
	case n.Missing > 0:
		return text + fmt.Sprintf(" of %s (%s), %s GiB are missing", GiB(n.Room), n.From, GiB(n.Missing))
	}
	return text + fmt.Sprintf(" of %s (%s), %s GiB to spare", GiB(n.Room), n.From, GiB(n.Room-n.Pinned))
}

// writeParts writes what a rank's memory consists of.
func writeParts(w io.Writer, k *Rank) {
	fmt.Fprintf(w, "\nrank %d, %s\n  %-12s  %-40s  %8s\n", k.Rank, k.Holds, "cause", "what", "GiB")
	for _, it := range k.Items {
		if it.Cause != "activations" {
			fmt.Fprintf(w, "  %-12s  %-40s  %8s\n", it.Cause, it.Name, GiB(it.Bytes))
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
		fmt.Fprintf(w, "  %-18s  %11s  %5d  %9s  %9s  %10s\n", g.Name, MiB(g.Bytes), g.Live, GiB(g.Total), GiB(g.Away), GiB(g.Dropped))
	}
}

func writeDecisions(w io.Writer, all []Decision) {
	if len(all) == 0 {
		return
	}
	fmt.Fprintf(w, "\n%-15s  %9s  %8s  %8s  %-9s  %s\n", "group", "a layer", "window", "copy", "decision", "reason")
	for _, d := range all {
		head := fmt.Sprintf("%-15s  %9s  %8s  %8s  %-9s  ", d.Group, MiB(d.Bytes), orDash(d.Window), orDash(d.Copy), d.Choice)
		fmt.Fprint(w, hang(head, d.Reason))
	}
}

// orDash formats a time. Zero becomes a dash.
func orDash(t float64) string {
	if t == 0 {
		return "-"
	}
	return Seconds(t)
}

func writeSearch(w io.Writer, s *Search) {
	if s == nil {
		return
	}
	if s.Nothing {
		fmt.Fprintln(w, "\nnothing has to be offloaded or recomputed: the job fits without a policy")
	} else {
		fmt.Fprintf(w, "\nwithout a memory policy: %s GiB at the peak, %s a step\n", GiB(s.BarePeak), Seconds(s.BareStep))
	}
	if s.Over == "layout" {
		fmt.Fprint(w, Wrap(fmt.Sprintf("%d layouts divide the model; %d were searched, of which %d do not fit, and the rest cannot be faster", s.Possible, s.Tried, s.Unfit), ""))
	} else if !s.Nothing {
		fmt.Fprintf(w, "%d policies were compared\n", s.Tried)
	}
	for _, c := range s.Best {
		host := ""
		if c.Host > 0 {
			host = fmt.Sprintf(" (%s GiB of host memory)", GiB(c.Host))
		}
		fmt.Fprint(w, Wrap(fmt.Sprintf("%s, %s GiB%s  %s: %s", Seconds(c.Step), GiB(c.Peak), host, c.what(), c.Reason), "  "))
	}
	if shares := shareWords(s.Shares); shares != "" {
		fmt.Fprint(w, Wrap("offloaded at least: "+shares, ""))
	}
}

// shareWords lists what each rank offloads. It joins neighbours with equal shares.
func shareWords(all []Share) string {
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

func writeTime(w io.Writer, t *Time) {
	if t == nil {
		return
	}
	fmt.Fprintf(w, "\nstep %s: %.0f TFLOP/s a GPU, %s tokens/s\nof it bubble %s, replicas %s, optimiser %s\n",
		Seconds(t.Step), t.TFLOPS, Count(int64(t.Tokens)), Seconds(t.Bubble), Seconds(t.Replicas), Seconds(t.Update))
	fmt.Fprintf(w, "the memory policy costs %s (%.1f %%): recompute %s, late copies %s\n",
		Seconds(t.PolicySeconds()), 100*t.PolicySeconds()/t.Step, Seconds(t.Recompute), Seconds(t.Copies))
}

func writeNotes(w io.Writer, all []string) {
	for _, n := range all {
		fmt.Fprint(w, Wrap("note: "+n, ""))
	}
}

// writeFlags writes what to change in the flags that the job came with, or all flags.
func writeFlags(w io.Writer, f Flags, hints Hints) {
	switch {
	case f.File == "":
		fmt.Fprintf(w, "\nflags for Megatron-LM (%s)\n%s", hints.OtherFlags, packFlags(f.Text))
	case len(f.Changes) == 0:
		fmt.Fprintf(w, "\n%s", Wrap(fmt.Sprintf("the flags in %s stay as they are (%s)", f.File, hints.AllFlags), ""))
	default:
		fmt.Fprintf(w, "\n%s", Wrap(fmt.Sprintf("change the flags in %s; all others stay (%s)", f.File, hints.AllFlags), ""))
		for _, c := range f.Changes {
			fmt.Fprintf(w, "  %s\n", c)
		}
	}
	writeNotes(w, f.Notes)
}

// packFlags puts flags that stand on a line each into as few lines as possible.
func packFlags(text string) string {
	var b strings.Builder
	column := 0
	for i, flag := range strings.Split(text, " \\\n") {
		n := len([]rune(flag))
		switch {
		case i == 0:
			b.WriteString("  ")
			column = 2
		case column+1+n+2 > plaintext.Width:
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
