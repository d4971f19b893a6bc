// This file owns runs in which something fails: an error comes of it, in time, and
// everything is given back.

package train

import (
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// trial is a run under a checker and what it left behind.
type trial struct {
	ck   *check.Checker
	devs []device.Device
	got  account
	err  error
}

// attempt runs a few steps under faults. A run that hangs or panics is reported as such.
func attempt(t *testing.T, c Config, faults ...check.Fault) *trial {
	t.Helper()
	x := &trial{ck: check.New(check.Options{Faults: faults})}
	var mu sync.Mutex
	open := under(x.ck)
	c.Device = func(rank int) (device.Device, error) {
		d, err := open(rank)
		mu.Lock()
		defer mu.Unlock()
		if err == nil {
			x.devs = append(x.devs, d)
		}
		return d, err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				t.Errorf("%+v: panic: %v\n%s", faults, p, debug.Stack())
				x.err = errors.New("it panicked")
			}
		}()
		x.got, x.err = runs(c, 3)
	}()
	select {
	case <-done:
	case <-time.After(5 * time.Minute):
		panic(fmt.Sprintf("%+v: a run hangs", faults)) // with the stacks of all ranks
	}
	for i, d := range x.devs {
		if err := d.(interface{ Left() error }).Left(); err != nil {
			t.Errorf("%+v: device %d: %v", faults, i, err)
		}
		for k, u := range d.Memory().Kind {
			if u.Current != 0 {
				t.Errorf("%+v: device %d leaves %v of %s memory", faults, i, u.Current, memory.Kind(k))
			}
		}
	}
	return x
}

// fallible are runs in which things are made to fail.
func fallible(t *testing.T, yield func(name string, c Config)) {
	at := func(name string, m *model.Model, l Layout, set func(c *Config)) {
		c := quick(t, m)
		c.Layout, c.Batch.Seq = l, 8
		set(&c)
		c.Memory.Links = links
		yield(name, c)
	}
	at("none", mixed(), Layout{2, 1, 1, 2}, func(c *Config) {})
	at("stash", mixed(), Layout{1, 1, 2, 2}, func(c *Config) { c.Memory = namedMemory(t, "stash") })
	at("offload+recompute", mixed(), Layout{2, 1, 2, 2}, func(c *Config) { c.Memory = namedMemory(t, "offload+recompute") })
	at("graphs", mixed(), Layout{2, 1, 1, 1}, func(c *Config) {
		c.Memory = Memory{Rows: layer.Stashed, Fraction: 1, Scopes: memory.ScopesOf(memory.Attn, memory.MoERouter), Room: 0.01}
	})
	at("one graph", mixed(), Layout{2, 1, 2, 2}, func(c *Config) {
		c.Memory = Memory{Rows: layer.Stashed, Fraction: 1, Offload: []string{"core_attn"}, Scopes: fullIteration}
	})
	at("experts in graphs", mixed(), Layout{2, 1, 2, 2}, func(c *Config) {
		c.Memory = Memory{Rows: layer.Padded, Fraction: 1, Offload: []string{"moe_act"}, Scopes: memory.ScopesOf(memory.MoE)}
	})
	at("sharded", assorted(), Layout{1, 1, 2, 2}, func(c *Config) {
		c.Memory = namedMemory(t, "stash")
		c.Sharding = &Sharding{Pool: bucket.Max, Prefetch: 1, GradComm: kernels.F32}
	})
}

// Whatever fails, every rank ends with an error that says what; nothing hangs, panics,
// leaks or comes to a wrong number.
func TestEverythingMayFail(t *testing.T) {
	few := few()
	fallible(t, func(name string, c Config) {
		if few && (name == "sharded" || name == "none") {
			return // they take longest
		}
		t.Run(name, func(t *testing.T) {
			clean := attempt(t, c)
			if clean.err != nil {
				t.Fatal(clean.err)
			}
			for _, class := range []check.Class{check.Allocs, check.Grows, check.Copies, check.Launches} {
				calls, felt, tries := clean.ck.Count(class), 0, 0
				some := 8
				if few {
					some = 2
				}
				// Most of what is allocated and grown is in the beginning; the last calls are
				// those of the sums over what was trained.
				for n := 0; n < calls; n += max(1, calls/some) {
					tries++
					x := attempt(t, c, check.Fault{Class: class, N: n, Do: check.Fail})
					var oom *device.OutOfMemory
					var broken *device.DriverError
					full := class == check.Grows && x.err != nil && strings.Contains(x.err.Error(), "do not fit") // what there is became the limit
					switch {
					case x.err == nil:
						if err := x.got.differs(clean.got); err != nil {
							t.Errorf("%v %d of %d fails, and %v", class, n, calls, err)
						}
					case errors.As(x.err, &oom), errors.As(x.err, &broken), full:
						felt++
					default:
						t.Errorf("%v %d of %d fails: %v", class, n, calls, x.err)
					}
				}
				t.Logf("%v: %d of %d tries felt, of %d calls", class, felt, tries, calls)
				if felt*2 < tries && class != check.Grows {
					t.Errorf("only %d of %d failing calls of class %v were felt", felt, tries, class)
				}
			}
		})
	})
}

// A device that is too small is refused in one sentence that names the rank and says
// what to do; the next size does as well, until the run fits.
func TestTooSmallADevice(t *testing.T) {
	for _, name := range []string{"none", "stash", "offload"} {
		t.Run(name, func(t *testing.T) {
			c := quick(t, mixed())
			c.Memory = namedMemory(t, name)
			refused := 0
			for size := 64 * memory.KiB; ; size += size / 3 {
				c.Device = func(rank int) (device.Device, error) {
					return cpu.Open(cpu.Options{Ordinal: rank, Capacity: [memory.Kinds]memory.Bytes{size, memory.GiB}})
				}
				_, err := runs(c, 3)
				if err == nil {
					break
				}
				refused++
				var oom *device.OutOfMemory
				text := err.Error()
				if !errors.As(err, &oom) || strings.Contains(text, "\n") || !strings.Contains(text, "rank ") || !strings.Contains(text, "more ranks") {
					t.Errorf("%v: %v", size, err)
				}
			}
			if refused < 2 {
				t.Errorf("%d sizes were refused", refused)
			}
		})
	}
}

// After a step or an evaluation has failed the ranks may differ: nothing is evaluated,
// trained or saved any more, and the checkpoints before stay as they are.
func TestNothingAfterAFailedStep(t *testing.T) {
	for name, fail := range map[string]func(*Trainer) error{
		"step":       func(tr *Trainer) error { _, err := tr.Step(); return err },
		"evaluation": func(tr *Trainer) error { _, _, err := tr.Evaluate(1); return err },
	} {
		t.Run(name, func(t *testing.T) { nothingAfter(t, fail) })
	}
}

func nothingAfter(t *testing.T, fail func(*Trainer) error) {
	c := quick(t, mixed())
	c.Layout, c.Batch.Seq, c.Memory.Links = Layout{1, 1, 1, 2}, 8, links
	c.HeldOut = c.Text
	ck := check.New(check.Options{})
	c.Device = under(ck)
	tr, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	_, err = tr.Step()
	before := ck.Count(check.Launches)
	if err := errors.Join(err, fail(tr)); err != nil {
		t.Fatal(err)
	}
	after := ck.Count(check.Launches)
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	// The same again, with a launch in the middle of what comes after the step that fails.
	ck = check.New(check.Options{Faults: []check.Fault{{Class: check.Launches, N: (before + after) / 2, Do: check.Fail}}})
	c.Device = under(ck)
	if tr, err = New(c); err != nil {
		t.Fatal(err)
	}
	to, err := checkpoint.Open(checkpoint.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	if _, err := tr.Step(); err != nil {
		t.Fatal(err)
	}
	if err := tr.Save(to); err != nil {
		t.Fatal(err)
	}
	failed := fail(tr)
	if failed == nil {
		t.Fatal("nothing failed: the test shows nothing")
	}
	_, again := tr.Step()
	_, _, held := tr.Evaluate(1)
	for what, err := range map[string]error{"Step": again, "Save": tr.Save(to), "Evaluate": held} {
		if !errors.Is(err, failed) {
			t.Errorf("%s returns %v, want %v", what, err, failed)
		}
	}
	if steps, err := checkpoint.Steps(to.Options); err != nil || len(steps) != 1 || steps[0] != 1 {
		t.Errorf("there are checkpoints of %v, %v", steps, err)
	}
	_ = tr.Close() // its devices failed
}
