// This file owns what an observer is told: every operation of a stream with its own
// beginning and end, before anybody who waits for it goes on.

package cpu

import "github.com/stowage-dev/stowage/device"

// observed executes the n-th operation of the stream, from one, tells of it, and returns
// when it ended. The next one begins then if it was there already: a reading of the clock
// less. What takes no time that matters, a free or a stamp, is not told.
func (s *stream) observed(o *op, n uint64, since int64) int64 {
	w := device.Work{Stream: s.told, First: n - 1, Last: n}
	switch o.kind {
	case opCopy:
		w.Kind, w.Bytes, w.To = device.Copied, o.dst.Len*device.Bytes(o.dst.Rows), o.dst.Buf.Kind()
	case opFill:
		w.Kind, w.Bytes, w.To = device.Copied, o.dst.Len, o.dst.Buf.Kind()
	case opUpload:
		w.Kind, w.Bytes, w.To = device.Copied, device.Bytes(len(o.bytes)), o.dst.Buf.Kind()
	case opDownload:
		w.Kind, w.Bytes, w.To = device.Copied, device.Bytes(len(o.bytes)), device.Host
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
	s.dev.watch.Worked(w)
	return w.End
}
