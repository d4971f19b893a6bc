// Package session is the runtime for other languages: one call at a time, storages by
// number, borrowed memory. Package bridge gives it a C interface, which stowage.h
// documents.
//
// This file owns the session, step.go the calls of a step, rows.go storages whose rows
// are counted on the device, backend.go the devices, limit.go the saved limit, links.go
// the speed of links, config.go the configuration, stats.go statistics and the trace,
// choose.go choices for steps that the caller describes.
package session

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/offload"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Provide asks the caller for memory for a storage that is reloaded. It returns the
// address, or zero if there is none.
type Provide func(storage, bytes uint64) uint64

// Session is a runtime and the step under way. Calls may come from any goroutine.
type Session struct {
	mu      sync.Mutex
	cfg     Config
	dev     backend
	compute *switchable
	streams map[uint64]device.Stream
	handle  uint64
	rt      *engine.Runtime
	provide Provide
	sink    switchedSink

	step     *engine.Step // or nil
	key      memory.Key
	captured bool // the step is part of the caller's graph
	steps    int
	names    map[string]int // groups of each name in this step
	groups   map[uint64]*group
	last     uint64 // number of a group in this step
	storages map[uint64]*offload.Storage
	ids      map[*offload.Storage]uint64
	returned []uint64     // storages whose memory is returned and not reported yet
	least    memory.Bytes // that the last limit below it should have been
	links    *Links       // that opened the session, or nil
	chosen   chosen
	rowState
	closed bool
}

// switchable is the compute stream; the caller may give another one for each step.
type switchable struct{ device.Stream }

// Open opens the device, or the caller's context on it, and a runtime. It returns an error
// if the device cannot be opened.
func Open(cfg Config, provide Provide) (*Session, error) {
	dev, err := openBackend(&cfg)
	if err != nil {
		return nil, err
	}
	return openOn(dev, cfg, provide)
}

// openOn opens a session on a device, which it closes.
func openOn(dev backend, cfg Config, provide Provide) (*Session, error) {
	s := &Session{cfg: cfg, dev: dev, provide: provide, streams: map[uint64]device.Stream{}, handle: cfg.Stream}
	s.stays = map[memory.Key][]bool{}
	if err := s.open(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Session) open() (err error) {
	c := &s.cfg
	stream, err := s.stream(c.Stream)
	if err != nil {
		return err
	}
	s.compute = &switchable{stream}
	log := slog.DiscardHandler
	if c.Log {
		log = slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})
	}
	s.rt, err = engine.Open(engine.Config{
		Device: s.dev.Device, Compute: s.compute, SavedLimit: c.Limit, HostLimit: c.Host, GroupChoices: c.choices(), NoRecompute: true,
		Links: c.Links, ProvideMemory: s.provideMemory, MinBytes: c.Least, Rank: c.Rank, Log: slog.New(log), Trace: &s.sink,
	})
	return err
}

// stream returns the caller's stream of a handle.
func (s *Session) stream(handle uint64) (device.Stream, error) {
	if x := s.streams[handle]; x != nil {
		return x, nil
	}
	x, err := s.dev.stream(handle)
	if err == nil {
		s.streams[handle] = x
	}
	return x, err
}

// useStream makes a stream the one that steps are issued on. The new stream waits for the
// work of the old one, unless one of them is captured: whoever captures has waited for
// everything.
func (s *Session) useStream(handle uint64) error {
	x, err := s.stream(handle)
	if err != nil || handle == s.handle {
		return err
	}
	if !x.Capturing() && !s.compute.Stream.Capturing() {
		e, err := s.dev.NewEvent(0)
		if err != nil {
			return err
		}
		s.compute.Record(e)
		x.Wait(e)
		if err := e.Close(); err != nil {
			return err
		}
	}
	s.compute.Stream, s.handle = x, handle
	return nil
}

// guard runs a call under the session's lock.
func (s *Session) guard(fn func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.call(fn)
}

// guardReturning runs a call and returns the storages whose memory the caller may free,
// whether the call failed or not.
func (s *Session) guardReturning(fn func() error) (returned []uint64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	err = s.call(fn)
	returned, s.returned = s.returned, nil
	return returned, err
}

// call runs a call. Inside a capture, the runtime's own allocations are allowed and not
// captured. A panic becomes an error. The session is locked.
func (s *Session) call(fn func() error) (err error) {
	if s.closed {
		return Wrong{errors.New("stowage: this runtime is closed; open another")}
	}
	run := func() {
		defer func() {
			if x := recover(); x != nil {
				err = Wrong{fmt.Errorf("%v", x)}
			}
			if len(s.returned) > 0 { // reported whether the call failed or not
				err = s.waitOnCPU(err)
			}
		}()
		err = fn()
		var floor *memory.BudgetError
		if errors.As(err, &floor) {
			s.least = floor.Need
			err = &TooSmall{Limit: floor.Budget, Least: s.least, HostFull: floor.HostFull}
		}
	}
	if s.captured {
		s.dev.relaxed(run)
	} else {
		run()
	}
	return err
}

// TooSmall reports a limit that no plan keeps to, or no choices for a described step.
type TooSmall struct {
	Limit, Least memory.Bytes
	HostFull     bool // more could be offloaded if there were more host memory
	Described    bool // the step was described
}

func (e *TooSmall) Error() string {
	more := "raise it, or make the batch smaller"
	if e.HostFull {
		more = "raise it, give more host memory, or make the batch smaller"
	}
	if e.Described {
		return fmt.Sprintf("stowage: a limit of %v is too small: the described step needs %v (%d bytes) with everything offloaded or recomputed that may be; %s", e.Limit, e.Least, int64(e.Least), more)
	}
	return fmt.Sprintf("stowage: a saved limit of %v is too small: this step needs %v (%d bytes) with everything offloaded that can be; %s", e.Limit, e.Least, int64(e.Least), more)
}

// Wrong reports wrong use by the caller.
type Wrong struct{ Err error }

func (w Wrong) Error() string { return w.Err.Error() }
func (w Wrong) Unwrap() error { return w.Err }

// Overflow reports a step that had more rows than room. There is more room now, and the
// step can be run again.
type Overflow struct{ Asked, Had memory.Bytes }

func (o *Overflow) Error() string {
	return fmt.Sprintf("stowage: the rows of a step need %v and there was room for %v; run the step again: there is more room now", o.Asked, o.Had)
}

// Close closes the session. A step that is under way is abandoned.
func (s *Session) Close() (first error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	if s.step != nil {
		_ = s.end(errors.New("stowage: the runtime was closed inside of a step"))
	}
	_ = s.dev.Sync()
	if s.berths != nil {
		s.berths.Close()
	}
	if s.rt != nil {
		first = cmp.Or(first, s.rt.Close())
	}
	first = cmp.Or(first, s.sink.switchTo(nil, trace.Header{}))
	for _, x := range s.streams {
		first = cmp.Or(first, x.Close())
	}
	return cmp.Or(first, s.dev.Close())
}
