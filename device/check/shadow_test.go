// This file owns the tests of shadow memory against an obvious model: every
// access ever made, compared byte by byte.

package check

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
)

const modelBytes = 192

// bits is a set of bytes.
type bits [modelBytes / 64]uint64

func bitsOf(s span) (b bits) {
	for i := range s.rows {
		for at := s.off + i*s.pitch; at < s.off+i*s.pitch+s.n; at++ {
			b[at/64] |= 1 << (at % 64)
		}
	}
	return b
}

func (b bits) meets(o bits) bool {
	for i := range b {
		if b[i]&o[i] != 0 {
			return true
		}
	}
	return false
}

// modelAccess is an access in the model.
type modelAccess struct {
	act
	mode device.Mode
	at   bits
}

// rig drives a shadow and its model with the same accesses.
type rig struct {
	shadow *shadow
	model  []modelAccess
	clocks [5]clock // of the host and four lanes
	seq    uint64
}

func newRig() *rig { return &rig{shadow: newShadow(0, modelBytes)} }

// races lists what the next access of a lane would race with.
func (r *rig) races(lane int, s span, m device.Mode) (with []uint64) {
	at := bitsOf(s)
	for _, a := range r.model {
		if needOrder(a.mode, m) && a.at.meets(at) && !a.before(r.clocks[lane]) {
			with = append(with, a.seq)
		}
	}
	return with
}

// access makes an access of a lane and reports whether both saw it alike and
// whether it raced.
func (r *rig) access(t *testing.T, lane int, s span, m device.Mode) bool {
	want := r.races(lane, s, m)
	r.seq++
	k := &r.clocks[lane]
	k.set(lane, k.at(lane)+1)
	a := &act{op: &op{}, slot: lane, tick: k.at(lane), seq: r.seq}
	got := r.shadow.access(cell{a, &use{span: s, mode: m}}, *k, r.clocks[hostSlot])
	r.lawful(t)
	if got == nil {
		if len(want) > 0 {
			t.Fatalf("access %d, %v %+v on lane %d, races with %v; the shadow saw nothing", r.seq, m, s, lane, want)
		}
		r.model = append(r.model, modelAccess{*a, m, bitsOf(s)})
		return false
	}
	if len(want) == 0 {
		t.Fatalf("access %d, %v %+v on lane %d, races with nothing; the shadow says with %d", r.seq, m, s, lane, got.first.by.seq)
	}
	if latest := slices.Max(want); got.first.by.seq != latest { // where to look first
		t.Fatalf("access %d races with %v; the shadow reports %d, want the latest", r.seq, want, got.first.by.seq)
	}
	// The pair itself must be a race of the model, on bytes that both have.
	for _, a := range r.model {
		if a.seq != got.first.by.seq {
			continue
		}
		both := bitsOf(span{got.from, got.to - got.from, got.to - got.from, 1})
		if a.before(*k) || !needOrder(a.mode, m) || got.from >= got.to || !a.at.meets(both) || !bitsOf(s).meets(both) {
			t.Fatalf("access %d: the shadow reports bytes [%d,%d) of access %d, which is no race", r.seq, got.from, got.to, a.seq)
		}
		return true
	}
	t.Fatalf("access %d: the shadow reports access %d, which was never made", r.seq, got.first.by.seq)
	return true
}

// lawful checks what holds between calls: segments in order, from the start.
func (r *rig) lawful(t *testing.T) {
	s := r.shadow.segs
	if s[0].lo != 0 {
		t.Fatalf("the first segment starts at %d", s[0].lo)
	}
	for i := 1; i < len(s); i++ {
		if s[i].lo <= s[i-1].lo || s[i].lo >= r.shadow.end {
			t.Fatalf("segments out of order: %d after %d", s[i].lo, s[i-1].lo)
		}
	}
}

// play decodes bytes into accesses and orderings; it ends at the first race.
func (r *rig) play(t *testing.T, in []byte) {
	for ; len(in) >= 8; in = in[8:] {
		x := binary.LittleEndian.Uint64(in)
		take := func(n uint64) int64 { v := x % n; x /= n; return int64(v) }
		lane := 1 + int(take(4))
		switch what := take(16); {
		case what == 0: // the host synchronises with a lane
			r.clocks[hostSlot].join(r.clocks[lane])
			for i := range r.clocks {
				r.clocks[i].join(r.clocks[hostSlot])
			}
		case what < 6:
			r.clocks[lane].join(r.clocks[1+take(4)])
		default:
			s := span{off: take(modelBytes - 1), rows: 1 + take(6)}
			s.n = 1 + take(24)
			s.pitch = s.n + take(16)
			if what == 6 {
				s.n, s.rows = modelBytes, 1
			}
			for s.rows > 1 && s.end() > modelBytes {
				s.rows--
			}
			s.n = min(s.n, modelBytes-s.off)
			if s.rows == 1 {
				s.pitch = s.n
			}
			if r.access(t, lane, s, device.Mode(1+take(3))) {
				return
			}
		}
	}
}

func randomBytes(rng *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := 0; i+8 <= n; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], rng.Uint64())
	}
	return b
}

// SPEC S6.2: the shadow sees exactly the races there are, to the byte.
func TestShadowAgainstModel(t *testing.T) {
	for seed := range uint64(20000) {
		newRig().play(t, randomBytes(rand.New(rand.NewPCG(seed, 1)), 200))
	}
}

func FuzzShadow(f *testing.F) {
	for seed := range uint64(4) {
		f.Add(randomBytes(rand.New(rand.NewPCG(seed, 2)), 160))
	}
	f.Fuzz(func(t *testing.T, in []byte) { newRig().play(t, in) })
}

// Long programs without races keep agreeing, and forgetting covered accesses
// loses nothing: before each access the lane waits for what it would race with.
func TestShadowLongRuns(t *testing.T) {
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 3))
		r := newRig()
		for range 300 {
			s := span{off: rng.Int64N(100), n: 1 + rng.Int64N(12), rows: 1 + rng.Int64N(5)}
			s.pitch = s.n + rng.Int64N(8)
			for s.end() > modelBytes {
				s.rows--
			}
			if s.rows == 1 {
				s.pitch = s.n
			}
			lane, m := 1+rng.IntN(4), device.Mode(1+rng.IntN(3))
			for _, seq := range r.races(lane, s, m) {
				if rng.IntN(60) > 0 {
					r.clocks[lane].join(r.clocks[r.model[seq-1].slot])
				}
			}
			if r.access(t, lane, s, m) {
				break
			}
		}
	}
}

// Crowded segments are cut at their rows, and stay exact: here 500 different
// combs of 1000 teeth lie on top of each other.
func TestShadowCrowdedSegments(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	const bytes = 64 + 1000*68
	s := newShadow(0, 1<<20)
	var k clock
	most, written := 0, map[int64]bool{}
	for n := range 500 {
		w := span{off: rng.Int64N(64), n: 1 + rng.Int64N(4), rows: 1000}
		w.pitch = w.n + 1 + rng.Int64N(63)
		k.set(1, uint64(n+1))
		a := &act{op: &op{}, slot: 1, tick: uint64(n + 1), seq: uint64(n)}
		if s.access(cell{a, &use{span: w, mode: device.Write}}, k, nil) != nil {
			t.Fatal("a lane races with itself")
		}
		for i := range w.rows {
			for at := range w.n {
				written[w.off+i*w.pitch+at] = true
			}
		}
		for _, seg := range s.segs {
			most = max(most, len(seg.cells))
		}
	}
	if most > cellLimit {
		t.Errorf("a segment kept %d cells", most)
	}
	if n := len(s.segs); n > bytes+1 {
		t.Errorf("%d segments for %d bytes", n, bytes)
	}
	// A lane that waits for nothing races with the writer of every byte that
	// was ever written, and of no other.
	for at := range int64(bytes) {
		c := s.access(cell{&act{op: &op{}, slot: 2, tick: 1}, &use{span: span{at, 1, 1, 1}, mode: device.Read}}, clock{0, 0, 1}, nil)
		if (c != nil) != written[at] || c != nil && c.from != at {
			t.Fatalf("byte %d, written %v: conflict %+v", at, written[at], c)
		}
	}
}

// Columns of one matrix never meet, whatever the number of rows, and cost no
// segment each.
func TestShadowColumns(t *testing.T) {
	const rows, width, columns = 1 << 16, 64, 16
	s := newShadow(0, rows*width*columns)
	for c := range int64(columns) {
		var k clock
		k.set(int(c)+1, 1)
		a := &act{op: &op{}, slot: int(c) + 1, tick: 1, seq: uint64(c)}
		w := span{off: c * width, n: width, pitch: width * columns, rows: rows}
		if s.access(cell{a, &use{span: w, mode: device.Write}}, k, nil) != nil {
			t.Fatalf("column %d races with another one", c)
		}
	}
	if len(s.segs) > 4*columns {
		t.Errorf("%d segments for %d columns", len(s.segs), columns)
	}
	var k clock
	k.set(20, 1)
	wide := span{off: 5*width - 1, n: 2, pitch: width * columns, rows: rows}
	x := s.access(cell{&act{op: &op{}, slot: 20, tick: 1}, &use{span: wide, mode: device.Read}}, k, nil)
	if x == nil || x.to-x.from != 1 {
		t.Fatalf("a read across two columns: %+v", x)
	}
}

func TestSpanArithmetic(t *testing.T) {
	// Rows that hold the clipped ends of another span, but not its middle: the
	// first holds bytes 17..24 and 47..54, the gap 25..26 lies in [23,29).
	if covers(span{7, 8, 10, 10}, span{13, 6, 10, 6}, 17, 55) {
		t.Error("a span with gaps covers what lies across them")
	}
	rng := rand.New(rand.NewPCG(7, 7))
	draw := func() span {
		for {
			s := span{off: rng.Int64N(60), n: 1 + rng.Int64N(9), rows: 1 + rng.Int64N(7)}
			s.pitch = s.n + rng.Int64N(14)
			if rng.IntN(3) == 0 { // many narrow rows
				s = span{off: rng.Int64N(8), n: 1 + rng.Int64N(2), rows: 20 + rng.Int64N(20)}
				s.pitch = s.n + 1 + rng.Int64N(3)
			}
			if s.rows == 1 {
				s.pitch = s.n
			}
			if s.end() <= modelBytes {
				return s
			}
		}
	}
	for range 200000 {
		a, b := draw(), draw()
		if rng.IntN(2) == 0 && a.rows > 1 && b.rows > 1 && b.n <= a.pitch {
			if b.pitch = a.pitch; b.end() > modelBytes {
				continue
			}
		}
		lo := rng.Int64N(modelBytes)
		hi := lo + 1 + rng.Int64N(modelBytes-lo)
		window := bitsOf(span{lo, hi - lo, hi - lo, 1})
		first, inside := int64(-1), true
		for at := lo; at < hi; at++ {
			one := bitsOf(span{at, 1, 1, 1})
			inA, inB := bitsOf(a).meets(one), bitsOf(b).meets(one)
			if inA && inB && first < 0 {
				first = at
			}
			inside = inside && (inA || !inB)
		}
		from, to, ok := overlap(a, b, lo, hi)
		if ok != (first >= 0) || ok && from != first {
			t.Fatalf("overlap of %+v and %+v in [%d,%d): %d %d %v, want %d", a, b, lo, hi, from, to, ok, first)
		}
		i, j := b.rowsIn(lo, hi)
		if (i < j) != bitsOf(b).meets(window) {
			t.Fatalf("rows [%d,%d) of %+v in [%d,%d)", i, j, b, lo, hi)
		}
		for row := range b.rows { // exactly those that have bytes in the window
			from, to := b.off+row*b.pitch, b.off+row*b.pitch+b.n
			if in := from < hi && lo < to; i < j && in != (i <= row && row < j) {
				t.Fatalf("rows [%d,%d) of %+v in [%d,%d), and row %d", i, j, b, lo, hi, row)
			}
		}
		if covers(a, b, lo, hi) && !inside {
			t.Fatalf("%+v does not cover %+v in [%d,%d)", a, b, lo, hi)
		}
		// It says no in vain only if it gives up, or if rows touch, which newSpan joins.
		apart := func(s span) bool { return s.rows == 1 || s.pitch > s.n }
		if inside && apart(a) && apart(b) && j-i <= coverSteps && !covers(a, b, lo, hi) {
			t.Fatalf("%+v covers %+v in [%d,%d)", a, b, lo, hi)
		}
		if ok && apart(a) && apart(b) {
			both := func(at int64) bool {
				one := bitsOf(span{at, 1, 1, 1})
				return bitsOf(a).meets(one) && bitsOf(b).meets(one)
			}
			if !both(to-1) || to < hi && both(to) {
				t.Fatalf("overlap of %+v and %+v in [%d,%d) ends at %d", a, b, lo, hi, to)
			}
		}
		if _, _, some := b.first(lo, hi); some != bitsOf(b).meets(window) {
			t.Fatalf("first of %+v in [%d,%d): %v", b, lo, hi, some)
		}
	}
}

// Two reads need no order, nor do two atomic accesses; every other pair does.
func TestConflictingModes(t *testing.T) {
	modes := []device.Mode{device.Read, device.Write, device.Atomic}
	free := map[[2]device.Mode]bool{{device.Read, device.Read}: true, {device.Atomic, device.Atomic}: true}
	for _, a := range modes {
		for _, b := range modes {
			if got, want := needOrder(a, b), !free[[2]device.Mode{a, b}]; got != want {
				t.Errorf("%v and %v need an order: %v, want %v", a, b, got, want)
			}
		}
	}
}
