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

	"github.com/stowage-dev/stowage/cmd/stowage/internal/bench"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/sysinfo"
	"github.com/stowage-dev/stowage/stash"
)

// What --width and --skew are where they are not given. A replay is about memory,
// not about speed, and goes through many groups; so its rows are short.
const (
	stashWidth  = 14336 // 7168 numbers of bf16
	replayWidth = 1024
	replaySkew  = 1.2
)

func newBenchStash() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "stash",
		Short: "Measure stashing rows into pages and restoring them, or replay a routing trace",
		Long: `Measure what it costs to stash the live rows of a group of tensors into pages and
to restore them, inside a captured graph, with the fastest plain copies of the same
bytes (the device's copy or the copy kernel, also in a graph) beside it in the
same run. Live rows are counted on the device; the buffers hold --max-rows.
Before anything is timed, random bytes go through the store and are compared.

GB/s are 10^9 bytes a second, read plus written, of stash and restore together;
with --host-tier, bytes carried over the link. The ratio is plain copy time over
stash time: 1 is as fast as a copy. The method is that of "bench copy".

With --trace or --synth nothing is timed: the rows of a routing trace go through
pools that begin empty, and the table shows the memory they grow to beside the
least that any method needs. A trace is a file of JSON lines, a header and then
the rows of every step, layer, microbatch and rank:
  {"version":1,"ranks":2,"tokens":10,"top_k":2,"layers":1,"microbatches":1,"experts":8}
  {"step":0,"layer":0,"microbatch":0,"rank":0,"rows":13}
  {"step":0,"layer":0,"microbatch":0,"rank":1,"rows":7}
"experts" may be left out. The rows of all ranks add up to tokens times top_k.`,
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
		if !replay {
			return benchStash(cmd, f.dev, o, f.html, *f.asJSON)
		}
		x, err := f.replays.options(o)
		if err != nil {
			return err
		}
		return benchReplay(cmd, f.dev, x, f.html, *f.asJSON)
	}
	return cmd
}

// stashFlags are the flags of the measurement, some of which a replay shares.
type stashFlags struct {
	cmd     *cobra.Command
	dev     *deviceChoice
	o       bench.StashOptions
	page    string
	replays *replayFlags
	html    *benchPage
	asJSON  *bool
}

func addStashFlags(cmd *cobra.Command) *stashFlags {
	s := &stashFlags{cmd: cmd, dev: deviceFlag(cmd)}
	f := cmd.Flags()
	f.Int64Var((*int64)(&s.o.Rows), "rows", 4096, "live `rows` of a group, on average")
	f.Int64Var((*int64)(&s.o.MaxRows), "max-rows", 0, "`rows` that the buffers hold at first (default as many as the largest group has, in a replay as many as there can be)")
	f.Int64Var((*int64)(&s.o.Width), "width", 0, fmt.Sprintf("`bytes` of a row (default %d, in a replay %d)", stashWidth, replayWidth))
	f.Float64Var(&s.o.Skew, "skew", 0, fmt.Sprintf("`exponent` with which rows fall from group to group, or with --synth popularity from expert to expert (default 0, all alike; with --synth %g)", replaySkew))
	f.StringVar(&s.page, "page", formatSize(stash.DefaultPage), "`size` of a page, a power of two from 4KiB to 1GiB")
	f.IntVar(&s.o.Groups, "groups", 4, "`groups` stashed one after the other, then restored")
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

// sections are the flags as the help shows them, by what they are for.
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
	section("Replaying a routing trace (with --trace or --synth)", append([]string{"trace", "synth"}, layFlags...))
	section("Making a trace up (with --synth)", synthFlags)
	var rest []string
	f.VisitAll(func(x *pflag.Flag) {
		if !seen[x.Name] {
			rest = append(rest, x.Name)
		}
	})
	section("For both", rest)
	return strings.TrimSpace(text.String())
}

// options are what the flags say, checked; those of a replay alone are not in it.
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
		return o, usagef("--page: %v", err)
	case len(sizes) != 1 || sizes[0] < 4*device.KiB || sizes[0] > device.GiB || sizes[0]&(sizes[0]-1) != 0:
		return o, usagef("--page must be one power of two from 4KiB to 1GiB, not %s", s.page)
	case s.cmd.Flags().Changed("max-rows") && o.MaxRows < 1:
		return o, usagef("--max-rows must be at least 1, not %d", o.MaxRows)
	case o.Width < 1 || o.Width > device.GiB:
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
		return o, usagef("--skew must be between 0 and 10, not %g", o.Skew)
	case o.Groups < 1 || o.Groups > 10000:
		return o, usagef("--groups must be between 1 and 10000, not %d", o.Groups)
	case o.Line < time.Millisecond || o.Line > time.Hour:
		return o, usagef("--time must be between 1ms and 1h, not %v", o.Line)
	}
	if o.MaxRows = cmp.Or(o.MaxRows, o.Most()); o.MaxRows < o.Most() {
		return o, usagef("--max-rows must hold the largest group, %d rows, not %d", o.Most(), o.MaxRows)
	}
	return o, nil
}

func benchStash(cmd *cobra.Command, choice *deviceChoice, o bench.StashOptions, p *benchPage, asJSON bool) (err error) {
	dev, err := choice.watched(observer(p.trace("bench", 0)))
	if err != nil {
		return err
	}
	defer func() { err = cmp.Or(err, dev.Close()) }()
	room := sysinfo.Read().Memory.Usable()
	if dev.Info().Backend != "cpu" {
		room = dev.Info().Capacity[device.Accel] + dev.Info().Capacity[device.Host]
	}
	if need := o.Footprint(); room > 0 && need > float64(room) {
		return fmt.Errorf("the measurement needs about %.4g GiB of memory and %v are available; give fewer --rows or --groups", need/float64(device.GiB), room)
	}
	res, err := bench.Stashes(dev, o)
	if err != nil {
		return err
	}
	if !asJSON {
		bench.StashText(cmd.OutOrStdout(), res)
	} else if err := printJSON(cmd, res); err != nil {
		return err
	}
	return p.one("stash", res)
}
