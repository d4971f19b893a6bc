// This file owns the tests of EveryEdge, on a small offload: layers leave for
// the host on one stream and come back on another.

package check_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/memory"
)

// offloading runs layers of forward and backward with one device buffer. It
// has four waits a layer, all needed.
func offloading(w *world, layers int, redundant bool) {
	w.a.Fill(w.y.Slice(0, 64), 0)
	in := w.stream("copy-in")
	slot := func(i int) device.Range { return w.host.Slice(memory.Bytes(i)*64, 64) }
	x := w.x.Slice(0, 64)
	made, left, back, used := w.event(0), w.event(0), w.event(0), w.event(0)
	for i := range layers {
		if i > 0 {
			w.a.Wait(left)
		}
		w.a.Fill(x, byte(i+1))
		w.a.Record(made)
		w.out.Wait(made)
		w.out.Copy(slot(i), x)
		w.out.Record(left)
	}
	if redundant {
		w.b.Wait(left)
	}
	in.Wait(left)
	sum := byte(0)
	for i := layers - 1; i >= 0; i-- {
		if i < layers-1 {
			in.Wait(used)
		}
		in.Copy(x, slot(i))
		in.Record(back)
		w.a.Wait(back)
		w.a.Launch(mix(w.y.Slice(0, 64), x))
		w.a.Record(used)
		sum = 31*sum + byte(i+1) + 7
	}
	got := make([]byte, 64)
	must(w.a.Download(got, w.y.Slice(0, 64)))
	if got[0] != sum {
		panic(errors.New("wrong sum"))
	}
}

// SPEC S6.2: removing any wait of an offload is caught.
func TestEveryEdge(t *testing.T) {
	const layers = 4
	e, err := check.DropEach(check.Waits, 5, inWorld(func(w *world) { offloading(w, layers, false) }))
	if err != nil {
		t.Fatal(err)
	}
	if e.Total != 4*layers-1 || e.Caught != e.Total || len(e.Reports) != e.Total || e.String() != "caught 15 of 15" {
		t.Errorf("%v", e)
	}
	for _, how := range e.Reports {
		if !strings.HasPrefix(how, "race on bytes") {
			t.Errorf("caught by: %s", how)
		}
	}
	e, err = check.DropEach(check.Records, 5, inWorld(func(w *world) { offloading(w, layers, false) }))
	if err != nil || e.Caught < e.Total-2 { // the last recordings of left and used are for nobody, or implied
		t.Errorf("records: %v, %v", e, err)
	}
}

// A wait that another one implies is named.
func TestEveryEdgeNamesTheSuperfluous(t *testing.T) {
	e, err := check.DropEach(check.Waits, 5, inWorld(func(w *world) { offloading(w, 2, true) }))
	if err != nil {
		t.Fatal(err)
	}
	if len(e.Uncaught) != 1 || !strings.Contains(e.Uncaught[0], `wait 3 on stream "b" at check/edges_test.go:`) || !strings.Contains(e.Uncaught[0], `recorded on stream "copy-out" at check/edges_test.go:`) {
		t.Errorf("%v", e)
	}
}

// Where declarations hide the need for a wait, wrong results under a schedule
// tell.
func TestEveryEdgeUsesSchedules(t *testing.T) {
	p := undeclared(true)
	drop := []check.Fault{{Class: check.Waits, Do: check.Drop}}
	if c, err := run(t, check.Options{Schedule: &check.Schedule{}, Faults: drop}, p); err != nil || c.Count(check.Waits) != 1 {
		t.Fatalf("in the order of issue nobody can notice, but: %v", err)
	}
	if e, err := check.DropEach(check.Waits, 20, p); err != nil || e.Caught != 1 {
		t.Errorf("with schedules: %v, %v", e, err)
	}
}

// The host's own waits are edges too.
func TestDropEachSync(t *testing.T) {
	p := inWorld(func(w *world) {
		w.out.Copy(w.host.All(), w.x.All())
		must(w.out.Sync())
		w.dev.View(w.host.All(), device.Read)
		w.a.Fill(w.x.All(), 1)
		e := w.event(0)
		w.a.Record(e)
		must(e.Sync())
		w.b.Fill(w.x.All(), 2)
	})
	if e, err := check.DropEach(check.Syncs, 0, p); err != nil || e.Total != 2 || e.Caught != 2 {
		t.Errorf("%v, %v", e, err)
	}
	if _, err := check.DropEach(check.Waits, 0, inWorld(func(*world) { panic(errors.New("broken")) })); err == nil || !strings.Contains(err.Error(), "broken") {
		t.Errorf("a broken program: %v", err)
	}
}
