// This file owns test programs as plain data: a list of calls over four streams
// that can be generated, cut, run on a device and judged by an oracle.

package check_test

import (
	"fmt"
	"strings"

	"github.com/stowage-dev/stowage/device"
)

// The world of a test program: six small buffers, the last two of host memory,
// four streams, plain events, and two external ones at the end.
const (
	bufBytes  = 256
	buffers   = 6
	firstHost = 4
	streams   = 4
	plain     = 6
	events    = plain + 2
)

type kind uint8

const (
	doCopy    kind = iota
	doCopy2D       // dst and src are rectangles
	doFill         //
	doMix          // a kernel: dst = 31*dst + src + value
	doColumns      // a kernel over a rectangle: dst = 5*dst + value
	doAdd          // a kernel that adds value to 64-bit words, atomically
	doHost         // a callback: dst = dst ^ value, in host memory
	doUpload
	doDownload
	doView // by the host: dst = dst + value if value is odd, else only a look
	doRecord
	doWait
	doSyncStream
	doSyncEvent
	doSyncDevice
	doPoll // asks the event until it is done
	doBegin
	doEnd
	doReplay
	doUpdate // of the launch in slot 1
	kinds
)

func (k kind) String() string {
	return [kinds]string{
		"copy", "copy2d", "fill", "mix", "columns", "add", "host", "upload", "download", "view",
		"record", "wait", "sync stream", "sync event", "sync device", "poll", "begin", "end", "replay", "update",
	}[k]
}

// rect is bytes of one of the buffers.
type rect struct{ buf, off, n, pitch, rows int }

func (r rect) String() string {
	if r.rows == 1 {
		return fmt.Sprintf("%d[%d,%d)", r.buf, r.off, r.off+r.n)
	}
	return fmt.Sprintf("%d[%d+%d*%d x %d]", r.buf, r.off, r.n, r.pitch, r.rows)
}

// call is one call of a program.
type call struct {
	kind     kind
	stream   int
	event    int
	dst, src rect
	value    byte
	slot     device.Slot
}

func (c call) String() string {
	switch {
	case c.kind < doRecord:
		return fmt.Sprintf("%v on %d: %v from %v with %d", c.kind, c.stream, c.dst, c.src, c.value)
	case c.kind == doUpdate:
		return fmt.Sprintf("update to %v from %v with %d", c.dst, c.src, c.value)
	}
	return fmt.Sprintf("%v on %d, event %d", c.kind, c.stream, c.event)
}

// work reports whether the call issues an operation with uses.
func (c call) work() bool { return c.kind < doRecord }

func (c call) external() bool { return c.event >= plain }

// use is a declaration of a call.
type use struct {
	rect
	mode device.Mode
}

// uses returns what the call declares.
func (c call) uses() []use {
	switch c.kind {
	case doCopy, doCopy2D:
		return []use{{c.src, device.Read}, {c.dst, device.Write}}
	case doMix:
		return []use{{c.dst, device.Write}, {c.src, device.Read}}
	case doAdd:
		return []use{{c.dst, device.Atomic}}
	case doDownload:
		return []use{{c.src, device.Read}}
	case doView:
		if c.value%2 == 0 {
			return []use{{c.dst, device.Read}}
		}
	}
	return []use{{c.dst, device.Write}}
}

type program []call

func (p program) String() string {
	var s strings.Builder
	for i, c := range p {
		fmt.Fprintf(&s, "%4d %v\n", i, c)
	}
	return s.String()
}

// without returns the program with one call left out.
func (p program) without(i int) program {
	return append(append(program{}, p[:i]...), p[i+1:]...)
}

// memory is the buffers of the sequential model.
type contents [buffers][bufBytes]byte

func newMemory() (m contents) {
	for b := range m {
		for i := range m[b] {
			m[b][i] = byte(i*(b+3) + b)
		}
	}
	return m
}

// each calls fn for the bytes of two rectangles of one shape.
func each(dst, src rect, fn func(d, s int)) {
	for r := range dst.rows {
		for i := range dst.n {
			fn(dst.off+r*dst.pitch+i, src.off+r*src.pitch+i)
		}
	}
}

// apply does a call's work on the model.
func (m *contents) apply(c call) {
	dst, src := &m[c.dst.buf], &m[c.src.buf]
	switch c.kind {
	case doCopy, doCopy2D:
		each(c.dst, c.src, func(d, s int) { dst[d] = src[s] })
	case doFill, doUpload:
		each(c.dst, c.dst, func(d, _ int) { dst[d] = c.value })
	case doMix:
		each(c.dst, c.src, func(d, s int) { dst[d] = 31*dst[d] + src[s] + c.value })
	case doColumns:
		each(c.dst, c.dst, func(d, _ int) { dst[d] = 5*dst[d] + c.value })
	case doHost:
		each(c.dst, c.dst, func(d, _ int) { dst[d] ^= c.value })
	case doView:
		if c.value%2 == 1 {
			each(c.dst, c.dst, func(d, _ int) { dst[d] += c.value })
		}
	case doAdd:
		for at := c.dst.off; at < c.dst.off+c.dst.n; at += 8 {
			carry := uint(c.value)
			for i := range 8 {
				carry += uint(dst[at+i])
				dst[at+i] = byte(carry)
				carry >>= 8
			}
		}
	}
}
