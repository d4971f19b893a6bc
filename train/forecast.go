// This file owns the forecast of a run. It finds the memory that a run takes by running
// the trainer itself on devices that compute nothing.

package train

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/nulldevice"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
	"github.com/stowage-dev/stowage/plan"
)

// RunForecast is the memory that a run is expected to take.
type RunForecast struct {
	Ranks []RankForecast `json:"ranks"`
	Steps int            `json:"steps"` // steps of the dry run until memory stopped growing
}

// RankForecast is the memory that one rank of a run is expected to take.
type RankForecast struct {
	Rank    int                 `json:"rank"`
	Stage   int                 `json:"stage"`   // the pipeline rank
	Replica int                 `json:"replica"` // the data-parallel rank
	Device  memory.Bytes        `json:"device"`  // peak of device memory
	Host    memory.Bytes        `json:"host"`    // peak of host memory
	Owners  []device.OwnerUsage `json:"owners"`  // sorted by kind, then by peak with the largest first
	// Decision is what the runtime will decide if the run's times are those of the null
	// device. Its Forecast holds the memory of saved tensors in a step.
	Decision *policy.Decision `json:"decision,omitempty"`
}

// Fullest returns the forecast of the rank whose device holds the most memory.
func (f RunForecast) Fullest() RankForecast {
	return slices.MaxFunc(f.Ranks, func(a, b RankForecast) int { return cmp.Compare(a.Device, b.Device) })
}

// A dry run takes at least fewestWalked steps: recorded, timed again, warmed up, captured
// and replayed. It takes at most mostWalked steps while memory still grows, because under
// a budget a step may be recorded a second time.
const (
	fewestWalked = 5
	mostWalked   = 10
)

// Forecast returns the memory that a run takes, without training. It opens the first rank
// of each pipeline stage as the run would open it and runs a few steps on devices that
// copy no bytes and execute no kernels. The allocations and their order are those of the
// run. The other ranks of a stage differ in nothing that memory depends on, so a forecast
// takes no longer if there are more of them.
//
// Config.Device must open CPU devices, or other devices that run kernels written in Go
// and touch no memory before it is used. They need the capacity of the devices that the
// run will use. Forecast returns the error that the run would return if it does not fit.
//
// Three things differ from a run:
//
//   - The forecast does not know the routing. It assumes that every rank gets
//     Config.Imbalance times its balanced share of rows, in every layer.
//   - The forecast does not measure times but derives them from bytes. Choices under a
//     budget and the distance of prefetches depend on times, so the run may choose
//     otherwise. It stays within the same budget.
//   - The forecast does not know how far the host runs ahead of the device, and counts
//     freed memory as free at once. For a dynamic pool of parameters, and only there, the
//     forecast is therefore a lower bound.
func Forecast(cfg Config) (f RunForecast, err error) {
	t, err := rehearse(cfg)
	if err != nil {
		return f, err
	}
	defer func() {
		if end := t.Close(); err == nil {
			err = end
		}
	}()
	return t.walk()
}

// rehearse opens a trainer on null devices.
func rehearse(cfg Config) (*Trainer, error) {
	if i := cfg.Imbalance; i != 0 && !(i >= 1) {
		return nil, fmt.Errorf("train: expected an imbalance of 1 or more, got %g; the fullest expert rank has at least the mean number of rows", i)
	}
	open := cfg.Device
	if open == nil {
		return nil, cfg.Check()
	}
	cfg.forecast, cfg.DryRun, cfg.Measure, cfg.Process = true, true, nil, nil
	cfg.Device = func(rank int) (device.Device, error) {
		d, err := open(rank)
		if err != nil {
			return nil, err
		}
		return nulldevice.Wrap(d, nulldevice.DefaultPace())
	}
	return New(cfg)
}

// walk runs steps until a step takes no more memory than the one before.
func (t *Trainer) walk() (f RunForecast, err error) {
	var before, peaks []memory.Bytes
	for f.Steps < fewestWalked || f.Steps < mostWalked && !slices.Equal(before, peaks) {
		if _, err := t.Step(); err != nil {
			return f, err
		}
		f.Steps++
		before, peaks = peaks, nil
		for _, u := range t.Usage() {
			peaks = append(peaks, u.Kind[memory.Device].Peak, u.Kind[memory.Host].Peak)
		}
	}
	usage := t.Usage()
	for i := range t.cfg.Layout.Ranks() {
		k := len(t.ranks) * i / t.cfg.Layout.Ranks() // the rank itself, or the one that was opened of its stage
		f.Ranks = append(f.Ranks, t.ranks[k].expected(i, usage[k]))
	}
	return f, nil
}

// expected returns the forecast of a rank that is like r.
func (r *rank) expected(index int, u device.Usage) RankForecast {
	f := RankForecast{
		Rank: index, Stage: r.pp, Replica: index % r.cfg.Layout.DP, Device: u.Kind[memory.Device].Peak, Host: u.Kind[memory.Host].Peak,
		Owners: slices.Clone(u.Owners),
	}
	for i, o := range f.Owners { // some names begin with the rank
		if what, named := strings.CutPrefix(o.Owner, fmt.Sprintf("rank %d ", r.index)); named {
			f.Owners[i].Owner = fmt.Sprintf("rank %d %s", index, what)
		}
	}
	if d := r.rt.Decision(r.key()); d != nil {
		of := *d
		of.Rank, f.Decision = index, &of
	}
	return f
}

// assumed returns the imbalance that a forecast assumes, or zero in a run.
func (c *Config) assumed() float64 {
	if !c.forecast {
		return 0
	}
	return cmp.Or(c.Imbalance, plan.NaturalImbalance(c.Model, plan.Layout{EP: c.Layout.EP}))
}

// assumed returns the rows that a forecast assumes for a stashed group. The layers of
// multi-token-prediction heads follow the chunk's own layers.
func (r *rank) assumed(g memory.GroupID) stash.Rows {
	layers := r.layers(g.Chunk)
	return stash.Rows(r.env.Assumed(layers[min(g.Layer, len(layers)-1)].MoE))
}

// DeviceForecast compares the device memory that a rank's recorded step led the runtime
// to expect with the memory that the rank took.
type DeviceForecast struct {
	// Device is the expected device memory: parameters, other fixed memory, workspaces,
	// pages, and the extent of saved tensors under the runtime's decision.
	Device memory.Bytes `json:"device"`
	// Live is Device with the most bytes of saved tensors that are live at once in place
	// of their extent. It leaves out the holes between them.
	Live memory.Bytes `json:"live"`
	// Peak is the measured peak of device memory.
	Peak memory.Bytes `json:"peak"`
}

// Forecasts returns the forecast of each rank's device. It returns nil until every
// runtime has decided, which takes one or two steps, or some more after a slow first step.
func (t *Trainer) Forecasts() (out []DeviceForecast) {
	for _, f := range known(t, (*rank).forecast, func(s *status) *DeviceForecast { return s.Forecast }) {
		if f == nil {
			return nil
		}
		out = append(out, *f)
	}
	return out
}

// forecast returns the forecast of the rank's device, or nil if its runtime has not
// decided.
func (r *rank) forecast() *DeviceForecast {
	f, p := r.rt.Forecast(r.key()), r.rt.Profile(r.key())
	if f == nil || p == nil {
		return nil
	}
	u := r.dev.Memory()
	// Both figures include the most that workspaces may take and the expected pages.
	// Replace these by what workspaces and pages took.
	rest := -p.Base - memory.Bytes(f.DevicePages)*f.PageBytes - f.SetBytes
	for _, o := range u.Owners {
		switch {
		case o.Kind != memory.Device || o.Owner == trace.HeapOwner(memory.Device):
		case o.Owner == stash.PagesOwner, strings.HasPrefix(o.Owner, stash.WorkspaceOwner):
			rest += o.Current // a decision may have taken some back in favour of saved tensors
		default:
			rest += o.Peak
		}
	}
	return &DeviceForecast{Device: rest + f.Extent, Live: rest + f.Peak, Peak: u.Kind[memory.Device].Peak}
}

// Decisions returns what each rank's runtime decided. An entry is nil if that runtime has
// decided nothing yet. If ranks live in several processes, it has its
// reasons and notes alone.
func (t *Trainer) Decisions() []*policy.Decision {
	return known(t, func(r *rank) *policy.Decision { return r.rt.Decision(r.key()) }, (*status).decided)
}
