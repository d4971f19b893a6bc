// This file owns the launches of activations. acttwin.go has the twins.

package nn

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

var (
	swigluKernels      = newWays("stowage_nn_swiglu", actImage, swigluTwin)
	swigluGradKernels  = newWays("stowage_nn_swiglu_grad", actImage, swigluGradTwin)
	addKernel          = device.Kernel{Name: "stowage_nn_add", Image: actImage, Go: addTwin}
	gateRowsKernel     = device.Kernel{Name: "stowage_nn_gate_rows", Image: actImage, Go: gateRowsTwin}
	gateRowsGradKernel = device.Kernel{Name: "stowage_nn_gate_rows_grad", Image: actImage, Go: gateRowsGradTwin}
)

// Gate is SwiGLU: y = silu(left half of x) * right half of x, times the row's number in
// Weight if that has memory. X has twice the columns of Y.
type Gate struct {
	Y, X   Matrix
	Weight device.Range // fp32, one a row, or no memory
	Seg    Segments     // of the rows, or none: then all rows
}

// gateRows is how many rows a block computes.
const gateRows = 8

// SwiGLU issues a gate.
func SwiGLU(s device.Stream, g Gate) { s.Launch(swigluLaunch(g)) }

// swigluLaunch returns the launch of SwiGLU. Its arguments:
//
//	0..3  Y, X, Weight or zero, segments or zero
//	4     Y.Rows | Y.Cols << 32
//	5     pitch of Y | pitch of X << 32
//	6     number of segments, zero for all rows
//	7     types: bit 0 Y, 1 X; set for bf16
func swigluLaunch(g Gate) device.Launch {
	g.X.shape("what SwiGLU reads", g.Y.Rows, 2*g.Y.Cols)
	l := device.NewLaunch(swigluKernels.of(g.Y, g.X), runsOf(g.Y.Rows, gateRows), rowThreads)
	passMatrix(&l, "what SwiGLU writes", g.Y, device.Write)
	passMatrix(&l, "what SwiGLU reads", g.X, device.Read)
	passRun(&l, "SwiGLU's weights", g.Weight, g.Y.Rows, 4, device.Read, true)
	passSegments(&l, g.Seg)
	l.Arg(packPair(g.Y.Rows, g.Y.Cols))
	l.Arg(packPair(g.Y.pitch(), g.X.pitch()))
	l.Arg(uint64(g.Seg.Experts))
	l.Arg(typeBits(g.Y, g.X))
	return l
}

func passSegments(l *device.Launch, s Segments) {
	if !s.live() {
		l.Arg(0)
		return
	}
	passRun(l, "segments", s.Range, 2*s.Experts, 4, device.Read, false)
}

// GateGrad is the backward pass of Gate. It writes DX, which may be X. It also computes y
// again and writes it to Y, which may be DY, unless Y is the zero Matrix.
type GateGrad struct {
	DX, X, DY Matrix
	Y         Matrix
	Weight    device.Range
	DWeight   device.Range // fp32, one a row: set; or no memory
	Seg       Segments
}

// SwiGLUGrad issues the backward pass of a gate.
func SwiGLUGrad(s device.Stream, g GateGrad) { s.Launch(swigluGradLaunch(g)) }

// swigluGradLaunch returns the launch of its backward pass. Its arguments:
//
//	0..3  DX, X, DY, Y or zero
//	4..6  Weight or zero, DWeight or zero, segments or zero
//	7     DY.Rows | DY.Cols << 32
//	8     pitch of DX | pitch of X << 32
//	9     pitch of DY | pitch of Y << 32
//	10    number of segments, zero for all rows
//	11    types: bit 0 DX, 1 X, 2 DY, 3 Y; set for bf16
func swigluGradLaunch(g GateGrad) device.Launch {
	rows, cols := g.DY.Rows, g.DY.Cols
	g.X.shape("what SwiGLU's gradient reads", rows, 2*cols)
	g.DX.shape("what SwiGLU's gradient writes", rows, 2*cols)
	l := device.NewLaunch(swigluGradKernels.of(g.DX, g.X, g.DY, g.Y), runsOf(rows, gateRows), rowThreads)
	passMatrix(&l, "what SwiGLU's gradient writes", g.DX, device.Write)
	passMatrix(&l, "what SwiGLU's gradient reads", g.X, device.Read)
	passMatrix(&l, "the gradient of SwiGLU's result", g.DY, device.Read)
	if g.Y.Buf != nil {
		g.Y.shape("SwiGLU's result", rows, cols)
	}
	passMaybe(&l, "SwiGLU's result", g.Y, device.Write)
	passRun(&l, "SwiGLU's weights", g.Weight, rows, 4, device.Read, true)
	passRun(&l, "the gradient of SwiGLU's weights", g.DWeight, rows, 4, device.Write, true)
	passSegments(&l, g.Seg)
	l.Arg(packPair(rows, cols))
	l.Arg(packPair(g.DX.pitch(), g.X.pitch()))
	l.Arg(packPair(g.DY.pitch(), g.Y.pitch()))
	l.Arg(uint64(g.Seg.Experts))
	l.Arg(typeBits(g.DX, g.X, g.DY, g.Y))
	return l
}

// Sum is y = a + b, all of one shape. Y may be A or B. Types may differ.
type Sum struct{ Y, A, B Matrix }

// Add issues a sum.
func Add(s device.Stream, a Sum) { s.Launch(addLaunch(a)) }

// addLaunch returns the launch of a sum. Its arguments:
//
//	0..2  Y, A, B
//	3     Y.Rows | Y.Cols << 32
//	4     pitch of Y | pitch of A << 32
//	5     pitch of B
//	6     types: bit 0 Y, 1 A, 2 B; set for bf16
func addLaunch(a Sum) device.Launch {
	a.A.shape("what is added", a.Y.Rows, a.Y.Cols)
	a.B.shape("what is added", a.Y.Rows, a.Y.Cols)
	l := device.NewLaunch(&addKernel, a.Y.Rows, rowThreads)
	passMatrix(&l, "a sum", a.Y, device.Write)
	passMatrix(&l, "what is added", a.A, device.Read)
	passMatrix(&l, "what is added", a.B, device.Read)
	l.Arg(packPair(a.Y.Rows, a.Y.Cols))
	l.Arg(packPair(a.Y.pitch(), a.A.pitch()))
	l.Arg(uint64(a.B.pitch()))
	l.Arg(typeBits(a.Y, a.A, a.B))
	return l
}

// RowGate is y = x times the sigmoid of the row's number in Logit (fp32, rows x 1). Y may
// be X.
type RowGate struct{ Y, X, Logit Matrix }

// GateRows issues a gate of rows.
func GateRows(s device.Stream, g RowGate) { s.Launch(gateRowsLaunch(g)) }

// gateRowsLaunch returns the launch of a gate of rows. Its arguments:
//
//	0..2  Y, X, Logit
//	3     Y.Rows | Y.Cols << 32
//	4     pitch of Y | pitch of X << 32
//	5     pitch of Logit
//	6     types: bit 0 Y, 1 X; set for bf16
func gateRowsLaunch(g RowGate) device.Launch {
	g.X.shape("what is gated", g.Y.Rows, g.Y.Cols)
	checkColumn("the logits of a gate", g.Logit, g.Y.Rows)
	l := device.NewLaunch(&gateRowsKernel, g.Y.Rows, rowThreads)
	passMatrix(&l, "what a gate writes", g.Y, device.Write)
	passMatrix(&l, "what is gated", g.X, device.Read)
	passMatrix(&l, "the logits of a gate", g.Logit, device.Read)
	l.Arg(packPair(g.Y.Rows, g.Y.Cols))
	l.Arg(packPair(g.Y.pitch(), g.X.pitch()))
	l.Arg(uint64(g.Logit.pitch()))
	l.Arg(typeBits(g.Y, g.X))
	return l
}

func checkColumn(what string, m Matrix, rows int) {
	m.shape(what, rows, 1)
	if m.Type != kernels.F32 {
		panic("nn: " + what + ": expected fp32 numbers")
	}
}

// RowGateGrad is the backward pass of RowGate. It writes DX and DLogit. DX may be DY.
type RowGateGrad struct{ DX, DLogit, DY, X, Logit Matrix }

// GateRowsGrad issues the backward pass of a gate of rows.
func GateRowsGrad(s device.Stream, g RowGateGrad) { s.Launch(gateRowsGradLaunch(g)) }

// gateRowsGradLaunch returns the launch of its backward pass. Its arguments:
//
//	0..4  DX, DLogit, DY, X, Logit
//	5     X.Rows | X.Cols << 32
//	6     pitch of DX | pitch of DLogit << 32
//	7     pitch of DY | pitch of X << 32
//	8     pitch of Logit
//	9     types: bit 0 DX, 1 DY, 2 X; set for bf16
func gateRowsGradLaunch(g RowGateGrad) device.Launch {
	g.DX.shape("the gradient of what is gated", g.X.Rows, g.X.Cols)
	g.DY.shape("the gradient of a gate", g.X.Rows, g.X.Cols)
	checkColumn("the logits of a gate", g.Logit, g.X.Rows)
	checkColumn("the gradients of a gate's logits", g.DLogit, g.X.Rows)
	l := device.NewLaunch(&gateRowsGradKernel, g.X.Rows, rowThreads)
	passMatrix(&l, "the gradient of what is gated", g.DX, device.Write)
	passMatrix(&l, "the gradients of a gate's logits", g.DLogit, device.Write)
	passMatrix(&l, "the gradient of a gate", g.DY, device.Read)
	passMatrix(&l, "what is gated", g.X, device.Read)
	passMatrix(&l, "the logits of a gate", g.Logit, device.Read)
	l.Arg(packPair(g.X.Rows, g.X.Cols))
	l.Arg(packPair(g.DX.pitch(), g.DLogit.pitch()))
	l.Arg(packPair(g.DY.pitch(), g.X.pitch()))
	l.Arg(uint64(g.Logit.pitch()))
	l.Arg(typeBits(g.DX, g.DY, g.X))
	return l
}
