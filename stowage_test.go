// This file owns the tests of the API: nothing is lost on the way to the engine, and
// what comes back is plain.

package stowage

import (
	"bytes"
	"encoding/binary"
	"errors"
	"log/slog"
	"reflect"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fill sets every field of a struct to something that is not zero.
func fill(t *testing.T, x any) {
	v := reflect.ValueOf(x).Elem()
	for i := range v.NumField() {
		f := v.Field(i)
		switch f.Kind() {
		case reflect.Bool:
			f.SetBool(true)
		case reflect.Int, reflect.Int64:
			f.SetInt(int64(i + 1))
		case reflect.Uint8:
			f.SetUint(1)
		case reflect.Float64:
			f.SetFloat(float64(i + 1))
		case reflect.Slice:
			f.Set(reflect.ValueOf([]string{v.Type().Field(i).Name}))
		default:
			t.Fatalf("field %s is of kind %v; teach this test about it", v.Type().Field(i).Name, f.Kind())
		}
	}
}

// differing names the fields of two structs that have the same name and not the same value.
func differing(x, y any) (names []string) {
	a, b := reflect.ValueOf(x), reflect.ValueOf(y)
	for i := range a.NumField() {
		name := a.Type().Field(i).Name
		if f := b.FieldByName(name); f.IsValid() && f.Type() == a.Field(i).Type() && f.Kind() != reflect.Func && !reflect.DeepEqual(f.Interface(), a.Field(i).Interface()) {
			names = append(names, name)
		}
	}
	return names
}

// eachAlone calls f with a struct in which only one of its fields of type bool is set.
func eachAlone[T any](x T, f func(T)) {
	for i := range reflect.TypeFor[T]().NumField() {
		y := x
		v := reflect.ValueOf(&y).Elem()
		if v.Field(i).Kind() != reflect.Bool {
			continue
		}
		for k := range v.NumField() {
			if v.Field(k).Kind() == reflect.Bool {
				v.Field(k).SetBool(k == i)
			}
		}
		f(y)
	}
}

// zeros names the fields of a struct that are zero.
func zeros(x any) (names []string) {
	v := reflect.ValueOf(x)
	for i := range v.NumField() {
		if v.Field(i).IsZero() {
			names = append(names, v.Type().Field(i).Name)
		}
	}
	return names
}

func TestModuleSettingsReachTheEngine(t *testing.T) {
	var m ModuleSettings
	fill(t, &m)
	if z := zeros(m.policy()); z != nil {
		t.Errorf("the engine does not get %v", z)
	}
	eachAlone(m, func(m ModuleSettings) {
		if names := differing(m, m.policy()); names != nil {
			t.Errorf("the engine gets other values for %v", names)
		}
	})
	d := DefaultModuleSettings()
	if got := d.policy(); !reflect.DeepEqual(got, policy.Defaults()) {
		t.Errorf("the defaults are %+v, want %+v", got, policy.Defaults())
	}
}

func TestConfigReachesTheEngine(t *testing.T) {
	dev, compute := openCPU(t)
	c := Config{
		Device: dev, Compute: compute, Budget: 1, SavedLimit: 1, HostLimit: 2, Policy: memory.Policy{}, ByHand: &ModuleSettings{},
		GroupChoices: map[string]memory.Choice{}, NoOffload: true, NoRecompute: true, Scopes: 1, WarmUp: 3,
		GroupScopes: map[string]memory.Scope{}, Stash: &StashConfig{}, Links: memory.Links{Out: 1}, Window: 4, MinBytes: 5,
		Rank: 6, Stage: 7, Reduce: func(o Outcome) (Outcome, error) { return o, nil }, Log: slog.New(slog.DiscardHandler), Trace: &silent{},
	}
	if z := zeros(c); z != nil {
		t.Fatalf("this test does not set %v", z)
	}
	// What is for borrowed memory alone, for ranks of one graph, and for tests that need no good
	// decision, stays behind the API.
	want := []string{"Effort", "ProvideMemory", "Together"}
	if z := zeros(c.engine()); !reflect.DeepEqual(z, want) {
		t.Errorf("the engine does not get %v, want only %v to be missing", z, want)
	}
	eachAlone(c, func(c Config) {
		if names := differing(c, c.engine()); names != nil {
			t.Errorf("the engine gets other values for %v", names)
		}
	})
	got, err := c.engine().Reduce(stash.Outcome(Outcome{Failed: true, Final: true, Rank: 3, Why: "why", Broke: true}))
	if err != nil || Outcome(got) != (Outcome{true, true, 3, "why", true}) {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestStashSizesAreRoundedUpToPages(t *testing.T) {
	m := (&StashConfig{Page: 4096, Device: 4097, Host: 1, MaxDevice: 3 * 4096, Tables: 5 * 4096, Prefetch: 3, AssumeRows: func(memory.GroupID) int64 { return 9 }}).manager()
	if m.Store.Pages != [2]schedule.Pages{2, 1} || m.Store.Max != [2]schedule.Pages{3, 1} || m.Store.Assume(memory.GroupID{}) != 9 {
		t.Errorf("%+v", m.Store)
	}
	m2 := (&StashConfig{Page: 4096, Device: 1, Host: 2, MaxDevice: 5 * 4096, MaxHost: 7 * 4096}).manager()
	if m2.Store.Pages != [2]schedule.Pages{1, 1} || m2.Store.Max != [2]schedule.Pages{5, 7} {
		t.Errorf("%+v", m2.Store)
	}
	if m.Store.Page != 4096 || m.Store.Records != 5*4096 || m.Ahead != 3 {
		t.Errorf("%+v", m)
	}
}

// step saves two tensors for each of four layers, and returns what the backward pass
// finds.
func step(t *testing.T, rt *Runtime, compute device.Stream, out *device.Buffer) []byte {
	t.Helper()
	key := memory.Key{Microbatches: 1}
	err := rt.Step(key, func(s *Step) error {
		for layer := range 4 {
			err := s.Run(memory.GroupID{Name: "mlp", Layer: layer}, func(g *Group) error {
				x, err := s.New(8 * memory.KiB)
				if err != nil {
					return err
				}
				s.Compute().Fill(x.Range(), byte(10+layer))
				half := x.View(4096, 4, []int{1024}, nil)
				s.Compute().Fill(half.Range(), byte(20+layer))
				if n := half.Shape()[0]; n != 1024 {
					t.Errorf("the view has %d elements", n)
				}
				y, err := s.New(64)
				if err != nil {
					return err
				}
				s.Compute().Fill(y.Range(), byte(30+layer))
				g.Save(x, half, y.KeepOnDevice())
				x.Free()
				y.Free()
				return nil
			})
			if err != nil {
				return err
			}
		}
		for layer := 3; layer >= 0; layer-- {
			l, err := s.Load(memory.GroupID{Name: "mlp", Layer: layer})
			if err != nil {
				return err
			}
			at := memory.Bytes(layer) * 3
			for i := range memory.Bytes(l.Len()) {
				s.Compute().Copy(out.Slice(at+i, 1), l.Tensor(int(i)).Range().Slice(32, 1))
			}
			l.Done()
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 12)
	if err := compute.Download(got, out.Slice(0, 12)); err != nil {
		t.Fatal(err)
	}
	return got
}

// SPEC S1.1: results do not depend on the choices.
func TestEveryChoiceComputesTheSame(t *testing.T) {
	hand := DefaultModuleSettings()
	hand.OffloadModules, hand.MinBytes = []string{"mlp"}, 1
	all := func(c memory.Choice) memory.Policy {
		p := memory.Policy{}
		for layer := range 4 {
			p[memory.Unit{Name: "mlp", Layer: layer}] = c
		}
		return p
	}
	for name, c := range map[string]Config{
		"kept": {}, "offloaded": {Policy: all(memory.Offload)}, "recomputed": {Policy: all(memory.Recompute)},
		"by hand": {ByHand: &hand}, "by name": {GroupChoices: map[string]memory.Choice{"mlp": memory.Offload}},
		"budget": {Budget: 24 * memory.KiB},
	} {
		t.Run(name, func(t *testing.T) {
			dev, compute := openCPU(t)
			out, err := dev.Alloc(memory.Device, 4096, "results")
			if err != nil {
				t.Fatal(err)
			}
			defer compute.Free(out)
			if c.Budget > 0 {
				c.Budget += dev.Memory().Kind[memory.Device].Current
			}
			c.Device, c.Compute, c.Links = dev, compute, memory.Links{Out: 1e10, In: 1e10}
			rt, err := Open(c)
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := rt.Close(); err != nil {
					t.Error(err)
				}
			}()
			want := []byte{10, 20, 30, 11, 21, 31, 12, 22, 32, 13, 23, 33}
			const steps = 16 // a first step that was disturbed is recorded again, three times at most, and others are timed
			for range steps {
				if got := step(t, rt, compute, out); !bytes.Equal(got, want) {
					t.Fatalf("the backward pass finds %v, want %v", got, want)
				}
			}
			key := memory.Key{Microbatches: 1}
			d := rt.Decision(key)
			f, ok := rt.Forecast(key)
			if d == nil || !ok {
				t.Fatalf("nothing was decided after %d steps", steps)
			}
			s := rt.Summary(key)
			if moves := name == "offloaded" || name == "by hand" || name == "by name"; (s.Counts.Out > 0) != moves && name != "budget" {
				t.Errorf("%d copies out: %v", s.Counts.Out, d)
			}
			if name != "kept" && (len(d.Policy) == 0 || d.String() == "" || f.Device == 0) {
				t.Errorf("decision %v, forecast %+v", d, f)
			}
			if dev, _ := rt.Held(); dev == 0 {
				t.Error("the runtime holds no device memory")
			}
		})
	}
}

func TestOverflowIsTyped(t *testing.T) {
	dev, compute := openCPU(t)
	rt, err := Open(Config{Device: dev, Compute: compute, Rank: 5, Stash: &StashConfig{Page: 4096, Device: 4096, Host: 4096}})
	if err != nil {
		t.Fatal(err)
	}
	w, err := rt.NewWorkspace("expert_fc1", 1, 0, RowTensor{Name: "rows", Row: 1024, MaxRows: 64})
	if err != nil {
		t.Fatal(err)
	}
	err = rt.Step(memory.Key{Microbatches: 1}, func(s *Step) error {
		for layer := range 4 {
			set := s.Lease(w, memory.GroupID{Name: "expert_fc1", Layer: layer})
			compute.Upload(set.Counts(), binary.LittleEndian.AppendUint64(nil, 64))
			set.Save()
		}
		for layer := 3; layer >= 0; layer-- {
			s.Restore(w, memory.GroupID{Name: "expert_fc1", Layer: layer}).Done()
		}
		return nil
	})
	var over *OverflowError
	if !errors.As(err, &over) || over.Rank != 5 || !strings.HasPrefix(over.Problem, "expert_fc1 of layer ") || over.Error() != "rank 5: "+over.Problem+": "+errors.Unwrap(over.Err).Error() {
		t.Errorf("%v", err)
	}
	if err := rt.Close(); err != nil {
		t.Error(err)
	}
}

func TestOpenRefuses(t *testing.T) {
	dev, compute := openCPU(t)
	for says, c := range map[string]Config{
		"Compute":        {Device: dev},
		"give one of":    {Device: dev, Compute: compute, Policy: memory.Policy{}, ByHand: &ModuleSettings{}},
		"negative":       {Device: dev, Compute: compute, Budget: -1},
		"choose keep or": {Device: dev, Compute: compute, GroupChoices: map[string]memory.Choice{"x": memory.Recompute}},
	} {
		if _, err := Open(c); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
	rt, err := Open(Config{Device: dev, Compute: compute})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := rt.NewWorkspace("experts", 1, 0); err == nil || !strings.Contains(err.Error(), "Stash") {
		t.Errorf("a workspace without a stash: %v", err)
	}
	if rt.Decision(memory.Key{}) != nil {
		t.Error("something is decided before the first step")
	}
	if err := rt.Close(); err != nil {
		t.Error(err)
	}
}

func openCPU(t *testing.T) (device.Device, device.Stream) {
	t.Helper()
	dev, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	compute, err := dev.NewStream("compute")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(compute.Close(), dev.Close()); err != nil {
			t.Error(err)
		}
	})
	return dev, compute
}

// silent is a sink that drops events.
type silent struct{ _ int }

func (*silent) Emit(trace.Event) {}

// A forecast of the API has the figures of the engine's, each in its place.
func TestForecastComesFromTheEngine(t *testing.T) {
	f := policy.Forecast{Step: 1, Compute: 2, Waiting: 3, Extent: 4, Peak: 5, Host: 6, RowBytes: 7, PageBytes: 8, SetBytes: 9, OutBusy: 10, InBusy: 11}
	f.Counts.OutBytes, f.Counts.InBytes = 12, 13
	if got, want := forecastOf(&f), (Forecast{Step: 1, Waiting: 3, Device: 4, Peak: 5, Host: 6, Offloaded: 12}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}
