// This file tests the method with work of known duration, the lines with a CPU
// device, and the tables with made-up figures.

package bench

import (
	"bytes"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/leak"
	"github.com/stowage-dev/stowage/memory"
)

func TestMain(m *testing.M) { leak.Main(m) }

// In the bubble time passes only while everything sleeps, so the figures are
// exact: 2 ms, and 3 ms with two of three turns disturbed.
func TestCompare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var order []string
		turns := 0
		ways := []way{
			{"steady", 1, func(n int) error {
				order = append(order, "s")
				time.Sleep(time.Duration(n) * 2 * time.Millisecond)
				return nil
			}},
			{"disturbed, four pieces at a time", 4, func(n int) error {
				order = append(order, "d")
				time.Sleep(time.Duration(n) * 12 * time.Millisecond)
				if turns++; turns%3 != 0 {
					time.Sleep(time.Second)
				}
				return nil
			}},
		}
		times, err := Options{Line: time.Second}.compare(ways)
		if err != nil || times[0] != 2*time.Millisecond || times[1] != 3*time.Millisecond {
			t.Errorf("%v, %v", times, err)
		}
		// A turn is 20 ms: the steady way is calibrated with 1, 2, 4, 8 and 16
		// pieces, the other, disturbed at once, with 1. The order of the rounds alternates.
		calibration, rounds := order[:6], order[6:]
		if got := join(calibration); got != "sssssd" {
			t.Errorf("calibration %s", got)
		}
		if got := join(rounds); len(got) < 2*minRounds || got[:8] != "sddssdds" {
			t.Errorf("rounds %s", got)
		}
	})
}

func join(parts []string) (s string) {
	for _, p := range parts {
		s += p
	}
	return s
}

func TestCompareStopsAtAnError(t *testing.T) {
	broken := errors.New("broken")
	calls := 0
	_, err := Options{Line: time.Nanosecond}.compare([]way{{"fails later", 1, func(int) error {
		if calls++; calls > 3 {
			return broken
		}
		return nil
	}}})
	if !errors.Is(err, broken) || calls != 4 {
		t.Errorf("%v after %d calls", err, calls)
	}
}

func open(t *testing.T, capacity memory.Bytes) device.Device {
	t.Helper()
	d, err := cpu.Open(cpu.Options{Capacity: [memory.Kinds]memory.Bytes{capacity, capacity}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for kind, u := range d.Memory().Kind {
			if u.Current != 0 {
				t.Errorf("%v of %v memory left", u.Current, memory.Kind(kind))
			}
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func TestCopies(t *testing.T) {
	const size = 64 * memory.KiB
	dev := open(t, 2*size)
	var got Result
	err := Copies(dev, Options{Line: time.Millisecond, Plain: true, Graphs: true}, size, Directions(), func(c Copy) error {
		got.Add(c)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []struct {
		d     Direction
		via   string
		plain bool
	}{
		{Out, "stream", true}, {In, "stream", true}, {Both, "stream", true},
		{Device, "stream", true}, {Device, "graph", false}, {Device, "kernel", false}, {Device, "kernel graph", false},
		{Host, "stream", true},
	}
	if len(got.Copies) != len(want) {
		t.Fatalf("%d lines, want %d", len(got.Copies), len(want))
	}
	for i, w := range want {
		c := got.Copies[i]
		if c.Direction != w.d || c.Via != w.via || c.Size != size || c.GBps <= 0 {
			t.Errorf("line %d is %+v", i, c)
		}
		if w.plain != (c.Plain != "") || w.plain && c.Ratio != c.GBps/c.PlainGBps {
			t.Errorf("plain copy of line %d: %+v", i, c)
		}
	}
	if err := Overheads(dev, func(o Overhead) error {
		if o.CPU <= 0 || o.Elapsed <= 0 || o.What == "" {
			t.Errorf("implausible %+v", o)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// The lines leave no memory, stream, event or graph, whichever allocation fails.
func TestCopiesLeaveNothing(t *testing.T) {
	f, err := check.FailEach(check.Allocs, 1, func() (device.Device, error) { return cpu.Open(cpu.Options{}) }, func(dev device.Device) error {
		if err := Copies(dev, Options{Line: time.Microsecond, Graphs: true}, 4*memory.KiB, Directions(), func(Copy) error { return nil }); err != nil {
			return err
		}
		return Overheads(dev, func(Overhead) error { return nil })
	})
	if err != nil || f.Calls < 4 || len(f.Wrong) > 0 {
		t.Errorf("%+v, %v", f, err)
	}
}

// Each direction really moves the bytes that it names, by a stream and by a plain copy.
func TestDirectionsMoveBytes(t *testing.T) {
	const size = 4 * memory.KiB
	dev := open(t, 2*size)
	r, err := newRig(dev, size)
	if err != nil {
		t.Fatal(err)
	}
	buffers := []*device.Buffer{r.accel[0], r.accel[1], r.host[0], r.host[1]}
	for d, want := range map[Direction][4]byte{
		Out: {1, 2, 1, 4}, In: {3, 2, 3, 4}, Both: {1, 4, 1, 4}, Device: {1, 1, 3, 4}, Host: {1, 2, 3, 3},
	} {
		ways := append(r.plainCopies(d), way{"stream", 1, r.streamCopy(d)})
		for _, w := range ways {
			for i, b := range buffers {
				r.out.Fill(b.All(), byte(i+1))
			}
			if err := r.settle(); err != nil {
				t.Fatal(err)
			}
			if err := w.do(1); err != nil {
				t.Fatal(err)
			}
			var got [4]byte
			for i, b := range buffers {
				got[i] = r.bytes(b)[size-1]
			}
			if got != want {
				t.Errorf("%s by %s: %v, want %v", d, w.name, got, want)
			}
		}
	}
	if err := r.close(); err != nil {
		t.Fatal(err)
	}
}

// Too little memory is an error, and nothing is left behind (open checks).
func TestCopiesOutOfMemory(t *testing.T) {
	for _, room := range []memory.Bytes{0, memory.KiB, 100, 150} {
		dev := open(t, max(room, 1))
		err := Copies(dev, Options{Line: time.Millisecond}, 100, Directions(), func(Copy) error { return nil })
		var full *device.OutOfMemory
		if wantErr := room < 200; errors.As(err, &full) != wantErr || (err != nil) != wantErr {
			t.Errorf("%v: %v", room, err)
		}
	}
}

func TestDoneCanStop(t *testing.T) {
	enough := errors.New("enough")
	dev := open(t, memory.MiB)
	lines := 0
	err := Copies(dev, Options{Line: time.Millisecond}, 100, Directions(), func(Copy) error {
		lines++
		return enough
	})
	if !errors.Is(err, enough) || lines != 1 {
		t.Errorf("%v after %d lines", err, lines)
	}
}

func TestLeastRatio(t *testing.T) {
	var r Result
	for _, v := range []float64{0, 1.5, 0.9, 0, 1.1} {
		r.Add(Copy{Ratio: v})
	}
	if r.Ratio != 0.9 || len(r.Copies) != 5 {
		t.Errorf("%+v", r)
	}
}

func TestText(t *testing.T) {
	var got bytes.Buffer
	CopyHead(&got, device.Info{Backend: "cpu", Units: 8})
	CopyText(&got, Copy{Direction: Out, Via: "stream", Size: memory.MiB, GBps: 9.5, Plain: "nontemporal-avx512", PlainGBps: 10, Ratio: 0.95})
	CopyText(&got, Copy{Direction: Device, Via: "kernel graph", Size: 512 * memory.GiB, GBps: 4213})
	OverheadHead(&got)
	OverheadText(&got, Overhead{What: "launch", CPU: 1.5, Elapsed: 2.25})
	OverheadText(&got, Overhead{What: "replay of a graph of 64, a node", CPU: 0.015, Elapsed: 1234.5})
	CopyHead(&got, device.Info{Backend: "cuda", Ordinal: 1, Name: "Test GPU", Capability: "9.0", Driver: "13.0"})
	SmallText(&got, []memory.Bytes{memory.MiB, SmallCopy - 1, memory.MiB})
	SmallText(&got, []memory.Bytes{SmallCopy, memory.MiB}) // nothing
	got.WriteString("\n")
	StashText(&got, Stash{Device: device.Info{Backend: "cpu", Units: 8}, Rows: 100, MaxRows: 200, Width: 14336, Tensors: 3, Groups: 4,
		Page: 64 * memory.KiB, Tier: "host", Store: "stack", Bytes: memory.MiB, PairUS: 923.4, CopyUS: 884, GBps: 4069.12, CopyGBps: 4100, Ratio: 0.958,
		Launches: 2, PoolBytes: memory.GiB})
	golden.Check(t, "tables.txt", got.String())
}

// Bytes count as a link carries them: both directions at once are two, and a copy within
// one memory is read and written.
func TestMovedBytes(t *testing.T) {
	for d, want := range map[Direction]memory.Bytes{Out: 5, In: 5, Both: 10, Device: 10, Host: 10} {
		if got := moved(d, 5); got != want {
			t.Errorf("%s: %d bytes, want %d", d, got, want)
		}
	}
}
