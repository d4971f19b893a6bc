// This file owns the replay of routing counts in `stowage bench stash`: its flags, and
// what they mean together.

package main

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/bench"
	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/internal/sysinfo"
	"github.com/stowage-dev/stowage/plan/routing"
	"github.com/stowage-dev/stowage/train/run"
)

// replayFlags holds the flags that only a replay has.
type replayFlags struct {
	cmd        *cobra.Command
	trace      string
	kind       string
	save       string
	config     routing.Config
	rank       int
	pp, vpp    int
	stage      int
	sets       int
	devicePool string
}

// Flags by what they are for.
var (
	synthFlags = []string{"save-trace", "ranks", "layers", "microbatches", "steps", "tokens", "top-k", "experts", "seed"}
	layFlags   = []string{"rank", "pp", "vpp", "stage", "sets", "device-pool"}
	plainFlags = []string{"rows", "groups", "host-tier", "bump", "time"}
)

func addReplayFlags(cmd *cobra.Command) *replayFlags {
	r := &replayFlags{cmd: cmd}
	f := cmd.Flags()
	f.StringVar(&r.trace, "trace", "", "replay the routing counts in a `file`")
	f.StringVar(&r.kind, "synth", "", "replay generated routing counts of a `kind`: zipf, drift or burst")
	f.StringVar(&r.save, "save-trace", "", "write the routing counts of --synth to a `file`")
	f.IntVar(&r.config.Ranks, "ranks", 4, "expert `ranks`")
	f.IntVar(&r.config.Layers, "layers", 8, "`layers` with experts in the whole model")
	f.IntVar(&r.config.Microbatches, "microbatches", 8, "`microbatches` of a step")
	f.IntVar(&r.config.Steps, "steps", 6, "`steps`")
	f.Int64Var(&r.config.Tokens, "tokens", 2048, "`tokens` of a microbatch on all expert ranks together")
	f.IntVar(&r.config.TopK, "top-k", 4, "`experts` that a token goes to")
	f.IntVar(&r.config.Experts, "experts", 64, "`experts` of a layer")
	f.Uint64Var(&r.config.Seed, "seed", 1, "`number` that decides what is random")
	f.IntVar(&r.rank, "rank", 0, "expert `rank` to replay (default all, one after the other)")
	f.IntVar(&r.pp, "pp", 1, "pipeline `ranks`")
	f.IntVar(&r.vpp, "vpp", 1, "model `chunks` of a pipeline rank")
	f.IntVar(&r.stage, "stage", 0, "pipeline `rank` to replay")
	f.IntVar(&r.sets, "sets", 3, "`sets` of worst-case buffers, which all layers share")
	f.StringVar(&r.devicePool, "device-pool", "", "most device memory for pages: a `size`; further pages are in host memory (default no limit)")
	return r
}

// wanted reports whether this is a replay. It returns an error if flags exclude each
// other.
func (r *replayFlags) wanted() (bool, error) {
	f := r.cmd.Flags()
	given := func(names []string) string {
		i := slices.IndexFunc(names, f.Changed)
		if i < 0 {
			return ""
		}
		return names[i]
	}
	trace, synth := f.Changed("trace"), f.Changed("synth")
	switch {
	case trace && synth:
		return false, usagef("--trace and --synth exclude each other; leave one of them out")
	case trace && f.Changed("skew"):
		return false, usagef("--skew is for --synth; leave it out with --trace")
	case trace && given(synthFlags) != "":
		return false, usagef("--%s is for --synth; leave it out with --trace", given(synthFlags))
	case !trace && !synth && given(synthFlags) != "":
		return false, usagef("--%s needs --synth zipf, drift or burst", given(synthFlags))
	case !trace && !synth && given(layFlags) != "":
		return false, usagef("--%s needs --trace or --synth", given(layFlags))
	case (trace || synth) && given(plainFlags) != "":
		return false, usagef("--%s has no meaning with --trace or --synth; leave it out", given(plainFlags))
	}
	return trace || synth, nil
}

// load reads the routing counts, or generates them.
func (r *replayFlags) load() (t *routing.Counts, err error) {
	if !r.cmd.Flags().Changed("synth") {
		in, err := input.Open(r.trace, mostCounts)
		if err != nil {
			return nil, usagef("--trace %s: the file cannot be read: %w", r.trace, input.Cause(err))
		}
		defer func() { _ = in.Close() }()
		if info, err := os.Stat(r.trace); err == nil && info.IsDir() {
			return nil, usagef("--trace %s is a folder; give a file of routing counts", r.trace)
		}
		if t, err = routing.Read(in); err != nil {
			return nil, usagef("--trace %s: %w", r.trace, input.Plain(err))
		}
		return t, nil
	}
	if r.config.Kind, err = routing.ParseKind(r.kind); err != nil {
		return nil, usagef("--synth cannot be %q; %w", r.kind, err)
	}
	if err := r.config.Check(); err != nil {
		name, problem, _ := strings.Cut(err.Error(), " ") // which begins with the key of a file
		if f := r.cmd.Flags().Lookup(strings.ReplaceAll(name, "_", "-")); f != nil {
			return nil, usagef("--%s %s", f.Name, problem)
		}
		return nil, usagef("--synth: %w", err)
	}
	return routing.Generate(r.config)
}

// keep writes the routing counts that were generated, if --save-trace asks for it.
func (r *replayFlags) keep(t *routing.Counts) error {
	if r.save == "" {
		return nil
	}
	return saveFile(flagFile{"save-trace", r.save}, func(w io.Writer) error { return routing.Write(w, t) })
}

// options puts everything together. The flags that a replay shares with the
// plain measurement are in o, and have been checked.
func (r *replayFlags) options(o bench.StashOptions) (bench.ReplayOptions, error) {
	x := bench.ReplayOptions{
		Stage: r.stage, Tensors: o.Tensors, Width: o.Width, Page: o.Page, Sets: r.sets, MaxRows: o.MaxRows,
	}
	if r.config.Skew = replaySkew; r.cmd.Flags().Changed("skew") {
		r.config.Skew = o.Skew
	}
	for _, n := range []struct {
		flag  string
		value int
	}{{"pp", r.pp}, {"vpp", r.vpp}} {
		if n.value < 1 || n.value > 1024 {
			return x, usagef("--%s must be between 1 and 1024, not %d", n.flag, n.value)
		}
	}
	if r.sets < 1 || r.sets > 64 {
		return x, usagef("--sets must be between 1 and 64, not %d", r.sets)
	}
	if r.devicePool != "" {
		sizes, err := parseSizes(r.devicePool)
		if err != nil {
			return x, usagef("--device-pool: %w", err)
		}
		if x.Pool = sizes[0]; len(sizes) > 1 || x.Pool < x.Page {
			return x, usagef("--device-pool must be one size of at least a page, not %s", r.devicePool)
		}
	}
	t, err := r.load()
	if err != nil {
		return x, err
	}
	x.Trace = t
	switch most := stash.Rows(t.Worst()); {
	case !r.cmd.Flags().Changed("max-rows"):
		x.MaxRows = most
	case x.MaxRows > most:
		return x, usagef("--max-rows %d is more than the %d rows that a rank can get; give fewer, or leave the flag out", x.MaxRows, most)
	}
	x.Pipeline = schedule.Pipeline{Ranks: r.pp, Chunks: r.vpp, Microbatches: t.Microbatches}
	for rank := range t.Ranks {
		x.Ranks = append(x.Ranks, rank)
	}
	if r.cmd.Flags().Changed("rank") {
		x.Ranks = []int{r.rank}
	}
	if err := x.Check(); err != nil {
		return x, &run.InputError{Err: err}
	}
	return x, nil
}

// benchReplay replays the routing counts and prints rank by rank.
func benchReplay(cmd *cobra.Command, choice *deviceChoice, o bench.ReplayOptions, p *bench.Page, asJSON bool) (err error) {
	dev, err := choice.watched(bench.Observe(p.Trace("replay", 0)))
	if err != nil {
		return err
	}
	defer func() { err = cmp.Or(err, dev.Close()) }()
	if room := sysinfo.Read().Memory.Usable(); dev.Info().Backend == "cpu" && room > 0 && o.Footprint() > room {
		return fmt.Errorf("the replay needs %v of memory or more and %v are available; give a smaller --width, fewer --sets, or routing counts of fewer tokens (--tokens)", o.Footprint(), room)
	}
	out := cmd.OutOrStdout()
	m := measure(cmd, "replaying")
	defer m.end()
	res, err := bench.Replays(dev, o, func(res *bench.Replay, r bench.ReplayRank) error {
		m.at(len(res.Ranks), len(o.Ranks))
		if asJSON {
			return nil
		}
		if len(res.Ranks) == 1 {
			bench.ReplayHead(out, res)
		}
		bench.ReplayText(out, r)
		_, err := out.Write(nil) // a full disk ends the replay too
		return err
	})
	if err != nil {
		return err
	}
	if asJSON {
		err = printResult(cmd, res)
	} else {
		bench.ReplayFoot(out, &res)
	}
	if err == nil {
		err = pageDone(cmd, p, asJSON, p.WriteResult("replay", res))
	}
	return cmp.Or(err, res.Total.Fault())
}
