// This file tests the measurement of the stash: what it counts, and that it
// notices a store that loses or changes bytes.

package bench

import (
	"encoding/binary"
	"strings"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// tiny returns three groups of two tensors, some pages each.
func tiny() StashOptions {
	o := StashOptions{Rows: 40, Width: 300, Tensors: 2, Groups: 3, Skew: 1, Page: 4 * memory.KiB, Line: time.Millisecond}
	o.MaxRows = o.Most()
	return o
}

// SPEC S1.2: one launch stashes a group and one restores it, however many
// tensors it has.
func TestStashes(t *testing.T) {
	for name, change := range map[string]func(o *StashOptions){
		"pages":      func(*StashOptions) {},
		"host tier":  func(o *StashOptions) { o.Host = true },
		"stack":      func(o *StashOptions) { o.Bump = true },
		"more rooms": func(o *StashOptions) { o.MaxRows *= 3 },
		"one byte":   func(o *StashOptions) { o.Width, o.Rows, o.Skew, o.Tensors = 1, 1, 0, 5 },
	} {
		o := tiny()
		change(&o)
		res, err := Stashes(open(t, memory.GiB), o)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		tier, store := "device", "pages"
		if o.Host {
			tier = "host"
		}
		if o.Bump {
			store = "stack"
		}
		want := Stash{
			Device: res.Device, Rows: o.Rows, MaxRows: o.MaxRows, Width: o.Width, Tensors: o.Tensors, Groups: o.Groups, Skew: o.Skew, Page: o.Page, Tier: tier, Store: store,
			Bytes: o.total() / memory.Bytes(o.Groups), PairUS: res.PairUS, CopyUS: res.CopyUS, GBps: res.GBps, CopyGBps: res.CopyGBps, Ratio: res.Ratio, Launches: res.Launches, PoolBytes: res.PoolBytes,
		}
		if res != want || res.Device.Backend != "cpu" {
			t.Errorf("%s: %+v, want %+v", name, res, want)
		}
		// Bytes are read and written out and back, and a link carries them once each way.
		moved := float64(4 * res.Bytes)
		if o.Host {
			moved /= 2
		}
		near := func(a, b float64) bool { return a > 0.99*b && a < 1.01*b }
		if !near(res.GBps*res.PairUS*1e3, moved) || !near(res.CopyGBps*res.CopyUS*1e3, moved) || !near(res.Ratio*res.PairUS, res.CopyUS) || res.PoolBytes%o.Page != 0 || res.PoolBytes < o.total() {
			t.Errorf("%s: the figures do not agree: %+v", name, res)
		}
		if res.Launches != 2 || res.Ratio <= 0 || res.GBps <= 0 || res.PoolBytes < res.Bytes {
			t.Errorf("%s: implausible %+v", name, res)
		}
	}
}

// The benchmark notices planted faults: a changed byte in a page, more rows than a buffer
// holds, a group that was never stashed, and a set that changed while it was measured.
func TestStashFaultsAreNoticed(t *testing.T) {
	for want, plant := range map[string]func(r *stashRig, o StashOptions) error{
		"1 of 6 tensors came back changed": func(r *stashRig, o StashOptions) error {
			r.stashAll(o)
			at := r.store.Pool(o.tier()).Slice(5, 1)
			var b [1]byte
			if err := r.s.Download(b[:], at); err != nil {
				return err
			}
			r.s.Fill(at, b[0]^1)
			r.restoreAll(o)
			return r.equal(o.Groups * o.Tensors)
		},
		"2 tensors have more rows than their buffers": func(r *stashRig, o StashOptions) error {
			n := binary.LittleEndian.AppendUint64(nil, uint64(o.MaxRows+1))
			r.s.Upload(r.layoutOf(0).Counts(r.set.All()).Slice(0, 8), n)
			_, err := r.prove(o)
			return err
		},
		"groups found too few pages": func(r *stashRig, o StashOptions) error {
			for range 2 {
				for _, rec := range r.recs {
					r.store.Stash(r.s, rec, r.set.All())
				}
			}
			return r.sound()
		},
		"1 of 7 tensors came back changed": func(r *stashRig, o StashOptions) error {
			_, err := r.prove(o)
			if err != nil {
				return err
			}
			ways, err := r.ways(o)
			if err != nil {
				return err
			}
			last := r.live(o, 0, 0)
			spoil := way{"", 1, func(int) error { r.s.Fill(last.Slice(0, 64), 7); return nil }}
			_, err = r.measure(o, append(ways, spoil))
			return err
		},
	} {
		dev := open(t, memory.GiB)
		r, err := newStashRig(dev, tiny())
		if err != nil {
			t.Fatal(err)
		}
		if err := plant(r, tiny()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		if err := r.close(); err != nil {
			t.Error(err)
		}
	}
}

func TestFootprint(t *testing.T) {
	o := StashOptions{Rows: 1 << 40, MaxRows: stash.Rows(1 << 40), Width: memory.GiB, Tensors: 32, Groups: 10000}
	if got := o.Footprint(); got < 1e25 {
		t.Errorf("%g", got)
	}
}
