// This file owns `stowage bench copy`.

package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bench"
	"github.com/stowage-dev/stowage/internal/sysinfo"
	"github.com/stowage-dev/stowage/memory"
)

func newBenchCopy() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "copy",
		Short: "Measure copies in every direction",
		Long: `Measure copies through a device: out (device memory to host memory), in, both at
the same time, inside device memory and inside host memory; then what a launch
and the replay of a graph cost.

GB/s are 10^9 bytes a second. Copies between the two kinds of memory count the
bytes carried, copies inside one kind the bytes read plus the bytes written.

On the CPU every line also shows the best plain copy of the same bytes, and the ratio
is device over plain. Everything that is compared runs in turns of at least a fiftieth
of --time. The order rotates from round to round, and a figure is the first quartile of
at least 7 rounds, because a disturbance makes a turn longer and never shorter.

Inside device memory, "via" says how the copy was issued: stream (a copy), graph (a copy
in a replayed graph), kernel (our copy kernel), kernel graph (the kernel in a replayed
graph). "host CPU" is the processor time of the thread that issues the work, and
"elapsed" the time until it is done, both for one piece.`,
		Example: `  stowage bench copy
  stowage bench copy --size 64KiB,64MiB
  stowage bench copy --device cuda --json`,
		Args: noArgs,
	}
	defaults := bench.Defaults()
	dev := deviceFlag(cmd)
	sizes := cmd.Flags().String("size", "", "`sizes` to copy, separated by commas (default "+
		sizesText(bench.Sizes("cpu"))+", on a GPU "+sizesText(bench.Sizes("cuda"))+")")
	line := cmd.Flags().Duration("time", defaults.Line, "time for each line of the table")
	p := reportFlag(cmd)
	asJSON := jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		o := defaults
		if o.Line = *line; o.Line < time.Millisecond || o.Line > time.Hour {
			return usagef("--time expects a time from 1ms to 1h, got %v", o.Line)
		}
		if o.Sizes = bench.Sizes(dev.backend); cmd.Flags().Changed("size") {
			var err error
			if o.Sizes, err = parseSizes(*sizes); err != nil {
				return usagef("--size: %w", err)
			}
		}
		page := p()
		if err := checkFiles([]flagFile{{"report", page.Path()}}); err != nil {
			return err
		}
		return benchCopy(cmd, dev, o, page, *asJSON)
	}
	return cmd
}

// benchCopy measures and prints line by line.
func benchCopy(cmd *cobra.Command, choice *deviceChoice, o bench.Options, p *bench.Page, asJSON bool) (err error) {
	dev, err := choice.open()
	if err != nil {
		return err
	}
	defer func() { err = cmp.Or(err, dev.Close()) }()
	if err := fits(dev.Info(), o.Sizes, sysinfo.Read().Memory.Usable()); err != nil {
		return err
	}

	result := bench.Result{Device: dev.Info()}
	out := cmd.OutOrStdout()
	text := func(print func()) error {
		if asJSON {
			return nil
		}
		print()
		_, err := out.Write(nil) // a full disk ends the measurement too
		return err
	}
	if err := text(func() { bench.CopyHead(out, result.Device) }); err != nil {
		return err
	}
	m := measure(cmd, "measuring")
	defer m.end()
	directions := bench.Directions()
	for i, size := range o.Sizes {
		err := bench.Copies(dev, o, size, directions, func(c bench.Copy) error {
			// A direction may have several lines. Overheads take about as long as one more size.
			m.at(i*len(directions)+slices.Index(directions, c.Direction)+1, (len(o.Sizes)+1)*len(directions))
			result.Add(c)
			return text(func() { bench.CopyText(out, c) })
		})
		if err != nil {
			return err
		}
	}
	if err := text(func() { bench.SmallText(out, o.Sizes) }); err != nil {
		return err
	}
	if err := text(func() { bench.OverheadHead(out) }); err != nil {
		return err
	}
	err = bench.Overheads(dev, func(v bench.Overhead) error {
		result.Overheads = append(result.Overheads, v)
		return text(func() { bench.OverheadText(out, v) })
	})
	if err == nil && asJSON {
		err = printResult(cmd, result)
	}
	if err != nil {
		return err
	}
	return pageDone(cmd, p, asJSON, p.WriteCopies(result))
}

// fits returns an error if copies would make the machine swap or the kernel kill this
// process. The CPU device's own capacity is that of the whole machine. A room of zero is not
// known.
func fits(d device.Info, sizes []memory.Bytes, room memory.Bytes) error {
	most := slices.Max(sizes)
	need := bench.Footprint(most)
	if d.Backend != "cpu" {
		need /= 2 // the other half is the device's memory
	}
	if room > 0 && need > room {
		return fmt.Errorf("copies of %v need %v of main memory and %v are available; give a smaller --size", most, need, room)
	}
	return nil
}

// sizesText returns sizes as --size reads them.
func sizesText(sizes []memory.Bytes) string {
	var parts []string
	for _, n := range sizes {
		parts = append(parts, n.Exact())
	}
	return strings.Join(parts, ",")
}
