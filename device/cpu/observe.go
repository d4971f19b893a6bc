// This file owns what an observer is told: every operation of a stream with its beginning
// and end, before anything that waits for the operation goes on.

package cpu

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// observed executes the n-th operation of the stream, from one, tells the observer, and
// returns when it ended. If the next operation is in the queue already it begins then,
// which saves a reading of the clock. Frees and stamps take no time that matters and are
// not told.
func (s *stream) observed(o *op, n uint64, since int64) int64 {
	w := device.Work{Stream: s.traceName, First: n - 1, Last: n}
	switch o.kind {
	case opCopy:
		w.Kind, w.Bytes, w.To = device.Copied, o.dst.Len*memory.Bytes(o.dst.Rows), o.dst.Buf.Kind()
	case opFill:
		w.Kind, w.Bytes, w.To = device.Copied, o.dst.Len, o.dst.Buf.Kind()
	case opUpload:
		w.Kind, w.Bytes, w.To = device.Copied, memory.Bytes(len(o.bytes)), o.dst.Buf.Kind()
	case opDownload:
		w.Kind, w.Bytes, w.To = device.Copied, memory.Bytes(len(o.bytes)), memory.Host
	case opLaunch:
		w.Kind, w.Name = device.Launched, o.launch.Kernel.Name
	case opHost:
		w.Kind, w.Name = device.Launched, "host callback"
	case opWait:
		w.Kind = device.Waited
	case opReplay:
		w.Kind = device.Replayed
	default:
		s.dev.execute(o)
		return 0
	}
	if w.Begin = since; since == 0 {
		w.Begin = device.Now()
	}
	s.dev.execute(o)
	w.End = device.Now()
	s.dev.watch.WorkDone(w)
	return w.End
}
