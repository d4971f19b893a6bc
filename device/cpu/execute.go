// This file owns what an operation does when its turn has come, and what becomes
// of one that fails.

package cpu

import (
	"fmt"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/memcopy"
)

// execute does one operation. Once the device has failed, only memory is given
// back and waits are still honoured, so that everything comes to an end.
func (d *Device) execute(o *op) {
	switch o.kind {
	case opWait:
		o.ticket.wait()
	case opFree:
		d.release(o.buf)
	case opReplay:
		o.replay.run()
	case opJoin:
	default:
		if d.err() == nil {
			d.effect(o, o.launch)
		}
	}
}

// effect does what the operation is for, with the launch that a graph may have
// updated. A panic in a kernel or a callback becomes the device's error: the
// goroutine is ours, the fault is not. So does the end of the goroutine.
func (d *Device) effect(o *op, l *device.Launch) {
	returned := false
	defer func() {
		p := recover()
		if returned {
			return
		}
		text := "it neither returned nor panicked, but ended its goroutine as runtime.Goexit does"
		if p != nil {
			text = fmt.Sprint(p)
		}
		call := [...]string{opCopy: "copy", opFill: "fill", opHost: "host callback", opUpload: "upload", opDownload: "download", opStamp: "record"}[o.kind]
		if o.kind == opLaunch {
			call = "kernel " + l.Kernel.Name
		}
		d.fail(&device.DriverError{Device: d.name, Call: call, Text: text})
	}()
	switch o.kind {
	case opCopy:
		d.way(o.dst.Buf.Kind(), o.src.Buf.Kind()).carry(o.dst.Len*device.Bytes(o.dst.Rows), func() { d.copyRect(o.dst, o.src) })
	case opFill:
		memcopy.Fill(bytesOf(o.dst.Range), o.value)
	case opLaunch:
		l.Kernel.Go(l)
	case opHost:
		o.fn()
	case opUpload:
		memcopy.Copy(bytesOf(o.dst.Range), o.bytes)
	case opDownload:
		memcopy.Copy(o.bytes, bytesOf(o.src.Range))
	case opStamp:
		o.event.stamp.Store(time.Now().UnixNano())
	}
	returned = true
}

func (d *Device) copyRect(dst, src device.Rect) {
	if dst.Rows == 1 {
		memcopy.Parallel(bytesOf(dst.Range), bytesOf(src.Range), d.copyThreads)
		return
	}
	memcopy.Copy2D(bytesOf(dst.Extent()), int(dst.Pitch), bytesOf(src.Extent()), int(src.Pitch), int(dst.Len), dst.Rows)
}
