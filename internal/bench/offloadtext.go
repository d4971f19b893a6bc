// This file owns the result of the offload benchmark, as text and as JSON.

package bench

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Offload is the result. Times are in milliseconds.
type Offload struct {
	Device       device.Info  `json:"device"`
	Model        string       `json:"model"`
	Layers       int          `json:"layers"`
	Seq          int          `json:"seq"`
	Micro        int          `json:"mbs"`
	Microbatches int          `json:"microbatches"`
	PP           int          `json:"pp"`
	VPP          int          `json:"vpp"`
	Rank         int          `json:"rank"`
	Graph        string       `json:"graph"` // captured scopes
	Budget       int64        `json:"budget_bytes,omitempty"`
	Links        memory.Links `json:"links"` // bytes a second
	Steps        int          `json:"steps"`

	StepMS        float64 `json:"step_ms"`         // without offload
	OffloadStepMS float64 `json:"offload_step_ms"` // with
	PredictedMS   float64 `json:"predicted_ms"`    // with offload, as the plan predicts
	StepRatio     float64 `json:"step_ratio"`

	PeakBytes        int64   `json:"peak_bytes"`
	OffloadPeakBytes int64   `json:"offload_peak_bytes"`
	PeakRatio        float64 `json:"peak_ratio"`
	SavedBytes       int64   `json:"saved_bytes"`
	ExpectedBytes    int64   `json:"expected_bytes"`

	MovedBytes      int64   `json:"moved_bytes"` // offloaded in a step
	HostBytes       int64   `json:"host_bytes"`  // peak of host memory
	CopyMS          float64 `json:"copy_ms"`     // the copies alone
	LinkUtilisation float64 `json:"link_utilisation"`
	HiddenFraction  float64 `json:"hidden_fraction"`
	StashedBytes    int64   `json:"stashed_bytes,omitempty"`
	// Issued is what the host did in a step with offload.
	Issued Issued `json:"issued"`
	// Equal reports whether every tensor of every step was loaded with the same bits as
	// without offload.
	Equal bool `json:"equal"`

	Groups []OffloadGroup `json:"groups"`
	Step   StepRecord     `json:"step"`

	found bool // the budget was found, not given
}

// Issued is what the host issued and waited for in one step.
type Issued struct {
	Launches uint64 `json:"launches"`
	Copies   uint64 `json:"copies"`
	Replays  uint64 `json:"replays"`
	Syncs    uint64 `json:"syncs"`
	Reads    uint64 `json:"reads"`
}

// OffloadGroup is the groups of one name.
type OffloadGroup struct {
	Name   string `json:"name"`
	Groups int    `json:"groups"`
	Bytes  int64  `json:"bytes"`
	Moved  int64  `json:"moved_bytes"`
	// Units counts the modules of layers by their choice.
	Units map[memory.Choice]int `json:"units"`
}

// StepRecord is the step in a form that other programs can run: modules in forward order,
// and passes as chunk, microbatch and 1 for backward.
type StepRecord struct {
	Modules []ModuleRecord `json:"modules"`
	Passes  [][3]int       `json:"passes"`
}

// ModuleRecord is one module of one layer.
type ModuleRecord struct {
	Chunk      int            `json:"chunk"`
	Layer      int            `json:"layer"`
	Name       string         `json:"name"`
	ForwardUS  float64        `json:"forward_us"`
	BackwardUS float64        `json:"backward_us"`
	Tensors    []memory.Bytes `json:"tensor_bytes"`
}

func (s *step) record() (r StepRecord) {
	micros := func(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
	for c, layers := range s.chunks {
		for l, ms := range layers {
			for _, m := range ms {
				rec := ModuleRecord{Chunk: c, Layer: l, Name: m.name, ForwardUS: micros(m.forward), BackwardUS: micros(m.backward), Tensors: []memory.Bytes{}}
				for _, t := range m.saved {
					rec.Tensors = append(rec.Tensors, t.bytes)
				}
				r.Modules = append(r.Modules, rec)
			}
		}
	}
	for _, p := range s.passes {
		backward := 0
		if p.Backward {
			backward = 1
		}
		r.Passes = append(r.Passes, [3]int{p.Chunk, p.Microbatch, backward})
	}
	return r
}

// OffloadText prints the result.
func OffloadText(w io.Writer, r Offload) {
	fmt.Fprintf(w, "%s:%d  %s\n\n", r.Device.Backend, r.Device.Ordinal, describe(r.Device))
	fmt.Fprintf(w, "%s, %d layers, %d x %d tokens, %d microbatches, pipeline rank %d of %d, chunks a rank %d; captured: %s\n",
		r.Model, r.Layers, r.Micro, r.Seq, r.Microbatches, r.Rank, r.PP, r.VPP, r.Graph)
	fmt.Fprintf(w, "links: %.2f GB/s out, %.2f in, %.2f both\n", r.Links.Out/1e9, r.Links.In/1e9, r.Links.Both/1e9)
	if r.Budget > 0 {
		found := ""
		if r.found {
			found = fmt.Sprintf(", a tenth above the smallest whose plan makes the step at most %g %% longer", 100*slack)
		}
		fmt.Fprintf(w, "budget: %v%s\n", memory.Bytes(r.Budget), found)
	}
	if r.StashedBytes > 0 {
		fmt.Fprintf(w, "stashed: %v of %s\n", memory.Bytes(r.StashedBytes), StashedModule)
	}
	fmt.Fprintf(w, "\n%-14s  %6s  %12s  %12s  %s\n", "group", "groups", "bytes", "moved", "choices for modules of layers")
	for _, g := range r.Groups {
		var words []string
		for c := memory.Keep; c < memory.Choices; c++ {
			if n := g.Units[c]; n > 0 {
				words = append(words, fmt.Sprintf("%d %v", n, c))
			}
		}
		fmt.Fprintf(w, "%-14s  %6d  %12v  %12v  %s\n", g.Name, g.Groups, memory.Bytes(g.Bytes), memory.Bytes(g.Moved), strings.Join(words, ", "))
	}
	fmt.Fprintf(w, "\n%-17s  %12s  %12s  %8s\n", "", "without", "with", "ratio")
	fmt.Fprintf(w, "%-17s  %12.2f  %12.2f  %8.4f  step_ratio (predicted %.2f ms)\n", "step, ms", r.StepMS, r.OffloadStepMS, r.StepRatio, r.PredictedMS)
	fmt.Fprintf(w, "%-17s  %12v  %12v  %8.4f  peak_ratio\n", "peak", memory.Bytes(r.PeakBytes), memory.Bytes(r.OffloadPeakBytes), r.PeakRatio)
	equal := "yes, bit for bit"
	if !r.Equal {
		equal = "NO"
	}
	for _, line := range []struct {
		name  string
		value any
	}{
		{"saved_bytes", memory.Bytes(r.SavedBytes)}, {"expected_bytes", memory.Bytes(r.ExpectedBytes)}, {"moved_bytes", memory.Bytes(r.MovedBytes)},
		{"copies alone, ms", fmt.Sprintf("%.2f", r.CopyMS)}, {"link_utilisation", fmt.Sprintf("%.4f", r.LinkUtilisation)},
		{"hidden_fraction", fmt.Sprintf("%.4f", r.HiddenFraction)}, {"equal results", equal},
	} {
		fmt.Fprintf(w, "%-17s  %12v\n", line.name, line.value)
	}
	i := r.Issued
	fmt.Fprintf(w, "%-17s  %12d launches, %d copies, %d replays; %d waits, %d reads of device memory\n", "issued in a step", i.Launches, i.Copies, i.Replays, i.Syncs, i.Reads)
}
