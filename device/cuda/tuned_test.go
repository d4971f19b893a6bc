//go:build linux

package cuda

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var mappedKernel = &device.Kernel{Name: "mapped", Image: &device.Image{Name: "mapped.cu", Variants: []device.Variant{{Major: 9, Exact: true}}}}

// tunedLaunch adds v to part of a buffer by the tuned kernel, and to all of it by the
// plain one.
func tunedLaunch(dst device.Range, v uint64) device.Launch {
	l := addLaunch(dst, v)
	l.Shared = 40 << 10 // needs permission if the source declares some
	l.Tuned = device.Tuned{Kernel: mappedKernel, Grid: [3]uint32{9, 1, 1}, Block: [3]uint32{128, 1, 1}, Cluster: 2, Resident: true}
	l.Tuned.Map(device.TensorMap{Addr: dst.Addr() + 64, Rows: 2, Cols: 16, Pitch: 24, BoxRows: 5})
	l.Args()[1] = 4
	return l
}

// A GPU of the architecture runs the tuned kernel, also in graphs and after an update, and
// others run the plain one.
func TestTunedLaunch(t *testing.T) {
	for name, c := range map[string]struct {
		minor int32
		old   bool // a driver that makes no maps
		tuned bool
		early bool
	}{
		"its GPU": {tuned: true}, "another GPU": {minor: 5}, "an old driver": {old: true},
		"its GPU, early": {tuned: true, early: true}, "another GPU, early": {minor: 5, early: true},
	} {
		t.Run(name, func(t *testing.T) {
			v, f := newFake(t, memory.GiB)
			f.attrs[attrMinor] = c.minor
			if c.old {
				v.tensorMapEncode.addr = 0
			}
			d, err := v.open(Options{})
			if err != nil {
				t.Fatal(err)
			}
			b, err := d.Alloc(memory.Device, 128, "test")
			if err != nil {
				t.Fatal(err)
			}
			s, err := d.NewStream("test")
			if err != nil {
				t.Fatal(err)
			}
			s.Fill(b.All(), 0)
			launch := func(v uint64) device.Launch {
				l := tunedLaunch(b.All(), v)
				l.Tuned.Early = c.early
				return l
			}
			l := launch(1)
			if run := d.shapeOf(&l); (run.kernel == mappedKernel) != c.tuned || c.tuned && run.grid[0] != 4 {
				t.Errorf("it runs %s with %d blocks", run.kernel.Name, run.grid[0])
			}
			s.Launch(l)
			s.BeginCapture()
			l.Slot = 7
			s.Launch(l)
			g, err := s.EndCapture()
			if err != nil {
				t.Fatal(err)
			}
			s.Replay(g)
			if err := g.Update(7, launch(10)); err != nil {
				t.Fatal(err)
			}
			s.Replay(g)
			plain := launch(10)
			plain.Tuned = device.Tuned{}
			if err := g.Update(7, plain); (err == nil) == c.tuned {
				t.Errorf("an update to the plain kernel: %v", err)
			}
			got := make([]byte, 128)
			if err := s.Download(got, b.All()); err != nil {
				t.Fatal(err)
			}
			low, high := byte(12), byte(0)
			if c.tuned {
				low, high = 0, 12
			}
			if got[0] != low || got[64] != high {
				t.Errorf("the halves are %d and %d, want %d and %d", got[0], got[64], low, high)
			}
			if n := f.calls["cuLaunchKernelEx"]; (n == 1) != (c.tuned && c.early) { // not in the graph
				t.Errorf("%d launches begin early", n)
			}
			s.Free(b)
			if err := g.Close(); err != nil {
				t.Error(err)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// A map that the driver refuses is the device's error.
func TestRefusedTensorMap(t *testing.T) {
	v, f := newFake(t, memory.GiB)
	d, err := v.open(Options{})
	if err != nil {
		t.Fatal(err)
	}
	f.excused = true
	b, _ := d.Alloc(memory.Device, 128, "test")
	s, _ := d.NewStream("test")
	f.mu.Lock()
	f.fail["cuTensorMapEncodeTiled"] = errInvalidValue
	f.mu.Unlock()
	s.Launch(tunedLaunch(b.All(), 1))
	if err := s.Sync(); err == nil {
		t.Error("the launch was made")
	}
	_ = d.Close()
}

// A GPU of the architecture runs the tuned kernel of a launch that has steps, and others run
// its steps in order, also in a graph.
func TestLaunchOfSteps(t *testing.T) {
	for name, minor := range map[string]int32{"its GPU": 0, "another GPU": 5} {
		t.Run(name, func(t *testing.T) {
			v, f := newFake(t, memory.GiB)
			f.attrs[attrMinor] = minor
			d, err := v.open(Options{})
			if err != nil {
				t.Fatal(err)
			}
			b, err := d.Alloc(memory.Device, 128, "test")
			if err != nil {
				t.Fatal(err)
			}
			s, err := d.NewStream("test")
			if err != nil {
				t.Fatal(err)
			}
			s.Fill(b.All(), 0)
			l, nothing := tunedLaunch(b.All(), 1), tunedLaunch(b.All(), 1)
			l.Kernel = &device.Kernel{Name: "no image"}
			l.Steps = []device.Launch{addLaunch(b.All(), 2), addLaunch(b.All(), 3)}
			nothing.Kernel, nothing.Steps = l.Kernel, []device.Launch{}
			s.Launch(l)
			s.Launch(nothing)
			s.BeginCapture()
			s.Launch(l)
			g, err := s.EndCapture()
			if err != nil {
				t.Fatal(err)
			}
			s.Replay(g)
			got := make([]byte, 128)
			if err := s.Download(got, b.All()); err != nil {
				t.Fatal(err)
			}
			low, high := byte(0), byte(3)
			if minor != 0 {
				low, high = 10, 10
			}
			if got[0] != low || got[64] != high {
				t.Errorf("the halves are %d and %d, want %d and %d", got[0], got[64], low, high)
			}
			s.Free(b)
			if err := g.Close(); err != nil {
				t.Error(err)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}
