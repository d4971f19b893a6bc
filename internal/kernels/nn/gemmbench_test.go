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

// speed runs launches that make returns, all with other operands, and reports the median of
// operations in a second. Before each measurement the GPU rests: at the limit of its power
// it would lower its clock.
func (r *benchRoom) speed(b *testing.B, flops float64, make func() device.Launch) {
	var launches [8]device.Launch
	for i := range launches {
		launches[i] = make()
	}
	var marks [2]device.Event
	for i := range marks {
		e, err := r.Device.NewEvent(device.Timing)
		if err != nil {
			b.Fatal(err)
		}
		defer e.Close()
		marks[i] = e
	}
	r.Launch(launches[0])
	var took []time.Duration
	for b.Loop() {
		if err := r.Stream.Sync(); err != nil {
			b.Fatal(err)
		}
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
		took = append(took, d/time.Duration(len(launches)))
	}
	slices.Sort(took)
	median := took[len(took)/2]
	b.ReportMetric(flops/median.Seconds()/1e12, "TFLOP/s")
	b.ReportMetric(float64(median.Nanoseconds())/1e3, "us/launch")
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
		seg := Segments{Range: r.alloc(b, SegmentsBytes(c.experts)).All(), Experts: c.experts}
		defer r.Free(seg.Buf)
		var pairs []byte
		first := 0
		for _, n := range benchCounts(c.how, c.experts, c.rows) {
			pairs = binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(pairs, uint32(first)), uint32(n))
			first += n
		}
		r.Upload(seg.Range, pairs)
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
