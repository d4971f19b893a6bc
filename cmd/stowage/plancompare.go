// This file owns `stowage plan --compare A B`: two settings side by side.

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/plan/page"
)

// comparison makes and prints one. What was set on the command line counts for
// both sides that are not reports.
func (f *planFlags) comparison(cmd *cobra.Command, w planWords) error {
	if len(f.compare) != 2 {
		return usagef("--compare takes two files, not %d", len(f.compare))
	}
	if f.html != "" || f.flags != "" {
		return usagef("--html and --flags are for one setting; leave them out with --compare")
	}
	if len(w.rest) > 0 {
		return usagef("--compare takes two files; %q is one too many", w.rest[0])
	}
	if f.job.model+f.job.config+f.job.megatron != "" {
		return usagef("the files of --compare have their models; drop --model, --config and --megatron")
	}
	var sides [2]*page.Report
	reports := 0
	for i, name := range f.compare {
		r, done, err := f.side(name, w)
		if err != nil {
			return err
		}
		if sides[i] = r; done {
			reports++
		}
	}
	if reports == 2 && len(w.settings) > 0 {
		return usagef("--%s changes nothing: both files of --compare are reports; drop it", slices.Sorted(maps.Keys(w.settings))[0])
	}
	c := compare(f.compare[0], f.compare[1], sides[0], sides[1])
	if *f.asJSON {
		return printJSON(cmd, c)
	}
	compareText(cmd.OutOrStdout(), c)
	return nil
}

// side is a report that was printed before, and then done, or that of a file of
// arguments.
func (f *planFlags) side(name string, w planWords) (r *page.Report, done bool, err error) {
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, false, usagef("--compare %s cannot be read: %v", name, pathless(err))
	}
	if r, err := readReport(data); r != nil || err != nil {
		if err != nil {
			err = usagef("--compare %s: %v", name, typeless(err))
		}
		return r, true, err
	}
	one := *f
	one.job.model, one.job.config, one.job.megatron = "", "", name
	// Each side gets its own copy: making a setup may add to the settings.
	w.settings = maps.Clone(w.settings)
	s, _, err := one.job.setup(w)
	if err != nil {
		return nil, false, usagef("%s", strings.Replace(err.Error(), "--megatron ", "--compare ", 1))
	}
	r, err = one.report(s, "")
	return r, false, err
}

// readReport reads what --json printed; it is nothing if the text is something
// else.
func readReport(data []byte) (*page.Report, error) {
	var head struct {
		Version int             `json:"version"`
		Ranks   json.RawMessage `json:"ranks"`
	}
	if json.Unmarshal(data, &head) != nil || head.Ranks == nil {
		return nil, nil
	}
	if head.Version != page.Version {
		return nil, fmt.Errorf("the report is of version %d, and this program reads version %d; print it again", head.Version, page.Version)
	}
	var r page.Report
	err := json.Unmarshal(data, &r)
	switch {
	case err != nil:
	case !slices.ContainsFunc(r.Ranks, func(k page.Rank) bool { return k.Rank == r.Heaviest }):
		err = fmt.Errorf("its heaviest rank, %d, is not among its ranks", r.Heaviest)
	case r.Time != nil && r.Time.Step <= 0:
		err = fmt.Errorf("its step takes no time")
	}
	if err != nil {
		return nil, err
	}
	return &r, nil
}

// comparison is what --compare --json prints.
type comparison struct {
	A side `json:"a"`
	B side `json:"b"`
	// Causes and Groups are those of the two heaviest ranks.
	Causes []difference `json:"causes"`
	Groups []difference `json:"groups"`
	// Ranks are the peaks of all ranks, where both have as many.
	Ranks    []difference `json:"ranks"`
	Settings []changed    `json:"settings"`
}

type side struct {
	Name     string    `json:"name"`
	Heaviest int       `json:"heaviest_rank"`
	Peak     page.Band `json:"peak"`
	Reserved page.Band `json:"reserved"`
	Host     int64     `json:"host_bytes"`
	Budget   int64     `json:"budget_bytes"`
	Fits     bool      `json:"fits"`
	Step     *float64  `json:"step_seconds"` // null without hardware
}

type difference struct {
	Name string `json:"name"`
	A    int64  `json:"a_bytes"`
	B    int64  `json:"b_bytes"`
	More int64  `json:"difference_bytes"` // B - A
}

// changed is a setting that differs.
type changed struct {
	Name string `json:"name"`
	A    string `json:"a"`
	B    string `json:"b"`
}

func sideOf(name string, r *page.Report) side {
	k := rankOf(r, r.Heaviest)
	s := side{Name: name, Heaviest: r.Heaviest, Peak: r.Peak, Reserved: r.Reserved, Host: k.Host, Budget: r.Budget, Fits: r.Fits}
	if r.Time != nil {
		s.Step = &r.Time.Step
	}
	return s
}

func compare(nameA, nameB string, a, b *page.Report) *comparison {
	c := &comparison{A: sideOf(nameA, a), B: sideOf(nameB, b), Ranks: []difference{}, Settings: settingsChanged(a, b)}
	ka, kb := rankOf(a, a.Heaviest), rankOf(b, b.Heaviest)
	c.Causes = differences(ka.Causes, kb.Causes, func(x page.Cause) (string, int64) { return x.Name, x.Bytes })
	c.Groups = differences(ka.Groups, kb.Groups, func(x page.Group) (string, int64) { return x.Name, x.Total })
	if len(a.Ranks) == len(b.Ranks) {
		c.Ranks = differences(a.Ranks, b.Ranks, func(x page.Rank) (string, int64) { return fmt.Sprintf("rank %d", x.Rank), x.Peak.Expected })
	}
	return c
}

// differences pairs two lists by name, in the order of the first; what only the
// second has comes last, and what is nothing in both is left out.
func differences[T any](a, b []T, of func(T) (string, int64)) []difference {
	out := []difference{}
	at := func(name string) *difference {
		i := slices.IndexFunc(out, func(d difference) bool { return d.Name == name })
		if i < 0 {
			i = len(out)
			out = append(out, difference{Name: name})
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
	return slices.DeleteFunc(out, func(d difference) bool { return d.A == 0 && d.B == 0 })
}

// settingsChanged compares setups by their names in the JSON, so that none is
// forgotten.
func settingsChanged(a, b *page.Report) []changed {
	out := []changed{}
	if a.Model.Name != b.Model.Name {
		out = append(out, changed{"model", a.Model.Name, b.Model.Name})
	}
	if h, g := gpuName(a), gpuName(b); h != g {
		out = append(out, changed{"gpu", h, g})
	}
	names, va := setupValues(a.Setup)
	_, vb := setupValues(b.Setup)
	for _, n := range names {
		if va[n] != vb[n] {
			out = append(out, changed{n, va[n], vb[n]})
		}
	}
	return out
}

func gpuName(r *page.Report) string {
	if r.Hardware == nil {
		return "none"
	}
	return r.Hardware.Name
}

// setupValues are a setup's names in order, and what each is.
func setupValues(s page.Setup) (names []string, values map[string]string) {
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

func compareText(w io.Writer, c *comparison) {
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
	table := func(head string, all []difference) {
		if len(all) == 0 {
			return
		}
		fmt.Fprintln(w)
		line(head, "A", "B", "B - A")
		for _, d := range all {
			line(d.Name, page.GiB(d.A), page.GiB(d.B), signed(d.More))
		}
	}
	table("heaviest rank, GiB", append(slices.Clone(c.Causes),
		difference{"allocated", c.A.Peak.Expected, c.B.Peak.Expected, c.B.Peak.Expected - c.A.Peak.Expected},
		difference{"reserved", c.A.Reserved.Expected, c.B.Reserved.Expected, c.B.Reserved.Expected - c.A.Reserved.Expected},
		difference{"reserved at most", c.A.Reserved.High, c.B.Reserved.High, c.B.Reserved.High - c.A.Reserved.High},
		difference{"host", c.A.Host, c.B.Host, c.B.Host - c.A.Host}))
	line("which rank", fmt.Sprint(c.A.Heaviest), fmt.Sprint(c.B.Heaviest), "")
	budgets(line, &c.A, &c.B)
	table("saved tensors, GiB", c.Groups)
	table("allocated, GiB", c.Ranks)
}

// budgets has the lines that a side without budget or hardware lacks.
func budgets(line func(name, a, b, more string), a, b *side) {
	if a.Budget > 0 || b.Budget > 0 {
		words := func(s *side) (size, fits string) {
			if s.Budget == 0 {
				return "-", "-"
			}
			return page.GiB(s.Budget), yesNo(s.Fits)
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
		line("step", page.Seconds(*a.Step), page.Seconds(*b.Step), fmt.Sprintf("%+.1f %%", 100*(*b.Step / *a.Step - 1)))
	case a.Step != nil:
		line("step", page.Seconds(*a.Step), "-", "")
	case b.Step != nil:
		line("step", "-", page.Seconds(*b.Step), "")
	}
}

// clip writes a setting into its column; the JSON has all of it.
func clip(s string) string {
	switch r := []rune(s); {
	case s == "":
		return "none"
	case len(r) > 36:
		return string(r[:35]) + "…"
	}
	return s
}

func signed(n int64) string { return fmt.Sprintf("%+.2f", float64(n)/(1<<30)) }

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
