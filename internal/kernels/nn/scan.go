// This file owns the scan of Mamba-2: its types, sizes and launches. scantwin.go and
// scangradtwin.go have the work in Go.

package nn

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// The scan computes a chunk of tokens at once. Inside a chunk it is a product of matrices,
// like attention without a softmax (the duality of state spaces). States, HeadDim x State
// numbers a head, exist only between chunks. Tensor cores take larger chunks, so there are
// fewer states to move.
const (
	plainChunk  = 64
	tensorChunk = 128
	// The largest heads and states for which there are kernels on tensor cores. States
	// above tensorNarrow have kernels of their own.
	tensorHeadDim = 128
	tensorState   = 256
	tensorNarrow  = 128
	// Tensor cores compute a head in strips of tensorStrip columns. A block computes a number
	// of strips of a group one after the other; those of a head are in one block.
	tensorStrip   = 64
	tensorRun     = 8
	tensorGradRun = 16
)

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
	// States is [sequence][chunk][head][HeadDim][State], StateBytes long: S at the end of
	// each chunk but the last, in bf16 on tensor cores and else in fp32. It has no memory
	// if there is only one chunk.
	States         device.Range
	Seq            int
	Heads, HeadDim int
	Groups, State  int
}

// tensor reports whether tensor cores compute the scan: their products are of bf16. The
// other kernels compute scans of any shape in fp32.
func (c Scan) tensor() bool { return onTensor(c.XBC.Type, c.HeadDim, c.State) }

func onTensor(t kernels.Number, headDim, state int) bool {
	return t == kernels.BF16 && headDim <= tensorHeadDim && state <= tensorState
}

// chunk returns the number of tokens of a chunk.
func (c Scan) chunk() int {
	if c.tensor() {
		return tensorChunk
	}
	return plainChunk
}

// chunks returns the number of chunks of a sequence.
func (c Scan) chunks() int { return runsOf(c.Seq, c.chunk()) }

// states returns the type of States.
func (c Scan) states() kernels.Number {
	if c.tensor() {
		return kernels.BF16
	}
	return kernels.F32
}

func (c Scan) inner() int { return c.Heads * c.HeadDim }

// StateBytes returns the size of States for a number of tokens.
func (c Scan) StateBytes(tokens int) memory.Bytes {
	return c.states().Size() * memory.Bytes(tokens/c.Seq) * memory.Bytes(c.chunks()-1) * memory.Bytes(c.inner()*c.State)
}

var (
	scanStateKernel     = device.Kernel{Name: "stowage_nn_scan_state", Image: scanImage, Go: scanStateGo}
	scanKernel          = device.Kernel{Name: "stowage_nn_scan", Image: scanImage, Go: scanGo}
	scanGradStateKernel = device.Kernel{Name: "stowage_nn_scan_grad_state", Image: scanGradImage, Go: scanGradStateGo}
	scanGradKernel      = device.Kernel{Name: "stowage_nn_scan_grad", Image: scanGradImage, Go: scanGradGo}
	scanGradSumKernel   = device.Kernel{Name: "stowage_nn_scan_grad_sum", Image: scanGradImage, Go: scanGradSumGo}

	tensorStateKernel     = device.Kernel{Name: "stowage_nn_scan_tensor_state", Image: scanTensorImage, Go: scanStateGo}
	tensorScanKernel      = device.Kernel{Name: "stowage_nn_scan_tensor", Image: scanTensorImage, Go: scanGo}
	tensorScanWideKernel  = device.Kernel{Name: "stowage_nn_scan_tensor_wide", Image: scanTensorImage, Go: scanGo}
	tensorGradStateKernel = device.Kernel{Name: "stowage_nn_scan_tensor_grad_state", Image: scanGradTensorImage, Go: scanGradStateGo}
	tensorOutsideKernel   = device.Kernel{Name: "stowage_nn_scan_tensor_grad_outside", Image: scanGradTensorImage, Go: func(*device.Launch) {}}
	tensorPairsWideKernel = device.Kernel{Name: "stowage_nn_scan_tensor_grad_pairs_wide", Image: scanGradTensorImage, Go: func(*device.Launch) {}}
	tensorPairsKernel     = device.Kernel{Name: "stowage_nn_scan_tensor_grad_pairs", Image: scanGradTensorImage, Go: func(*device.Launch) {}}
	tensorGradKernel      = device.Kernel{Name: "stowage_nn_scan_tensor_grad", Image: scanGradTensorImage, Go: scanGradGo}
	tensorGradWideKernel  = device.Kernel{Name: "stowage_nn_scan_tensor_grad_wide", Image: scanGradTensorImage, Go: scanGradGo}
	tensorGradSumKernel   = device.Kernel{Name: "stowage_nn_scan_tensor_grad_sum", Image: scanGradTensorImage, Go: scanGradSumGo}
	tensorStepsKernel     = device.Kernel{Name: "stowage_nn_scan_tensor_grad_steps", Image: scanGradTensorImage, Go: func(*device.Launch) {}}
	tensorMixKernel       = device.Kernel{Name: "stowage_nn_scan_tensor_grad_mix", Image: scanGradTensorImage, Go: func(*device.Launch) {}}
)

const (
	scanThreads       = 256
	scanTensorThreads = 256
	// The shared memory of blocks on tensor cores, in bytes: tiles of 128 rows and 64
	// columns of bf16, states of 64 rows and 128 columns or half of them, C Bᵀ, and fp32
	// numbers for each token. Rows have 16 bytes more. No GPU since Ampere has less than 99
	// KiB for a block.
	tensorRows, tensorWhole, tensorHalf, tensorCB, tensorToken = 128 * 144, 64 * 272, 64 * 144, 36 * 512, 4 * tensorChunk

	tensorStateShared   = 2*2*tensorRows + 2*8*4*(tensorChunk/2+4)
	tensorScanShared    = 2*(tensorRows+tensorWhole) + tensorCB + 2*tensorRun*tensorToken
	tensorWideShared    = 128*528 + tensorCB + 2*tensorRun*tensorToken // B or C of a wide state
	tensorOutsideShared = tensorRows + 2*(tensorRows+tensorHalf) + tensorGradRun*tensorToken
	tensorPairsShared   = 2*2*tensorRows + tensorCB + (4+9)*tensorToken
	tensorMixShared     = 128*272 + 2*tensorRows
)

// runLaunch returns a launch on tensor cores whose blocks compute runs of strips, by the first
// kernel or, if states are wide, by the second one.
func (c Scan) runLaunch(narrow, wide *device.Kernel, strips int) device.Launch {
	k, shared := narrow, uint32(tensorScanShared)
	if c.State > tensorNarrow {
		k, shared = wide, tensorWideShared
	}
	l := device.NewLaunch(k, c.runs(strips), scanTensorThreads)
	l.Shared = shared
	return l
}

// stateLaunch returns a launch of the first kernel with blocks of 64 x 64 numbers of a state
// each, or of the second one on tensor cores.
func (c Scan) stateLaunch(plain, tensor *device.Kernel) device.Launch {
	blocks := c.batch() * c.Heads * c.tiles()
	if !c.tensor() {
		return device.NewLaunch(plain, blocks, scanThreads)
	}
	l := device.NewLaunch(tensor, blocks, scanTensorThreads)
	l.Shared = tensorStateShared
	return l
}

// strips returns the number of strips of a head.
func (c Scan) strips() int { return runsOf(c.HeadDim, tensorStrip) }

// runs returns how many runs of strips there are in all chunks of all groups.
func (c Scan) runs(strips int) int {
	return c.batch() * c.chunks() * c.Groups * runsOf(c.Heads/c.Groups*c.strips(), strips)
}

// Recur issues a scan. It writes States and Y. The first launch, if there is more than one
// chunk, has a block for each sequence, head and tile of its state:
//
//	stowage_nn_scan_state(States, XBC, DT, ALog, DTBias, shape...)
//
// The second has one for each sequence, chunk and group, or on tensor cores for each run of
// strips of the group's heads:
//
//	stowage_nn_scan(Y, XBC, DT, ALog, D, DTBias, States, shape..., pitch of Y)
//
// States is zero where it is no memory. Shape is five arguments with a number in the
// lower 32 bits and one in the upper: Seq, sequences; Heads, HeadDim; Groups, State;
// the pitches of XBC and of DT; the types of XBC and of ALog. On tensor cores the names
// begin with stowage_nn_scan_tensor, and those of the kernels for wide states end with wide.
func Recur(s device.Stream, c Scan) {
	ScanStates(s, c)
	c.Y.shape("the scan's output", c.XBC.Rows, c.inner())
	sameType("the scan", c.XBC, c.Y)
	l := device.NewLaunch(&scanKernel, c.batch()*c.chunks()*c.Groups, scanThreads)
	if c.tensor() {
		l = c.runLaunch(&tensorScanKernel, &tensorScanWideKernel, tensorRun)
	}
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
	l := c.stateLaunch(&scanStateKernel, &tensorStateKernel)
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
// [sequence][chunk][3][head], and then what GPUs alone use: fp32 [token][2][Groups][State],
// partial gradients of B and C; or, on tensor cores, numbers for the tokens and products of
// each chunk and strip, and gradients of B, of C and of C Bᵀ for each run of strips.
func (c Scan) ScratchBytes(tokens int) memory.Bytes {
	n := c.sumsAt(tokens)
	each := memory.Bytes(tokens / c.Seq * c.chunks() * c.Heads)
	if !c.tensor() {
		return n + 12*each + 8*memory.Bytes(tokens*c.Groups*c.State)
	}
	strips, tiles := each*memory.Bytes(c.strips()), memory.Bytes(runsOf(c.State, 64))
	runs := memory.Bytes(tokens / c.Seq * c.chunks() * c.Groups * runsOf(c.Heads/c.Groups*c.strips(), tensorGradRun))
	return n + (12*each+15)/16*16 + 4*((2*tiles+3)*tensorChunk+8*tiles)*strips + 4*tensorChunk*(2*64*tiles+tensorChunk)*runs
}

// sumsAt returns where the scratch memory has the sums for parameters, behind the gradients
// of States.
func (c Scan) sumsAt(tokens int) memory.Bytes { return (c.StateBytes(tokens) + 15) / 16 * 16 }

// tiles returns how many squares of 64 a head's state consists of. A block of a GPU
// computes one at a time.
func (c Scan) tiles() int { return runsOf(c.HeadDim, 64) * runsOf(c.State, 64) }

// RecurGrad issues the backward pass. Launches have blocks as those of [Recur]; the last
// has a block for each head:
//
//	stowage_nn_scan_grad_state(Scratch, XBC, DT, ALog, DTBias, shape..., DY, pitch of DY)
//	stowage_nn_scan_grad(Scratch, XBC, DT, ALog, D, DTBias, States, shape..., DY, DXBC, DDT, pitches)
//	stowage_nn_scan_grad_sum(DALog, DD, DDTBias, sums, sequences x chunks, Heads, type)
//
// Pitches are those of DY, DXBC and DDT, 21 bits each, the first one lowest. The
// second launch writes to Scratch what each chunk adds to the gradients of ALog, D and
// DTBias, in this order; the last one takes the sums, chunk after chunk.
//
// On tensor cores the first launch also gets States, and others come before and behind the
// second one. On the CPU that one does all the work.
//
//	stowage_nn_scan_tensor_grad_outside(arguments of the first launch)
//	stowage_nn_scan_tensor_grad_pairs(arguments of the first launch)
//	stowage_nn_scan_tensor_grad_steps(Scratch, DT, ALog, DTBias, shape..., DDT, pitch of DDT)
//	stowage_nn_scan_tensor_grad_mix(Scratch, XBC, DXBC, shape..., pitch of DXBC)
func RecurGrad(s device.Stream, c ScanGrad) {
	c.checkGrad()
	batch, tokens := c.batch(), c.XBC.Rows
	dy := c.DY.used("the gradient of the scan's output")
	back := func(l device.Launch, to device.Range) {
		l.Write(to)
		c.inputs(&l, c.ALog, c.DTBias)
		c.addShape(&l)
		l.Read(dy)
		l.Arg(uint64(c.DY.pitch()))
		if c.tensor() {
			c.addStates(&l)
		}
		s.Launch(l)
	}
	scratch := c.Scratch.Slice(0, c.ScratchBytes(tokens))
	if c.chunks() > 1 {
		to := scratch
		if !c.tensor() {
			to = scratch.Slice(0, c.StateBytes(tokens))
		}
		back(c.stateLaunch(&scanGradStateKernel, &tensorGradStateKernel), to)
	}
	l := device.NewLaunch(&scanGradKernel, batch*c.chunks()*c.Groups, scanThreads)
	if c.tensor() {
		l = device.NewLaunch(&tensorOutsideKernel, 2*runsOf(c.State, 64)*c.runs(tensorGradRun), scanTensorThreads)
		l.Shared = tensorOutsideShared
		back(l, scratch)
		l = c.runLaunch(&tensorPairsKernel, &tensorPairsWideKernel, tensorGradRun)
		l.Shared = tensorPairsShared
		back(l, scratch)
		l = c.runLaunch(&tensorGradKernel, &tensorGradWideKernel, tensorRun)
	}
	l.Write(scratch)
	c.inputs(&l, c.ALog, c.D, c.DTBias)
	c.addStates(&l)
	c.addShape(&l)
	l.Read(dy)
	l.Write(c.DXBC.used("the gradient of the scan's input"))
	l.Write(c.DDT.used("the gradient of the scan's steps"))
	l.Arg(uint64(c.DY.pitch()) | uint64(c.DXBC.pitch())<<21 | uint64(c.DDT.pitch())<<42)
	s.Launch(l)
	if c.tensor() {
		s.Launch(c.stepsLaunch(scratch))
		s.Launch(c.mixLaunch(scratch))
	}

	l = device.NewLaunch(&scanGradSumKernel, c.Heads, scanThreads)
	if c.tensor() {
		l = device.NewLaunch(&tensorGradSumKernel, c.Heads, scanTensorThreads)
	}
	for _, m := range []Matrix{c.DALog, c.DD, c.DDTBias} {
		l.Write(m.used("a gradient of the scan's parameters"))
	}
	l.Read(c.Scratch.Slice(c.sumsAt(tokens), 12*memory.Bytes(batch*c.chunks()*c.Heads)))
	l.Arg(uint64(batch * c.chunks()))
	l.Arg(uint64(c.Heads))
	l.Arg(uint64(c.DALog.Type))
	s.Launch(l)
}

// stepsLaunch returns the launch that computes the gradients of steps, with a warp for each
// head of a chunk.
func (c ScanGrad) stepsLaunch(scratch device.Range) device.Launch {
	l := device.NewLaunch(&tensorStepsKernel, runsOf(c.batch()*c.chunks()*c.Heads, scanTensorThreads/32), scanTensorThreads)
	l.Write(scratch)
	l.Read(c.DT.used("the scan's steps"))
	l.Read(c.ALog.used("a parameter of the scan"))
	l.Read(c.DTBias.used("a parameter of the scan"))
	c.addShape(&l)
	l.Write(c.DDT.used("the gradient of the scan's steps"))
	l.Arg(uint64(c.DDT.pitch()))
	return l
}

// mixLaunch returns the launch that completes the gradients of B and C.
func (c ScanGrad) mixLaunch(scratch device.Range) device.Launch {
	l := device.NewLaunch(&tensorMixKernel, c.batch()*c.chunks()*c.Groups*runsOf(c.State, 64), scanTensorThreads)
	l.Shared = tensorMixShared
	l.Read(scratch)
	l.Read(c.XBC.used("the scan's input"))
	l.Write(c.DXBC.used("the gradient of the scan's input"))
	c.addShape(&l)
	l.Arg(uint64(c.DXBC.pitch()))
	return l
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
	if n := c.StateBytes(c.XBC.Rows); n > 0 && (c.States.Len != n || c.States.Addr()%uintptr(c.states().Size()) != 0) {
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
	if n := c.ScratchBytes(c.XBC.Rows); c.Scratch.Len < n || c.Scratch.Addr()%16 != 0 {
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
