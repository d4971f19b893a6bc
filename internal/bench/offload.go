// This file owns the measurement of offloading: a step without and with it, in turns, and
// the step's copies alone.

package bench

import (
	"bytes"
	"cmp"
	"slices"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/capture"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// OffloadOptions says what to run and what to offload.
type OffloadOptions struct {
	Step      StepOptions
	Intensity float64      // zero keeps the times of the step
	Budget    memory.Bytes // zero means none
	// NoRecompute meets the budget by offloading alone.
	NoRecompute bool
	Hand        bool // ByHand decides
	ByHand      policy.ByHand
	Scopes      memory.Scopes
	Rounds      int
	Trace       trace.Sink          // nil means none
	Progress    func(done, all int) // told after each round; nil means nobody
}

// OffloadNames returns the groups that a step saves.
func OffloadNames(o StepOptions) ([]string, error) {
	s, err := newStep(o)
	if err != nil {
		return nil, err
	}
	return s.names(), nil
}

// OffloadRefused reports a setting that the runtime cannot follow.
type OffloadRefused struct{ Err error }

// Error returns the text of the cause.
func (e *OffloadRefused) Error() string { return e.Err.Error() }
func (e *OffloadRefused) Unwrap() error { return e.Err }

// offloadRig holds the runtimes without and with offloading.
type offloadRig struct {
	o       OffloadOptions
	dev     device.Device
	s       device.Stream
	step    *step
	links   memory.Links
	budget  memory.Bytes // of the runtime with offload; zero means none
	without *runner
	with    *runner
	kept    memory.Bytes // device memory of the runtime without offload
	copies  *linkRig
	log     copyLog
}

// copyLog keeps the copies of the step that was issued last.
type copyLog struct {
	next   trace.Sink
	passes []schedule.Pass
	copies []carried
}

// Emit records the copies of the runtime with offload.
func (l *copyLog) Emit(e trace.Event) {
	if l.next != nil {
		l.next.Emit(e)
	}
	in := e.Kind == trace.Reload
	switch {
	case e.Kind == trace.Begin:
		l.copies = nil
	case in || e.Kind == trace.Offload:
		pass := slices.Index(l.passes, schedule.Pass{Chunk: e.Chunk, Microbatch: e.Microbatch, Backward: in})
		l.copies = append(l.copies, carried{in, memory.GroupID{Name: e.Name, Chunk: e.Chunk, Layer: e.Layer, Microbatch: e.Microbatch}, e.Bytes, pass})
	}
}

// Offloads measures one setting.
func Offloads(dev device.Device, o OffloadOptions) (res Offload, err error) {
	r := &offloadRig{o: o, dev: dev}
	defer func() { err = cmp.Or(err, r.close()) }()
	if err := r.open(); err != nil {
		return res, err
	}
	times, equal, err := r.measure()
	if err != nil {
		return res, err
	}
	return r.result(times, equal), nil
}

func (r *offloadRig) open() (err error) {
	if r.step, err = newStep(r.o.Step); err != nil {
		return err
	}
	if r.s, err = r.dev.NewStream("compute"); err != nil {
		return err
	}
	if r.links, err = engine.MeasureLinks(r.dev); err != nil {
		return err
	}
	if r.o.Intensity > 0 {
		copies := float64(r.step.bytes()) / r.links.Out
		r.step.scale(r.o.Intensity * copies / r.step.forward().Seconds())
	}
	r.log = copyLog{next: r.o.Trace, passes: r.step.passes}
	if r.without, err = r.runner(engine.Config{}); err != nil {
		return err
	}
	if err := r.without.warmUp(); err != nil {
		return err
	}
	r.kept = heldBytes(r.dev)
	cfg := engine.Config{Links: r.links, Rank: r.o.Step.Rank, Stage: r.o.Step.Rank, NoRecompute: r.o.NoRecompute, Trace: &r.log}
	r.budget = r.o.Budget
	switch {
	case r.o.Hand:
		cfg.ByHand = &r.o.ByHand
	case r.budget == 0:
		cfg.NoRecompute = true
		if r.budget, err = r.hiding(); err != nil {
			return err
		}
	}
	cfg.SavedLimit = r.budget
	if r.o.Budget > 0 {
		// Refuse a budget that cannot be met with its cause, before the first step runs out
		// of memory.
		p := r.without.rt.Profile(r.without.key)
		if _, err := policy.Solve(p, r.links, r.limits(), r.budget, policy.Allowed{Offload: true, Recompute: !r.o.NoRecompute}); err != nil {
			return &OffloadRefused{err}
		}
	}
	if r.with, err = r.runner(cfg); err != nil {
		return err
	}
	if err := r.with.warmUp(); err != nil {
		return err
	}
	r.copies, err = newLinkRig(r.dev, r.log.copies)
	return err
}

// heldBytes returns the device memory that runtimes hold for saved tensors, by the device's
// ledger.
func heldBytes(dev device.Device) memory.Bytes {
	for _, o := range dev.Memory().Owners {
		if o.Kind == memory.Device && o.Owner == trace.HeapOwner(memory.Device) {
			return o.Current
		}
	}
	return 0
}

// runner opens a runtime for the step.
func (r *offloadRig) runner(cfg engine.Config) (*runner, error) {
	cfg.Device, cfg.Compute, cfg.Scopes = r.dev, r.s, r.o.Scopes
	if r.step.row > 0 {
		pages := schedule.Pages(r.step.stashedBytes()/stash.DefaultPage) + schedule.Pages(len(r.step.passes)*len(r.step.setup.Model.Layers))
		room := [stash.Tiers]schedule.Pages{stash.Device: pages}
		cfg.Stash = &stash.ManagerConfig{Store: stash.Config{Pages: room, Max: room}}
	}
	return newRunner(r.dev, r.s, r.step, func() (*engine.Runtime, error) {
		rt, err := engine.Open(cfg)
		if err != nil {
			err = &OffloadRefused{err}
		}
		return rt, err
	}, r.o.Scopes)
}

// slack is how much longer a step may become if everything is offloaded that hides.
const slack = 0.02

// hiding returns a budget that offloading meets without a longer step. It uses the
// recording of the step with everything kept.
func (r *offloadRig) hiding() (memory.Bytes, error) {
	p, err := r.shortest()
	if err != nil {
		return 0, err
	}
	choices := map[string]memory.Choice{}
	for u := range p.Units {
		choices[u.Name] = memory.Offload
	}
	for _, g := range capture.Detect(r.o.Scopes, capture.Settings{Choices: choices, WarmUp: 1}).Groups {
		if g.Placement == capture.Refused {
			delete(choices, g.Name)
		}
	}
	for u, f := range p.Units {
		_, f.CanOffload = choices[u.Name]
		p.Units[u] = f
	}
	// Add a tenth, because steps differ and compute would wait with a little less room.
	budget, _, err := policy.Balance([]*policy.Profile{p}, r.links, r.limits(), policy.Allowed{Offload: true}, slack)
	return (budget + budget/10), err
}

// shortest returns the shortest of three recordings of the step, which was disturbed the
// least.
func (r *offloadRig) shortest() (*policy.Profile, error) {
	best := r.without.rt.Profile(r.without.key)
	for range 2 {
		x, err := r.runner(engine.Config{})
		if err != nil {
			return nil, err
		}
		if err = x.warmUp(); err == nil {
			if p := x.rt.Profile(x.key); p.Tape.Span < best.Tape.Span {
				best = p
			}
		}
		if err = cmp.Or(err, x.close()); err != nil {
			return nil, err
		}
	}
	return best, nil
}

func (r *offloadRig) limits() residency.Config {
	return residency.Config{Host: r.dev.Info().Capacity[memory.Host], Align: device.Align}
}

func (r *offloadRig) close() (first error) {
	for _, x := range []*runner{r.with, r.without} {
		if x != nil {
			first = cmp.Or(first, x.close())
		}
	}
	if r.copies != nil {
		first = cmp.Or(first, r.copies.close())
	}
	if r.s != nil {
		first = cmp.Or(first, r.s.Close())
	}
	return first
}

// These three take turns.
const (
	timeWithout = iota
	timeWith
	timeCopies
)

// measure runs the steps and the copies in turns, and compares what the two steps of a turn
// loaded.
func (r *offloadRig) measure() (times [3]time.Duration, equal bool, err error) {
	var turns [3][]time.Duration
	equal = true
	for round := range r.o.Rounds {
		var sums [2][]byte
		for k := range turns {
			var took time.Duration
			switch i := (k + round) % len(turns); i {
			case timeCopies:
				took, err = r.copies.run()
				turns[i] = append(turns[i], took)
			default:
				took, sums[i], err = []*runner{r.without, r.with}[i].run(uint64(round) + 1)
				turns[i] = append(turns[i], took)
			}
			if err != nil {
				return times, false, err
			}
		}
		equal = equal && bytes.Equal(sums[0], sums[1])
		if r.o.Progress != nil {
			r.o.Progress(round+1, r.o.Rounds)
		}
	}
	for i := range turns {
		times[i] = quartile(turns[i])
	}
	return times, equal, nil
}

func (r *offloadRig) result(times [3]time.Duration, equal bool) Offload {
	o, st := r.o, r.o.Step
	key := r.with.key
	b, d := r.with.rt.Summary(key), r.with.rt.Decision(key)
	kept, left := int64(r.kept), int64(heldBytes(r.dev)-r.kept)
	ms := func(t time.Duration) float64 { return float64(t) / float64(time.Millisecond) }
	res := Offload{
		Device: r.dev.Info(), Model: st.Model.Name, Layers: st.Layers, Seq: st.Seq, Micro: st.Micro, Microbatches: st.Microbatches,
		PP: st.PP, VPP: st.VPP, Rank: st.Rank, Graph: o.Scopes.String(), Budget: int64(r.budget), Links: r.links, Steps: o.Rounds,
		StepMS: ms(times[timeWithout]), OffloadStepMS: ms(times[timeWith]), PredictedMS: ms(d.Forecast.Step),
		StepRatio: float64(times[timeWith]) / float64(times[timeWithout]),
		PeakBytes: kept, OffloadPeakBytes: left, PeakRatio: float64(left) / float64(kept),
		SavedBytes: kept - left, ExpectedBytes: int64(r.without.rt.Summary(key).Extent - (d.Forecast.Extent - r.with.rt.Profile(key).Base)),
		HostBytes: int64(b.Host), CopyMS: ms(times[timeCopies]), Issued: r.with.issued, Equal: equal,
		LinkUtilisation: float64(times[timeCopies]) / float64(times[timeWith]), HiddenFraction: 1,
		Step: r.step.record(), found: r.budget > 0 && o.Budget == 0,
	}
	for _, c := range r.log.copies {
		if !c.in {
			res.MovedBytes += c.bytes
		}
	}
	if res.MovedBytes == 0 {
		res.CopyMS, res.LinkUtilisation = 0, 0
	} else {
		shown := max(times[timeWith]-times[timeWithout], 0)
		res.HiddenFraction = max(0, 1-float64(shown)/float64(times[timeCopies]))
	}
	for _, g := range b.Groups {
		res.Groups = append(res.Groups, OffloadGroup{Name: g.Name, Groups: g.Groups, Bytes: int64(g.Bytes), Moved: int64(g.Moved), Units: g.Units})
	}
	if b.Stash != nil {
		res.StashedBytes = int64(r.step.stashedBytes())
	}
	return res
}
