// This file owns tests of single functions: what they compute from figures that all differ.

package engine

import (
	"errors"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/capture"
	"github.com/stowage-dev/stowage/internal/offload"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// number gives the numbers of a struct, and of the structs and arrays in it, values that
// all differ, and sets what is true or false.
func number(v reflect.Value, next *int64) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			number(v.Field(i), next)
		}
	case reflect.Array:
		for i := range v.Len() {
			number(v.Index(i), next)
		}
	case reflect.Int, reflect.Int64:
		*next++
		v.SetInt(*next)
	case reflect.Bool:
		v.SetBool(true)
	}
}

// equalNames compares the fields of two structs that have the same name, and returns how
// many there are.
func equalNames(t *testing.T, want, got reflect.Value) (n int) {
	t.Helper()
	for i := range got.NumField() {
		name := got.Type().Field(i).Name
		f := want.FieldByName(name)
		if !f.IsValid() {
			continue
		}
		n++
		for k, a, b := 0, f, got.Field(i); k == 0 || k < a.Len(); k++ {
			x, y := a, b
			if a.Kind() == reflect.Array {
				x, y = a.Index(k), b.Index(k)
			}
			if x.CanInt() != y.CanInt() || x.CanInt() && x.Int() != y.Int() || x.Kind() == reflect.Bool && x.Bool() != y.Bool() {
				t.Errorf("%s is %v, want %v", name, y, x)
			}
			if a.Kind() != reflect.Array {
				break
			}
		}
	}
	return n
}

// The figures of a summary are those of the parts, each in its place.
func TestSummariesCopyEveryFigure(t *testing.T) {
	var next int64
	var copies offload.Stats
	var rows stash.Stats
	var graphs capture.Counts
	for _, x := range []any{&copies, &rows, &graphs} {
		number(reflect.ValueOf(x).Elem(), &next)
	}
	for _, x := range []struct {
		want, got any
		fields    int
	}{
		{copies, copyCounts(&copies), 10},
		{rows, *stashCounts(rows), 8},
		{graphs, *graphCounts(graphs, 0), 9},
	} {
		if n := equalNames(t, reflect.ValueOf(x.want), reflect.ValueOf(x.got)); n != x.fields {
			t.Errorf("%T and %T share %d fields, want %d", x.want, x.got, n, x.fields)
		}
	}
	if graphCounts(graphs, 77).Held != 77 {
		t.Error("the graphs that are held are not told")
	}
}

// stampAt is an event at a time.
type stampAt struct {
	device.Event
	at time.Duration
}

func (s stampAt) Since(earlier device.Event) (time.Duration, error) {
	if s.at < 0 {
		return 0, errors.New("not done")
	}
	return s.at - earlier.(stampAt).at, nil
}

// The shortest pass of a unit counts, whichever comes first; passes without stamps and
// units that cannot be recomputed do not.
func TestShortestPass(t *testing.T) {
	unit := func(name string) memory.GroupID { return memory.GroupID{Name: name} }
	r := &Runtime{}
	for _, at := range []time.Duration{0, 5, 8, 17, 17, 40} { // passes of 5, 3, 9, 0 and 23
		r.stamps = append(r.stamps, stampAt{at: at})
	}
	l := &learned{facts: map[memory.Unit]policy.Facts{
		unit("a").Unit(): {Recompute: 1}, unit("b").Unit(): {Recompute: 1}, unit("c").Unit(): {}, unit("d").Unit(): {Recompute: 1}, unit("e").Unit(): {Recompute: 1},
	}}
	l.passes = []pass{
		{unit("a"), 0, 1}, {unit("a"), 1, 2}, {unit("a"), 2, 3}, // 5, 3 and 9
		{unit("b"), 2, 3}, {unit("b"), 0, 1}, {unit("b"), 4, 5}, // 9, 5 and 23
		{unit("c"), 0, 1},
		{unit("d"), 3, 4},                                         // none, which counts as a nanosecond
		{unit("e"), -1, 1}, {unit("e"), 0, -1}, {unit("e"), 4, 5}, // 23
	}
	got, err := r.shortest(l)
	want := map[memory.Unit]time.Duration{unit("a").Unit(): 3, unit("b").Unit(): 5, unit("d").Unit(): 1, unit("e").Unit(): 23}
	if err != nil || !maps.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	r.stamps[5] = stampAt{at: -1}
	if _, err := r.shortest(l); err == nil {
		t.Error("a stamp that is not done gives a time")
	}
}

// A profile for the solver is without the sets that decisions added, however many: neither
// their number nor their memory.
func TestFreeSets(t *testing.T) {
	dev := openCPU(t)
	compute, err := dev.NewStream("compute")
	if err != nil {
		t.Fatal(err)
	}
	m, err := stash.NewManager(dev, compute, stash.ManagerConfig{MoreSets: 3, Store: stash.Config{Page: 4096, Max: [stash.Tiers]schedule.Pages{4, 4}}})
	if err != nil {
		t.Fatal(err)
	}
	for i, sets := range []int{1, 2} {
		if _, err := m.NewWorkspace("w", sets, 0, stash.Tensor{Name: "x", Row: 256, MaxRows: stash.Rows(16 * (i + 1))}); err != nil {
			t.Fatal(err)
		}
	}
	r := &Runtime{stash: m}
	_, _, each := m.MoreSets()
	const base = 1 << 30
	for _, added := range []int{0, 1, 3, 2} {
		if err := m.SetMore(added); err != nil {
			t.Fatal(err)
		}
		p := &policy.Profile{Base: base + memory.Bytes(added)*each, Rows: &policy.Rows{Sets: m.Sets()}}
		r.freeSets(p)
		if want := (policy.Rows{Sets: []int{1, 2}, MoreSets: 3, SetBytes: each}); p.Base != base || !reflect.DeepEqual(*p.Rows, want) {
			t.Errorf("%d sets: a base of %v, want %v; %+v, want %+v", added, p.Base, memory.Bytes(base), *p.Rows, want)
		}
		fixed := &policy.Profile{Base: base, Rows: &policy.Rows{Sets: m.Sets(), Fixed: true}}
		r.freeSets(fixed)
		if fixed.Base != base || fixed.Rows.MoreSets != 0 || fixed.Rows.Sets[0] != 1+added {
			t.Errorf("a profile whose sets are fixed became %v, %+v", fixed.Base, *fixed.Rows)
		}
	}
	if err := errors.Join(m.Close(), compute.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

// Measuring the links leaves nothing open and keeps no memory, whichever call fails.
func TestMeasuringLeavesNothing(t *testing.T) {
	open := func() (device.Device, error) {
		return cpu.Open(cpu.Options{CopyThreads: 1, Capacity: [memory.Kinds]memory.Bytes{4 * memory.MiB, 4 * memory.MiB}})
	}
	for _, class := range []check.Class{check.Allocs, check.Copies, check.Makes} {
		f, err := check.FailEach(class, 3, open, func(dev device.Device) error {
			_, err := MeasureLinks(dev)
			return err
		})
		if err != nil || len(f.Wrong) > 0 || f.Calls == 0 {
			t.Errorf("%v: %+v, %v", class, f, err)
		}
	}
}

// asked is a device that notes the sizes it is asked for.
type asked struct {
	device.Device
	sizes []memory.Bytes
}

func (d *asked) Alloc(kind memory.Kind, size memory.Bytes, owner string) (*device.Buffer, error) {
	d.sizes = append(d.sizes, size)
	return d.Device.Alloc(kind, size, owner)
}

// The links are measured with the largest copies, of 32 MiB at most and 1 MiB at least, of which two fit each kind of
// memory. Where the least do not fit, that is the error.
func TestMeasuredSizes(t *testing.T) {
	for capacity, want := range map[memory.Bytes]memory.Bytes{
		64 * memory.MiB: 32 * memory.MiB, 64*memory.MiB - 1: 16 * memory.MiB, 5 * memory.MiB: 2 * memory.MiB, 2 * memory.MiB: memory.MiB,
		2*memory.MiB - 1: 0, memory.MiB: 0,
	} {
		for _, kinds := range [][memory.Kinds]memory.Bytes{{capacity, memory.GiB}, {memory.GiB, capacity}} {
			dev, err := cpu.Open(cpu.Options{CopyThreads: 1, Capacity: kinds})
			if err != nil {
				t.Fatal(err)
			}
			d := &asked{Device: dev}
			_, err = MeasureLinks(d)
			var full *device.OutOfMemory
			if last := d.sizes[len(d.sizes)-1]; want > 0 && (err != nil || last != want) || want == 0 && (!errors.As(err, &full) || last != memory.MiB) {
				t.Errorf("with %v of memory copies of %v are measured, want %v: %v", kinds, last, want, err)
			}
			if err := dev.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// A scope that returns a tensor which it did not make is an error, and leaves nothing open.
func TestForeignOutputLeavesNothing(t *testing.T) {
	err := check.On(cpuDevice, func(dev device.Device) error {
		compute, err := dev.NewStream("compute")
		if err != nil {
			return err
		}
		r, err := Open(Config{Device: dev, Compute: compute, Scopes: memory.ScopesOf(memory.Attn), Links: testLinks})
		if err != nil {
			return err
		}
		refused := 0
		for range 4 {
			err := r.Step(memory.Key{Microbatches: 1}, func(s *Step) error {
				x, err := s.New(4096)
				if err != nil {
					return err
				}
				_, err = s.Scope(memory.Attn, Pass{}, func() ([]*Tensor, error) {
					compute.Fill(x.Range(), 1)
					return []*Tensor{x}, nil
				})
				return err
			})
			if err != nil {
				refused++
			}
		}
		if refused == 0 {
			t.Error("a tensor from outside was returned")
		}
		return errors.Join(r.Close(), compute.Close())
	})(check.New(check.Options{}))
	if err != nil {
		t.Error(err)
	}
}

// The borders of scopes lie where compute begins and ends their work, among the calls that
// were recorded.
func TestBordersOfScopes(t *testing.T) {
	var ops []residency.Op
	for i := range 6 {
		ops = append(ops, residency.Op{Kind: residency.OpGive, ID: i, At: time.Duration(10 * i)})
	}
	begin := func(at time.Duration) residency.Op { return residency.Op{Kind: residency.OpBeginScope, At: at} }
	end := func(at time.Duration) residency.Op { return residency.Op{Kind: residency.OpEndScope, At: at} }
	for _, x := range []struct {
		spans []span
		want  []residency.Op
	}{
		{nil, ops},
		{[]span{{2, 2}}, ops},
		{[]span{{0, 2}, {2, 3}}, []residency.Op{begin(0), ops[0], ops[1], end(20), begin(20), ops[2], end(30), ops[3], ops[4], ops[5]}},
		{[]span{{1, 1}, {4, 6}}, []residency.Op{ops[0], ops[1], ops[2], ops[3], begin(40), ops[4], ops[5], end(50)}},
	} {
		if got := scoped(ops, x.spans); !reflect.DeepEqual(got, x.want) {
			t.Errorf("%v: %v, want %v", x.spans, got, x.want)
		}
	}
}

// Taking times again makes those of recomputing shorter, never longer, and only in the
// profile that is given.
func TestRetimeChangesACopy(t *testing.T) {
	unit := func(name string) memory.Unit { return memory.Unit{Name: name} }
	was := map[memory.Unit]policy.Facts{unit("a"): {Recompute: 50, CanOffload: true}, unit("b"): {Recompute: 2}, unit("c"): {CanOffload: true}}
	before := maps.Clone(was)
	r := &Runtime{stamps: []device.Event{stampAt{at: 0}, stampAt{at: 7}}}
	l := &learned{facts: was}
	for u := range was {
		l.passes = append(l.passes, pass{memory.GroupID{Name: u.Name}, 0, 1})
	}
	p := &policy.Profile{Units: was}
	if err := r.retime(p, l); err != nil {
		t.Fatal(err)
	}
	want := map[memory.Unit]policy.Facts{unit("a"): {Recompute: 7, CanOffload: true}, unit("b"): {Recompute: 2}, unit("c"): {CanOffload: true}}
	if !maps.Equal(p.Units, want) || !maps.Equal(was, before) {
		t.Errorf("%v, want %v; the old profile has %v", p.Units, want, was)
	}
}

// A forward pass that fails is over: the step goes on with other groups, and the error is
// the pass's own.
func TestFailedForwardPassIsOver(t *testing.T) {
	dev := openCPU(t)
	compute, err := dev.NewStream("compute")
	if err != nil {
		t.Fatal(err)
	}
	r, err := Open(Config{Device: dev, Compute: compute, Links: testLinks})
	if err != nil {
		t.Fatal(err)
	}
	broken := errors.New("no data")
	for range 2 {
		err := r.Step(memory.Key{Microbatches: 1}, func(s *Step) error {
			var kept *Group
			err := s.Run(memory.GroupID{Name: "mlp"}, func(g *Group) error { kept = g; return broken })
			if !errors.Is(err, broken) {
				t.Errorf("the pass failed with %v", err)
			}
			func() {
				defer func() {
					if recover() == nil {
						t.Error("a group is used after it failed")
					}
				}()
				kept.Save()
			}()
			return s.BeginGroup(memory.GroupID{Name: "router"}).End()
		})
		if err != nil {
			t.Error(err)
		}
	}
	if err := errors.Join(r.Close(), compute.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

// What counts against a budget is what the device's ledger has: the base, the memory of
// saved tensors, device pages and added sets.
func TestWhatCountsAgainstABudget(t *testing.T) {
	dev := openCPU(t)
	compute, err := dev.NewStream("compute")
	if err != nil {
		t.Fatal(err)
	}
	m, err := stash.NewManager(dev, compute, stash.ManagerConfig{MoreSets: 3, Store: stash.Config{Page: 4096, Pages: [stash.Tiers]schedule.Pages{3, 2}, Max: [stash.Tiers]schedule.Pages{4, 4}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.NewWorkspace("w", 2, 0, stash.Tensor{Name: "x", Row: 256, MaxRows: 16}); err != nil {
		t.Fatal(err)
	}
	off, err := offload.New(dev, compute, offload.Config{})
	if err != nil {
		t.Fatal(err)
	}
	held := func() memory.Bytes { return dev.Memory().Kind[memory.Device].Current }
	base := held() - 3*4096
	if err := errors.Join(m.SetMore(2), off.Prepare(10000, 500)); err != nil {
		t.Fatal(err)
	}
	r := &Runtime{stash: m, off: off}
	for _, fixed := range []bool{false, true} {
		p := &policy.Profile{Base: base, Rows: &policy.Rows{Fixed: fixed}}
		if fixed { // then the base has the sets
			_, added, each := m.MoreSets()
			p.Base += memory.Bytes(added) * each
		}
		if got := r.holds(p); got != held() {
			t.Errorf("fixed: %v: %v count, and the device holds %v", fixed, got, held())
		}
	}
	if err := errors.Join(off.Close(), m.Close(), compute.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

// Rows of no, some or all units may be moved, those of the first units first. The shortest step counts, whatever others
// cannot be followed.
func TestRowsAreMovedUnitByUnit(t *testing.T) {
	dev := openCPU(t)
	compute, err := dev.NewStream("compute")
	if err != nil {
		t.Fatal(err)
	}
	m, err := stash.NewManager(dev, compute, stash.ManagerConfig{
		HostPages: 1, HostMax: 4, Place: func(memory.GroupID) int { return stash.Device },
		Store: stash.Config{Page: 4096, Max: [stash.Tiers]schedule.Pages{4, 4}},
	})
	if err != nil {
		t.Fatal(err)
	}
	r := &Runtime{stash: m, cfg: Config{Budget: 1, ByHand: &policy.ByHand{}}}
	p := &policy.Profile{Units: map[memory.Unit]policy.Facts{{Name: "core_attn"}: {}}}
	const units = 3
	for i := range units {
		p.Units[memory.Unit{Name: "expert_fc1", Layer: i}] = policy.Facts{Rows: true}
	}
	none := errors.New("it does not fit")
	for best := range units + 2 { // of those that are moved; the last is impossible
		var tried []int
		d, err := r.followRows(p, memory.Policy{}, func(pol memory.Policy) (*policy.Decision, error) {
			n := len(pol)
			if len(tried) == 0 || tried[len(tried)-1] != n {
				tried = append(tried, n)
			}
			for i := range n {
				if pol[memory.Unit{Name: "expert_fc1", Layer: i}] != memory.Offload {
					t.Errorf("%v are moved", pol)
				}
			}
			if best > units || n == (best+1)%units {
				return nil, none
			}
			step := time.Second
			if n == best {
				step = time.Millisecond
			}
			return &policy.Decision{Policy: pol, Forecast: policy.Forecast{Step: step}}, nil
		})
		if !slices.Equal(tried, []int{0, 1, 2, 3}) {
			t.Errorf("%v of %d units were tried", tried, units)
		}
		if best > units {
			if !errors.Is(err, none) {
				t.Errorf("nothing fits: %v, %v", d, err)
			}
		} else if best != (best+1)%units && (err != nil || len(d.Policy) != best) {
			t.Errorf("%d are best: %+v, %v", best, d, err)
		}
	}
	if err := errors.Join(m.Close(), compute.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

// A choice that some unit of a name has counts before the others, else the highest of them; what
// groups and modules are given counts before a policy.
func TestGivenChoices(t *testing.T) {
	unit := func(name string, layer int) memory.Unit { return memory.Unit{Name: name, Layer: layer} }
	r := &Runtime{}
	r.cfg.Policy = memory.Policy{}
	names := map[string][]memory.Choice{
		"stays": {memory.Keep, memory.Keep}, "one": {memory.Offload}, "two": {memory.Stash, memory.Recompute}, "three": {memory.Stash, memory.Offload, memory.Recompute},
		"some": {memory.Keep, memory.Stash, memory.Keep}, "named": {memory.Stash, memory.Recompute}, "module": {memory.Offload}, "last": {memory.Offload},
	}
	for name, list := range names {
		for layer, c := range list {
			r.cfg.Policy[unit(name, layer)] = c
		}
	}
	r.cfg.GroupChoices = map[string]memory.Choice{"named": memory.Offload, "group": memory.Stash}
	for which := memory.Keep + 1; which < memory.Choices; which++ {
		for _, byHand := range []bool{false, true} {
			r.cfg.ByHand = nil
			if byHand {
				r.cfg.ByHand = &policy.ByHand{OffloadModules: []string{"a", "b"}, RecomputeModules: []string{"c", "module"}, StashModules: []string{"d", "last"}}
			}
			want := map[string]memory.Choice{}
			for name, list := range names {
				want[name] = slices.Max(list)
				if slices.Contains(list, which) {
					want[name] = which
				}
			}
			want["named"], want["group"] = memory.Offload, memory.Stash
			if byHand {
				for name, c := range map[string]memory.Choice{"a": memory.Offload, "b": memory.Offload, "c": memory.Recompute, "module": memory.Recompute, "d": memory.Stash, "last": memory.Stash} {
					want[name] = c
				}
			}
			for range 5 { // maps have no order
				if got := r.given(which); !maps.Equal(got, want) {
					t.Fatalf("%v counts first, by hand %v: %v, want %v", which, byHand, got, want)
				}
			}
		}
	}
}

// stubborn is recorded work that cannot be closed.
type stubborn struct{ error }

func (stubborn) Replay() error  { return nil }
func (s stubborn) Close() error { return s.error }

// What goes wrong when graphs are closed is not lost when the rows are closed after them.
func TestCloseKeepsTheFirstError(t *testing.T) {
	c := on(0, Config{Scopes: scopes, ByHand: hand("core_attn"), Stash: store(9, 400)})
	c.most = 40
	must(t, c, func(l *loop, rng *rand.Rand) error {
		wrong := errors.New("the graph stays")
		l.rt.scopes = capture.New(capture.RecorderFunc(func(func() error) (capture.Captured, error) { return stubborn{wrong}, nil }), capture.Config{WarmUp: 1})
		for range 2 {
			if err := l.rt.scopes.Run(capture.Key{}, func() error { return nil }); err != nil {
				return err
			}
		}
		if err := l.rt.Close(); !errors.Is(err, wrong) {
			t.Errorf("%v, want %v", err, wrong)
		}
		l.rt = nil
		return nil
	})
}
