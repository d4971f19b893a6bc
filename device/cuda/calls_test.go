//go:build linux

// This file compares every call of the driver that a program makes, with all arguments, with a
// golden file.

package cuda

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/memory"
)

// callForms says what the arguments of a call are: o is an answer, d a number, m an address in
// memory, h a handle, p a list of arguments, and a capital letter an answer that is a handle
// or, M, a range of addresses. Others are written out by callText.
var callForms = map[string]string{
	"cuDeviceGetAttribute": "odd", "cuDeviceCanAccessPeer": "odd", "cuDeviceTotalMem_v2": "od", "cuDevicePrimaryCtxRelease_v2": "d", "cuCtxPushCurrent_v2": "d", "cuCtxPopCurrent_v2": "d",
	"cuMemGetInfo_v2": "oo", "cuMemGetAddressRange_v2": "oom", "cuMemAddressReserve": "Mdddd", "cuMemAddressFree": "md", "cuMemRelease": "h", "cuMemMap": "mddhd", "cuMemUnmap": "md",
	"cuMemcpyAsync": "mmdh", "cuMemsetD8Async": "mddh", "cuStreamCreate": "Sd", "cuStreamDestroy_v2": "h", "cuStreamSynchronize": "h", "cuStreamWaitEvent": "hhd",
	"cuStreamBeginCapture_v2": "hd", "cuStreamEndCapture": "hG", "cuStreamGetCaptureInfo_v2": "h", "cuEventCreate": "Ed", "cuEventDestroy_v2": "h", "cuEventRecord": "hh",
	"cuEventRecordWithFlags": "hhd", "cuEventQuery": "h", "cuEventSynchronize": "h", "cuEventElapsedTime": "ohh", "cuLaunchKernel": "hdddddddhp", "cuLaunchHostFunc": "h",
	"cuGraphInstantiateWithFlags": "Xhd", "cuGraphLaunch": "hh", "cuGraphExecDestroy": "h", "cuGraphDestroy": "h", "cuModuleUnload": "h", "cuModuleLoadDataEx": "P", "cuFuncSetAttribute": "hdd",
}

// kindsOfHandles are the words for handles that a call returns.
var kindsOfHandles = map[rune]string{'S': "stream", 'G': "graph", 'E': "event", 'X': "exec", 'P': "module", 'H': "memory", 'F': "function"}

// listener writes down calls.
type listener struct {
	f       *fake
	lines   []string
	from    int // where the last line of the program is
	names   map[uintptr]string
	numbers map[string]int
	ranges  [][2]uintptr
}

// name gives a new handle its name.
func (l *listener) name(h uintptr, kind string) string {
	l.numbers[kind]++
	l.names[h] = fmt.Sprint(kind, " ", l.numbers[kind])
	return l.names[h]
}

// at writes an address as a place in a range of addresses.
func (l *listener) at(a uintptr) string {
	for i, r := range slices.Backward(l.ranges) {
		if a >= r[0] && a < r[0]+r[1] {
			return fmt.Sprintf("range %d+%d", i, a-r[0])
		}
	}
	return "elsewhere"
}

// params writes the first arguments of a kernel.
func (l *listener) params(list uintptr) string {
	w := device.Slice[uint64](uint64(list), 3)
	var text [3]string
	for i, p := range w {
		v := device.Slice[uint64](p, 1)[0]
		if text[i] = l.at(uintptr(v)); text[i] == "elsewhere" {
			text[i] = fmt.Sprint(v)
		}
	}
	return "(" + strings.Join(text[:], ", ") + ")"
}

func (l *listener) hear(name string, a []uintptr) {
	if name == "cuCtxSetCurrent" || name == "cuGetErrorName" || name == "cuGetErrorString" {
		return
	}
	text := name
	for i, form := range callForms[name] {
		switch form {
		case 'o':
		case 'd':
			text += fmt.Sprint(" ", a[i])
		case 'm':
			text += " " + l.at(a[i])
		case 'h':
			text += " " + l.names[a[i]]
		case 'p':
			text += " " + l.params(a[i])
		case 'M':
			at := uintptr(device.Slice[uint64](uint64(a[0]), 1)[0])
			text += fmt.Sprintf(" range %d:", len(l.ranges))
			l.ranges = append(l.ranges, [2]uintptr{at, a[1]})
		default:
			text += " " + l.name(uintptr(device.Slice[uint64](uint64(a[i]), 1)[0]), kindsOfHandles[form])
		}
	}
	if text += l.callText(name, a); strings.HasPrefix(name, "cuDeviceGet") && text == l.lines[len(l.lines)-1] {
		return // asked twice
	}
	l.lines = append(l.lines, text)
	// All work is done at once, so that what the program finds does not depend on time.
	l.f.mu.Lock()
	var streams []*fakeStream
	for _, x := range l.f.handles {
		if s, ok := x.(*fakeStream); ok && s.capture == nil {
			streams = append(streams, s)
		}
	}
	l.f.mu.Unlock()
	for _, s := range streams {
		if name != "cuStreamDestroy_v2" && name != "cuLaunchHostFunc" {
			_ = s.Sync()
		}
	}
}

// callText writes what a call points at.
func (l *listener) callText(name string, a []uintptr) string {
	switch name {
	case "cuMemCreate":
		handle := uintptr(device.Slice[uint64](uint64(a[0]), 1)[0])
		return fmt.Sprintf(" %s of %d bytes %+v %d", l.name(handle, "memory"), a[1], device.Slice[allocationProp](uint64(a[2]), 1)[0], a[3])
	case "cuMemGetAllocationGranularity":
		return fmt.Sprintf(" %+v %d", device.Slice[allocationProp](uint64(a[1]), 1)[0], a[2])
	case "cuMemSetAccess":
		return fmt.Sprintf(" %s %d %+v", l.at(a[0]), a[1], device.Slice[accessDesc](uint64(a[2]), int(a[3])))
	case "cuMemcpy2DAsync_v2":
		c := device.Slice[memcpy2D](uint64(a[0]), 1)[0]
		to, from := l.at(c.dst.device), l.at(c.src.device)
		c.dst.device, c.src.device = 0, 0
		return fmt.Sprintf(" %s from %s %+v %s", to, from, c, l.names[a[1]])
	case "cuModuleGetFunction":
		return fmt.Sprintf(" %s of %s %s", l.name(uintptr(device.Slice[uint64](uint64(a[0]), 1)[0]), "function"), l.names[a[1]], goString(uint64(a[2])))
	case "cuLaunchKernelEx":
		c := device.Slice[launchConfig](uint64(a[0]), 1)[0]
		return fmt.Sprintf(" %s %v %v %d %s %s", l.names[a[1]], c.grid, c.block, c.shared, l.names[c.stream], l.params(a[2]))
	case "cuGraphExecKernelNodeSetParams_v2":
		p := device.Slice[kernelNodeParams](uint64(a[2]), 1)[0]
		return fmt.Sprintf(" %s %s %v %v %d %s", l.names[a[0]], l.names[p.function], p.grid, p.block, p.shared, l.params(p.params))
	case "cuTensorMapEncodeTiled":
		u64, u32 := func(i int) []uint64 { return device.Slice[uint64](uint64(a[i]), 2) }, func(i int) []uint32 { return device.Slice[uint32](uint64(a[i]), 2) }
		return fmt.Sprintf(" %d %d %s %d %d %d %d %d %d %d %d", a[1], a[2], l.at(a[3]), u64(4), u64(5), u32(6), u32(7), a[8], a[9], a[10], a[11])
	case "cuThreadExchangeStreamCaptureMode":
		return fmt.Sprintf(" %d", device.Slice[int32](uint64(a[0]), 1)[0])
	}
	return ""
}

// say writes down what the program does next. What a device does with all its streams and
// what a closing one gives back has no order.
func (l *listener) say(what string) {
	if i := l.from; i < len(l.lines) && strings.HasSuffix(l.lines[i], "the device") {
		slices.Sort(l.lines[i+1:])
	}
	l.from = len(l.lines)
	l.lines = append(l.lines, what)
}

// A program makes these calls, and with an observer those.
func TestCalls(t *testing.T) {
	var book strings.Builder
	for _, watched := range []bool{false, true} {
		v, f := newFake(t, memory.GiB)
		f.attrs = map[int]int32{attrUnits: 7, attrMajor: 9, attrMinor: 0, attrVirtualMemory: 1, attrHostNuma: 3, attrFileHandles: 1, attrVirtualRDMA: 1}
		f.gpus = 4
		l := &listener{f: f, lines: []string{fmt.Sprint("watched: ", watched)}, names: map[uintptr]string{}, numbers: map[string]int{}}
		f.heard = l.hear
		o := Options{Ordinal: 1, DeviceCapacity: 300 * memory.MiB, HostCapacity: 100 * memory.MiB, Shareable: true, Peers: []int{3, 1, 2, 3}, CopyKernel: copyLaunch}
		if watched {
			o.Observe = &told{}
		}
		d, err := v.open(o)
		if err != nil {
			t.Fatal(err)
		}
		if watched { // which of the events is the reference depends on time
			l.lines = slices.DeleteFunc(l.lines, func(s string) bool { return strings.HasPrefix(s, "cuEvent") })
			d.watch.free, d.watch.ref = nil, d.watch.all[0]
			d.watch.serves = time.Hour
		}
		if got := d.Info(); got.Capability != "9.0" || got.Ordinal != 1 || got.Units != 7 || got.Name != "Made-up GPU" || got.Driver != "0.0" || got.Backend != "cuda" || got.Capacity != ([memory.Kinds]memory.Bytes{memory.Device: o.DeviceCapacity, memory.Host: o.HostCapacity}) {
			t.Errorf("%+v", got)
		}
		callEverything(t, d, l)
		l.say("close the device")
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		l.say("")
		fmt.Fprintf(&book, "%s\n", strings.Join(l.lines, "\n"))
		f.heard = nil
	}
	golden.Check(t, "calls.txt", book.String())
}

// callEverything is the program: each operation of a device, and some of them twice.
func callEverything(t *testing.T, d *Device, l *listener) {
	must := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	stream := func(name string) device.Stream {
		l.say("new stream " + name)
		s, err := d.NewStream(name)
		must(name, err)
		return s
	}
	alloc := func(kind memory.Kind, n memory.Bytes) *device.Buffer {
		l.say(fmt.Sprint("allocate ", kind, " ", n))
		b, err := d.Alloc(kind, n, "b")
		must("alloc", err)
		return b
	}
	s, other := stream("s"), stream("other")
	var events [4]device.Event
	for i, flags := range []device.EventFlags{device.Timing, 0, device.External, device.Timing | device.External} {
		l.say(fmt.Sprint("new event ", flags))
		var err error
		events[i], err = d.NewEvent(flags)
		must("event", err)
	}
	a, b, h, k := alloc(memory.Device, 40*memory.MiB), alloc(memory.Device, 5000), alloc(memory.Host, 12*memory.MiB), alloc(memory.Host, 3000)
	l.say("reserve and grow")
	pool, err := d.Reserve(memory.Device, 64*memory.MiB, "pool")
	must("reserve", err)
	must("grow", d.Grow(pool, 3*memory.MiB))
	must("grow", d.Grow(pool, 30*memory.MiB))
	l.say("backdrop")
	must("backdrop", d.Backdrop(pool))
	l.say("grow over the backdrop")
	must("grow", d.Grow(pool, 50*memory.MiB))
	for what, err := range steps(d, s, other, events, a, b, h, k, l) {
		must(what, err)
	}
	for _, x := range []*device.Buffer{b, a, k, h, pool} {
		l.say("free")
		s.Free(x)
	}
	l.say("usage")
	if u := d.Memory().Kind[memory.Device]; u.Current != 0 || u.Pending != 0 {
		t.Errorf("in use: %+v", u)
	}
	s.Free(alloc(memory.Device, 6000))
	l.say("close events and a stream")
	for _, e := range events[:3] {
		must("event", e.Close())
	}
	must("stream", other.Close())
}

// steps is the part of the program that works on streams.
func steps(d *Device, s, other device.Stream, events [4]device.Event, a, b, h, k *device.Buffer, l *listener) func(func(string, error) bool) {
	return func(yield func(string, error) bool) {
		do := func(what string, f func()) { l.say(what); f() }
		do("copy", func() { s.Copy(a.Slice(4096, 1<<20), a.Slice(8<<20, 1<<20)) })
		do("copy to the host", func() { s.Copy(h.Slice(64, 2000), b.Slice(128, 2000)) })
		do("copy from the host", func() { other.Copy(b.Slice(256, 1000), k.Slice(512, 1000)) })
		do("copy on the host", func() { s.Copy(k.Slice(0, 100), h.Slice(200, 100)) })
		do("copy nothing", func() { s.Copy(a.Slice(0, 0), b.Slice(0, 0)) })
		do("copy rows", func() {
			s.Copy2D(device.Rect{Range: a.Slice(100, 96), Pitch: 256, Rows: 7}, device.Rect{Range: h.Slice(300, 96), Pitch: 128, Rows: 7})
		})
		do("copy rows on the host", func() {
			s.Copy2D(device.Rect{Range: k.Slice(0, 10), Pitch: 20, Rows: 3}, device.Rect{Range: h.Slice(0, 10), Pitch: 30, Rows: 3})
		})
		do("copy no rows", func() {
			s.Copy2D(device.Rect{Range: a.Slice(0, 10), Pitch: 10}, device.Rect{Range: h.Slice(0, 10), Pitch: 10})
		})
		do("fill", func() { s.Fill(a.Slice(1000, 2000), 0xA5) })
		do("fill on the host", func() { s.Fill(k.Slice(8, 16), 7) })
		do("launch", func() { s.Launch(addLaunch(b.Slice(0, 4096), 5)) })
		do("launch with shared memory", func() {
			x := addLaunch(b.Slice(0, 800), 6)
			x.Grid, x.Block, x.Shared = [3]uint32{2, 3, 4}, [3]uint32{5, 6, 1}, 9000
			s.Launch(x)
		})
		do("launch tuned", func() { s.Launch(tunedLaunch(b.Slice(1024, 128), 3)) })
		do("launch tuned and early", func() {
			x := tunedLaunch(b.Slice(1024, 128), 4)
			x.Tuned.Early = true
			other.Launch(x)
		})
		do("host", func() { s.Host(func() {}) })
		do("upload", func() { s.Upload(a.Slice(3, 9<<20), make([]byte, 9<<20)) })
		do("upload to the host", func() { s.Upload(k.Slice(0, 10), make([]byte, 10)) })
		do("download", func() { yield("download", s.Download(make([]byte, 77), b.Slice(11, 77))) })
		do("record and wait", func() {
			for i, e := range events {
				s.Record(e)
				other.Wait(e)
				if i == 1 && !e.Done() {
					yield("done", fmt.Errorf("it is not"))
				}
			}
			yield("sync", events[0].Sync())
			s.Record(events[3])
			_, err := events[3].Since(events[0])
			yield("since", err)
		})
		do("batches", func() {
			for i := range 40 {
				s.Fill(b.Slice(0, 8), byte(i))
				if i == 2 || i == 6 {
					s.Record(events[1])
				}
			}
		})
		do("capture", s.BeginCapture)
		x := addLaunch(b.Slice(0, 64), 8)
		x.Slot = 5
		s.Launch(x)
		s.Copy(a.Slice(0, 4096), a.Slice(8192, 4096))
		s.Copy(h.Slice(0, 100), b.Slice(0, 100))
		s.Copy2D(device.Rect{Range: a.Slice(100, 96), Pitch: 256, Rows: 7}, device.Rect{Range: h.Slice(300, 96), Pitch: 128, Rows: 7})
		s.Fill(a.Slice(0, 10), 1)
		s.Host(func() {})
		s.Record(events[1])
		other.Wait(events[1])
		other.Launch(tunedLaunch(b.Slice(1024, 128), 3))
		other.Record(events[0])
		s.Wait(events[0])
		s.Record(events[2])
		s.Wait(events[3])
		l.say("end the capture")
		g, err := s.EndCapture()
		if !yield("capture", err) || err != nil {
			return
		}
		do("replay", func() { s.Replay(g) })
		do("update", func() {
			x := addLaunch(b.Slice(8, 64), 9)
			yield("update", g.Update(5, x))
		})
		do("replay on another stream", func() { other.Replay(g) })
		do("sync", func() { yield("sync", other.Sync()) })
		do("sync the device", func() { yield("sync", d.Sync()) })
		do("close the graph", func() { yield("close", g.Close()) })
	}
}
