// This file owns all ranks of a run together.

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
	"github.com/stowage-dev/stowage/comm"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/policy"
	"github.com/stowage-dev/stowage/train/data"
	"github.com/stowage-dev/stowage/train/layer"
)

// Trainer is a run.
type Trainer struct {
	cfg    *Config
	devs   []device.Device
	world  []comm.Comm
	ranks  []*rank
	meet   *meeting
	loader *data.Loader
	held   *data.Loader // of what was held out, or nil
	step   int
	broken error // a step failed: ranks may not agree any more
}

// Metrics are what a step came to.
type Metrics struct {
	Step    int       `json:"step"`
	Loss    float64   `json:"loss"`          // nats a token
	Further []float64 `json:"mtp,omitempty"` // of further heads
	Aux     float64   `json:"aux,omitempty"` // auxiliary losses, mean over microbatches
	Norm    float64   `json:"grad_norm"`     // of all gradients
	LR      float64   `json:"lr"`            //
	Seconds float64   `json:"seconds"`       // of the step
	Tokens  int       `json:"tokens"`        //
	Reruns  int       `json:"reruns"`        // so far
	Device  int64     `json:"device_bytes"`  // of the fullest rank, now
	Host    int64     `json:"host_bytes"`    //
}

// New makes a run: devices are opened, parameters get their first values.
func New(cfg Config) (t *Trainer, err error) {
	if err := cfg.Check(); err != nil {
		return nil, err
	}
	t = &Trainer{cfg: &cfg}
	defer func() {
		if err != nil {
			_ = t.Close() // a device that failed says so again
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

// measure finds the rates of the links, if anything may move, on a device of its own: the
// memory that it takes is none of the run's.
func (t *Trainer) measure() error {
	m := &t.cfg.Memory
	if m.Links != (policy.Links{}) || m.Budget == 0 && m.byHand() == nil {
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

// begin gives parameters their first values.
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

// each runs work on all ranks at once. If one fails, none waits for it; of several that
// do, which mostly have the same to say, the first speaks.
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

// advised is an error with what to do where a device is too small.
func advised(err error) error {
	var oom *device.OutOfMemory
	switch {
	case !errors.As(err, &oom):
		return err
	case oom.Kind == device.Host:
		return fmt.Errorf("%w; give the machine more host memory, or offload less", err)
	}
	return fmt.Errorf("%w; use more ranks, shard parameters with --pool, or choose a --policy that keeps less", err)
}

// Step does one step on all ranks.
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
	m.Loss, m.Further, m.Norm = sums[0], sums[1:], all[0].norm
	m.Seconds = time.Since(began).Seconds()
	m.Reruns = t.Reruns()
	for _, d := range t.devs {
		u := d.Memory()
		m.Device, m.Host = max(m.Device, int64(u.Kind[device.Accel].Current)), max(m.Host, int64(u.Kind[device.Host].Current))
	}
	t.step++
	return m, nil
}

// addUp adds numbers of ranks up in their order: the same sum each time.
func addUp(of [][]float64) []float64 {
	sums := make([]float64, len(of[0]))
	for _, x := range of {
		for k := range sums {
			sums[k] += x[k]
		}
	}
	return sums
}

// Evaluate is the loss of the parameters as they are, in nats a token, on so many batches
// of Config.HeldOut, each as large as a step's and always the same ones; and those of
// further heads. The run goes on as if nothing had been.
func (t *Trainer) Evaluate(batches int) (loss float64, further []float64, err error) {
	switch {
	case t.broken != nil:
		return 0, nil, t.broken
	case t.held == nil || batches < 1:
		return 0, nil, fmt.Errorf("train: an evaluation of %d batches needs at least one, and a text in HeldOut; hold out a part of the text", batches)
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

// Done is the number of steps done.
func (t *Trainer) Done() int { return t.step }

// Reruns is how often steps were run again.
func (t *Trainer) Reruns() (n int) {
	for _, r := range t.ranks {
		if s := r.rt.Summary(r.key()).Stash; s != nil {
			n = max(n, s.Reruns)
		}
	}
	return n
}

// Usage is the memory of every rank's device.
func (t *Trainer) Usage() (out []device.Usage) {
	for _, d := range t.devs {
		out = append(out, d.Memory())
	}
	return out
}

// Summaries are what every rank's runtime did.
func (t *Trainer) Summaries() (out []stowage.Summary) {
	for _, r := range t.ranks {
		out = append(out, r.rt.Summary(r.key()))
	}
	return out
}

// Sum is the SHA-256 of all parameters, in fp32, in the order of their names. It does
// not depend on how they are divided over ranks.
func (t *Trainer) Sum() (string, error) {
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

// eachParam visits a rank's parameters in order.
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

// Close ends the run and gives everything back.
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
