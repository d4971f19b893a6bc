// Package cpu is the default device and the oracle for all others: memory is
// plain memory kept and counted apart by kind, each stream is a goroutine, and
// kernels are Go functions. It is as asynchronous as a GPU: work runs while the
// host goes on, streams run side by side, and captured graphs replay with the
// concurrency of the streams they were captured from.
//
// This file owns the device; memory.go where bytes come from, timeline.go how
// one queue waits for another, stream.go the queues, execute.go
// what an operation does, observe.go what is told of it, capture.go and graph.go
// recording and replay, link.go the modelled links.
package cpu

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/sysinfo"
)

// Options configure a CPU device. The zero value is a device with the memory of
// the machine and links as fast as it copies.
type Options struct {
	// Ordinal numbers the device among its like, one a rank.
	Ordinal int
	// Capacity is the most that may be allocated of each kind; zero stands for
	// what the machine and the control groups around the process have left.
	Capacity [device.Kinds]device.Bytes
	// Links slow copies down to a modelled bandwidth and latency.
	Links Links
	// CopyThreads is the number of threads a large copy uses; zero stands for
	// one a core.
	CopyThreads int
	// Observe is told what the device does; nil is nobody.
	Observe device.Observer
}

// Device is the CPU as a device.
type Device struct {
	name   string
	info   device.Info
	ledger *device.Ledger
	links  [linkCount]link

	copyThreads int
	watch       device.Observer // or nil
	failed      atomic.Pointer[device.DriverError]
	work        sync.WaitGroup // goroutines of streams and graphs

	hostReads, hostSyncs, launches, copies, copiedBytes, replays atomic.Uint64

	mu      sync.Mutex
	streams map[*stream]struct{}
	graphs  map[*graph]struct{}
	labels  device.Labels // of streams, for the observer
	closed  bool
}

var _ device.Device = (*Device)(nil)

// Open makes a device.
func Open(o Options) (*Device, error) {
	if o.Ordinal < 0 || o.CopyThreads < 0 {
		return nil, fmt.Errorf("cpu: ordinal %d and copy threads %d must not be negative", o.Ordinal, o.CopyThreads)
	}
	machine := sync.OnceValue(machineMemory)
	for k, n := range o.Capacity {
		if n < 0 {
			return nil, fmt.Errorf("cpu: a capacity of %d bytes of %s memory; give a positive size, or zero for all the machine has", int64(n), device.Kind(k))
		}
		if n == 0 {
			o.Capacity[k] = machine()
		}
	}
	if err := o.Links.check(); err != nil {
		return nil, err
	}
	name := fmt.Sprintf("cpu:%d", o.Ordinal)
	d := &Device{
		name:   name,
		ledger: device.NewLedger(name, o.Capacity),
		info: device.Info{
			Backend: "cpu", Ordinal: o.Ordinal, Name: name,
			Units: runtime.GOMAXPROCS(0), Capacity: o.Capacity,
		},
		copyThreads: o.CopyThreads,
		watch:       o.Observe,
		streams:     map[*stream]struct{}{},
		labels:      device.Labels{},
		graphs:      map[*graph]struct{}{},
	}
	d.ledger.Observe(o.Observe)
	d.links[linkLocal].Link = o.Links.Local
	d.links[linkOut].Link = o.Links.Out
	d.links[linkIn].Link = o.Links.In
	return d, nil
}

// machineMemory is the memory that this process can hope for, or a number that
// never binds where the machine does not say.
func machineMemory() device.Bytes {
	if n := sysinfo.ReadFrom(os.DirFS("/")).Memory.Usable(); n > 0 {
		return n
	}
	return 1 << 40
}

func (d *Device) Info() device.Info    { return d.info }
func (d *Device) Freeze()              { d.ledger.Freeze() }
func (d *Device) Memory() device.Usage { return d.ledger.Usage() }

func (d *Device) Counters() device.Counters {
	return device.Counters{
		HostReads:   d.hostReads.Load(),
		HostSyncs:   d.hostSyncs.Load(),
		Launches:    d.launches.Load(),
		Copies:      d.copies.Load(),
		CopiedBytes: d.copiedBytes.Load(),
		Replays:     d.replays.Load(),
	}
}

// fail makes err the device's error unless it has one already.
func (d *Device) fail(err *device.DriverError) { d.failed.CompareAndSwap(nil, err) }

// err is the device's first error, or nil.
func (d *Device) err() error {
	if e := d.failed.Load(); e != nil {
		return e
	}
	return nil
}

// mustBeOpen panics on a closed device.
func (d *Device) mustBeOpen(who string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		panic("cpu: " + who + " asks for more of the closed device " + d.name)
	}
}

// all is a snapshot of the streams.
func (d *Device) all() []*stream {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(maps.Keys(d.streams))
}

// Sync waits for what all streams have been given so far. The recorded work of
// a stream that captures is not given yet.
func (d *Device) Sync() error {
	d.hostSyncs.Add(1)
	for _, s := range d.all() {
		s.mark().wait()
	}
	return d.err()
}

// Close waits for all work, ends the streams and graphs that are left and
// reports what went wrong: the first error, then memory that was never freed.
// A capture under way is dropped.
func (d *Device) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		panic("cpu: device closed twice")
	}
	d.closed = true
	graphs := slices.Collect(maps.Keys(d.graphs))
	d.mu.Unlock()
	for _, s := range d.all() {
		s.stop()
	}
	for _, g := range graphs {
		_ = g.Close()
	}
	d.work.Wait()
	return errors.Join(d.err(), d.ledger.Leaks())
}
