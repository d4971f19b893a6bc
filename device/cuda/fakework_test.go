//go:build linux

// This file owns the made-up driver's streams, events, graphs and kernels.

package cuda

import (
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/stowage-dev/stowage/device"
)

var fakeStreams = map[string]fakeFunc{
	"cuStreamCreate": func(f *fake, a []uintptr) result {
		s, err := f.gpu.NewStream("fake")
		if err != nil {
			return errOutOfMemory
		}
		return f.add(a[0], &fakeStream{Stream: s})
	},
	"cuStreamDestroy_v2": func(f *fake, a []uintptr) result {
		if get[*fakeStream](f, a[0]).Close() != nil {
			return errLaunchFailure
		}
		return f.drop(a[0])
	},
	"cuStreamSynchronize": func(f *fake, a []uintptr) result {
		if get[*fakeStream](f, a[0]).Sync() != nil {
			return errLaunchFailure
		}
		return success
	},
	"cuStreamBeginCapture_v2": func(f *fake, a []uintptr) result {
		s := get[*fakeStream](f, a[0])
		s.BeginCapture()
		f.join(s, &fakeCapture{})
		return success
	},
	"cuStreamEndCapture": func(f *fake, a []uintptr) result {
		s := get[*fakeStream](f, a[0])
		if s.capture == nil {
			return errUnmatched
		}
		g, err := s.EndCapture()
		f.mu.Lock()
		for _, member := range s.capture.streams {
			member.capture = nil
		}
		f.mu.Unlock()
		if err != nil {
			return errUnjoined
		}
		return f.add(a[1], g)
	},
	"cuStreamGetCaptureInfo_v2": func(f *fake, a []uintptr) result {
		s := get[*fakeStream](f, a[0])
		if a[4] == 0 { // only asked whether
			if s.capture != nil {
				return out(a[1], int32(captureActive))
			}
			return out(a[1], int32(0))
		}
		node := new(uintptr) // the list is the driver's; the stream keeps it
		*node = uintptr(s.slot)
		f.mu.Lock()
		f.handles[uintptr(unsafe.Pointer(node))] = node
		f.mu.Unlock()
		out(a[4], uintptr(unsafe.Pointer(node)))
		return out(a[5], uint64(1))
	},
	"cuThreadExchangeStreamCaptureMode": func(f *fake, a []uintptr) result { return success },
	"cuGraphInstantiateWithFlags":       func(f *fake, a []uintptr) result { return f.add(a[0], get[device.Graph](f, a[1])) },
	"cuGraphLaunch": func(f *fake, a []uintptr) result {
		get[*fakeStream](f, a[1]).Replay(get[device.Graph](f, a[0]))
		return success
	},
	"cuGraphExecDestroy": func(f *fake, a []uintptr) result {
		if get[device.Graph](f, a[0]).Close() != nil {
			return errInvalidHandle
		}
		return f.drop(a[0])
	},
	"cuGraphDestroy": func(f *fake, a []uintptr) result { return f.drop(a[0]) },
	"cuGraphExecKernelNodeSetParams_v2": func(f *fake, a []uintptr) result {
		p := device.Slice[kernelNodeParams](uint64(a[2]), 1)[0]
		l := f.launch(p.function, p.grid, p.block, p.params)
		if get[device.Graph](f, a[0]).Update(device.Slot(a[1]), l) != nil {
			return errInvalidHandle
		}
		return success
	},
}

var fakeEvents = map[string]fakeFunc{
	"cuEventCreate": func(f *fake, a []uintptr) result {
		inner, err := f.gpu.NewEvent(device.Timing)
		if err != nil {
			return errOutOfMemory
		}
		outer, _ := f.gpu.NewEvent(device.Timing | device.External)
		return f.add(a[0], &fakeEvent{inner: inner, outer: outer})
	},
	"cuEventDestroy_v2": func(f *fake, a []uintptr) result { return f.drop(a[0]) },
	"cuEventRecord": func(f *fake, a []uintptr) result {
		e, s := get[*fakeEvent](f, a[0]), get[*fakeStream](f, a[1])
		s.Record(e.inner)
		f.mu.Lock()
		e.capture = s.capture
		f.mu.Unlock()
		if e.capture == nil {
			s.Record(e.outer)
		}
		return success
	},
	"cuEventRecordWithFlags": func(f *fake, a []uintptr) result {
		get[*fakeStream](f, a[1]).Record(get[*fakeEvent](f, a[0]).outer)
		return success
	},
	"cuStreamWaitEvent": func(f *fake, a []uintptr) result {
		s, e := get[*fakeStream](f, a[0]), get[*fakeEvent](f, a[1])
		if a[2] == eventExternal || e.capture == nil {
			s.Wait(e.outer)
			return success
		}
		s.Wait(e.inner)
		f.join(s, e.capture)
		return success
	},
	"cuEventQuery": func(f *fake, a []uintptr) result {
		e := get[*fakeEvent](f, a[0])
		switch {
		case f.captured(e):
			return errCaptured
		case !e.outer.Done():
			return errNotReady
		}
		return success
	},
	"cuEventSynchronize": func(f *fake, a []uintptr) result {
		e := get[*fakeEvent](f, a[0])
		if f.captured(e) {
			return errCaptured
		}
		if e.outer.Sync() != nil {
			return errLaunchFailure
		}
		return success
	},
	"cuEventElapsedTime": func(f *fake, a []uintptr) result {
		took, err := get[*fakeEvent](f, a[2]).outer.Since(get[*fakeEvent](f, a[1]).outer)
		if err != nil {
			return errInvalidHandle
		}
		return out(a[0], float32(took.Seconds()*1e3))
	},
}

// fakeCode is what kernels do, by their names.
var fakeCode = map[string]func(a []uint64){
	"empty": func([]uint64) {},
	"add": func(a []uint64) {
		for i, p := 0, device.Slice[uint64](a[0], int(a[1])); i < len(p); i++ {
			p[i] += a[2]
		}
	},
	"copy16": func(a []uint64) {
		copy(device.Slice[byte](a[0], 16*int(a[2])), device.Slice[byte](a[1], 16*int(a[2])))
	},
	// mapped adds like add, to the matrix of a tensor map.
	"mapped": func(a []uint64) {
		for i, p := 0, device.Slice[uint64](a[3], int(a[1])); i < len(p); i++ {
			p[i] += a[2]
		}
	},
	"devicetest_mix": func(a []uint64) {
		dst, src := device.Slice[uint64](a[0], int(a[2])), device.Slice[uint64](a[1], int(a[2]))
		for i := range dst {
			dst[i] = dst[i]*6364136223846793005 + src[i] + a[3]
		}
	},
}

var fakeKernels = map[string]fakeFunc{
	"cuModuleLoadDataEx": func(f *fake, a []uintptr) result { return f.add(a[0], "module") },
	"cuModuleUnload":     func(f *fake, a []uintptr) result { return f.drop(a[0]) },
	"cuModuleGetFunction": func(f *fake, a []uintptr) result {
		name := goString(uint64(a[2]))
		code := fakeCode[name]
		if code == nil {
			return errInvalidHandle
		}
		return f.add(a[0], &device.Kernel{Name: name, Go: func(l *device.Launch) { code(l.Args()) }})
	},
	// A map begins with the address of its matrix, and says its shape.
	"cuTensorMapEncodeTiled": func(f *fake, a []uintptr) result {
		if a[0]%64 != 0 || a[1] != tensorBF16 || a[2] != 2 || a[9] != tensorSwizzle128 {
			return errInvalidValue
		}
		dims, box := device.Slice[uint64](uint64(a[4]), 2), device.Slice[uint32](uint64(a[6]), 2)
		stride := device.Slice[uint64](uint64(a[5]), 1)[0]
		if box[0] != 64 || stride%16 != 0 {
			return errInvalidValue
		}
		return out(a[0], [3]uint64{uint64(a[3]), dims[0], dims[1]})
	},
	"cuFuncSetAttribute": func(f *fake, a []uintptr) result {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.shared[a[0]] = a[2]
		return success
	},
	"cuLaunchKernel": func(f *fake, a []uintptr) result {
		s := get[*fakeStream](f, a[8])
		f.mu.Lock()
		allowed := a[7] <= f.shared[a[0]] // as if the source declared all of what needs no permission
		f.mu.Unlock()
		if !allowed {
			return errInvalidValue
		}
		l := f.launch(a[0], [3]uint32{uint32(a[1]), uint32(a[2]), uint32(a[3])}, [3]uint32{uint32(a[4]), uint32(a[5]), uint32(a[6])}, a[9])
		f.mu.Lock()
		if s.capture != nil {
			f.next += 16
			s.slot = device.Slot(f.next)
			l.Slot = s.slot
		}
		f.mu.Unlock()
		s.Launch(l)
		return success
	},
	// A launch that begins early has one attribute, and runs in order.
	"cuLaunchKernelEx": func(f *fake, a []uintptr) result {
		c := device.Slice[launchConfig](uint64(a[0]), 1)[0]
		if at := device.Slice[launchAttribute](uint64(c.attributes), 1)[0]; c.count != 1 || at.id != launchEarly || at.value[0] != 1 {
			return errInvalidValue
		}
		f.mu.Lock()
		allowed := uintptr(c.shared) <= f.shared[a[1]]
		f.mu.Unlock()
		if !allowed {
			return errInvalidValue
		}
		get[*fakeStream](f, c.stream).Launch(f.launch(a[1], c.grid, c.block, a[2]))
		return success
	},
	"cuLaunchHostFunc": func(f *fake, a []uintptr) result {
		get[*fakeStream](f, a[0]).Host(func() { purego.SyscallN(a[1], a[2]) })
		return success
	},
}

// launch makes the CPU device's launch from a pointer to pointers.
func (f *fake) launch(function uintptr, grid, block [3]uint32, params uintptr) device.Launch {
	l := device.NewLaunch(get[*device.Kernel](f, function), 1, 1)
	l.Grid, l.Block = grid, block
	for _, p := range device.Slice[uint64](uint64(params), 16) {
		l.Arg(device.Slice[uint64](p, 1)[0])
	}
	return l
}

// captured reports whether an event was recorded last in a capture.
func (f *fake) captured(e *fakeEvent) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return e.capture != nil
}

// join makes a stream part of a capture.
func (f *fake) join(s *fakeStream, c *fakeCapture) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s.capture != c {
		s.capture = c
		c.streams = append(c.streams, s)
	}
}
