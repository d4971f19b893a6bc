// This file owns the way from options to the settings of a trainer. Everything is
// checked before a device is opened or a file is written.

package run

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/stowage-dev/stowage"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/profile"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train"
	"github.com/stowage-dev/stowage/train/internal/data"
	"github.com/stowage-dev/stowage/train/internal/disk"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// Machine holds what a run needs from the program that starts it.
type Machine struct {
	// Open opens the device of a rank. The device reports what it does to watch, which
	// may be nil.
	Open func(rank int, watch device.Observer) (device.Device, error)
	// Command and Version describe the program; a run's folder records them.
	Command, Version string
	// Process says which ranks live in this process, and how they reach the others. Nil
	// runs all of them here.
	Process *comm.Process
	// Offset is what must be added to this machine's clock to get that of rank 0, and Within
	// the most by which it may be wrong.
	Offset, Within time.Duration
	// Run names what the processes do together, the same in all of them. Traces carry it.
	Run string
	// DryRun says that jobs are only forecast, which any number of ranks can be.
	DryRun bool
}

// Job is a run, or a comparison of runs, whose options were checked.
type Job struct {
	Options Options // with the sizes that the model chose
	NoTrace bool    // leave traces out of the folder
	// Profile, unless it is nil, profiles the last steps of a run. It must wrap the devices
	// that Machine.Open opens.
	Profile *profile.Profiler
	// ForecastAll calls OnForecast, unless it is nil, with the number of policies that
	// are done and the number of all.
	OnForecast func(done, all int)
	config     train.Config
	machine    Machine
	traced     int                    // how many times the ranks were made to trace
	share      float64                // the budget of a comparison, as a share of what the first policy took
	batches    int                    // of an evaluation
	fs         disk.FS                // that folders are on; nil is that of the operating system
	final      func(*contestant) bool // whether the plans of a policy are final; nil asks its runtimes
}

// NewJob checks options. Options without a policy make a comparison of all policies. It
// returns an *InputError if they cannot be used. Warnings go to log.
func NewJob(o Options, m Machine, log *slog.Logger) (*Job, error) {
	j := &Job{Options: o, machine: m, share: 0.5}
	if err := j.configure(log); err != nil {
		return nil, beforeStart(err)
	}
	return j, nil
}

// configure makes the settings of the trainer.
func (j *Job) configure(log *slog.Logger) (err error) {
	o, m := &j.Options, j.machine
	if err := o.check(); err != nil {
		return err
	}
	c := &j.config
	if c.Model, c.Settings, err = o.Model.resolve(); err != nil {
		return err
	}
	if log != nil {
		for _, note := range c.Model.Notes {
			log.Warn(note)
		}
		if names := o.Model.unused(); len(names) > 0 {
			log.Warn("the trainer does not use " + strings.Join(names, ", ") + " of the model")
		}
	}
	o.chooseLayout(c.Model)
	c.Layout = train.Layout{PP: o.PP, VPP: o.VPP, EP: o.EP, DP: o.DP}
	c.Batch = train.Batch{Micro: o.Micro, Seq: o.Seq, Microbatches: o.Microbatches}
	c.Optim = train.DefaultOptim()
	c.Optim.LR, c.Optim.MinLR, c.Optim.WarmUp, c.Optim.Decay = o.LR, o.MinLR, o.WarmUp, o.Decay
	c.Optim.Beta1, c.Optim.Beta2, c.Optim.WeightDecay, c.Optim.Clip = o.Beta1, o.Beta2, o.WeightDecay, o.Clip
	r := &c.Settings.Routing
	r.Capacity, r.BiasRate = o.Capacity, float32(o.BiasRate)
	if o.AuxLoss != nil {
		r.Balance = float32(*o.AuxLoss)
	} else if hasBias(c.Model) {
		r.Balance = 0 // the bias replaces the loss
	}
	if o.BF16 {
		c.Number = kernels.BF16
	}
	c.Dispatch = map[string]layer.Dispatch{"ring": layer.Ring}[o.Dispatch]
	c.Seed, c.Log, c.Process, c.DryRun = o.Seed, log, m.Process, m.DryRun
	c.Device = func(rank int) (device.Device, error) { return m.Open(rank, nil) }
	if c.Sharding, err = o.sharding(); err != nil {
		return err
	}
	if c.Memory, err = o.memory(); err != nil {
		return err
	}
	if c.Text, err = data.Open(o.Data); err != nil {
		return blame("Data", err)
	}
	if o.Data != "" {
		if o.Data, err = filepath.Abs(o.Data); err != nil {
			return err
		}
	}
	if err := c.Check(); err != nil {
		return err
	}
	if log != nil {
		for _, text := range o.idle(c) {
			log.Warn(text)
		}
	}
	return j.splitText()
}

// idle says which options change nothing with this model and policy.
func (o *Options) idle(c *train.Config) (texts []string) {
	experts := slices.ContainsFunc(c.Model.Layers, func(l model.Layer) bool { return l.MoE != nil })
	dense := slices.ContainsFunc(c.Model.Layers, func(l model.Layer) bool { return l.Dense != nil })
	for _, x := range []struct {
		given bool
		what  string
	}{
		{o.Capacity > 0 && !experts, "the capacity factor changes nothing, because " + c.Model.Name + " has no experts"},
		{o.AuxLoss != nil && *o.AuxLoss > 0 && !experts, "the auxiliary loss changes nothing, because " + c.Model.Name + " has no experts"},
		{o.Dispatch != DefaultOptions().Dispatch && !experts, "the dispatch changes nothing, because " + c.Model.Name + " has no experts"},
		{o.Dispatch != DefaultOptions().Dispatch && experts && o.EP == 1, "the dispatch changes nothing, because one rank has all experts"},
		{slices.Contains(o.Graph, memory.MLP.String()) && !dense, "the scope mlp captures nothing, because " + c.Model.Name + " has no dense layers"},
		{slices.Contains(o.Graph, memory.MoERouter.String()) && !experts, "the scope moe_router captures nothing, because " + c.Model.Name + " has no experts"},
		{slices.Contains(o.Graph, memory.MoE.String()) && !experts, "the scope moe captures nothing, because " + c.Model.Name + " has no experts"},
		{o.BiasRate != DefaultOptions().BiasRate && !hasBias(c.Model), "the rate of the bias changes nothing, because no bias balances the experts of " + c.Model.Name},
		{o.Policy == "graphs" && c.Memory.Scopes == 0, "the policy graphs captures nothing, because no scope is chosen"},
		{strings.HasPrefix(o.Policy, "offload") && o.Fraction == 1 && len(c.Memory.Offload) == 0, "the policy " + o.Policy + " offloads nothing, because no module is chosen"},
		{o.Policy != "" && o.Fraction != 1 && len(c.Memory.Offload) == 0, "the share to offload changes nothing, because no module is chosen for offloading"},
	} {
		if x.given {
			texts = append(texts, x.what)
		}
	}
	return texts
}

// mostEvaluated limits the batches of an evaluation. The loss of a few batches is steady
// enough to be watched, and each takes about a third of a step.
const mostEvaluated = 4

// splitText holds the end of the text out, and checks that both parts are long enough.
func (j *Job) splitText() (err error) {
	o, c := &j.Options, &j.config
	cut := data.LoaderConfig{
		Seq: o.Seq, Micro: o.Micro, Microbatches: o.Microbatches, Ranks: o.DP, Targets: layer.Ahead(c.Model), Seed: o.Seed,
	}
	if o.HoldOut == 0 {
		if _, err = data.NewLoader(c.Text, cut); err != nil {
			return blame("Data", err)
		}
		return nil
	}
	share := fmt.Sprintf("%g", o.HoldOut)
	if c.Text, c.HeldOut, err = c.Text.Split(o.HoldOut); err != nil {
		return blame("HoldOut", err)
	}
	if c.HeldOut == nil {
		return refuse("HoldOut", share, "of "+c.Text.Name()+" is less than a byte", "hold out more")
	}
	if _, err = data.NewLoader(c.Text, cut); err != nil {
		return &memory.SettingError{Setting: "HoldOut", Asked: share, Err: fmt.Errorf("the rest is too little to train on: %w", err)}
	}
	held, err := data.NewLoader(c.HeldOut, cut)
	if err != nil {
		return &memory.SettingError{Setting: "HoldOut", Asked: share, Err: fmt.Errorf("that is too little to evaluate on: %w", err)}
	}
	j.batches = min(mostEvaluated, max(1, held.Windows()*o.Seq/held.TokensPerStep()))
	return nil
}

// mostCapacity limits the capacity factor, so that rows can be counted.
const mostCapacity = 1 << 20

// check returns an error if a single option is out of range.
func (o *Options) check() error {
	const most = 1 << 24
	for _, x := range []struct {
		setting       string
		value, lo, hi int
	}{
		{"Steps", o.Steps, 1, most}, {"PP", o.PP, 0, most}, {"VPP", o.VPP, 0, most}, {"EP", o.EP, 0, most}, {"DP", o.DP, 0, most},
		{"Micro", o.Micro, 1, data.Most}, {"Seq", o.Seq, 1, data.Most}, {"Microbatches", o.Microbatches, 1, data.Most},
		{"Prefetch", o.Prefetch, 1, most}, {"WarmUp", o.WarmUp, 0, most}, {"Decay", o.Decay, 0, most},
		{"SaveEvery", o.SaveEvery, 0, most}, {"Keep", o.Keep, 1, most}, {"EvalEvery", o.EvalEvery, 0, most},
	} {
		if x.value < x.lo || x.value > x.hi {
			if strings.HasSuffix(x.setting, "P") { // 0 ranks stand for those that the model suits
				x.lo = 1
			}
			return refuse(x.setting, fmt.Sprint(x.value), "is out of range", fmt.Sprintf("give a number from %d to %d", x.lo, x.hi))
		}
	}
	for _, x := range []struct {
		setting, remedy string
		value, most     float64
	}{
		{"LR", "give a number above 0 and up to 3e38, such as 0.003", o.LR, math.MaxFloat32}, {"MinLR", "give a number from 0 to 3e38", o.MinLR, math.MaxFloat32},
		{"WeightDecay", "give a number from 0 to 3e38, such as 0.1", o.WeightDecay, math.MaxFloat32}, {"Clip", "give a number from 0 to 3e38, such as 1", o.Clip, math.MaxFloat32},
		{"Capacity", fmt.Sprintf("give a number above 0 and up to %d, or leave it out for no limit", mostCapacity), o.Capacity, mostCapacity},
		{"BiasRate", "give a number from 0 to 3e38, such as 0.001", o.BiasRate, math.MaxFloat32}, {"Fraction", "give a share from 0 to 1", o.Fraction, 1},
	} {
		if !(x.value >= 0 && x.value <= x.most) || x.setting == "LR" && float32(x.value) == 0 { // which updates nothing
			return refuse(x.setting, fmt.Sprintf("%g", x.value), "is out of range", x.remedy)
		}
	}
	switch {
	case !(o.HoldOut >= 0 && o.HoldOut < 1):
		return refuse("HoldOut", fmt.Sprintf("%g", o.HoldOut), "is out of range", "give a share from 0 to below 1, such as 0.1")
	case o.EvalEvery > 0 && o.HoldOut == 0:
		return refuse("EvalEvery", fmt.Sprint(o.EvalEvery), "has nothing to evaluate on", "hold out a share of the text too, such as 0.1")
	}
	for _, x := range []struct {
		setting string
		value   float64
	}{{"Beta1", o.Beta1}, {"Beta2", o.Beta2}} {
		if !(x.value >= 0 && x.value < 1) {
			return refuse(x.setting, fmt.Sprintf("%g", x.value), "is out of range", "give a number from 0 to below 1")
		}
	}
	if o.AuxLoss != nil && !(*o.AuxLoss >= 0 && *o.AuxLoss <= math.MaxFloat32) {
		return refuse("AuxLoss", fmt.Sprintf("%g", *o.AuxLoss), "is out of range", "give a number from 0 to 3e38, such as 0.01")
	}
	for _, x := range []struct{ setting, value, choices string }{
		{"Dispatch", o.Dispatch, "alltoall or ring"}, {"GradComm", o.GradComm, "fp32 or bf16"},
	} {
		if a, b, _ := strings.Cut(x.choices, " or "); x.value != a && x.value != b {
			return refuse(x.setting, x.value, "is unknown", "choose "+x.choices)
		}
	}
	return nil
}

// chooseLayout fills in the sizes that were not given: two pipeline stages if they divide
// the layers, and two replicas that divide the experts, if there are any.
func (o *Options) chooseLayout(m *model.Model) {
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

// hasBias reports whether a bias balances the load of the model's experts.
func hasBias(m *model.Model) bool {
	for _, l := range m.Layers {
		if l.MoE != nil && l.MoE.Bias {
			return true
		}
	}
	return false
}

// sharding returns the settings of sharded parameters, or nil without a pool.
func (o *Options) sharding() (*train.Sharding, error) {
	if o.Pool == "" {
		return nil, nil
	}
	kind, err := bucket.ParsePoolKind(o.Pool)
	if err != nil {
		return nil, blame("Pool", err)
	}
	s := &train.Sharding{Pool: kind, Prefetch: o.Prefetch}
	if o.GradComm == "bf16" {
		s.GradComm = kernels.BF16
	}
	return s, nil
}

// memory returns the policy, changed by the options that stand beside its name.
func (o *Options) memory() (mem train.Memory, err error) {
	budget := memory.Bytes(0)
	if o.Budget != "" {
		if budget, err = memory.ParseBytes(o.Budget); err != nil {
			return mem, blame("Budget", err)
		}
	}
	if o.Policy == "" { // a comparison has them all
		return train.Memory{Fraction: 1}, nil
	}
	if mem, err = train.NamedMemory(o.Policy, budget); err != nil {
		return mem, err
	}
	mem.Fraction = o.Fraction
	if o.Offload != nil {
		mem.Offload = o.Offload
	}
	if o.Recompute != nil {
		mem.Recompute = o.Recompute
	}
	if o.Stash != nil {
		mem.Stash = o.Stash
	}
	if o.Graph != nil {
		if mem.Scopes, err = memory.ParseScopes(strings.Join(o.Graph, ",")); err != nil {
			return mem, blame("Graph", err)
		}
	}
	h := policy.Defaults()
	h.OffloadModules, h.RecomputeModules, h.StashModules, h.OffloadFraction = mem.Offload, mem.Recompute, mem.Stash, mem.Fraction
	return mem, h.Check() // before a runtime does
}

// measureLinks measures the rates of the links once for all ranks and runs. It opens a
// device of its own, so that the memory it needs is not counted as a run's. If one process
// cannot, all return its error.
func (j *Job) measureLinks() (links memory.Links, err error) {
	p, rank := j.machine.Process, 0
	if p != nil {
		rank = p.Ranks[0]
	}
	dev, err := j.config.Device(rank)
	if err == nil {
		links, err = stowage.MeasureLinks(dev)
		err = errors.Join(err, dev.Close())
	}
	return links, p.Share(nil, err)
}
