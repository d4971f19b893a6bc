package nn

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// gemmYard is a buffer on a device with matrices in it. All other bytes of the buffer are
// 0xff, which is NaN in both types, so reading or writing them shows.
type gemmYard struct {
	t      fataller
	dev    device.Device
	stream device.Stream
	buf    *device.Buffer
	mem    []byte // the buffer as it was before the launches
	used   memory.Bytes
	rng    *rand.Rand
}

type fataller interface {
	Helper()
	Fatalf(format string, args ...any)
}

const gemmRoom = 16 * memory.MiB

func newGemmYard(t testing.TB) *gemmYard {
	t.Helper()
	inner, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	y := &gemmYard{t: t, dev: check.New(check.Options{Report: func(err error) { t.Error(err) }}).Wrap(inner)}
	if y.stream, err = y.dev.NewStream("test"); err != nil {
		t.Fatal(err)
	}
	if y.buf, err = y.dev.Alloc(memory.Device, gemmRoom, "test"); err != nil {
		t.Fatal(err)
	}
	y.begin(t, 1)
	t.Cleanup(func() {
		y.stream.Free(y.buf)
		if err := y.stream.Close(); err != nil {
			t.Error(err)
		}
		if err := y.dev.Close(); err != nil {
			t.Error(err)
		}
	})
	return y
}

// begin empties the yard.
func (y *gemmYard) begin(t fataller, seed uint64) {
	y.t, y.used, y.rng = t, 0, rand.New(rand.NewPCG(seed, 1))
	y.mem = bytes.Repeat([]byte{0xff}, max(len(y.mem), 1<<16))
}

// place returns n bytes behind some that belong to nobody.
func (y *gemmYard) place(n memory.Bytes) device.Range {
	y.used += 16 + 4*memory.Bytes(y.rng.IntN(5))
	r := y.buf.Slice(y.used, n)
	y.used += (n + 16 + 3) &^ 3
	for len(y.mem) < int(y.used) {
		y.mem = append(y.mem, bytes.Repeat([]byte{0xff}, len(y.mem))...)
	}
	return r
}

// matrix returns a matrix with random numbers and a random pitch.
func (y *gemmYard) matrix(t kernels.Number, rows, cols int) Matrix {
	m := Matrix{Type: t, Rows: rows, Cols: cols, Pitch: cols + y.rng.IntN(3)*y.rng.IntN(9)}
	m.Range = y.place(m.extent())
	for i := range rows {
		for j := range cols {
			at := y.mem[m.Off+t.Size()*memory.Bytes(i*m.Pitch+j):]
			bits := math.Float32bits(y.rng.Float32() - 0.5)
			if t == kernels.BF16 {
				binary.LittleEndian.PutUint16(at, uint16(bits>>16))
			} else {
				binary.LittleEndian.PutUint32(at, bits)
			}
		}
	}
	return m
}

func (y *gemmYard) randomType() kernels.Number { return kernels.Number(y.rng.IntN(2)) }

func (y *gemmYard) segments(pairs ...uint32) Segments {
	s := Segments{Range: y.place(SegmentsBytes(len(pairs) / 2)), Experts: len(pairs) / 2}
	for i, v := range pairs {
		binary.LittleEndian.PutUint32(y.mem[int(s.Off)+4*i:], v)
	}
	return s
}

func gemmNumber(mem []byte, m Matrix, i, j int) float64 {
	at := mem[m.Off+m.Type.Size()*memory.Bytes(i*m.pitch()+j):]
	if m.Type == kernels.BF16 {
		return float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(at)) << 16))
	}
	return float64(math.Float32frombits(binary.LittleEndian.Uint32(at)))
}

// run issues a launch on the original memory and returns the memory afterwards. Bytes
// that the launch does not declare as written must be unchanged.
func (y *gemmYard) run(l device.Launch) []byte {
	y.t.Helper()
	after := make([]byte, y.used)
	y.stream.Upload(y.buf.Slice(0, y.used), y.mem[:y.used])
	y.stream.Launch(l)
	if err := y.stream.Download(after, y.buf.Slice(0, y.used)); err != nil {
		y.t.Fatalf("%v", err)
	}
	rest := slices.Clone(after)
	l.Accesses(func(a device.Access) bool {
		for i := 0; i < a.Rows && a.Mode == device.Write; i++ {
			r := a.Row(i)
			copy(rest[r.Off:r.Off+r.Len], y.mem[r.Off:])
		}
		return true
	})
	if !bytes.Equal(rest, y.mem[:y.used]) {
		y.t.Fatalf("%s wrote bytes that it does not declare", l.Kernel.Name)
	}
	return after
}

// near compares an element of C with a sum of products in float64. The error is at most
// half an ulp of fp32 of the sum of magnitudes for each addition, and half an ulp of
// bf16.
func (y *gemmYard) near(after []byte, c Matrix, i, j int, plus float64, row, col []float64) {
	y.t.Helper()
	want, size := plus, math.Abs(plus)
	for x, v := range row {
		v *= col[x]
		want, size = want+v, size+math.Abs(v)
	}
	most := size * float64(len(row)+1) * 0x1p-24
	if c.Type == kernels.BF16 {
		most += math.Abs(want) * 0x1p-8
	}
	if got := gemmNumber(after, c, i, j); !(math.Abs(got-want) <= most) {
		y.t.Fatalf("C[%d][%d] is %v, want %v within %v", i, j, got, want, most)
	}
}

// before returns the rows, or the columns, of a matrix before the launch.
func (y *gemmYard) before(m Matrix, columns bool) [][]float64 {
	rows, cols := turned(columns, m.Rows, m.Cols)
	all := make([][]float64, rows)
	for i := range all {
		all[i] = make([]float64, cols)
		for j := range all[i] {
			r, c := turned(columns, i, j)
			all[i][j] = gemmNumber(y.mem, m, r, c)
		}
	}
	return all
}

func (y *gemmYard) product(m, n, k int) Product {
	p := Product{TransA: y.rng.IntN(2) == 0, TransB: y.rng.IntN(2) == 0}
	rows, cols := turned(p.TransA, m, k)
	p.A = y.matrix(y.randomType(), rows, cols)
	rows, cols = turned(p.TransB, k, n)
	p.B = y.matrix(y.randomType(), rows, cols)
	p.C = y.matrix(y.randomType(), m, n)
	switch y.rng.IntN(3) {
	case 0:
		p.Plus = y.matrix(y.randomType(), m, n)
	case 1:
		p.Plus = p.C
	}
	return p
}

var gemmSizes = rapid.OneOf(rapid.IntRange(1, 40), rapid.SampledFrom([]int{1, 8, 32, 48, 64, 100, 130}))

func TestGemm(t *testing.T) {
	y := newGemmYard(t)
	rapid.Check(t, func(t *rapid.T) {
		y.begin(t, rapid.Uint64().Draw(t, "seed"))
		m, n, k := gemmSizes.Draw(t, "m"), gemmSizes.Draw(t, "n"), gemmSizes.Draw(t, "k")
		p := y.product(m, n, k)
		after := y.run(GemmLaunch(p))
		a, b := y.before(p.A, p.TransA), y.before(p.B, !p.TransB)
		for i := range m {
			for j := range n {
				plus := 0.0
				if p.Plus.Buf != nil {
					plus = gemmNumber(y.mem, p.Plus, i, j)
				}
				y.near(after, p.C, i, j, plus, a[i], b[j])
			}
		}
	})
}

// drawSegments assigns rows to experts in any order, with gaps. Some experts get none.
func (y *gemmYard) drawSegments(t *rapid.T) (seg Segments, owner []int) {
	experts := rapid.IntRange(1, 6).Draw(t, "experts")
	pairs := make([]uint32, 2*experts)
	for _, e := range y.rng.Perm(experts) {
		for range y.rng.IntN(3) {
			owner = append(owner, -1)
		}
		count := rapid.OneOf(rapid.Just(0), rapid.IntRange(1, 60)).Draw(t, "rows")
		pairs[2*e], pairs[2*e+1] = uint32(len(owner)), uint32(count)
		for range count {
			owner = append(owner, e)
		}
	}
	owner = append(owner, -1)
	return y.segments(pairs...), owner
}

func TestGroupedGemm(t *testing.T) {
	y := newGemmYard(t)
	rapid.Check(t, func(t *rapid.T) {
		y.begin(t, rapid.Uint64().Draw(t, "seed"))
		seg, owner := y.drawSegments(t)
		n, k := gemmSizes.Draw(t, "n"), gemmSizes.Draw(t, "k")
		p := Experts{Seg: seg, TransB: rapid.Bool().Draw(t, "trans")}
		p.A, p.C = y.matrix(y.randomType(), len(owner), k), y.matrix(y.randomType(), len(owner), n)
		below, cols := turned(p.TransB, k, n)
		p.B = y.matrix(y.randomType(), seg.Experts*below, cols)
		after := y.run(GroupedGemmLaunch(p))
		a, weights := y.before(p.A, false), make([][][]float64, seg.Experts)
		for e := range weights {
			weights[e] = y.before(p.B.Part(e*below, below), !p.TransB)
		}
		for i, e := range owner {
			for j := range n {
				if e < 0 {
					if got, want := gemmNumber(after, p.C, i, j), gemmNumber(y.mem, p.C, i, j); got != want {
						t.Fatalf("row %d belongs to nobody, but became %v instead of %v", i, got, want)
					}
					continue
				}
				y.near(after, p.C, i, j, 0, a[i], weights[e][j])
			}
		}
	})
}

func TestGroupedGrad(t *testing.T) {
	y := newGemmYard(t)
	rapid.Check(t, func(t *rapid.T) {
		y.begin(t, rapid.Uint64().Draw(t, "seed"))
		seg, owner := y.drawSegments(t)
		m, n := gemmSizes.Draw(t, "m"), gemmSizes.Draw(t, "n")
		p := ExpertsGrad{Seg: seg, A: y.matrix(y.randomType(), len(owner), m), B: y.matrix(y.randomType(), len(owner), n), First: rapid.Bool().Draw(t, "first")}
		p.C = y.matrix(y.randomType(), seg.Experts*m, n)
		after := y.run(GroupedGradLaunch(p))
		a, b := y.before(p.A, true), y.before(p.B, true)
		for e := range seg.Experts {
			from := max(0, slices.Index(owner, e))
			to := from
			for owner[to] == e {
				to++
			}
			for i := range m {
				for j := range n {
					var was float64
					if !p.First {
						was = gemmNumber(y.mem, p.C, e*m+i, j)
					}
					y.near(after, p.C, e*m+i, j, was, a[i][from:to], b[j][from:to])
				}
			}
		}
	})
}

// Products have the same bits with any number of threads, and in repeated runs.
func TestProductsDoNotDependOnThreads(t *testing.T) {
	y := newGemmYard(t)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	seg := y.segments(0, 70, 75, 0, 75, 100, 180, 3)
	bf16, f32 := kernels.BF16, kernels.F32
	for _, l := range []device.Launch{
		GemmLaunch(Product{A: y.matrix(bf16, 150, 300), B: y.matrix(bf16, 310, 300), C: y.matrix(bf16, 150, 310), TransB: true}),
		GroupedGemmLaunch(Experts{A: y.matrix(f32, 200, 40), B: y.matrix(f32, 4*40, 290), C: y.matrix(f32, 200, 290), Seg: seg}),
		GroupedGradLaunch(ExpertsGrad{A: y.matrix(f32, 200, 90), B: y.matrix(bf16, 200, 270), C: y.matrix(f32, 4*90, 270), Seg: seg}),
	} {
		var first []byte
		for _, threads := range []int{1, 2, 4, 4, 2} {
			runtime.GOMAXPROCS(threads)
			after := y.run(l)
			if first == nil {
				first = after
			}
			if !bytes.Equal(after, first) {
				t.Errorf("%s: %d threads give other bytes than one", l.Kernel.Name, threads)
			}
		}
	}
}

func TestProductsRefuse(t *testing.T) {
	y := newGemmYard(t)
	m := func(rows, cols int) Matrix { return y.matrix(kernels.F32, rows, cols) }
	a, b, c, seg := m(3, 4), m(4, 5), m(3, 5), y.segments(0, 1, 1, 2)
	for name, f := range map[string]func(){
		"k that differs":              func() { GemmLaunch(Product{A: a, B: m(3, 5), C: c}) },
		"C of another shape":          func() { GemmLaunch(Product{A: a, B: b, C: m(4, 5)}) },
		"Plus of another shape":       func() { GemmLaunch(Product{A: a, B: b, C: c, Plus: m(5, 3)}) },
		"Plus of C with another type": func() { p := c; p.Type = kernels.BF16; GemmLaunch(Product{A: a, B: b, C: c, Plus: p}) },
		"too few weights":             func() { GroupedGemmLaunch(Experts{A: a, B: b, C: c, Seg: seg}) },
		"no segments":                 func() { GroupedGemmLaunch(Experts{A: a, B: b, C: c, Seg: Segments{Experts: 1}}) },
		"gradients of other rows":     func() { GroupedGradLaunch(ExpertsGrad{A: a, B: b, C: m(8, 5), Seg: seg}) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("the launch was made")
				}
			}()
			f()
		})
	}
}

// The device fails if segments reach beyond the matrix. No other memory is touched.
func TestSegmentsBeyondTheMatrix(t *testing.T) {
	y := newGemmYard(t)
	p := Experts{A: y.matrix(kernels.F32, 8, 4), B: y.matrix(kernels.F32, 4, 4), C: y.matrix(kernels.F32, 8, 4), Seg: y.segments(5, 4)}
	l := GroupedGemmLaunch(p)
	y.run(GemmLaunch(Product{A: p.A.Part(0, 4), B: p.B, C: p.C.Part(0, 4), TransA: true})) // it waits
	defer func() {
		if r := recover(); r == nil {
			t.Error("rows 5 to 9 of 8 were taken")
		}
	}()
	l.Kernel.Go(&l)
}

func BenchmarkGroupedGemm(b *testing.B) {
	y := newGemmYard(b)
	for _, rows := range []int{16, 64, 256} {
		for _, typ := range []kernels.Number{kernels.F32, kernels.BF16} {
			y.begin(b, 1)
			const experts, n, k = 8, 256, 256
			pairs := make([]uint32, 0, 2*experts)
			for e := range uint32(experts) {
				pairs = append(pairs, e*uint32(rows), uint32(rows))
			}
			p := Experts{Seg: y.segments(pairs...), TransB: true}
			p.A, p.B, p.C = y.matrix(typ, experts*rows, k), y.matrix(typ, experts*n, k), y.matrix(typ, experts*rows, n)
			y.stream.Upload(y.buf.Slice(0, y.used), y.mem[:y.used])
			l := GroupedGemmLaunch(p)
			b.Run(fmt.Sprintf("%dx%dx%d of 8 experts, %d bytes", rows, n, k, typ.Size()), func(b *testing.B) {
				for b.Loop() {
					l.Kernel.Go(&l)
				}
				b.ReportMetric(2*float64(experts*rows*n*k)*float64(b.N)/float64(b.Elapsed().Nanoseconds()), "GFLOP/s")
			})
		}
	}
}

// A profile counts what a launch reads of the memory that it writes.
func TestBytesReadInPlace(t *testing.T) {
	const size = 1 << 20
	r := device.NewBuffer(memory.Device, uintptr(device.Align), size, size, "test").All()
	m := func(kind kernels.Number, rows, cols int) Matrix { return NewMatrix(r, kind, rows, cols) }
	moved := func(l device.Launch) memory.Bytes {
		n := l.InPlace
		for a := range l.Accesses {
			n += a.Len * memory.Bytes(a.Rows)
		}
		return n
	}
	run := func(n memory.Bytes) device.Range { return r.Slice(0, n) }
	experts := ExpertsGrad{A: m(kernels.BF16, 9, 7), B: m(kernels.BF16, 9, 5), C: m(kernels.F32, 28, 5), Seg: Segments{r, 4}}
	first := experts
	first.First = true
	const n, segments = 100, 4 * 2 * 4
	for _, c := range []struct {
		what      string
		got, want memory.Bytes
	}{
		{"an update", moved(adamLaunch(Adam{
			W: run(4 * n), M: run(4 * n), V: run(4 * n), G: run(2 * n), GType: kernels.BF16, Param: run(2 * n), ParamType: kernels.BF16, Hyper: run(HyperBytes), Norm: run(4),
		})), 3*(4*n+4*n) + 2*n + 2*n + HyperBytes + 4},
		{"a rotation", moved(ropeLaunch(Rotation{X: m(kernels.BF16, 6, 32), Heads: 2, Head: 16, Width: 16, Seq: 3, Table: run(4 * 3 * 16)})), 2*6*32*2 + 4*3*16},
		{"a gradient of experts", moved(GroupedGradLaunch(experts)), 2*9*7 + 2*9*5 + 2*4*28*5 + segments},
		{"the first one", moved(GroupedGradLaunch(first)), 2*9*7 + 2*9*5 + 4*28*5 + segments},
	} {
		if c.got != c.want {
			t.Errorf("%s: %d bytes, want %d", c.what, c.got, c.want)
		}
	}
}

// A profile relies on the operations that launches say they need.
func TestFlops(t *testing.T) {
	m := func(rows, cols int) Matrix {
		return NewMatrix(device.NewBuffer(memory.Device, uintptr(device.Align), 1<<20, 1<<20, "test").All(), kernels.F32, rows, cols)
	}
	seg := Segments{device.NewBuffer(memory.Device, uintptr(device.Align), 1<<10, 1<<10, "test").All(), 4}
	a := Attention{
		Q: m(32, 24), K: m(32, 12), V: m(32, 10), O: m(32, 20), LSE: m(1, 64).Range, Batch: 2, Seq: 16, Heads: 2, KVHeads: 1, KeyDim: 12, ValueDim: 10, Scale: 1,
	}
	near := a
	near.Window = 4
	g := AttentionGrad{Attention: a, DO: m(32, 20), DQ: m(32, 24), DK: m(32, 12), DV: m(32, 10), Delta: m(1, 64).Range}
	var back float64
	for step := range gradSteps {
		back += AttendGradLaunch(g, step).Flops
	}
	const pairs = 2 * 2 * 16 * 16 / 2 // of rows that see each other
	for _, c := range []struct {
		what      string
		got, want float64
	}{
		{"product", GemmLaunch(Product{A: m(3, 5), B: m(7, 5), C: m(3, 7), TransB: true}).Flops, 2 * 3 * 5 * 7},
		{"product over experts", GroupedGemmLaunch(Experts{A: m(9, 5), B: m(28, 5), C: m(9, 7), TransB: true, Seg: seg}).Flops, 2 * 9 * 5 * 7},
		{"expected rows", GroupedGemmLaunch(Experts{A: m(9, 5), B: m(28, 5), C: m(9, 7), TransB: true, Seg: seg, Expect: 6}).Flops, 2 * 6 * 5 * 7},
		{"gradient of experts", GroupedGradLaunch(ExpertsGrad{A: m(9, 7), B: m(9, 5), C: m(28, 5), Seg: seg, Expect: 6}).Flops, 2 * 6 * 5 * 7},
		{"attention", AttendLaunch(a).Flops, 2 * pairs * (12 + 10)},
		{"attention with a window", AttendLaunch(near).Flops, 2 * 2 * 2 * 16 * (4 * (1 - 4.0/32)) * (12 + 10)},
		{"its gradient", back, 2 * pairs * (3*12 + 2*10)},
	} {
		if c.got != c.want {
			t.Errorf("%s: %g operations, not %g", c.what, c.got, c.want)
		}
	}
}
