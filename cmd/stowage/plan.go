// This file owns `stowage plan`: its flags, what they mean together, and the
// order in which an answer is made. planflags.go owns the words of a command
// line, planinput.go the job they describe, planreport.go the report,
// plantext.go the tables, plancompare.go two settings side by side,
// planexplain.go, planring.go and planvalidate.go the commands below it.

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/model"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/page"
	"github.com/stowage-dev/stowage/plan/search"
)

const planLong = `Say what a training job needs before it is launched: the memory of every pipeline
rank by cause, the heaviest rank found by walking the schedule, whether it fits,
how long a step takes and what of that the memory policy costs, what happens to
each group of saved tensors and why, and the flags that ask for all of it.

The job is a model with settings of Megatron-LM, under their own names or the
short ones below; lists stand as they do there (--offload core_attn moe_act). A
model is a preset, a config.json of Hugging Face, or the sizes in a file of
Megatron-LM arguments (shell, YAML or JSON), which is read as it is.

Figures are expected values; behind ± and in brackets is the band that measured
runs lay in. A setup fits if the upper end of what the allocator reserves stays
within the budget: --budget, or what the hardware leaves. --search policy finds
the fastest memory policy that fits, --search layout the fastest layout with its
policy; --budget alone searches a policy if the settings name none. If nothing
fits the exit code is 1, and the answer names the smallest budget that would do.`

const planExample = `  stowage plan --model llama-3-8b --gpu h100 --gpus 8 --tp 2 --mbs 1 --gbs 128 --seq 8192
  stowage plan --model deepseek-v3 --gpu gb200 --gpus 256 --pp 8 --ep 32 \
      --layout 'Et*7|(t*8|)*6t*6mL' --gbs 2048 --seq 4096 --search policy
  stowage plan --model deepseek-v3 --gpu gb200 --gpus 256 --gbs 2048 --seq 4096 --search layout
  stowage plan --megatron train.yaml --gpu h100 --budget 60GiB --html plan.html
  stowage plan --megatron train.yaml --gpu h100 --json >a.json
  stowage plan --compare a.json other.yaml --gpu h100
  stowage plan explain core_attn --model mixtral-8x7b --gpu h100 --gpus 64 --pp 4 --ep 8 --seq 4096
  stowage plan validate --cases measured_cases.json`

// planFlags are the command's own flags.
type planFlags struct {
	job     jobFlags
	search  string
	html    string
	flags   string
	rank    string
	compare []string
	asJSON  *bool
}

func newPlan() *cobra.Command {
	cmd := &cobra.Command{
		Use:                "plan",
		Short:              "Predict a job's memory and time, and choose what to keep, move and recompute",
		Long:               planLong + "\n\n" + planKnown(),
		Example:            planExample,
		Args:               cobra.ArbitraryArgs,
		DisableFlagParsing: true, // settings of the job are not declared one by one
	}
	f := &planFlags{}
	f.job.add(cmd)
	flags := cmd.Flags()
	flags.StringVar(&f.search, "search", "", "search a `policy` or a layout, or none")
	flags.StringArrayVar(&f.compare, "compare", nil, "show two `files` side by side: reports of --json, or Megatron-LM arguments")
	flags.StringVar(&f.rank, "rank", "heaviest", "`rank` whose parts are listed: a number, heaviest, all or none")
	flags.StringVar(&f.flags, "flags", "", "print nothing but the flags for `megatron`, maxtext or stowage")
	flags.StringVar(&f.html, "html", "", "write a page with pictures to this `file`")
	f.asJSON = jsonFlag(cmd)
	settingsUsage(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		w, help, err := parsePlan(cmd, args)
		switch {
		case err != nil:
			return err
		case help || len(args) == 0:
			return cmd.Help()
		case len(f.compare) > 0:
			return f.comparison(cmd, w)
		}
		return f.run(cmd, w, args)
	}
	cmd.AddCommand(newPlanExplain())
	for _, plain := range []*cobra.Command{newPlanRing(), newPlanValidate()} {
		plain.SetUsageTemplate(usageTemplate) // they take no settings of a job
		cmd.AddCommand(plain)
	}
	return cmd
}

// planKnown lists what is built in.
func planKnown() string {
	return strings.TrimRight(wrap("Presets: "+strings.Join(model.Presets(), ", ")+".", "")+wrap("Hardware: "+strings.Join(hardware.Names(), ", ")+".", ""), "\n")
}

// add declares the flags of a job.
func (j *jobFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&j.model, "model", "", "a preset's `name`, or a file of one of the next two kinds")
	f.StringVar(&j.config, "config", "", "a config.json of Hugging Face, or its `folder`")
	f.StringVar(&j.megatron, "megatron", "", "a `file` of Megatron-LM arguments: a command, a script, YAML or JSON")
	f.StringVar(&j.gpu, "gpu", "", "the hardware's `name`, or a JSON file with its figures")
	f.IntVar(&j.gpus, "gpus", 0, "how many `GPUs` (default as few as the layout needs)")
	f.IntVar(&j.vocab, "vocab", 0, "the vocabulary's `size` where a file leaves it to a tokenizer")
	f.StringVar(&j.budget, "budget", "", "the `size` a rank may take, such as 60GiB (default what the hardware leaves)")
	f.StringVar(&j.routing, "routing", "", "how tokens reach experts: `natural` (the default, as measured runs have it), balanced,\nskewed:1.3 (fullest rank over the mean) or trace:FILE")
}

// settingsUsage puts the short words into the help.
func settingsUsage(cmd *cobra.Command) {
	cmd.InitDefaultHelpFlag()
	head := "Settings, and the flags of Megatron-LM that they stand for (all others are taken too):\n" + settingHelp(cmd) + "\n\n"
	t := strings.Replace(usageTemplate, flagsTemplate, head+flagsTemplate, 1)
	// This command is run itself, though it holds others.
	cmd.SetUsageTemplate(strings.Replace(t, "{{if .HasAvailableSubCommands}}{{.CommandPath}} <command>{{else}}{{.UseLine}}{{end}}", "{{.UseLine}}", 1))
}

func (f *planFlags) run(cmd *cobra.Command, w planWords, args []string) error {
	if f.flags != "" && *f.asJSON {
		return usagef("--flags prints flags alone and --json everything, the flags among it; keep one")
	}
	s, notes, err := f.job.setup(w)
	if err != nil {
		return err
	}
	r, err := f.report(s, commandLine(cmd, args))
	if err != nil {
		return err
	}
	r.Warnings = append(r.Warnings, notes...)
	detail, err := f.ranks(r)
	if err != nil {
		return err
	}
	if f.html != "" {
		if err := writePage(f.html, r); err != nil {
			return err
		}
	}
	out := cmd.OutOrStdout()
	switch {
	case f.flags != "":
		i := slices.IndexFunc(r.Flags, func(x page.Flags) bool { return x.For == f.flags })
		if i < 0 {
			return usagef("--flags %s is unknown; choose megatron, maxtext or stowage", f.flags)
		}
		fmt.Fprintln(out, strings.TrimRight(r.Flags[i].Text, "\n"))
	case *f.asJSON:
		return printJSON(cmd, r)
	default:
		planText(out, r, detail)
		if f.html != "" {
			fmt.Fprintf(out, "\nthe page is in %s\n", f.html)
		}
	}
	return nil
}

// report predicts, after a search if one is asked for.
func (f *planFlags) report(s *plan.Setup, command string) (*page.Report, error) {
	over, err := f.over(s)
	if err != nil {
		return nil, err
	}
	x := &found{setup: s}
	if over != "none" {
		if x, err = runSearch(s, over); err != nil {
			var small *search.TooSmall
			if errors.As(err, &small) {
				return nil, tooSmall(small, over, f.budgetFrom(s)) // the words were right, the answer is no
			}
			return nil, planError(err)
		}
		s = x.setup
	}
	p, err := plan.Predict(s)
	if err != nil {
		return nil, planError(err)
	}
	r := newReport(p, f.budgetFrom(s))
	r.Command = command
	if s.Hardware != nil {
		if r.Time, err = timeReport(p.Setup); err != nil {
			return nil, planError(err)
		}
		if r.Decisions, err = decisions(p.Setup, x.policy); err != nil {
			return nil, planError(err)
		}
	}
	r.Search = x.report
	r.Flags = flagsReport(p.Setup)
	return r, nil
}

// over is what to search. A budget without a policy asks for one.
func (f *planFlags) over(s *plan.Setup) (string, error) {
	switch f.search {
	case "layout":
		if f.job.gpus == 0 && f.job.megatron == "" {
			return "", usagef("--search layout needs --gpus, the number of GPUs to divide the model over")
		}
		return f.search, nil
	case "none", "policy":
		return f.search, nil
	case "":
		free := !s.Recompute.Full && len(s.Recompute.Modules)+len(s.Offload.Modules)+len(s.Stash.Modules) == 0
		if f.job.budget != "" && s.Hardware != nil && free {
			return "policy", nil
		}
		return "none", nil
	}
	return "", usagef("--search %s is unknown; choose policy, layout or none", f.search)
}

func (f *planFlags) budgetFrom(s *plan.Setup) string {
	switch {
	case s.Budget > 0:
		return "--budget"
	case s.Hardware != nil:
		return "what " + s.Hardware.Name + " leaves of " + page.Size(s.Hardware.Memory)
	}
	return ""
}

// ranks are those whose parts are shown.
func (f *planFlags) ranks(r *page.Report) (out []int, err error) {
	switch f.rank {
	case "none":
		return nil, nil
	case "heaviest":
		return []int{r.Heaviest}, nil
	case "all":
		for _, k := range r.Ranks {
			out = append(out, k.Rank)
		}
		return out, nil
	}
	n, err := strconv.Atoi(f.rank)
	if err != nil || n < 0 || n >= len(r.Ranks) {
		which := fmt.Sprintf("none of the %d pipeline ranks; write 0 to %d", len(r.Ranks), len(r.Ranks)-1)
		if len(r.Ranks) == 1 {
			which = "not the only pipeline rank; write 0"
		}
		return nil, usagef("--rank %s is %s, heaviest, all or none", f.rank, which)
	}
	return []int{n}, nil
}

// commandLine writes what was typed so that a shell reads it again.
func commandLine(cmd *cobra.Command, args []string) string {
	words := []string{cmd.CommandPath()}
	for _, a := range args {
		if a == "" || strings.ContainsAny(a, " \t\n'\"\\$`|&;<>()*?[]{}!#~") {
			a = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
		}
		words = append(words, a)
	}
	return strings.Join(words, " ")
}

// writePage makes the page before it touches the file, so that a failure leaves
// what was there.
func writePage(name string, r *page.Report) error {
	var b bytes.Buffer
	if err := page.Write(&b, r); err != nil {
		return fmt.Errorf("the page cannot be made: %w", err)
	}
	if err := os.WriteFile(name, b.Bytes(), 0o644); err != nil {
		return fmt.Errorf("--html: %w", err)
	}
	return nil
}
