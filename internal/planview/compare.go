// This file owns comparisons: two reports side by side.

package planview

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/memory"
)

// Read reads a report from JSON. It returns nil if the text is not a report, and an
// error if it is a broken one.
func Read(data []byte) (*Report, error) {
	var head struct {
		Version int             `json:"version"`
		Ranks   json.RawMessage `json:"ranks"`
	}
	if json.Unmarshal(data, &head) != nil || head.Ranks == nil {
		return nil, nil
	}
	if head.Version != Version {
		return nil, fmt.Errorf("the report is of version %d, and this program reads version %d; print it again", head.Version, Version)
	}
	var r Report
	err := json.Unmarshal(data, &r)
	switch {
	case err != nil:
	case !slices.ContainsFunc(r.Ranks, func(k Rank) bool { return k.Rank == r.Heaviest }):
		err = fmt.Errorf("its heaviest rank, %d, is not among its ranks", r.Heaviest)
	case r.Time != nil && r.Time.Step <= 0:
		err = fmt.Errorf("its step takes no time")
	}
	if err != nil {
		return nil, err
	}
	return &r, nil
}

// Comparison compares two reports.
type Comparison struct {
	A Side `json:"a"`
	B Side `json:"b"`
	// Causes and Groups compare the two heaviest ranks.
	Causes []Difference `json:"causes"`
	Groups []Difference `json:"groups"`
	// Ranks compares the peaks of all ranks, if both sides have as many.
	Ranks    []Difference `json:"ranks"`
	Settings []Change     `json:"settings"`
}

// Side is the main figures of one report.
type Side struct {
	Name     string       `json:"name"`
	Heaviest int          `json:"heaviest_rank"`
	Peak     Band         `json:"peak"`
	Reserved Band         `json:"reserved"`
	Host     memory.Bytes `json:"host_bytes"`
	Budget   memory.Bytes `json:"budget_bytes"`
	Fits     bool         `json:"fits"`
	Step     *float64     `json:"step_seconds"` // null without hardware
	// Warnings are those of the report.
	Warnings []string `json:"warnings"`
}

// Difference is a size on both sides.
type Difference struct {
	Name string       `json:"name"`
	A    memory.Bytes `json:"a_bytes"`
	B    memory.Bytes `json:"b_bytes"`
	More memory.Bytes `json:"difference_bytes"` // B - A
}

// Change is a setting that differs.
type Change struct {
	Name string `json:"name"`
	A    string `json:"a"`
	B    string `json:"b"`
}

func sideOf(name string, r *Report) Side {
	k := r.rank(r.Heaviest)
	s := Side{Name: name, Heaviest: r.Heaviest, Peak: r.Peak, Reserved: r.Reserved, Host: k.Host, Budget: r.Budget, Fits: r.Fits, Warnings: orEmpty(r.Warnings)}
	if r.Time != nil {
		s.Step = &r.Time.Step
	}
	return s
}

// Compare returns the differences between two reports.
func Compare(nameA, nameB string, a, b *Report) *Comparison {
	c := &Comparison{A: sideOf(nameA, a), B: sideOf(nameB, b), Ranks: []Difference{}, Settings: settingsChanged(a, b)}
	ka, kb := a.rank(a.Heaviest), b.rank(b.Heaviest)
	c.Causes = differences(ka.Causes, kb.Causes, func(x Cause) (string, memory.Bytes) { return x.Name, x.Bytes })
	c.Groups = differences(ka.Groups, kb.Groups, func(x Group) (string, memory.Bytes) { return x.Name, x.Total })
	if len(a.Ranks) == len(b.Ranks) {
		c.Ranks = differences(a.Ranks, b.Ranks, func(x Rank) (string, memory.Bytes) { return fmt.Sprintf("rank %d", x.Rank), x.Peak.Expected })
	}
	return c
}

// differences pairs two lists by name, in the order of the first list and then of the
// second. It leaves out names that are zero on both sides.
func differences[T any](a, b []T, of func(T) (string, memory.Bytes)) []Difference {
	out := []Difference{}
	at := func(name string) *Difference {
		i := slices.IndexFunc(out, func(d Difference) bool { return d.Name == name })
		if i < 0 {
			i = len(out)
			out = append(out, Difference{Name: name})
		}
		return &out[i]
	}
	for _, x := range a {
		name, n := of(x)
		at(name).A += n
	}
	for _, x := range b {
		name, n := of(x)
		at(name).B += n
	}
	for i := range out {
		out[i].More = out[i].B - out[i].A
	}
	return slices.DeleteFunc(out, func(d Difference) bool { return d.A == 0 && d.B == 0 })
}

// settingsChanged compares setups by their names in the JSON, so that none is forgotten.
func settingsChanged(a, b *Report) []Change {
	out := []Change{}
	if a.Model.Name != b.Model.Name {
		out = append(out, Change{"model", a.Model.Name, b.Model.Name})
	}
	if h, g := gpuName(a), gpuName(b); h != g {
		out = append(out, Change{"gpu", h, g})
	}
	names, va := setupValues(a.Setup)
	_, vb := setupValues(b.Setup)
	for _, n := range names {
		if va[n] != vb[n] {
			out = append(out, Change{n, va[n], vb[n]})
		}
	}
	return out
}

func gpuName(r *Report) string {
	if r.Hardware == nil {
		return "none"
	}
	return r.Hardware.Name
}

// setupValues returns the names of a setup's values in order, and the values.
func setupValues(s Setup) (names []string, values map[string]string) {
	text, err := json.Marshal(s)
	if err != nil {
		panic("plan: a setup does not marshal: " + err.Error())
	}
	values = map[string]string{}
	d := json.NewDecoder(strings.NewReader(string(text)))
	if _, err := d.Token(); err != nil {
		panic("plan: a setup is no object: " + err.Error())
	}
	for d.More() {
		var v any
		name, err := d.Token()
		if err == nil {
			err = d.Decode(&v)
		}
		if err != nil {
			panic("plan: a setup cannot be read again: " + err.Error())
		}
		names = append(names, name.(string))
		if list, ok := v.([]any); ok {
			v = strings.Trim(fmt.Sprint(list), "[]")
			if len(list) == 0 {
				v = "none"
			}
		}
		values[name.(string)] = fmt.Sprint(v)
	}
	return names, values
}

// WriteText writes the comparison for a terminal.
func (c *Comparison) WriteText(w io.Writer) {
	fmt.Fprintf(w, "A  %s\nB  %s\n", c.A.Name, c.B.Name)
	if len(c.Settings) > 0 {
		fmt.Fprintf(w, "\n%-22s  %-36s  %s\n", "settings that differ", "A", "B")
		for _, s := range c.Settings {
			fmt.Fprintf(w, "%-22s  %-36s  %s\n", s.Name, clip(s.A), clip(s.B))
		}
	} else {
		fmt.Fprintln(w, "\nno setting differs")
	}
	line := func(name, a, b, more string) {
		fmt.Fprintln(w, strings.TrimRight(fmt.Sprintf("%-22s  %11s  %11s  %11s", name, a, b, more), " "))
	}
	table := func(head string, all []Difference) {
		if len(all) == 0 {
			return
		}
		fmt.Fprintln(w)
		line(head, "A", "B", "B - A")
		for _, d := range all {
			line(d.Name, GiB(d.A), GiB(d.B), signed(d.More))
		}
	}
	table("heaviest rank, GiB", append(slices.Clone(c.Causes),
		Difference{"allocated", c.A.Peak.Expected, c.B.Peak.Expected, c.B.Peak.Expected - c.A.Peak.Expected},
		Difference{"reserved", c.A.Reserved.Expected, c.B.Reserved.Expected, c.B.Reserved.Expected - c.A.Reserved.Expected},
		Difference{"reserved at most", c.A.Reserved.High, c.B.Reserved.High, c.B.Reserved.High - c.A.Reserved.High},
		Difference{"host", c.A.Host, c.B.Host, c.B.Host - c.A.Host}))
	line("which rank", fmt.Sprint(c.A.Heaviest), fmt.Sprint(c.B.Heaviest), "")
	budgets(line, &c.A, &c.B)
	table("saved tensors, GiB", c.Groups)
	table("allocated, GiB", c.Ranks)
	c.writeNotes(w)
}

// writeNotes writes the warnings of both sides, and those that both have once.
func (c *Comparison) writeNotes(w io.Writer) {
	if len(c.A.Warnings)+len(c.B.Warnings) > 0 {
		fmt.Fprintln(w)
	}
	for _, side := range []struct {
		name       string
		own, other []string
	}{{"A", c.A.Warnings, c.B.Warnings}, {"B", c.B.Warnings, c.A.Warnings}} {
		for _, n := range side.own {
			switch both := slices.Contains(side.other, n); {
			case !both:
				fmt.Fprint(w, Wrap("note on "+side.name+": "+n, ""))
			case side.name == "A":
				fmt.Fprint(w, Wrap("note on both: "+n, ""))
			}
		}
	}
}

// budgets writes the lines about budgets and steps. A side without budget or hardware
// has dashes.
func budgets(line func(name, a, b, more string), a, b *Side) {
	if a.Budget > 0 || b.Budget > 0 {
		words := func(s *Side) (size, fits string) {
			if s.Budget == 0 {
				return "-", "-"
			}
			return GiB(s.Budget), yesNo(s.Fits)
		}
		sizeA, fitsA := words(a)
		sizeB, fitsB := words(b)
		more := ""
		if a.Budget > 0 && b.Budget > 0 {
			more = signed(b.Budget - a.Budget)
		}
		line("budget", sizeA, sizeB, more)
		line("fits", fitsA, fitsB, "")
	}
	switch {
	case a.Step != nil && b.Step != nil:
		line("step", Seconds(*a.Step), Seconds(*b.Step), fmt.Sprintf("%+.1f %%", 100*(*b.Step / *a.Step - 1)))
	case a.Step != nil:
		line("step", Seconds(*a.Step), "-", "")
	case b.Step != nil:
		line("step", "-", Seconds(*b.Step), "")
	}
}

// clip shortens a setting to the width of its column. The JSON has all of it.
func clip(s string) string {
	switch r := []rune(s); {
	case s == "":
		return "none"
	case len(r) > 36:
		return string(r[:35]) + "…"
	}
	return s
}

func signed(n memory.Bytes) string { return fmt.Sprintf("%+.2f", float64(n)/(1<<30)) }

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
