package bench

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/routing"
)

func synth(t testing.TB, c routing.Config) *routing.Counts {
	t.Helper()
	tr, err := routing.Generate(c)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// replayed runs a replay on a CPU device of its own.
func replayed(t testing.TB, o ReplayOptions) (Replay, error) {
	t.Helper()
	dev, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	}()
	return Replays(dev, o, func(*Replay, ReplayRank) error { return nil })
}

// small returns rows of 48 bytes in two tensors, a few pages each.
func small(tr *routing.Counts, p schedule.Pipeline, stage int) ReplayOptions {
	p.Microbatches = tr.Microbatches
	o := ReplayOptions{Trace: tr, Pipeline: p, Stage: stage, Tensors: 2, Width: 48, Page: 4 * memory.KiB, Sets: 3, MaxRows: stash.Rows(tr.Worst())}
	for r := range tr.Ranks {
		o.Ranks = append(o.Ranks, r)
	}
	return o
}

// within fails the test unless the pool of every rank is within 5 % of its live bytes plus
// one page a tensor, and every row was restored. It returns the largest pool over live
// bytes and pages.
func within(t testing.TB, name string, res Replay) (worst float64) {
	t.Helper()
	for _, r := range res.Ranks {
		worst = max(worst, r.OverBound)
		if r.Dropped != 0 || r.Wrong != 0 {
			t.Errorf("%s, rank %d: %d rows dropped, %d tensors wrong", name, r.Rank, r.Dropped, r.Wrong)
		}
		// The 5 % are those of the bytes, not of the pages. Host memory leaves more.
		spare := 0.05
		if r.Host > 0 {
			spare = schedule.HostLowWater().Headroom
		}
		if most := float64(r.Bound) + spare*float64(r.Stored); float64(r.Pool) > most {
			t.Errorf("%s, rank %d: a pool of %d bytes for %d bytes, %d with one page a tensor", name, r.Rank, r.Pool, r.Stored, r.Bound)
		}
		if r.Pool < r.Stored || r.Live < r.Stored || r.Stored > 0 && r.Stashed == 0 {
			t.Errorf("%s, rank %d: this cannot have held all rows: %+v", name, r.Rank, r)
		}
	}
	return worst
}

// SPEC S1.7: under skewed routing the pools stay within 5 % of the exact live
// maximum plus one page a tensor, and no row is ever dropped.
func TestPoolsFollowSkewedRouting(t *testing.T) {
	shapes := []struct {
		pipeline schedule.Pipeline
		stage    int
	}{
		{schedule.Pipeline{Ranks: 1, Chunks: 1}, 0},
		{schedule.Pipeline{Ranks: 4, Chunks: 1}, 0},
		{schedule.Pipeline{Ranks: 4, Chunks: 1}, 3},
		{schedule.Pipeline{Ranks: 2, Chunks: 2}, 0},
		{schedule.Pipeline{Ranks: 2, Chunks: 2}, 1},
	}
	var worst float64
	for _, kind := range []routing.Kind{routing.Zipf, routing.Drift, routing.Burst} {
		for _, skew := range []float64{0, 0.8, 1.2, 5} {
			tr := synth(t, routing.Config{
				Kind: kind, Skew: skew, Ranks: 4, Layers: 8, Microbatches: 4, Steps: 6, Tokens: 256, TopK: 4, Experts: 32, Seed: 11,
			})
			for _, x := range shapes {
				name := fmt.Sprintf("%v %g, PP %d, VPP %d, stage %d", kind, skew, x.pipeline.Ranks, x.pipeline.Chunks, x.stage)
				res, err := replayed(t, small(tr, x.pipeline, x.stage))
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				worst = max(worst, within(t, name, res))
			}
		}
	}
	t.Logf("the largest pool is %.3f of live bytes plus one page a tensor", worst)
}

// A rank that few tokens choose has tensors of less than a page, so one page too many would
// be a multiple of its live bytes.
func TestPoolsOfColdRanks(t *testing.T) {
	for _, tensors := range []int{1, 2, 5} {
		for _, tokens := range []int64{8, 64, 512} {
			tr := synth(t, routing.Config{Skew: 3, Ranks: 4, Layers: 2, Microbatches: 3, Steps: 6, Tokens: tokens, TopK: 1, Experts: 64, Seed: 5})
			o := small(tr, schedule.Pipeline{Ranks: 2, Chunks: 1}, 0)
			o.Tensors = tensors
			res, err := replayed(t, o)
			if err != nil {
				t.Fatal(err)
			}
			within(t, fmt.Sprintf("%d tensors, %d tokens", tensors, tokens), res)
		}
	}
}

// SPEC S1.4, S1.6: a device tier that is too small spills, sets that are too small are
// enlarged, and neither changes a row.
func TestReplaySpillsAndEnlarges(t *testing.T) {
	tr := synth(t, routing.Config{Kind: routing.Burst, Skew: 1.2, Ranks: 2, Layers: 4, Microbatches: 4, Steps: 5, Tokens: 512, TopK: 4, Experts: 32, Seed: 1})
	o := small(tr, schedule.Pipeline{Ranks: 2, Chunks: 1}, 0)
	o.Pool = 128 * memory.KiB
	res, err := replayed(t, o)
	if err != nil {
		t.Fatal(err)
	}
	within(t, "spill", res)
	for _, r := range res.Ranks {
		if r.Spilled == 0 || r.Host == 0 || r.Pool-r.Host != o.Pool {
			t.Errorf("nothing was spilled: %+v", r)
		}
	}
	o.Pool, o.MaxRows = 0, 100
	if res, err = replayed(t, o); err != nil {
		t.Fatal(err)
	}
	within(t, "small sets", res)
	if res.Total.Reruns == 0 || res.StepsRerun == 0 || res.StepsRerun > res.Total.Reruns {
		t.Errorf("%d reruns in %d steps", res.Total.Reruns, res.StepsRerun)
	}
}

// lossy is a device that counts restores and forgets one of them.
type lossy struct {
	device.Device
	count, lose int
}

type lossyStream struct {
	device.Stream
	l *lossy
}

func (l *lossy) NewStream(name string) (device.Stream, error) {
	s, err := l.Device.NewStream(name)
	return lossyStream{s, l}, err
}

func (s lossyStream) Launch(x device.Launch) {
	if x.Kernel.Name == "stowage_restore" {
		if s.l.count++; s.l.count == s.l.lose {
			return
		}
	}
	s.Stream.Launch(x)
}

// The replay notices a group that is not restored. It is the last group, because otherwise
// the pages of others would be missing.
func TestReplaySeesLostRows(t *testing.T) {
	dev, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	tr := synth(t, routing.Config{Skew: 1.2, Ranks: 2, Layers: 4, Microbatches: 4, Steps: 2, Tokens: 512, TopK: 4, Experts: 32, Seed: 1})
	o := small(tr, schedule.Pipeline{Ranks: 1, Chunks: 1}, 0)
	o.Ranks = []int{1}
	restores := 0
	for _, wrong := range []int{0, o.Tensors} {
		l := &lossy{Device: dev, lose: restores}
		res, err := Replays(l, o, func(*Replay, ReplayRank) error { return nil })
		if err != nil || res.Total.Wrong != wrong {
			t.Errorf("%v, %d tensors wrong, want %d", err, res.Total.Wrong, wrong)
		}
		restores = l.count
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
}

func TestReplayRefuses(t *testing.T) {
	tr := synth(t, routing.Config{Ranks: 2, Layers: 4, Microbatches: 4, Steps: 1, Tokens: 8, TopK: 2, Experts: 4})
	for want, change := range map[string]func(*ReplayOptions){
		"expected a pipeline of 4 microbatches, as in the routing counts, got 3":                                   func(o *ReplayOptions) { o.Pipeline.Microbatches = 3 },
		"Stage 2 is out of range; give a rank from 0 to 1":                                                         func(o *ReplayOptions) { o.Stage = 2 },
		"Stage -1 is out of range; give a rank from 0 to 1":                                                        func(o *ReplayOptions) { o.Stage = -1 },
		"VPP 2 interleaves chunks, which needs at least two pipeline ranks; use more pipeline ranks, or one chunk": func(o *ReplayOptions) { o.Pipeline.Ranks, o.Pipeline.Chunks = 1, 2 },
		"PP 3 does not divide 4 layers into stages of 1 chunks; choose one that does":                              func(o *ReplayOptions) { o.Pipeline.Ranks = 3 },
		"Rank 2 is out of range; give an expert rank from 0 to 1":                                                  func(o *ReplayOptions) { o.Ranks = []int{0, 2} },
		"Rank -1 is out of range; give an expert rank from 0 to 1":                                                 func(o *ReplayOptions) { o.Ranks = []int{-1} },
	} {
		o := small(tr, schedule.Pipeline{Ranks: 2, Chunks: 1}, 0)
		change(&o)
		if err := o.Check(); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
		if _, err := Replays(nil, o, nil); err == nil {
			t.Errorf("a replay begins although %s", want)
		}
	}
}

// A replay says what it replayed, as it was asked to, and its static memory is that of buffers
// for the worst case, counted again.
func TestReplaySaysWhatItIs(t *testing.T) {
	tr := synth(t, routing.Config{Kind: routing.Zipf, Skew: 1, Ranks: 2, Layers: 8, Microbatches: 4, Steps: 2, Tokens: 32, TopK: 2, Experts: 4, Seed: 3})
	o := small(tr, schedule.Pipeline{Ranks: 2, Chunks: 2}, 1)
	o.Tensors = 3
	res, err := replayed(t, o)
	if err != nil {
		t.Fatal(err)
	}
	info, ranks, total := res.Device, res.Ranks, res.Total
	res.Device, res.Ranks, res.Total, res.StepsRerun = device.Info{}, nil, ReplayFigures{}, 0
	want := Replay{Steps: 2, Layers: 4, Microbatches: 4, Balanced: 32 * 2 / 2, Worst: 32 * 2, PP: 2, VPP: 2, Stage: 1, Tensors: 3, Width: 48, Page: 4 * memory.KiB}
	if info.Backend != "cpu" || !reflect.DeepEqual(res, want) {
		t.Errorf("%+v on %v, want %+v", res, info, want)
	}
	passes, err := o.Pipeline.Passes(1)
	if err != nil {
		t.Fatal(err)
	}
	held, most := 0, 0
	for _, p := range passes {
		if p.Backward {
			held -= 2 // layers of a chunk
		} else {
			held += 2
		}
		most = max(most, held)
	}
	worst := memory.Bytes(most) * 3 * 48 * memory.Bytes(res.Worst)
	for _, r := range ranks {
		if r.Static != worst || r.Imbalance <= 0 || r.Live > worst {
			t.Errorf("%+v; buffers for the worst case take %d", r, worst)
		}
	}
	if total.Static != 2*worst {
		t.Errorf("all ranks have %d static bytes, want %d", total.Static, 2*worst)
	}
}

// The figures of ranks add up, and the ratios are those of the worst rank: every field.
func TestFiguresOfRanksAddUp(t *testing.T) {
	fill := func(by int64) (f ReplayFigures) {
		v := reflect.ValueOf(&f).Elem()
		for i := range v.NumField() {
			if x := v.Field(i); x.CanInt() {
				x.SetInt(by * int64(i+1))
			} else {
				x.SetFloat(float64(by) * float64(i+1))
			}
		}
		return f
	}
	f := fill(1000)
	f.add(fill(7))
	v := reflect.ValueOf(f)
	for i := range v.NumField() {
		want := 1007 * int64(i+1)
		if x := v.Field(i); x.CanInt() && x.Int() != want || x.CanFloat() && x.Float() != 1000*float64(i+1) {
			t.Errorf("%s is %v", v.Type().Field(i).Name, x)
		}
	}
}

// Rows that are lost or changed are an error, of whichever there are.
func TestFaultOfAReplay(t *testing.T) {
	for f, want := range map[[2]int]string{{0, 0}: "<nil>", {3, 0}: "3 rows were lost and 0 tensors came back changed", {0, 2}: "0 rows were lost and 2 tensors came back changed"} {
		x := ReplayFigures{Dropped: routing.Rows(f[0]), Wrong: f[1]}
		if got := fmt.Sprint(x.Fault()); !strings.HasPrefix(got, want) {
			t.Errorf("%v: %s, want %s", f, got, want)
		}
	}
}
