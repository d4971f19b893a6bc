// Package session is the runtime as other languages use it: one call at a time, storages
// by number, memory that is the caller's. Package bridge gives it a C interface; its
// header, stowage.h, says what the calls mean.
//
// This file owns the session, step.go the calls of a step, rows.go storages whose rows
// are counted on the device, config.go the configuration, stats.go figures and trace.
package session

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"github.com/stowage-dev/stowage"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/offload"
	"github.com/stowage-dev/stowage/policy"
	"github.com/stowage-dev/stowage/trace"
)

// Lend asks the caller for memory: its address, or zero.
type Lend func(storage, bytes uint64) uint64

// Session is a runtime and the step under way. Calls may come from any goroutine.
type Session struct {
	mu      sync.Mutex
	cfg     Config
	dev     device.Device
	gpu     *cuda.Device // or nil
	compute *steered
	streams map[uint64]device.Stream
	handle  uint64
	rt      *stowage.Runtime
	lend    Lend
	sink    switched

	step     *stowage.Step // or nil
	key      stowage.Key
	captured bool // the step is part of somebody's graph
	steps    int
	names    map[string]int // groups of each name in this step
	groups   map[uint64]*group
	last     uint64 // number of a group in this step
	storages map[uint64]*offload.Storage
	ids      map[*offload.Storage]uint64
	left     []uint64 // what the caller has not been told
	shelf
	closed bool
}

// steered is compute, whichever stream that is in this step.
type steered struct{ device.Stream }

// Open opens a device, or finds the one that the caller uses, and a runtime on it.
func Open(cfg Config, lend Lend) (*Session, error) {
	s := &Session{cfg: cfg, lend: lend, streams: map[uint64]device.Stream{}, handle: cfg.Stream}
	s.stays = map[stowage.Key][]bool{}
	err := s.open()
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Session) open() (err error) {
	c := &s.cfg
	if c.Device == "cpu" {
		s.dev, err = cpu.Open(cpu.Options{Ordinal: c.Ordinal})
	} else {
		s.gpu, err = openGPU(c)
		s.dev = s.gpu
	}
	if err != nil {
		s.dev, s.gpu = nil, nil
		return err
	}
	stream, err := s.stream(c.Stream)
	if err != nil {
		return err
	}
	s.compute = &steered{stream}
	log := slog.DiscardHandler
	if c.Log {
		log = slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})
	}
	s.rt, err = stowage.Open(stowage.Config{
		Device: s.dev, Compute: s.compute, Budget: c.Budget, Host: c.Host, Names: c.names(), NoRecompute: true,
		Lend: s.borrow, Least: c.Least, Rank: c.Rank, Log: slog.New(log), Trace: &s.sink,
	})
	return err
}

func openGPU(c *Config) (*cuda.Device, error) {
	if c.Context == 0 {
		return cuda.Open(cuda.Options{Ordinal: c.Ordinal})
	}
	return cuda.OpenContext(uintptr(c.Context), cuda.Options{})
}

// stream is the caller's stream of a handle; the CPU has one of its own.
func (s *Session) stream(handle uint64) (device.Stream, error) {
	if x := s.streams[handle]; x != nil {
		return x, nil
	}
	var x device.Stream
	var err error
	if s.gpu != nil {
		x = s.gpu.ImportStream(uintptr(handle), fmt.Sprintf("compute %#x", handle))
	} else if handle != 0 {
		return nil, fmt.Errorf("stowage: stream %#x on the CPU; give 0", handle)
	} else {
		x, err = s.dev.NewStream("compute")
	}
	if err == nil {
		s.streams[handle] = x
	}
	return x, err
}

// steer makes a stream the one that steps are issued on. It comes after what the one
// before was given, unless it is captured: who captures has waited for everything.
func (s *Session) steer(handle uint64) error {
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

// guard does a call with the session's lock, and on a thread that captures nothing of
// what it does beside its work; panics become errors.
func (s *Session) guard(fn func() error) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return Wrong{errors.New("stowage: the runtime is closed; open another")}
	}
	run := func() {
		defer func() {
			if x := recover(); x != nil {
				err = Wrong{fmt.Errorf("%v", x)}
			}
			if len(s.left) > 0 { // told to the caller, whether the call failed or not
				err = s.settle(err)
			}
		}()
		err = fn()
		var floor *policy.BelowFloor
		if errors.As(err, &floor) {
			err = Wrong{tooSmall{floor}}
		}
	}
	if s.captured && s.gpu != nil {
		s.gpu.Relaxed(run)
	} else {
		run()
	}
	return err
}

// tooSmall is a budget below what a step needs, for somebody who gave nothing else.
type tooSmall struct{ *policy.BelowFloor }

func (e tooSmall) Error() string {
	more := "raise it, or make the batch smaller"
	if e.HostFull {
		more = "raise it, give more host memory, or make the batch smaller"
	}
	return fmt.Sprintf("stowage: a budget of %v is too small: this step needs %v (%d bytes) with everything moved that may be; %s", device.Bytes(e.Budget), device.Bytes(e.Floor), e.Floor, more)
}

func (e tooSmall) Unwrap() error { return e.BelowFloor }

// Wrong is wrong use by the caller; Err is the sentence.
type Wrong struct{ Err error }

func (w Wrong) Error() string { return w.Err.Error() }
func (w Wrong) Unwrap() error { return w.Err }

// Overflow says that a step had more rows than room. There is more now: it can be run again.
type Overflow struct{ Asked, Had device.Bytes }

func (o *Overflow) Error() string {
	return fmt.Sprintf("stowage: rows of a step needed %v, and there was room for %v; run the step again: there is more now", o.Asked, o.Had)
}

// Close ends the session. A step under way is given up.
func (s *Session) Close() (first error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	if s.step != nil {
		_ = s.end(errors.New("stowage: the runtime is closed inside of a step"))
	}
	if s.dev == nil {
		return nil
	}
	_ = s.dev.Sync()
	if s.shelf.shelf != nil {
		s.shelf.shelf.Close()
	}
	if s.rt != nil {
		first = cmp.Or(first, s.rt.Close())
	}
	first = cmp.Or(first, s.sink.to(nil, trace.Header{}))
	for _, x := range s.streams {
		first = cmp.Or(first, x.Close())
	}
	return cmp.Or(first, s.dev.Close())
}
