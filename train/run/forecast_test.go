// This file owns the tests of forecasts and of refusals.

package run

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train"
)

// Before anything is trained the same is said of every policy, within 5 %, and of one of
// them by owner; nothing is opened but devices without memory. SPEC S6.1
func TestForecast(t *testing.T) {
	if testing.Short() {
		t.Skip("searches for budgets, which takes long under the race detector")
	}
	few := func(o *Options) { // what leaves under a budget is searched for among all groups
		o.Model.Keys["num_hidden_layers"], o.Model.Keys["first_k_dense_replace"], o.Model.Keys["num_nextn_predict_layers"] = 2, 0, 0
	}
	j := smallJob(t, few)
	j.config.Device = nil // a forecast brings its own
	told := 0
	j.OnForecast = func(done, all int) {
		if told++; done != told || all != len(train.Policies) {
			t.Errorf("%d of %d policies, told %d times", done, all, told)
		}
	}
	all, err := j.ForecastAll()
	if err != nil {
		t.Fatal(err)
	}
	rows := all.Rows
	j = smallJob(t, few)
	c, err := j.Compare(context.Background(), "", false, NewProgress(io.Discard, nil, nil))
	if err != nil {
		t.Fatal(err)
	}
	took := c.Rows
	for i, r := range rows {
		if is := took[i]; r.Policy != is.Policy || r.Policy != "budget" && math.Abs(float64(r.Device)/float64(is.Device)-1) > closeEnough {
			t.Errorf("forecast %+v, took %+v", r, is)
		}
		if r.Policy == "budget" && (r.Budget == 0 || r.Device > r.Budget) {
			t.Errorf("the budget: %+v", r)
		}
		if r.Policy != "stash" && r.Policy != "budget" {
			continue
		}
		one := smallJob(t, func(o *Options) {
			few(o)
			o.Policy, o.Budget = r.Policy, "1MiB"
		})
		one.config.Memory.Budget = memory.Bytes(r.Budget)
		f, err := one.Forecast()
		if err != nil || f.Device != r.Device || f.Host != r.Host || len(f.Ranks) != 4 {
			t.Fatalf("%+v, and alone %+v, %v", r, f, err)
		}
		var sum int64
		for _, o := range f.Ranks[0].Owners {
			sum += o.Device
		}
		// Under a budget, a decision gives memory of one owner to another: each has its own peak.
		if sum < f.Ranks[0].Device || sum != f.Ranks[0].Device && r.Policy != "budget" {
			t.Errorf("%s: owners have %d of %d", r.Policy, sum, f.Ranks[0].Device)
		}
		var text strings.Builder
		f.WriteText(&text)
		if !strings.Contains(text.String(), "saved activations") || strings.Contains(text.String(), "beside parameters: ") != (r.Policy == "budget") {
			t.Errorf("%s is shown as\n%s", r.Policy, text.String())
		}
	}
	var table strings.Builder
	all.WriteText(&table)
	if n := strings.Count(table.String(), "iB\n") + strings.Count(table.String(), " B\n"); n != len(rows) {
		t.Errorf("the table is\n%s", table.String())
	}
}

// A budget that is too small is the user's, whenever that is found; a device that is
// full is not.
func TestWhoseError(t *testing.T) {
	for _, x := range []struct {
		err    error
		budget memory.Bytes
		user   bool
		say    string
	}{
		{&memory.BudgetError{Budget: 4 << 10, Need: 5 << 10}, 4 << 10, true, "a budget of 4.00 KiB is too small: the step needs 5.00 KiB even with everything offloaded or recomputed that can be; raise it"},
		{&residency.Full{Asked: 2 << 20, Live: 3 << 20, Limit: 4 << 20, Run: 1 << 20}, 8 << 20, true, "Budget 8.0 MiB is too small: 2.0 MiB do not fit in the 4.0 MiB"},
		{&stash.Overflow{Why: "9 pages"}, 8 << 20, true, "9 pages; raise it"},
		{errors.Join(&residency.Full{}, &device.OutOfMemory{}), 8 << 20, false, "0 bytes"},
		{&stash.Overflow{Why: "9 pages"}, 0, false, "9 pages"},
		{io.ErrUnexpectedEOF, 8 << 20, false, "unexpected"},
	} {
		err := checkBudget(memory.OnRank(3, x.err), x.budget)
		if isInput(err) != x.user || !strings.HasPrefix(err.Error(), "rank 3: ") || !strings.Contains(err.Error(), x.say) {
			t.Errorf("%v: it is the user's: %v, want %v", err, isInput(err), x.user)
		}
	}
	j := smallJob(t, func(o *Options) { o.Policy, o.Micro = "none", 64 })
	for _, room := range []memory.Bytes{64 << 10, 4 << 20} { // too little to begin, and for the first step
		j.config.Device = func(int) (device.Device, error) {
			return cpu.Open(cpu.Options{Capacity: [memory.Kinds]memory.Bytes{room, 1 << 30}})
		}
		var full *device.OutOfMemory
		s, err := j.Run(context.Background(), "", false, NewProgress(io.Discard, nil, nil))
		if !errors.As(err, &full) || isInput(err) || s.Steps > 0 {
			t.Errorf("on a device of %v: %v", room, err)
		}
	}
}

// The budget of a comparison is near the least that is enough, after few tries.
func TestLeastBudget(t *testing.T) {
	limits := []memory.Bytes{500, 1000, 2000, 4000}
	for _, x := range []struct{ enough, most memory.Bytes }{{400, 500}, {500, 500}, {501, 563}, {700, 750}, {990, 1000}, {1300, 1375}, {4000, 4000}, {4001, 0}} {
		tries := 0
		var accepted memory.Bytes
		got, err := leastBudget(limits, func(limit memory.Bytes) error {
			if tries++; limit < x.enough {
				return refuse("Budget", limit.Short(), "is too small", "give more")
			}
			accepted = limit
			return nil
		})
		switch {
		case x.most == 0:
			if !isInput(err) {
				t.Errorf("%d is enough: %d, %v; want that all are refused", x.enough, got, err)
			}
		case err != nil || got < x.enough || got > x.most || got != accepted || tries > len(limits)+narrowings:
			t.Errorf("%d is enough: %d after %d tries, %v; want at most %d", x.enough, got, tries, err, x.most)
		}
	}
	broken := errors.New("the device is lost")
	if _, err := leastBudget(limits, func(memory.Bytes) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("%v; want that it stops", err)
	}
}

// A forecast of more ranks than are listed has the first of each kind, and its text stays
// short.
func TestForecastOfManyRanks(t *testing.T) {
	o := DefaultOptions()
	o.Model, o.Micro, o.Seq, o.Steps = small(), 1, 32, 1
	o.Model.Keys["num_hidden_layers"] = 11
	o.Policy, o.PP, o.EP, o.DP, o.Microbatches = "stash", 6, 2, 128, 8
	m := machine()
	m.DryRun = true
	j, err := NewJob(o, m, nil)
	if err != nil {
		t.Fatal(err)
	}
	f, err := j.Forecast()
	if err != nil {
		t.Fatal(err)
	}
	if len(f.Kinds) != 6 || len(f.Ranks) != 6 || f.Kinds[5] != (rankKind{5, 640, 128, f.Ranks[5].Device, f.Ranks[5].Host}) || f.Ranks[5].Rank != 640 {
		t.Errorf("kinds %+v", f.Kinds)
	}
	var text strings.Builder
	f.WriteText(&text)
	lines := strings.Split(text.String(), "\n")
	want := []string{"stages", "ranks", "count", "device", "host"}
	if len(lines) > 30 || len(lines) < 10 || !slices.Equal(strings.Fields(lines[2]), want) || !strings.HasPrefix(lines[8], "  5              640 to 767          128 ") {
		t.Errorf("%d lines:\n%s", len(lines), text.String())
	}
}

// Numbers are listed one by one, and those in a row by both ends.
func TestRanges(t *testing.T) {
	for _, x := range []struct {
		n    []int
		want string
	}{{[]int{4}, "4"}, {[]int{0, 1, 2}, "0, 1, 2"}, {[]int{0, 1, 2, 3}, "0 to 3"}, {[]int{1, 3, 4, 5, 6, 9}, "1, 3 to 6, 9"}, {nil, ""}} {
		if got := ranges(x.n); got != x.want {
			t.Errorf("%v is %q, want %q", x.n, got, x.want)
		}
	}
}

// A step with so many microbatches that its record would take minutes and many GiB is refused before it is walked.
// The number that the error gives instead is accepted, and gives the answer: once the pipeline is full, peaks
// grow by the same bytes with each microbatch.
func TestForecastOfVeryManyMicrobatches(t *testing.T) {
	o := tiny()
	o.Policy = "stash"
	peak := func(n int) memory.Bytes {
		o.Microbatches = n
		f, err := jobOf(t, o).Forecast()
		if err != nil {
			t.Fatal(err)
		}
		return memory.Bytes(f.Device)
	}
	if a, b, c := peak(8), peak(12), peak(16); c-b != b-a || b == a {
		t.Errorf("peaks of 8, 12 and 16 microbatches are %v, %v and %v", a, b, c)
	}
	o.PP, o.EP, o.DP = 3, 1, 1 // which divides no power of two
	most := mostVisits / len(jobOf(t, o).config.Model.Layers) / 3 * 3
	for n, refused := range map[int]bool{most: false, most + 1: true, 1 << 20: true} {
		o.Microbatches = n
		j := jobOf(t, o)
		err := j.checkVisits()
		if says := fmt.Sprintf("Microbatches %d makes a step longer than a forecast follows; forecast %d", n, most); refused != (err != nil) || refused && !strings.Contains(err.Error(), says) {
			t.Errorf("%d microbatches: %v", n, err)
		}
		if !refused {
			continue
		}
		var input *InputError
		if _, err := j.Forecast(); !errors.As(err, &input) {
			t.Errorf("the forecast of a policy: %v", err)
		}
		if _, err := j.ForecastAll(); !errors.As(err, &input) {
			t.Errorf("the forecast of all: %v", err)
		}
	}
}
