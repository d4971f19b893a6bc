// This file owns the figures of a profile.

package profile

import (
	"cmp"
	"slices"
)

// Limits are the rates that a device reaches: that of a large dense product in the format of
// the run, and that of a copy inside its memory, read plus write. Zero is unknown.
type Limits struct {
	Product float64 `json:"product_tflops"`
	Format  string  `json:"product_format"` // "bf16" or "fp32"
	Copy    float64 `json:"copy_gbps"`
}

// Run is what the profiled run was.
type Run struct {
	Steps  int     // that were profiled
	Millis float64 // of a profiled step
	Plain  float64 // milliseconds of a step while nothing was timed
	Flops  float64 // of the model in a step
	Ranks  int     // in this process
}

// Result holds the figures of a profile. Times, launches, operations and bytes are those of
// one step.
type Result struct {
	Steps  int     `json:"steps"`
	Millis float64 `json:"profiled_step_ms"`
	Plain  float64 `json:"step_ms"`
	Work   float64 `json:"work_ms"` // sum over all kernels and ranks
	Ranks  int     `json:"ranks"`
	Limits Limits  `json:"limits"`
	// Model is the rate at which the model's operations are done in a step that is not
	// disturbed, and MFU its share of the dense product's rate in percent.
	Flops   float64  `json:"model_flops"`
	Model   float64  `json:"model_tflops"`
	MFU     float64  `json:"mfu_percent,omitempty"`
	Kernels []Kernel `json:"kernels"` // the longest first
}

// Kernel holds the figures of one kernel, or of copies of one kind.
type Kernel struct {
	Name     string  `json:"name"`
	Millis   float64 `json:"ms"`
	Share    float64 `json:"share_percent"`
	Launches float64 `json:"launches"`
	TFlops   float64 `json:"tflops,omitempty"`
	GBps     float64 `json:"gbps,omitempty"`
	// Limit is how much of the time the work needs at the limits of the device, by its
	// operations or by its bytes, whichever is more, in percent. Zero is unknown.
	Limit float64 `json:"limit_percent,omitempty"`
}

// Result returns the figures of what was timed.
func (p *Profiler) Result(r Run, limits Limits) *Result {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := &Result{Steps: r.Steps, Millis: r.Millis, Plain: r.Plain, Ranks: r.Ranks, Limits: limits, Flops: r.Flops, Kernels: []Kernel{}}
	steps := float64(max(1, r.Steps))
	for name, t := range p.work {
		k := Kernel{Name: name, Millis: t.took.Seconds() * 1e3 / steps, Launches: float64(t.count) / steps}
		if s := t.took.Seconds(); s > 0 {
			k.TFlops, k.GBps = t.flops/s/1e12, float64(t.bytes)/s/1e9
			if !t.link {
				k.Limit = 100 * max(rate(k.TFlops, limits.Product), rate(k.GBps, limits.Copy))
			}
		}
		out.Work += k.Millis
		out.Kernels = append(out.Kernels, k)
	}
	for i := range out.Kernels {
		out.Kernels[i].Share = 100 * rate(out.Kernels[i].Millis, out.Work)
	}
	slices.SortFunc(out.Kernels, func(a, b Kernel) int {
		return cmp.Or(cmp.Compare(b.Millis, a.Millis), cmp.Compare(a.Name, b.Name))
	})
	if r.Plain > 0 {
		out.Model = r.Flops / (r.Plain / 1e3) / 1e12
		out.MFU = 100 * rate(out.Model, limits.Product)
	}
	return out
}

// rate returns a part of a whole, or zero if the whole is unknown.
func rate(part, whole float64) float64 {
	if whole <= 0 {
		return 0
	}
	return part / whole
}
