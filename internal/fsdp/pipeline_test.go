package fsdp

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// deed is a line of a step: a unit is used, or gets gradients, or one of these ends.
type deed struct {
	unit int
	grad bool
	end  bool
}

// anyStep draws deeds of any nesting.
func anyStep(t *rapid.T, units int) (deeds []deed) {
	var open []deed
	for range rapid.IntRange(0, 12).Draw(t, "deeds") {
		d := deed{unit: rapid.IntRange(0, units-1).Draw(t, "unit"), grad: rapid.Bool().Draw(t, "grad")}
		if i := slices.Index(open, d); i >= 0 {
			open = slices.Delete(open, i, i+1)
			d.end = true
		} else {
			open = append(open, d)
		}
		deeds = append(deeds, d)
	}
	for len(open) > 0 {
		i := rapid.IntRange(0, len(open)-1).Draw(t, "ended")
		d := open[i]
		open, d.end = slices.Delete(open, i, i+1), true
		deeds = append(deeds, d)
	}
	return deeds
}

// anyUnits draws units with parameters of several types and groups.
func anyUnits(t *rapid.T) (us []FSDPUnit) {
	for i := range rapid.IntRange(1, 5).Draw(t, "units") {
		u := FSDPUnit{Name: fmt.Sprint("unit ", i), Loose: rapid.IntRange(0, 3).Draw(t, "loose") == 0}
		for k := range rapid.IntRange(0, 3).Draw(t, "params") {
			u.Params = append(u.Params, Param{
				Name: fmt.Sprint("w", k), Shape: []int64{rapid.Int64Range(1, 70).Draw(t, "elements")},
				Type: rapid.SampledFrom([]bucket.Type{BF16, FP32}).Draw(t, "type"), Group: rapid.IntRange(0, 1).Draw(t, "group"),
			})
		}
		us = append(us, u)
	}
	if len(us[0].Params) == 0 {
		us[0].Params = []Param{{Name: "w", Shape: []int64{3}, Type: BF16}}
	}
	return us
}

// addOne is the optimiser of the model.
var addOne = device.Kernel{Name: "add one", Go: func(l *device.Launch) {
	w := numbers(l.Args()[0], 0, int(l.Args()[1]))
	for i := range w {
		w[i]++
	}
}}

// puppet is a rank that executes scripts beside an obvious model: the size of each unit's
// weights, and the sum of its gradients.
type puppet struct {
	p     *Pipeline
	s     device.Stream
	rank  int
	ranks int
	steps int          // how often one was added to the weights
	sums  [][2]float32 // by unit and group, of this step
	wrong *atomic.Int64
}

// expectAll checks that all of a range has a value.
func (x *puppet) expectAll(r device.Range, t bucket.Type, want float32) {
	addr, n := uint64(r.Addr()), int(r.Len/t.Size)
	x.s.Host(func() {
		if slices.ContainsFunc(numbers(addr, typeFlag(t), n), func(v float32) bool { return v != want }) {
			x.wrong.Add(1)
		}
	}, device.Reads(r))
}

// step executes the deeds and compares.
func (x *puppet) step(key memory.Key, deeds []deed) error {
	l, s := x.p.layout, x.p.Begin(key, x.s)
	uses, grads := make([]Use, len(l.units)), make([]Grad, len(l.units))
	x.sums = make([][2]float32, len(l.units))
	for i, d := range deeds {
		var err error
		switch {
		case d.grad && d.end:
			grads[d.unit].Done()
		case d.end:
			x.checkWeights(uses[d.unit], d.unit)
			uses[d.unit].Done()
		case d.grad:
			if grads[d.unit], err = s.Grad(d.unit, x.s); err == nil {
				x.fill(grads[d.unit], d.unit, i)
			}
		default:
			if uses[d.unit], err = s.Use(d.unit, x.s); err == nil {
				x.checkWeights(uses[d.unit], d.unit)
			}
		}
		if err != nil {
			return errors.Join(err, s.End())
		}
	}
	if err := s.End(); err != nil {
		return err
	}
	for _, sh := range x.p.Shards() {
		for _, piece := range sh.Pieces {
			size := memory.Bytes(x.p.cfg.MainGrads.Size)
			want := x.sums[sh.Unit][l.units[sh.Unit].Params[piece.Param].Group]
			x.expectAll(sh.Grads.Slice(memory.Bytes(piece.At)*size, memory.Bytes(piece.Elements)*size), x.p.cfg.MainGrads, want)
			w := sh.Weights.Slice(4*memory.Bytes(piece.At), 4*memory.Bytes(piece.Elements))
			k := device.NewLaunch(&addOne, 1, 1)
			k.Write(w)
			k.Arg(uint64(piece.Elements))
			x.s.Launch(k)
		}
	}
	x.p.Cast(x.s)
	x.steps++
	return nil
}

func (x *puppet) checkWeights(u Use, unit int) {
	for i, p := range x.p.layout.units[unit].Params {
		x.expectAll(u.Param(i), p.Type, float32(unit+x.steps))
	}
}

// fill writes a gradient that differs between ranks and deeds.
func (x *puppet) fill(g Grad, unit, deed int) {
	for i, p := range x.p.layout.units[unit].Params {
		x.expectAll(g.Param(i), x.p.cfg.GradComm, 0)
		k := device.NewLaunch(&setTo, 1, 1)
		k.Write(g.Param(i))
		k.Arg(typeFlag(x.p.cfg.GradComm))
		k.Arg(uint64(p.Elements()))
		k.Arg(uint64((x.rank + 1) * (deed + 1)))
		x.s.Launch(k)
	}
	for r := range x.ranks {
		x.sums[unit][0] += float32((r + 1) * (deed + 1))
	}
	x.sums[unit][1] += float32((x.rank + 1) * (deed + 1))
}

var setTo = device.Kernel{Name: "set", Go: func(l *device.Launch) {
	a := l.Args() // gradient, type, elements, value
	store(a[0], a[1], slices.Repeat([]float32{float32(a[3])}, int(a[2])))
}}

// play runs some steps, each with one of the given scripts.
func (x *puppet) play(scripts [][]deed, plays []int) error {
	for u, unit := range x.p.layout.units {
		for i, p := range unit.Params {
			if err := x.p.Load(u, i, slices.Repeat([]float32{float32(u)}, int(p.Elements()))); err != nil {
				return err
			}
		}
	}
	for _, i := range plays {
		if err := x.step(memory.Key{Microbatches: i}, scripts[i]); err != nil {
			return err
		}
	}
	return x.s.Sync()
}

// SPEC S2.1, S2.6, S6.2: for all orders, nestings and numbers of keys, parameters have
// the right values, gradients begin at zero and add up, and the checker finds nothing.
func TestPipelineAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := Config{
			Units: anyUnits(t), Pool: rapid.SampledFrom(bucket.PoolKinds[:]).Draw(t, "kind"),
			Fallback: rapid.SampledFrom([]bucket.Fallback{bucket.Persistent, bucket.DynamicMemory}).Draw(t, "fallback"),
			Prefetch: rapid.IntRange(0, 3).Draw(t, "prefetch"), Behind: rapid.IntRange(0, 2).Draw(t, "behind"),
			GradComm: FP32, MainGrads: FP32,
		}
		if cfg.Pool == bucket.Max {
			cfg.Prefetch, cfg.Behind = max(1, cfg.Prefetch), max(1, cfg.Behind)
		}
		ranks := rapid.IntRange(1, 2).Draw(t, "ranks")
		var scripts [][]deed
		for range rapid.IntRange(1, 3).Draw(t, "scripts") {
			scripts = append(scripts, anyStep(t, len(cfg.Units)))
		}
		plays := rapid.SliceOfN(rapid.IntRange(0, len(scripts)-1), 1, 5).Draw(t, "plays")
		err := check.Explore(check.Options{}, 1, func(ck *check.Checker) error { return puppets(ck, cfg, ranks, scripts, plays) })
		if err != nil {
			t.Fatal(err)
		}
	})
}

// puppets returns a program of some ranks. The first group has all of them, and the
// second has each by itself.
func puppets(ck *check.Checker, cfg Config, ranks int, scripts [][]deed, plays []int) error {
	var devs []device.Device
	for range ranks {
		d, err := cpuDevice()
		if err != nil {
			return err
		}
		devs = append(devs, ck.Wrap(d))
	}
	cs, err := comm.NewLocal(devs, comm.Options{})
	if err != nil {
		return err
	}
	var wrong atomic.Int64
	err = comm.Lockstep(cs, func(c comm.Comm) (err error) {
		cfg := cfg
		cfg.Rank = c.Rank()
		alone, err := c.Split([]int{c.Rank()})
		if err != nil {
			return err
		}
		cfg.Groups = []RankGroup{{Comm: c}, {Comm: alone}}
		x := &puppet{rank: c.Rank(), ranks: ranks, wrong: &wrong}
		if x.s, err = devs[c.Rank()].NewStream("compute"); err != nil {
			return err
		}
		if x.p, err = New(devs[c.Rank()], cfg); err != nil {
			return err
		}
		return errors.Join(x.play(scripts, plays), x.p.Close(), x.s.Close(), alone.Close())
	})
	for i := range cs {
		err = errors.Join(err, cs[i].Close())
	}
	for _, d := range devs {
		err = errors.Join(err, d.Close())
	}
	if n := wrong.Load(); n > 0 {
		err = errors.Join(err, fmt.Errorf("%d ranges did not hold what they should", n))
	}
	return err
}

// breaking is a device whose streams and events fail to close, each with its own error.
type breaking struct {
	device.Device
	streams, events error
	tried           int
}

type breakingStream struct {
	device.Stream
	d *breaking
}

type breakingEvent struct {
	device.Event
	d *breaking
}

func (d *breaking) NewStream(name string) (device.Stream, error) {
	s, err := d.Device.NewStream(name)
	return &breakingStream{s, d}, err
}

func (d *breaking) NewEvent(f device.EventFlags) (device.Event, error) {
	e, err := d.Device.NewEvent(f)
	return &breakingEvent{e, d}, err
}

func (s *breakingStream) Record(e device.Event) { s.Stream.Record(e.(*breakingEvent).Event) }
func (s *breakingStream) Wait(e device.Event)   { s.Stream.Wait(e.(*breakingEvent).Event) }

func (s *breakingStream) Close() error {
	s.d.tried++
	return errors.Join(s.Stream.Close(), s.d.streams)
}

func (e *breakingEvent) Close() error { return errors.Join(e.Event.Close(), e.d.events) }

// Close returns the first error, and still closes the rest.
func TestCloseReturnsTheFirstError(t *testing.T) {
	stuck, lost := errors.New("a stream is stuck"), errors.New("an event is lost")
	for _, c := range []struct{ streams, events, want error }{{nil, nil, nil}, {stuck, nil, stuck}, {nil, lost, lost}, {stuck, lost, lost}} {
		inner, err := cpuDevice()
		if err != nil {
			t.Fatal(err)
		}
		dev := &breaking{Device: inner}
		l, err := newLone(dev, Config{Units: units(3), Pool: bucket.Arena, Prefetch: 1, Behind: 1})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.train(l.s, 3); err != nil {
			t.Fatal(err)
		}
		dev.streams, dev.events = c.streams, c.events
		if err := l.p.Close(); !errors.Is(err, c.want) || dev.tried != 2 {
			t.Errorf("error %v, want %v; %d streams were closed, want 2", err, c.want, dev.tried)
		}
		dev.streams, dev.events = nil, nil
		if err := errors.Join(l.s.Close(), l.comm.Close(), inner.Close()); err != nil {
			t.Error(err)
		}
	}
}

// A pool takes the memory of its slots. Dynamic memory comes and goes beside it.
func TestPoolsTakeTheirSlots(t *testing.T) {
	mixedSizes := units(4)
	for i := range 3 { // the commonest shape, which has slots
		mixedSizes[i].Params[0].Shape = []int64{64}
	}
	for _, fallback := range []bucket.Fallback{bucket.Persistent, bucket.DynamicMemory} {
		l := openLone(t, Config{Units: mixedSizes, Pool: bucket.Fixed, Fallback: fallback, Prefetch: 1, Behind: 1})
		forward, back := l.p.plainOrder()
		for _, r := range []struct {
			region
			order []bucket.OrderEntry
		}{{l.p.params, append(forward, back...)}, {l.p.grads, back}} {
			plan, err := l.p.plan(&r.region, r.order)
			if err != nil {
				t.Fatal(err)
			}
			if got := r.buf.Size(); got != plan.Bytes-plan.Dynamic || plan.Dynamic > 0 != (fallback == bucket.DynamicMemory) {
				t.Errorf("%v: the %s take %v; the plan is %v, of which %v are dynamic", fallback, r.what, got, plan.Bytes, plan.Dynamic)
			}
		}
	}
}

// Gradients are added up in memory of their own only if they arrive in a wider type than
// they are kept in.
func TestMemoryForAddingUp(t *testing.T) {
	for _, c := range []struct {
		comm, main bucket.Type
		want       bool
	}{{BF16, BF16, false}, {BF16, FP32, false}, {FP32, FP32, false}, {FP32, BF16, true}} {
		l := openLone(t, Config{Units: units(3), Pool: bucket.Arena, Prefetch: 1, Behind: 1, GradComm: c.comm, MainGrads: c.main})
		var found bool
		for _, o := range l.dev.Memory().Owners {
			found = found || o.Owner == "rank 0 shard of gradients being added up" && o.Peak > 0
		}
		if found != c.want {
			t.Errorf("%s to %s: memory for adding up: %v", c.comm.Name, c.main.Name, found)
		}
	}
}

// Read gathers into a pool that has room. If the unit is not in the pool's slots, Read
// takes memory of its own while it reads.
func TestReadTakesThePool(t *testing.T) {
	one, large := units(1), units(4)
	one[0].Params[0].Shape = []int64{128} // with nothing behind it
	for i := range 3 {                    // the commonest shape, which has slots
		large[i].Params[0].Shape = []int64{64}
	}
	for name, c := range map[string]struct {
		Config
		unit int
		own  bool
	}{
		"a pool of one bucket":       {Config{Units: one, Pool: bucket.Arena}, 0, false},
		"in the slots":               {Config{Units: large, Pool: bucket.Fixed, Fallback: bucket.DynamicMemory}, 1, false},
		"larger than all the slots":  {Config{Units: large, Pool: bucket.Fixed, Fallback: bucket.DynamicMemory}, 3, true},
		"a pool that is all dynamic": {Config{Units: units(2), Pool: bucket.Dynamic}, 1, true},
	} {
		l := openLone(t, c.Config)
		n := l.p.layout.units[c.unit].Params[0].Elements()
		want := make([]float32, n)
		for i := range want {
			want[i] = float32(i%64) - 7
		}
		if err := l.p.Load(c.unit, 0, want); err != nil {
			t.Fatal(err)
		}
		for _, which := range []Copy{Weights, Params} {
			if got, err := l.p.Read(c.unit, 0, which); err != nil || !slices.Equal(got, want) {
				t.Errorf("%s: copy %d is not what was loaded (%v)", name, which, err)
			}
		}
		var own memory.Bytes
		for _, o := range l.dev.Memory().Owners {
			if o.Owner == "rank 0 parameters read" {
				own = o.Peak
			}
		}
		if most := memory.Bytes(roundUp(n, grain)) * BF16.Size; (own > 0) != c.own || own > most {
			t.Errorf("%s: reading took %v of its own", name, own)
		}
	}
}
