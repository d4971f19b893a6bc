// This file owns the profile as people read it.

package profile

import (
	"fmt"
	"io"
)

// few is the share of the time, in percent, below which kernels are printed together.
const few = 0.5

// WriteText prints the profile.
func (r *Result) WriteText(w io.Writer) {
	fmt.Fprintf(w, "\nthe last %d steps, with each launch timed, took %.4g ms each; steps before them took %.4g ms\n", r.Steps, r.Millis, r.Plain)
	if l := r.Limits; l.Product > 0 {
		fmt.Fprintf(w, "limits of the device: %s of a dense %s product, %.4g GB/s of a copy\n", Rate(l.Product), l.Format, l.Copy)
	}
	fmt.Fprintf(w, "\n%-26s %10s %7s %9s %10s %9s %9s\n", "kernel", "ms a step", "share", "launches", unit(r.Limits), "GB/s", "of limit")
	rest, others := Kernel{}, 0
	for _, k := range r.Kernels {
		if k.Share < few {
			rest.Millis, rest.Share, rest.Launches = rest.Millis+k.Millis, rest.Share+k.Share, rest.Launches+k.Launches
			others++
			continue
		}
		k.write(w, r.Limits)
	}
	if others > 0 {
		rest.Name = fmt.Sprintf("%d others", others)
		rest.write(w, r.Limits)
	}
	Kernel{Name: "all", Millis: r.Work, Share: 100}.write(w, r.Limits)
	if r.Ranks > 1 {
		fmt.Fprintf(w, "%d ranks share the device, so that their work waits for each other while it is timed\n", r.Ranks)
	}
	fmt.Fprintf(w, "\nthe model needs %s a step, which is %s in a step that is not disturbed", count(r.Flops), Rate(r.Model))
	if r.MFU > 0 {
		fmt.Fprintf(w, ": an MFU of %.1f %% of the dense product", r.MFU)
	}
	fmt.Fprintln(w)
}

func (k Kernel) write(w io.Writer, l Limits) {
	cell := func(v float64, format string) string {
		if v == 0 {
			return "-"
		}
		return fmt.Sprintf(format, v)
	}
	launches, rate := cell(k.Launches, "%.0f"), k.TFlops
	if small(l) {
		rate *= 1e3
	}
	fmt.Fprintf(w, "%-26s %10.3f %6.1f%% %9s %10s %9s %9s\n", k.Name, k.Millis, k.Share, launches, cell(rate, "%.1f"), cell(k.GBps, "%.0f"), cell(k.Limit, "%.0f%%"))
}

// small reports whether the device is better described in GFLOP/s, as a CPU is.
func small(l Limits) bool { return l.Product < 2 }

func unit(l Limits) string {
	if small(l) {
		return "GFLOP/s"
	}
	return "TFLOP/s"
}

// Rate prints a rate that is given in TFLOP/s.
func Rate(t float64) string {
	if t < 2 {
		return fmt.Sprintf("%.4g GFLOP/s", t*1e3)
	}
	return fmt.Sprintf("%.4g TFLOP/s", t)
}

// count prints a number of operations.
func count(f float64) string {
	if f < 1e12 {
		return fmt.Sprintf("%.4g GFLOP", f/1e9)
	}
	return fmt.Sprintf("%.4g TFLOP", f/1e12)
}
