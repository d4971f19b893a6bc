// This file owns the order between streams: waits are issued only where nothing
// else gives the order, and as late as the work that needs them.

package fsdp

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
)

// maxLanes bounds the streams of one pipeline: two of its own and the caller's.
const maxLanes = 8

// clock says, for each stream, up to which of its marks something comes after.
type clock [maxLanes]uint64

func (c *clock) join(d *clock) {
	for i := range c {
		c[i] = max(c[i], d[i])
	}
}

// mark is an event at its last recording, with all that comes before it. One
// that was never recorded comes before everything.
type mark struct {
	event device.Event
	from  int
	clock clock
}

// before tells whether whoever knows c comes after the mark already.
func (k *mark) before(c *clock) bool { return c[k.from] >= k.clock[k.from] }

// lane is a stream and what its work is known to come after. Waits are kept
// until flush, and one that another implies is never issued.
type lane struct {
	id      int
	stream  device.Stream
	clock   clock
	pending []*mark
	last    mark // the newest of its marks: all its work so far
}

// record marks the lane's work so far.
func (l *lane) record(k *mark) {
	l.stream.Record(k.event)
	l.clock[l.id]++
	k.from, k.clock = l.id, l.clock
	l.last = *k
}

// after makes the lane's next work come after a mark.
func (l *lane) after(k *mark) {
	if k.before(&l.clock) {
		return
	}
	for _, p := range l.pending {
		if p == k {
			return
		}
	}
	l.pending = append(l.pending, k)
}

// flush issues the waits that are left, before work is.
func (l *lane) flush() {
	for i, k := range l.pending {
		if !k.before(&l.clock) && !l.implied(i) {
			l.stream.Wait(k.event)
			l.clock.join(&k.clock)
		}
	}
	l.pending = l.pending[:0]
}

// implied tells whether a later pending wait makes pending wait i needless.
func (l *lane) implied(i int) bool {
	for _, k := range l.pending[i+1:] {
		if l.pending[i].before(&k.clock) {
			return true
		}
	}
	return false
}

// lanes are the streams that exchange memory, and their events.
type lanes struct {
	dev    device.Device
	all    []*lane
	events []device.Event
	spare  []device.Event
	left   []*device.Buffer // that a capture refused to free
}

// of is the lane of a stream, made when the stream is first seen.
func (ls *lanes) of(s device.Stream) *lane {
	for _, l := range ls.all {
		if l.stream == s {
			return l
		}
	}
	if len(ls.all) == maxLanes {
		panic(fmt.Sprintf("fsdp: stream %q is one more than the %d that may exchange memory; use fewer streams", s.Name(), maxLanes))
	}
	l := &lane{id: len(ls.all), stream: s}
	ls.all = append(ls.all, l)
	return l
}

// arm gives a mark an event to be recorded again and again.
func (ls *lanes) arm(k *mark) (err error) {
	if n := len(ls.spare); n > 0 {
		k.event, ls.spare = ls.spare[n-1], ls.spare[:n-1]
		return nil
	}
	if k.event, err = ls.dev.NewEvent(0); err == nil {
		ls.events = append(ls.events, k.event)
	}
	return err
}

// disarm takes a mark's event back once nobody waits for it any more.
func (ls *lanes) disarm(k *mark) {
	if k.event != nil {
		ls.spare = append(ls.spare, k.event)
		k.event = nil
	}
}

// sync waits until the lanes are empty: nobody needs to wait for what came
// before.
func (ls *lanes) sync() (first error) {
	var known clock
	for _, l := range ls.all {
		if err := l.stream.Sync(); first == nil {
			first = err
		}
		known.join(&l.clock)
	}
	for _, l := range ls.all {
		l.clock, l.pending = known, l.pending[:0]
	}
	return first
}

// free frees dynamic memory. A capture refuses to, and is spoilt; then it is done
// at the end.
func (ls *lanes) free(buf *device.Buffer, s device.Stream) {
	if s.Free(buf); buf.Live() {
		ls.left = append(ls.left, buf)
	}
}

func (ls *lanes) close(s device.Stream) (first error) {
	for _, buf := range ls.left {
		s.Free(buf)
	}
	for _, e := range ls.events {
		if err := e.Close(); first == nil {
			first = err
		}
	}
	ls.events, ls.spare = nil, nil
	return first
}
