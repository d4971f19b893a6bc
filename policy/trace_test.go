// This file tests that the trace of a simulated step shows what its forecast says.

package policy

import (
	"bytes"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/trace"
)

// SPEC S6.5, S6.1: whatever is decided for whatever step, its trace obeys the laws, and
// peaks, times, waits and copies are the forecast's.
func TestTraceIsTheForecast(t *testing.T) {
	moves, waits := 0, 0
	defer func() {
		if moves == 0 || waits == 0 {
			t.Error("nothing moved, or nothing was waited for")
		}
	}()
	rapid.Check(t, func(t *rapid.T) {
		p := drawProfile(t, 6)
		l := Links{Out: float64(rapid.IntRange(100, 4000).Draw(t, "out")), In: float64(rapid.IntRange(100, 4000).Draw(t, "in"))}
		pol := Policy{}
		units, _ := p.units()
		for _, u := range units {
			if p.Units[u].CanOffload && rapid.Bool().Draw(t, "offload") {
				pol[u] = Offload
			}
		}
		plan := &residency.Plan{Leave: map[schedule.Group]bool{}}
		for _, op := range p.Tape.Ops {
			if op.Kind == residency.OpSave {
				plan.Leave[op.Group] = pol[UnitOf(op.Group)] == Offload
			}
		}
		c := cfg
		if rapid.Bool().Draw(t, "tight") {
			c.Device = rapid.Int64Range(40, 400).Draw(t, "device")
		}
		f, err := Simulate(p, pol, plan, l, c)
		var b bytes.Buffer
		w := trace.NewWriter(&b, trace.Header{Rank: 2, Compute: computeStream}, 0)
		if failed := Trace(p, pol, plan, l, c, 2, w); (err == nil) != (failed == nil) {
			t.Fatalf("the forecast says %v, its trace %v", err, failed)
		}
		if err != nil {
			return
		}
		_ = w.Close()
		tr, err := trace.Read(&b)
		if err == nil {
			err = tr.Check()
		}
		if err != nil {
			t.Fatal(err)
		}
		agrees(t, tr, f, p.Base)
		if moves += f.Counts.Out; f.Waiting > 0 {
			waits++
		}
	})
}

func agrees(t *rapid.T, tr *trace.Trace, f Forecast, base int64) {
	var end trace.Event
	took, moved := map[string]int64{}, map[trace.What]int64{}
	clock := tr.Clock()
	for i, e := range tr.Events {
		switch {
		case e.What == trace.Wait:
			took["wait"] += e.Took
		case e.What.Span():
			took[e.Stream] += e.Took
		default:
			if at := clock.Of(&tr.Events[i]); at < e.Time-2 || at > e.Time+2 {
				t.Fatalf("%+v lies at %d on compute's clock", e, at)
			}
			moved[e.What] += e.Bytes
			end = e
		}
	}
	near := func(a, b int64) bool { return a-b < 1000 && b-a < 1000 } // roundings of nanoseconds
	tail := end.Time - took["wait"] - took[computeStream]
	if end.What != trace.End || end.Bytes+base != f.Peak || !near(end.Time, int64(f.Step)) || tail != 0 {
		t.Fatalf("the step ends with %+v, %d unaccounted for; the forecast is %+v", end, tail, f)
	}
	if !near(took[computeStream], int64(f.Compute)) || took["wait"] < int64(f.Waiting)-1000 {
		t.Fatalf("compute worked for %d and waited for %d; the forecast is %+v", took[computeStream], took["wait"], f)
	}
	if !near(took[outStream], int64(f.OutBusy)) || !near(took[inStream], int64(f.InBusy)) || moved[trace.Leave] != f.Counts.OutBytes || moved[trace.Return] != f.Counts.InBytes {
		t.Fatalf("copies took %v and moved %v; the forecast is %+v", took, moved, f)
	}
}
