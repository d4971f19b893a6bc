// This file owns the tests of storages that several groups save, and of work that the
// machine avoids because it gains nothing.

package residency

import (
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// A storage of two groups is needed when the first of them is. A storage that already has
// a copy on the host, or that the host has room for, can leave when others cannot.
func TestEvictionOfSharedAndWithFullHost(t *testing.T) {
	m := begin(t, Config{Device: 40, Host: 15}, nil)
	shared := m.take(10)
	m.Save(groupAt(0), Item{ID: shared})
	m.forward(groupAt(1), 20)
	m.Save(groupAt(2), Item{ID: shared})
	m.Give(shared)
	m.forward(groupAt(3), 10)
	m.take(10) // 20 bytes do not fit on the host, 10 do: 3 is needed before 2
	m.x.said(t, "out 0", "compute after copy out 1")
	if m.Counts().Duplicates != 1 || m.Counts().HostFull != 0 || m.Storage(shared).State != Away {
		t.Errorf("%+v, %v", m.Counts(), m.Storage(shared))
	}
	if _, err := m.Take(10); err == nil {
		t.Error("there was room")
	}
	m.Check()
}

// A storage of two groups is needed when the first of them is, in whichever order they
// were saved.
func TestSharedIsNeededWhenTheFirstIs(t *testing.T) {
	for name, x := range map[string]struct {
		loads []int
		want  []string
	}{
		"in the reverse order": {nil, []string{"out 1", "compute after copy out 1", "out 0", "compute after copy out 2"}},
		"the first one first":  {[]int{0, 1, 2}, []string{"out 1", "compute after copy out 1", "out 0", "compute after copy out 2"}},
		"the last one first":   {[]int{2, 1, 0}, []string{"out 1", "compute after copy out 1", "out 0", "compute after copy out 2"}},
		"the other one first":  {[]int{1, 0, 2}, []string{"out 0", "compute after copy out 1", "out 1", "compute after copy out 2"}},
	} {
		t.Run(name, func(t *testing.T) {
			var p *Plan
			if x.loads != nil {
				p = &Plan{Schedule: order([]int{0, 1, 2}, x.loads)}
			}
			m := begin(t, Config{Device: 20, Host: 100}, p)
			shared := m.take(10)
			m.Save(groupAt(0), Item{ID: shared})
			m.forward(groupAt(1), 10)
			m.Save(groupAt(2), Item{ID: shared})
			m.Give(shared)
			m.take(10)
			m.take(10)
			m.x.said(t, x.want...)
		})
	}
}

// order returns a schedule of saves and then loads.
func order(saves, loads []int) *schedule.Schedule {
	s := &schedule.Schedule{}
	for _, g := range saves {
		s.Save(groupAt(g))
	}
	for _, g := range loads {
		s.Load(groupAt(g))
	}
	return s
}

// SPEC S5.3: a storage that several groups save, or one group several times, is copied
// once, stays while one of them keeps it, and is freed with the last.
func TestDuplicatesAreCopiedOnce(t *testing.T) {
	m := begin(t, Config{Device: 100, Host: 100}, leaving(0, 1))
	id := m.take(10)
	m.Save(groupAt(0), Item{ID: id}, Item{ID: id})
	m.Save(groupAt(1), Item{ID: id})
	m.Save(groupAt(2), Item{ID: id}) // keeps it
	m.Give(id)
	m.x.said(t, "out 0")
	if s := m.Storage(id); s.State != Leaving || m.Device().Live() != 10 {
		t.Fatalf("%v", s)
	}
	m.backward(groupAt(2))
	if s := m.Storage(id); s.State != Away || m.Device().Live() != 0 {
		t.Fatalf("%v", s)
	}
	m.backward(groupAt(0))
	m.x.said(t, "copy in after copy out 1", "in 0", "compute after copy in 1")
	if s := m.Storage(id); s.State != Resident {
		t.Fatalf("%v", s)
	}
	m.backward(groupAt(1))
	m.x.said(t)
	if s := m.Storage(id); s.State != Dead || m.Device().Live()+m.Host().Live() != 0 || m.Counts().Duplicates != 3 {
		t.Fatalf("%v, %+v", s, m.Counts())
	}
}

// SPEC S5.3: a storage is not offloaded if a group that stays holds it until after the
// load of the group that leaves, because nothing would read the copy. It is offloaded if
// the other group releases it before that, or leaves as well.
func TestWhatAnotherGroupKeepsStays(t *testing.T) {
	for name, x := range map[string]struct {
		leave, loads []int
		out          bool
	}{
		"kept for longer, by habit": {[]int{1}, nil, false},
		"kept for longer, by plan":  {[]int{1}, []int{1, 0}, false},
		"never loaded":              {[]int{1}, []int{1}, false},
		"kept for less long":        {[]int{1}, []int{0, 1}, true},
		"both leave":                {[]int{0, 1}, []int{1, 0}, true},
	} {
		for _, scope := range []bool{false, true} {
			p := leaving(x.leave...)
			if x.loads != nil {
				p.Schedule = order([]int{0, 1}, x.loads)
			}
			m := begin(t, Config{Device: 100, Host: 100}, p)
			id := m.take(10)
			if scope {
				m.BeginScope()
			}
			m.Save(groupAt(0), Item{ID: id})
			m.Save(groupAt(1), Item{ID: id})
			if scope {
				m.EndScope()
			}
			m.Give(id)
			m.Check()
			if out := slices.Contains(m.x.log, "out 0"); out != x.out {
				t.Errorf("%s, scope %v: copied out %v", name, scope, out)
			}
			if away := m.Storage(id).State == Away; away != (name == "both leave") {
				t.Errorf("%s, scope %v: %v", name, scope, m.Storage(id))
			}
			for _, g := range x.loads {
				m.backward(groupAt(g))
			}
		}
	}
}

// Both groups leave at the end of a scope, and the one that was saved last is needed
// last. Neither holds back the other's storage.
func TestGroupsOfAScopeLeaveTogether(t *testing.T) {
	p := leaving(0, 1)
	p.Schedule = order([]int{0, 1}, []int{0, 1})
	m := begin(t, Config{Device: 100, Host: 100}, p)
	id := m.take(10)
	m.BeginScope()
	m.Save(groupAt(0), Item{ID: id})
	m.Save(groupAt(1), Item{ID: id})
	m.Give(id)
	m.EndScope()
	if m.x.said(t, "out 0"); m.Storage(id).State != Away {
		t.Errorf("%v", m.Storage(id))
	}
}

// A storage that stays for another group still leaves if there is no room.
func TestWhatAnotherGroupKeepsMakesRoom(t *testing.T) {
	m := begin(t, Config{Device: 10, Host: 100}, leaving(1))
	id := m.take(10)
	m.Save(groupAt(0), Item{ID: id})
	m.Save(groupAt(1), Item{ID: id})
	m.Give(id)
	m.x.said(t)
	m.Give(m.take(10))
	m.x.said(t, "out 0", "compute after copy out 1")
	m.backward(groupAt(1))
	m.backward(groupAt(0))
	m.x.said(t, "copy in after copy out 1", "in 0", "compute after copy in 1")
	if m.Device().Live()+m.Host().Live() != 0 {
		t.Error("something is left")
	}
}

// A group that is in use, or that gave up its storages for lack of room, does not keep
// the storages of others on the device.
func TestWhoDoesNotKeep(t *testing.T) {
	m := begin(t, Config{Device: 11, Host: 100}, leaving(1, 3))
	id := m.forward(groupAt(0), 10)
	if err := m.Load(groupAt(0)); err != nil {
		t.Fatal(err)
	}
	m.Save(groupAt(1), Item{ID: id})
	m.Release(groupAt(0))
	if m.x.said(t, "out 0"); m.Storage(id).State != Away {
		t.Errorf("%v", m.Storage(id))
	}
	m.backward(groupAt(1))
	m.x.log = nil

	id, other := m.take(10), m.take(1)
	m.Save(groupAt(0), Item{ID: id}, Item{ID: other})
	m.Save(groupAt(2), Item{ID: id})
	m.Give(id)
	m.Give(m.take(10)) // both lose it, and one keeps the other
	if err := m.Load(groupAt(2)); err != nil {
		t.Fatal(err)
	}
	m.Save(groupAt(3), Item{ID: id})
	m.Release(groupAt(2))
	if m.x.log = slices.DeleteFunc(m.x.log, func(s string) bool { return s != "out 1" }); len(m.x.log) != 2 || m.Storage(id).State != Away {
		t.Errorf("%v, %v", m.x.log, m.Storage(id))
	}
}

// A group that is loaded when the scope of its save ends does not leave.
func TestLoadedGroupsDoNotLeave(t *testing.T) {
	m := begin(t, Config{Device: 100, Host: 100}, leaving(0))
	m.BeginScope()
	m.forward(groupAt(0), 10)
	if err := m.Load(groupAt(0)); err != nil {
		t.Fatal(err)
	}
	m.EndScope()
	m.Release(groupAt(0))
	m.x.said(t)
}

// A copy in that comes after a copy out also comes after the earlier ones. It is not
// ordered after the next one, and does not wait for that one while there is other room.
func TestCopyInWaitsForItsOwnCopyOut(t *testing.T) {
	m := begin(t, Config{Device: 1000, Host: 1000, Window: 3}, leaving(0, 1, 2, 3))
	for i, n := range []memory.Bytes{10, 30, 10, 10} {
		m.forward(groupAt(i), n)
	}
	m.take(10) // what storage 0 had
	m.x.said(t, "out 0", "out 1", "out 2", "out 3", "compute after copy out 1")
	for _, g := range []int{1, 0} { // to its own bytes; storage 2 has given back as many as the other needs
		if err := m.Load(groupAt(g)); err != nil {
			t.Fatal(err)
		}
	}
	m.x.said(t, "copy in after copy out 2", "in 1", "compute after copy in 1", "in 0", "compute after copy in 2")
}

// Whoever takes the bytes of a reloaded storage waits for its release, and for nothing
// that came before the release.
func TestNoWaitInVain(t *testing.T) {
	m := begin(t, Config{Device: 10, Host: 10}, leaving(0))
	m.forward(groupAt(0), 10)
	m.backward(groupAt(0))
	before := m.x.waits
	m.take(10)
	if n := m.x.waits - before; n != 1 {
		t.Errorf("%d waits", n)
	}
}
