// This file owns the store on its own.

package stash

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// rig is a store on a device with what tests need around it.
type rig struct {
	t     testing.TB
	dev   device.Device
	s     device.Stream
	store *Store
}

func newRig(t testing.TB, dev device.Device, cfg Config) *rig {
	t.Helper()
	s, err := dev.NewStream("test")
	if err != nil {
		t.Fatal(err)
	}
	st, err := NewStore(dev, s, cfg)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t, dev, s, st}
	t.Cleanup(func() {
		st.Close(s)
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func openCPU(t testing.TB) device.Device {
	t.Helper()
	d, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func (r *rig) layout(tensors ...Tensor) *Layout {
	r.t.Helper()
	l, err := NewLayout(tensors...)
	if err != nil {
		r.t.Fatal(err)
	}
	return l
}

func (r *rig) record(l *Layout) *Record {
	r.t.Helper()
	rec, err := r.store.AddRecord(r.s, l, l, memory.GroupID{})
	if err != nil {
		r.t.Fatal(err)
	}
	return rec
}

// set allocates a set that is freed with the test.
func (r *rig) set(l *Layout) device.Range {
	r.t.Helper()
	b, err := r.dev.Alloc(memory.Device, l.Size, "set")
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { r.s.Free(b) })
	return b.All()
}

// contents is a set's worth of bytes for a seed, with the given row counts.
func contents(l *Layout, seed uint64, rows ...Rows) []byte {
	rng := rand.New(rand.NewPCG(seed, 1))
	raw := make([]byte, l.Size)
	for i := 0; i+8 <= len(raw); i += 8 {
		binary.LittleEndian.PutUint64(raw[i:], rng.Uint64())
	}
	for i, n := range rows {
		binary.LittleEndian.PutUint64(raw[8*i:], uint64(n))
	}
	return raw
}

// same compares what is live of two sets' contents.
func same(l *Layout, a, b []byte, rows ...Rows) error {
	for i, t := range l.Tensors {
		n := min(rows[t.Count], t.MaxRows)
		for j := range int64(t.Row) * int64(n) {
			if at := int64(l.offsets[i]) + j; a[at] != b[at] {
				return fmt.Errorf("tensor %q differs at byte %d of %d", t.Name, j, int64(t.Row)*int64(n))
			}
		}
	}
	return nil
}

// check verifies the law of the rings at a quiet point: what is free and what
// the given records hold are all pages, each once.
func (r *rig) check(live ...*Record) {
	r.t.Helper()
	if err := r.store.Check(r.s, live...); err != nil {
		r.t.Fatal(err)
	}
}

// SPEC S1.1, S1.2, S1.4: live rows come back exactly; pages are conserved.
func TestStashAndRestore(t *testing.T) { onDevices(t, testStashAndRestore) }

func testStashAndRestore(t *testing.T, open func(testing.TB) device.Device) {
	for _, bump := range []bool{false, true} {
		t.Run(fmt.Sprintf("bump=%v", bump), func(t *testing.T) {
			max := [Tiers]schedule.Pages{64, 64}
			r := newRig(t, open(t), Config{Page: 4 * memory.KiB, Pages: [Tiers]schedule.Pages{8, 16}, Max: max})
			r.store.Reset(r.s, bump)
			l := r.layout(
				Tensor{Name: "a", Row: 1000, MaxRows: 20}, Tensor{Name: "b", Row: 16, MaxRows: 20},
				Tensor{Name: "c", Row: 7168, MaxRows: 3, Count: 1})
			set, back := r.set(l), r.set(l)
			rec := r.record(l)
			for i, rows := range [][]Rows{{20, 3}, {0, 0}, {1, 1}, {7, 2}, {20, 0}} {
				before := contents(l, uint64(i), rows...)
				r.s.Upload(set, before)
				r.store.Stash(r.s, rec, set)
				r.check(rec)
				r.s.Fill(back, 0xee)
				r.store.Restore(r.s, rec, back)
				after := make([]byte, l.Size)
				if err := r.s.Download(after, back); err != nil {
					t.Fatal(err)
				}
				if err := same(l, before, after, rows...); err != nil {
					t.Errorf("rows %v: %v", rows, err)
				}
				for k, n := range rows {
					if got := binary.LittleEndian.Uint64(after[8*k:]); got != uint64(n) {
						t.Errorf("rows %v: count %d came back as %d", rows, k, got)
					}
				}
				r.check()
			}
			rep, err := r.store.Report(r.s)
			if err != nil {
				t.Fatal(err)
			}
			// 20 rows of 1000 bytes take 5 pages of 4 KiB, 20 of 16 one, 3 of
			// 7168 six: 12 pages, of which 8 fit the device tier.
			if rep.Overflows != 0 || rep.Low != [Tiers]schedule.Pages{0, 12} {
				t.Errorf("report %+v", rep)
			}
			// Only the first of the groups spills: 12 pages where 8 are.
			if rep.Spilled != 4 {
				t.Errorf("%d pages spilled, want 4", rep.Spilled)
			}
		})
	}
}

// SPEC S1.6: overflow is a flag with the numbers that are needed to grow, and
// takes nothing; after growth the same group fits.
func TestOverflowAndGrowth(t *testing.T) { onDevices(t, testOverflowAndGrowth) }

func testOverflowAndGrowth(t *testing.T, open func(testing.TB) device.Device) {
	r := newRig(t, open(t), Config{Page: 4 * memory.KiB, Pages: [Tiers]schedule.Pages{3, 2}, Max: [Tiers]schedule.Pages{16, 16}})
	l := r.layout(Tensor{Name: "x", Row: 4096, MaxRows: 4})
	set := r.set(l)
	first, second := r.record(l), r.record(l)
	r.s.Upload(set, contents(l, 1, 4))
	r.store.Stash(r.s, first, set)
	r.store.Stash(r.s, second, set)
	r.check(first)
	rep, err := r.store.Report(r.s)
	if err != nil {
		t.Fatal(err)
	}
	want := kernels.StashReport{Overflows: 1, OverflowID: 1, OverflowAsked: 4, OverflowFree: 1, Spilled: 1, Stashed: 4}
	if rep.StashReport != want {
		t.Errorf("report %+v,\nwant %+v", rep.StashReport, want)
	}
	r.store.Restore(r.s, second, set) // has no pages to give back
	r.store.Restore(r.s, first, set)
	r.check()
	if err := r.store.Grow(r.s, Device, 6); err != nil {
		t.Fatal(err)
	}
	r.store.Reset(r.s, false)
	r.store.Stash(r.s, first, set)
	r.store.Stash(r.s, second, set)
	r.check(first, second)
	if rep, _ = r.store.Report(r.s); rep.Overflows != 0 || rep.Low[Host] != 0 {
		t.Errorf("after growth: %+v", rep)
	}
}

// SPEC S1.4: a report has the needs of its own step: what a group asked for before the
// reset, and does not ask for again, counts no more.
func TestResetForgetsNeeds(t *testing.T) { onDevices(t, testResetForgetsNeeds) }

func testResetForgetsNeeds(t *testing.T, open func(testing.TB) device.Device) {
	r := newRig(t, open(t), Config{Page: 4 * memory.KiB, Pages: [Tiers]schedule.Pages{16, 0}, Max: [Tiers]schedule.Pages{16, 0}})
	l := r.layout(Tensor{Name: "x", Row: 4096, MaxRows: 4})
	set := r.set(l)
	var records []*Record
	for i := range 3 {
		records = append(records, r.record(l))
		for _, bump := range []bool{false, true} {
			for alone := -1; alone <= i; alone++ { // all, then each by itself
				r.store.Reset(r.s, bump)
				want := make([]schedule.Pages, i+1)
				for k, rec := range records {
					if alone < 0 || alone == k {
						want[k] = schedule.Pages(k + 1)
						r.s.Upload(set, contents(l, 1, Rows(k+1)))
						r.store.Stash(r.s, rec, set)
					}
				}
				rep, err := r.store.Report(r.s)
				if err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(rep.Need, want) {
					t.Errorf("%d records, bump %v, %d alone: needs %v, want %v", i+1, bump, alone, rep.Need, want)
				}
			}
		}
	}
}

// SPEC S1.6: more rows than the buffer holds are counted as over capacity and are
// clamped, never read from beyond the buffer.
func TestOverCapacity(t *testing.T) { onDevices(t, testOverCapacity) }

func testOverCapacity(t *testing.T, open func(testing.TB) device.Device) {
	r := newRig(t, open(t), Config{Page: 4 * memory.KiB, Pages: [Tiers]schedule.Pages{8, 0}, Max: [Tiers]schedule.Pages{8, 0}})
	l := r.layout(Tensor{Name: "x", Row: 512, MaxRows: 10})
	set := r.set(l)
	rec := r.record(l)
	r.s.Upload(set, contents(l, 1, 25))
	r.store.Stash(r.s, rec, set)
	rep, err := r.store.Report(r.s)
	if err != nil {
		t.Fatal(err)
	}
	if rep.OverCapacity != 1 || rep.OverRows != 25 || rep.OverLimit != 10 || rep.Overflows != 0 {
		t.Errorf("report %+v", rep)
	}
	r.check(rec)
}
