// This file owns the stream on which rows travel between expert ranks, beside compute.

package layer

import (
	"errors"

	"github.com/stowage-dev/stowage/device"
)

// Link carries the exchanges of a rank's experts on a stream of its own. An exchange begins
// after the work that compute was given before, and compute waits for it only where it
// needs what came. What an exchange reads and writes must not be freed before that. Without
// a Link, exchanges are work of compute.
type Link struct {
	stream device.Stream
	ready  device.Event   // compute has written what is sent
	came   []device.Event // of exchanges under way, in turn
	next   int
}

// mostUnderWay is how many exchanges of a pass are under way at once: choices or counts,
// rows and their weights.
const mostUnderWay = 4

// NewLink makes the stream and its events.
func NewLink(dev device.Device) (_ *Link, err error) {
	l := &Link{came: make([]device.Event, mostUnderWay)}
	if l.stream, err = dev.NewStream("exchange"); err != nil {
		return nil, err
	}
	if l.ready, err = dev.NewEvent(0); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	for i := range l.came {
		if l.came[i], err = dev.NewEvent(0); err != nil {
			return nil, errors.Join(err, l.Close())
		}
	}
	return l, nil
}

// Close waits for all exchanges.
func (l *Link) Close() error {
	err := l.stream.Close()
	for _, e := range append(l.came, l.ready) {
		if e != nil {
			err = errors.Join(err, e.Close())
		}
	}
	return err
}

// begin issues an exchange. The caller calls wait on compute before it uses what came.
func (l *Link) begin(compute device.Stream, exchange func(s device.Stream)) (wait func()) {
	if l == nil {
		exchange(compute)
		return func() {}
	}
	compute.Record(l.ready)
	l.stream.Wait(l.ready)
	exchange(l.stream)
	e := l.came[l.next]
	l.next = (l.next + 1) % len(l.came)
	l.stream.Record(e)
	return func() { compute.Wait(e) }
}
