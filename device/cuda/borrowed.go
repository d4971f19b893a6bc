// This file owns what differs for borrowed streams: their owner may capture them without
// telling the device.

package cuda

import "runtime"

// captured reports whether the owner of a borrowed stream is capturing it. The driver
// refuses this question for the legacy stream while another is captured; the legacy stream
// is not captured then.
func (s *stream) captured() bool {
	type answer struct{ status, id uint64 }
	out := new(answer)
	d := s.dev
	f := d.tryCall(&d.drv.streamGetCaptureInfo, s.handle, uintptr(pointer(&out.status)), uintptr(pointer(&out.id)), 0, 0, 0)
	return f == nil && out.status&0xffffffff == captureActive
}

// Relaxed runs fn on a thread on which another library's capture forbids nothing. In fn,
// events can be made and queried and memory can be allocated; none of that is captured. Use
// it for calls of the device while the owner of a borrowed stream captures it.
func (d *Device) Relaxed(fn func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	mode := new(uint64)
	*mode = captureRelaxed
	d.call(&d.drv.threadCaptureMode, uintptr(pointer(mode)))
	defer d.call(&d.drv.threadCaptureMode, uintptr(pointer(mode)))
	fn()
}
