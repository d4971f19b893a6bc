//go:build linux

// This file tests that every call of the driver may fail.

package cuda

import (
	"errors"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// useAll uses everything that a device has, and closes what it made. It returns the errors.
func useAll(d *Device) (err error) {
	keep := func(e error) bool {
		err = errors.Join(err, e)
		return e == nil
	}
	s, e := d.NewStream("s")
	if !keep(e) {
		return err
	}
	defer func() { keep(s.Close()) }()
	other, e := d.NewStream("other")
	if !keep(e) {
		return err
	}
	defer func() { keep(other.Close()) }()
	var events [3]device.Event
	for i, flags := range []device.EventFlags{device.Timing, device.Timing, device.External} {
		if events[i], e = d.NewEvent(flags); !keep(e) {
			return err
		}
		defer func() { keep(events[i].Close()) }()
	}
	b, e := d.Alloc(memory.Device, 4096, "buffer")
	if !keep(e) {
		return err
	}
	defer s.Free(b)
	h, e := d.Alloc(memory.Host, 4096, "host buffer")
	if !keep(e) {
		return err
	}
	defer s.Free(h)
	pool, e := d.Reserve(memory.Device, 64*memory.MiB, "pool")
	if !keep(e) {
		return err
	}
	defer s.Free(pool)
	for _, n := range []memory.Bytes{memory.MiB, 24 * memory.MiB} {
		keep(d.Grow(pool, n))
	}

	s.Record(events[0])
	s.Upload(b.All(), make([]byte, 4096))
	s.Fill(h.All(), 1)
	// The same kernel may use ever more shared memory, and less again.
	for i, shared := range []uint32{0, 8 << 10, 64 << 10, 16 << 10, 96 << 10} {
		l := addLaunch(b.All(), uint64(1)<<(8*i))
		l.Shared = shared
		s.Launch(l)
	}
	s.Record(events[1])
	other.Wait(events[1])
	other.Copy(h.All(), b.All())
	keep(other.Sync())
	_, e = events[1].Since(events[0])
	keep(e)

	s.BeginCapture()
	s.Launch(addLaunch(b.All(), 1<<40))
	s.Host(func() {})
	s.Record(events[2])
	g, e := s.EndCapture()
	if !keep(e) {
		return err
	}
	defer func() { keep(g.Close()) }()
	s.Replay(g)
	other.Wait(events[2])
	other.Copy(h.All(), b.All())
	keep(other.Sync())
	if got := device.Slice[uint64](uint64(h.Addr()), 1)[0]; err == nil && got != 0x10101010101 {
		keep(errors.New("wrong sums"))
	}
	return err
}

// Whichever call of the driver fails, with whatever result, the user learns it, and the
// driver gets back all that was taken. A call that gives something back must not fail: what
// is left then is the driver's. SPEC S6.3.
func TestEveryCallMayFail(t *testing.T) {
	givesBack := map[string]bool{
		"cuCtxPopCurrent_v2": true, "cuDevicePrimaryCtxRelease_v2": true, "cuEventDestroy_v2": true, "cuGraphDestroy": true, "cuGraphExecDestroy": true,
		"cuMemAddressFree": true, "cuMemRelease": true, "cuMemUnmap": true, "cuModuleUnload": true, "cuStreamDestroy_v2": true, "cuStreamEndCapture": true,
	}
	// Names, attributes and looks may fail without a word, and a context that is not current
	// makes the call fail that needs it. Without memory for a whole step of an arena, less will
	// do.
	quiet := func(call string, as result) bool {
		switch call {
		case "cuDeviceGetName", "cuDeviceGetAttribute", "cuEventQuery", "cuCtxSetCurrent":
			return true
		case "cuMemCreate", "cuMemMap", "cuMemSetAccess":
			return as == errOutOfMemory
		}
		return false
	}
	run := func(call string, n int, as result, watched bool) (calls map[string]int, err error) {
		v, f := newFake(t, memory.GiB)
		f.mu.Lock()
		f.calls, f.fullAs = map[string]int{}, as
		if call != "" {
			f.full[call] = n
		}
		f.mu.Unlock()
		o := Options{HostCapacity: memory.GiB}
		if watched {
			o.Observe = &told{}
		}
		d, err := v.open(o)
		if err == nil {
			err = errors.Join(useAll(d), d.Close())
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.full, call)
		if what := f.remains(); what != "" {
			t.Errorf("%s %d fails with %d: the driver is left with %s", call, n, as, what)
			clear(f.handles)
			clear(f.maps)
			clear(f.chunks)
			f.used = 0
		}
		return f.calls, err
	}
	for _, watched := range []bool{false, true} {
		calls, err := run("", 0, success, watched)
		if err != nil {
			t.Fatal(err)
		}
		for call, most := range calls {
			for n := range most {
				for _, as := range []result{errOutOfMemory, errInvalidValue} {
					if givesBack[call] || call == "cuCtxSetCurrent" && n%8 > 0 {
						continue
					}
					_, err := run(call, n, as, watched)
					// A watched device may lose a time.
					lost := watched && (call == "cuEventCreate" || call == "cuEventRecord" || call == "cuEventElapsedTime")
					if err == nil && !quiet(call, as) && !lost {
						t.Errorf("%s %d fails with %d, and nobody learns it", call, n, as)
					}
					var said *device.DriverError
					if errors.As(err, &said) && call != "cuCtxSetCurrent" && call != "cuDeviceGetAttribute" &&
						(said.Call != call || said.Code != int(as) || said.Device != "cuda:0" || !strings.Contains(said.Text, "CUDA_ERROR_MADE_UP: a test asked for it")) {
						t.Errorf("%s %d fails with %d: %+v", call, n, as, said)
					}
				}
			}
		}
	}
}

// Nothing that waits for an event is lost or run twice, also if what runs adds more.
func TestPendingIsKept(t *testing.T) {
	d, _ := openFake(t, Options{})
	defer closeDevice(t, d)
	added, ran := 0, 0
	var add func(depth int)
	add = func(depth int) {
		added++
		d.addPending(pending{then: func() {
			ran++
			for range depth {
				add(depth - 1)
			}
		}})
	}
	add(4)
	for range 6 {
		d.runPassed()
	}
	if ran != added || ran != 65 { // 1 + 4 + 4*3 + 4*3*2 + 4*3*2*1
		t.Errorf("%d of %d functions ran, want 65", ran, added)
	}
}
