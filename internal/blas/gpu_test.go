//go:build linux

// This file tests products on a GPU with cuBLASLt, and measures them beside our own
// kernels. The tests skip if either is missing.

package blas

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/memory"
)

// counted counts the launches that the library took. If it is off, the library gets none.
type counted struct {
	*Products
	taken atomic.Int64
	off   bool
}

func (c *counted) Launch(k *device.Kernel, args []uint64, stream uintptr) (bool, error) {
	if c.off {
		return false, nil
	}
	done, err := c.Products.Launch(k, args, stream)
	if done {
		c.taken.Add(1)
	}
	return done, err
}

// lab is a GPU with a stream, and its assistant, if any.
type lab struct {
	device.Device
	device.Stream
	*counted
}

func newLab(t testing.TB, assisted bool) *lab {
	t.Helper()
	g := &lab{counted: &counted{}}
	var missing error
	o := cuda.Options{CopyKernel: kernels.GraphCopy}
	if assisted {
		o.Assist = func() (cuda.Assist, error) {
			a, err := New()
			if missing = err; err != nil {
				return nil, err
			}
			g.Products = a.(*Products)
			return g.counted, nil
		}
	}
	d, err := cuda.Open(o)
	var no *device.Unsupported
	if errors.As(err, &no) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	g.Device = d
	if g.Stream, err = d.NewStream("test"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(g.Stream.Close(), g.Device.Close()); err != nil {
			t.Error(err)
		}
	})
	if missing != nil {
		t.Skip(missing)
	}
	return g
}

func (g *lab) alloc(t testing.TB, size memory.Bytes) *device.Buffer {
	t.Helper()
	b, err := g.Device.Alloc(memory.Device, size, "test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.Stream.Free(b) })
	return b
}

// run uploads memory, calls work, and downloads the memory.
func (g *lab) run(t testing.TB, b *device.Buffer, mem []byte, work func()) []byte {
	t.Helper()
	got := make([]byte, len(mem))
	r := b.Slice(0, memory.Bytes(len(mem)))
	g.Upload(r, mem)
	work()
	if err := g.Download(got, r); err != nil {
		t.Fatal(err)
	}
	return got
}

// Products on a GPU agree with the twins up to rounding, and have the same bits every
// time, issued or captured.
func TestProductsOnGPU(t *testing.T) {
	g := newLab(t, true)
	const room = 48 * memory.MiB
	host, there := newYard(t, room), &yard{buf: g.alloc(t, room)}
	sizes := []int{128, 136, 256, 520, 1000, 1024}
	refused := 0
	for i := range 2 * 4 * len(mixes) * 3 {
		v := caseOf(i)
		m, n, k := sizes[i%6], sizes[i/2%6], sizes[i/5%6]
		if i%7 == 0 {
			k = 4096
		}
		here, c := host.product(t, v, m, n, k), there.product(t, v, m, n, k)
		mem := host.first[:there.end]
		before := g.taken.Load()
		got := g.run(t, there.buf, mem, func() { g.Stream.Launch(c.launch) })
		if g.taken.Load() == before {
			refused++
			t.Logf("%s is left to our kernel", c.name)
			if v.plus != another {
				t.Errorf("the library must take it")
			}
		}
		again := g.run(t, there.buf, mem, func() { g.Stream.Launch(c.launch) })
		g.Stream.BeginCapture()
		g.Stream.Launch(c.launch)
		graph, err := g.EndCapture()
		if err != nil {
			t.Fatal(err)
		}
		captured := g.run(t, there.buf, mem, func() { g.Replay(graph) })
		if err := graph.Close(); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, again) || !bytes.Equal(got, captured) {
			t.Errorf("%s: bits differ between two runs (%v) or in a graph (%v)", c.name, !bytes.Equal(got, again), !bytes.Equal(got, captured))
		}
		host.restore()
		here.launch.Kernel.Go(&here.launch)
		here.compare(t, got, host.memory()[:there.end])
	}
	t.Logf("%d products were taken, %d shapes refused", g.taken.Load(), refused)
}

// copyMatrix copies the numbers of a matrix out of memory without gaps, or into it.
func copyMatrix(mem []byte, x nn.Matrix, numbers []byte, put bool) {
	row := x.Cols * int(x.Type.Size())
	for i := range x.Rows {
		there := mem[int(x.Off)+i*x.Pitch*int(x.Type.Size()):][:row]
		if put {
			copy(there, numbers[i*row:])
		} else {
			copy(numbers[i*row:][:row], there)
		}
	}
}

// The same numbers give the same bits for all addresses and pitches.
func TestBitsFollowFromShape(t *testing.T) {
	g := newLab(t, true)
	const room = 32 * memory.MiB
	const m, n, k = 520, 1000, 776
	y := &yard{buf: g.alloc(t, room)}
	a, b := smallNumbers(4*m*k), smallNumbers(4*k*n)
	for i := range 4 * len(mixes) {
		var first []byte
		for j := range 4 {
			c := y.product(t, variant{mix: mixes[i/4], transA: i&1 != 0, transB: i&2 != 0, spare: j, shift: 3 * j}, m, n, k)
			mem := make([]byte, y.end)
			copyMatrix(mem, c.A, a, true)
			copyMatrix(mem, c.B, b, true)
			mem = g.run(t, y.buf, mem, func() { g.Stream.Launch(c.launch) })
			got := make([]byte, c.C.Type.Size()*m*n)
			copyMatrix(mem, c.C, got, false)
			if j == 0 {
				first = got
			} else if !bytes.Equal(got, first) {
				t.Errorf("%s: other bits than without gaps", c.name)
			}
		}
	}
	if n := g.taken.Load(); n != int64(16*len(mixes)) {
		t.Errorf("%d of %d products were taken", n, 16*len(mixes))
	}
}

// Issuing a product that was seen before allocates nothing.
func TestIssueAllocatesNothing(t *testing.T) {
	g := newLab(t, true)
	y := &yard{buf: g.alloc(t, memory.MiB)}
	c := y.product(t, variant{mix: mixes[0]}, 128, 128, 128)
	g.Stream.Fill(y.buf.All(), 0)
	if n := testing.AllocsPerRun(100, func() { g.Stream.Launch(c.launch) }); n != 0 {
		t.Errorf("%v allocations a product", n)
	}
	if err := g.Stream.Sync(); err != nil {
		t.Fatal(err)
	}
}

// The benchmark compares our own kernels, the library, and the library with a workspace
// and sums in parts, which this package denies it.
func BenchmarkProducts(b *testing.B) {
	const workspace = 32 * memory.MiB
	numbers := smallNumbers(int(memory.MiB))
	half, full := kernels.BF16, kernels.F32
	for _, shape := range [][3]int{{4096, 4096, 4096}, {8192, 2048, 7168}, {1024, 2048, 8192}, {512, 512, 512}} {
		m, n, k := shape[0], shape[1], shape[2]
		for _, c := range []struct {
			name string
			v    variant
		}{
			{"bf16 nt", variant{mix: mix{half, half}, transB: true}},
			{"bf16 nn", variant{mix: mix{half, half}}},
			{"bf16 tn added to fp32", variant{mix: mix{half, full}, transA: true, plus: itself}},
			{"fp32 nt", variant{mix: mix{full, full}, transB: true}},
			{"fp32 tn", variant{mix: mix{full, full}, transA: true}},
		} {
			for _, way := range []string{"ours", "cuBLASLt", "unruly"} {
				b.Run(fmt.Sprintf("%dx%dx%d/%s/%s", m, n, k, c.name, way), func(b *testing.B) {
					g := newLab(b, way != "ours")
					if way == "unruly" {
						w := g.alloc(b, workspace)
						g.room = room{addr: w.Addr(), size: uintptr(workspace), reductions: 7}
					}
					y := &yard{buf: g.alloc(b, 4*memory.Bytes(m*k+k*n+m*n)+4*device.Align)}
					l := y.product(b, c.v, m, n, k).launch
					const some = memory.MiB
					for at := memory.Bytes(0); at < y.buf.Size(); at += some {
						n := min(some, y.buf.Size()-at)
						g.Upload(y.buf.Slice(at, n), numbers[:n])
					}
					g.measure(b, 2*float64(m)*float64(n)*float64(k), l)
					if way != "ours" && g.taken.Load() == 0 {
						b.Error("the library did not take it")
					}
				})
			}
		}
	}
}

// measure runs a launch many times and reports how much it does in a second.
func (g *lab) measure(b *testing.B, flops float64, l device.Launch) {
	const times = 20
	best := time.Duration(math.MaxInt64)
	for b.Loop() {
		began := time.Now()
		for range times {
			g.Stream.Launch(l)
		}
		if err := g.Stream.Sync(); err != nil {
			b.Fatal(err)
		}
		best = min(best, time.Since(began)/times)
	}
	b.ReportMetric(flops/best.Seconds()/1e12, "TFLOP/s")
	b.ReportMetric(float64(best.Nanoseconds())/1e3, "us/launch")
}

// The benchmark has our own kernels and the library, as this package runs it, take turns. A
// figure is the median of runs that find a cold L2 cache.
func BenchmarkTurns(b *testing.B) {
	g := newLab(b, true)
	flush, numbers := g.alloc(b, 256*memory.MiB), smallNumbers(int(memory.MiB))
	var marks [2]device.Event
	for i := range marks {
		var err error
		if marks[i], err = g.Device.NewEvent(device.Timing); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { marks[i].Close() })
	}
	once := func(l device.Launch) time.Duration {
		g.Stream.Fill(flush.All(), 0)
		g.Stream.Record(marks[0])
		g.Stream.Launch(l)
		g.Stream.Record(marks[1])
		if err := g.Stream.Sync(); err != nil {
			b.Fatal(err)
		}
		d, err := marks[1].Since(marks[0])
		if err != nil {
			b.Fatal(err)
		}
		return d
	}
	half, full := kernels.BF16, kernels.F32
	kinds := []struct {
		name string
		v    variant
	}{
		{"forward", variant{mix: mix{half, half}, transB: true}},
		{"input", variant{mix: mix{half, half}}},
		{"weight", variant{mix: mix{half, full}, transA: true}},
		{"weight-added", variant{mix: mix{half, full}, transA: true, plus: itself}},
	}
	for _, s := range [][3]int{ // rows, outputs and inputs of a layer
		{8192, 4096, 4096}, {4096, 4096, 4096}, {8192, 2048, 2048}, {8192, 7168, 2048}, {8192, 1024, 4096}, {8192, 512, 4096}, {8192, 576, 7168}, {4096, 576, 2048}, {8192, 144, 4096},
		{8192, 768, 3072}, {8192, 1536, 1536}, {8192, 1024, 1024}, {16384, 1024, 1024}, {8192, 768, 768}, {2048, 32000, 2048}, {8192, 256, 2048},
	} {
		rows, out, in := s[0], s[1], s[2]
		y := &yard{buf: g.alloc(b, 4*memory.Bytes(rows*out+rows*in+out*in)+4*device.Align)}
		for at := memory.Bytes(0); at < y.buf.Size(); at += memory.MiB {
			n := min(memory.MiB, y.buf.Size()-at)
			g.Upload(y.buf.Slice(at, n), numbers[:n])
		}
		for i, c := range kinds {
			m, n, k := [...]int{rows, rows, out}[min(i, 2)], [...]int{out, in, in}[min(i, 2)], [...]int{in, out, rows}[min(i, 2)]
			b.Run(fmt.Sprintf("%dx%dx%d/%s", rows, out, in, c.name), func(b *testing.B) {
				l := y.product(b, c.v, m, n, k).launch
				var took [2][]time.Duration
				for b.Loop() {
					for i := range 20 {
						way := (i + i/2) % 2
						g.off = way == 0
						if d := once(l); i > 3 {
							took[way] = append(took[way], d)
						}
					}
				}
				var rate [2]float64
				for way := range took {
					slices.Sort(took[way])
					rate[way] = 2 * float64(m) * float64(n) * float64(k) / took[way][len(took[way])/2].Seconds() / 1e12
				}
				b.ReportMetric(0, "ns/op")
				b.ReportMetric(rate[0], "ours")
				b.ReportMetric(rate[1], "cuBLASLt")
				b.ReportMetric(rate[0]/rate[1], "ratio")
			})
		}
	}
}
