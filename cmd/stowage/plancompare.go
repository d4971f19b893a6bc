// This file owns `stowage plan --compare A B`: which two reports are compared.

package main

import (
	"maps"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/internal/planview"
)

// comparison compares two reports and prints the result. Settings of the command line
// apply to both files that are not reports.
func (f *planFlags) comparison(cmd *cobra.Command, w planWords) error {
	if len(f.compare) != 2 {
		return usagef("--compare takes two files, not %d", len(f.compare))
	}
	for _, name := range f.compare {
		if blank(name) {
			return usagef("--compare takes two files, and the name of one is empty")
		}
	}
	if f.largest != "" || f.fewest {
		return usagef("--compare excludes --largest and --fewest-gpus; plan each file with them and --json, and compare the reports")
	}
	if f.html != "" || f.flags != "" || cmd.Flags().Changed("rank") {
		return usagef("--compare excludes --html, --flags and --rank; remove them")
	}
	if len(w.rest) > 0 {
		return usagef("--compare takes two files; %q is one too many", w.rest[0])
	}
	if f.job.model+f.job.config+f.job.megatron != "" {
		return usagef("the files of --compare name their models; remove --model, --config and --megatron")
	}
	var sides [2]*planview.Report
	reports := 0
	for i, name := range f.compare {
		r, done, err := f.side(cmd, name, w)
		if err != nil {
			return err
		}
		if sides[i] = r; done {
			reports++
		}
	}
	idle := slices.Sorted(maps.Keys(w.settings))
	cmd.Flags().Visit(func(x *pflag.Flag) {
		if x.Name != "compare" && x.Name != "json" {
			idle = append(idle, x.Name)
		}
	})
	if reports == 2 && len(idle) > 0 {
		return usagef("--%s changes nothing, because both files of --compare are reports; remove it", idle[0])
	}
	c := planview.Compare(f.compare[0], f.compare[1], sides[0], sides[1])
	if *f.asJSON {
		return printJSON(cmd, c)
	}
	c.WriteText(cmd.OutOrStdout())
	return nil
}

// mostReport is the most bytes of a plan's report as JSON.
const mostReport = 16 << 20

// side returns the report in a file, and whether the file was one. It makes the report
// of a file of arguments.
func (f *planFlags) side(cmd *cobra.Command, name string, w planWords) (r *planview.Report, done bool, err error) {
	data, err := input.ReadFile(name, mostReport)
	if err != nil {
		return nil, false, usagef("--compare %s: the file cannot be read: %w", name, input.Cause(err))
	}
	if r, err := planview.Read(data); r != nil || err != nil {
		if err != nil {
			err = usagef("--compare %s: %w", name, input.Plain(err))
		}
		return r, true, err
	}
	one := *f
	one.job.model, one.job.config, one.job.megatron, one.job.modelFlag = "", "", name, "--compare"
	// Each side gets its own copy: making a setup may add to the settings.
	w.settings = maps.Clone(w.settings)
	s, notes, err := one.job.setup(w)
	if err != nil {
		return nil, false, err
	}
	if r, err = one.report(cmd, s, nil, ""); err == nil {
		err = one.warn(r, s, notes, w)
	}
	return r, false, err
}
