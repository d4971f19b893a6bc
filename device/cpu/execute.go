// This file owns what an operation does when its turn comes, and what happens if it
// fails.

package cpu

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/memcopy"
	"github.com/stowage-dev/stowage/memory"
)

// execute does one operation. Once the device has failed, only memory is given
// back and waits are still honoured, so that everything comes to an end.
func (d *dev) execute(o *op) {
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

// effect executes an operation, with the launch that a graph may have updated. A panic in
// a kernel or a callback becomes the device's error, because it must not end the process,
// and so does the end of the goroutine.
func (d *dev) effect(o *op, l *device.Launch) {
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
		d.linkBetween(o.dst.Buf.Kind(), o.src.Buf.Kind()).carry(o.dst.Len*memory.Bytes(o.dst.Rows), func() { d.copyRect(o.dst, o.src) })
	case opFill:
		memcopy.Fill(bytesOf(o.dst.Range), o.value)
	case opLaunch:
		d.launch(l)
	case opHost:
		o.fn()
	case opUpload:
		memcopy.Copy(bytesOf(o.dst.Range), o.bytes)
	case opDownload:
		memcopy.Copy(o.bytes, bytesOf(o.src.Range))
	case opStamp:
		o.event.stamp.Store(device.Now())
	}
	returned = true
}

// launch runs a kernel. What it reads and writes of host memory takes its time on the
// modelled links.
func (d *dev) launch(l *device.Launch) {
	if f := l.Kernel.HostReads; f != nil {
		if n := f(l); n > 0 {
			d.links[linkIn].carry(n, func() {})
		}
	}
	l.Kernel.Go(l)
	if f := l.Kernel.HostWrites; f != nil {
		if n := f(l); n > 0 {
			d.links[linkOut].carry(n, func() {})
		}
	}
}

func (d *dev) copyRect(dst, src device.Rect) {
	if dst.Rows == 1 {
		memcopy.Parallel(bytesOf(dst.Range), bytesOf(src.Range), d.copyThreads)
		return
	}
	memcopy.Copy2D(bytesOf(dst.Extent()), int(dst.Pitch), bytesOf(src.Extent()), int(src.Pitch), int(dst.Len), dst.Rows)
}
