// This file owns the tables as people read them. Lines are printed as they are
// measured, so the columns have fixed widths.

package bench

import (
	"fmt"
	"io"

	"github.com/stowage-dev/stowage/device"
)

// Result is everything that one run measured.
type Result struct {
	Device    device.Info `json:"device"`
	Copies    []Copy      `json:"copies"`
	Overheads []Overhead  `json:"overheads"`
	// Ratio is the least of the copies' ratios, zero where none has one.
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

// OverheadHead prints the head of the table of overheads.
func OverheadHead(w io.Writer) {
	fmt.Fprintf(w, "\n%-34s  %12s  %12s\n", "issuing work", "host CPU µs", "elapsed µs")
}

// OverheadText prints one line of the table of overheads.
func OverheadText(w io.Writer, o Overhead) {
	fmt.Fprintf(w, "%-34s  %12.3f  %12.3f\n", o.What, o.CPU, o.Elapsed)
}
