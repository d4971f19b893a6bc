// This file owns the speed of links, which is measured once for each device.

package session

import (
	"errors"
	"fmt"
	"sync"

	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/memory"
)

// Links opens sessions and remembers how fast their devices copy. Measuring takes a fraction
// of a second, so a process that opens many sessions would otherwise spend minutes on it;
// and sessions that measure at the same time would measure each other. The zero value is
// ready to use.
type Links struct {
	mu    sync.Mutex
	known map[place]memory.Links
}

// place names a device of this machine.
type place struct {
	device  string
	ordinal int
	context uint64
}

func placeOf(c *Config) place { return place{c.Device, c.Ordinal, c.Context} }

// Open opens a session. It measures the links if the session needs them and no session of
// the same device did so before.
func (l *Links) Open(cfg Config, provide Provide) (*Session, error) {
	s, err := l.open(cfg, provide)
	if s != nil {
		s.links = l
	}
	return s, err
}

func (l *Links) open(cfg Config, provide Provide) (*Session, error) {
	if !cfg.moves() || cfg.Links != (memory.Links{}) {
		return Open(cfg, provide)
	}
	at := placeOf(&cfg)
	l.mu.Lock()
	if known, ok := l.known[at]; ok {
		l.mu.Unlock()
		cfg.Links = known
		return Open(cfg, provide)
	}
	defer l.mu.Unlock() // those who come meanwhile wait for the result
	s, err := Open(cfg, provide)
	if err != nil {
		return nil, err
	}
	l.note(at, s.rt.Links())
	return s, nil
}

// note remembers rates. The lock is held.
func (l *Links) note(at place, rates memory.Links) {
	if l.known == nil {
		l.known = map[place]memory.Links{}
	}
	l.known[at] = rates
}

// rates returns the rates of the session's links. A session that moves nothing has not
// measured them; then they are measured now, unless another session of the same device did
// so before. The session is locked.
func (s *Session) rates() (memory.Links, error) {
	if known := s.rt.Links(); known != (memory.Links{}) {
		return known, nil
	}
	if s.links == nil {
		s.links = &Links{}
	}
	l, at := s.links, placeOf(&s.cfg)
	l.mu.Lock()
	defer l.mu.Unlock()
	if known, ok := l.known[at]; ok {
		return known, nil
	}
	if s.captured {
		return memory.Links{}, Wrong{errors.New("stowage: the links to host memory were not measured yet, and a captured step cannot do it; ask once before the capture, or give links")}
	}
	rates, err := engine.MeasureLinks(s.dev)
	if err != nil {
		return memory.Links{}, fmt.Errorf("stowage: measuring the links to host memory: %w", err)
	}
	l.note(at, rates)
	return rates, nil
}
