// This file owns the proof that collectives are issued beside compute: on streams of their
// own, with work of compute between their beginning and the wait for their end.

package train

import (
	"sync"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// issued is one call of a rank's streams, in the order of issue.
type issued struct {
	stream string
	wait   bool
}

// diary is a device that writes down what its streams are given.
type diary struct {
	device.Device
	mu  sync.Mutex
	log []issued
}

func (d *diary) NewStream(name string) (device.Stream, error) {
	s, err := d.Device.NewStream(name)
	return noted{s, d}, err
}

func (d *diary) note(s device.Stream, wait bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.log = append(d.log, issued{s.Name(), wait})
}

type noted struct {
	device.Stream
	d *diary
}

func (s noted) Launch(l device.Launch)     { s.d.note(s, false); s.Stream.Launch(l) }
func (s noted) Copy(dst, src device.Range) { s.d.note(s, false); s.Stream.Copy(dst, src) }
func (s noted) Wait(e device.Event)        { s.d.note(s, true); s.Stream.Wait(e) }

// beside returns how often compute is given work between work of a stream and its own next wait.
func (d *diary) beside(stream string) (n int) {
	under, worked := false, false
	for _, x := range d.log {
		switch {
		case x.stream == stream && !x.wait:
			under = true
		case x.stream == "compute" && x.wait:
			if under && worked {
				n++
			}
			under, worked = false, false
		case x.stream == "compute":
			worked = under
		}
	}
	return n
}

// Compute is given work while rows of experts travel, while gradients are added up, and
// while parameters are gathered. With shared experts that holds for each exchange of a step:
// the rows' way there and back in both passes, of two layers with two microbatches. It
// would be half of them or less if shared experts were computed before their rows travel.
func TestCollectivesRunBesideCompute(t *testing.T) { // SPEC S7.8
	for _, x := range []struct {
		name   string
		set    func(c *Config)
		beside map[string]int // by stream: the waits of compute that have work before them
	}{
		{"all-to-all", func(c *Config) {}, map[string]int{"exchange": 16, "reduce": 2}},
		{"ring", func(c *Config) { c.Dispatch = layer.Ring }, map[string]int{"exchange": 16, "reduce": 2}},
		{"sharded", func(c *Config) { c.Sharding = &Sharding{Prefetch: 1} }, map[string]int{"exchange": 16, "gather": 3, "reduce": 2}},
	} {
		t.Run(x.name, func(t *testing.T) {
			c := quick(t, mixed())
			c.Layout, c.Memory = Layout{1, 1, 2, 2}, Memory{Rows: layer.Stashed, Fraction: 1, Links: links}
			x.set(&c)
			ranks := make([]*diary, c.Layout.Ranks())
			c.Device = func(rank int) (device.Device, error) {
				d, err := cpu.Open(cpu.Options{})
				if err != nil {
					return nil, err
				}
				ranks[rank] = &diary{Device: d}
				return ranks[rank], nil
			}
			tr, err := New(c)
			if err != nil {
				t.Fatal(err)
			}
			defer tr.Close()
			for range 3 { // the first records, and the second may be timed
				for _, d := range ranks {
					d.log = nil
				}
				if _, err := tr.Step(); err != nil {
					t.Fatal(err)
				}
			}
			for i, d := range ranks {
				for s, want := range x.beside {
					if n := d.beside(s); n < want {
						t.Errorf("rank %d: compute was given work before %d of its waits for stream %q, want %d", i, n, s, want)
					}
				}
			}
		})
	}
}
