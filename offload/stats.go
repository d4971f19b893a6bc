// This file owns what is counted.

package offload

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/schedule"
)

// Stats are what one step did, or all steps together. A replay of a captured step
// is not counted: the manager takes no part in it.
type Stats struct {
	Steps int
	residency.Counts
	Departures int // steps that left their plan
	Packed     int // sparse views that were packed
	// Device and Host are the most that was in use of both, Extent what of the
	// device's memory was ever touched.
	Device, Host, Extent device.Bytes
	Names                map[string]*Name
}

// Name is the groups of one name.
type Name struct {
	Groups int
	Saved  device.Bytes // bytes of storages, each where it was saved first
	Moved  device.Bytes // of them, copied out
}

// Stats are all ended steps together.
func (m *Manager) Stats() Stats { return m.stats.clone() }

// Last is the step that ended last.
func (m *Manager) Last() Stats { return m.last.clone() }

func (s *Stats) clone() Stats {
	c := *s
	c.Names = nil
	for k, n := range s.Names {
		*c.name(k) = *n
	}
	return c
}

// name is the entry of a group in the step under way.
func (m *Manager) name(g schedule.Group) *Name { return m.last.name(g.Name) }

func (s *Stats) name(name string) *Name {
	if s.Names == nil {
		s.Names = map[string]*Name{}
	}
	n := s.Names[name]
	if n == nil {
		n = &Name{}
		s.Names[name] = n
	}
	return n
}

// count closes the step's figures and adds them to those of all.
func (m *Manager) count() {
	l, all, c := &m.last, &m.stats, m.machine.Counts()
	c.Duplicates += l.Duplicates
	l.Counts, l.Steps = c, 1
	if c.Departed {
		l.Departures = 1
	}
	l.Device, l.Host, l.Extent = device.Bytes(m.machine.Device().Peak()), device.Bytes(m.machine.Host().Peak()), device.Bytes(m.machine.Device().Top())

	all.Steps++
	all.Out, all.In, all.OutBytes, all.InBytes = all.Out+c.Out, all.In+c.In, all.OutBytes+c.OutBytes, all.InBytes+c.InBytes
	all.Evicted, all.Late, all.Duplicates, all.HostFull = all.Evicted+c.Evicted, all.Late+c.Late, all.Duplicates+c.Duplicates, all.HostFull+c.HostFull
	all.Departed, all.Departures, all.Packed = all.Departed || c.Departed, all.Departures+l.Departures, all.Packed+l.Packed
	all.Device, all.Host, all.Extent = max(all.Device, l.Device), max(all.Host, l.Host), max(all.Extent, l.Extent)
	for k, n := range l.Names {
		t := all.name(k)
		t.Groups, t.Saved, t.Moved = t.Groups+n.Groups, t.Saved+n.Saved, t.Moved+n.Moved
	}
}
