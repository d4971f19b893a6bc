// This file owns the gated norm that follows a scan.

package nn

import (
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/internal/vec"
	"github.com/stowage-dev/stowage/memory"
)

// GatedNorm is an RMS norm of what a gate lets through: with v = x silu(z), each of
// Groups equal runs of a row's columns is normalised by itself,
//
//	y = v / sqrt(mean(v²) + epsilon) * w
//
// with W a single row of all columns. Y may be X or Z. Y, X and Z are of one type.
type GatedNorm struct {
	Y, X, Z, W Matrix
	Groups     int
	Epsilon    float32
}

// GatedNormGrad is the backward pass of GatedNorm. It does not read Y. It writes DX and
// DZ and adds to DW. DX may be DY or X, and DZ may be Z.
type GatedNormGrad struct {
	GatedNorm
	DY, DX, DZ, DW Matrix
	Scratch        device.Range // GatedNormScratch bytes
}

// GatedNormScratch returns the size of the scratch memory of the backward pass: one sum
// for each column of each run of rows. More rows may need less.
func GatedNormScratch(rows, cols int) memory.Bytes {
	return 4 * memory.Bytes(runsOf(rows, gatedGradRows(rows))*cols)
}

// gatedGradRows returns the rows of a piece of work in the backward pass: gatedRows, but of many
// rows about as many as it takes to give all blocks that an H200 runs at once a piece, or several.
func gatedGradRows(rows int) int {
	if rows < gatedMany {
		return gatedRows
	}
	turns := max(1, (rows+gatedRows*gatedResident/2)/(gatedRows*gatedResident))
	return runsOf(rows, turns*gatedResident)
}

var (
	gatedNormKernels       = newWays("stowage_nn_gated_norm", gatedNormImage, gatedNormGo)
	gatedNormGradKernels   = newWays("stowage_nn_gated_norm_grad", gatedNormImage, gatedNormGradGo)
	gatedNormGradWidest    = device.Kernel{Name: "stowage_nn_gated_norm_grad_widest", Image: gatedNormImage, Go: gatedNormGradGo}
	gatedNormGradSumKernel = device.Kernel{Name: "stowage_nn_gated_norm_grad_sum", Image: gatedNormImage, Go: gatedNormGradSumGo}
)

const (
	gatedThreads = 256
	// A piece of work has gatedRows rows, or about as many of at least gatedMany in the backward
	// pass, of which an H200 runs gatedResident blocks at once.
	gatedRows     = 64
	gatedMany     = 8192
	gatedResident = 132 * 2
	// A thread keeps gatedKeep vectors of a group of each operand. In the backward pass it
	// has gatedGradKeep of each, of a row and of the next gatedAhead, in gatedShared bytes.
	gatedKeep     = 4
	gatedGradKeep = 2
	gatedAhead    = 1
	gatedShared   = (gatedAhead + 1) * 3 * 16 * gatedGradKeep
	// A thread sums up gatedCols columns over the pieces.
	gatedCols = 512
)

// GatedRMSNorm issues a gated norm. The kernel's arguments:
//
//	stowage_nn_gated_norm(Y, X, Z, W, shape..., pitch of Y)
//
// Shape is four arguments with a number in the lower 32 bits and one in the upper:
// rows, columns; Groups, the bits of Epsilon; the pitches of X and Z; the types
// of X and W.
func GatedRMSNorm(s device.Stream, g GatedNorm) {
	g.check()
	g.Y.shape("a gated norm's output", g.X.Rows, g.X.Cols)
	sameType("a gated norm", g.X, g.Y)
	l := device.NewLaunch(g.way(gatedNormKernels, gatedThreads*gatedKeep, g.Y), g.X.Rows, gatedThreads)
	l.Write(g.Y.used("a gated norm's output"))
	g.add(&l)
	l.Arg(uint64(g.Y.pitch()))
	s.Launch(l)
}

// GatedRMSNormGrad issues the backward pass. The kernels' arguments:
//
//	stowage_nn_gated_norm_grad(Scratch, X, Z, W, shape..., DY, DX, DZ, pitch of DY, pitches of DX and DZ, rows of a run)
//	stowage_nn_gated_norm_grad_sum(DW, Scratch, columns, runs of rows, type of DW)
//
// Scratch is fp32 [run of gatedGradRows rows][column]; the second launch takes the sums.
func GatedRMSNormGrad(s device.Stream, g GatedNormGrad) {
	g.check()
	rows, cols := g.X.Rows, g.X.Cols
	for _, m := range []Matrix{g.DY, g.DX, g.DZ} {
		m.shape("a gradient of a gated norm", rows, cols)
	}
	sameType("a gated norm", g.X, g.DY, g.DX, g.DZ)
	g.DW.shape("the gradient of a gated norm's weights", 1, cols)
	if g.Scratch.Len < GatedNormScratch(rows, cols) || g.Scratch.Addr()%4 != 0 {
		panic(fmt.Sprintf("nn: scratch of a gated norm: expected at least %d bytes, got %s", GatedNormScratch(rows, cols), g.Scratch))
	}
	scratch, runs := g.Scratch.Slice(0, GatedNormScratch(rows, cols)), runsOf(rows, gatedGradRows(rows))
	k, threads, shared := g.way(gatedNormGradKernels, normGradThreads*gatedGradKeep, g.DY, g.DX, g.DZ), normGradThreads, normShare
	if k == &gatedNormGradKernels.wide {
		if cols/g.Groups <= 8*gatedGradKeep*gatedThreads {
			threads = gatedThreads
		} else {
			k = &gatedNormGradWidest
		}
		shared = gatedShared
	}
	l := device.NewLaunch(k, runs*g.Groups, threads)
	l.Shared = uint32(shared * threads)
	l.Write(scratch)
	g.add(&l)
	l.Read(g.DY.used("a gradient of a gated norm"))
	l.Write(g.DX.used("a gradient of a gated norm"))
	l.Write(g.DZ.used("a gradient of a gated norm"))
	l.Arg(uint64(g.DY.pitch()))
	l.Arg(packPair(g.DX.pitch(), g.DZ.pitch()))
	l.Arg(uint64(gatedGradRows(rows)))
	s.Launch(l)

	l = device.NewLaunch(&gatedNormGradSumKernel, runsOf(cols, sumCols), normGradThreads)
	l.Write(g.DW.used("the gradient of a gated norm's weights"))
	l.Read(scratch)
	l.Arg(uint64(cols))
	l.Arg(uint64(runs))
	l.Arg(uint64(g.DW.Type))
	s.Launch(l)
}

// way returns the kernel for these matrices and more, if blocks keep a number of vectors.
func (g GatedNorm) way(w *ways, vectors int, more ...Matrix) *device.Kernel {
	if n := g.X.Cols / g.Groups; n%8 != 0 || n > 8*vectors {
		return &w.any
	}
	return w.of(append(more, g.X, g.Z, g.W)...)
}

func (g GatedNorm) check() {
	if g.Groups <= 0 || g.X.Cols%g.Groups != 0 {
		panic(fmt.Sprintf("nn: a gated norm: expected groups that divide %d columns, got %d", g.X.Cols, g.Groups))
	}
	g.Z.shape("a gated norm's gate", g.X.Rows, g.X.Cols)
	g.W.shape("a gated norm's weights", 1, g.X.Cols)
	sameType("a gated norm", g.X, g.Z)
}

// add adds the inputs and the shape to a launch.
func (g GatedNorm) add(l *device.Launch) {
	l.Read(g.X.used("a gated norm's input"))
	l.Read(g.Z.used("a gated norm's gate"))
	l.Read(g.W.used("a gated norm's weights"))
	l.Arg(packPair(g.X.Rows, g.X.Cols))
	l.Arg(uint64(g.Groups) | bits(g.Epsilon)<<32)
	l.Arg(packPair(g.X.pitch(), g.Z.pitch()))
	l.Arg(packPair(int(g.X.Type), int(g.W.Type)))
}

// gatedWork is what both passes share.
type gatedWork struct {
	rows, cols, group int
	epsilon           float32
	x, z              view
	w                 []float32
}

func newGatedWork(a []uint64) gatedWork {
	g := gatedWork{rows: int(uint32(a[3])), cols: int(a[3] >> 32), epsilon: math.Float32frombits(uint32(a[4] >> 32))}
	g.group = g.cols / int(uint32(a[4]))
	typ := kernels.Number(uint32(a[6]))
	g.x = view{addr: a[0], pitch: int(uint32(a[5])), typ: typ}
	g.z = view{addr: a[1], pitch: int(a[5] >> 32), typ: typ}
	g.w = make([]float32, g.cols)
	view{addr: a[2], typ: kernels.Number(a[6] >> 32)}.read(g.w, 0, 0, 1, g.cols)
	return g
}

// inverse returns 1 / sqrt(mean(v²) + epsilon).
func (g *gatedWork) inverse(v []float32) float32 {
	mean := vec.SumSquares(v) / float32(len(v))
	return float32(1 / math.Sqrt(float64(mean+g.epsilon)))
}

func gatedNormGo(l *device.Launch) {
	a := l.Args()
	g := newGatedWork(a[1:])
	y := view{addr: a[0], pitch: int(a[8]), typ: g.x.typ}
	parallel.For(g.rows, gatedRows, func(from, to int) {
		room := attendRooms.Get().(*attendRoom)
		defer attendRooms.Put(room)
		room.reset()
		v, x, z := room.alloc(g.cols), room.alloc(g.cols), room.alloc(g.cols)
		for row := from; row < to; row++ {
			vec.SwiGLU(v, g.z.rowPart(z, row, 0), g.x.rowPart(x, row, 0), 1)
			for at := 0; at < g.cols; at += g.group {
				v := v[at:][:g.group]
				vec.MulScale(v, v, g.w[at:], g.inverse(v))
			}
			y.write(v, row, 0, 1, g.cols)
		}
	})
}

func gatedNormGradGo(l *device.Launch) {
	a := l.Args()
	b := gatedBack{gatedWork: newGatedWork(a[1:])}
	b.dy = view{addr: a[8], pitch: int(a[11]), typ: b.x.typ}
	b.dx = view{addr: a[9], pitch: int(uint32(a[12])), typ: b.x.typ}
	b.dz = view{addr: a[10], pitch: int(a[12] >> 32), typ: b.x.typ}
	rows := int(a[13])
	parallel.For(runsOf(b.rows, rows), 1, func(from, to int) {
		for r := from; r < to; r++ {
			b.run(device.Slice[float32](a[0]+uint64(4*r*b.cols), b.cols), r*rows, min((r+1)*rows, b.rows))
		}
	})
}

type gatedBack struct {
	gatedWork
	dy, dx, dz view
}

// run computes the gradients of some rows, and the sums over them. With r the inverse and n
// the columns of a group, dv = r dy w - v r³/n (dy w · v).
func (b *gatedBack) run(sums []float32, from, to int) {
	room := attendRooms.Get().(*attendRoom)
	defer attendRooms.Put(room)
	room.reset()
	v, dv := room.alloc(b.cols), room.alloc(b.cols)
	bx, bz, bdy := room.alloc(b.cols), room.alloc(b.cols), room.alloc(b.cols) // for numbers that are not fp32
	dx, dz := room.alloc(b.cols), room.alloc(b.cols)
	clear(sums)
	for row := from; row < to; row++ {
		x, z, dy := b.x.rowPart(bx, row, 0), b.z.rowPart(bz, row, 0), b.dy.rowPart(bdy, row, 0)
		vec.SwiGLU(v, z, x, 1)
		for at := 0; at < b.cols; at += b.group {
			v, dy, w := v[at:][:b.group], dy[at:], b.w[at:]
			r := b.inverse(v)
			vec.AddMul(sums[at:][:b.group], dy, v, r)
			c := r * r * r * vec.Dot3(v, dy, w) / float32(b.group)
			vec.NormGrad(dv[at:][:b.group], dy, w, v, r, c)
		}
		vec.SwiGLUGrad(dz, dx, v, z, x, dv, 1)
		b.dx.write(dx, row, 0, 1, b.cols)
		b.dz.write(dz, row, 0, 1, b.cols)
	}
}

// gatedNormGradSumGo adds up the runs.
func gatedNormGradSumGo(l *device.Launch) {
	a := l.Args()
	cols, runs := int(a[2]), int(a[3])
	sums := device.Slice[float32](a[1], runs*cols)
	dw := view{addr: a[0], typ: kernels.Number(a[4])}
	parallel.For(cols, gatedCols, func(from, to int) {
		total := make([]float32, to-from)
		dw.read(total, 0, from, 1, to-from)
		for r := range runs {
			vec.Add(total, total, sums[r*cols+from:])
		}
		dw.write(total, 0, from, 1, to-from)
	})
}
