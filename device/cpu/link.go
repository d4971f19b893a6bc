// This file owns the modelled links, which let overlap be studied on a machine
// without a GPU.

package cpu

import (
	"fmt"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/device"
)

// Link is a bandwidth and a latency; the zero Link is as fast as the machine.
type Link struct {
	BytesPerSecond float64
	Latency        time.Duration
}

// Links are the ways between the kinds of memory. Each carries one copy at a
// time, as a GPU's copy engines do, and works beside the others.
type Links struct {
	Local Link // device to device
	Out   Link // device to host
	In    Link // host to device; also host to host
}

const (
	linkLocal = iota
	linkOut
	linkIn
	linkCount
)

func (l Links) check() error {
	for _, x := range []Link{l.Local, l.Out, l.In} {
		if x.BytesPerSecond < 0 || x.Latency < 0 {
			return fmt.Errorf("cpu: a link of %g bytes a second with a latency of %v; give positive figures, or zero for no limit", x.BytesPerSecond, x.Latency)
		}
	}
	return nil
}

// link is the state of one way: when it will be free, and when the last copy's
// sleep returned.
type link struct {
	Link
	mu         sync.Mutex
	free, woke time.Time
}

const (
	// linkSlack is how long after a copy has returned another one still follows it
	// at once: what a stream takes from one piece of work to the next.
	linkSlack = 100 * time.Microsecond
	// linkLate is the most by which a sleep returns late; what is more than that is
	// a pause of the machine, and not made up for.
	linkLate = 2 * time.Millisecond
)

// carry does a copy and lasts as long as the link would take. The end is
// reckoned from when the link became free, not from when a sleep returned, so
// that late wake-ups (up to a millisecond each) do not add up over copies that
// follow each other.
func (l *link) carry(n device.Bytes, copyNow func()) {
	if l.Link == (Link{}) {
		copyNow()
		return
	}
	took := l.Latency
	if l.BytesPerSecond > 0 {
		took += time.Duration(float64(n) / l.BytesPerSecond * float64(time.Second))
	}
	l.mu.Lock()
	now := time.Now()
	if l.free.Before(now) {
		late := l.woke.Sub(l.free)
		if now.Sub(l.woke) > linkSlack {
			late = 0
		}
		l.free = now.Add(-min(late, linkLate))
	}
	l.free = l.free.Add(took)
	until := l.free
	l.mu.Unlock()
	copyNow()
	time.Sleep(time.Until(until))
	l.mu.Lock()
	l.woke = time.Now()
	l.mu.Unlock()
}

// way is the link between two kinds.
func (d *Device) way(dst, src device.Kind) *link {
	switch {
	case dst == device.Accel && src == device.Accel:
		return &d.links[linkLocal]
	case dst == device.Host && src == device.Accel:
		return &d.links[linkOut]
	}
	return &d.links[linkIn]
}
