// This file owns what a user sets module by module, and what the runtime decides.

package stowage

import (
	"time"

	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/memory"
)

// ModuleSettings makes choices by the names of modules, as the flags of Megatron-LM do.
// The comments name these flags if there are any. [memory.Modules] lists the names.
type ModuleSettings struct {
	OffloadModules   []string // --offload-modules
	RecomputeModules []string // --recompute-modules
	// StashModules is Stowage's own: Megatron-LM stashes the rows of all experts
	// (--moe-paged-stash) or none.
	StashModules []string
	// OffloadFraction is the share of what OffloadModules save in a chunk that is
	// offloaded, from 0 to 1 (--activation-offload-fraction). The last units stay. It
	// counts bytes, or groups if FractionOfGroups is set.
	OffloadFraction  float64
	FractionOfGroups bool
	// MinBytes is the size below which a storage is not offloaded.
	// --min-offloaded-tensor-size counts elements: its default of 1,048,576 is 2 MiB of
	// bfloat16.
	MinBytes memory.Bytes
	// DeltaBytes is what each stage of the pipeline keeps more than the stage before it
	// (--delta-offload-bytes-across-pp-ranks).
	DeltaBytes memory.Bytes
	// Margin is how many of the last units of each module in a chunk are kept, because
	// their backward pass comes next.
	Margin int
	// MaxInflight is how many offloads may be under way before compute waits
	// (--fine-grained-offloading-max-inflight-offloads). Zero means no limit.
	MaxInflight int
	// Delay makes offloads outside of a captured graph begin after its replay
	// (--delay-offload-until-cuda-graph).
	Delay bool
}

// DefaultModuleSettings returns settings that offload everything the modules in
// OffloadModules save, except for the last unit of each module. Two of them differ from
// the defaults of Megatron-LM: MinBytes is zero, where --min-offloaded-tensor-size leaves
// small tensors alone, and OffloadFraction counts bytes, where older versions count
// groups (set FractionOfGroups for that).
func DefaultModuleSettings() ModuleSettings {
	h := policy.Defaults()
	return ModuleSettings{
		OffloadFraction: h.OffloadFraction, FractionOfGroups: h.FractionOfGroups, MinBytes: h.MinBytes,
		DeltaBytes: h.DeltaBytes, Margin: h.Margin, MaxInflight: h.MaxInflight, Delay: h.Delay,
	}
}

// policy returns the settings as the engine takes them.
func (m *ModuleSettings) policy() policy.ByHand {
	return policy.ByHand{
		OffloadModules: m.OffloadModules, RecomputeModules: m.RecomputeModules, StashModules: m.StashModules,
		OffloadFraction: m.OffloadFraction, FractionOfGroups: m.FractionOfGroups, MinBytes: m.MinBytes,
		DeltaBytes: m.DeltaBytes, Margin: m.Margin, MaxInflight: m.MaxInflight, Delay: m.Delay,
	}
}

// Decision is what the runtime chose for the steps under a key.
type Decision struct {
	// Policy holds the choice for every unit. Units that it does not name are kept.
	Policy memory.Policy
	// Kept is the forecast of a step that keeps everything, and Forecast that of a step
	// under Policy.
	Kept, Forecast Forecast
	// Notes name settings that have no effect, or an unexpected one.
	Notes []string

	text string
}

// String returns the decision as a table. Units with the same choice share a line, which
// says what the choice saves and costs, and why it was made.
func (d *Decision) String() string { return d.text }

// Forecast is what a step is expected to take.
type Forecast struct {
	Step    time.Duration // from its first work to its last
	Waiting time.Duration // the part of it in which compute waits for copies
	// Device is the device memory of saved tensors, workspaces and pages, as the
	// runtime lays them out; Peak is the part of it that is in use at once.
	Device, Peak memory.Bytes
	Host         memory.Bytes
	Offloaded    memory.Bytes // bytes that are copied to the host
}

func forecastOf(f *policy.Forecast) Forecast {
	return Forecast{
		Step: f.Step, Waiting: f.Waiting, Device: f.Extent, Peak: f.Peak,
		Host: f.Host, Offloaded: f.Counts.OutBytes,
	}
}

// Decision returns what the runtime chose for the steps under a key. It returns nil
// before the choice is made, which is after the first step, or after the second if
// something is recomputed. It returns nil again while a step is recorded anew, because the
// first was slow or a step departed from its plan. Capture steps once it is not nil.
func (r *Runtime) Decision(key memory.Key) *Decision {
	d := r.rt.Decision(key)
	if d == nil {
		return nil
	}
	return &Decision{Policy: d.Policy, Kept: forecastOf(&d.Before), Forecast: forecastOf(&d.Forecast), Notes: d.Notes, text: d.Text()}
}

// Forecast returns what the steps under a key are expected to take, and whether that is
// known: it is once [Runtime.Decision] is. The device memory is that of the largest
// step, because the runtime keeps what it took once.
func (r *Runtime) Forecast(key memory.Key) (Forecast, bool) {
	f := r.rt.Forecast(key)
	if f == nil {
		return Forecast{}, false
	}
	return forecastOf(f), true
}
