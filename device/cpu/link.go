// This file owns the modelled links. They make overlap visible on a machine without a
// GPU.

package cpu

import (
	"fmt"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/memory"
)

// Link is the speed of copies between two kinds of memory. The zero Link is as fast as
// the machine copies.
type Link struct {
	BytesPerSecond float64       // zero means no limit
	Latency        time.Duration // added to each copy
}

// Links are the links of a device. Each carries one copy at a time, as the copy engines
// of a GPU do, and runs beside the others.
type Links struct {
	Local Link // device memory to device memory
	Out   Link // device memory to host memory
	In    Link // host memory to device memory, and host memory to host memory
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
			return &memory.SettingError{
				Setting: "Links", Asked: fmt.Sprintf("of %g bytes a second and %v", x.BytesPerSecond, x.Latency),
				Problem: "has a negative figure", Remedy: "give positive figures, or zero for no limit",
			}
		}
	}
	return nil
}

// link is the state of one link: when it will be free, and when the sleep of the last
// copy returned.
type link struct {
	Link
	mu         sync.Mutex
	free, woke time.Time
}

const (
	// linkSlack is how long after one copy the next still counts as following at
	// once: the time that a stream takes from one piece of work to the next.
	linkSlack = 100 * time.Microsecond
	// linkLate is the most by which a sleep returns late. A longer delay is a pause
	// of the machine, and is not made up for.
	linkLate = 2 * time.Millisecond
)

// carry does a copy and takes as long as the link would. Its end is counted from when the
// link became free, not from when a sleep returned, so that late wake-ups (up to a
// millisecond each) do not add up over copies that follow each other.
func (l *link) carry(n memory.Bytes, copyNow func()) {
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

// linkBetween returns the link between two kinds.
func (d *dev) linkBetween(dst, src memory.Kind) *link {
	switch {
	case dst == memory.Device && src == memory.Device:
		return &d.links[linkLocal]
	case dst == memory.Host && src == memory.Device:
		return &d.links[linkOut]
	}
	return &d.links[linkIn]
}
