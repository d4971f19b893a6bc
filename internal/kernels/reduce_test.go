package kernels

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/memcopy"
	"github.com/stowage-dev/stowage/memory"
)

// numbers returns n numbers in memory. A third of them are special: NaNs of several kinds,
// infinities, zeros of both signs, subnormal numbers, and bits half-way between two bf16.
func numbers(rng *rand.Rand, x Number, n int) []byte {
	special := []uint32{
		0x7fc00000, 0xffc00000, 0x7f800001, 0xffffffff, 0x7f800000, 0xff800000, 0, 0x80000000, 1, 0x80000001,
		0x3f808000, 0x3f818000, 0x3f808001, 0x3f807fff, 0x7f7fffff, 0x7f7f8000, 0x7f7f7fff, 0x00008000, 0x80018000,
	}
	var b []byte
	for range n {
		v := math.Float32bits(float32(rng.NormFloat64()))
		switch rng.IntN(12) {
		case 0, 1, 2:
			v = special[rng.IntN(len(special))]
		case 3:
			v = rng.Uint32()
		}
		if x == F32 {
			b = binary.LittleEndian.AppendUint32(b, v)
		} else {
			b = binary.LittleEndian.AppendUint16(b, uint16(v>>16))
		}
	}
	return b
}

func numberAt(b []byte, x Number, i int) float32 {
	if x == F32 {
		return math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
	}
	return math.Float32frombits(uint32(binary.LittleEndian.Uint16(b[2*i:])) << 16)
}

// nearest returns the bf16 closest to v, or the even one of two, by comparing both
// neighbours.
func nearest(v float32) uint16 {
	switch {
	case v != v:
		return 0x7fff
	case math.IsInf(float64(v), 0):
		return uint16(math.Float32bits(v) >> 16)
	}
	value := func(b uint32) float64 {
		// Beyond the largest bf16 the next step of the same size would be 2^128.
		if b&0x7fff == 0x7f80 {
			return math.Copysign(0x1p128, float64(v))
		}
		return float64(math.Float32frombits(b << 16))
	}
	below := math.Float32bits(v) >> 16
	d0, d1 := math.Abs(float64(v)-value(below)), math.Abs(value(below+1)-float64(v))
	if d0 < d1 || d0 == d1 && below%2 == 0 {
		return uint16(below)
	}
	return uint16(below + 1)
}

func putNumber(b []byte, x Number, i int, v float32) {
	switch {
	case x == BF16:
		binary.LittleEndian.PutUint16(b[2*i:], nearest(v))
	case v != v:
		binary.LittleEndian.PutUint32(b[4*i:], 0x7fffffff)
	default:
		binary.LittleEndian.PutUint32(b[4*i:], math.Float32bits(v))
	}
}

// reduced computes the definition, one element at a time. runs are in order. All but the
// first of a reduction with an accumulator are of type from.
func reduced(op ReduceOp, over int, to Number, types []Number, runs [][]byte, n int) []byte {
	dst := make([]byte, n*int(to.Size()))
	for i := range n {
		a := numberAt(runs[0], types[0], i)
		for k := 1; k < len(runs); k++ {
			x := numberAt(runs[k], types[k], i)
			switch {
			case op != Max:
				a += x
			case x != x || x > a:
				a = x
			}
		}
		if op == Mean {
			a /= float32(over)
		}
		putNumber(dst, to, i, a)
	}
	return dst
}

// Reductions are right for every mix of formats, operations, counts, kinds of memory,
// alignments and lengths, also in place, and leave the bytes around unchanged. SPEC S6.3
func TestReduce(t *testing.T) {
	each(t, func(t *testing.T, x *lab) {
		rapid.Check(t, func(t *rapid.T) {
			rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
			from, to := Number(rng.IntN(2)), Number(rng.IntN(2))
			count := rapid.IntRange(1, MaxReduceSources).Draw(t, "sources")
			n := length(1500).Draw(t, "length") % 1500
			r := Reduction{Op: ReduceOp(rng.IntN(3)), From: from, To: to}
			// All sources and the accumulator lie in one buffer, the result in the
			// other one or on one of them.
			home, away := x.buf[rng.IntN(2)][1], x.buf[rng.IntN(2)][0]
			fill, before := noise(room, 1), noise(room, 2)
			same, end := rng.IntN(2) == 0, memory.Bytes(0)
			place := func(b *device.Buffer, kind Number) device.Range {
				end = (end + 15) / 16 * 16
				if !same {
					end += memory.Bytes(rng.IntN(8)) * kind.Size()
				}
				end += memory.Bytes(n) * kind.Size()
				return b.Slice(end-memory.Bytes(n)*kind.Size(), memory.Bytes(n)*kind.Size())
			}
			var srcs []device.Range
			var types []Number
			var runs [][]byte
			take := func(kind Number) device.Range {
				at, data := place(home, kind), numbers(rng, kind, n)
				copy(fill[at.Off:], data)
				types, runs = append(types, kind), append(runs, data)
				return at
			}
			if rng.IntN(2) == 0 {
				r.Acc = take(F32)
			}
			for range count {
				srcs = append(srcs, take(from))
			}
			if rng.IntN(3) == 0 {
				r.Divide = 1 + rng.IntN(20)
			}
			end = 0
			r.Dst = place(away, to)
			if rng.IntN(3) == 0 && to == from {
				r.Dst = srcs[rng.IntN(count)]
			} else if rng.IntN(3) == 0 && to == F32 && r.Acc.Buf != nil {
				r.Dst = r.Acc
			}
			over := r.Divide
			if over == 0 {
				over = count
			}
			if rng.IntN(2) == 0 {
				r.Rest = ReduceRest(srcs...)
			}
			x.Upload(home.All(), fill)
			x.Upload(away.All(), before)
			l := ReduceLaunch(r, srcs...)
			grid(t, &l)
			x.Launch(l)
			want := before
			if r.Dst.Buf == home {
				want = fill
			}
			copy(want[r.Dst.Off:], reduced(r.Op, over, to, types, runs, n))
			x.want(t, home, fill)
			x.want(t, away, before)
		})
	})
}

// Several goroutines compute the same as one.
func TestReduceLarge(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for _, from := range []Number{F32, BF16} {
		for _, to := range []Number{F32, BF16} {
			n := 7*twinChunk + 77 // of 8 bytes at least, more than twinSpread
			dst := make([]byte, n*int(to.Size()))
			r := Reduction{Op: Mean, From: from, To: to, Dst: rangeOf(t, dst, 0, len(dst))}
			var runs [][]byte
			var srcs []device.Range
			for range 3 {
				b := numbers(rng, from, n)
				runs = append(runs, b)
				srcs = append(srcs, rangeOf(t, b, 0, len(b)))
			}
			run(ReduceLaunch(r, srcs...))
			if want := reduced(Mean, 3, to, []Number{from, from, from}, runs, n); string(dst) != string(want) {
				t.Errorf("%d to %d differs", from, to)
			}
		}
	}
}

// Every bf16 becomes fp32 and comes back, and fp32 around every bf16 rounds to the
// nearest one.
func TestConvert(t *testing.T) {
	each(t, func(t *testing.T, x *lab) {
		a, b := x.buf[memory.Device][0], x.buf[memory.Device][1]
		const n = 1 << 13 // at a time
		for top := uint32(0); top < 1<<16; top += n {
			var bf, back []byte
			for v := top; v < top+n; v++ {
				bf = binary.LittleEndian.AppendUint16(bf, uint16(v))
				back = binary.LittleEndian.AppendUint16(back, nearest(numberAt(bf[len(bf)-2:], BF16, 0)))
			}
			x.Upload(a.Slice(0, 2*n), bf)
			Convert(x.Stream, b.Slice(0, 4*n), F32, a.Slice(0, 2*n), BF16)
			Convert(x.Stream, a.Slice(2*n, 2*n), BF16, b.Slice(0, 4*n), F32)
			got := x.get(a)[2*n : 4*n]
			if string(got) != string(back) {
				t.Fatalf("bf16 from %#x on do not come back", top)
			}
			for _, low := range []uint32{1, 0x7fff, 0x8000, 0x8001, 0xffff} {
				var f32, want []byte
				for v := top; v < top+n; v++ {
					f32 = binary.LittleEndian.AppendUint32(f32, v<<16|low)
					want = binary.LittleEndian.AppendUint16(want, nearest(math.Float32frombits(v<<16|low)))
				}
				x.Upload(b.Slice(0, 4*n), f32)
				Convert(x.Stream, a.Slice(0, 2*n), BF16, b.Slice(0, 4*n), F32)
				if got := x.get(a)[:2*n]; string(got) != string(want) {
					t.Fatalf("fp32 with %#x below %#x and on are not rounded to nearest", low, top)
				}
			}
		}
		Convert(x.Stream, a.Slice(8, 0), BF16, b.Slice(8, 0), F32) // nothing
	})
}

// BenchmarkReduce compares the twin with a copy of as many bytes as it reads and writes,
// which is the best that memory allows.
func BenchmarkReduce(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 1))
	for _, c := range []struct {
		name     string
		from, to Number
		op       ReduceOp
		sources  int
	}{
		{"f32x2", F32, F32, Sum, 2}, {"f32x4", F32, F32, Sum, 4}, {"f32x8", F32, F32, Sum, 8}, {"f32x4mean", F32, F32, Mean, 4},
		{"bf16x2", BF16, BF16, Sum, 2}, {"bf16x4", BF16, BF16, Sum, 4}, {"bf16x8", BF16, BF16, Sum, 8}, {"bf16x4max", BF16, BF16, Max, 4},
		{"f32 to bf16", F32, BF16, Sum, 1}, {"bf16 to f32", BF16, F32, Sum, 1},
	} {
		for _, n := range []int{16 << 10, 4 << 20} {
			name := fmt.Sprintf("%s/%dK", c.name, n>>10)
			dst := make([]byte, n*int(c.to.Size()))
			var srcs []device.Range
			for range c.sources {
				s := make([]byte, n*int(c.from.Size()))
				for i := range n {
					putNumber(s, c.from, i, float32(rng.NormFloat64()))
				}
				srcs = append(srcs, rangeOf(b, s, 0, len(s)))
			}
			l := ReduceLaunch(Reduction{Op: c.op, From: c.from, To: c.to, Dst: rangeOf(b, dst, 0, len(dst))}, srcs...)
			// A copy of half as many bytes reads and writes as many.
			moved := len(dst) + c.sources*n*int(c.from.Size())
			x, y := make([]byte, moved/2), make([]byte, moved/2)
			b.Run(name, func(b *testing.B) {
				reduced, copied := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64)
				b.SetBytes(int64(moved))
				for b.Loop() {
					began := time.Now()
					l.Kernel.Go(&l)
					reduced = min(reduced, time.Since(began))
					b.StopTimer()
					began = time.Now()
					memcopy.Parallel(x, y, 0)
					copied = min(copied, time.Since(began))
					b.StartTimer()
				}
				// The fastest run of each leaves out what else the machine does.
				b.ReportMetric(float64(moved)/float64(reduced.Nanoseconds()), "GB/s")
				b.ReportMetric(float64(reduced)/float64(copied), "x_copy")
			})
		}
	}
}
