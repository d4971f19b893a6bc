// This file owns tables of what single functions decide from settings and figures.

package engine

import (
	"reflect"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// The summary of rows adds up the units of a name, and leaves out units without rows.
func TestRowSummary(t *testing.T) {
	unit := func(name string, layer int) memory.Unit { return memory.Unit{Name: name, Layer: layer} }
	l := &learned{facts: map[memory.Unit]policy.Facts{}, decision: &policy.Decision{}}
	for _, u := range []policy.UnitForecast{
		{Unit: unit("b", 0), Choice: memory.Stash, Groups: 2, Bytes: 100, Moved: 7},
		{Unit: unit("mlp", 0), Choice: memory.Offload, Groups: 3, Bytes: 1000, Moved: 70},
		{Unit: unit("a", 0), Choice: memory.Offload, Groups: 1, Bytes: 11, Moved: 5},
		{Unit: unit("b", 1), Choice: memory.Offload, Groups: 3, Bytes: 10, Moved: 30},
		{Unit: unit("b", 2), Choice: memory.Stash, Groups: 1, Bytes: 1},
	} {
		l.decision.Forecast.Units = append(l.decision.Forecast.Units, u)
		l.facts[u.Unit] = policy.Facts{Rows: u.Name != "mlp"}
	}
	want := []memory.GroupSummary{
		{Name: "b", Groups: 6, Bytes: 231, Moved: 37, Units: map[memory.Choice]int{memory.Stash: 2, memory.Offload: 1}},
		{Name: "a", Groups: 1, Bytes: 11, Moved: 5, Units: map[memory.Choice]int{memory.Offload: 1}},
	}
	if got := l.rowSummary(); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got := (&learned{}).rowSummary(); got != nil {
		t.Errorf("before a decision: %+v", got)
	}
}

// The forecast of an extent is the largest of three: what the decision needs, that with the
// activations that steps took, and what was held before the decision.
func TestForecastIsThatOfTheLargestStep(t *testing.T) {
	key := memory.Key{Microbatches: 1}
	for _, x := range []struct{ extent, early, want memory.Bytes }{
		{0, 0, 1000}, {500, 0, 1000}, {501, 0, 1001}, {900, 0, 1400}, {900, 1399, 1400}, {900, 1401, 1401}, {0, 1001, 1001},
	} {
		f := policy.Forecast{Extent: 1000, DevicePages: 2, PageBytes: 100, SetBytes: 50} // 500 of activations beside a base of 250
		l := &learned{decision: &policy.Decision{Forecast: f}, profile: &policy.Profile{Base: 250}, extent: x.extent, early: x.early}
		r := &Runtime{cfg: Config{Budget: 1}, keys: map[memory.Key]*learned{key: l}}
		if got := r.Forecast(key); got == nil || got.Extent != x.want || l.decision.Forecast.Extent != 1000 {
			t.Errorf("%+v: %+v", x, got)
		}
	}
	r := &Runtime{cfg: Config{Budget: 1}, keys: map[memory.Key]*learned{key: {}}}
	if r.Forecast(key) != nil || r.Forecast(memory.Key{}) != nil {
		t.Error("there is a forecast before the decision")
	}
}

// Rows go where the plan says, else where a budget, a policy or settings by hand say.
func TestPlaceOfRows(t *testing.T) {
	rows := memory.GroupID{Name: "expert_fc1", Layer: 3, Microbatch: 9}
	chosen := func(c memory.Choice) memory.Policy { return memory.Policy{rows.Unit(): c} }
	for i, x := range []struct {
		cfg  Config
		l    learned
		want int
	}{
		{Config{}, learned{}, stash.Device},
		{Config{Budget: 1}, learned{}, stash.Host},
		{Config{Budget: 1}, learned{known: true, policy: chosen(memory.Stash)}, stash.Device},
		{Config{}, learned{known: true, policy: chosen(memory.Offload)}, stash.Host},
		{Config{Policy: chosen(memory.Offload)}, learned{}, stash.Host},
		{Config{Policy: chosen(memory.Stash)}, learned{}, stash.Device},
		{Config{Policy: chosen(memory.Offload)}, learned{known: true, policy: chosen(memory.Stash)}, stash.Device},
		{Config{Policy: chosen(memory.Stash), Budget: 1}, learned{}, stash.Host}, // no device pages yet
		{Config{ByHand: &policy.ByHand{OffloadModules: []string{"expert_fc1"}}}, learned{}, stash.Host},
		{Config{ByHand: &policy.ByHand{OffloadModules: []string{"core_attn"}}}, learned{}, stash.Device},
	} {
		r := &Runtime{cfg: x.cfg, step: &Step{learned: &x.l}}
		if got := r.placeRows(rows); got != x.want {
			t.Errorf("case %d: tier %d, want %d", i, got, x.want)
		}
	}
}

// The device tier begins empty, and may be resized, only if a budget decides about it; the
// tiers keep their maxima.
func TestRowsAreConfigured(t *testing.T) {
	pages := func(dev, host schedule.Pages) [stash.Tiers]schedule.Pages {
		return [stash.Tiers]schedule.Pages{dev, host}
	}
	hand := &policy.ByHand{OffloadModules: []string{"expert_fc1"}}
	for i, x := range []struct {
		cfg                Config
		have, want         stash.ManagerConfig
		places, unlikeHave bool
	}{
		{cfg: Config{}, have: stash.ManagerConfig{Store: stash.Config{Pages: pages(3, 4), Max: pages(30, 40)}}},
		{cfg: Config{Budget: 1}, have: stash.ManagerConfig{Fixed: true, Store: stash.Config{Pages: pages(3, 4), Max: pages(30, 40)}}},
		{Config{Budget: 1}, stash.ManagerConfig{Store: stash.Config{Pages: pages(3, 4), Max: pages(30, 40)}},
			stash.ManagerConfig{HostPages: 4, HostMax: 40, MoreSets: moreSets, Store: stash.Config{Pages: pages(0, 4), Max: pages(30, 40)}}, true, true},
		{Config{Budget: 1}, stash.ManagerConfig{HostPages: 5, HostMax: 50, Store: stash.Config{Pages: pages(3, 4), Max: pages(30, 40)}},
			stash.ManagerConfig{HostPages: 5, HostMax: 50, MoreSets: moreSets, Store: stash.Config{Pages: pages(0, 4), Max: pages(30, 50)}}, true, true},
		{Config{Budget: 1}, stash.ManagerConfig{Store: stash.Config{Pages: pages(3, 0), Max: pages(30, 0)}},
			stash.ManagerConfig{Store: stash.Config{Pages: pages(3, 0), Max: pages(30, 0)}}, true, true},
		{Config{ByHand: hand}, stash.ManagerConfig{Store: stash.Config{Pages: pages(3, 4), Max: pages(30, 40)}},
			stash.ManagerConfig{HostPages: 4, HostMax: 40, Store: stash.Config{Pages: pages(3, 4), Max: pages(30, 40)}}, true, true},
	} {
		got := x.have
		(&Runtime{cfg: x.cfg}).configureRows(&got)
		if (got.Place != nil) != x.places || got.Watch == nil {
			t.Errorf("case %d: rows are placed: %v", i, got.Place != nil)
		}
		want := x.have
		if x.unlikeHave {
			want = x.want
		}
		got.Place, got.Watch = nil, nil
		if !reflect.DeepEqual(got, want) {
			t.Errorf("case %d: %+v, want %+v", i, got, want)
		}
	}
}

// gathered keeps events.
type gathered []trace.Event

func (g *gathered) Emit(e trace.Event) { *g = append(*g, e) }

// What a device reports becomes events with every figure in its place.
func TestWatcherTellsEveryFigure(t *testing.T) {
	var got gathered
	w := Observe(&got, 7)
	kinds := map[device.WorkKind]trace.Kind{device.Launched: trace.Launch, device.Copied: trace.Copy, device.Replayed: trace.Graph, device.Waited: trace.Wait, device.Mixed: trace.Work}
	for k := device.Launched; k <= device.Mixed; k++ {
		w.WorkDone(device.Work{Kind: k, Stream: "s", First: 2, Last: 5, Name: "n", Bytes: 11, To: memory.Host, Begin: 100, End: 130})
		want := trace.Event{Kind: kinds[k], Rank: 7, Time: 100, Took: 30, Stream: "s", First: 2, Last: 5, Name: "n", Tier: memory.Host, Bytes: 11}
		if e := got[len(got)-1]; !reflect.DeepEqual(e, want) {
			t.Errorf("%+v, want %+v", e, want)
		}
	}
	got = nil
	w.MemoryChanged(memory.Device, "a", 10, 10)
	w.MemoryChanged(memory.Host, "b", 20, 20)
	w.MemoryChanged(memory.Device, "c", 5, 15)
	w.MemoryChanged(memory.Host, "b", -20, 0)
	want := []trace.Event{
		{Kind: trace.Alloc, Name: "a", Tier: memory.Device, Bytes: 10, InUse: [2]int64{10, 0}},
		{Kind: trace.Alloc, Name: "b", Tier: memory.Host, Bytes: 20, InUse: [2]int64{10, 20}},
		{Kind: trace.Alloc, Name: "c", Tier: memory.Device, Bytes: 5, InUse: [2]int64{15, 20}},
		{Kind: trace.Free, Name: "b", Tier: memory.Host, Bytes: 20, InUse: [2]int64{15, 0}},
	}
	for i := range got {
		got[i].Time = 0
		want[i].Rank, want[i].Offset = 7, residency.None
	}
	if !slices.EqualFunc(got, want, func(a, b trace.Event) bool { return reflect.DeepEqual(a, b) }) {
		t.Errorf("%+v, want %+v", got, want)
	}
}
