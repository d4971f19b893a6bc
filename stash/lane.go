// This file owns the order between the manager's streams: waits are issued only
// where nothing else gives the order, and as late as the work that needs them.

package stash

import "github.com/stowage-dev/stowage/device"

// The streams of a manager.
const (
	laneCompute = iota
	laneOut
	laneBack
	lanes
)

// clock says, for each stream, up to which of its marks something comes after.
type clock [lanes]uint64

func (c *clock) join(d clock) {
	for i := range c {
		c[i] = max(c[i], d[i])
	}
}

// mark is an event at its last recording, with all that comes before it.
type mark struct {
	event device.Event
	from  int
	clock clock
}

// before tells whether whoever knows c comes after the mark already.
func (k *mark) before(c clock) bool { return c[k.from] >= k.clock[k.from] }

// lane is a stream and what its work is known to come after. Waits are kept
// until flush, and one that another implies is never issued. In a loop that runs
// one pass at a time each wait that is left matters: the tests drop them one by
// one, and each is missed.
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

// after makes the lane's next work come after a mark; nil is no mark.
func (l *lane) after(k *mark) {
	if k != nil && k.from != l.id {
		l.pending = append(l.pending, k)
	}
}

// flush issues the waits that are left, before work is.
func (l *lane) flush() {
	for i, k := range l.pending {
		if !k.before(l.clock) && !l.implied(i) {
			l.stream.Wait(k.event)
			l.clock.join(k.clock)
		}
	}
	l.pending = l.pending[:0]
}

// implied tells whether a later pending wait makes pending wait i needless.
func (l *lane) implied(i int) bool {
	for _, k := range l.pending[i+1:] {
		if l.pending[i].before(k.clock) {
			return true
		}
	}
	return false
}

// settled notes that all lanes have been waited for: nobody needs to wait for what
// came before.
func settled(all ...*lane) {
	var known clock
	for _, l := range all {
		known.join(l.clock)
	}
	for _, l := range all {
		l.clock, l.pending = known, nil
	}
}
