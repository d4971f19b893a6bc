// This file owns the forecast of a run: its memory, found by walking the run's own code
// on devices that compute nothing.

package train

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/null"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/policy"
	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/stash"
)

// Outlook is what a run will take of memory.
type Outlook struct {
	Ranks []RankOutlook `json:"ranks"`
	Steps int           `json:"steps"` // that were walked until nothing changed any more
}

// RankOutlook is one rank's part.
type RankOutlook struct {
	Rank    int                 `json:"rank"`
	Stage   int                 `json:"stage"`
	Replica int                 `json:"replica"`
	Device  device.Bytes        `json:"device"` // at most
	Host    device.Bytes        `json:"host"`   // at most
	Owners  []device.OwnerUsage `json:"owners"` // by kind, then largest peak first
	// Decision is what the runtime will decide if times are as the null device has them,
	// and its Forecast what saved activations come to in a step.
	Decision *policy.Decision `json:"decision,omitempty"`
}

// Fullest is the rank whose device holds most.
func (f Outlook) Fullest() RankOutlook {
	return slices.MaxFunc(f.Ranks, func(a, b RankOutlook) int { return cmp.Compare(a.Device, b.Device) })
}

// Walks are at least so many steps (recorded, timed again, warmed up, captured,
// replayed), and at most so many, if memory is still taken: a budget's second recording
// and the steps behind it.
const (
	fewestWalked = 5
	mostWalked   = 10
)

// Forecast says what a run takes before it is launched. Every rank is opened as the run would
// open it and walks its steps, on devices that move no byte and execute no kernel: what
// it allocates, in which order and why, is what the run will. Config.Device must open
// devices that run kernels written in Go and touch no memory before it is used, as the
// CPU device does, with the capacity of those that the run will have; a run that does
// not fit there is refused as it would be then.
//
// Three things are not known before:
//
//   - Rows of experts are data. All ranks are taken to have Config.Imbalance times their
//     balanced share, in every layer.
//   - Times are not measured but follow from bytes. Choices under a budget and how far ahead
//     groups come back depend on times, so that a run may choose otherwise; it stays within
//     the same budget.
//   - How far the host will be ahead of the device. Memory that was freed counts as free
//     at once, so that for a dynamic pool of parameters, and for it alone, the forecast is
//     the least that it takes.
func Forecast(cfg Config) (f Outlook, err error) {
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

// rehearse opens a run on null devices.
func rehearse(cfg Config) (*Trainer, error) {
	if i := cfg.Imbalance; i != 0 && !(i >= 1) {
		return nil, fmt.Errorf("train: an imbalance of %g; the fullest expert rank has at least the mean, so give 1 or more", i)
	}
	open := cfg.Device
	if open == nil {
		return nil, cfg.Check()
	}
	cfg.forecast, cfg.Measure = true, nil
	cfg.Device = func(rank int) (device.Device, error) {
		d, err := open(rank)
		if err != nil {
			return nil, err
		}
		return null.Wrap(d, null.DefaultPace())
	}
	return New(cfg)
}

// walk takes steps until none takes more memory than the one before.
func (t *Trainer) walk() (f Outlook, err error) {
	var before, peaks []device.Bytes
	for f.Steps < fewestWalked || f.Steps < mostWalked && !slices.Equal(before, peaks) {
		if _, err := t.Step(); err != nil {
			return f, err
		}
		f.Steps++
		before, peaks = peaks, nil
		for _, u := range t.Usage() {
			peaks = append(peaks, u.Kind[device.Accel].Peak, u.Kind[device.Host].Peak)
		}
	}
	for i, u := range t.Usage() {
		r := t.ranks[i]
		f.Ranks = append(f.Ranks, RankOutlook{
			Rank: i, Stage: r.pp, Replica: r.dp, Device: u.Kind[device.Accel].Peak, Host: u.Kind[device.Host].Peak,
			Owners: u.Owners, Decision: r.rt.Decision(r.key()),
		})
	}
	return f, nil
}

// assumed is the imbalance of a forecast; zero in runs.
func (c *Config) assumed() float64 {
	if !c.forecast {
		return 0
	}
	return cmp.Or(c.Imbalance, plan.NaturalImbalance(c.Model, plan.Layout{EP: c.Layout.EP}))
}

// assumed is the rows of a stashed group in a forecast. Further heads come behind the
// chunk's own layers.
func (r *rank) assumed(g schedule.Group) stash.Rows {
	layers := r.layers(g.Chunk)
	return stash.Rows(r.env.Assumed(layers[min(g.Layer, len(layers)-1)].MoE))
}

// Prediction is what a rank's recorded step says that it takes of its device, beside
// what it took.
type Prediction struct {
	// Device is parameters and all that is fixed, workspaces, pages, and the extent of
	// activations as the runtime decided.
	Device device.Bytes `json:"device"`
	// Live is the same with the most bytes of activations that are live at once: what
	// they would take without holes between them.
	Live device.Bytes `json:"live"`
	Peak device.Bytes `json:"peak"` // measured
}

// Predicted is each rank's prediction, or nil before its runtime has decided: that is
// after a step or two.
func (t *Trainer) Predicted() (out []Prediction) {
	for _, r := range t.ranks {
		f, p := r.rt.Forecast(r.key()), r.rt.Profile(r.key())
		if f == nil || p == nil {
			return nil
		}
		u := r.dev.Memory()
		// What workspaces and pages may come to take is part of both figures; what they
		// took counts.
		held, _ := r.rt.Held()
		rest := -held - device.Bytes(p.Base)
		for _, o := range u.Owners {
			if o.Kind == device.Accel {
				rest += o.Peak
			}
		}
		out = append(out, Prediction{Device: rest + device.Bytes(f.Extent), Live: rest + device.Bytes(f.Peak), Peak: u.Kind[device.Accel].Peak})
	}
	return out
}

// Decisions are what every rank's runtime decided for its steps, nil where it did not.
func (t *Trainer) Decisions() (out []*policy.Decision) {
	for _, r := range t.ranks {
		out = append(out, r.rt.Decision(r.key()))
	}
	return out
}
