// This file owns the tests of managers with two stores, and of plans when the number of
// sets changes.

package stash

import (
	"encoding/binary"
	"maps"
	"testing"

	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Each of two stores grows to what its own groups need, and counts only them, although
// their records have the same numbers.
func TestStoresCountTheirOwnGroups(t *testing.T) {
	c := tight(1, 0, 256, 0)
	c.HostPages, c.HostMax = 1, 256
	c.Place = func(g memory.GroupID) int { return g.Layer % 2 } // Device or Host
	r := newSmall(t, openCPU(t), c)
	w := r.space("a", 0, 50)
	rows := []int{10, 3, 20, 5, 1} // the last group stays in its set
	group := func(i int) memory.GroupID { return memory.GroupID{Name: "g", Layer: i} }
	for range 3 {
		err := r.m.Step(memory.Key{}, func(int) error {
			for i, n := range rows {
				s := w.Forward(group(i))
				r.compute.Upload(s.Counts(), binary.LittleEndian.AppendUint64(nil, uint64(n)))
				s.Saved()
			}
			for i := len(rows) - 1; i >= 0; i-- {
				w.Backward(group(i)).Done()
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	pages := func(groups ...int) (n schedule.Pages) {
		for _, i := range groups {
			n += schedule.PagesOf(int64(c.Store.Page), int64(rows[i])*4096)
		}
		return n
	}
	device, host := pages(0, 2), pages(1, 3)
	if got := r.m.store.Pages(Device); got < device || got > device+device/16+pages(4) {
		t.Errorf("the device store has %d pages, and its groups need %d", got, device)
	}
	if got := r.m.host.Pages(Host); got < host || got > host+host/16 {
		t.Errorf("the host store has %d pages, and its groups need %d", got, host)
	}
	if s := r.m.Stats(); s.Demand < device+host || s.Demand > device+host+pages(4) {
		t.Errorf("a demand of %d pages; the groups need %d and %d", s.Demand, device, host)
	}
	want := map[memory.GroupID]schedule.Pages{}
	for i := range rows[:4] {
		want[group(i)] = pages(i)
	}
	got := maps.Clone(r.m.Needs())
	delete(got, group(4))
	if !maps.Equal(got, want) {
		t.Errorf("groups need %v, want %v", got, want)
	}
}

// More sets keep more groups in place from the next step on, and fewer sets fewer.
func TestPlansFollowTheSets(t *testing.T) {
	c := roomy(PagesOnly)
	stashes := 0
	c.MoreSets, c.Emit = 2, func(e trace.Event) {
		if e.Kind == trace.Stash {
			stashes++
		}
	}
	r := newSmall(t, openCPU(t), c)
	w := r.space("a", 0, 10)
	step := func() int {
		stashes = 0
		if err := r.m.Step(memory.Key{}, func(int) error { r.pass(w, 5, 1, 2, 3, 4); return nil }); err != nil {
			t.Fatal(err)
		}
		return stashes
	}
	if n := step(); n != 4 {
		t.Errorf("%d of 4 groups were stashed in the step without a plan", n)
	}
	for _, x := range []struct{ more, want int }{{0, 3}, {2, 2}, {0, 3}} {
		if err := r.m.SetMore(x.more); err != nil {
			t.Fatal(err)
		}
		if n := step(); n != x.want {
			t.Errorf("%d more sets: %d groups were stashed, want %d", x.more, n, x.want)
		}
	}
}
