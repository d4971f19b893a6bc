// This file owns the counts of steps.

package offload

import (
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// Stats counts what one step did, or all steps together. It does not count replays of
// captured steps, in which the manager takes no part.
type Stats struct {
	Steps int
	residency.Counts
	Departures int // steps that departed from their plan
	Packed     int // sparse views that were packed
	// Device and Host are the most bytes that were in use at once, and Extent is the
	// extent of device memory that was ever used.
	Device, Host, Extent memory.Bytes
	Names                map[string]*Name
}

// Name counts the groups of one name.
type Name struct {
	Groups int
	Saved  memory.Bytes // the bytes of storages, counted where they were saved first
	Moved  memory.Bytes // the bytes of them that were copied out
}

// Stats returns the counts of all ended steps together.
func (m *Manager) Stats() Stats { return m.stats.clone() }

// Last returns the counts of the step that ended last.
func (m *Manager) Last() Stats { return m.last.clone() }

func (s *Stats) clone() Stats {
	c := *s
	c.Names = nil
	for k, n := range s.Names {
		*c.name(k) = *n
	}
	return c
}

// name returns the counts of a group's name in the step under way.
func (m *Manager) name(g memory.GroupID) *Name { return m.last.name(g.Name) }

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

// Live returns the device memory that the step under way counts for saved tensors, what
// is being copied to the host included.
func (m *Manager) Live() memory.Bytes { return m.machine.Device().Live() }

// LowerLimit lowers the limit of the step under way, whose memory is borrowed. What it has
// already stays until more is saved or loaded.
func (m *Manager) LowerLimit(limit memory.Bytes) { m.machine.Device().Lower(limit) }

// count completes the counts of the step and adds them to those of all steps.
func (m *Manager) count() {
	l, all, c := &m.last, &m.stats, m.machine.Counts()
	c.Duplicates += l.Duplicates
	l.Counts, l.Steps = c, 1
	if c.Departed {
		l.Departures = 1
	}
	l.Device, l.Host, l.Extent = m.machine.Device().Peak(), m.machine.Host().Peak(), m.machine.Device().Top()

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
