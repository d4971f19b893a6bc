// Package train trains decoder models on pipeline stages, expert ranks and data-parallel
// replicas, with whole or sharded parameters. Ranks live in one process or in several. Each rank
// has its own device and its own memory runtime. The runtime decides where saved
// tensors live, and the trained parameters do not depend on that decision.
//
// Fill in a [Config], open a [Trainer] with [New], and call [Trainer.Step] once for each
// step. [Forecast] returns the memory that a run needs without training it. Package
// train/run does all of this from options, with a folder to resume from.
package train

// This file owns the configuration. memory.go owns the memory policies, pipeline.go the
// order of a rank's work, rank.go a rank, step.go its steps, store.go and sharded.go its
// parameters, optim.go the optimiser, trainer.go the trainer of all ranks, state.go and load.go
// checkpoints, and agree.go the way in which ranks agree.
//
// The trainer drives internal/engine and not the root package, because it predicts runs
// from recorded profiles, sizes pages by routing, reports the reasons of the solver, and
// passes the engine's tensors to kernels. The root package is for training loops that
// need none of that.

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/data"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// Config describes a training run. Model, Text and Device must be set.
type Config struct {
	Model    *model.Model   // the decoder model to train
	Settings layer.Settings // settings of the layers that the model does not fix
	Number   kernels.Number // the format of activations and of the parameters that passes read
	Layout   Layout         // how ranks share the work
	Batch    Batch          // the size of a step
	Optim    Optim          // the optimiser's settings
	Memory   Memory         // the memory policy
	Sharding *Sharding      // how parameters are sharded; nil keeps them whole on every rank
	Dispatch layer.Dispatch // how rows travel between expert ranks
	Seed     uint64         // the seed of the first parameters and of the order of the text
	Text     *data.Text     // the text to train on
	HeldOut  *data.Text     // the text that Evaluate uses; nil if nothing is held out

	// Imbalance is what a forecast assumes about routing: the rows of the fullest expert
	// rank divided by the mean. Zero selects the imbalance that the planner expects
	// without forced balance. A run ignores it and counts its rows.
	Imbalance float64
	// Effort is the part of its usual search that the solver of budgets may take. Zero means
	// all, as far as that can pay within a few steps.
	Effort float64
	// DryRun lets Check accept more ranks than a process can open. Forecast takes them, and
	// New does not.
	DryRun    bool
	forecast  bool // the devices compute nothing
	everyRank bool // a forecast opens every rank, and not one of each stage

	// Process says which ranks live in this process, and how they reach the others. Nil
	// runs all ranks in this process.
	Process *comm.Process
	// Device opens the device of a rank. The trainer closes it.
	Device func(rank int) (device.Device, error)
	// Measure opens a device to measure the link rates on. The trainer closes it after
	// the measurement, before the run starts. Nil opens the first rank's device for it.
	Measure func() (device.Device, error)
	// Log receives the messages of the run; nil discards them.
	Log *slog.Logger
	// Trace returns the sink for the trace of a rank; nil writes no trace.
	Trace func(rank int) trace.Sink
}

// Layout describes how ranks share the work. A run has PP x DP ranks, and EP divides DP.
type Layout struct {
	PP  int `json:"pp"`  // pipeline ranks
	VPP int `json:"vpp"` // chunks (virtual pipeline stages) of each pipeline rank
	EP  int `json:"ep"`  // expert ranks: the data-parallel ranks that the experts are divided over
	DP  int `json:"dp"`  // data-parallel ranks
}

// Ranks returns the number of ranks.
func (l Layout) Ranks() int { return l.PP * l.DP }

// The most ranks of a run in one process, and of a forecast.
const (
	mostRanks    = 64
	mostForecast = 1 << 16
)

// span returns the layers [from, to) of a stage; there are PP x VPP stages. If the stages
// do not divide the layers, some have one more: the second and those after it, because the
// first stage has the embedding, and the last one the loss and multi-token-prediction heads.
func (c *Config) span(stage int) (from, to int) {
	stages := c.Layout.PP * c.Layout.VPP
	each, more := len(c.Model.Layers)/stages, len(c.Model.Layers)%stages
	begin := func(s int) int { return s*each + min(max(0, s-1), more) }
	return begin(stage), begin(stage + 1)
}

// Batch describes the work of one step on each data-parallel rank.
type Batch struct {
	Micro        int `json:"micro"`        // sequences in a microbatch
	Seq          int `json:"seq"`          // tokens in a sequence
	Microbatches int `json:"microbatches"` // microbatches in a step
}

// Tokens returns the number of tokens that one step trains on, over all ranks.
func (c *Config) Tokens() int {
	return c.Layout.DP * c.Batch.Microbatches * c.Batch.Micro * c.Batch.Seq
}

// Optim holds the settings of the optimiser: AdamW with a linear warm-up and a cosine
// decay of the learning rate.
type Optim struct {
	LR          float64 `json:"lr"`      // the learning rate after the warm-up
	MinLR       float64 `json:"min_lr"`  // the learning rate at the end of the decay
	WarmUp      int     `json:"warm_up"` // steps of the warm-up
	Decay       int     `json:"decay"`   // the step at which the rate reaches MinLR; zero keeps LR
	Beta1       float64 `json:"beta1"`
	Beta2       float64 `json:"beta2"`
	Epsilon     float64 `json:"epsilon"`
	WeightDecay float64 `json:"weight_decay"`
	Clip        float64 `json:"clip"` // the largest norm of all gradients; zero does not clip
}

// DefaultOptim returns settings that suit the tiny models.
func DefaultOptim() Optim {
	return Optim{LR: 3e-3, MinLR: 3e-4, WarmUp: 20, Beta1: 0.9, Beta2: 0.95, Epsilon: 1e-8, WeightDecay: 0.1, Clip: 1}
}

// rate returns the learning rate of a step. Steps count from zero.
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

// Sharding describes how parameters, gradients and optimiser state are sharded over the
// data-parallel ranks (ZeRO-3).
type Sharding struct {
	Pool     bucket.PoolKind // how buckets get the memory that they are gathered into
	Prefetch int             // how many FSDP units are gathered ahead of need
	GradComm kernels.Number  // the format in which gradients are written and reduced
}

// Check returns an error if the run cannot be trained. The error names the setting that
// is wrong and says what to do.
func (c *Config) Check() error {
	if c.Model == nil || c.Text == nil || c.Device == nil {
		return errors.New("train: Config lacks Model, Text or Device; set all of them")
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
		return refuse("Model", c.Model.Name, fmt.Sprintf("has a vocabulary of %d", c.Model.Vocab), "choose a model with at least 256, one for each byte")
	}
	if err := c.Settings.Check(); err != nil {
		return err
	}
	if c.Number > kernels.BF16 || c.Dispatch > layer.Ring || c.Memory.Rows > layer.Stashed || c.Sharding != nil && c.Sharding.GradComm > kernels.BF16 {
		panic("train: unknown number format, dispatch or row memory in Config")
	}
	if err := c.Optim.check(); err != nil {
		return err
	}
	return c.Memory.check(c)
}

// check returns an error that names the first setting that is out of range. Parameters
// and moments are in fp32, so nothing may be larger than that format holds.
func (o Optim) check() error {
	const most = math.MaxFloat32
	for _, x := range []struct {
		name, remedy string
		value        float64
		ok           bool
	}{
		{"LR", "give a number above 0 that fits fp32, such as 0.003", o.LR, o.LR > 0 && o.LR <= most},
		{"MinLR", "give a number from 0 that fits fp32", o.MinLR, o.MinLR >= 0 && o.MinLR <= most},
		{"WarmUp", "give 0 or more steps", float64(o.WarmUp), o.WarmUp >= 0},
		{"Decay", "give 0 or more steps", float64(o.Decay), o.Decay >= 0},
		{"Beta1", "give a number from 0 to below 1", o.Beta1, o.Beta1 >= 0 && o.Beta1 < 1},
		{"Beta2", "give a number from 0 to below 1", o.Beta2, o.Beta2 >= 0 && o.Beta2 < 1},
		{"Epsilon", "give a number above 0", o.Epsilon, o.Epsilon > 0 && o.Epsilon <= most},
		{"WeightDecay", "give a number from 0 that fits fp32", o.WeightDecay, o.WeightDecay >= 0 && o.WeightDecay <= most},
		{"Clip", "give a number from 0 that fits fp32", o.Clip, o.Clip >= 0 && o.Clip <= most},
	} {
		if !x.ok {
			return refuse("Optim."+x.name, fmt.Sprintf("%g", x.value), "is out of range", x.remedy)
		}
	}
	return nil
}

// refuse returns an error about a setting.
func refuse(setting, asked, problem, remedy string) error {
	return &memory.SettingError{Setting: setting, Asked: asked, Problem: problem, Remedy: remedy}
}

func (c *Config) checkBatch() error {
	shape := layer.Shape{Batch: c.Batch.Micro, Seq: c.Batch.Seq}
	if shape.Check() != nil {
		return refuse("Batch.Micro", fmt.Sprint(c.Batch.Micro), fmt.Sprintf("makes a microbatch of %d tokens, and 2^30 is the most", shape.Tokens()), "give fewer or shorter ones")
	}
	if c.Batch.Seq > c.Model.MaxPositions && c.Model.MaxPositions > 0 {
		return refuse("Batch.Seq", fmt.Sprint(c.Batch.Seq), fmt.Sprintf("is more than the %d positions of %s", c.Model.MaxPositions, c.Model.Name), "give shorter sequences")
	}
	for _, l := range layer.Layers(c.Model) {
		// Tables of rows count in 32 bits.
		if m := l.MoE; m != nil && shape.Tokens()*m.TopK*c.Layout.EP >= 1<<31 {
			return refuse("Batch.Micro", fmt.Sprint(c.Batch.Micro), fmt.Sprintf("makes too many rows: %d tokens go to %d experts each on %d ranks", shape.Tokens(), m.TopK, c.Layout.EP), "give fewer or shorter sequences")
		}
	}
	return nil
}

func (c *Config) checkLayout() error {
	l, layers := c.Layout, len(c.Model.Layers)
	const most = 1 << 24 // products of them must not overflow
	for _, x := range []struct {
		setting   string
		value, hi int
	}{
		{"Layout.PP", l.PP, most}, {"Layout.VPP", l.VPP, most}, {"Layout.EP", l.EP, most}, {"Layout.DP", l.DP, most},
		{"Batch.Micro", c.Batch.Micro, data.Most}, {"Batch.Seq", c.Batch.Seq, data.Most}, {"Batch.Microbatches", c.Batch.Microbatches, data.Most},
	} {
		if x.value < 1 || x.value > x.hi {
			return refuse(x.setting, fmt.Sprint(x.value), "is out of range", fmt.Sprintf("give a number from 1 to %d", x.hi))
		}
	}
	switch {
	case l.DP%l.EP != 0:
		return refuse("Layout.DP", fmt.Sprint(l.DP), fmt.Sprintf("is no multiple of the %d expert ranks", l.EP), "give a multiple")
	case layers < l.PP*l.VPP:
		return refuse("Layout.PP", fmt.Sprint(l.PP), fmt.Sprintf("makes %d stages (pp %d x vpp %d), and %s has %d layers", l.PP*l.VPP, l.PP, l.VPP, c.Model.Name, layers), "choose at most as many stages as layers")
	case l.VPP > 1 && l.PP == 1:
		return refuse("Layout.VPP", fmt.Sprint(l.VPP), "interleaves chunks, which needs at least two pipeline ranks", "use more pipeline ranks, or one chunk")
	case l.Ranks() > mostRanks && c.Process == nil && !c.DryRun:
		return refuse("Layout.DP", fmt.Sprint(l.DP), fmt.Sprintf("on %d pipeline ranks makes %d ranks", l.PP, l.Ranks()), fmt.Sprintf("use at most %d ranks in one process", mostRanks))
	case l.Ranks() > mostForecast:
		return refuse("Layout.DP", fmt.Sprint(l.DP), fmt.Sprintf("on %d pipeline ranks makes %d ranks", l.PP, l.Ranks()), fmt.Sprintf("use at most %d ranks", mostForecast))
	}
	for _, x := range layer.Layers(c.Model) {
		if x.MoE != nil && x.MoE.Experts%l.EP != 0 {
			return refuse("Layout.EP", fmt.Sprint(l.EP), fmt.Sprintf("does not divide the %d experts of %s", x.MoE.Experts, c.Model.Name), "choose a divisor")
		}
	}
	if l.EP > 1 && !c.hasExperts() {
		return refuse("Layout.EP", fmt.Sprint(l.EP), fmt.Sprintf("has no experts of %s to divide", c.Model.Name), "use 1, and more data-parallel ranks if you want")
	}
	p := schedule.Pipeline{Ranks: l.PP, Chunks: l.VPP, Microbatches: c.Batch.Microbatches}
	if _, err := p.Passes(0); err != nil {
		return &memory.SettingError{Setting: "Layout.VPP", Asked: fmt.Sprint(l.VPP), Err: err}
	}
	return nil
}

// here returns the ranks of this process: all of them if there is one process, or the
// first of each stage in a forecast.
func (c *Config) here() (ranks []int) {
	if c.Process != nil {
		return c.Process.Ranks
	}
	by := 1
	if c.forecast && !c.everyRank {
		by = c.Layout.DP
	}
	for r := 0; r < c.Layout.Ranks(); r += by {
		ranks = append(ranks, r)
	}
	return ranks
}

func (c *Config) hasExperts() bool {
	return slices.ContainsFunc(layer.Layers(c.Model), func(l model.Layer) bool { return l.MoE != nil })
}
