// This file owns tests of the figures of steps that differ, that fail, or that leave groups
// unreleased.

package offload

import (
	"errors"
	"fmt"
	"reflect"
	"testing"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Stats are the sums and the maxima of what Last returned, also of steps that differ: the
// largest comes first, in the middle and last.
func TestStatsOfUnequalSteps(t *testing.T) {
	for _, sizes := range [][]memory.Bytes{{9000, 500, 3000}, {500, 9000, 3000}, {500, 3000, 9000}} {
		r := newRig(t, openCPU(t), Config{Host: 20000})
		var want Stats
		for i, n := range sizes {
			a, b := memory.GroupID{Name: "a"}, memory.GroupID{Name: fmt.Sprint("b", i%2)}
			r.m.Begin(leaves(a))
			x, y := r.alloc(n), r.alloc(n/2)
			r.save(a, flat(x), flat(x))
			r.save(b, flat(y))
			x.Free()
			y.Free()
			for _, g := range []memory.GroupID{b, a} {
				r.ok(r.m.Load(g))
				r.m.Release(g)
			}
			r.ok(r.m.End())
			last := r.m.Last()
			if last.Device == 0 || last.Host == 0 || last.Extent == 0 || last.Out == 0 || last.Duplicates == 0 || len(last.Names) != 2 {
				t.Fatalf("a step: %+v", last)
			}
			want.Steps++
			want.Out, want.In, want.OutBytes, want.InBytes = want.Out+last.Out, want.In+last.In, want.OutBytes+last.OutBytes, want.InBytes+last.InBytes
			want.Evicted, want.Late, want.Duplicates, want.HostFull = want.Evicted+last.Evicted, want.Late+last.Late, want.Duplicates+last.Duplicates, want.HostFull+last.HostFull
			want.Departures, want.Packed = want.Departures+last.Departures, want.Packed+last.Packed
			want.Device, want.Host, want.Extent = max(want.Device, last.Device), max(want.Host, last.Host), max(want.Extent, last.Extent)
			for name, n := range last.Names {
				k := want.name(name)
				k.Groups, k.Saved, k.Moved = k.Groups+n.Groups, k.Saved+n.Saved, k.Moved+n.Moved
			}
			if got := r.m.Stats(); !reflect.DeepEqual(got, want) {
				t.Errorf("%v: after step %d %+v, want %+v", sizes, i, got, want)
			}
		}
		r.close()
	}
}

// The end of a step that leaves groups unreleased tells that nothing is in use, and what was
// in use at most.
func TestTraceOfAnUnfinishedStep(t *testing.T) {
	var tr lines
	r := newRig(t, openCPU(t), Config{Trace: &tr})
	for range 2 {
		tr = nil
		r.m.Begin(leaves(someGroup))
		x, y := r.alloc(5000), r.alloc(300)
		r.save(someGroup, flat(x))
		r.save(memory.GroupID{Name: "stays"}, flat(y))
		x.Free()
		r.ok(r.m.End())
		last, end := r.m.Last(), tr[len(tr)-1]
		if end.Kind != trace.End || end.InUse != [2]int64{} || end.Bytes != int64(last.Device) || end.Offset != int64(last.Host) || last.Host == 0 {
			t.Errorf("the step ends with %+v; its peaks are %v and %v", end, last.Device, last.Host)
		}
		if begin := tr[0]; begin.Kind != trace.Begin || begin.InUse != [2]int64{} {
			t.Errorf("the step begins with %+v", begin)
		}
	}
	r.close()
}

// A scope that is replayed in a step that has failed already returns the error of the step,
// which then ends as usual, and the next step replays it.
func TestReplayInAFailedStep(t *testing.T) {
	r := newRig(t, openCPU(t), Config{Device: 64 * memory.KiB})
	var scope *Scope
	body := func() error {
		x, err := r.m.Alloc(1000)
		if err != nil {
			return err
		}
		r.compute.Fill(x.Range(), 1)
		x.Free()
		return nil
	}
	for i := range 3 {
		r.m.Begin(nil)
		if i == 1 {
			if _, err := r.m.Alloc(memory.MiB); err == nil {
				t.Fatal("more than all memory was allocated")
			}
		}
		var err error
		if scope == nil {
			scope, err = r.m.Capture(body)
		} else {
			err = scope.Replay()
		}
		full := new(residency.Full)
		if errors.As(err, &full) != (i == 1) || (err != nil) != (i == 1) {
			t.Errorf("step %d: %v", i, err)
		}
		if err := r.m.End(); errors.As(err, &full) != (i == 1) || (err != nil) != (i == 1) {
			t.Errorf("step %d ends with %v", i, err)
		}
	}
	r.ok(scope.Close())
	r.close()
}
