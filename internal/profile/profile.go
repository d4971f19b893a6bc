// Package profile times the work of devices launch by launch and says what each kernel
// took, how fast it was, and how far that is from the limits of the device.
//
// A [Profiler] wraps devices. While it is on, each launch, copy and fill lies between two
// timing events of its own, which slows a step down: the host issues three calls for one,
// and the device stamps a time between kernels. While it is off, a wrapped device does
// what the inner one does. Work that is captured into a graph is not timed.
//
// This file owns the profiler, device.go the wrapped device, result.go the figures and
// text.go how they are printed.
package profile

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Profiler times the work of the devices that it wraps. Its methods may be called from any
// goroutine, but Start and Stop only while no work is issued.
type Profiler struct {
	// Measure returns the limits of the device. Nil means that they are unknown.
	Measure func() (Limits, error)

	on      atomic.Bool
	mu      sync.Mutex
	devices []*profiled
	work    map[string]*total
}

// total is the sum of all work of one name.
type total struct {
	count int
	took  time.Duration
	flops float64
	bytes memory.Bytes
	link  bool // between host and device
}

// span is a piece of work between two events.
type span struct {
	name       string
	flops      float64
	bytes      memory.Bytes
	link       bool
	begin, end device.Event
}

// Start makes the profiler time what is issued from now on.
func (p *Profiler) Start() { p.on.Store(true) }

// Stop ends that, waits for the work and adds it up. It returns the first error of a device.
func (p *Profiler) Stop() error {
	p.on.Store(false)
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, d := range p.devices {
		if err := d.Sync(); err != nil {
			return err
		}
		for _, x := range d.take() {
			took, err := x.end.Since(x.begin)
			if err != nil {
				return err
			}
			p.add(x, took)
		}
	}
	return nil
}

// add adds a piece of work to the sums.
func (p *Profiler) add(x span, took time.Duration) {
	if p.work == nil {
		p.work = map[string]*total{}
	}
	t := p.work[x.name]
	if t == nil {
		t = &total{link: x.link}
		p.work[x.name] = t
	}
	t.count++
	t.took += took
	t.flops += x.flops
	t.bytes += x.bytes
}
