// Package offload copies saved tensors to pinned host memory after the forward pass, and
// back before the backward pass needs them. Package residency decides; this package does
// that on streams. It knows nothing of models: its caller says, in the order in which it
// issues the work of compute, what it allocates, saves, loads and releases.
//
// This file owns the manager and its memory, step.go the calls of a step, tensor.go
// views and their saving, lanes.go how decisions become work on streams, scope.go,
// scoped.go and tail.go captured parts of a step, digest.go what makes two steps alike,
// times.go the times of a profiled step, stats.go the counts, events.go the trace.
package offload

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Config configures a manager.
type Config struct {
	// Device and Host are the most bytes of each kind of memory that may be used. Zero
	// means the device's capacity.
	Device, Host memory.Bytes
	// Window and Cap limit the copies out that are under way, and Least is the size below
	// which a storage is never offloaded: see residency.Config.
	Window, Cap int
	Least       memory.Bytes
	// Rank identifies this rank in errors and in the trace.
	Rank int
	// Trace receives the events of steps. Nil means no trace.
	Trace trace.Sink
	// ProvideMemory returns memory that a borrowed storage is reloaded into, in
	// compute's order. If it is not nil, all storages are borrowed: the manager counts
	// the device memory that they take and never allocates any.
	ProvideMemory func(s *Storage) (device.Range, error)
}

// Manager holds the saved tensors of a training loop. It issues work on the caller's
// compute stream and on two streams of its own. Inside of a step the host waits for
// nothing and reads nothing. One goroutine drives a Manager.
type Manager struct {
	dev   device.Device
	cfg   Config
	lanes *order.Set
	lane  [residency.Lanes]*order.Lane
	own   []device.Stream
	mem   [memory.Kinds]*device.Buffer // the bytes of storages, of both kinds
	limit [memory.Kinds]memory.Bytes
	short error // why memory could not grow to its limit, or nil

	open     bool
	captured bool // with ProvideMemory: the step lies in a capture
	step     int
	err      error // the step's first
	machine  *residency.Machine
	storages []*Storage     // by the machine's numbers
	borrowed []device.Range // that scopes may read
	left     []func()       // owners of borrowed memory, to be told
	groups   map[memory.GroupID][]*Saved
	evicted  int           // storages, as the trace has told
	inUse    [2]int64      // by the step's storages, the caller's included, as the trace has told
	most     [2]int64      // of that in the step
	held     []trace.Event // of the scope under way
	first    uint64        // and
	time     int64         // of the event traced last
	table    []*order.Mark // by the machine's marks
	plain    []*order.Mark // those of them that the set made
	scope    *scoped       // under way, or nil
	tail     *tail         // its copies, when it ends
	eager    bool          // a scope is under way that is not captured
	digest   digest
	tape     *residency.Tape // under way, or ended last
	ended    *residency.Tape
	clock    stopwatch
	stats    Stats
	last     Stats
}

// New returns a manager. It allocates nothing before a step or Prepare needs it.
func New(dev device.Device, compute device.Stream, cfg Config) (*Manager, error) {
	if cfg.Device < 0 || cfg.Host < 0 || cfg.Window < 0 || cfg.Cap < 0 || cfg.Least < 0 {
		return nil, fmt.Errorf("offload: rank %d: sizes and counts of %+v must not be negative", cfg.Rank, cfg)
	}
	m := &Manager{dev: dev, cfg: cfg, lanes: order.NewSet(dev), limit: [memory.Kinds]memory.Bytes{cfg.Device, cfg.Host}}
	m.lane[residency.Compute] = m.lanes.Lane(compute)
	if err := m.make(); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

func (m *Manager) make() (err error) {
	for i, name := range []string{"offload", "reload"} {
		s, err := m.dev.NewStream(name)
		if err != nil {
			return err
		}
		m.own = append(m.own, s)
		m.lane[int(residency.Out)+i] = m.lanes.Lane(s)
	}
	if m.cfg.ProvideMemory != nil {
		m.limit[memory.Device] = residency.Unlimited
	}
	for k := range m.mem {
		if m.limit[k] == residency.Unlimited {
			continue
		}
		if most := m.dev.Info().Capacity[k]; m.limit[k] == 0 || m.limit[k] > most {
			m.limit[k] = most
		}
		if m.mem[k], err = m.dev.Reserve(memory.Kind(k), m.limit[k], trace.HeapOwner(memory.Kind(k))); err != nil {
			return err
		}
	}
	return nil
}

// Prepare allocates memory before a step, so that steps which need no more never ask the
// device for any. It panics inside of a step.
func (m *Manager) Prepare(dev, host memory.Bytes) error {
	if m.open {
		panic("offload: memory is prepared inside of a step")
	}
	for k, n := range []memory.Bytes{dev, host} {
		if m.mem[k] == nil {
			continue
		}
		if err := m.dev.Grow(m.mem[k], min(n, m.limit[k])); err != nil {
			return &Error{Rank: m.cfg.Rank, Doing: fmt.Sprintf("prepare %v of %v memory", n, memory.Kind(k)), Err: err}
		}
	}
	return nil
}

// Memory returns the bytes of both kinds that the manager holds now.
func (m *Manager) Memory() (dev, host memory.Bytes) {
	if m.mem[memory.Device] != nil {
		dev = m.mem[memory.Device].Size()
	}
	return dev, m.mem[memory.Host].Size()
}

// Limits returns the bytes of both kinds that a step may use. They are lower than those
// of Config if the device has less.
func (m *Manager) Limits() (dev, host memory.Bytes) {
	return m.limit[memory.Device], m.limit[memory.Host]
}

// Config returns the limits of steps, for planning them.
func (m *Manager) Config() residency.Config {
	return residency.Config{
		Device: m.limit[memory.Device], Host: m.limit[memory.Host], Align: device.Align,
		Window: m.cfg.Window, Cap: m.cfg.Cap, Least: m.cfg.Least, Borrowed: m.cfg.ProvideMemory != nil,
	}
}

// extend returns a function that provides memory for a higher extent of a heap. If the
// device has no more, the present size becomes the limit, and storages are evicted
// instead.
func (m *Manager) extend(kind memory.Kind) func(memory.Bytes) bool {
	return func(top memory.Bytes) bool {
		b := m.mem[kind]
		if b == nil { // it is the caller's, or Limit found none
			return m.cfg.ProvideMemory != nil
		}
		if top > m.limit[kind] {
			return false
		}
		if err := m.dev.Grow(b, top); err != nil {
			m.limit[kind], m.short = b.Size(), err
			var oom *device.OutOfMemory
			if errors.As(err, &oom) {
				m.limit[kind] += min(oom.Free, top-b.Size()-1)
			}
			m.digest.add(int64(kind), int64(m.limit[kind]))
		}
		return top <= m.limit[kind]
	}
}

// Close waits for the issued work and frees everything. It may be called in the middle of
// a step. The caller closes scopes before.
func (m *Manager) Close() (first error) {
	for _, s := range m.own {
		_ = s.Sync() // what went wrong comes back from Close
	}
	m.lanes.Settle()
	for _, b := range m.mem {
		if b != nil {
			m.lane[residency.Compute].Stream.Free(b)
		}
	}
	for _, s := range m.own {
		first = cmp.Or(first, s.Close())
	}
	return cmp.Or(first, m.clock.close(), m.lanes.Close())
}

// Error reports what a rank could not do in a step, and why.
type Error struct {
	Rank  int
	Group memory.GroupID // or zero
	Doing string
	Err   error
}

// Error returns the error as a sentence.
func (e *Error) Error() string {
	return fmt.Sprintf("offload: rank %d cannot %s: %v", e.Rank, e.Doing, e.Err)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// fail notes an error of the step, and returns it with the rank and the group.
func (m *Manager) fail(g memory.GroupID, doing string, err error) error {
	var full *residency.Full
	if errors.As(err, &full) && m.short != nil {
		full.Limit = m.limit[memory.Device]
		full.Run = min(full.Run, full.Limit-full.Live)
		err = fmt.Errorf("%w; the device could give no more: %w", err, m.short)
	}
	if mine := (*Error)(nil); !errors.As(err, &mine) {
		err = &Error{m.cfg.Rank, g, doing, err}
	}
	if m.err == nil {
		m.err = err
	}
	return err
}
