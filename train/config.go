// Package train trains decoder models on ranks of one process: pipeline stages, expert
// ranks, data-parallel replicas, whole or sharded parameters. Each rank has a device
// of its own and a runtime that decides where what it saves lives; results do not
// depend on any of that.
//
// This file owns the configuration; memory.go the memory policies, pipeline.go the
// order of a rank's work, rank.go a rank, step.go its steps, store.go and sharded.go
// its parameters, optim.go the optimiser, trainer.go all ranks together, state.go what
// is kept on disk, meet.go how ranks agree.
package train

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"

	"github.com/stowage-dev/stowage/bucket"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/kernels"
	"github.com/stowage-dev/stowage/model"
	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/trace"
	"github.com/stowage-dev/stowage/train/data"
	"github.com/stowage-dev/stowage/train/layer"
)

// Config is a run.
type Config struct {
	Model    *model.Model
	Settings layer.Settings
	Number   kernels.Number // of activations and of the parameters that passes read
	Layout   Layout
	Batch    Batch
	Optim    Optim
	Memory   Memory
	Sharding *Sharding // of parameters (ZeRO-3); nil keeps them whole on every rank
	Dispatch layer.Dispatch
	Seed     uint64
	Text     *data.Text
	HeldOut  *data.Text // what Evaluate evaluates on; may be nil. See data.Text.Split

	// Imbalance is the rows of an expert rank over the mean that a forecast assumes; zero
	// stands for what the planner expects of routing that nothing forces to be balanced.
	// Runs count them.
	Imbalance float64
	forecast  bool // nothing is computed

	// Device opens the device of a rank; the trainer closes it.
	Device func(rank int) (device.Device, error)
	// Measure opens a device to measure links on, which is closed again and nobody
	// watches; nil stands for the first rank's Device.
	Measure func() (device.Device, error)
	Log     *slog.Logger              // nil is silent
	Trace   func(rank int) trace.Sink // nil is none
}

// Layout is how ranks share the work: PP x DP of them. Experts are divided over EP of
// the DP ranks.
type Layout struct {
	PP  int `json:"pp"`
	VPP int `json:"vpp"`
	EP  int `json:"ep"`
	DP  int `json:"dp"`
}

// Ranks is their number.
func (l Layout) Ranks() int { return l.PP * l.DP }

// Batch is what a step computes on each data-parallel rank.
type Batch struct {
	Micro        int `json:"micro"` // sequences of a microbatch
	Seq          int `json:"seq"`   // tokens of a sequence
	Microbatches int `json:"microbatches"`
}

// Tokens are those of a step on all ranks.
func (c *Config) Tokens() int {
	return c.Layout.DP * c.Batch.Microbatches * c.Batch.Micro * c.Batch.Seq
}

// Optim is AdamW with a linear warm-up and a cosine decay.
type Optim struct {
	LR      float64 `json:"lr"`
	MinLR   float64 `json:"min_lr"`
	WarmUp  int     `json:"warm_up"` // steps
	Decay   int     `json:"decay"`   // steps until MinLR; zero keeps LR
	Beta1   float64 `json:"beta1"`
	Beta2   float64 `json:"beta2"`
	Epsilon float64 `json:"epsilon"`
	Weights float64 `json:"weight_decay"`
	Clip    float64 `json:"clip"` // the largest norm of all gradients; zero is none
}

// DefaultOptim suits the tiny models.
func DefaultOptim() Optim {
	return Optim{LR: 3e-3, MinLR: 3e-4, WarmUp: 20, Beta1: 0.9, Beta2: 0.95, Epsilon: 1e-8, Weights: 0.1, Clip: 1}
}

// rate is the learning rate of a step, counted from zero.
func (o Optim) rate(step int) float64 {
	if step < o.WarmUp {
		return o.LR * float64(step+1) / float64(o.WarmUp)
	}
	if o.Decay <= 0 {
		return o.LR
	}
	x := min(1, float64(step-o.WarmUp)/float64(max(1, o.Decay-o.WarmUp)))
	return o.MinLR + (o.LR-o.MinLR)*(1+math.Cos(math.Pi*x))/2
}

// Sharding is ZeRO-3.
type Sharding struct {
	Pool     bucket.Kind
	Prefetch int
	GradComm kernels.Number // the format in which gradients are written and reduced
}

// Check says in one sentence what is wrong with a run, if anything.
func (c *Config) Check() error {
	if c.Model == nil || c.Text == nil || c.Device == nil {
		return errors.New("train: a run needs a model, a text and devices")
	}
	if err := c.Model.Check(); err != nil {
		return err
	}
	if err := layer.Supported(c.Model); err != nil {
		return err
	}
	if err := c.checkLayout(); err != nil {
		return err
	}
	if err := c.checkBatch(); err != nil {
		return err
	}
	if c.Model.Vocab < 256 {
		return fmt.Errorf("train: %s has a vocabulary of %d, and bytes need 256; choose a model with at least that", c.Model.Name, c.Model.Vocab)
	}
	if err := c.Settings.Check(); err != nil {
		return err
	}
	if c.Number > kernels.BF16 || c.Dispatch > layer.Ring || c.Memory.Rows > layer.Stashed || c.Sharding != nil && c.Sharding.GradComm > kernels.BF16 {
		panic("train: a number format, a dispatch or a way of rows that does not exist")
	}
	o := c.Optim
	if !(o.LR > 0) || !(o.MinLR >= 0) || o.WarmUp < 0 || o.Decay < 0 || !(o.Beta1 >= 0 && o.Beta1 < 1) || !(o.Beta2 >= 0 && o.Beta2 < 1) || !(o.Epsilon > 0) || !(o.Weights >= 0) || !(o.Clip >= 0) {
		return fmt.Errorf("train: the optimiser's settings %+v make no sense; rates and decay may not be negative, betas lie from 0 to below 1, lr and epsilon above 0", o)
	}
	return c.Memory.check(c)
}

func (c *Config) checkBatch() error {
	shape := layer.Shape{Batch: c.Batch.Micro, Seq: c.Batch.Seq}
	if err := shape.Check(); err != nil {
		return err
	}
	if c.Batch.Seq > c.Model.MaxPositions && c.Model.MaxPositions > 0 {
		return fmt.Errorf("train: sequences of %d tokens are longer than the %d that %s has positions for; give a shorter --seq", c.Batch.Seq, c.Model.MaxPositions, c.Model.Name)
	}
	for _, l := range layer.Layers(c.Model) {
		// Tables of rows count in 32 bits.
		if m := l.MoE; m != nil && shape.Tokens()*m.TopK*c.Layout.EP >= 1<<31 {
			return fmt.Errorf("train: %d tokens that each use %d experts of %d ranks make too many rows for a microbatch; give fewer or shorter sequences", shape.Tokens(), m.TopK, c.Layout.EP)
		}
	}
	return nil
}

func (c *Config) checkLayout() error {
	l, layers := c.Layout, len(c.Model.Layers)
	switch {
	case l.PP < 1 || l.VPP < 1 || l.EP < 1 || l.DP < 1 || c.Batch.Microbatches < 1:
		return fmt.Errorf("train: pp %d, vpp %d, ep %d, dp %d and %d microbatches; each must be at least 1", l.PP, l.VPP, l.EP, l.DP, c.Batch.Microbatches)
	case l.DP%l.EP != 0:
		return fmt.Errorf("train: %d data-parallel ranks cannot be divided into groups of %d expert ranks; make --dp a multiple of --ep", l.DP, l.EP)
	case layers%(l.PP*l.VPP) != 0:
		return fmt.Errorf("train: %d layers cannot be divided over %d stages (pp %d x vpp %d); choose a --pp and --vpp that divide them", layers, l.PP*l.VPP, l.PP, l.VPP)
	case l.Ranks() > 64:
		return fmt.Errorf("train: %d ranks in one process; at most 64 are run", l.Ranks())
	}
	for _, x := range layer.Layers(c.Model) {
		if x.MoE != nil && x.MoE.Experts%l.EP != 0 {
			return fmt.Errorf("train: %d experts cannot be divided over %d ranks; choose an --ep that divides them", x.MoE.Experts, l.EP)
		}
	}
	if l.EP > 1 && !c.hasExperts() {
		return fmt.Errorf("train: %s has no experts to divide over %d ranks; leave --ep out, or use --dp", c.Model.Name, l.EP)
	}
	p := schedule.Pipeline{Ranks: l.PP, Chunks: l.VPP, Microbatches: c.Batch.Microbatches}
	if _, err := p.Passes(0); err != nil {
		return fmt.Errorf("train: %d microbatches do not fit pp %d and vpp %d: %w", c.Batch.Microbatches, l.PP, l.VPP, err)
	}
	return nil
}

func (c *Config) hasExperts() bool {
	return slices.ContainsFunc(layer.Layers(c.Model), func(l model.Layer) bool { return l.MoE != nil })
}
