// This file owns the trainer, which runs all ranks.

package train

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stowage-dev/stowage"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train/internal/data"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// Trainer trains a model on all ranks of a run. Its methods must not be called at the
// same time. After a step has failed, Step, Evaluate and Save return its error.
type Trainer struct {
	cfg    *Config
	devs   []device.Device
	world  []comm.Comm
	ranks  []*rank
	meet   *meeting
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
	n := cfg.Layout.Ranks()
	t.meet = newMeeting(n)
	cut := data.LoaderConfig{
		Seq: cfg.Batch.Seq, Micro: cfg.Batch.Micro, Microbatches: cfg.Batch.Microbatches, Ranks: cfg.Layout.DP,
		Targets: layer.Ahead(cfg.Model), Seed: cfg.Seed,
	}
	if t.loader, err = data.NewLoader(cfg.Text, cut); err != nil {
		return t, err
	}
	if cfg.HeldOut != nil {
		if t.held, err = data.NewLoader(cfg.HeldOut, cut); err != nil {
			return t, err
		}
	}
	for i := range n {
		dev, err := cfg.Device(i)
		if err != nil {
			return t, err
		}
		t.devs = append(t.devs, dev)
		if err := layer.Runs(cfg.Model, dev.Info()); err != nil {
			return t, err
		}
	}
	if t.world, err = comm.NewLocal(t.devs, comm.Options{}); err != nil {
		return t, err
	}
	if err = t.measure(); err != nil {
		return t, err
	}
	t.ranks = make([]*rank, n)
	err = t.each(func(i int) (err error) {
		t.ranks[i], err = newRank(t, i, t.devs[i], t.world[i])
		if err != nil || cfg.forecast {
			return err
		}
		return t.ranks[i].begin()
	})
	return t, err
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
		open = func() (device.Device, error) { return t.cfg.Device(0) }
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

// each runs work on all ranks at once. If a rank fails, the others stop waiting for it.
// If several ranks fail, each returns the error of the first.
func (t *Trainer) each(work func(i int) error) error {
	err := comm.Run(t.world, func(c comm.Comm) (err error) {
		err = work(c.Rank())
		if err != nil {
			t.meet.abort(err)
		}
		return err
	})
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
	all := make([]figures, len(t.ranks))
	err := t.each(func(i int) (err error) {
		r := t.ranks[i]
		if err = r.train(t.step); err != nil {
			return err
		}
		all[i], err = r.read()
		return err
	})
	if err != nil {
		t.broken = err
		return m, err
	}
	heads := make([][]float64, len(all))
	for i, f := range all {
		heads[i] = f.heads
		m.Aux += f.aux / float64(t.cfg.Layout.DP*t.cfg.Batch.Microbatches)
	}
	sums := addUp(heads)
	m.Loss, m.MTPLosses, m.Norm = sums[0], sums[1:], all[0].norm
	m.Seconds = time.Since(began).Seconds()
	m.Reruns = t.Reruns()
	for _, d := range t.devs {
		u := d.Memory()
		m.Device, m.Host = max(m.Device, int64(u.Kind[memory.Device].Current)), max(m.Host, int64(u.Kind[memory.Host].Current))
	}
	t.step++
	return m, nil
}

// addUp adds the numbers of all ranks in the order of the ranks, so that sums are
// reproducible.
func addUp(of [][]float64) []float64 {
	sums := make([]float64, len(of[0]))
	for _, x := range of {
		for k := range sums {
			sums[k] += x[k]
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
		heads := make([][]float64, len(t.ranks))
		if err := t.each(func(i int) (err error) {
			heads[i], err = t.ranks[i].evaluate(b)
			return err
		}); err != nil {
			t.broken = err
			return 0, nil, err
		}
		for k, x := range addUp(heads) {
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
	for _, r := range t.ranks {
		if s := r.rt.Summary(r.key()).Stash; s != nil {
			n = max(n, s.Reruns)
		}
	}
	return n
}

// Usage returns the memory use of each rank's device.
func (t *Trainer) Usage() (out []device.Usage) {
	for _, d := range t.devs {
		out = append(out, d.Memory())
	}
	return out
}

// Summaries returns the figures of each rank's runtime.
func (t *Trainer) Summaries() (out []memory.Summary) {
	for _, r := range t.ranks {
		out = append(out, r.rt.Summary(r.key()))
	}
	return out
}

// Digest returns the SHA-256 of all parameters in fp32, sorted by name. It does not depend
// on how the parameters are divided over ranks, so runs with equal parameters have equal
// digests.
func (t *Trainer) Digest() (string, error) {
	type entry struct {
		name string
		data []float32
	}
	all := make([][]entry, len(t.ranks))
	err := t.each(func(i int) error {
		r := t.ranks[i]
		return r.eachParam(func(k key, p layer.Param) error {
			x, err := r.store.read(k)
			if err != nil || !r.writes(p) {
				return err
			}
			for _, q := range pieces(p) {
				all[i] = append(all[i], entry{q.name, x[q.from : q.from+q.n]})
			}
			return nil
		})
	})
	if err != nil {
		return "", err
	}
	flat := slices.Concat(all...)
	slices.SortFunc(flat, func(a, b entry) int { return strings.Compare(a.name, b.name) })
	h := sha256.New()
	for _, e := range flat {
		fmt.Fprintf(h, "%s %d\n", e.name, len(e.data))
		h.Write(bytesOf(e.data))
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
