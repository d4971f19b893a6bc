// This file owns the scan of Mamba-2: its types, sizes and launches. scantwin.go and
// scangradtwin.go have the work in Go.

package nn

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// ScanChunk is how many tokens the scan computes at once. Inside a chunk it is a product of
// matrices, like attention without a softmax (the duality of state spaces). States, HeadDim
// x State numbers a head, exist only between chunks.
const ScanChunk = 64

// Scan is the recurrence of Mamba-2 over sequences of Seq tokens; rows are tokens, sequence
// by sequence. For head h, with a = -exp(ALog) and dt = softplus(DT + DTBias):
//
//	S_t = exp(dt_t a) S_t-1 + dt_t x_t B_tᵀ, from zero
//	y_t = S_t C_t + D x_t
//
// B and C are shared by the heads of a group, Heads/Groups of them, consecutive.
// Y, XBC and DT have one type, and ALog, D and DTBias, of one row each, another.
type Scan struct {
	Y Matrix // Heads x HeadDim columns
	// XBC is the result of the convolution: x of Heads x HeadDim columns, B of Groups x
	// State, and C of as many.
	XBC             Matrix
	DT              Matrix // Heads columns
	ALog, D, DTBias Matrix
	// States is fp32 [sequence][chunk][head][HeadDim][State], StateBytes long: S at the end
	// of each chunk but the last. It has no memory if there is only one chunk.
	States         device.Range
	Seq            int
	Heads, HeadDim int
	Groups, State  int
}

// chunks returns the number of chunks of a sequence.
func (c Scan) chunks() int { return (c.Seq + ScanChunk - 1) / ScanChunk }

func (c Scan) inner() int { return c.Heads * c.HeadDim }

// StateBytes returns the size of States for a number of tokens.
func (c Scan) StateBytes(tokens int) memory.Bytes {
	return 4 * memory.Bytes(tokens/c.Seq) * memory.Bytes(c.chunks()-1) * memory.Bytes(c.inner()*c.State)
}

var (
	scanStateKernel     = device.Kernel{Name: "stowage_nn_scan_state", Image: scanImage, Go: scanStateGo}
	scanKernel          = device.Kernel{Name: "stowage_nn_scan", Image: scanImage, Go: scanGo}
	scanGradStateKernel = device.Kernel{Name: "stowage_nn_scan_grad_state", Image: scanGradImage, Go: scanGradStateGo}
	scanGradKernel      = device.Kernel{Name: "stowage_nn_scan_grad", Image: scanGradImage, Go: scanGradGo}
	scanGradSumKernel   = device.Kernel{Name: "stowage_nn_scan_grad_sum", Image: scanGradImage, Go: scanGradSumGo}
)

const scanThreads = 256

// Recur issues a scan. It writes States and Y. The first launch, if there is more than one
// chunk, has a block for each sequence, head and tile of its state:
//
//	stowage_nn_scan_state(States, XBC, DT, ALog, DTBias, shape...)
//
// The second has one for each sequence, chunk and group:
//
//	stowage_nn_scan(Y, XBC, DT, ALog, D, DTBias, States, shape..., pitch of Y)
//
// States is zero where it is no memory. Shape is five arguments with a number in the
// lower 32 bits and one in the upper: Seq, sequences; Heads, HeadDim; Groups, State;
// the pitches of XBC and of DT; the types of XBC and of ALog.
func Recur(s device.Stream, c Scan) {
	ScanStates(s, c)
	c.Y.shape("the scan's output", c.XBC.Rows, c.inner())
	sameType("the scan", c.XBC, c.Y)
	l := device.NewLaunch(&scanKernel, c.batch()*c.chunks()*c.Groups, scanThreads)
	l.Write(c.Y.used("the scan's output"))
	c.inputs(&l, c.ALog, c.D, c.DTBias)
	c.addStates(&l)
	c.addShape(&l)
	l.Arg(uint64(c.Y.pitch()))
	s.Launch(l)
}

// ScanStates issues the first launch of [Recur] alone, so that a backward pass can compute
// States again.
func ScanStates(s device.Stream, c Scan) {
	c.check()
	if c.chunks() == 1 {
		return
	}
	l := device.NewLaunch(&scanStateKernel, c.batch()*c.Heads*c.tiles(), scanThreads)
	l.Write(c.States)
	c.inputs(&l, c.ALog, c.DTBias)
	c.addShape(&l)
	s.Launch(l)
}

// ScanGrad is the backward pass of a scan. It does not read Y. It writes DXBC, which may be
// XBC, and DDT, and adds to the gradients of ALog, D and DTBias, which have one type.
type ScanGrad struct {
	Scan
	DY, DXBC, DDT      Matrix
	DALog, DD, DDTBias Matrix
	Scratch            device.Range // ScratchBytes
}

// ScratchBytes returns the size of the scratch memory of the backward pass for a number of
// tokens. It holds the gradients of States in their layout, then fp32
// [sequence][chunk][3][head], and then, used by GPUs alone, fp32 [token][2][Groups][State]:
// partial gradients of B and C.
func (c Scan) ScratchBytes(tokens int) memory.Bytes {
	return c.StateBytes(tokens) + 12*memory.Bytes(tokens/c.Seq*c.chunks()*c.Heads) + 8*memory.Bytes(tokens*c.Groups*c.State)
}

// tiles returns how many squares of 64 a head's state consists of. A block of a GPU
// computes one at a time.
func (c Scan) tiles() int { return runsOf(c.HeadDim, 64) * runsOf(c.State, 64) }

// RecurGrad issues the backward pass. Launches have blocks as those of [Recur]; the third
// has a block for each head:
//
//	stowage_nn_scan_grad_state(Scratch, XBC, DT, ALog, DTBias, shape..., DY, pitch of DY)
//	stowage_nn_scan_grad(Scratch, XBC, DT, ALog, D, DTBias, States, shape..., DY, DXBC, DDT, pitches)
//	stowage_nn_scan_grad_sum(DALog, DD, DDTBias, sums, sequences x chunks, Heads, type)
//
// Pitches are those of DY, DXBC and DDT, 21 bits each, the first one lowest. The
// second launch writes to the end of Scratch what each chunk adds to the gradients
// of ALog, D and DTBias, in this order; the third one takes the sums, chunk after chunk.
func RecurGrad(s device.Stream, c ScanGrad) {
	c.checkGrad()
	states, batch := c.StateBytes(c.XBC.Rows), c.batch()
	dy := c.DY.used("the gradient of the scan's output")
	if c.chunks() > 1 {
		l := device.NewLaunch(&scanGradStateKernel, batch*c.Heads*c.tiles(), scanThreads)
		l.Write(c.Scratch.Slice(0, states))
		c.inputs(&l, c.ALog, c.DTBias)
		c.addShape(&l)
		l.Read(dy)
		l.Arg(uint64(c.DY.pitch()))
		s.Launch(l)
	}
	l := device.NewLaunch(&scanGradKernel, batch*c.chunks()*c.Groups, scanThreads)
	l.Write(c.Scratch.Slice(0, c.ScratchBytes(c.XBC.Rows)))
	c.inputs(&l, c.ALog, c.D, c.DTBias)
	c.addStates(&l)
	c.addShape(&l)
	l.Read(dy)
	l.Write(c.DXBC.used("the gradient of the scan's input"))
	l.Write(c.DDT.used("the gradient of the scan's steps"))
	l.Arg(uint64(c.DY.pitch()) | uint64(c.DXBC.pitch())<<21 | uint64(c.DDT.pitch())<<42)
	s.Launch(l)

	l = device.NewLaunch(&scanGradSumKernel, c.Heads, scanThreads)
	for _, m := range []Matrix{c.DALog, c.DD, c.DDTBias} {
		l.Write(m.used("a gradient of the scan's parameters"))
	}
	l.Read(c.Scratch.Slice(states, c.ScratchBytes(c.XBC.Rows)-states))
	l.Arg(uint64(batch * c.chunks()))
	l.Arg(uint64(c.Heads))
	l.Arg(uint64(c.DALog.Type))
	s.Launch(l)
}

func (c Scan) batch() int { return c.XBC.Rows / c.Seq }

// check panics if anything that both passes read has the wrong shape.
func (c Scan) check() {
	if c.Seq <= 0 || c.Heads <= 0 || c.HeadDim <= 0 || c.Groups <= 0 || c.State <= 0 || c.Heads%c.Groups != 0 || c.XBC.Rows%c.Seq != 0 {
		panic(fmt.Sprintf("nn: a scan of %d rows in sequences of %d, with %d heads of %d in %d groups and a state of %d, is invalid; expected positive sizes, a Seq that divides the rows, and groups that divide the heads",
			c.XBC.Rows, c.Seq, c.Heads, c.HeadDim, c.Groups, c.State))
	}
	c.XBC.shape("the scan's input", c.XBC.Rows, c.inner()+2*c.Groups*c.State)
	c.DT.shape("the scan's steps", c.XBC.Rows, c.Heads)
	sameType("the scan", c.XBC, c.DT)
	for _, m := range []Matrix{c.ALog, c.D, c.DTBias} {
		m.shape("a parameter of the scan", 1, c.Heads)
	}
	sameType("the scan's parameters", c.ALog, c.D, c.DTBias)
	if n := c.StateBytes(c.XBC.Rows); n > 0 && (c.States.Len != n || c.States.Addr()%4 != 0) {
		panic(fmt.Sprintf("nn: states of a scan: expected at least %d bytes, got %s", n, c.States))
	}
}

func (c ScanGrad) checkGrad() {
	c.check()
	c.DY.shape("the gradient of the scan's output", c.XBC.Rows, c.inner())
	c.DXBC.shape("the gradient of the scan's input", c.XBC.Rows, c.XBC.Cols)
	c.DDT.shape("the gradient of the scan's steps", c.XBC.Rows, c.Heads)
	sameType("the scan", c.XBC, c.DY, c.DXBC, c.DDT)
	for _, m := range []Matrix{c.DALog, c.DD, c.DDTBias} {
		m.shape("a gradient of the scan's parameters", 1, c.Heads)
	}
	sameType("the gradients of the scan's parameters", c.DALog, c.DD, c.DDTBias)
	if n := c.ScratchBytes(c.XBC.Rows); c.Scratch.Len < n || c.Scratch.Addr()%4 != 0 {
		panic(fmt.Sprintf("nn: scratch of a scan: expected at least %d bytes, got %s", n, c.Scratch))
	}
	for _, m := range []Matrix{c.DY, c.DXBC, c.DDT} {
		if m.pitch() >= 1<<21 {
			panic(fmt.Sprintf("nn: gradients of a scan: expected a pitch below %d, got %d", 1<<21, m.pitch()))
		}
	}
}

// sameType panics if matrices have different types.
func sameType(what string, first Matrix, rest ...Matrix) {
	for _, m := range rest {
		if m.Type != first.Type {
			panic(fmt.Sprintf("nn: %s: expected matrices of one type, got types %d and %d", what, first.Type, m.Type))
		}
	}
}

// inputs declares what every launch reads.
func (c Scan) inputs(l *device.Launch, params ...Matrix) {
	l.Read(c.XBC.used("the scan's input"))
	l.Read(c.DT.used("the scan's steps"))
	for _, m := range params {
		l.Read(m.used("a parameter of the scan"))
	}
}

func (c Scan) addStates(l *device.Launch) {
	if c.chunks() == 1 {
		l.Arg(0)
		return
	}
	l.Read(c.States)
}

func (c Scan) addShape(l *device.Launch) {
	l.Arg(packPair(c.Seq, c.batch()))
	l.Arg(packPair(c.Heads, c.HeadDim))
	l.Arg(packPair(c.Groups, c.State))
	l.Arg(packPair(c.XBC.pitch(), c.DT.pitch()))
	l.Arg(packPair(int(c.XBC.Type), int(c.ALog.Type)))
}
