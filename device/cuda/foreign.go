// This file owns what holds for streams of somebody else's: they may be captured
// without a word to us.

package cuda

import "runtime"

// captured tells whether somebody else is capturing the stream. The legacy stream
// refuses the question while others are captured: it is not.
func (s *stream) captured() bool {
	type answer struct{ status, id uint64 }
	out := new(answer)
	d := s.dev
	f := d.try(&d.drv.streamGetCaptureInfo, s.handle, uintptr(pointer(&out.status)), uintptr(pointer(&out.id)), 0, 0, 0)
	return f == nil && out.status&0xffffffff == captureActive
}

// Relaxed does fn on one thread on which a capture by somebody else forbids nothing:
// events may be made and asked for, and memory taken, none of which is captured.
func (d *Device) Relaxed(fn func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	mode := new(uint64)
	*mode = captureRelaxed
	d.call(&d.drv.threadCaptureMode, uintptr(pointer(mode)))
	defer d.call(&d.drv.threadCaptureMode, uintptr(pointer(mode)))
	fn()
}
