package profile

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/leak"
	"github.com/stowage-dev/stowage/memory"
)

func TestMain(m *testing.M) { leak.Main(m) }

var sleeping = device.Kernel{Name: "stowage_nn_sleep", Go: func(l *device.Launch) { time.Sleep(time.Duration(l.Args()[0])) }}

// lab is a profiled device with two buffers.
type lab struct {
	*Profiler
	dev       device.Device
	s         device.Stream
	near, far *device.Buffer
}

func newLab(t *testing.T) *lab {
	t.Helper()
	inner, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	x := &lab{Profiler: &Profiler{}}
	x.dev = x.Wrap(inner)
	var errs [3]error
	x.s, errs[0] = x.dev.NewStream("test")
	x.near, errs[1] = x.dev.Alloc(memory.Device, 4096, "test")
	x.far, errs[2] = x.dev.Alloc(memory.Host, 4096, "test")
	if err := errors.Join(errs[:]...); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		x.s.Free(x.near)
		x.s.Free(x.far)
		if err := errors.Join(x.s.Close(), x.dev.Close()); err != nil {
			t.Error(err)
		}
	})
	return x
}

func (x *lab) launch() {
	l := device.NewLaunch(&sleeping, 1, 1)
	l.Arg(uint64(2 * time.Millisecond))
	l.Read(x.near.Slice(0, 1024))
	l.Write(x.near.Slice(1024, 512))
	l.Flops = 1e6
	x.s.Launch(l)
}

func (x *lab) result(t *testing.T) map[string]Kernel {
	t.Helper()
	out := map[string]Kernel{}
	for _, k := range x.Result(Run{Steps: 2, Plain: 10, Flops: 1e9}, Limits{Product: 1, Copy: 1}).Kernels {
		out[k.Name] = k
	}
	return out
}

// Work is timed while the profiler is on, and only then, with its operations and bytes.
func TestProfiler(t *testing.T) {
	x := newLab(t)
	if inner, err := cpu.Open(cpu.Options{}); err != nil || x.Wrap(inner).Close() != nil { // another one is gone by then
		t.Fatal(err)
	}
	x.launch()
	for range 2 {
		x.Start()
		x.launch()
		x.s.Copy(x.near.Slice(0, 512), x.near.Slice(512, 512))
		x.s.Copy2D(device.Rect{Range: x.far.Slice(0, 128), Pitch: 256, Rows: 2}, device.Rect{Range: x.near.Slice(0, 128), Pitch: 128, Rows: 2})
		x.s.Copy(x.near.Slice(0, 64), x.far.Slice(0, 64))
		x.s.Fill(x.near.Slice(0, 256), 1)
		if err := x.Stop(); err != nil {
			t.Fatal(err)
		}
		x.launch()
	}
	if err := x.s.Sync(); err != nil {
		t.Fatal(err)
	}
	if n := len(x.dev.(*profiled).all); n != 10 {
		t.Errorf("%d events were made; those of the first step should serve the second", n)
	}
	got := x.result(t)
	for name, bytes := range map[string]float64{"sleep": 1536, "copy": 1024, "copy to the host": 256, "copy to the device": 64, "fill": 256} {
		k := got[name]
		if k.Launches != 1 || k.Millis <= 0 {
			t.Errorf("%s: %+v", name, k)
		}
		if moved := k.GBps * k.Millis * 1e6; moved < bytes-0.5 || moved > bytes+0.5 {
			t.Errorf("%s moved %.2f bytes, not %.0f", name, moved, bytes)
		}
	}
	if k := got["sleep"]; k.Millis < 2 || k.TFlops <= 0 || k.TFlops > 1e6/2e-3/1e12 || k.Limit < 100*k.TFlops {
		t.Errorf("%+v", k)
	}
	if got["copy to the host"].Limit != 0 || len(got) != 5 {
		t.Errorf("%+v", got)
	}
}

// Captured work is not timed: events would become a part of the graph.
func TestCapture(t *testing.T) {
	x := newLab(t)
	x.launch()
	x.Start()
	x.s.BeginCapture()
	x.launch()
	g, err := x.s.EndCapture()
	if err != nil {
		t.Fatal(err)
	}
	x.s.Replay(g)
	if err := errors.Join(x.Stop(), g.Close()); err != nil {
		t.Fatal(err)
	}
	if n := g.Nodes(); n != 1 || len(x.result(t)) != 0 {
		t.Errorf("%d nodes, %+v", n, x.result(t))
	}
}

// Pages are declared as a whole, and what was copied to them is counted twice: read and written.
func TestMoved(t *testing.T) {
	x := newLab(t)
	l := device.NewLaunch(&sleeping, 1, 1)
	l.Read(x.near.Slice(0, 100))
	l.Atomic(x.near.Slice(1024, 2048))
	if n := moved(&l); n != 200 {
		t.Errorf("%d bytes", n)
	}
	l = device.NewLaunch(&sleeping, 1, 1)
	l.Write(x.near.Slice(0, 100))
	l.InPlace = 60
	if n := moved(&l); n != 160 {
		t.Errorf("%d bytes", n)
	}
}

// On the CPU one kernel does the whole backward pass of attention.
func TestNames(t *testing.T) {
	for _, c := range []struct {
		name string
		cpu  bool
		want string
	}{
		{"stowage_nn_attend_keys_128", true, "attend_grad"}, {"stowage_nn_attend_keys_128", false, "attend_keys_128"},
		{"stowage_nn_attend_128", true, "attend_128"}, {"stowage_stash", false, "stash"}, {"other", false, "other"},
	} {
		if got := (&profiled{cpu: c.cpu}).nameOf(&device.Kernel{Name: c.name}); got != c.want {
			t.Errorf("%s is called %s, not %s", c.name, got, c.want)
		}
	}
}

func TestText(t *testing.T) {
	var all bytes.Buffer
	for _, x := range []struct {
		run    Run
		limits Limits
	}{
		{Run{Steps: 3, Millis: 130.25, Plain: 124.5, Flops: 52.5e12, Ranks: 1}, Limits{812.3, "bf16", 4239.7}},
		{Run{Steps: 3, Millis: 250, Plain: 240, Flops: 12e9, Ranks: 4}, Limits{0.25, "fp32", 40}},
		{Run{Steps: 3, Millis: 250, Plain: 240, Flops: 12e9, Ranks: 1}, Limits{}},
	} {
		p, scale := &Profiler{}, max(x.limits.Product, 0.25)/812.3
		add := func(name string, n int, ms, tflop, gb float64, link bool) {
			for range n {
				p.add(span{name: name, flops: tflop * scale * 1e12 / float64(n), bytes: memory.Bytes(gb * 1e9 / float64(n)), link: link}, time.Duration(ms*1e6/float64(n)))
			}
		}
		add("grouped_nt", 96, 96, 65, 40, false)
		add("adamw", 9, 13.2, 0, 50, false)
		add("copy to the host", 3, 6, 0, 0.33, true)
		add("route", 48, 0.3, 0, 0.1, false)
		add("embed", 12, 0.2, 0, 0.4, false)
		p.Result(x.run, x.limits).WriteText(&all)
	}
	golden.Check(t, "text.txt", all.String())
}
