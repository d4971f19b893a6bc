// This file owns `stowage train`: what its flags mean together. trainflags.go owns the
// flags, and package train/run the work.

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stowage-dev/stowage/internal/gemm"
	"github.com/stowage-dev/stowage/train/run"
)

const trainLong = `Train a decoder model on ranks: pipeline stages, expert ranks and replicas, each with a
device and a memory of its own. All ranks are in this process, unless mpirun, srun or torchrun
starts one process for each (docs/CLUSTER.md).

Without --policy the command compares the memory policies. It trains the same model from
the same seed under each of them:
  none               keeps everything
  static             has buffers for the most rows that experts could get
  stash              has pages for the rows that experts got
  offload            copies what it can to host memory
  offload+recompute  also recomputes some of it
  budget             keeps to half of what none took, or to more if half is not enough
  graphs             replays captured parts of the step
A table compares peak memory, the forecast of the first steps, step time and result.
The parameters must be the same, bit for bit, or the exit code is 1. Steps of all policies
alternate; a step time is the median over that of none in the same round. --steps counts
for each policy. The comparison is written to runs/compare, in place of the last one when
it is complete, or with --policy all to --out: report.html shows all policies side by side, and each policy
has a folder with metrics.jsonl, summary.json, its trace, and trace.pftrace for
https://ui.perfetto.dev.

With --policy P the command trains one run. --budget, --graph, --offload-modules,
--offload-fraction, --recompute-modules and --stash-modules change a policy. They also
choose one if --policy is missing: --budget chooses budget, --graph chooses graphs, the others choose
stash. So do --out, --resume, --config, --save-every, --keep, --hold-out, --eval-every and --profile.

--profile times each launch of the last three steps and prints, for each kernel, its time in a
step, its share, its launches, its operations and bytes a second, and how much of its time the
device needs at the rates of a dense product and of a copy, which are measured first. Then come
the model's operations a second and their share of the dense product's (MFU). Timing slows
these steps down; the time of the steps before them stands beside it. Operations are those
that the model needs: what a kernel computes twice is not counted. With --out the profile is
also in summary.json and in the report.

--dry-run shows the memory that a run would take, by rank and owner, under one policy or
under all of them. It trains and writes nothing and needs no GPU: the trainer's own code
runs on devices that compute nothing, so the model may be far too large for this machine.
There may be thousands of ranks: one of each pipeline stage is run, and stands for the rest.
It assumes how many rows experts get and how long work takes.

--hold-out keeps the end of the text from training. The loss on up to four batches of it
is computed after every --eval-every steps and at the end, and changes nothing else.

A run without --out writes no files. With --out the folder gets config.yaml (all options,
which --config reads), environment.json (machine and command), metrics.jsonl (a line for
each step), summary.json, trace/ (what every rank did), report.html and trace.pftrace, and
checkpoints, of which the last two are kept (--keep). --trace=false leaves the trace out;
report.html then lacks memory over time. A report that cannot be written is a warning;
"stowage report" makes it later.

A run that was stopped or killed continues with --out DIR --resume as if nothing had
happened. Its options are those of the folder. Flags change them, except those that the
result depends on: model, format, text, --hold-out, --seq, seed, learning and --dispatch. The
run may go on with other ranks (--pp, --vpp, --ep, --dp) and with sharded or whole parameters
(--pool), if --dp x --microbatches x --micro stays the same: each step then has the same
sequences, and results differ by the order of sums alone.

Ctrl-C finishes the step, saves, and exits with code 130; a second one exits at once. So
does SIGTERM, with 128 and its number. So do SIGHUP from a connection that dropped, SIGPIPE
if nobody reads the output, SIGQUIT, SIGUSR1, SIGUSR2, SIGXCPU and SIGALRM; of these a second one
changes nothing. The other exit codes are 0 for success, 1 for failure, and 2 for a wrong
command line or too small a budget.

A model is a preset, a config.json of Hugging Face (or its folder), or the same keys in
YAML. Text is read as bytes from a file or a folder; a book is built in. Words of a list
are separated by spaces or commas.

Progress goes to standard error: a picture on a terminal, and else plain lines, which
--plain asks for on a terminal too. NO_COLOR turns colours off. --serve :8080 shows the run
to browsers on this machine at http://127.0.0.1:8080/, with /metrics for Prometheus
(docs/METRICS.md), until the run is over. --serve 0.0.0.0:8080 shows it to everybody who
reaches the machine.`

const trainExample = `  stowage train
  stowage train --model tiny-deepseek --json
  stowage train --dry-run --model mixtral-8x7b --bf16 --pp 4 --ep 2 --seq 4096
  stowage train --policy stash --steps 300 --out run
  stowage train --out run --resume --steps 600
  stowage train --hold-out 0.1 --eval-every 50 --out other
  stowage train --policy offload --offload-modules core_attn attn_proj --data book.txt
  stowage train --policy stash --serve :8080
  stowage train --policy none --bf16 --device cuda --pp 1 --ep 1 --dp 1 --profile
  stowage train --budget 60MiB --pp 2 --vpp 2 --microbatches 4 --steps 50
  stowage train --graph attn moe_router --pool arena --dp 2 --ep 1 --bf16`

// The steps that are trained, and the folder of a comparison, if the flags are not given.
const (
	runSteps      = 100
	compareSteps  = 7 // of each policy
	profileSteps  = 12
	compareFolder = "runs/compare"
)

// trainFlags holds the command's flags.
type trainFlags struct {
	options run.Options
	config  string
	out     string
	resume  bool
	dryRun  bool
	serve   string
	plain   bool
	profile bool
	args    []string // as typed
	asJSON  *bool
	over    func() // ends what shows the run
}

func newTrain() *cobra.Command {
	cmd := &cobra.Command{
		Use:                "train [flags]",
		Short:              "Compare memory policies on a small model, or train a run",
		Long:               trainLong,
		Example:            trainExample,
		Args:               cobra.ArbitraryArgs,
		DisableFlagParsing: true, // lists have spaces between their words
	}
	f := &trainFlags{options: run.DefaultOptions()}
	f.add(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		help, err := parseTrain(cmd, args)
		switch {
		case err != nil:
			return err
		case help:
			return cmd.Help()
		}
		f.args = args
		return f.run(cmd)
	}
	return cmd
}

// parseTrain parses a command line. Words that follow a list flag belong to the list.
func parseTrain(cmd *cobra.Command, args []string) (help bool, err error) {
	cmd.InitDefaultHelpFlag()
	f := cmd.Flags()
	if err := f.Parse(joinLists(f, args)); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return true, nil
		}
		return false, flagError(cmd, err)
	}
	if err := noArgs(cmd, f.Args()); err != nil {
		return false, err
	}
	for _, x := range []struct{ flag, one string }{{"--config", "the options of one file alone would count"}, {"--data", "one text alone would count"}} {
		given := 0
		for _, arg := range args {
			if name, _, _ := strings.Cut(arg, "="); name == x.flag {
				given++
			}
		}
		if given > 1 {
			return false, usagef("%s is given twice, and %s; leave one of them out", x.flag, x.one)
		}
	}
	if help, err = f.GetBool("help"); err != nil || help {
		return help, err
	}
	return false, checkTrain(f)
}

// joinLists puts commas between the words of a list.
func joinLists(f *pflag.FlagSet, args []string) (out []string) {
	for i := 0; i < len(args); i++ {
		name, long := strings.CutPrefix(args[i], "--")
		out = append(out, args[i])
		if x := f.Lookup(name); !long || x == nil || x.Value.Type() != listType {
			continue
		}
		var words []string
		for i+1 < len(args) && !isFlag(args[i+1]) {
			i++
			words = append(words, args[i])
		}
		if len(words) > 0 {
			out = append(out, strings.Join(words, ","))
		}
	}
	return out
}

// run trains, compares or forecasts, as the flags ask, alone or with the other processes
// that a launcher started.
func (f *trainFlags) run(cmd *cobra.Command) error {
	place, err := findPlace()
	if err != nil {
		return err
	}
	if place != nil && f.dryRun { // which needs no other processes
		if place.Rank > 0 {
			return nil
		}
		place = nil
	}
	var c *cluster
	if place != nil {
		if c, err = join(cmd, place); err != nil {
			return err
		}
	}
	return c.leave(f.runWith(cmd, c))
}

// runWith is run after this process has joined the others.
func (f *trainFlags) runWith(cmd *cobra.Command, c *cluster) error {
	stopper := newStopper(f.serve != "")
	progress, job, single, err := f.prepare(cmd, c, stopper)
	if err = c.agree(err); err != nil {
		return err
	}
	defer f.over()
	if f.dryRun {
		return f.forecast(cmd, job, single)
	}
	stopper.catch()
	defer stopper.stop()
	if single {
		err = f.single(stopper.ctx, cmd, c, job, progress)
	} else {
		err = f.compare(stopper.ctx, cmd, c, job, progress)
	}
	c.signal(stopper, err)
	return stopper.because(err)
}

// prepare reads the options and makes the job and what shows it. f.over ends the latter.
func (f *trainFlags) prepare(cmd *cobra.Command, c *cluster, stopper *stopper) (progress *run.Progress, job *run.Job, single bool, err error) {
	f.over = func() {}
	if f.out == "-" {
		return nil, nil, single, usagef("--out - is not standard output; give a folder, or ./- for one of that name")
	}
	if f.out != "" {
		f.out = filepath.Clean(f.out) // so that all files and messages agree on b/../c
	}
	if err := gemm.Check(); err != nil {
		return nil, nil, single, usagef("%w", err)
	}
	if single, err = f.read(cmd.Flags()); err != nil {
		return nil, nil, single, err
	}
	o := &f.options
	if err := checkIdle(cmd.Flags(), o, f.resume, single && !f.dryRun); err != nil {
		return nil, nil, single, err
	}
	if o.Steps == 0 && !cmd.Flags().Changed("steps") {
		o.Steps = compareSteps
		if single {
			o.Steps = runSteps
		}
		if f.profile {
			o.Steps = profileSteps
		}
	}
	if single {
		o.ChoosePolicy()
	}
	if err := f.checkProfile(c != nil); err != nil {
		return nil, nil, single, err
	}
	var dev deviceChoice
	if err := dev.Set(o.Device); err != nil {
		return nil, nil, single, usagef("--device cannot be %q; %w", o.Device, err)
	}
	if err := c.choose(&dev); err != nil {
		return nil, nil, single, err
	}
	announce := func() {}
	if progress = run.NewProgress(io.Discard, nil, nil); c.speaks() {
		if progress, announce, f.over, err = f.watch(cmd, stopper); err != nil {
			return nil, nil, single, err
		}
	}
	profiler, open := f.profiler(dev)
	machine := run.Machine{Command: commandLine(cmd, f.args), Version: thisVersion().String(), DryRun: f.dryRun, Open: open}
	if c != nil {
		machine.Process, machine.Offset, machine.Within, machine.Run = c.process, c.offset, c.within, c.run
	}
	if job, err = run.NewJob(*o, machine, progress.Log()); err == nil {
		err = c.fits(&job.Options)
	}
	if err != nil {
		f.over()
		return nil, nil, single, err
	}
	announce()
	job.NoTrace, job.Profile = !o.Trace, profiler
	return progress, job, single, nil
}

// read combines the options: defaults, then those of the run to resume, then those of
// --config, then flags. It reports whether the flags ask for a single run.
func (f *trainFlags) read(given *pflag.FlagSet) (single bool, err error) {
	for _, name := range []string{
		"policy", "budget", "offload-modules", "offload-fraction", "recompute-modules", "stash-modules", "graph", "out", "resume", "config", "save-every", "keep", "hold-out", "eval-every", "profile",
	} {
		single = single || given.Changed(name)
	}
	if f.options.Policy == everyPolicy {
		for _, name := range []string{"resume", "config", "save-every", "keep", "hold-out", "eval-every", "budget", "offload-modules", "offload-fraction", "recompute-modules", "stash-modules", "graph", "profile"} {
			if given.Changed(name) {
				return false, usagef("--%s is for a single run, and --policy %s trains under all policies; leave one of them out", name, everyPolicy)
			}
		}
		f.options.Policy = ""
		return false, nil
	}
	if f.resume && f.out == "" {
		return single, usagef("--resume needs the folder of the run; give it with --out")
	}
	if !f.resume && f.config == "" {
		return single, nil
	}
	o := run.DefaultOptions()
	if f.resume {
		if o, err = run.ResumeOptions(f.out); err != nil {
			return single, err
		}
	}
	if f.config != "" {
		if err := o.ReadFile(f.config); err != nil {
			return single, usagef("--config: %w", err)
		}
	}
	over := pflag.NewFlagSet("train", pflag.ContinueOnError)
	addTrainOptions(over, &o)
	given.Visit(func(x *pflag.Flag) {
		if over.Lookup(x.Name) != nil && err == nil {
			err = over.Set(x.Name, x.Value.String())
		}
	})
	f.options = o
	return single, err
}

// single trains one run.
func (f *trainFlags) single(ctx context.Context, cmd *cobra.Command, c *cluster, job *run.Job, p *run.Progress) error {
	s, err := job.Run(ctx, f.out, f.resume, p)
	switch {
	case err != nil || !c.speaks():
		return err
	case *f.asJSON:
		for _, n := range s.Notes {
			p.Say("note: %s", describe(cmd, n))
		}
		return printJSON(cmd, s)
	}
	s.WriteText(cmd.OutOrStdout())
	printNotes(cmd, s.Notes)
	return nil
}

// printNotes prints remarks on flags without effect.
func printNotes(cmd *cobra.Command, notes []error) {
	for _, n := range notes {
		fmt.Fprintf(cmd.OutOrStdout(), "note: %s\n", describe(cmd, n))
	}
}

// everyPolicy is the --policy that compares all of them. --out alone would mean one run.
const everyPolicy = "all"

// compare trains under every policy.
func (f *trainFlags) compare(ctx context.Context, cmd *cobra.Command, with *cluster, job *run.Job, p *run.Progress) error {
	c, err := job.Compare(ctx, cmp.Or(f.out, compareFolder), f.out != "", p)
	if c == nil || !with.speaks() {
		return err
	}
	if !*f.asJSON {
		c.WriteText(cmd.OutOrStdout())
	} else {
		if c.Report != "" {
			p.Say("the report is %s", c.Report)
		}
		if err := printJSON(cmd, c.Rows); err != nil {
			return err
		}
	}
	if bad := c.Different(); len(bad) > 0 {
		return fmt.Errorf("parameters under %s differ from those under %s, which is a bug; report it with this command", strings.Join(bad, ", "), c.Rows[0].Policy)
	}
	return err
}

// forecast prints the memory that a run or a comparison would take.
func (f *trainFlags) forecast(cmd *cobra.Command, job *run.Job, single bool) error {
	m := measure(cmd, "forecasting")
	defer m.end()
	job.OnForecast = m.at
	if single {
		o, err := job.Forecast()
		switch {
		case err != nil:
			return err
		case *f.asJSON:
			return printJSON(cmd, o)
		}
		o.WriteText(cmd.OutOrStdout())
		printNotes(cmd, o.Notes)
		return nil
	}
	all, err := job.ForecastAll()
	switch {
	case err != nil:
		return err
	case *f.asJSON:
		return printJSON(cmd, all.Rows)
	}
	all.WriteText(cmd.OutOrStdout())
	return nil
}
