// This file owns the tests of forecasts: those before a run and those after its first
// steps agree with the memory that the run takes.

package train

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// near is the largest error of a forecast.
const near = 0.05

func off(said, was memory.Bytes) float64 { return float64(said)/float64(was) - 1 }

// foretold makes a run, and holds what was said of it against what it took.
func foretold(t *testing.T, c Config) RunForecast {
	t.Helper()
	f, err := Forecast(c)
	if err != nil {
		t.Fatal("forecast:", err)
	}
	tr, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	}()
	for range fewestWalked + 1 {
		if _, err := tr.Step(); err != nil {
			t.Fatal(err)
		}
	}
	var most memory.Bytes
	for i, u := range tr.Usage() {
		most = max(most, u.Kind[memory.Device].Peak)
		if b := c.Memory.Budget; b > 0 && (f.Ranks[i].Device > b || u.Kind[memory.Device].Peak > b) {
			t.Errorf("rank %d: forecast %v, took %v of a budget of %v", i, f.Ranks[i].Device, u.Kind[memory.Device].Peak, b)
		}
	}
	if d := off(f.Fullest().Device, most); math.Abs(d) > near {
		t.Errorf("the fullest rank takes %v, and the forecast was %v: off by %.1f %%", most, f.Fullest().Device, 100*d)
	}
	all := tr.Forecasts()
	if len(all) != len(tr.ranks) {
		t.Fatalf("%d forecasts", len(all))
	}
	for i, p := range all {
		if d := off(p.Device, p.Peak); math.Abs(d) > near || p.Live > p.Device || p.Live <= p.Device/2 || p.Peak != tr.Usage()[i].Kind[memory.Device].Peak {
			t.Errorf("rank %d: forecast %+v, off by %.1f %%", i, p, 100*d)
		}
	}
	return f
}

// Under every policy the dry run's forecast of the fullest rank and the first steps'
// forecast of each rank are within 5 % of what the ledgers of the devices count.
func TestForecastMeetsRun(t *testing.T) {
	for _, x := range []struct {
		m        *model.Model
		l        Layout
		policies []string
	}{
		{smallMoE(), Layout{2, 1, 2, 2}, Policies},
		{smallDeepSeek(), Layout{2, 2, 1, 1}, []string{"none", "stash", "budget", "graphs"}},
		{smallHybrid(), Layout{1, 1, 2, 2}, []string{"none", "stash", "budget"}},
		{smallDense(), Layout{2, 1, 1, 2}, []string{"stash", "offload+recompute", "budget"}},
	} {
		if raceEnabled && x.m.Name != "small-dense" {
			continue
		}
		var stash RunForecast
		for _, name := range x.policies {
			t.Run(fmt.Sprintf("%s/%+v/%s", x.m.Name, x.l, name), func(t *testing.T) {
				c := testConfig(t, x.m)
				c.Layout = x.l
				var budget memory.Bytes
				if name == "budget" {
					budget = stash.Fullest().Device * 9 / 10
				}
				var err error
				if c.Memory, err = NamedMemory(name, budget); err != nil {
					t.Fatal(err)
				}
				c.Memory.Links = memory.Links{Out: 4e9, In: 4e9}
				f := foretold(t, c)
				if name == "stash" {
					stash = f
				}
			})
		}
	}
}

// Pools of gathered parameters are forecast like the rest. A dynamic pool takes more the
// further the host is ahead of the device, which no forecast knows: that one says what
// it takes at least, and always the same.
func TestForecastOfShardedRuns(t *testing.T) {
	c := testConfig(t, smallMoE())
	c.Layout, c.Batch = Layout{PP: 1, VPP: 1, EP: 1, DP: 2}, Batch{Micro: 1, Seq: 32, Microbatches: 2}
	for _, k := range []bucket.PoolKind{bucket.Rotary, bucket.Fixed, bucket.Recorded} {
		t.Run(fmt.Sprint(k), func(t *testing.T) {
			c.Sharding = &Sharding{Pool: k, Prefetch: 1, GradComm: kernels.F32}
			foretold(t, c)
		})
	}
	c.Sharding = &Sharding{Pool: bucket.Dynamic, Prefetch: 1, GradComm: kernels.F32}
	a, err := Forecast(c)
	if err != nil {
		t.Fatal(err)
	}
	b, err := Forecast(c)
	if err != nil || a.Fullest().Device != b.Fullest().Device {
		t.Errorf("a dynamic pool is forecast to take %v and then %v, %v", a.Fullest().Device, b.Fullest().Device, err)
	}
}

// The figures by owner add up, and rows count as they are assumed.
func TestForecastCountsAssumedRows(t *testing.T) {
	c := testConfig(t, smallMoE())
	var last memory.Bytes
	for _, rows := range []string{"none", "stash"} {
		var err error
		if c.Memory, err = NamedMemory(rows, 0); err != nil {
			t.Fatal(err)
		}
		last = 0
		for _, c.Imbalance = range []float64{1, 1.5, 2.5} {
			f, err := Forecast(c)
			if err != nil {
				t.Fatal(err)
			}
			full := f.Fullest()
			var sum memory.Bytes
			for _, o := range full.Owners {
				if o.Kind == memory.Device {
					sum += o.Peak
				}
			}
			if full.Device <= last || sum != full.Device || len(f.Ranks) != 4 || f.Ranks[3].Stage != 1 || f.Ranks[3].Replica != 1 {
				t.Errorf("%s: at %g times the rows %v after %v; owners take %v", rows, c.Imbalance, full.Device, last, sum)
			}
			last = full.Device
		}
	}
	c.Memory.Room = 1
	c.Imbalance = 1.5 // more than a set holds: it is made larger, and the step walked again
	f, err := Forecast(c)
	if err != nil {
		t.Fatal(err)
	}
	balanced, _ := (&layer.Env{Shape: layer.Shape{Batch: c.Batch.Micro, Seq: c.Batch.Seq}, Expert: layer.Place{Ranks: 2}}).RowBounds(c.Model.Layers[0].MoE)
	var held memory.Bytes
	for _, x := range layer.RowTensors(c.Model.Hidden, 48, c.Number, 1) {
		held += x.Row * memory.Bytes(balanced) * 3 / 2
	}
	space := slices.IndexFunc(f.Ranks[0].Owners, func(o device.OwnerUsage) bool { return o.Owner == "workspace "+layer.RowsGroup })
	if got := f.Ranks[0].Owners[space].Peak; got < 2*held {
		t.Errorf("two sets take %v, and rows need %v in each", got, held)
	}
	c.Imbalance = 0.5
	if _, err := Forecast(c); err == nil {
		t.Error("half of the rows of balanced routing on the fullest rank")
	}
}

// What the run would refuse, the forecast refuses, in the same words.
func TestForecastRefuses(t *testing.T) {
	c := testConfig(t, smallMoE())
	c.Memory.Budget, c.Memory.Links = 64<<10, memory.Links{Out: 1e9, In: 1e9}
	_, want := New(c)
	if _, err := Forecast(c); err == nil || want == nil || err.Error() != want.Error() {
		t.Errorf("%v; the run says %v", err, want)
	}
	c = testConfig(t, smallMoE())
	c.Device = func(int) (device.Device, error) {
		return cpu.Open(cpu.Options{Capacity: [memory.Kinds]memory.Bytes{1 << 20, 1 << 30}})
	}
	var full *device.OutOfMemory
	if _, err := Forecast(c); !errors.As(err, &full) {
		t.Errorf("parameters do not fit, and the forecast says %v", err)
	}
	if _, err := Forecast(Config{}); err == nil {
		t.Error("a run of nothing has a forecast")
	}
}

// A run that is far larger than this machine is walked without its memory.
func TestForecastOfLargeRun(t *testing.T) {
	m, err := model.Preset("mixtral-8x7b")
	if err != nil {
		t.Fatal(err)
	}
	c := testConfig(t, m)
	c.Number, c.Layout, c.Batch = kernels.BF16, Layout{PP: 1, VPP: 1, EP: 2, DP: 2}, Batch{Micro: 1, Seq: 4096, Microbatches: 1}
	c.Device = func(int) (device.Device, error) {
		return cpu.Open(cpu.Options{Capacity: [memory.Kinds]memory.Bytes{1 << 40, 1 << 40}})
	}
	if c.Memory, err = NamedMemory("stash", 0); err != nil {
		t.Fatal(err)
	}
	f, err := Forecast(c)
	if err != nil {
		t.Fatal(err)
	}
	full := f.Fullest()
	i := slices.IndexFunc(full.Owners, func(o device.OwnerUsage) bool { return o.Owner == "parameters" })
	// Of 46.7e9 parameters, 45.1e9 of them experts', a rank has 24.2e9, each with weight,
	// gradient and two moments in fp32 and a weight in bf16: 18 bytes.
	if i < 0 || math.Abs(off(full.Owners[i].Peak, 435e9)) > 0.01 || full.Device < full.Owners[i].Peak+memory.GiB {
		t.Errorf("%v, of which %+v", full.Device, full.Owners)
	}
	t.Logf("%v on the device, %v on the host after %d steps: %+v", full.Device, full.Host, f.Steps, full.Owners)
}

// Forecasts and summaries are in the order of ranks, which are counted by stage and then by
// replica.
func TestRanksOfAForecast(t *testing.T) {
	c := quick(t, assorted())
	c.Layout, c.Memory = Layout{PP: 2, VPP: 1, EP: 1, DP: 3}, namedMemory(t, "stash")
	f, err := Forecast(c)
	if err != nil {
		t.Fatal(err)
	}
	if len(f.Ranks) != 6 {
		t.Fatalf("%d ranks", len(f.Ranks))
	}
	full := f.Fullest()
	for i, r := range f.Ranks {
		var sum [memory.Kinds]memory.Bytes
		for _, o := range r.Owners {
			sum[o.Kind] += o.Peak
		}
		if r.Rank != i || r.Stage != i/3 || r.Replica != i%3 || r.Device > full.Device || sum[memory.Device] < r.Device || sum[memory.Host] < r.Host {
			t.Errorf("rank %d is %+v", i, r)
		}
	}
}
