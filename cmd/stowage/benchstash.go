// This file owns `stowage bench stash`.

package main

import (
	"cmp"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/cmd/stowage/internal/bench"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/stash"
)

func newBenchStash() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "stash",
		Short: "Measure stashing rows into pages and restoring them",
		Long: `Measure what it costs to stash the live rows of a group of tensors into pages and
to restore them, inside a captured graph, with the fastest plain copies of the same
bytes (the device's copy or the copy kernel, also in a graph) beside it in the
same run. Live rows are counted on the device; the buffers hold
--max-rows.

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
	dev := deviceFlag(cmd)
	rows := cmd.Flags().Int64("rows", 4096, "live `rows` of a group")
	most := cmd.Flags().Int64("max-rows", 0, "`rows` that the buffers hold (default --rows; in a replay, what they begin with, default the worst case)")
	width := cmd.Flags().Int64("width", 14336, "`bytes` of a row (in a replay, default 1024)")
	page := cmd.Flags().String("page", formatSize(stash.DefaultPage), "`size` of a page, a power of two of at least 4KiB")
	groups := cmd.Flags().Int("groups", 4, "`groups` stashed one after the other, then restored")
	tensors := cmd.Flags().Int("tensors", 1, "`tensors` of a group")
	host := cmd.Flags().Bool("host-tier", false, "keep the pages in host memory")
	bump := cmd.Flags().Bool("bump", false, "use a stack instead of pages")
	line := cmd.Flags().Duration("time", bench.Defaults().Line, "time for the measurement")
	replays := addReplayFlags(cmd)
	asJSON := jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		o := bench.StashOptions{
			Rows: stash.Rows(*rows), MaxRows: stash.Rows(*most), Width: device.Bytes(*width),
			Groups: *groups, Tensors: *tensors, Host: *host, Bump: *bump, Line: *line,
		}
		replay, err := replays.wanted()
		if err != nil {
			return err
		}
		if cmd.Flags().Changed("skew") && !replay {
			o.Skew = replays.config.Skew
		}
		sizes, err := parseSizes(*page)
		switch {
		case err != nil:
			return usagef("--page: %v", err)
		case len(sizes) != 1 || sizes[0] < 4*device.KiB || sizes[0]&(sizes[0]-1) != 0:
			return usagef("--page must be one power of two of at least 4KiB, not %s", *page)
		case cmd.Flags().Changed("max-rows") && o.MaxRows < 1:
			return usagef("--max-rows must be at least 1, not %d", o.MaxRows)
		case !replay && (o.Rows < 1 || o.Rows > 1<<40):
			return usagef("--rows must be between 1 and 2^40, not %d", o.Rows)
		case !(o.Skew >= 0 && o.Skew <= 10):
			return usagef("--skew must be between 0 and 10, not %g", o.Skew)
		case o.Width < 1 || o.Width > device.GiB:
			return usagef("--width must be between 1 and 1073741824 bytes, not %d", *width)
		case o.Groups < 1 || o.Groups > 10000:
			return usagef("--groups must be between 1 and 10000, not %d", *groups)
		case o.Tensors < 1 || o.Tensors > 32:
			return usagef("--tensors must be between 1 and 32, not %d", *tensors)
		case o.Line < time.Millisecond || o.Line > time.Hour:
			return usagef("--time must be between 1ms and 1h, not %v", o.Line)
		}
		o.Page = sizes[0]
		o.MaxRows = cmp.Or(o.MaxRows, o.Most())
		if !replay && o.MaxRows < o.Most() {
			return usagef("--max-rows must hold the largest group, %d rows, not %d", o.Most(), o.MaxRows)
		}
		if replay {
			x, err := replays.options(o)
			if err != nil {
				return err
			}
			return benchReplay(cmd, dev, x, *asJSON)
		}
		return benchStash(cmd, dev, o, *asJSON)
	}
	return cmd
}

func benchStash(cmd *cobra.Command, choice *deviceChoice, o bench.StashOptions, asJSON bool) (err error) {
	dev, err := choice.open()
	if err != nil {
		return err
	}
	defer func() { err = cmp.Or(err, dev.Close()) }()
	res, err := bench.Stashes(dev, o)
	if err != nil {
		return err
	}
	if asJSON {
		return printJSON(cmd, res)
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), `%s: %d groups of %d tensors, %d of %d rows of %d bytes live: %v a group
store        %s of %v in %s memory, %v
stash+restore %9.1f µs a group  %8.1f GB/s
plain copies  %9.1f µs a group  %8.1f GB/s
ratio         %9.3f
`, res.Device.Name, res.Groups, res.Tensors, res.Rows, res.MaxRows, res.Width, res.Bytes,
		res.Store, res.Page, res.Tier, res.PoolBytes, res.PairUS, res.GBps, res.CopyUS, res.CopyGBps, res.Ratio)
	return err
}
