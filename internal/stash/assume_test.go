// This file owns the test of assumed rows.

package stash_test

import (
	"encoding/binary"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/nulldevice"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// Steps whose rows are assumed, on a device that does nothing, take what steps take whose
// rows are counted: pages of both tiers, sets, records.
func TestAssumedRowsTakeWhatCountedOnesDo(t *testing.T) {
	for _, rows := range []stash.Rows{1, 100, 512, 700, 1024} { // a set begins with 512, and may have 1024
		want, got := memoryOf(t, rows, false), memoryOf(t, rows, true)
		if !slices.Equal(got, want) {
			t.Errorf("%d rows: assumed %v, counted %v", rows, got, want)
		}
	}
}

// open returns a manager on rank 3 whose groups have so many rows, assumed or counted.
func open(t *testing.T, rows stash.Rows, assumed bool) (device.Device, device.Stream, *stash.Manager) {
	t.Helper()
	var dev device.Device
	dev, err := cpu.Open(cpu.Options{})
	must(t, err)
	cfg := stash.ManagerConfig{Rank: 3, Store: stash.Config{Page: 4 * memory.KiB, Max: [stash.Tiers]schedule.Pages{100, 1000}}}
	if assumed {
		dev, err = nulldevice.Wrap(dev, nulldevice.DefaultPace())
		must(t, err)
		cfg.Store.Assume = func(memory.GroupID) stash.Rows { return rows }
	}
	compute, err := dev.NewStream("compute")
	must(t, err)
	m, err := stash.NewManager(dev, compute, cfg)
	must(t, err)
	return dev, compute, m
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func memoryOf(t *testing.T, rows stash.Rows, assumed bool) []device.OwnerUsage {
	t.Helper()
	dev, compute, m := open(t, rows, assumed)
	space, err := m.NewWorkspace("rows", 2, 1024, stash.Tensor{Name: "x", Row: 256, MaxRows: 512}, stash.Tensor{Name: "w", Row: 4, MaxRows: 512})
	must(t, err)
	for range 4 {
		must(t, m.Step(memory.Key{Microbatches: 1}, func(int) error {
			for i := range 4 {
				set := space.Forward(memory.GroupID{Name: "x", Layer: i})
				compute.Upload(set.Counts(), binary.LittleEndian.AppendUint64(nil, uint64(rows)))
				set.Saved()
			}
			for i := 3; i >= 0; i-- {
				space.Backward(memory.GroupID{Name: "x", Layer: i}).Done()
			}
			return nil
		}))
	}
	owners := dev.Memory().Owners
	must(t, m.Close())
	must(t, compute.Close())
	must(t, dev.Close())
	return owners
}

// The error of assumed rows that no set may hold says what the error of counted rows says:
// the group, its rows, and what the tensor that is too small holds.
func TestAssumedRowsFailAsCountedOnesDo(t *testing.T) {
	fails := func(assumed bool) string {
		const rows = 700
		dev, compute, m := open(t, rows, assumed)
		space, err := m.NewWorkspace("rows", 1, 0, stash.Tensor{Name: "x", Row: 16, MaxRows: 1024}, stash.Tensor{Name: "w", Row: 4, MaxRows: 512}, stash.Tensor{Name: "v", Row: 4, MaxRows: 900})
		must(t, err)
		err = m.Step(memory.Key{Microbatches: 1}, func(int) error {
			set := space.Forward(memory.GroupID{Name: "x", Layer: 7})
			compute.Upload(set.Counts(), binary.LittleEndian.AppendUint64(nil, rows))
			set.Saved()
			space.Backward(memory.GroupID{Name: "x", Layer: 7}).Done()
			return nil
		})
		must(t, m.Close())
		must(t, compute.Close())
		must(t, dev.Close())
		if err == nil {
			t.Fatal("a step with too many rows ended well")
		}
		return err.Error()
	}
	want, got := fails(false), fails(true)
	if got != want || !strings.Contains(want, "received 700 rows and its buffer holds 512") {
		t.Errorf("assumed: %s\ncounted: %s", got, want)
	}
}
