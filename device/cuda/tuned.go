// This file owns which kernel a launch runs, and how its arguments are passed: the
// launch's own kernel, or the one that is tuned for this GPU.

package cuda

import "github.com/stowage-dev/stowage/device"

// shape is the kernel that runs, and how. An update of a graph must keep it.
type shape struct {
	kernel      *device.Kernel
	grid, block [3]uint32
	shared      uint32
	early       bool
}

// shapeOf returns what this GPU runs for a launch.
func (d *Device) shapeOf(l *device.Launch) shape {
	t := &l.Tuned
	if t.Kernel == nil || !d.runs(t.Kernel.Image) {
		return shape{l.Kernel, l.Grid, l.Block, l.Shared, false}
	}
	grid := t.Grid
	if t.Resident {
		cluster := max(t.Cluster, 1)
		grid[0] = min(grid[0], max(uint32(d.info.Units)/cluster, 1)*cluster)
	}
	return shape{t.Kernel, grid, t.Block, t.Shared, t.Early}
}

// runs reports whether this GPU runs kernels of an image that are tuned.
func (d *Device) runs(img *device.Image) bool {
	if d.drv.tensorMapEncode.addr == 0 {
		return false
	}
	_, ok := choose(img.Variants, d.major, d.minor)
	return ok
}

// frameMaps holds the tensor maps of a tuned launch, and where its arguments and maps are.
// A map must lie at a multiple of 64 bytes.
type frameMaps struct {
	room  [(8 + 1) * 128]byte
	where [16 + 8]uintptr
	// What the driver reads to make a map.
	dims, strides [2]uint64
	box, steps    [2]uint32
}

// pass puts the arguments of a launch into a frame and returns the address of the list of
// their addresses. It returns zero if the driver refuses a tensor map, which becomes the
// device's error.
func (d *Device) pass(f *frame, l *device.Launch, run shape) uintptr {
	n := copy(f.params[:], l.Args())
	maps := l.Tuned.Maps()
	if run.kernel == l.Kernel || len(maps) == 0 {
		return uintptr(pointer(&f.where))
	}
	if f.maps == nil {
		f.maps = new(frameMaps)
	}
	m := f.maps
	copy(m.where[:], f.where[:])
	at := (uintptr(pointer(&m.room)) + 63) &^ 63
	for i, t := range maps {
		m.dims, m.strides = [2]uint64{uint64(t.Cols), uint64(t.Rows)}, [2]uint64{2 * uint64(t.Pitch)}
		m.box, m.steps = [2]uint32{64, t.BoxRows}, [2]uint32{1, 1}
		f.args = [12]uintptr{
			at, tensorBF16, 2, t.Addr,
			uintptr(pointer(&m.dims)), uintptr(pointer(&m.strides)), uintptr(pointer(&m.box)), uintptr(pointer(&m.steps)),
			0, tensorSwizzle128, tensorPromote256, 0,
		}
		if r := d.enqueue(f, &d.drv.tensorMapEncode, 12); r != success {
			d.broken(&failure{&d.drv.tensorMapEncode, r})
			return 0
		}
		m.where[n+i] = at
		at += 128
	}
	return uintptr(pointer(&m.where))
}

// frameEarly is what the driver reads to launch a kernel that begins early.
type frameEarly struct {
	config    launchConfig
	attribute launchAttribute
}

// beginEarly makes a frame with the arguments of cuLaunchKernel one with those of
// cuLaunchKernelEx, which lets the kernel begin early. It returns their number.
func (f *frame) beginEarly(run shape, stream uintptr) int {
	if f.early == nil {
		f.early = &frameEarly{attribute: launchAttribute{id: launchEarly, value: [16]int32{1}}}
	}
	e := f.early
	e.config = launchConfig{grid: run.grid, block: run.block, shared: run.shared, stream: stream, attributes: uintptr(pointer(&e.attribute)), count: 1}
	f.args = [12]uintptr{uintptr(pointer(&e.config)), f.args[0], f.args[9], 0}
	return 4
}
