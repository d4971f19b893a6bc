// This file owns the saved groups.

package residency

import "math"

// group is a group that was saved.
type group struct {
	entries  []entry
	saved    int  // how many were saved before it
	need     int  // the position of its load in the plan's schedule
	leaves   bool // by plan
	loaded   bool
	released bool
}

// entry is one storage of a group. A storage can be in a group several times.
type entry struct {
	s     *Storage
	keeps bool // the group holds the device bytes
}

// group returns a new group with n entries. There are thousands of small groups, so they
// are allocated many at a time.
func (m *Machine) group(n int) *group {
	if len(m.groups) == 0 {
		m.groups = make([]group, 128)
	}
	if len(m.entries) < n {
		m.entries = make([]entry, max(n, 512))
	}
	g := &m.groups[0]
	*g = group{entries: m.entries[:n:n], saved: m.saves, need: math.MaxInt}
	m.groups, m.entries = m.groups[1:], m.entries[n:]
	return g
}

// load marks a group as loaded if by is 1, or as no longer loaded if by is -1.
func (g *group) load(by int) {
	g.loaded = by > 0
	for _, e := range g.entries {
		e.s.loaded += by
	}
}
