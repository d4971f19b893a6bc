// This file owns the tests of what a long run keeps: memory stays flat, and the host
// waits for the device at the end of a step alone.

package train

import (
	"errors"
	"flag"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// ledger is what a process and its devices hold.
type ledger struct {
	device, host memory.Bytes
	objects      uint64
	bytes        uint64
	goroutines   int
}

func (t *Trainer) ledger() (h ledger) {
	for _, u := range t.Usage() {
		h.device += u.Kind[memory.Device].Current
		h.host += u.Kind[memory.Host].Current
	}
	runtime.GC()
	runtime.GC() // what finalisers and pools held for one more
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	h.objects, h.bytes, h.goroutines = m.HeapObjects, m.HeapAlloc, runtime.NumGoroutine()
	return h
}

// flat runs a warm-up and then steps during which nothing may grow. A leak of an object
// a step would show, and one of a slice that is appended to; lists that are used again
// and again find their sizes late, within slack.
func flat(c Config, steps int) (err error) {
	const slack = 256 << 10
	tr, err := New(c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tr.Close()) }()
	run := func(n int) (ledger, error) {
		for range n {
			if _, err := tr.Step(); err != nil {
				return ledger{}, err
			}
		}
		return tr.ledger(), nil
	}
	before, err := run(50) // plans are made, scopes captured, pools have grown
	if err != nil {
		return err
	}
	// A scratch buffer of a kernel may be alive at one reading and not at the other, which
	// is some hundred kilobytes more or less. A leak grows in every window.
	var grew error
	for range 3 {
		after, err := run(steps)
		switch {
		case err != nil:
			return err
		case after.device != before.device || after.host != before.host:
			return fmt.Errorf("devices held %v and %v of host memory, and %d steps later %v and %v", before.device, before.host, steps, after.device, after.host)
		case after.goroutines != before.goroutines:
			return fmt.Errorf("%d goroutines became %d", before.goroutines, after.goroutines)
		case int(after.objects)-int(before.objects) > steps/2 || int(after.bytes)-int(before.bytes) > slack:
			grew = fmt.Errorf("the heap grew in %d steps from %d objects of %d bytes to %d of %d", steps, before.objects, before.bytes, after.objects, after.bytes)
			before = after
			continue
		}
		return nil
	}
	return grew
}

// long are the runs that must stay flat.
func long(t *testing.T, yield func(name string, c Config)) {
	for _, name := range []string{"stash", "offload", "offload+recompute", "graphs", "whole graph", "budget"} {
		c := quick(t, mixed())
		c.Layout, c.Batch.Seq = Layout{1, 1, 1, 1}, 8
		switch name {
		case "whole graph":
			c.Memory = Memory{Rows: layer.Stashed, Fraction: 1, Scopes: memory.ScopesOf(memory.FullIteration)}
		case "budget":
			c.Memory = Memory{Rows: layer.Stashed, Fraction: 1, Budget: 256 * memory.KiB, Links: links}
		case "offload":
			c.Layout = Layout{2, 1, 1, 1}
			c.Memory = namedMemory(t, name)
		default:
			c.Memory = namedMemory(t, name)
		}
		yield(name, c)
	}
}

func TestMemoryStaysFlat(t *testing.T) { // SPEC S4.5
	long(t, func(name string, c Config) {
		t.Run(name, func(t *testing.T) {
			steps := 300
			if few() {
				steps = 60
			}
			if err := flat(c, steps); err != nil {
				t.Error(err)
			}
		})
	})
}

// The same for as many steps as the trainer is promised to run. It is asked for by name.
func TestMemoryStaysFlatForLong(t *testing.T) {
	if testing.Short() || !strings.Contains(flag.Lookup("test.run").Value.String(), "ForLong") {
		t.Skip("takes a minute; give -run ForLong")
	}
	long(t, func(name string, c Config) {
		t.Run(name, func(t *testing.T) {
			if err := flat(c, 2000); err != nil {
				t.Error(err)
			}
		})
	})
}

// waits are the host's reads and waits.
type waits struct{ reads, syncs uint64 }

func (w *waits) count(d device.Device, work func() error) error {
	before := d.Counters()
	err := work()
	after := d.Counters()
	w.reads, w.syncs = after.HostReads-before.HostReads, after.HostSyncs-before.HostSyncs
	return err
}

// Inside of a step the host neither reads nor waits; at its end it reads the store's
// report, if there is one, and waits for the times of steps that are recorded. Without
// a policy it reads the rows of every layer as it goes.
func TestHostNeverWaitsInsideAStep(t *testing.T) { // SPEC S1.2
	long(t, func(name string, c Config) {
		t.Run(name, func(t *testing.T) { waiting(t, c, 0, 1) })
	})
	c := quick(t, mixed())
	c.Layout = Layout{1, 1, 2, 2}
	t.Run("none", func(t *testing.T) {
		rows := uint64(len(c.Model.Layers) * c.Batch.Microbatches)
		waiting(t, c, rows, rows)
	})
	t.Run("static", func(t *testing.T) {
		c.Memory = namedMemory(t, "static")
		waiting(t, c, 0, 0)
	})
}

// waiting compares the host's reads inside of a step, and with those at its end.
func waiting(t *testing.T, c Config, inside, all uint64) {
	tr, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	}()
	// The host waits for steps that are recorded or timed when they are over. How many that are
	// depends on how alike their times are; with captured scopes there are two.
	most := 40
	if c.Memory.Scopes != 0 {
		most = 2
	}
	for step, quiet := 0, 0; quiet < 4; step++ {
		in, whole := make([]waits, len(tr.ranks)), make([]waits, len(tr.ranks))
		err := tr.each(func(i int) error {
			r := tr.ranks[i]
			r.upload(tr.loader, step)
			return whole[i].count(r.dev, func() error {
				return r.rt.Step(r.key(), func(s *engine.Step) error {
					return in[i].count(r.dev, func() error { return r.issue(s, false) })
				})
			})
		})
		if err != nil {
			t.Fatal(err)
		}
		for i := range in {
			if in[i] != (waits{inside, 0}) || whole[i].reads != all || step >= most && whole[i].syncs > 0 || whole[i].syncs > 1 {
				t.Fatalf("step %d, rank %d: inside %+v, in all %+v; want %d and %d reads", step, i, in[i], whole[i], inside, all)
			}
		}
		quiet++
		if slices.ContainsFunc(whole, func(w waits) bool { return w.syncs > 0 }) {
			quiet = 0
		}
	}
	// Behind the step the host reads losses and norm, once.
	before := tr.devs[0].Counters()
	if _, err := tr.Step(); err != nil {
		t.Fatal(err)
	}
	after := tr.devs[0].Counters()
	if n := after.HostReads - before.HostReads; n != all+1 || after.HostSyncs != before.HostSyncs {
		t.Errorf("%d reads and %d waits in a whole step", n, after.HostSyncs-before.HostSyncs)
	}
}
