// This file owns the search for device bytes: what is evicted to make room, and what is
// prefetched.

package residency

import (
	"fmt"
	"math"
	"slices"

	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// place finds device bytes for a lane that is ordered after the first past copies out in
// any case. It evicts storages if there is no room.
func (m *Machine) place(lane Lane, bytes memory.Bytes, past int) (memory.Bytes, error) {
	for {
		if off, ok := m.room(lane, bytes, past); ok {
			return off, nil
		}
		if m.cfg.Borrowed && len(m.flights) > 0 {
			m.follow(m.flights[0].out) // its bytes are free after that copy
			continue
		}
		if (m.scope || !m.evict()) && !m.device.Raise(m.limitFor(bytes)) {
			return 0, &Full{lane, bytes, m.device.Live(), m.device.Limit(), m.device.largest()}
		}
	}
}

// limitFor returns the limit that applies if nothing else makes room for a storage of the
// given size. With Config.Borrowed only the plan has a limit: a storage that must have
// memory exceeds it, and it applies again to the next.
func (m *Machine) limitFor(bytes memory.Bytes) memory.Bytes {
	if m.cfg.Borrowed {
		return min(m.cfg.Device, m.device.Live()+m.device.Round(bytes))
	}
	return m.cfg.Device
}

// room finds device bytes for a lane, and reports whether there are any.
func (m *Machine) room(lane Lane, bytes memory.Bytes, past int) (memory.Bytes, bool) {
	off, after, ok := m.device.take(lane, bytes, past)
	for _, k := range after {
		m.exec.After(lane, k)
	}
	return off, ok
}

// evict makes room by offloading the storage that is needed last, or the last of those
// that the host has room for. It reports whether there was one.
func (m *Machine) evict() bool {
	below := memory.Bytes(math.MaxInt64)
	for {
		s := m.last(below)
		if s == nil {
			return false
		}
		if s.State != Leaving && !m.depart(s) {
			below = s.Bytes
			continue
		}
		for _, g := range s.in {
			for i := range g.entries {
				if g.entries[i].s == s {
					g.entries[i].keeps = false
				}
			}
		}
		s.keeps = 0
		m.counts.Evicted++
		m.settle(s)
		return true
	}
}

// last returns the storage that is needed last among those that may be evicted: their
// copy out was issued before, or they are smaller than below.
func (m *Machine) last(below memory.Bytes) (last *Storage) {
	m.order = slices.DeleteFunc(m.order, func(g *group) bool { return g.released })
	far := -1
	for _, g := range m.order {
		if m.needs(g) <= far {
			continue // none of its storages is needed later than that
		}
		for _, e := range g.entries {
			s := e.s
			if s.Device == None || s.owned || s.fixed || s.loaded > 0 || s.Bytes < m.cfg.Least || s.State != Leaving && s.Bytes >= below {
				continue
			}
			need := math.MaxInt // for the first of its groups
			for _, g := range s.in {
				need = min(need, m.needs(g))
			}
			if need > far {
				last, far = s, need
			}
		}
	}
	return last
}

// needs returns a number that is higher the later a group is needed: by the plan, or,
// without one, the earlier it was saved.
func (m *Machine) needs(g *group) int {
	if m.planned() {
		return g.need
	}
	return math.MaxInt - g.saved
}

func (m *Machine) planned() bool {
	return m.plan != nil && m.plan.Schedule != nil && !m.counts.Departed
}

// passed prefetches what the plan lists after an event.
func (m *Machine) passed(e schedule.Event) {
	if !m.planned() {
		return
	}
	if m.next >= m.plan.Schedule.Len() || m.plan.Schedule.At(m.next) != e {
		m.counts.Departed = true
		return
	}
	m.next++
	switch {
	case m.next > len(m.plan.Prefetch):
	case m.scope:
		m.due = append(m.due, m.plan.Prefetch[m.next-1]...)
	default:
		m.fetch(m.plan.Prefetch[m.next-1])
	}
}

// fetch prefetches groups. A storage without room is reloaded when it is needed.
func (m *Machine) fetch(names []memory.GroupID) {
	for _, name := range names {
		g := m.saved[name]
		if g == nil {
			continue
		}
		for _, e := range g.entries {
			if m.reclaim(e.s); e.s.State != Away {
				continue
			}
			if off, ok := m.room(In, e.s.Bytes, e.s.out); ok {
				m.bring(e.s, off)
			}
		}
	}
}

// Check panics if the law of the machine or of its heaps is broken.
func (m *Machine) Check() {
	m.device.Check()
	m.host.Check()
	device, host := m.device.Live(), m.host.Live()
	for _, f := range m.flights {
		if f.place != None {
			device -= m.device.Round(f.s.Bytes)
		}
	}
	for _, s := range m.storages {
		out := s.State == Leaving || s.State == Away
		here := s.State == Resident || s.State == Leaving || s.State == Returning
		if (s.Host != None) != out || (s.Device != None) && !here || here && s.Device == None && !s.onLoan || s.held() && !here || s.keeps < 0 || s.keeps+s.loaded > 2*len(s.in) {
			panic(fmt.Sprintf("residency: %v is at %d on the device and at %d on the host", s, s.Device, s.Host))
		}
		if s.Device != None {
			device -= m.device.Round(s.Bytes)
		}
		if s.Host != None {
			host -= m.host.Round(s.Bytes)
		}
	}
	if device != 0 || host != 0 {
		panic(fmt.Sprintf("residency: %d device bytes and %d host bytes belong to no storage", device, host))
	}
}
