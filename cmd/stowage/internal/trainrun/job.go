// This file owns the way from options to a trainer: every word is checked before
// anything is opened or written.

package trainrun

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"path/filepath"
	"strings"

	"github.com/stowage-dev/stowage"
	"github.com/stowage-dev/stowage/bucket"
	"github.com/stowage-dev/stowage/capture"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/kernels"
	"github.com/stowage-dev/stowage/model"
	"github.com/stowage-dev/stowage/policy"
	"github.com/stowage-dev/stowage/train"
	"github.com/stowage-dev/stowage/train/data"
	"github.com/stowage-dev/stowage/train/layer"
)

// Machine is what a command brings along: devices, and the reading of sizes.
type Machine struct {
	// Open opens the device of a rank, which tells the observer, if there is one, what
	// it does.
	Open func(rank int, watch device.Observer) (device.Device, error)
	// ParseSize reads a size such as 60MiB.
	ParseSize func(string) (device.Bytes, error)
	// Command and Version are those of the program, for whoever finds the run.
	Command, Version string
}

// Job is a run that was checked.
type Job struct {
	Options Options // complete: with what was chosen by the model
	Trace   bool    // what ranks do is traced where there is a folder
	config  train.Config
	machine Machine
	share   float64 // of what the first policy took: the budget of a comparison
	batches int     // of an evaluation
}

// NewJob checks options and makes a job of them. Without a policy they are those of a
// comparison.
func NewJob(o Options, m Machine, log *slog.Logger) (*Job, error) {
	j := &Job{Options: o, Trace: true, machine: m, share: 0.5}
	if err := j.make(m, log); err != nil {
		return nil, wrong(err)
	}
	return j, nil
}

func (j *Job) make(m Machine, log *slog.Logger) (err error) {
	o := &j.Options
	if err := o.check(); err != nil {
		return err
	}
	c := &j.config
	if c.Model, c.Settings, err = o.Model.resolve(); err != nil {
		return err
	}
	if names := o.Model.unused(); len(names) > 0 && log != nil {
		log.Warn("the trainer does not use " + strings.Join(names, ", ") + " of the model")
	}
	o.choose(c.Model)
	c.Layout = train.Layout{PP: o.PP, VPP: o.VPP, EP: o.EP, DP: o.DP}
	c.Batch = train.Batch{Micro: o.Micro, Seq: o.Seq, Microbatches: o.Microbatches}
	c.Optim = train.DefaultOptim()
	c.Optim.LR, c.Optim.MinLR, c.Optim.WarmUp, c.Optim.Decay = o.LR, o.MinLR, o.WarmUp, o.Decay
	c.Optim.Beta1, c.Optim.Beta2, c.Optim.Weights, c.Optim.Clip = o.Beta1, o.Beta2, o.WeightDecay, o.Clip
	r := &c.Settings.Routing
	r.Capacity, r.BiasRate = o.Capacity, float32(o.BiasRate)
	if o.AuxLoss != nil {
		r.Balance = float32(*o.AuxLoss)
	} else if balanced(c.Model) {
		r.Balance = 0 // the bias is there so that no loss need be
	}
	if o.BF16 {
		c.Number = kernels.BF16
	}
	c.Dispatch = map[string]layer.Dispatch{"ring": layer.Ring}[o.Dispatch]
	c.Seed, c.Log = o.Seed, log
	c.Device = func(rank int) (device.Device, error) { return m.Open(rank, nil) }
	if c.Sharding, err = o.sharding(); err != nil {
		return err
	}
	if c.Memory, err = o.memory(m); err != nil {
		return err
	}
	if c.Text, err = data.Open(o.Data); err != nil {
		return fmt.Errorf("--data: %w", err)
	}
	if o.Data != "" {
		if o.Data, err = filepath.Abs(o.Data); err != nil {
			return err
		}
	}
	if err := c.Check(); err != nil {
		return err
	}
	return j.cut()
}

// mostEvaluated is the most batches of an evaluation: the loss of a few is steady enough
// to be watched, and each takes about a third of a step.
const mostEvaluated = 4

// cut divides the text, and tries whether both parts are long enough.
func (j *Job) cut() (err error) {
	o, c := &j.Options, &j.config
	cut := data.LoaderConfig{
		Seq: o.Seq, Micro: o.Micro, Microbatches: o.Microbatches, Ranks: o.DP, Targets: layer.Ahead(c.Model), Seed: o.Seed,
	}
	if o.HoldOut == 0 {
		_, err = data.NewLoader(c.Text, cut)
		return err
	}
	if c.Text, c.HeldOut, err = c.Text.Split(o.HoldOut); err != nil {
		return fmt.Errorf("--hold-out: %w", err)
	}
	if c.HeldOut == nil {
		return fmt.Errorf("--hold-out %g of %s is less than a byte; hold out more", o.HoldOut, c.Text.Name())
	}
	if _, err = data.NewLoader(c.Text, cut); err != nil {
		return fmt.Errorf("--hold-out %g leaves too little: %w", o.HoldOut, err)
	}
	held, err := data.NewLoader(c.HeldOut, cut)
	if err != nil {
		return fmt.Errorf("--hold-out %g is too little: %w", o.HoldOut, err)
	}
	j.batches = min(mostEvaluated, max(1, held.Windows()*o.Seq/held.TokensPerStep()))
	return nil
}

// check refuses single words.
func (o *Options) check() error {
	for _, x := range []struct {
		flag      string
		value, lo int
	}{
		{"steps", o.Steps, 1}, {"pp", o.PP, 0}, {"vpp", o.VPP, 0}, {"ep", o.EP, 0}, {"dp", o.DP, 0}, {"micro", o.Micro, 1}, {"seq", o.Seq, 1},
		{"microbatches", o.Microbatches, 1}, {"prefetch", o.Prefetch, 1}, {"warm-up", o.WarmUp, 0}, {"decay", o.Decay, 0},
		{"save-every", o.SaveEvery, 0}, {"keep", o.Keep, 1}, {"eval-every", o.EvalEvery, 0},
	} {
		if x.value < x.lo || x.value > 1<<24 {
			return fmt.Errorf("--%s %d must lie between %d and %d", x.flag, x.value, x.lo, 1<<24)
		}
	}
	for _, x := range []struct {
		flag     string
		value    float64
		positive bool
	}{
		{"lr", o.LR, true}, {"min-lr", o.MinLR, false}, {"weight-decay", o.WeightDecay, false}, {"clip", o.Clip, false},
		{"capacity-factor", o.Capacity, false}, {"bias-rate", o.BiasRate, false}, {"offload-fraction", o.Fraction, false},
	} {
		switch {
		case !(x.value >= 0) || math.IsInf(x.value, 0):
			return fmt.Errorf("--%s %g must be a number that is not negative", x.flag, x.value)
		case x.positive && x.value == 0:
			return fmt.Errorf("--%s %g must be above zero", x.flag, x.value)
		}
	}
	switch {
	case !(o.HoldOut >= 0 && o.HoldOut < 1):
		return fmt.Errorf("--hold-out %g must be a share from 0 to below 1, such as 0.1", o.HoldOut)
	case o.EvalEvery > 0 && o.HoldOut == 0:
		return fmt.Errorf("--eval-every %d has nothing to evaluate on; hold out a part of the text, such as --hold-out 0.1", o.EvalEvery)
	}
	for name, beta := range map[string]float64{"beta1": o.Beta1, "beta2": o.Beta2} {
		if !(beta >= 0 && beta < 1) {
			return fmt.Errorf("--%s %g must lie from 0 to below 1", name, beta)
		}
	}
	if o.AuxLoss != nil && !(*o.AuxLoss >= 0 && *o.AuxLoss < math.MaxFloat32) {
		return fmt.Errorf("--aux-loss %g must not be negative", *o.AuxLoss)
	}
	for _, x := range []struct{ flag, value, choices string }{
		{"dispatch", o.Dispatch, "alltoall or ring"}, {"grad-comm-dtype", o.GradComm, "fp32 or bf16"},
	} {
		if a, b, _ := strings.Cut(x.choices, " or "); x.value != a && x.value != b {
			return fmt.Errorf("--%s %s is unknown; choose %s", x.flag, x.value, x.choices)
		}
	}
	return nil
}

// choose fills in what the model decides: two pipeline stages, and two replicas that
// share out experts if there are any.
func (o *Options) choose(m *model.Model) {
	if o.VPP == 0 {
		o.VPP = 1
	}
	if o.PP == 0 {
		o.PP = 1
		if len(m.Layers)%(2*o.VPP) == 0 {
			o.PP = 2
		}
	}
	if o.DP == 0 {
		o.DP = max(2, o.EP)
	}
	if o.EP != 0 {
		return
	}
	o.EP = 1
	experts := 0
	for _, l := range m.Layers {
		if l.MoE != nil {
			experts = l.MoE.Experts
		}
	}
	if experts > 0 && experts%2 == 0 && o.DP%2 == 0 {
		o.EP = 2
	}
}

// balanced tells whether a bias balances the load of a model's experts.
func balanced(m *model.Model) bool {
	for _, l := range m.Layers {
		if l.MoE != nil && l.MoE.Bias {
			return true
		}
	}
	return false
}

func (o *Options) sharding() (*train.Sharding, error) {
	if o.Pool == "" {
		return nil, nil
	}
	kind, err := bucket.ParseKind(o.Pool)
	if err != nil {
		return nil, fmt.Errorf("--pool: %w", err)
	}
	s := &train.Sharding{Pool: kind, Prefetch: o.Prefetch}
	if o.GradComm == "bf16" {
		s.GradComm = kernels.BF16
	}
	return s, nil
}

// memory is the policy, with what is given beside its name.
func (o *Options) memory(m Machine) (mem train.Memory, err error) {
	budget := device.Bytes(0)
	if o.Budget != "" {
		if budget, err = m.ParseSize(o.Budget); err != nil {
			return mem, fmt.Errorf("--budget: %w", err)
		}
	}
	if o.Policy == "" { // a comparison has them all
		return train.Memory{Fraction: 1}, nil
	}
	if mem, err = train.Named(o.Policy, budget); err != nil {
		return mem, err
	}
	mem.Fraction = o.Fraction
	if o.Offload != nil {
		mem.Offload = o.Offload
	}
	if o.Recompute != nil {
		mem.Recompute = o.Recompute
	}
	if o.Graph != nil {
		if mem.Scopes, err = capture.Parse(strings.Join(o.Graph, ",")); err != nil {
			return mem, fmt.Errorf("--graph: %w", err)
		}
	}
	return mem, byHand(mem)
}

// byHand checks the names of modules before a runtime does.
func byHand(mem train.Memory) error {
	h := policy.Defaults()
	h.OffloadModules, h.RecomputeModules, h.OffloadFraction = mem.Offload, mem.Recompute, mem.Fraction
	if err := h.Check("qk_norm"); err != nil {
		text := err.Error()
		for _, list := range []string{"offload-modules", "recompute-modules", "activation-offload-fraction"} {
			text = strings.ReplaceAll(text, list, "--"+list)
		}
		return errors.New(strings.ReplaceAll(text, "--activation-offload-fraction", "--offload-fraction"))
	}
	return nil
}

// measure takes the rates of links once for all ranks and runs, on a device of its own:
// the memory that it needs is none of a run's.
func (j *Job) measure() (links policy.Links, err error) {
	dev, err := j.config.Device(0)
	if err != nil {
		return links, err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	return stowage.MeasureLinks(dev)
}
