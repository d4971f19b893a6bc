// This file owns the trainer, which runs the ranks of this process.

package train

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/stowage-dev/stowage"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train/internal/data"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// Trainer trains a model on all ranks of a run, or on those of this process. Its methods
// must not be called at the same time. All processes of a run call the same methods in the
// same order and get the same results. After a step has failed, Step, Evaluate and Save
// return its error.
type Trainer struct {
	cfg    *Config
	devs   []device.Device // of the ranks in this process
	world  []comm.Comm
	ranks  []*rank
	all    []status // of all ranks, if they live in several processes
	loader *data.Loader
	held   *data.Loader // reads Config.HeldOut; nil if that is nil
	step   int
	broken error // the error of a failed step, after which ranks may differ
}

// Metrics holds the results of one step.
type Metrics struct {
	Step      int       `json:"step"`
	Loss      float64   `json:"loss"`          // mean loss of the next token, in nats
	MTPLosses []float64 `json:"mtp,omitempty"` // losses of the multi-token-prediction heads
	Aux       float64   `json:"aux,omitempty"` // auxiliary losses of the routers, mean over microbatches
	Norm      float64   `json:"grad_norm"`     // norm of all gradients before clipping
	LR        float64   `json:"lr"`            // learning rate
	Seconds   float64   `json:"seconds"`       // duration of the step
	Tokens    int       `json:"tokens"`        // tokens of the step on all ranks
	Reruns    int       `json:"reruns"`        // reruns since the trainer was opened
	Device    int64     `json:"device_bytes"`  // device memory of the fullest rank after the step
	Host      int64     `json:"host_bytes"`    // host memory of the fullest rank after the step
}

// New opens the devices and runtimes of all ranks and initialises the parameters. It
// returns an error if Config.Check does, or if a device has too little memory. The caller
// must close the trainer.
func New(cfg Config) (t *Trainer, err error) {
	cfg.DryRun = cfg.forecast
	if err := cfg.Check(); err != nil {
		return nil, err
	}
	t = &Trainer{cfg: &cfg}
	defer func() {
		if err != nil {
			_ = t.Close() // a failed device returns the same error again
			t = nil
		}
	}()
	if err = t.openText(); err == nil {
		err = t.openDevices()
	}
	if err = t.alike(err); err != nil {
		return t, err
	}
	if err = t.alike(t.join()); err != nil {
		return t, err
	}
	t.ranks = make([]*rank, len(t.devs))
	_, err = t.together(func(i int) (f figures, err error) {
		t.ranks[i], err = newRank(t, t.world[i].Rank(), t.devs[i], t.world[i])
		if err != nil || cfg.forecast {
			return f, err
		}
		return f, t.ranks[i].begin()
	})
	return t, err
}

// openText makes the loaders.
func (t *Trainer) openText() (err error) {
	cfg := t.cfg
	cut := data.LoaderConfig{
		Seq: cfg.Batch.Seq, Micro: cfg.Batch.Micro, Microbatches: cfg.Batch.Microbatches, Ranks: cfg.Layout.DP,
		Targets: layer.Ahead(cfg.Model), Seed: cfg.Seed,
	}
	if t.loader, err = data.NewLoader(cfg.Text, cut); err != nil || cfg.HeldOut == nil {
		return err
	}
	t.held, err = data.NewLoader(cfg.HeldOut, cut)
	return err
}

// openDevices opens the devices of the ranks in this process and measures the links.
func (t *Trainer) openDevices() error {
	for _, rank := range t.cfg.here() {
		dev, err := t.cfg.Device(rank)
		if err != nil {
			return err
		}
		t.devs = append(t.devs, dev)
		if err := layer.Runs(t.cfg.Model, dev.Info()); err != nil {
			return err
		}
	}
	return t.measure()
}

// join makes the communicators of the ranks in this process.
func (t *Trainer) join() (err error) {
	p := t.cfg.Process
	switch {
	case p == nil && len(t.devs) < t.cfg.Layout.Ranks():
		return t.joinAlone()
	case p == nil:
		t.world, err = comm.NewLocal(t.devs, comm.Options{})
		return err
	}
	all, errs := make([]comm.Comm, len(p.Ranks)), make([]error, len(p.Ranks))
	var ranks sync.WaitGroup // they may wait for each other
	for i, rank := range p.Ranks {
		ranks.Go(func() { all[i], errs[i] = p.Join(rank, t.devs[i]) })
	}
	ranks.Wait()
	for _, c := range all {
		if c != nil {
			t.world = append(t.world, c)
		}
	}
	return errors.Join(errs...)
}

// joinAlone makes the communicators of a forecast. The rank that is opened of each stage
// stands for the others.
func (t *Trainer) joinAlone() (err error) {
	l := t.cfg.Layout
	devs, like := make([]device.Device, l.Ranks()), make([]int, l.Ranks())
	for i := range like {
		like[i] = i / l.DP * l.DP
	}
	for i, rank := range t.cfg.here() {
		devs[rank] = t.devs[i]
	}
	t.world, err = comm.NewPartial(devs, like)
	return err
}

// measure measures the link rates if the policy may offload. It uses a separate device,
// so that the run's ledgers do not count the memory of the measurement.
func (t *Trainer) measure() error {
	m := &t.cfg.Memory
	if m.Links != (memory.Links{}) || m.Budget == 0 && m.byHand() == nil {
		return nil
	}
	open := t.cfg.Measure
	if open == nil {
		open = func() (device.Device, error) { return t.cfg.Device(t.cfg.here()[0]) }
	}
	dev, err := open()
	if err != nil {
		return err
	}
	m.Links, err = stowage.MeasureLinks(dev)
	return errors.Join(err, dev.Close())
}

// begin initialises the parameters.
func (r *rank) begin() error {
	for u, unit := range r.units {
		for i, p := range unit.Params {
			if err := r.store.load(key{u, i}, p.Values(r.cfg.Seed, len(r.cfg.Model.Layers))); err != nil {
				return err
			}
		}
	}
	return nil
}

// each runs work on all ranks of this process at once. If a rank fails, the others stop waiting for it.
// If several ranks fail, each returns the error of the first.
func (t *Trainer) each(work func(i int) error) error {
	err := comm.Run(t.world, func(c comm.Comm) error { return work(slices.Index(t.world, c)) })
	for {
		several, ok := err.(interface{ Unwrap() []error })
		if !ok {
			return advised(err)
		}
		err = several.Unwrap()[0]
	}
}

// advised adds a remedy to err if a device ran out of memory.
func advised(err error) error {
	var oom *device.OutOfMemory
	switch {
	case !errors.As(err, &oom), oom.Refused != "": // which has a remedy of its own
		return err
	case oom.Kind == memory.Host:
		return fmt.Errorf("%w; give the machine more host memory, or offload less", err)
	}
	return fmt.Errorf("%w; use more ranks, shard the parameters, or choose a policy that keeps less", err)
}

// Step trains one step on all ranks and returns its metrics. It reruns the step with more
// room if rows of experts overflowed. Every later step returns the same error if one
// fails.
func (t *Trainer) Step() (Metrics, error) {
	if t.broken != nil {
		return Metrics{}, t.broken
	}
	began := time.Now()
	m := Metrics{Step: t.step, LR: t.cfg.Optim.rate(t.step), Tokens: t.cfg.Tokens()}
	all, err := t.together(func(i int) (f figures, err error) {
		r := t.ranks[i]
		if err = r.train(t.step); err != nil {
			return f, err
		}
		return r.read()
	})
	if err != nil {
		t.broken = err
		return m, err
	}
	for _, f := range all {
		m.Aux += f.Aux / float64(t.cfg.Layout.DP*t.cfg.Batch.Microbatches)
	}
	sums := addUp(all)
	m.Loss, m.MTPLosses, m.Norm = sums[0], sums[1:], all[0].Norm
	m.Seconds = time.Since(began).Seconds()
	m.Reruns = t.Reruns()
	m.Device, m.Host = inUse(t.Usage())
	t.step++
	return m, nil
}

// inUse returns what the fullest ranks hold, of each kind of memory.
func inUse(ranks []device.Usage) (dev, host int64) {
	for _, u := range ranks {
		dev, host = max(dev, int64(u.Kind[memory.Device].Current)), max(host, int64(u.Kind[memory.Host].Current))
	}
	return dev, host
}

// addUp adds the losses of all ranks in the order of the ranks, so that sums are
// reproducible.
func addUp(of []figures) []float64 {
	sums := make([]float64, len(of[0].Heads))
	for _, x := range of {
		for k := range sums {
			sums[k] += x.Heads[k]
		}
	}
	return sums
}

// Evaluate returns the mean loss of the current parameters on the first batches of
// Config.HeldOut, in nats per token, and the losses of the multi-token-prediction heads.
// A batch is as large as that of a step. Evaluate uses the same batches each time and
// changes no parameters, so later steps give the same results as without it. It returns
// an error if Config.HeldOut is nil or batches is below 1.
func (t *Trainer) Evaluate(batches int) (loss float64, mtp []float64, err error) {
	switch {
	case t.broken != nil:
		return 0, nil, t.broken
	case t.held == nil || batches < 1:
		return 0, nil, fmt.Errorf("train: expected at least one batch and a text in Config.HeldOut for an evaluation, got %d batches; hold out a part of the text", batches)
	}
	mean := make([]float64, layer.Ahead(t.cfg.Model))
	for b := range batches {
		all, err := t.together(func(i int) (figures, error) { return t.ranks[i].evaluate(b) })
		if err != nil {
			t.broken = err
			return 0, nil, err
		}
		for k, x := range addUp(all) {
			mean[k] += x / float64(batches)
		}
	}
	return mean[0], mean[1:], nil
}

// StepsDone returns the number of steps that the parameters were trained for, with those
// before Resume.
func (t *Trainer) StepsDone() int { return t.step }

// Reruns returns how many times a step was rerun since the trainer was opened.
func (t *Trainer) Reruns() (n int) {
	for _, s := range t.Summaries() {
		if s.Stash != nil {
			n = max(n, s.Stash.Reruns)
		}
	}
	return n
}

// Usage returns the memory use of each rank's device.
func (t *Trainer) Usage() []device.Usage {
	return known(t, func(r *rank) device.Usage { return r.dev.Memory() }, func(s *status) device.Usage { return s.Usage })
}

// Summaries returns the figures of each rank's runtime.
func (t *Trainer) Summaries() []memory.Summary {
	return known(t, func(r *rank) memory.Summary { return r.rt.Summary(r.key()) }, func(s *status) memory.Summary { return s.Summary })
}

// tensor is a parameter in host memory, or an expert's part of one.
type tensor struct {
	name string
	data []float32
}

// Digest returns the SHA-256 of all parameters in fp32, sorted by name. It does not depend
// on how the parameters are divided over ranks, so runs with equal parameters have equal
// digests.
func (t *Trainer) Digest() (string, error) {
	all := make([][]tensor, len(t.ranks))
	_, err := t.together(func(i int) (figures, error) {
		r := t.ranks[i]
		return figures{}, r.eachParam(func(k key, p layer.Param) error {
			x, err := r.store.read(k, nil)
			if err != nil || !r.writes(p) {
				return err
			}
			for _, q := range pieces(p) {
				all[i] = append(all[i], tensor{q.name, x[q.from : q.from+q.n]})
			}
			return nil
		})
	})
	if err != nil {
		return "", err
	}
	h, last := sha256.New(), ""
	err = t.eachTensor(slices.Concat(all...), func(name string, elements int, part []byte) {
		if name != last {
			fmt.Fprintf(h, "%s %d\n", name, elements)
			last = name
		}
		h.Write(part)
	})
	if err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// eachParam calls visit for each of the rank's parameters in order.
func (r *rank) eachParam(visit func(k key, p layer.Param) error) error {
	for u, unit := range r.units {
		for i, p := range unit.Params {
			if err := visit(key{u, i}, p); err != nil {
				return err
			}
		}
	}
	return nil
}

// Close closes all ranks and their devices. It returns the errors of all of
// them, joined.
func (t *Trainer) Close() (err error) {
	for _, r := range t.ranks {
		if r != nil {
			err = errors.Join(err, r.close())
		}
	}
	for _, c := range t.world {
		err = errors.Join(err, c.Close())
	}
	for _, d := range t.devs {
		err = errors.Join(err, d.Close())
	}
	return err
}
