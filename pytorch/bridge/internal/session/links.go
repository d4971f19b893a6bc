// This file owns the speed of links, which is measured once for each device.

package session

import (
	"sync"

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

// Open opens a session. It measures the links if the session needs them and no session of
// the same device did so before.
func (l *Links) Open(cfg Config, provide Provide) (*Session, error) {
	if !cfg.moves() || cfg.Links != (memory.Links{}) {
		return Open(cfg, provide)
	}
	at := place{cfg.Device, cfg.Ordinal, cfg.Context}
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
	if l.known == nil {
		l.known = map[place]memory.Links{}
	}
	l.known[at] = s.rt.Links()
	return s, nil
}
