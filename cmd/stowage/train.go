// This file owns `stowage train`: what its flags mean together, and the two things it
// does. trainflags.go owns the flags, internal/trainrun the work.

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stowage-dev/stowage/cmd/stowage/internal/trainrun"
	"github.com/stowage-dev/stowage/device"
)

const trainLong = `Train a decoder model on ranks of this process: pipeline stages, expert ranks and
replicas, each with a device and a memory of its own.

With no --policy, the same model is trained from the same seed under every memory
policy: none keeps everything; static has buffers for the most rows that experts could
get; stash has pages for the rows they got; offload moves what it can to host memory,
and offload+recompute computes some of it again; budget keeps to half of what none took;
graphs replays captured parts of the step. Where half is not enough for anything, the
budget is larger, and the last line has its share. A table compares peak memory, what the
first steps said that it would be, time and result: parameters must be the same, bit for
bit, or the exit code is 1. Steps of all policies come in turn; a time is the middle of
those over that of none in the same round. --steps is for each policy.

With --policy P one run is trained for real. --budget, --graph, --offload-modules,
--offload-fraction and --recompute-modules change a policy, and name one where --policy is
missing: --budget stands for budget, --graph for graphs, the others for stash. So do --out,
--resume, --config, --save-every, --keep, --hold-out and --eval-every.

--dry-run says what memory would be taken and by whom, under one policy or under all of
them. It trains and writes nothing and needs no GPU: the run's own code is walked on devices
that compute nothing, also for models that are far too large for this machine. How many
rows experts will get and how long things take is not known before, and assumed.

--hold-out keeps the end of the text from training. The loss on up to four batches of it
is found after every --eval-every steps and at the end, and changes nothing else.

The comparison is written to runs/compare, in place of the last one, or with --policy all
to --out: report.html shows all policies side by side, and a folder for each has
metrics.jsonl, summary.json, its trace, and trace.pftrace for https://ui.perfetto.dev.

One run without --out writes nothing but what is printed. With it the folder gets
config.yaml (all options, which --config reads), environment.json (machine and command),
metrics.jsonl (a line a step), summary.json, trace/ (what every rank did), report.html and
trace.pftrace (pictures of that), and checkpoints, of which the last two are kept (--keep).
--trace=false leaves the trace out; report.html then has no memory over time. Pictures
that cannot be written are a warning, and "stowage report" makes them later. A run that was
stopped, or killed at any moment, goes on with --out DIR --resume as if nothing had
happened; its options are those of the folder, and flags change them, but not what numbers
follow from: model, format, batch, seed, learning and --dispatch. Ctrl-C finishes the step,
saves, and leaves with code 130; a second one leaves at once. Other codes are 0 for done, 1
for failed, and 2 for a wrong command line or too small a budget.

A model is a preset, a config.json of Hugging Face (or its folder), or the same keys in
YAML. Text is bytes: a file, a folder, or else a book that is built in. Lists may have
spaces or commas between their words.

Progress goes to standard error: a picture on a terminal, which NO_COLOR leaves without
colours and --plain turns into the plain lines that everybody else gets. --serve :8080
serves it to browsers on this machine, at http://127.0.0.1:8080/, with /metrics for
Prometheus (docs/METRICS.md), until the run is over. --serve 0.0.0.0:8080 lets everybody
in who reaches the machine.`

const trainExample = `  stowage train
  stowage train --model tiny-deepseek --json
  stowage train --dry-run --model mixtral-8x7b --bf16 --pp 4 --ep 2 --seq 4096
  stowage train --policy stash --steps 300 --out run
  stowage train --out run --resume --steps 600
  stowage train --hold-out 0.1 --eval-every 50 --out other
  stowage train --policy offload --offload-modules core_attn attn_proj --data book.txt
  stowage train --policy stash --serve :8080
  stowage train --budget 60MiB --pp 2 --vpp 2 --microbatches 4 --steps 50
  stowage train --graph attn moe_router --pool arena --dp 2 --ep 1 --bf16`

// trainFlags are the command's flags.
type trainFlags struct {
	options trainrun.Options
	config  string
	out     string
	resume  bool
	dryRun  bool
	serve   string
	plain   bool
	trace   bool
	args    []string // as they were typed
	asJSON  *bool
}

func newTrain() *cobra.Command {
	cmd := &cobra.Command{
		Use:                "train [flags]",
		Short:              "Train a small model under each memory policy, or one for real",
		Long:               trainLong,
		Example:            trainExample,
		Args:               cobra.ArbitraryArgs,
		DisableFlagParsing: true, // lists have spaces between their words
	}
	f := &trainFlags{options: trainrun.Defaults()}
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

// parseTrain reads a command line: words behind a list belong to it.
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
	return f.GetBool("help")
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

// run does what the flags ask for.
func (f *trainFlags) run(cmd *cobra.Command) error {
	single, err := f.read(cmd.Flags())
	if err != nil {
		return trainError(err)
	}
	o := &f.options
	if o.Steps == 0 && !cmd.Flags().Changed("steps") {
		o.Steps = trainrun.CompareSteps
		if single {
			o.Steps = trainrun.RunSteps
		}
	}
	if single {
		o.ChoosePolicy()
	}
	var dev deviceChoice
	if err := dev.Set(o.Device); err != nil {
		return usagef("--device cannot be %q; %v", o.Device, err)
	}
	progress, over, err := f.watch(cmd)
	if err != nil {
		return err
	}
	defer over()
	machine := trainrun.Machine{
		ParseSize: parseSize, Command: commandLine(cmd, f.args), Version: thisVersion().String(),
		Open: func(_ int, watch device.Observer) (device.Device, error) { return dev.watched(watch) },
	}
	job, err := trainrun.NewJob(*o, machine, progress.Log())
	if err != nil {
		return trainError(err)
	}
	job.Trace = f.trace
	if f.dryRun {
		return trainError(f.forecast(cmd, job, single))
	}
	ctx, stop := interruptible()
	defer stop()
	if single {
		return trainError(f.single(ctx, cmd, job, progress))
	}
	return trainError(f.compare(ctx, cmd, job, progress))
}

// interruptible is done when the user has the run end; a second signal ends the
// program on the spot, whatever the shell has it do with signals.
func interruptible() (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	signals, over := make(chan os.Signal, 2), make(chan struct{})
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		for range 2 {
			select {
			case <-signals:
				if ctx.Err() != nil {
					os.Exit(exitInterrupted)
				}
				cancel()
			case <-over:
				return
			}
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		close(over)
		cancel()
	}
}

// read puts options together: defaults, then those of the run to resume, then those of
// --config, then flags. It tells whether one run is asked for.
func (f *trainFlags) read(given *pflag.FlagSet) (single bool, err error) {
	for _, name := range []string{
		"policy", "budget", "offload-modules", "offload-fraction", "recompute-modules", "graph", "out", "resume", "config", "save-every", "keep", "hold-out", "eval-every",
	} {
		single = single || given.Changed(name)
	}
	if f.options.Policy == everyPolicy {
		for _, name := range []string{"resume", "config", "save-every", "keep", "hold-out", "eval-every", "budget", "offload-modules", "offload-fraction", "recompute-modules", "graph"} {
			if given.Changed(name) {
				return false, usagef("--%s is for one run, and --policy %s trains under all of them; drop one of the two", name, everyPolicy)
			}
		}
		f.options.Policy = ""
		return false, nil
	}
	if f.resume && f.out == "" {
		return single, usagef("--resume needs --out, the folder of the run")
	}
	if !f.resume && f.config == "" {
		return single, nil
	}
	o := trainrun.Defaults()
	if f.resume {
		if err := trainrun.Resumable(f.out, &o); err != nil {
			return single, err
		}
	}
	if f.config != "" {
		if err := o.Read(f.config); err != nil {
			return single, usagef("--config: %v", err)
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

func (f *trainFlags) single(ctx context.Context, cmd *cobra.Command, job *trainrun.Job, p *trainrun.Progress) error {
	s, err := job.Run(ctx, f.out, f.resume, p)
	switch {
	case err != nil:
		return err
	case *f.asJSON:
		return printJSON(cmd, s)
	}
	s.Text(cmd.OutOrStdout(), f.out)
	return nil
}

// everyPolicy is the policy that is all of them, compared, where --out alone would name
// one.
const everyPolicy = "all"

func (f *trainFlags) compare(ctx context.Context, cmd *cobra.Command, job *trainrun.Job, p *trainrun.Progress) error {
	rows, file, err := job.Compare(ctx, cmp.Or(f.out, trainrun.CompareFolder), p)
	if err != nil {
		return err
	}
	if *f.asJSON {
		if file != "" {
			p.Say("the report is %s", file)
		}
		if err := printJSON(cmd, rows); err != nil {
			return err
		}
	} else {
		job.Table(cmd.OutOrStdout(), rows)
		if file != "" {
			fmt.Fprintf(cmd.OutOrStdout(), "\nthe report is %s\n", file)
		}
	}
	if bad := trainrun.Differ(rows); len(bad) > 0 {
		return fmt.Errorf("parameters under %s differ from those under %s; report it with this command", strings.Join(bad, ", "), rows[0].Policy)
	}
	return nil
}

// forecast says what would be taken, and does nothing.
func (f *trainFlags) forecast(cmd *cobra.Command, job *trainrun.Job, single bool) error {
	if single {
		o, err := job.Forecast()
		switch {
		case err != nil:
			return err
		case *f.asJSON:
			return printJSON(cmd, o)
		}
		job.Text(cmd.OutOrStdout(), o)
		return nil
	}
	rows, err := job.ForecastAll()
	switch {
	case err != nil:
		return err
	case *f.asJSON:
		return printJSON(cmd, rows)
	}
	job.OutlookTable(cmd.OutOrStdout(), rows)
	return nil
}

// trainError tells wrong words from work that failed.
func trainError(err error) error {
	var wrong trainrun.Wrong
	if errors.As(err, &wrong) {
		return usagef("%s", oneLine(err))
	}
	return err
}
