// This file owns the tests of managers with two stores, and of plans when the number of
// sets changes.

package stash

import (
	"encoding/binary"
	"errors"
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/device"
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
	var counted Stats
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
		// The statistics are those of both reports together.
		counted.Low = [Tiers]schedule.Pages{}
		for _, st := range r.m.stores() {
			rep, err := st.Report(r.compute)
			if err != nil {
				t.Fatal(err)
			}
			for tier, n := range rep.Low {
				counted.Low[tier] += n
			}
		}
		if got := r.m.Stats().Low; got != counted.Low {
			t.Errorf("%v pages were free at least, and the stores had %v", got, counted.Low)
		}
	}
	pages := func(groups ...int) (n schedule.Pages) {
		for _, i := range groups {
			n += schedule.PagesOf(c.Store.Page, memory.Bytes(rows[i])*4096)
		}
		return n
	}
	near, far := pages(0, 2), pages(1, 3)
	if got := r.m.store.Pages(Device); got < near || got > near+near/16+pages(4) {
		t.Errorf("the device store has %d pages, and its groups need %d", got, near)
	}
	if got := r.m.host.Pages(Host); got < far || got > far+far/4 {
		t.Errorf("the host store has %d pages, and its groups need %d", got, far)
	}
	if s := r.m.Stats(); s.Demand < near+far || s.Demand > near+far+pages(4) {
		t.Errorf("a demand of %d pages; the groups need %d and %d", s.Demand, near, far)
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

// scattered is a device that never reserves the addresses that were freed last.
type scattered struct {
	device.Device
	blocked []*device.Buffer
}

func (d *scattered) Reserve(k memory.Kind, limit memory.Bytes, owner string) (*device.Buffer, error) {
	b, err := d.Device.Reserve(k, limit, "blocked")
	if err != nil {
		return nil, err
	}
	d.blocked = append(d.blocked, b)
	return d.Device.Reserve(k, limit, owner)
}

// A tier that gets smaller, and larger again, gets memory at other addresses, and rows are
// found there.
func TestResizedTierMoves(t *testing.T) {
	dev := &scattered{Device: openCPU(t)}
	c := checkedPipelines["1f1b"]
	c.layers, c.sets, c.maxRows = 2, 1, 100
	c.ManagerConfig = tight(60, 60, 60, 60)
	l, err := newLoop(t, dev, c)
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(9, 1))
	for _, pages := range []schedule.Pages{60, 7, 40, 0, 60} {
		before := l.m.store.Pool(Device).Addr()
		had := l.m.store.Pages(Device)
		if err := l.m.SetDevicePages(pages); err != nil {
			t.Fatal(err)
		}
		if moved := l.m.store.Pool(Device).Addr() != before; moved != (pages < had) {
			t.Errorf("from %d pages to %d: moved %v", had, pages, moved)
		}
		if err := l.run(2, rng, 100); err != nil {
			t.Errorf("%d pages after %d: %v", pages, had, err)
		}
	}
	for _, b := range dev.blocked {
		l.compute.Free(b)
	}
	if err := errors.Join(l.close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

// dirty is a CPU whose new memory holds anything but zeros, as that of a GPU may.
type dirty struct{ device.Device }

// spoil writes to memory that nobody uses yet.
func spoil(r device.Range) {
	raw := device.Slice[byte](uint64(r.Addr()), int(r.Len))
	for i := range raw {
		raw[i] = 0x25
	}
}

func (d *dirty) Alloc(k memory.Kind, size memory.Bytes, owner string) (*device.Buffer, error) {
	b, err := d.Device.Alloc(k, size, owner)
	if err == nil {
		spoil(b.All())
	}
	return b, err
}

func (d *dirty) Grow(b *device.Buffer, size memory.Bytes) error {
	had := b.Size()
	err := d.Device.Grow(b, size)
	if err == nil {
		spoil(b.Slice(had, b.Size()-had))
	}
	return err
}

// Nothing relies on what new memory holds: the needs of groups that were dropped are zero,
// and results are exact.
func TestNewMemoryIsDirty(t *testing.T) {
	dev := &dirty{openCPU(t)}
	c := checkedPipelines["1f1b"]
	c.layers, c.sets, c.maxRows = 2, 2, 100
	c.ManagerConfig = tight(4, 2, 256, 256)
	l, err := newLoop(t, dev, c)
	if err != nil {
		t.Fatal(err)
	}
	l.protect()
	if err := l.run(3, rand.New(rand.NewPCG(3, 1)), 100); err != nil {
		t.Error(err)
	}
	demand := l.m.Stats().Demand
	for range 2 { // a group that was not there before, and that nothing stashes
		if err := l.m.Step(memory.Key{Phase: memory.Evaluate}, func(int) error {
			s := l.w.Forward(memory.GroupID{Name: "late", Layer: 9})
			l.compute.Fill(s.Counts(), 0)
			s.Drop()
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
	if n, need := l.m.Stats().Demand, l.m.Needs()[memory.GroupID{Name: "late", Layer: 9}]; n != demand || need != 0 {
		t.Errorf("a group without rows needs %d pages and makes the demand %d, which was %d", need, n, demand)
	}
	if err := errors.Join(l.close(), dev.Close()); err != nil {
		t.Error(err)
	}
}
