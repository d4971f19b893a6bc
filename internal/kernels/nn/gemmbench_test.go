// This file owns the benchmarks of products over experts and of dense products on a GPU, at
// the shapes of models. Operands are normal numbers, because others draw less power, and
// every launch has other ones, which are not in L2.

package nn

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// benchRoom is memory full of normal bf16 numbers, and some of zeros for sums.
type benchRoom struct {
	*tensorGPU
	normal, zero *device.Buffer
	used, sums   memory.Bytes
}

const (
	benchNormal = 12 * memory.GiB
	benchZero   = 8 * memory.GiB
)

func newBenchRoom(b *testing.B) *benchRoom {
	g := newTensorGPU(b)
	r := &benchRoom{tensorGPU: g, normal: g.alloc(b, benchNormal), zero: g.alloc(b, benchZero)}
	b.Cleanup(func() {
		g.Free(r.normal)
		g.Free(r.zero)
	})
	rng := rand.New(rand.NewPCG(1, 2))
	part := make([]byte, 32*memory.MiB)
	for i := 0; i < len(part); i += 2 {
		binary.LittleEndian.PutUint16(part[i:], uint16(math.Float32bits(float32(rng.NormFloat64()))>>16))
	}
	n := memory.Bytes(len(part))
	g.Upload(r.normal.Slice(0, n), part)
	for at := n; at < benchNormal; at += n {
		g.Copy(r.normal.Slice(at, n), r.normal.Slice(0, n))
	}
	g.Fill(r.zero.All(), 0)
	return r
}

// take returns the next part of memory, and begins again at its end.
func take(b *device.Buffer, used *memory.Bytes, n memory.Bytes) device.Range {
	n = (n + 255) / 256 * 256
	if *used+n > b.Size() {
		*used = 0
	}
	*used += n
	return b.Slice(*used-n, n)
}

func (r *benchRoom) operand(rows, cols int) Matrix {
	return NewMatrix(take(r.normal, &r.used, 2*memory.Bytes(rows*cols)), kernels.BF16, rows, cols)
}

func (r *benchRoom) result(t kernels.Number, rows, cols int) Matrix {
	return NewMatrix(take(r.zero, &r.sums, t.Size()*memory.Bytes(rows*cols)), t, rows, cols)
}

// marks returns two events.
func (r *benchRoom) marks(b *testing.B) (m [2]device.Event) {
	for i := range m {
		e, err := r.Device.NewEvent(device.Timing)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { e.Close() })
		m[i] = e
	}
	return m
}

// once returns how long launches take. Before that the GPU rests: at the limit of its power it
// would lower its clock.
func (r *benchRoom) once(b *testing.B, marks [2]device.Event, launches []device.Launch) time.Duration {
	time.Sleep(25 * time.Millisecond)
	r.Launch(launches[0])
	r.Record(marks[0])
	for _, l := range launches {
		r.Launch(l)
	}
	r.Record(marks[1])
	if err := r.Stream.Sync(); err != nil {
		b.Fatal(err)
	}
	d, err := marks[1].Since(marks[0])
	if err != nil {
		b.Fatal(err)
	}
	return d
}

func median(took []time.Duration) time.Duration {
	slices.Sort(took)
	return took[len(took)/2]
}

// speed runs launches that make returns, all with other operands, and reports the median of
// operations in a second.
func (r *benchRoom) speed(b *testing.B, flops float64, make func() device.Launch) {
	var launches [8]device.Launch
	for i := range launches {
		launches[i] = make()
	}
	marks := r.marks(b)
	var took []time.Duration
	for b.Loop() {
		took = append(took, r.once(b, marks, launches[:])/time.Duration(len(launches)))
	}
	m := median(took)
	b.ReportMetric(flops/m.Seconds()/1e12, "TFLOP/s")
	b.ReportMetric(float64(m.Nanoseconds())/1e3, "us/launch")
}

// segments returns experts with numbers of rows as benchCounts has them.
func (r *benchRoom) segments(b *testing.B, how string, experts, rows int) Segments {
	seg := Segments{Range: r.alloc(b, SegmentsBytes(experts)).All(), Experts: experts}
	b.Cleanup(func() { r.Free(seg.Buf) })
	var pairs []byte
	first := 0
	for _, n := range benchCounts(how, experts, rows) {
		pairs = binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(pairs, uint32(first)), uint32(n))
		first += n
	}
	r.Upload(seg.Range, pairs)
	return seg
}

// benchCounts returns rows of experts: even, uneven by up to 40 %, skewed (expert e has a
// share of 1/(e+1)), or in every other expert only.
func benchCounts(how string, experts, rows int) []int {
	counts := make([]int, experts)
	each, left, weights := rows/experts, rows, 0.0
	for e := range experts {
		weights += 1 / float64(e+1)
	}
	for e := range counts {
		switch how {
		case "even":
			counts[e] = each
		case "uneven":
			counts[e] = each + (e*37%17-8)*each/20
		case "skewed":
			counts[e] = int(float64(rows) / float64(e+1) / weights)
		case "gaps":
			counts[e] = 2 * each * (1 - e%2)
		}
		counts[e] = min(counts[e], left)
		left -= counts[e]
	}
	counts[0] += left
	return counts
}

func BenchmarkProductsOverExpertsOnGPU(b *testing.B) {
	r := newBenchRoom(b)
	for _, c := range []struct {
		how                   string
		experts, rows, out, k int
	}{
		{"even", 8, 16384, 4096, 4096},
		{"uneven", 8, 16384, 4096, 2048},
		{"uneven", 64, 32768, 2048, 1024},
		{"uneven", 128, 32768, 2048, 1024},
		{"skewed", 64, 32768, 2048, 1024},
		{"gaps", 64, 32768, 2048, 1024},
	} {
		seg := r.segments(b, c.how, c.experts, c.rows)
		name := func(what string) string {
			return what + " " + c.how + " " + strconv.Itoa(c.experts) + " experts " + strconv.Itoa(c.rows) + "x" + strconv.Itoa(c.out) + "x" + strconv.Itoa(c.k)
		}
		flops := 2 * float64(c.rows) * float64(c.out) * float64(c.k)
		b.Run(name("forward"), func(b *testing.B) {
			r.speed(b, flops, func() device.Launch {
				return GroupedGemmLaunch(Experts{A: r.operand(c.rows, c.k), B: r.operand(c.experts*c.out, c.k), C: r.result(kernels.BF16, c.rows, c.out), TransB: true, Seg: seg})
			})
		})
		b.Run(name("input"), func(b *testing.B) {
			r.speed(b, flops, func() device.Launch {
				return GroupedGemmLaunch(Experts{A: r.operand(c.rows, c.out), B: r.operand(c.experts*c.out, c.k), C: r.result(kernels.BF16, c.rows, c.k), Seg: seg})
			})
		})
		for _, sum := range []kernels.Number{kernels.F32, kernels.BF16} {
			b.Run(name("weights"+strconv.Itoa(int(8*sum.Size()))), func(b *testing.B) {
				r.speed(b, flops, func() device.Launch {
					return GroupedGradLaunch(ExpertsGrad{A: r.operand(c.rows, c.out), B: r.operand(c.rows, c.k), C: r.result(sum, c.experts*c.out, c.k), Seg: seg})
				})
			})
		}
	}
}

func BenchmarkDenseProductsOnGPU(b *testing.B) {
	r := newBenchRoom(b)
	for _, c := range []struct{ m, n, k int }{{8192, 8192, 8192}, {16384, 4096, 4096}, {4096, 4096, 4096}, {16384, 1024, 1024}, {16384, 32768, 2048}} {
		size := strconv.Itoa(c.m) + "x" + strconv.Itoa(c.n) + "x" + strconv.Itoa(c.k)
		flops := 2 * float64(c.m) * float64(c.n) * float64(c.k)
		b.Run("nt "+size, func(b *testing.B) {
			r.speed(b, flops, func() device.Launch {
				return GemmLaunch(Product{A: r.operand(c.m, c.k), B: r.operand(c.n, c.k), C: r.result(kernels.BF16, c.m, c.n), TransB: true})
			})
		})
		b.Run("nn "+size, func(b *testing.B) {
			r.speed(b, flops, func() device.Launch {
				return GemmLaunch(Product{A: r.operand(c.m, c.k), B: r.operand(c.k, c.n), C: r.result(kernels.BF16, c.m, c.n)})
			})
		})
		b.Run("tn into fp32 "+size, func(b *testing.B) {
			r.speed(b, flops, func() device.Launch {
				c32 := r.result(kernels.F32, c.m, c.n)
				return GemmLaunch(Product{A: r.operand(c.k, c.m), B: r.operand(c.k, c.n), C: c32, Plus: c32, TransA: true})
			})
		})
	}
}

// Products that end with SwiGLU or its gradient, beside a product and SwiGLU, in turns.
func BenchmarkSwigluInProductsOnGPU(b *testing.B) {
	r := newBenchRoom(b)
	marks := r.marks(b)
	for _, c := range []struct {
		name                      string
		experts, rows, in, hidden int
	}{{"wide8", 8, 16384, 2048, 2048}, {"small64", 64, 49152, 2048, 1024}, {"wide4096", 8, 16384, 4096, 4096}, {"dense2048", 0, 8192, 2048, 8192}, {"dense4096", 0, 8192, 4096, 14336}} {
		var seg Segments
		if c.experts > 0 {
			seg = r.segments(b, "uneven", c.experts, c.rows)
		}
		weight, sums, matrices := r.result(kernels.F32, 1, c.rows).Range, r.result(kernels.F32, 1, TileSums(c.rows, c.hidden)).Range, max(1, c.experts)
		result := func(cols int) Matrix { return r.result(kernels.BF16, c.rows, cols) }
		for i, make := range []func() []device.Launch{
			func() []device.Launch {
				return gatedLaunches(GatedProduct{A: r.operand(c.rows, c.in), B: r.operand(matrices*2*c.hidden, c.in), C: result(2 * c.hidden), Y: result(c.hidden), Weight: weight, Seg: seg})
			},
			func() []device.Launch {
				return gatedGradLaunches(GatedProductGrad{
					A: r.operand(c.rows, c.in), B: r.operand(matrices*c.in, c.hidden), X: r.operand(c.rows, 2*c.hidden), DX: result(2 * c.hidden), Y: result(c.hidden),
					Weight: weight, DWeight: r.result(kernels.F32, 1, c.rows).Range, Sums: sums, Seg: seg,
				})
			},
		} {
			b.Run(c.name+[]string{" forward", " input gradient"}[i], func(b *testing.B) {
				const copies = 4
				var launches [2][]device.Launch // apart, and together
				for range copies {
					all := make()
					launches[0], launches[1] = append(launches[0], all[0].Steps...), append(launches[1], all...)
				}
				var took [2][]time.Duration
				for b.Loop() {
					for i := range took {
						took[i] = append(took[i], r.once(b, marks, launches[i])/copies)
					}
				}
				apart, together := median(took[0]), median(took[1])
				b.ReportMetric(float64(apart.Nanoseconds())/1e3, "us_apart")
				b.ReportMetric(float64(together.Nanoseconds())/1e3, "us_together")
				b.ReportMetric(float64(together)/float64(apart), "ratio")
			})
		}
	}
}
