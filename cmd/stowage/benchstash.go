// This file owns `stowage bench stash`: its flags, and what they mean together.
// benchreplay.go owns the flags of a replay.

package main

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stowage-dev/stowage/internal/bench"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/internal/sysinfo"
	"github.com/stowage-dev/stowage/memory"
)

// The defaults of --width and --skew. A replay measures memory, not speed, and has many
// groups, so its rows are short.
const (
	stashWidth  = 14336 // 7168 numbers of bf16
	replayWidth = 1024
	replaySkew  = 1.2
)

func newBenchStash() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "stash",
		Short: "Measure stashing rows into pages and restoring them, or replay routing counts",
		Long: `Measure the cost of stashing the live rows of a group of tensors into pages and of
restoring them, inside a captured graph. The same run also measures the fastest plain
copies of the same bytes (the device's copy or the copy kernel, also in a graph). Live
rows are counted on the device; the buffers hold --max-rows. Before the measurement,
random bytes go through the store and are compared.

GB/s are 10^9 bytes a second, read plus written, of stash and restore together; with
--host-tier they are the bytes carried over the link. The ratio is the time of the plain
copy over the time of the stash: 1 is as fast as a copy. The method is that of
"bench copy".

With --trace or --synth nothing is timed. The rows of routing counts go through pools
that begin empty, and the table shows the memory that the pools grow to beside the least
that any method needs. Routing counts are a file of JSON lines, a header and then the
rows of every step, layer, microbatch and rank:
  {"version":1,"ranks":2,"tokens":10,"top_k":2,"layers":1,"microbatches":1,"experts":8}
  {"step":0,"layer":0,"microbatch":0,"rank":0,"rows":13}
  {"step":0,"layer":0,"microbatch":0,"rank":1,"rows":7}
"experts" is optional. The rows of all ranks add up to tokens times top_k.`,
		Example: `  stowage bench stash
  stowage bench stash --rows 4096 --width 14336 --tensors 3
  stowage bench stash --device cuda --rows 65499 --max-rows 131072 --json
  stowage bench stash --synth zipf --skew 1.2 --pp 2 --vpp 2 --layers 8 --save-trace zipf.jsonl
  stowage bench stash --trace zipf.jsonl --rank 3 --device-pool 8MiB`,
		Args: noArgs,
	}
	f := addStashFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		replay, err := f.replays.wanted()
		if err != nil {
			return err
		}
		o, err := f.options(replay)
		if err != nil {
			return err
		}
		page := f.html()
		if err := checkFiles([]flagFile{{"report", page.Path()}, {"save-trace", f.replays.save}}, flagFile{"trace", f.replays.trace}); err != nil {
			return err
		}
		if !replay {
			return benchStash(cmd, f.dev, o, page, *f.asJSON)
		}
		x, err := f.replays.options(o)
		if err != nil {
			return err
		}
		if err := f.replays.keep(x.Trace); err != nil {
			return err
		}
		if err := benchReplay(cmd, f.dev, x, page, *f.asJSON); err != nil {
			return err
		}
		written(cmd, *f.asJSON, "the routing counts are in", f.replays.save)
		return nil
	}
	return cmd
}

// stashFlags holds the flags of the measurement, some of which a replay shares.
type stashFlags struct {
	cmd     *cobra.Command
	dev     *deviceChoice
	o       bench.StashOptions
	page    string
	replays *replayFlags
	html    func() *bench.Page
	asJSON  *bool
}

func addStashFlags(cmd *cobra.Command) *stashFlags {
	s := &stashFlags{cmd: cmd, dev: deviceFlag(cmd)}
	f := cmd.Flags()
	f.Int64Var((*int64)(&s.o.Rows), "rows", 4096, "mean live `rows` of a group")
	f.Int64Var((*int64)(&s.o.MaxRows), "max-rows", 0, "`rows` that the buffers hold at first (default those of the largest group, or in a replay the most possible)")
	f.Int64Var((*int64)(&s.o.Width), "width", 0, fmt.Sprintf("`bytes` of a row (default %d, in a replay %d)", stashWidth, replayWidth))
	f.Float64Var(&s.o.Skew, "skew", 0, fmt.Sprintf("`exponent` by which rows fall from group to group, or with --synth from expert to expert (default 0, all alike; with --synth %g)", replaySkew))
	f.StringVar(&s.page, "page", stash.DefaultPage.Exact(), "`size` of a page, a power of two from 4KiB to 1GiB")
	f.IntVar(&s.o.Groups, "groups", 4, "`groups` to stash one after the other, and then to restore")
	f.IntVar(&s.o.Tensors, "tensors", 1, "`tensors` of a group")
	f.BoolVar(&s.o.Host, "host-tier", false, "keep the pages in host memory")
	f.BoolVar(&s.o.Bump, "bump", false, "use a stack instead of pages")
	f.DurationVar(&s.o.Line, "time", bench.Defaults().Line, "time for the measurement")
	s.replays = addReplayFlags(cmd)
	s.html = reportFlag(cmd)
	s.asJSON = jsonFlag(cmd)
	cmd.InitDefaultHelpFlag()
	cmd.SetUsageTemplate(strings.Replace(usageTemplate, flagsTemplate, sections(f), 1))
	return s
}

// sections returns the flags as the help shows them, grouped by what they are for.
func sections(f *pflag.FlagSet) string {
	var text strings.Builder
	seen := map[string]bool{}
	section := func(title string, names []string) {
		part := pflag.NewFlagSet(title, pflag.ContinueOnError)
		part.SortFlags = false
		for _, name := range names {
			part.AddFlag(f.Lookup(name))
			seen[name] = true
		}
		fmt.Fprintf(&text, "%s:\n%s\n", title, part.FlagUsages())
	}
	section("Measuring (without --trace and --synth)", plainFlags)
	section("Replaying routing counts (with --trace or --synth)", append([]string{"trace", "synth"}, layFlags...))
	section("Generating routing counts (with --synth)", synthFlags)
	var rest []string
	f.VisitAll(func(x *pflag.Flag) {
		if !seen[x.Name] {
			rest = append(rest, x.Name)
		}
	})
	section("For both", rest)
	return strings.TrimSpace(text.String())
}

// options returns the checked flags, without those that only a replay has.
func (s *stashFlags) options(replay bool) (bench.StashOptions, error) {
	o := s.o
	if !s.cmd.Flags().Changed("width") {
		if o.Width = stashWidth; replay {
			o.Width = replayWidth
		}
	}
	sizes, err := parseSizes(s.page)
	switch {
	case err != nil:
		return o, usagef("--page: %w", err)
	case len(sizes) != 1 || sizes[0] < 4*memory.KiB || sizes[0] > memory.GiB || sizes[0]&(sizes[0]-1) != 0:
		return o, usagef("--page must be one power of two from 4KiB to 1GiB, not %s", s.page)
	case s.cmd.Flags().Changed("max-rows") && o.MaxRows < 1:
		return o, usagef("--max-rows must be at least 1, not %d", o.MaxRows)
	case o.Width < 1 || o.Width > memory.GiB:
		return o, usagef("--width must be between 1 and 1073741824 bytes, not %d", int64(o.Width))
	case o.Tensors < 1 || o.Tensors > 32:
		return o, usagef("--tensors must be between 1 and 32, not %d", o.Tensors)
	}
	o.Page = sizes[0]
	if replay {
		return o, nil
	}
	switch {
	case o.Rows < 1 || o.Rows > 1<<40:
		return o, usagef("--rows must be between 1 and 2^40, not %d", o.Rows)
	case !(o.Skew >= 0 && o.Skew <= 10):
		return o, usagef("--skew must be between 0 and 10, not %s", figures(o.Skew, -1))
	case o.Groups < 1 || o.Groups > 10000:
		return o, usagef("--groups must be between 1 and 10000, not %d", o.Groups)
	case o.Line < time.Millisecond || o.Line > time.Hour:
		return o, usagef("--time expects a time from 1ms to 1h, got %v", o.Line)
	}
	if o.MaxRows = cmp.Or(o.MaxRows, o.Most()); o.MaxRows < o.Most() {
		return o, usagef("--max-rows must hold the largest group, %d rows, not %d", o.Most(), o.MaxRows)
	}
	return o, nil
}

// benchStash measures and prints the result.
func benchStash(cmd *cobra.Command, choice *deviceChoice, o bench.StashOptions, p *bench.Page, asJSON bool) (err error) {
	dev, err := choice.watched(bench.Observe(p.Trace("bench", 0)))
	if err != nil {
		return err
	}
	defer func() { err = cmp.Or(err, dev.Close()) }()
	room := sysinfo.Read().Memory.Usable()
	if dev.Info().Backend != "cpu" {
		room = dev.Info().Capacity[memory.Device] + dev.Info().Capacity[memory.Host]
	}
	if need := o.Footprint(); room > 0 && need > float64(room) {
		return fmt.Errorf("the measurement needs about %.2f GiB of memory and %v are available; give fewer --rows or --groups", need/float64(memory.GiB), room)
	}
	m := measure(cmd, "measuring")
	o.Progress = m.at
	res, err := bench.Stashes(dev, o)
	m.end()
	if err != nil {
		return err
	}
	if !asJSON {
		bench.StashText(cmd.OutOrStdout(), res)
	} else if err := printResult(cmd, res); err != nil {
		return err
	}
	return pageDone(cmd, p, asJSON, p.WriteResult("stash", res))
}
