// This file owns the short convolution over tokens that comes before a scan.

package nn

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/gemm"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/internal/vec"
	"github.com/stowage-dev/stowage/memory"
)

// Conv is a causal convolution of each column by itself, then SiLU, over sequences
// of Seq tokens; rows are tokens, sequence by sequence:
//
//	y_t = silu(bias + sum over k of w_k x_t-taps+1+k), with zeros before the first token
//
// W has a row of taps for each column, and Bias, of W's type, is a single row. Y and
// X are of one type.
type Conv struct {
	Y, X    Matrix
	W, Bias Matrix
	Seq     int
}

// ConvGrad is the backward pass of Conv. It does not read Y. It writes DX, which must not
// overlap DY or X, and adds to DW and DBias, which have one type.
type ConvGrad struct {
	Conv
	DY, DX, DW, DBias Matrix
	Scratch           device.Range // ScratchBytes
}

// ScratchBytes returns the size of the scratch memory of the backward pass: sums for each tap
// and the bias of each column, of each run of rows.
func (c Conv) ScratchBytes() memory.Bytes {
	return 4 * memory.Bytes(runsOf(c.X.Rows, c.gradRows())*(c.W.Cols+1)*c.X.Cols)
}

// gradRows returns the rows of a run in the backward pass: about convGradRows, or as few as it takes
// to give a large GPU's multiprocessors work. The launch has as many blocks as a whole number
// of turns of such a GPU takes. Each of the four warps of a block has a quarter of the rows.
func (c Conv) gradRows() int {
	tiles := runsOf(c.X.Cols, 2*convTile)
	turns := max(1, c.X.Rows*tiles/(convGradRows*convResident))
	runs := max(1, turns*convResident/tiles)
	return 4 * max(convLeast/4, runsOf(c.X.Rows, 4*runs))
}

var (
	convKernels       = newWays("stowage_nn_conv", convImage, convGo)
	convAheadKernel   = device.Kernel{Name: "stowage_nn_conv_ahead", Image: convImage, Go: convGo}
	convGradKernels   = newWays("stowage_nn_conv_grad", convImage, convGradGo)
	convGradSumKernel = device.Kernel{Name: "stowage_nn_conv_grad_sum", Image: convImage, Go: convGradSumGo}
)

const (
	// maxTaps are what a GPU's thread keeps at hand.
	maxTaps = 8
	// Kernels for bf16 in whole vectors have as many taps as all models.
	wideTaps = 4

	convThreads    = 128
	convSumThreads = 256
	// A block that sums up what pieces of work have for parameters has sumCols of them.
	sumCols = 32

	// A convolution is spread over runs of convRows rows, half of them in a GPU's forward
	// pass, and on the CPU its backward pass, which has sums over rows, over runs of convCols
	// columns.
	convRows = 256
	convCols = 128
	// On a GPU the backward pass has runs of about convGradRows rows, at least convLeast, because
	// rows around a run are read twice. An H200 runs convResident blocks at once.
	convGradRows = 512
	convLeast    = 128
	convResident = 132 * 4
	// Bytes of shared memory of a thread: two operands of three batches of four rows.
	convShared = 2 * 3 * 4 * 8
	// A warp computes convTile columns or, in the backward pass, up to twice as many.
	convTile = 64
	// In the forward pass that reads ahead a thread computes convAheadWide columns, and has four
	// batches of four rows in convAheadShared bytes of shared memory.
	convAheadWide   = 8
	convAheadShared = 4 * 4 * 2 * convAheadWide
)

// Convolve issues a convolution. The kernel's arguments:
//
//	stowage_nn_conv(Y, X, W, Bias, shape..., pitch of Y)
//
// Shape is three arguments: rows and, above 32 bits, Seq; columns and taps; the pitch of X
// and, above, bit 32 the type of X and bit 33 that of W. W is without gaps.
func Convolve(s device.Stream, c Conv) {
	c.check()
	c.Y.shape("a convolution's output", c.X.Rows, c.X.Cols)
	sameType("a convolution", c.X, c.Y)
	k, tile, shared := c.way(convKernels, c.Y), convTile, 0
	if k == &convKernels.wide && c.evenTaps() {
		k, tile, shared = &convAheadKernel, 32*convAheadWide, convAheadShared*convThreads
	}
	l := device.NewLaunch(k, runsOf(c.X.Rows, convRows/2)*runsOf(c.X.Cols, tile), convThreads)
	l.Shared = uint32(shared)
	l.Write(c.Y.used("a convolution's output"))
	c.add(&l)
	l.Arg(uint64(c.Y.pitch()))
	s.Launch(l)
}

// ConvolveGrad issues the backward pass. The kernels' arguments:
//
//	stowage_nn_conv_grad(Scratch, X, W, Bias, shape..., DY, DX, pitches of DY and DX, rows of a warp)
//	stowage_nn_conv_grad_sum(DW, DBias, Scratch, columns and taps, runs of rows, type of DW)
//
// Scratch is fp32 [run of gradRows rows][tap, and then the bias][column]; the second launch takes
// the sums. DW is without gaps.
func ConvolveGrad(s device.Stream, c ConvGrad) {
	c.check()
	c.DY.shape("the gradient of a convolution's output", c.X.Rows, c.X.Cols)
	c.DX.shape("the gradient of a convolution's input", c.X.Rows, c.X.Cols)
	sameType("a convolution", c.X, c.DX, c.DY)
	c.DW.shape("the gradient of a convolution's taps", c.W.Rows, c.W.Cols)
	c.DBias.shape("the gradient of a convolution's bias", 1, c.X.Cols)
	sameType("the gradients of a convolution", c.DW, c.DBias)
	noGaps("the gradient of a convolution's taps", c.DW)
	if c.Scratch.Len < c.ScratchBytes() || c.Scratch.Addr()%4 != 0 {
		panic(fmt.Sprintf("nn: scratch of a convolution: expected at least %d bytes, got %s", c.ScratchBytes(), c.Scratch))
	}
	scratch, runs := c.Scratch.Slice(0, c.ScratchBytes()), runsOf(c.X.Rows, c.gradRows())
	k, tile := c.way(convGradKernels, c.DY, c.DX), convTile
	if k == &convGradKernels.wide {
		tile *= 2
	}
	l := device.NewLaunch(k, runs*runsOf(c.X.Cols, tile), convThreads)
	l.Shared = convShared * convThreads
	l.Write(scratch)
	c.add(&l)
	l.Read(c.DY.used("the gradient of a convolution's output"))
	l.Write(c.DX.used("the gradient of a convolution's input"))
	l.Arg(packPair(c.DY.pitch(), c.DX.pitch()))
	l.Arg(uint64(c.gradRows() / 4))

	sum := device.NewLaunch(&convGradSumKernel, runsOf((c.W.Cols+1)*c.X.Cols, sumCols), convSumThreads)
	sum.Write(c.DW.used("the gradient of a convolution's taps"))
	sum.Write(c.DBias.used("the gradient of a convolution's bias"))
	sum.Read(scratch)
	sum.Arg(packPair(c.X.Cols, c.W.Cols))
	sum.Arg(uint64(runs))
	sum.Arg(uint64(c.DW.Type))
	c.tune(&l, &sum)
	s.Launch(l)
	s.Launch(sum)
}

// way returns the kernel for X and more.
func (c Conv) way(w *ways, more ...Matrix) *device.Kernel {
	if c.W.Cols != wideTaps || c.X.Cols%8 != 0 {
		return &w.any
	}
	return w.of(append(more, c.X)...)
}

// evenTaps reports whether taps and bias can be read by vectors.
func (c Conv) evenTaps() bool { return (c.W.Addr()|c.Bias.Addr())%16 == 0 }

func (c Conv) check() {
	if c.Seq <= 0 || c.X.Rows%c.Seq != 0 {
		panic(fmt.Sprintf("nn: a convolution: expected a Seq that divides %d rows, got %d", c.X.Rows, c.Seq))
	}
	if c.W.Cols > maxTaps {
		panic(fmt.Sprintf("nn: a convolution: expected at most %d taps, got %d", maxTaps, c.W.Cols))
	}
	c.W.shape("a convolution's taps", c.X.Cols, c.W.Cols)
	c.Bias.shape("a convolution's bias", 1, c.X.Cols)
	sameType("a convolution's parameters", c.W, c.Bias)
	noGaps("a convolution's taps", c.W)
}

func noGaps(what string, m Matrix) {
	if m.pitch() != m.Cols {
		panic(fmt.Sprintf("nn: %s: expected rows without gaps, got rows of %d numbers, %d apart", what, m.Cols, m.pitch()))
	}
}

// add is the inputs and the shape.
func (c Conv) add(l *device.Launch) {
	l.Read(c.X.used("a convolution's input"))
	l.Read(c.W.used("a convolution's taps"))
	l.Read(c.Bias.used("a convolution's bias"))
	l.Arg(packPair(c.X.Rows, c.Seq))
	l.Arg(packPair(c.X.Cols, c.W.Cols))
	l.Arg(packPair(c.X.pitch(), int(c.X.Type)|int(c.W.Type)<<1))
}

// convWork is what both passes have in common.
type convWork struct {
	rows, seq, cols, taps int
	x, w, bias            view
}

func newConvWork(a []uint64) convWork {
	w := convWork{rows: int(uint32(a[3])), seq: int(a[3] >> 32), cols: int(uint32(a[4])), taps: int(a[4] >> 32)}
	params := kernels.Number(a[5] >> 33 & 1)
	w.x = view{addr: a[0], pitch: int(uint32(a[5])), typ: kernels.Number(a[5] >> 32 & 1)}
	w.w = view{addr: a[1], typ: params}
	w.bias = view{addr: a[2], typ: params}
	return w
}

// rowPart is a row's columns from col on, as many as room has: where they lie if they
// are fp32, else in room.
func (v view) rowPart(room []float32, row, col int) []float32 {
	if v.typ == kernels.F32 {
		return device.Slice[float32](v.addr+uint64(4*(row*v.pitch+col)), len(room))
	}
	v.read(room, row, col, 1, len(room))
	return room
}

// window is the taps of some columns, tap by tap, and the last rows of x, in turn:
// token t's at t modulo taps.
type window struct {
	taps, bias, sum []float32
	rows, room      [][]float32
}

// open makes the window of n columns.
func (w *convWork) open(room *attendRoom, col, n int) window {
	v := window{taps: room.alloc(n * w.taps), bias: room.alloc(n), sum: room.alloc(n), rows: make([][]float32, w.taps), room: make([][]float32, w.taps)}
	for i := range v.room {
		v.room[i] = room.alloc(n)
	}
	w.bias.read(v.bias, 0, col, 1, n)
	line := room.alloc(n * w.taps)
	w.w.read(line, 0, col*w.taps, 1, n*w.taps)
	gemm.Transpose(v.taps, n, line, w.taps, n, w.taps)
	return v
}

// next makes the sums of a token. Tokens come one after the other; the first one,
// here or in its sequence, finds the rows before it loaded.
func (w *convWork) next(v *window, row, col int) {
	n, t := len(v.sum), row%w.seq
	w.load(v, row, col)
	copy(v.sum, v.bias)
	for k := max(0, w.taps-1-t); k < w.taps; k++ {
		vec.AddMul(v.sum, v.taps[k*n:], v.rows[(t+1+k)%w.taps], 1)
	}
}

func (w *convWork) load(v *window, row, col int) {
	i := row % w.seq % w.taps
	v.rows[i] = w.x.rowPart(v.room[i], row, col)
}

func convGo(l *device.Launch) {
	a := l.Args()
	w := newConvWork(a[1:])
	y := view{addr: a[0], pitch: int(a[7]), typ: w.x.typ}
	parallel.For(w.rows, convRows, func(from, to int) {
		room := attendRooms.Get().(*attendRoom)
		defer attendRooms.Put(room)
		room.reset()
		v := w.open(room, 0, w.cols)
		for back := min(w.taps-1, from%w.seq); back > 0; back-- {
			w.load(&v, from-back, 0)
		}
		for row := from; row < to; row++ {
			w.next(&v, row, 0)
			vec.SiLU(v.sum, v.sum)
			y.write(v.sum, row, 0, 1, w.cols)
		}
	})
}

func convGradGo(l *device.Launch) {
	a := l.Args()
	b := convBack{convWork: newConvWork(a[1:])}
	b.dy = view{addr: a[7], pitch: int(uint32(a[9])), typ: b.x.typ}
	b.dx = view{addr: a[8], pitch: int(a[9] >> 32), typ: b.x.typ}
	b.sums = device.Slice[float32](a[0], runsOf(b.rows, 4*int(a[10]))*(b.taps+1)*b.cols)
	clear(b.sums[(b.taps+1)*b.cols:])
	parallel.For(b.cols, convCols, func(from, to int) { b.columns(from, to-from) })
}

// convBack has the sums over all rows in the place of those of the first run. The other runs
// have zeros.
type convBack struct {
	convWork
	dx, dy view
	sums   []float32
}

// columns makes the gradients of n columns. The gradient of a token's input needs
// those of the sums of taps tokens from it on, which are kept in turn like x.
func (b *convBack) columns(col, n int) {
	room := attendRooms.Get().(*attendRoom)
	defer attendRooms.Put(room)
	room.reset()
	v := b.open(room, col, n)
	d := room.alloc(n * b.taps) // gradients of sums, in turn
	out, dy := room.alloc(n), room.alloc(n)
	sum := func(k int) []float32 { return b.sums[k*b.cols+col:][:n] } // of a tap, or of the bias
	for k := range b.taps + 1 {
		clear(sum(k))
	}
	for first := 0; first < b.rows; first += b.seq {
		for t := range b.seq + b.taps - 1 {
			ds := d[t%b.taps*n:][:n]
			if t < b.seq {
				b.next(&v, first+t, col)
				vec.SiLUGrad(ds, v.sum, b.dy.rowPart(dy, first+t, col))
				vec.Add(sum(b.taps), sum(b.taps), ds)
				for k := max(0, b.taps-1-t); k < b.taps; k++ {
					vec.AddMul(sum(k), ds, v.rows[(t+1+k)%b.taps], 1)
				}
			} else {
				clear(ds)
			}
			if t < b.taps-1 {
				continue
			}
			clear(out)
			for k := range b.taps {
				vec.AddMul(out, v.taps[k*n:], d[(t-k)%b.taps*n:], 1)
			}
			b.dx.write(out, first+t-b.taps+1, col, 1, n)
		}
	}
}

// convGradSumGo adds the sums to the gradients of the taps and the bias.
func convGradSumGo(l *device.Launch) {
	a := l.Args()
	cols, taps, runs := int(uint32(a[3])), int(a[3]>>32), int(a[4])
	sums, total := device.Slice[float32](a[2], runs*(taps+1)*cols), make([]float32, (taps+1)*cols)
	for r := range runs {
		vec.Add(total, total, sums[r*len(total):])
	}
	add := func(to view, x []float32) {
		was := make([]float32, len(x))
		to.read(was, 0, 0, 1, len(x))
		vec.Add(was, was, x)
		to.write(was, 0, 0, 1, len(x))
	}
	dw := make([]float32, taps*cols)
	gemm.Transpose(dw, taps, total, cols, taps, cols)
	typ := kernels.Number(a[5])
	add(view{addr: a[0], typ: typ}, dw)
	add(view{addr: a[1], typ: typ}, total[taps*cols:])
}
