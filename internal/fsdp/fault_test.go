// This file owns the tests of failures: memory that is missing, work that fails, and
// input that makes no sense.

package fsdp

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// Every call that can fail is made to fail. The error is typed and names the rank, no
// rank hangs, and all memory is freed.
func TestEverythingMayFail(t *testing.T) {
	t.Parallel()
	for _, c := range []setup{
		{model: "dense", ranks: 1, ep: 1, kind: bucket.Fixed, fallback: bucket.DynamicMemory},
		{model: "moe", ranks: 2, ep: 2, kind: bucket.Recorded},
	} {
		c.param, c.gradComm, c.mainGrads, c.microbatches, c.steps, c.prefetch, c.behind = BF16, FP32, BF16, 1, 2, 1, 1
		run := func(faults ...check.Fault) (*check.Checker, memory.Bytes, error) {
			var left memory.Bytes
			c.left = &left
			ck := check.New(check.Options{Faults: faults})
			_, err := c.train(func() (device.Device, error) {
				d, err := cpuDevice()
				if err != nil {
					return nil, err
				}
				return ck.Wrap(d), nil
			}, comm.Lockstep, trainAndCollect)
			return ck, left, err
		}
		whole, left, err := run()
		if err != nil || left != 0 {
			t.Fatal(c, left, err)
		}
		for _, class := range []check.Class{check.Allocs, check.Grows, check.Copies, check.Launches, check.Makes} {
			every := 1 + whole.Count(class)/30
			if testing.Short() {
				every *= 5
			}
			for n := 0; n < whole.Count(class); n += every {
				_, left, err := run(check.Fault{Class: class, N: n, Do: check.Fail})
				var oom *device.OutOfMemory
				var broken *device.DriverError
				if !errors.As(err, &oom) && !errors.As(err, &broken) {
					t.Errorf("%v: %v %d fails: %v", c, class, n, err)
				}
				if left != 0 {
					t.Errorf("%v: %v %d fails and leaves %v", c, class, n, left)
				}
			}
		}
	}
}

// limited opens a device with the given memory.
func limited(t *testing.T, size memory.Bytes) device.Device {
	t.Helper()
	inner, err := cpuDevice()
	if err != nil {
		t.Fatal(err)
	}
	return check.New(check.Options{Limits: [memory.Kinds]memory.Bytes{memory.Device: size}}).Wrap(inner)
}

// refuse opens a pipeline that cannot work, and checks the error and the memory that is
// left.
func refuse(t *testing.T, size memory.Bytes, cfg Config, says ...string) error {
	t.Helper()
	dev := limited(t, size)
	l, err := newLone(dev, cfg)
	if err == nil {
		t.Error("it was made; want an error that says ", says)
	} else {
		for _, s := range says {
			if !strings.Contains(err.Error(), s) {
				t.Errorf("%q does not say %q", err, s)
			}
		}
		l.p = nil
	}
	if e := errors.Join(l.close(), dev.Close()); e != nil {
		t.Error(e)
	}
	return err
}

// SPEC S2.5: New refuses an impossible configuration, and the error says what to do.
func TestRefusals(t *testing.T) {
	ok := Config{Rank: 2, Units: units(3), Pool: bucket.Arena, Prefetch: 1, Behind: 1, GradComm: BF16, MainGrads: FP32}
	with := func(change func(*Config)) Config {
		c := ok
		c.Units = units(3)
		change(&c)
		return c
	}
	const plenty = memory.MiB
	param := func(c *Config) *Param { return &c.Units[1].Params[0] }
	for _, c := range []struct {
		cfg  Config
		says []string
	}{
		{with(func(c *Config) { c.MainGrads = bucket.Type{} }), []string{`expected fsdp.BF16 or fsdp.FP32 for Config.GradComm and Config.MainGrads`, `and ""`}},
		{with(func(c *Config) { c.GradComm = bucket.Type{Name: "fp8", Size: 1} }), []string{`got "fp8" and`}},
		{with(func(c *Config) { param(c).Type = bucket.Type{Name: "fp8", Size: 1} }), []string{`parameter "w" of FSDP unit "unit 1" has the type "fp8"; expected fsdp.BF16 or fsdp.FP32`}},
		{with(func(c *Config) { param(c).Group = 1 }), []string{`parameter "w" of FSDP unit "unit 1" belongs to group 1, but Config.Groups has only 1`}},
		{with(func(c *Config) { param(c).Group = -1 }), []string{`parameter "w" of FSDP unit "unit 1" belongs to group -1, but Config.Groups has only 1`}},
		{with(func(c *Config) { c.Pool, c.Prefetch = bucket.Max, 0 }), []string{"the max pool needs two buffers, but Prefetch is 0 and Behind is 1"}},
		{with(func(c *Config) { c.Pool, c.Behind = bucket.Max, 0 }), []string{"the max pool needs two buffers, but Prefetch is 1 and Behind is 0"}},
		{with(func(c *Config) { param(c).Shape = []int64{3, 0} }), []string{"shape [3 0]"}},
		{with(func(c *Config) { param(c).Shape = []int64{1 << 40, 1 << 40} }), []string{"at most 2^40 elements"}},
		{with(func(c *Config) { c.Units[1].Params = append(c.Units[1].Params, c.Units[1].Params...) }), []string{`two parameters of FSDP unit "unit 1" are named "w"`}},
		{with(func(c *Config) { c.Units[2].Name = "unit 0" }), []string{`two FSDP units are named "unit 0"`}},
		{with(func(c *Config) { c.Units = nil }), []string{"Config.Units has no parameters"}},
		{with(func(c *Config) { c.Prefetch = -1 }), []string{"rank 2", "prefetch is -1"}},
		{with(func(c *Config) { c.Pool = bucket.Max; c.Prefetch = 0 }), []string{"max pool needs two buffers, but Prefetch is 0 and Behind is 1; set both to at least 1"}},
		{with(func(c *Config) { c.Pool = 77 }), []string{"rank 2", "expected a kind of pool"}},
		{with(func(c *Config) { param(c).Shape = []int64{1 << 20} }), []string{"rank 2", "main weights", "shard over more ranks"}},
	} {
		_ = refuse(t, plenty, c.cfg, c.says...)
	}
	// A shard of a sixty-fourth fits, the whole does not.
	_ = refuse(t, plenty, with(func(c *Config) {
		c.Groups, param(c).Shape = []RankGroup{{Comm: seat{size: 64}}}, []int64{1 << 20}
	}), "rank 2", `FSDP unit "unit 1" needs 2.00 MiB, but only 1.00 MiB are available; divide it into smaller units, or use more ranks`)
	_ = refuse(t, plenty, with(func(c *Config) { c.Groups = []RankGroup{{Name: "dense"}} }), `group 0 of Config.Groups ("dense") needs a communicator`)
	_ = refuse(t, plenty, with(func(c *Config) { c.Groups = []RankGroup{{Name: "dense", Comm: seat{size: 64}, Op: comm.Max}} }), "comm.Sum or comm.Mean")
	// Shards fit, the largest unit does not: 3000 bf16 and fp32 elements over one
	// rank make 12 + 6 + 12 KB of shards.
	big := with(func(c *Config) {
		c.Units = []FSDPUnit{{Name: "big", Params: []Param{{Name: "w", Shape: []int64{3000}, Type: BF16}}}}
	})
	var oom *device.OutOfMemory
	if err := refuse(t, 33*1024, big, `the arena pool "rank 2 gathered parameters" needs 6.00 KiB, and every pool for this order needs at least 6.00 KiB`, "lower Prefetch or Behind, choose another pool, or shard over more ranks"); !errors.As(err, &oom) {
		t.Error(err)
	}
	two := with(func(c *Config) { c.Units, c.Pool = append(slices.Clone(big.Units), units(1)...), bucket.Rotary })
	if err := refuse(t, 40*1024, two, `the rotary pool "rank 2 gathered parameters" needs 12.00 KiB, and every pool for this order needs at least 6.25 KiB`); !errors.As(err, &oom) {
		t.Error(err)
	}
	if err := refuse(t, 5*1024, with(func(c *Config) { c.Units = nil; c.Units = big.Units }), "main weights", "rank 2"); !errors.As(err, &oom) {
		t.Error(err)
	}
}

// A plan that needs too much memory fails at the end of the step that recorded it. The
// pipeline can still be used.
func TestPlanTooLarge(t *testing.T) {
	dev := limited(t, 0)
	l, err := newLone(dev, Config{Rank: 1, Units: units(4), Pool: bucket.Rotary})
	if err != nil {
		t.Fatal(err)
	}
	used := dev.Memory().Kind[memory.Device].Current
	if err := errors.Join(l.close(), dev.Close()); err != nil {
		t.Fatal(err)
	}
	dev = limited(t, used+1024) // all four units at once take more than one block and this
	if l, err = newLone(dev, Config{Rank: 1, Units: units(4), Pool: bucket.Rotary}); err != nil {
		t.Fatal(err)
	}
	s := l.p.Begin(memory.Key{}, l.s)
	var open []Use
	for u := range 4 {
		x, err := s.Use(u, l.s)
		if err != nil {
			var oom *device.OutOfMemory
			if !errors.As(err, &oom) || !strings.Contains(err.Error(), "rank 1: gathered parameters need") {
				t.Error(err)
			}
			break
		}
		open = append(open, x)
	}
	if len(open) == 4 {
		t.Error("four units fit")
	}
	if err := s.End(); err == nil {
		t.Error("no error at the end")
	}
	if err := errors.Join(l.uses(memory.Key{}, 0, 1, 2, 3), l.uses(memory.Key{}, 0, 1, 2, 3), l.close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

// A rank that gives up in the middle of a step stops the others, and each of them knows
// why.
func TestRankGivesUp(t *testing.T) {
	c := setup{model: "dense", ranks: 2, ep: 1, param: BF16, gradComm: BF16, mainGrads: FP32, kind: bucket.Arena, prefetch: 1, behind: 1, microbatches: 1}
	gone := errors.New("no more data")
	for _, drive := range []driver{comm.Run, comm.Lockstep} {
		var other error
		var left memory.Bytes
		c.left = &left
		_, err := c.train(cpuDevice, drive, func(w *world) error {
			return w.each(func(r *rank) error {
				r.feed(0)
				err := r.step() // the other one may be gone before this is over
				if r.comms[0].Rank() == 1 {
					return errors.Join(err, gone)
				}
				if other = err; err == nil {
					other = r.step()
				}
				return other
			})
		})
		var failed *comm.Failure
		if !errors.Is(err, gone) || !errors.As(other, &failed) || left != 0 {
			t.Errorf("%v; the other rank: %v; %v left", err, other, left)
		}
	}
}
