package bucket

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

var bf16, fp32 = types[0], types[1]

// SPEC S2.6: a unit is gathered Prefetch uses of units ahead, and the last one
// stays from the forward into the backward pass.
func TestUses(t *testing.T) {
	want := func(s Spec, want []Use) {
		t.Helper()
		uses, err := Uses(s)
		if err != nil || !reflect.DeepEqual(uses, want) {
			t.Errorf("%v\n got %+v\nwant %+v", err, uses, want)
		}
	}
	s := ofSizes(1, 1, 1, 1)
	want(s, []Use{
		{Unit: 0, Begin: 0, End: 1, Gather: 0, Last: 0},
		{Unit: 1, Begin: 2, End: 3, Gather: 0, Last: 1},
		{Unit: 2, Begin: 4, End: 5, Gather: 1, Last: 2},
		{Unit: 2, Begin: 6, End: 7, Gather: 2, Last: 3, Kept: true},
		{Unit: 1, Begin: 8, End: 9, Gather: 3, Last: 4},
		{Unit: 0, Begin: 10, End: 11, Gather: 4, Last: 5},
	})
	// Gradients lag instead.
	s.Order, s.Prefetch, s.Behind = s.Order[6:], 0, 1
	want(s, []Use{
		{Unit: 2, Begin: 0, End: 1, Gather: 0, Last: 1},
		{Unit: 1, Begin: 2, End: 3, Gather: 1, Last: 2},
		{Unit: 0, Begin: 4, End: 5, Gather: 2, Last: 2},
	})
	// Unit 0 lags behind unit 1, which goes on while 0, 2 and 3 are used. What the
	// later uses of 0 lag behind ends before that, and 0 is kept until then.
	s = ofSizes(0, 1, 1, 1, 1)
	s.Behind, s.Order = 1, []OrderEntry{
		{Unit: 0}, {Unit: 0, Release: true}, {Unit: 1}, {Unit: 0}, {Unit: 0, Release: true}, {Unit: 2}, {Unit: 2, Release: true},
		{Unit: 0}, {Unit: 0, Release: true}, {Unit: 2}, {Unit: 2, Release: true}, {Unit: 3}, {Unit: 3, Release: true}, {Unit: 1, Release: true},
	}
	want(s, []Use{
		{Unit: 0, Begin: 0, End: 1, Gather: 0, Last: 1},
		{Unit: 1, Begin: 2, End: 13, Gather: 1, Last: 1},
		{Unit: 0, Begin: 3, End: 4, Gather: 2, Last: 3, Kept: true},
		{Unit: 2, Begin: 5, End: 6, Gather: 3, Last: 4},
		{Unit: 0, Begin: 7, End: 8, Gather: 4, Last: 5, Kept: true},
		{Unit: 2, Begin: 9, End: 10, Gather: 5, Last: 6},
		{Unit: 3, Begin: 11, End: 12, Gather: 6, Last: 6},
	})
	if p := planned(t, Recorded, s, Options{}); p.LowerBound != 4 || p.Live != 4 {
		t.Errorf("at least %d bytes, %d units", p.LowerBound, p.Live)
	}
}

// SPEC S2.4: an embedding that is used before the first unit, and inside of the
// last one, causes no prefetch and is not prefetched.
func TestLooseModulesDoNotPrefetch(t *testing.T) {
	s := ofSizes(1, 10, 20, 40, 1000)
	s.Units[3].Name, s.Units[3].Loose = "embedding", true
	in, out := OrderEntry{Unit: 3}, OrderEntry{Unit: 3, Release: true}
	s.Order = []OrderEntry{in, out, {Unit: 0}, {Unit: 0, Release: true}, {Unit: 1}, {Unit: 1, Release: true}, {Unit: 2}, in, out, {Unit: 2, Release: true}}
	uses, err := Uses(s)
	if err != nil {
		t.Fatal(err)
	}
	var gathers []int
	for _, u := range uses {
		gathers = append(gathers, u.Gather)
	}
	if !slices.Equal(gathers, []int{0, 1, 1, 2, 4}) {
		t.Errorf("uses are gathered at %v", gathers)
	}
	// Were the embedding to prefetch, 1000 + 10 + 20 would be live at the start.
	for _, kind := range PoolKinds {
		if p := planned(t, kind, s, Options{}); p.LowerBound != 1040 || p.Live != 2 {
			t.Errorf("%v: at least %d bytes, %d units", kind, p.LowerBound, p.Live)
		}
	}
}

// hybrid is a model of three shapes, with buckets of two data types.
func hybrid(prefetch int) Spec {
	b := func(typ Type, elements int64) Bucket { return Bucket{Name: typ.Name, Type: typ, Elements: elements} }
	return Spec{
		Units: []FSDPUnit{
			{Name: "mamba", Buckets: []Bucket{b(bf16, 40), b(fp32, 2), b(bf16, 5)}},
			{Name: "experts", Buckets: []Bucket{b(bf16, 10), b(bf16, 200)}},
			{Name: "attention", Buckets: []Bucket{b(bf16, 60)}},
			{Name: "mamba again", Buckets: []Bucket{b(bf16, 40), b(fp32, 2), b(bf16, 5)}},
			{Name: "three", Buckets: []Bucket{b(bf16, 30), b(bf16, 8), b(bf16, 50)}},
		},
		Order: thereAndBack(5), Prefetch: prefetch, Align: 4, Multiple: 1,
	}
}

// SPEC S2.2: bf16 buckets sorted are 40 5, 200 10, 60, 40 5, 50 30 8 elements, so
// the slots are 200, 30 and 8 (40 and 60 lie in the largest), and one of 2 for fp32:
// 400 + 60 + 16 + 8 bytes, twice.
func TestMaxPool(t *testing.T) {
	p := planned(t, Max, hybrid(1), Options{})
	if p.Bytes != 2*(16+60+400+8) || len(p.Slots) != 8 || len(p.Moves) != 0 {
		t.Errorf("%d bytes in %d slots, %d moves", p.Bytes, len(p.Slots), len(p.Moves))
	}
	var got []string
	for _, s := range p.Slots[:4] {
		got = append(got, fmt.Sprintf("%s: %d bytes for %s, bucket %d", s.Name, s.Bytes, p.Spec.Units[s.Decides.Unit].Name, s.Decides.Bucket))
	}
	want := []string{
		"set 0, bf16 0: 400 bytes for experts, bucket 1", "set 0, bf16 1: 60 bytes for three, bucket 0",
		"set 0, bf16 2: 16 bytes for three, bucket 1", "set 0, fp32 0: 8 bytes for mamba, bucket 1",
	}
	if !slices.Equal(got, want) {
		t.Errorf("slots are %q", got)
	}
	// The only bucket of the attention takes the largest slot.
	if slot := p.Places[2][0].Slot; slot != 0 {
		t.Errorf("attention lies in slot %d", slot)
	}
	// The pool follows from the prefetch depth.
	if p := planned(t, Max, hybrid(3), Options{}); p.Bytes != 4*(16+60+400+8) || p.Live != 4 {
		t.Errorf("with prefetch 3: %d bytes for %d units", p.Bytes, p.Live)
	}
}

// SPEC S2.2: the other pools of the same model. Its units take 98 (mamba, with
// 12 for 5 elements and 8 for fp32: 100), 420, 120, 100 and 176 bytes.
func TestOtherPools(t *testing.T) {
	s := hybrid(1)
	for kind, want := range map[PoolKind]struct {
		bytes    memory.Bytes
		fallback []int
	}{
		// Sizes 80, 8, 12 twice (live at once are only one mamba and others),
		// 20 and 400, 120, 60, 16, 100 once.
		Dynamic: {bytes: 80 + 8 + 12 + 20 + 400 + 120 + 60 + 16 + 100},
		Rotary:  {bytes: 2 * 420},
		// Two of the five units are equal; the others have memory of their own.
		Fixed: {bytes: 2*100 + 420 + 120 + 176, fallback: []int{1, 2, 4}},
		// Units at even places never meet each other, nor do those at odd ones.
		Arena:    {bytes: 420 + 176},
		Recorded: {bytes: 420 + 120},
	} {
		p := planned(t, kind, s, Options{})
		if p.Bytes != want.bytes || !slices.Equal(p.Fallback, want.fallback) || p.LowerBound != 540 {
			t.Errorf("%v takes %d bytes, of at least %d, with %v outside; want %d, %v", kind, p.Bytes, p.LowerBound, p.Fallback, want.bytes, want.fallback)
		}
	}
	// The first of two equally common shapes is the mode.
	if p := planned(t, Fixed, ofSizes(1, 30, 20), Options{}); p.Bytes != 2*30+20 {
		t.Errorf("fixed takes %d bytes", p.Bytes)
	}
	p := planned(t, Fixed, s, Options{Fallback: DynamicMemory})
	if p.Bytes != 2*100+20+400+120+60+16+100 || p.Dynamic != p.Bytes-200 || !p.Places[1][0].Dynamic || p.Places[0][0].Dynamic {
		t.Errorf("fixed with a dynamic fallback takes %d bytes, %d of them dynamic", p.Bytes, p.Dynamic)
	}
	if w := planned(t, Rotary, s, Options{}).Waste(); math.Abs(w-300./540) > 1e-9 {
		t.Errorf("rotary wastes %g", w)
	}
}

// SPEC S2.7: in the pattern of a hybrid MoE model large units are never live
// together, so all of them share one block; two blocks would both be large.
func TestArenaMayHaveMoreBlocks(t *testing.T) {
	s := ofSizes(1, 20, 100, 20, 10, 100, 20, 100, 20, 10, 100)
	p := planned(t, Arena, s, Options{})
	if p.Bytes != 130 || len(p.Slots) != 3 {
		t.Errorf("%d bytes in %d blocks", p.Bytes, len(p.Slots))
	}
	if p := planned(t, Recorded, s, Options{}); p.Bytes != 120 || len(p.Moves) != 0 {
		t.Errorf("trace takes %d bytes with %d moves", p.Bytes, len(p.Moves))
	}
}

// SPEC S2.3: a cycle of three cannot keep its places in two sets. Both places
// are named.
func TestMovesAreNamed(t *testing.T) {
	cycle := func(sizes ...int64) Spec {
		s := ofSizes(1, sizes...)
		s.Order = append(s.Order[:6:6], s.Order[:2]...)
		return s
	}
	s := cycle(8, 8, 8)
	for _, kind := range []PoolKind{Rotary, Max, Arena, Recorded} {
		p := planned(t, kind, s, Options{})
		if p.Bytes != 16 || len(p.Moves) != 1 {
			t.Fatalf("%v: %d bytes, %d moves", kind, p.Bytes, len(p.Moves))
		}
		text := p.Describe(p.Moves[0])
		for _, want := range []string{`bucket "weights" of FSDP unit "layer 0"`, "offset 0 in use 0", "offset 8 in use 3"} {
			if !strings.Contains(text, want) {
				t.Errorf("%v: %q does not name %s", kind, text, want)
			}
		}
	}
	// Staying would cost the recorded pool half a percent, but the arena moves.
	for _, kind := range []PoolKind{Arena, Recorded} {
		if p := planned(t, kind, cycle(100, 100, 1), Options{}); p.Bytes != 200 {
			t.Errorf("%v takes %d bytes", kind, p.Bytes)
		}
	}
	// Staying would cost it a third, 24 for 17; the arena's blocks stay, and take
	// no more than two of the largest unit.
	s = ofSizes(1, 8, 8, 8, 1, 16)
	s.Order = append(s.Order[:6:6], append(s.Order[:2:2], s.Order[6:10]...)...)
	if p := planned(t, Arena, s, Options{}); p.Bytes != 32 || len(p.Moves) != 0 {
		t.Errorf("arena takes %d bytes with %d moves", p.Bytes, len(p.Moves))
	}
	if p := planned(t, Recorded, s, Options{}); p.Bytes != 17 || len(p.Moves) != 1 {
		t.Errorf("trace takes %d bytes with %d moves", p.Bytes, len(p.Moves))
	}
	// Each unit keeps its place if there is room.
	for _, kind := range []PoolKind{Rotary, Max, Arena, Recorded} {
		if p := planned(t, kind, hybrid(1), Options{}); len(p.Moves) != 0 {
			t.Errorf("%v: %s", kind, p.Describe(p.Moves[0]))
		}
	}
}

// SPEC S2.5: the data type of gradients on the wire is the pool's; asking for
// max-pool without a double buffer says what to write.
func TestErrors(t *testing.T) {
	good := ofSizes(1, 8, 8)
	change := func(f func(*Spec)) Spec {
		s := ofSizes(1, 8, 8)
		f(&s)
		return s
	}
	for _, c := range []struct {
		kind PoolKind
		spec Spec
		o    Options
		want string
	}{
		{Max, change(func(s *Spec) { s.Prefetch = 0 }), Options{}, "the max pool needs two buffers, but prefetch 0 and behind 0 leave only one; set prefetch (parameters) or behind (gradients) to at least 1, or choose another pool"},
		{Recorded, good, Options{Memory: 7}, `FSDP unit "layer 0" needs 8 B, but only 7 B are available; divide it into smaller units, or use more ranks of tensor or expert parallelism`},
		{Recorded, good, Options{Memory: -1}, `FSDP unit "layer 0" needs 8 B, but only -1 B are available`}, // more is taken than there is
		{Recorded, good, Options{Memory: 15}, `the recorded pool needs 16 B, but only 15 B are available; prefetch less or choose a smaller pool`},
		{PoolKind(9), good, Options{}, "expected a kind of pool, got kind(9)"},
		{Recorded, change(func(s *Spec) { s.Prefetch = -1 }), Options{}, "prefetch is -1"},
		{Recorded, change(func(s *Spec) { s.Behind = -1 }), Options{}, "behind -1"},
		{Recorded, change(func(s *Spec) { s.Align = -2 }), Options{}, "align is -2"},
		{Recorded, change(func(s *Spec) { s.Multiple = 1 << 50 }), Options{}, "multiple 1125899906842624"},
		{Recorded, change(func(s *Spec) { s.Units[1].Buckets[0].Type = Type{Name: "fp6"} }), Options{}, `bucket "weights" of FSDP unit "layer 1" has the data type "fp6" with 0 bytes an element`},
		{Recorded, change(func(s *Spec) { s.Units[1].Buckets[0].Elements = -3 }), Options{}, "has -3 elements"},
		{Recorded, change(func(s *Spec) { s.Units[1].Buckets[0].Elements = math.MaxInt64 }), Options{}, "makes the pool larger than 2^62 bytes"},
		{Recorded, change(func(s *Spec) { s.Multiple, s.Units[1].Buckets[0].Type.Size = 1<<40, 1<<30 }), Options{}, "makes the pool larger than 2^62 bytes"},
		{Rotary, ofSizes(7, 1<<61, 1, 1, 1, 1, 1, 1, 1), Options{}, "makes the pool larger than 2^62 bytes"}, // 8 of the largest
		{Recorded, change(func(s *Spec) { s.Order = s.Order[1:] }), Options{}, `entry 0 of the order releases FSDP unit "layer 0", which is not in use`},
		{Recorded, change(func(s *Spec) { s.Order = s.Order[:1] }), Options{}, `ends before the release of FSDP unit "layer 0"`},
		{Recorded, change(func(s *Spec) { s.Order[1].Release = false }), Options{}, `entry 1 of the order uses FSDP unit "layer 0" again before its release`},
		{Recorded, change(func(s *Spec) { s.Order[3].Unit = 2 }), Options{}, "entry 3 of the order names FSDP unit 2, but there are only 2"},
	} {
		_, err := NewPoolPlan(c.kind, c.spec, c.o)
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), "bucket: ") || strings.Contains(err.Error(), "\n") {
			t.Errorf("got %v, want %q", err, c.want)
		}
	}
	// Memory that is allocated for each use counts against the limit too, to the byte.
	loose := change(func(s *Spec) { s.Units[1].Loose = true })
	for _, c := range []struct {
		kind PoolKind
		o    Options
	}{{Dynamic, Options{}}, {Rotary, Options{Fallback: DynamicMemory}}, {Fixed, Options{Fallback: DynamicMemory}}, {Max, Options{Fallback: DynamicMemory}}} {
		p := planned(t, c.kind, loose, c.o)
		if p.Dynamic == 0 {
			t.Errorf("a %v pool has no dynamic memory", c.kind)
		}
		c.o.Memory = p.Bytes
		planned(t, c.kind, loose, c.o)
		c.o.Memory--
		if _, err := NewPoolPlan(c.kind, loose, c.o); err == nil || !strings.Contains(err.Error(), "needs "+p.Bytes.String()) {
			t.Errorf("a %v pool of %v in a byte less: %v", c.kind, p.Bytes, err)
		}
	}
	// Gradients that lag are double-buffered without a prefetch.
	s := change(func(s *Spec) { s.Prefetch, s.Behind, s.Order = 0, 1, s.Order[4:] })
	planned(t, Max, s, Options{})
}

func TestKinds(t *testing.T) {
	for _, k := range PoolKinds {
		if got, err := ParsePoolKind(k.String()); err != nil || got != k {
			t.Errorf("%v: %v, %v", k, got, err)
		}
	}
	if k, err := ParsePoolKind("trace"); err != nil || k != Recorded {
		t.Errorf("the old name of the recorded pool: %v, %v", k, err)
	}
	want := `expected a pool (dynamic, rotary, fixed, max, arena or recorded), got "maximum"`
	if _, err := ParsePoolKind("maximum"); err == nil || err.Error() != want {
		t.Errorf("%v", err)
	}
}

// large is a model of 1,000 units of 20 buckets, of so many shapes.
func large(prefetch, shapes int) Spec {
	r := rand.New(rand.NewPCG(1, 2))
	s := Spec{Prefetch: prefetch, Align: 256, Multiple: 64, Order: thereAndBack(1000)}
	all := make([][]Bucket, shapes)
	for i := range all {
		for range 20 {
			all[i] = append(all[i], Bucket{Type: types[r.IntN(3)], Elements: r.Int64N(1 << 24)})
		}
	}
	for _, i := range r.Perm(1000) {
		s.Units = append(s.Units, FSDPUnit{Name: fmt.Sprint("layer ", i), Buckets: all[i%shapes]})
	}
	return s
}

// SPEC S2.7: the recorded pool is no larger than the arena even if the limit ends the
// search early. The limit is a count, so plans do not depend on the machine. BenchmarkNew
// has the times.
func TestLargePlans(t *testing.T) {
	for _, s := range []Spec{large(1, 1000), large(4, 1000), large(4, 7)} {
		bytes := map[PoolKind]memory.Bytes{}
		for _, kind := range PoolKinds {
			p, err := NewPoolPlan(kind, s, Options{})
			if err != nil {
				t.Fatal(err)
			}
			bytes[kind] = p.Bytes
		}
		if bytes[Recorded] > bytes[Arena] {
			t.Errorf("the recorded pool takes %d bytes, the arena %d", bytes[Recorded], bytes[Arena])
		}
	}
}

// SPEC S2.7: the recorded pool is no larger than the arena even if the search ends before
// its second attempt. Blocks by size would have 10, 9 and 8 bytes.
func TestTraceOfManyUnits(t *testing.T) {
	var sizes []int64
	for range 5000 {
		sizes = append(sizes, 10, 9, 8, 10, 1)
	}
	for kind, want := range map[PoolKind]memory.Bytes{Arena: 20, Recorded: 19} {
		if p, err := NewPoolPlan(kind, ofSizes(1, sizes...), Options{}); err != nil || p.Bytes != want {
			t.Errorf("%v: %v takes %d bytes", err, kind, p.Bytes)
		}
	}
}

func BenchmarkNew(b *testing.B) {
	for _, prefetch := range []int{1, 2, 4} {
		s := large(prefetch, 1000)
		for _, kind := range PoolKinds {
			b.Run(fmt.Sprintf("%v/prefetch=%d", kind, prefetch), func(b *testing.B) {
				var p *PoolPlan
				for b.Loop() {
					p, _ = NewPoolPlan(kind, s, Options{})
				}
				b.ReportMetric(100*p.Waste(), "waste%")
			})
		}
	}
}
