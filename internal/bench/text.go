// This file owns the tables for people. Lines are printed as they are measured, so the
// columns have fixed widths.

package bench

import (
	"fmt"
	"io"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Result is everything that one run measured.
type Result struct {
	Device    device.Info `json:"device"`
	Copies    []Copy      `json:"copies"`
	Overheads []Overhead  `json:"overheads"`
	// Ratio is the least of the copies' ratios. It is zero if no copy has one.
	Ratio float64 `json:"ratio"`
}

// Add appends a line and keeps the least ratio.
func (r *Result) Add(c Copy) {
	r.Copies = append(r.Copies, c)
	if c.Ratio > 0 && (r.Ratio == 0 || c.Ratio < r.Ratio) {
		r.Ratio = c.Ratio
	}
}

// CopyHead prints the head of the table of copies.
func CopyHead(w io.Writer, d device.Info) {
	fmt.Fprintf(w, "%s:%d  %s\n\n", d.Backend, d.Ordinal, describe(d))
	fmt.Fprintf(w, "%-9s  %-12s  %10s  %11s", "direction", "via", "size", "GB/s")
	if d.Backend == "cpu" {
		fmt.Fprintf(w, "  %10s  %6s  %s", "plain GB/s", "ratio", "best plain copy")
	}
	fmt.Fprintln(w)
}

func describe(d device.Info) string {
	if d.Backend == "cpu" {
		return fmt.Sprintf("the CPU as a device, %d threads", d.Units)
	}
	return fmt.Sprintf("%s, compute capability %s, driver %s", d.Name, d.Capability, d.Driver)
}

// CopyText prints one line of the table of copies.
func CopyText(w io.Writer, c Copy) {
	fmt.Fprintf(w, "%-9s  %-12s  %10s  %11.2f", c.Direction, c.Via, c.Size, c.GBps)
	if c.Plain != "" {
		fmt.Fprintf(w, "  %10.2f  %6.3f  %s", c.PlainGBps, c.Ratio, c.Plain)
	}
	fmt.Fprintln(w)
}

// SmallCopy is the size from which copies show a speed: 64 KiB take 3 µs at 20 GB/s, and
// issuing them takes a tenth of that.
const SmallCopy = 64 * memory.KiB

// SmallText warns of figures that do not show a speed, if copies of some size have them.
func SmallText(w io.Writer, sizes []memory.Bytes) {
	if slices.Min(sizes) >= SmallCopy {
		return
	}
	fmt.Fprintf(w, "\nCopies below %v measure the cost of issuing more than the speed of copying, and so do their ratios.\n", SmallCopy)
}

// StashText prints the measurement of the stash.
func StashText(w io.Writer, s Stash) {
	fmt.Fprintf(w, "%s:%d  %s\n\n", s.Device.Backend, s.Device.Ordinal, describe(s.Device))
	fmt.Fprintf(w, "groups %d, tensors of a group %d, live rows %d of %d, bytes of a row %d; %v a group\n",
		s.Groups, s.Tensors, s.Rows, s.MaxRows, int64(s.Width), s.Bytes)
	fmt.Fprintf(w, "store: %s, page %v, %s memory, %v in all\n\n", s.Store, s.Page, s.Tier, s.PoolBytes)
	fmt.Fprintf(w, "%-13s  %10s  %10s\n", "a group", "µs", "GB/s")
	fmt.Fprintf(w, "%-13s  %10.1f  %10.2f\n", "stash+restore", s.PairUS, s.GBps)
	fmt.Fprintf(w, "%-13s  %10.1f  %10.2f\n", "plain copies", s.CopyUS, s.CopyGBps)
	fmt.Fprintf(w, "%-13s  %10.3f\n", "ratio", s.Ratio)
	fmt.Fprintf(w, "%-13s  %10d\n", "launches", s.Launches)
}

// OverheadHead prints the head of the table of overheads.
func OverheadHead(w io.Writer) {
	fmt.Fprintf(w, "\n%-34s  %12s  %12s\n", "issuing work", "host CPU µs", "elapsed µs")
}

// OverheadText prints one line of the table of overheads.
func OverheadText(w io.Writer, o Overhead) {
	fmt.Fprintf(w, "%-34s  %12.3f  %12.3f\n", o.What, o.CPU, o.Elapsed)
}
