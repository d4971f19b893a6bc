// This file owns `stowage plan`: its flags, what they mean together, and its errors.
// planflags.go owns the words of a command line, planinput.go the job that they
// describe, plandoctor.go --doctor, plananswer.go --largest and --fewest-gpus,
// plancompare.go --compare, and planexplain.go, planring.go, planscan.go and
// planvalidate.go the commands below it. Package planview makes and shows the answer.

package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/planview"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/config"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/plan/search"
)

const planLong = `Predict what a training job needs before it starts: the memory of every pipeline
rank by cause, the heaviest rank, whether the job fits, how long a step takes, what
the memory policy adds to it, what happens to each group of saved tensors and why,
and the flags that ask for all of it.

A job is a model with settings of Megatron-LM, under their own names or the short
ones below. Lists are written as Megatron-LM writes them (--offload core_attn
moe_act). A model is a preset, a config.json of Hugging Face, or the sizes in a file
of Megatron-LM arguments (shell, YAML or JSON).

Figures are expected values. Behind ± and in brackets is the band that measured runs
lay in. The budget is the device memory that a rank may hold at its peak: --budget,
or what the hardware leaves. A job fits if the upper end of the memory that the
allocator reserves stays within the budget on every rank, because the device must
hold what is reserved.

--largest finds the largest microbatch, the longest sequence or the most layers with
which the job fits, and --fewest-gpus the smallest number of GPUs: on the layout that is
given and with the given policy, or with the ones that --search finds. The answer names
what the next value would need and what stops it.

--search policy finds the fastest memory policy that fits. --search layout finds the
fastest layout with its policy. --budget searches a policy if --gpu is given and the
settings name none. If nothing fits, the exit code is 1 and the answer names the
smallest budget that a policy fits, or says that the hardware does not have it.`

const planExample = `  stowage plan --model llama-3-8b --gpu h100 --gpus 8 --tp 2 --mbs 1 --gbs 128 --seq 8192
  stowage plan --model deepseek-v3 --gpu gb200 --gpus 256 --pp 8 --ep 32 \
      --layout 'Et*7|(t*8|)*6t*6mL' --gbs 2048 --seq 4096 --search policy
  stowage plan --model deepseek-v3 --gpu gb200 --gpus 256 --gbs 2048 --seq 4096 --search layout
  stowage plan --model mixtral-8x7b --gpu h100 --gpus 32 --pp 4 --ep 8 --largest seq --search policy
  stowage plan --megatron train.yaml --gpu h100 --budget 60GiB --html plan.html
  stowage plan --megatron train.yaml --gpu h100 --json >a.json
  stowage plan --compare a.json other.yaml --gpu h100
  stowage plan explain core_attn --model mixtral-8x7b --gpu h100 --gpus 64 --pp 4 --ep 8 --seq 4096
  stowage plan validate --cases measured_cases.json`

// planFlags are the command's own flags.
type planFlags struct {
	job     jobFlags
	search  string
	largest string
	fewest  bool
	html    string
	flags   string
	rank    string
	compare []string
	asJSON  *bool
}

func newPlan() *cobra.Command {
	cmd := &cobra.Command{
		Use:                "plan",
		Short:              "Predict a job's memory and time, and choose what to keep, offload and recompute",
		Long:               planLong + "\n\n" + planKnown(),
		Example:            planExample,
		Args:               cobra.ArbitraryArgs,
		DisableFlagParsing: true, // the job's settings are not declared one by one
	}
	f := &planFlags{}
	f.job.add(cmd)
	flags := cmd.Flags()
	flags.StringVar(&f.search, "search", "", "search a `policy` or a layout, or none")
	flags.StringVar(&f.largest, "largest", "", "find the largest `microbatch`, seq or layers with which the job fits, and plan it")
	flags.BoolVar(&f.fewest, "fewest-gpus", false, "find the smallest number of GPUs on which the job fits, and plan it")
	flags.StringArrayVar(&f.compare, "compare", nil, "compare two `files`: reports that --json printed, or Megatron-LM arguments")
	flags.StringVar(&f.rank, "rank", "heaviest", "the `rank` whose parts are listed: a number, heaviest, all or none")
	flags.StringVar(&f.flags, "flags", "", "print only the flags for `megatron`, maxtext or stowage, or the changes\nto the flags in a file")
	flags.StringVar(&f.html, "html", "", "write a page with pictures to this `file`")
	f.asJSON = jsonFlag(cmd)
	settingsUsage(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		w, help, err := parsePlan(cmd, args)
		switch {
		case err != nil:
			return err
		case help && len(w.rest) > 0:
			return chooseCommand(cmd, w.rest)
		case help || len(args) == 0:
			return cmd.Help()
		case len(f.compare) > 0:
			return f.comparison(cmd, w)
		}
		return f.run(cmd, w, args)
	}
	cmd.AddCommand(newPlanExplain())
	for _, plain := range []*cobra.Command{newPlanRing(), newPlanScan(), newPlanValidate()} {
		plain.SetUsageTemplate(usageTemplate) // they take no settings of a job
		cmd.AddCommand(plain)
	}
	return cmd
}

// planKnown lists the built-in presets and hardware.
func planKnown() string {
	return strings.TrimRight(planview.Wrap("Presets: "+strings.Join(model.Presets(), ", ")+".", "")+planview.Wrap("Hardware: "+strings.Join(hardware.Names(), ", ")+".", ""), "\n")
}

// planModuleFlags are the flags of Megatron-LM that name modules.
var planModuleFlags = map[memory.Choice]string{memory.Offload: "offload-modules", memory.Recompute: "recompute-modules"}

// planHints name the flags to try next.
var planHints = planview.Hints{
	NoBudget:   "give --gpu or --budget to see whether the job fits",
	TooLarge:   "--search policy finds the fastest memory policy that fits, --search layout the fastest layout",
	OtherFlags: "--flags maxtext and --flags stowage print the others",
	AllFlags:   "--flags megatron prints all of them",
}

// add declares the flags of a job.
func (j *jobFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.SortFlags = false
	j.stdin = cmd.InOrStdin
	f.StringVar(&j.model, "model", "", "a preset's `name`, or a file of one of the next two kinds")
	f.StringVar(&j.config, "config", "", "a config.json of Hugging Face, or its `folder`")
	f.StringVar(&j.megatron, "megatron", "", "a `file` of Megatron-LM arguments: a command, a script, YAML or JSON;\n- is standard input")
	f.StringVar(&j.launch, "launch", "", "a launch `file` of Megatron-LM, NeMo (YAML), MaxText (YAML or a command), torchtitan (TOML)\nor DeepSpeed (JSON); its contents tell which; --model or --config name the model if it does not;\n- is standard input")
	f.StringArrayVar(&j.env, "env", nil, "a variable that the file takes from its environment, as `NAME=VALUE`;\na note tells if the file does not use it")
	f.StringVar(&j.gpu, "gpu", "", "the hardware's `name`, or a JSON file with its figures")
	f.StringVar(&j.doctor, "doctor", "", "a `file` that stowage doctor --json printed on a node of the job, to plan with the memory that\nis free there; - is standard input")
	f.IntVar(&j.gpus, "gpus", 0, "the number of `GPUs` (default as few as the layout allows)")
	f.IntVar(&j.vocab, "vocab", 0, "the vocabulary's `size` if a file leaves it to a tokenizer")
	f.StringVar(&j.budget, "budget", "", "the device memory that a rank may hold at its peak, a `size` such as 60GiB\n(default what the hardware leaves)")
	f.StringVar(&j.host, "host-memory", "", "the host memory that the ranks of a node may pin together, a `size` such as 900GiB\n(default what a usual node of the hardware leaves)")
	f.IntVar(&j.nodeGPUs, "gpus-per-node", 0, "how many `GPUs` share a node and its host memory (default the hardware's number)")
	f.StringVar(&j.routing, "routing", "", "how tokens reach experts: `natural` (the default, as in measured runs), balanced,\nskewed:1.3 (fullest rank over the mean) or counts:FILE (routing counts)")
}

// settingsUsage adds the short names of settings to the help.
func settingsUsage(cmd *cobra.Command) {
	cmd.InitDefaultHelpFlag()
	head := "Settings, and the flags of Megatron-LM that they stand for (all its other flags work too):\n" + settingHelp(cmd) + "\n\n"
	t := strings.Replace(usageTemplate, flagsTemplate, head+flagsTemplate, 1)
	// This command is run itself, though it holds others.
	cmd.SetUsageTemplate(strings.Replace(t, "{{if .HasAvailableSubCommands}}{{.CommandPath}} <command>{{else}}{{.UseLine}}{{end}}", "{{.UseLine}}", 1))
}

func (f *planFlags) run(cmd *cobra.Command, w planWords, args []string) error {
	f.job.anyLayout = planview.SearchSpace(f.search) == planview.Layouts
	if f.flags != "" && *f.asJSON {
		return usagef("--flags prints only flags, and --json prints everything with the flags; keep one")
	}
	if err := checkFiles([]flagFile{{"html", f.html}}, f.job.files()...); err != nil {
		return err
	}
	if f.flags != "" && !slices.Contains(planTargets, f.flags) {
		return usagef("--flags %s is unknown; choose megatron, changes, maxtext or stowage", f.flags)
	}
	answer, err := f.answer(cmd, &w)
	if err != nil {
		return err
	}
	s, notes, err := f.job.setup(w)
	if err != nil {
		return err
	}
	r, err := f.report(cmd, s, f.job.given(f.job.asGiven(s)), commandLine(cmd, args))
	if err != nil {
		return err
	}
	if r.Answer = answer; answer != nil && !r.Fits {
		return fmt.Errorf("%s found %d, and yet the plan of it does not fit; this is a mistake of the program, please report it", f.askedFlag(), answer.Value)
	}
	if err := f.warn(r, s, notes, w); err != nil {
		return err
	}
	detail, err := f.ranks(r)
	if err != nil {
		return err
	}
	return f.print(cmd, r, detail)
}

// warn adds to a report what was assumed or left out.
func (f *planFlags) warn(r *planview.Report, s *plan.Setup, notes []string, w planWords) error {
	r.Warnings = append(r.Warnings, notes...)
	r.Warnings = append(r.Warnings, f.replaced(s, w.settings)...)
	if v, given := f.job.args["use-tp-pp-dp-mapping"]; given && v != false && r.Node != nil && r.Node.Pinned > 0 && r.Setup.PP > 1 {
		r.Warnings = append(r.Warnings, "--use-tp-pp-dp-mapping: the host memory of a node is that of the default order of ranks, which puts fewer stages on a node")
	}
	idle, err := planview.WithoutEffect(f.job.asGiven(s))
	if err != nil {
		return err
	}
	for _, n := range idle {
		r.Warnings = append(r.Warnings, fmt.Sprintf("--%s %s %s; %s", planModuleFlags[n.Choice], n.Module, n.Problem, n.Remedy))
	}
	return nil
}

// print prints a report, and saves its page.
func (f *planFlags) print(cmd *cobra.Command, r *planview.Report, detail []int) error {
	if f.html != "" {
		if err := saveFile(flagFile{"html", f.html}, r.WritePage); err != nil {
			return err
		}
	}
	out := cmd.OutOrStdout()
	switch {
	case f.flags != "":
		if err := f.printFlags(cmd, r); err != nil {
			return err
		}
	case *f.asJSON:
		if err := printJSON(cmd, r); err != nil {
			return err
		}
	default:
		r.WriteText(out, detail, planHints)
		if f.html != "" {
			fmt.Fprintln(out)
		}
	}
	written(cmd, f.flags != "" || *f.asJSON, "the page is in", f.html)
	return nil
}

// printFlags prints the flags alone.
func (f *planFlags) printFlags(cmd *cobra.Command, r *planview.Report) error {
	out := whole(cmd)
	target := f.flags
	if target == "changes" {
		target = "megatron"
	}
	x := r.Flags[slices.IndexFunc(r.Flags, func(x planview.Flags) bool { return x.For == target })]
	switch {
	case target == f.flags:
		fmt.Fprintln(out, strings.TrimRight(x.Text, "\n"))
	case x.File == "":
		return usagef("--flags changes compares with the flags in a file; name it with --megatron, or write --flags megatron")
	default:
		for _, c := range x.Changes {
			fmt.Fprintln(out, c)
		}
	}
	for _, n := range x.Notes { // beside the flags, which a script may read
		say(cmd.ErrOrStderr(), planview.Wrap("note: "+n, ""))
	}
	return nil
}

// planTargets are the values of --flags.
var planTargets = []string{"megatron", "changes", "maxtext", "stowage"}

// report makes the report that the flags ask for.
func (f *planFlags) report(cmd *cobra.Command, s *plan.Setup, given *planview.Given, command string) (*planview.Report, error) {
	over, err := f.searched(s)
	if err != nil {
		return nil, err
	}
	m := measure(cmd, "planning")
	defer m.end()
	q := planview.Request{Setup: s, Search: over, Given: given, Command: command, BudgetFrom: f.budgetFrom(s), HostFrom: f.job.hostFrom(s), Progress: m.at}
	r, err := planview.New(q)
	if err != nil {
		return nil, reportError(err, q)
	}
	return r, nil
}

// reportError words what planview.New returns.
func reportError(err error, q planview.Request) error {
	var small *search.TooSmall
	if !errors.As(err, &small) {
		return planError(err)
	}
	// The command line is right, and the answer is no: this is no error of usage.
	if n := small.Node; n != nil {
		return fmt.Errorf("no policy fits %s (%s) and the host memory of a node, %s (%s): %s would pin %s a node; give more --host-memory if a node has it, or use more --gpus",
			planview.Size(small.Budget), q.BudgetFrom, planview.Size(n.Room), q.HostFrom, small.Policy, planview.Size(n.Pinned))
	}
	remedy := "or look for another layout with --search layout"
	if q.Search == planview.Layouts {
		remedy = "or more --gpus"
	}
	least := (small.Least + 1<<30 - 1) >> 30
	if h := q.Setup.Hardware; h != nil && small.Least > h.Usable {
		// No budget helps, because the GPU does not have it.
		if q.Search == planview.Layouts {
			remedy = "or a GPU with more memory"
		}
		return fmt.Errorf("no policy fits %s, which leaves %s of %s: the one that needs least needs %d GiB, with %s; use more --gpus, %s",
			h.Name, planview.Size(h.Usable), planview.Size(h.Memory), least, small.Policy, remedy)
	}
	return fmt.Errorf("no policy fits %s (%s); the smallest budget that one fits is %d GiB, with %s; give --budget %dGiB, %s",
		planview.Size(small.Budget), q.BudgetFrom, least, small.Policy, least, remedy)
}

// replaced says which settings of the command line a search replaces by its own.
func (f *planFlags) replaced(s *plan.Setup, settings map[string][]string) (notes []string) {
	over, _ := f.searched(s)
	chooses := "--search " + string(over)
	if f.search == "" {
		chooses = "--budget"
	}
	policy := []string{"recompute", "recompute-modules", "recompute-granularity", "offload", "offload-modules", "fraction", "activation-offload-fraction"}
	layout := []string{"tp", "pp", "vpp", "cp", "ep", "etp", "sp", "layout"}
	for _, w := range config.Words {
		if slices.Contains(layout, w.Short) {
			layout = append(layout, w.Long)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		if over == planview.Layouts && slices.Contains(layout, name) || over != planview.NoSearch && slices.Contains(policy, name) {
			notes = append(notes, fmt.Sprintf("--%s is not kept, because %s chooses it", name, chooses))
		}
	}
	return notes
}

// searched returns what to search. A budget without a policy asks for a policy.
func (f *planFlags) searched(s *plan.Setup) (planview.SearchSpace, error) {
	switch over := planview.SearchSpace(f.search); over {
	case planview.Layouts:
		if f.job.gpus == 0 && f.job.megatron == "" {
			return "", usagef("--search layout needs --gpus, the number of GPUs to divide the model over")
		}
		return over, nil
	case planview.NoSearch, planview.Policies:
		return over, nil
	case "":
		free := !s.Recompute.Full && len(s.Recompute.Modules)+len(s.Offload.Modules)+len(s.Stash.Modules) == 0
		if f.job.budget != "" && s.Hardware != nil && free {
			return planview.Policies, nil
		}
		return planview.NoSearch, nil
	}
	return "", usagef("--search %s is unknown; choose policy, layout or none", f.search)
}

func (f *planFlags) budgetFrom(s *plan.Setup) string {
	switch {
	case s.Budget > 0:
		return "--budget"
	case s.Hardware != nil && s.Hardware.Free > 0:
		return "what is left of the " + planview.Size(s.Hardware.Free) + " that doctor found free on " + s.Hardware.Name
	case s.Hardware != nil:
		return "what " + s.Hardware.Name + " leaves of " + planview.Size(s.Hardware.Memory)
	}
	return ""
}

// ranks returns the ranks whose parts are listed.
func (f *planFlags) ranks(r *planview.Report) (out []int, err error) {
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
	if err != nil || n < 0 || n >= len(r.Ranks) || strings.HasPrefix(f.rank, "+") {
		which := fmt.Sprintf("not one of the %d pipeline ranks; write 0 to %d", len(r.Ranks), len(r.Ranks)-1)
		if len(r.Ranks) == 1 {
			which = "not a pipeline rank, because there is only one; write 0"
		}
		return nil, usagef("--rank %s is %s, heaviest, all or none", f.rank, which)
	}
	return []int{n}, nil
}

// commandLine returns what was typed, quoted for a shell.
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
