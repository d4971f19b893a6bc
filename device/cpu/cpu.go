// Package cpu is the CPU as a [device.Device]. It needs no accelerator, and it is the
// reference that every other device is compared with.
//
//	dev, err := cpu.Open(cpu.Options{})
//
// Device memory and host memory are ordinary memory, counted apart. Each stream is a
// goroutine, and kernels are Go functions. The device is as asynchronous as a GPU: work
// runs while the host goes on, streams run side by side, and a captured graph replays
// with the concurrency of the streams that it was captured from.
//
// Options give the device the capacity and the links of an accelerator, so that a
// program can be tested for exhaustion and overlap on a machine without one.
package cpu

// This file owns the device; memory.go where bytes come from, timeline.go how one queue
// waits for another, stream.go the queues, execute.go what an operation does, observe.go
// what an observer is told, capture.go and graph.go capture and replay, link.go the
// modelled links.

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/devicekit"
	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/internal/sysinfo"
	"github.com/stowage-dev/stowage/memory"
)

// Options configure a CPU device. The zero value is a device with the memory of the
// machine, whose links are as fast as the machine copies.
type Options struct {
	// Ordinal numbers the CPU devices of a process. A process that runs several ranks
	// has one device for each.
	Ordinal int
	// Capacity is the most that may be allocated of each kind. Zero means the memory
	// that the machine and the control groups of the process have left.
	Capacity [memory.Kinds]memory.Bytes
	// Links slows copies down to a bandwidth and a latency.
	Links Links
	// CopyThreads is the number of threads that a large copy uses. Zero means one for
	// each core.
	CopyThreads int
	// Observe, if not nil, is told what the device does.
	Observe device.Observer
}

// dev is the CPU as a device.
type dev struct {
	name   string
	info   device.Info
	ledger *devicekit.Ledger
	links  [linkCount]link

	copyThreads int
	watch       device.Observer // or nil
	failed      atomic.Pointer[device.DriverError]
	work        sync.WaitGroup // goroutines of streams and graphs

	hostReads, hostSyncs, launches, copies, copiedBytes, replays atomic.Uint64

	mu      sync.Mutex
	streams map[*stream]struct{}
	graphs  map[*graph]struct{}
	labels  devicekit.Labels // of streams, for the observer
	closed  bool
}

var _ device.Device = (*dev)(nil)

// Open returns a CPU device. It returns a [memory.SettingError] if an option is negative.
// The caller must close the device.
func Open(o Options) (device.Device, error) {
	if o.Ordinal < 0 {
		return nil, &memory.SettingError{Setting: "Ordinal", Asked: strconv.Itoa(o.Ordinal), Problem: "is negative", Remedy: "number devices from zero"}
	}
	if o.CopyThreads < 0 {
		return nil, &memory.SettingError{Setting: "CopyThreads", Asked: strconv.Itoa(o.CopyThreads), Problem: "is negative", Remedy: "give a positive number, or zero for one thread for each core"}
	}
	machine := sync.OnceValue(machineMemory)
	for k, n := range o.Capacity {
		if n < 0 {
			return nil, &memory.SettingError{Setting: "Capacity", Asked: n.String(), Problem: fmt.Sprintf("of %s memory is negative", memory.Kind(k)), Remedy: "give a positive size, or zero for all that the machine has"}
		}
		if n == 0 {
			o.Capacity[k] = machine()
		}
	}
	if err := o.Links.check(); err != nil {
		return nil, err
	}
	name := fmt.Sprintf("cpu:%d", o.Ordinal)
	d := &dev{
		name:   name,
		ledger: devicekit.NewLedger(name, o.Capacity),
		info: device.Info{
			Backend: "cpu", Ordinal: o.Ordinal, Name: name,
			Units: parallel.Threads(), Capacity: o.Capacity,
		},
		copyThreads: o.CopyThreads,
		watch:       o.Observe,
		streams:     map[*stream]struct{}{},
		labels:      devicekit.Labels{},
		graphs:      map[*graph]struct{}{},
	}
	d.ledger.Observe(o.Observe)
	d.links[linkLocal].Link = o.Links.Local
	d.links[linkOut].Link = o.Links.Out
	d.links[linkIn].Link = o.Links.In
	return d, nil
}

// machineMemory returns the memory that this process can get, or a number that is never
// reached if the machine does not say.
func machineMemory() memory.Bytes {
	if n := sysinfo.ReadFrom(os.DirFS("/")).Memory.Usable(); n > 0 {
		return n
	}
	return 1 << 40
}

func (d *dev) Info() device.Info    { return d.info }
func (d *dev) Freeze()              { d.ledger.Freeze() }
func (d *dev) Memory() device.Usage { return d.ledger.Usage() }

func (d *dev) Counters() device.Counters {
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
func (d *dev) fail(err *device.DriverError) { d.failed.CompareAndSwap(nil, err) }

// err returns the device's first error, or nil.
func (d *dev) err() error {
	if e := d.failed.Load(); e != nil {
		return e
	}
	return nil
}

// mustBeOpen panics on a closed device.
func (d *dev) mustBeOpen(who string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		panic("cpu: " + who + " uses the closed device " + d.name)
	}
}

// allStreams returns a snapshot of the streams.
func (d *dev) allStreams() []*stream {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(maps.Keys(d.streams))
}

// Sync waits for the work that all streams were given so far. Captured work is not part
// of it.
func (d *dev) Sync() error {
	d.hostSyncs.Add(1)
	for _, s := range d.allStreams() {
		s.mark().wait()
	}
	return d.err()
}

// Close waits for all work and ends the streams and graphs that are left. It returns the
// first error of the device and an error if memory was never freed. An unfinished capture
// is dropped.
func (d *dev) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		panic("cpu: device closed twice")
	}
	d.closed = true
	graphs := slices.Collect(maps.Keys(d.graphs))
	d.mu.Unlock()
	for _, s := range d.allStreams() {
		s.stop()
	}
	for _, g := range graphs {
		_ = g.Close()
	}
	d.work.Wait()
	return errors.Join(d.err(), d.ledger.Leaks())
}
