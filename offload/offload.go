// Package offload does on streams what residency says: saved tensors leave for
// pinned host memory behind the forward pass and come back before the backward
// pass needs them. It knows nothing of models; it is told, in the order in which
// compute's work is issued, what is taken, saved, loaded and released.
//
// This file owns the manager and its memory, step.go the calls of a step, lanes.go
// how the machine's orders become work, tensor.go views, scope.go, scoped.go and
// tail.go graphs in the middle of a step, times.go when compute did what, stats.go what is counted,
// sums.go checksums, digest.go what makes two steps alike, events.go the trace.
package offload

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/trace"
)

// Config configures a manager.
type Config struct {
	// Device and Host are the most that may be used of each kind of memory; zero
	// stands for the device's capacity.
	Device, Host device.Bytes
	// Window and Cap bound the copies out under way, Least is the size below which
	// a storage never leaves: see residency.Config.
	Window, Cap int
	Least       device.Bytes
	// Rank names this rank in errors and in the trace.
	Rank  int
	Trace trace.Sink // nil: none
	// Lend, if it is there, lends memory for a storage that was imported, in compute's
	// order, when it is to come back: all storages are the caller's then, and the device
	// memory that they take is counted here but never allocated. Released is called, as
	// for Import, once that memory may be freed.
	Lend func(s *Storage) (device.Range, error)
	// Checksums compares what leaves with what comes back. The host waits for it at
	// the end of every step.
	Checksums bool
}

// Manager holds the saved tensors of a training loop. One goroutine drives it.
// Work is issued on the caller's compute stream and on two streams of its own.
// Inside a step the host waits for nothing and reads nothing.
type Manager struct {
	dev   device.Device
	cfg   Config
	lanes *order.Set
	lane  [residency.Lanes]*order.Lane
	own   []device.Stream
	mem   [device.Kinds]*device.Buffer // storages here and away
	limit [device.Kinds]device.Bytes
	short error // why memory could not grow to its limit, or nil

	open     bool
	captured bool // with Lend: the step lies in a capture
	step     int
	err      error // the step's first
	machine  *residency.Machine
	storages []*Storage     // by the machine's numbers
	foreign  []device.Range // of the storages that are not ours
	left     []func()       // owners of foreign memory, to be told
	groups   map[schedule.Group][]*Saved
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
	sums     sums
	stats    Stats
	last     Stats
}

// New makes a manager. Nothing is allocated before it is needed or Prepare asks.
func New(dev device.Device, compute device.Stream, cfg Config) (*Manager, error) {
	if cfg.Device < 0 || cfg.Host < 0 || cfg.Window < 0 || cfg.Cap < 0 || cfg.Least < 0 {
		return nil, fmt.Errorf("offload: rank %d: sizes and counts of %+v must not be negative", cfg.Rank, cfg)
	}
	m := &Manager{dev: dev, cfg: cfg, lanes: order.NewSet(dev), limit: [device.Kinds]device.Bytes{cfg.Device, cfg.Host}}
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
	if m.cfg.Lend != nil {
		m.limit[device.Accel] = residency.Unlimited
	}
	for k := range m.mem {
		if m.limit[k] == residency.Unlimited {
			continue
		}
		if most := m.dev.Info().Capacity[k]; m.limit[k] == 0 || m.limit[k] > most {
			m.limit[k] = most
		}
		if m.mem[k], err = m.dev.Reserve(device.Kind(k), m.limit[k], trace.Tier(k).Pool()); err != nil {
			return err
		}
	}
	if m.cfg.Checksums {
		m.sums.buf, err = m.dev.Reserve(device.Accel, sumsMax*sumPair, "checksums")
	}
	return err
}

// Prepare takes memory beforehand, so that steps which use no more of it than that
// never ask the device for any. It is called between steps.
func (m *Manager) Prepare(dev, host device.Bytes) error {
	if m.open {
		panic("offload: memory is prepared inside of a step")
	}
	for k, n := range []device.Bytes{dev, host} {
		if m.mem[k] == nil {
			continue
		}
		if err := m.dev.Grow(m.mem[k], min(n, m.limit[k])); err != nil {
			return &Error{Rank: m.cfg.Rank, Doing: fmt.Sprintf("prepare %v of %v memory", n, device.Kind(k)), Err: err}
		}
	}
	return nil
}

// Memory is what the manager holds of both kinds now.
func (m *Manager) Memory() (dev, host device.Bytes) {
	if m.mem[device.Accel] != nil {
		dev = m.mem[device.Accel].Size()
	}
	return dev, m.mem[device.Host].Size()
}

// Limits are what a step may use of both kinds. They are lower than was configured
// if the device had less.
func (m *Manager) Limits() (dev, host device.Bytes) {
	return m.limit[device.Accel], m.limit[device.Host]
}

// Config is what steps are limited to, for whoever plans them.
func (m *Manager) Config() residency.Config {
	return residency.Config{
		Device: int64(m.limit[device.Accel]), Host: int64(m.limit[device.Host]), Align: int64(device.Align),
		Window: m.cfg.Window, Cap: m.cfg.Cap, Least: int64(m.cfg.Least), Lend: m.cfg.Lend != nil,
	}
}

// extend gives a heap the memory for a higher extent. Where there is none, what
// there is becomes the limit: storages leave instead.
func (m *Manager) extend(kind device.Kind) func(int64) bool {
	return func(top int64) bool {
		b := m.mem[kind]
		if b == nil {
			return true
		}
		if device.Bytes(top) > m.limit[kind] {
			return false
		}
		if err := m.dev.Grow(b, device.Bytes(top)); err != nil {
			m.limit[kind], m.short = b.Size(), err
			var oom *device.OutOfMemory
			if errors.As(err, &oom) {
				m.limit[kind] += min(oom.Free, device.Bytes(top)-b.Size()-1)
			}
			m.digest.add(int64(kind), int64(m.limit[kind]))
		}
		return device.Bytes(top) <= m.limit[kind]
	}
}

// Close frees everything once the work issued is done, also in the middle of a
// step. Scopes are closed by their owner, before.
func (m *Manager) Close() (first error) {
	for _, s := range m.own {
		_ = s.Sync() // what went wrong comes back from Close
	}
	m.lanes.Settle()
	for _, b := range append(m.mem[:], m.sums.buf) {
		if b != nil {
			m.lane[residency.Compute].Stream.Free(b)
		}
	}
	for _, s := range m.own {
		first = cmp.Or(first, s.Close())
	}
	return cmp.Or(first, m.clock.close(), m.lanes.Close())
}

// Error is what went wrong in a step, and for whom.
type Error struct {
	Rank  int
	Group schedule.Group // or zero
	Doing string
	Err   error
}

func (e *Error) Error() string {
	return fmt.Sprintf("offload: rank %d cannot %s: %v", e.Rank, e.Doing, e.Err)
}

func (e *Error) Unwrap() error { return e.Err }

// fail notes an error of the step and gives it back with names.
func (m *Manager) fail(g schedule.Group, doing string, err error) error {
	var full *residency.Full
	if errors.As(err, &full) && m.short != nil {
		full.Limit = int64(m.limit[device.Accel])
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
