// This file owns the kinds of trials of norms, rotations, activations, the embedding
// and the optimiser.

package nn

import (
	"encoding/binary"
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

// deviceCode returns all kinds of trials, by source and name.
func deviceCode() map[string]map[string]kind {
	return map[string]map[string]kind{
		"norm":           {"norm": normTrial, "norm grad": normGradTrial, "late norm grad": lateNormTrial},
		"rope":           {"rope": ropeTrial},
		"latent":         {"spread": latentTrial(SpreadLatent), "gather": latentTrial(GatherLatent)},
		"act":            {"swiglu": gateTrial, "swiglu grad": gateGradTrial, "add": addTrial, "gate rows": rowGateTrial, "gate rows grad": rowGateGradTrial},
		"embed":          {"embed": embedTrial, "embed grad": embedGradTrial},
		"loss":           {"cross entropy": lossTrial, "kept cross entropy": keptLossTrial, "total": totalTrial},
		"optim":          {"adamw": adamTrial, "squares": squaresTrial},
		"route":          {"route": routeTrial, "route grad": routeGradTrial, "rebalance": rebalanceTrial},
		"scan":           {"scan": scanTrial},
		"conv":           {"conv": convTrial, "whole conv": wholeConvTrial, "conv grad": convGradTrial, "whole conv grad": wholeConvGradTrial},
		"gatednorm":      {"gated norm": gatedTrial, "gated norm grad": gatedGradTrial},
		"scangrad":       {"scan grad": scanGradTrial},
		"scantensor":     {"scan": scanTensorTrial},
		"scangradtensor": {"scan grad": scanGradTensorTrial},
		"rows":           {"sort": sortTrial, "regroup": regroupTrial, "take": takeTrial, "spread": spreadTrial, "combine": combineTrial},
		"gemmflat":       {"flat": flatTrial},
	}
}

// chains returns the kinds whose kernels come from several sources.
func chains() map[string]kind {
	return map[string]kind{"add squares": addSquaresTrial, "route loss": routeLossTrial}
}

// cols draws a number of columns: mostly few, sometimes more than a warp processes, and
// sometimes more than a block processes at once.
func (x *trial) cols() int {
	switch x.IntN(6) {
	case 0:
		return 1024 + x.IntN(1500)
	case 1:
		return 8 * (1 + x.IntN(130))
	}
	return 1 + x.IntN(300)
}

// norms draws the shape of norms: the columns of a norm, and how many norms a row has.
func (x *trial) norms() (rows, cols, width int) {
	width = x.cols()
	runs := 1
	if width < 300 {
		runs = 1 + x.IntN(4)
	}
	rows = x.atMost(7, 300)
	if x.large && x.IntN(4) == 0 {
		rows, width, runs = 1+rows/8, 4096+8*x.IntN(1500), 1
	}
	switch x.IntN(6) {
	case 0:
		// Some parts have more norms than a block has teams.
		rows, width, runs = 600+x.IntN(400), 1+x.IntN(20), 4
	case 1:
		// Heads, of which several share a warp.
		rows, width, runs = min(20*rows, 2000), 8*(1+x.IntN(32)), 1+x.IntN(5)
	}
	return rows, width * runs, width
}

// even places a matrix whose rows begin at multiples of 16 bytes.
func (x *trial) even(t kernels.Number, rows, cols int) Matrix {
	pitch := cols + 8*x.IntN(2)
	b := make([]byte, 0, rows*pitch*int(t.Size()))
	for range rows * pitch {
		v := math.Float32bits(float32(x.NormFloat64()))
		if t == kernels.F32 {
			b = binary.LittleEndian.AppendUint32(b, v)
		} else {
			b = binary.LittleEndian.AppendUint16(b, uint16(v>>16))
		}
	}
	return Matrix{Range: x.place(b, []meaning{fp32, bf16}[t], 16, 3), Type: t, Rows: rows, Cols: cols, Pitch: pitch}
}

func flatTrial(x *trial) func(s device.Stream) {
	rows, cols, k := x.atMost(70, 2000), 8*x.atMost(70, 200), 4*x.atMost(8, 8)
	p := Product{A: x.even(kernels.F32, rows, k), B: x.even(kernels.BF16, k, cols), C: x.even(kernels.BF16, rows, cols)}
	switch x.IntN(3) {
	case 0:
		p.Plus = p.C
	case 1:
		p.Plus = x.even(kernels.BF16, rows, cols)
	}
	return func(s device.Stream) { Gemm(s, p) }
}

// operands returns a function that places the operands of norms. Those of half of the trials
// have a kernel for vectors: they are bf16 and even.
func (x *trial) operands(width int) func(rows, cols int) Matrix {
	if width%8 != 0 || x.maybe() {
		return x.any
	}
	return func(rows, cols int) Matrix { return x.even(kernels.BF16, rows, cols) }
}

func normTrial(x *trial) func(s device.Stream) {
	rows, cols, width := x.norms()
	place := x.operands(width)
	n := Norm{X: place(rows, cols), W: place(1, width), Epsilon: 1e-5}
	n.Y = place(rows, cols)
	if x.maybe() {
		n.Y = n.X
	}
	return func(s device.Stream) { RMSNorm(s, n) }
}

func normGradTrial(x *trial) func(s device.Stream) {
	rows, cols, width := x.norms()
	return x.normGrad(rows, cols, width, x.operands(width))
}

// normGrad draws the rest of the gradient of a norm whose operands are placed so.
func (x *trial) normGrad(rows, cols, width int, place func(rows, cols int) Matrix) func(s device.Stream) {
	n := NormGrad{X: place(rows, cols), W: place(1, width), DY: place(rows, cols), DW: x.any(1, width), Epsilon: 1e-5}
	n.DX = place(rows, cols)
	switch x.IntN(4) {
	case 0:
		n.DX = n.DY
	case 1:
		n.Plus = n.DX
	case 2:
		n.Plus = place(rows, cols)
	}
	n.Scratch = x.waste(NormScratch(rows, width), scratch)
	return func(s device.Stream) { RMSNormGrad(s, n) }
}

// lateNormTrial draws the gradient of norms that the kernels for Hopper compute: with few rows,
// and with more of them than lie in shared memory.
func lateNormTrial(x *trial) func(s device.Stream) {
	cols := normLateCols + 8*x.IntN(300)
	if x.IntN(4) == 0 {
		cols = 4096 + 8*x.IntN(513)
	}
	rows := min(x.atMost(300, 5000), 1+4<<20/cols)
	return x.normGrad(rows, cols, cols, func(rows, cols int) Matrix { return x.even(kernels.BF16, rows, cols) })
}

// ropeTrial draws rotations. Those of half of the trials have a kernel for vectors.
func ropeTrial(x *trial) func(s device.Stream) {
	heads, half, before, behind, seq := x.atMost(3, 16), x.atMost(40, 64), x.IntN(9), x.IntN(5), x.atMost(9, 100)
	rows := x.atMost(20, 300)
	vectors := x.maybe()
	if vectors {
		half, before, behind = 8*(1+half/16), before/8*8, behind/4*8
	}
	head := before + 2*half + behind
	r := Rotation{Heads: heads, Head: head, At: before, Width: 2 * half, Seq: seq, Inverse: x.maybe()}
	if vectors {
		r.X, r.Table = x.even(kernels.BF16, rows, heads*head), x.even(kernels.F32, 1, seq*2*half).Range
	} else {
		r.X, r.Table = x.any(rows, heads*head+x.IntN(3)), x.floats(seq*2*half)
	}
	return func(s device.Stream) { Rope(s, r) }
}

func (x *trial) rowWeights(rows int) device.Range {
	if x.maybe() {
		return device.Range{}
	}
	return x.floats(rows)
}

func (x *trial) someSegments(rows int) Segments {
	if x.maybe() {
		return Segments{}
	}
	return x.segments(rows)
}

func gateTrial(x *trial) func(s device.Stream) {
	rows, cols := x.atMost(30, 500), x.cols()
	g := Gate{Y: x.any(rows, cols), X: x.any(rows, 2*cols), Weight: x.rowWeights(rows), Seg: x.someSegments(rows)}
	return func(s device.Stream) { SwiGLU(s, g) }
}

func gateGradTrial(x *trial) func(s device.Stream) {
	rows, cols := x.atMost(30, 500), x.cols()
	g := GateGrad{X: x.any(rows, 2*cols), DY: x.any(rows, cols), Weight: x.rowWeights(rows), DWeight: x.rowWeights(rows), Seg: x.someSegments(rows)}
	g.DX = x.inPlace(g.X, x.number())
	if x.maybe() {
		g.Y = x.inPlace(g.DY, x.number())
	}
	return func(s device.Stream) { SwiGLUGrad(s, g) }
}

func addTrial(x *trial) func(s device.Stream) {
	rows, cols := x.atMost(30, 500), x.cols()
	a := Sum{A: x.any(rows, cols), B: x.any(rows, cols)}
	a.Y = x.inPlace(a.A, x.number())
	return func(s device.Stream) { Add(s, a) }
}

func rowGateTrial(x *trial) func(s device.Stream) {
	rows, cols := x.atMost(30, 500), x.cols()
	g := RowGate{X: x.any(rows, cols), Logit: x.matrix(kernels.F32, rows, 1)}
	g.Y = x.inPlace(g.X, x.number())
	return func(s device.Stream) { GateRows(s, g) }
}

func rowGateGradTrial(x *trial) func(s device.Stream) {
	rows, cols := x.atMost(30, 500), x.cols()
	g := RowGateGrad{X: x.any(rows, cols), DY: x.any(rows, cols), Logit: x.matrix(kernels.F32, rows, 1), DLogit: x.matrix(kernels.F32, rows, 1)}
	g.DX = x.inPlace(g.DY, x.number())
	return func(s device.Stream) { GateRowsGrad(s, g) }
}

// ids draws rows of a table. Some of them are common.
func (x *trial) ids(n, vocab int) device.Range {
	return x.words(n, func(int) uint32 { return uint32(x.IntN(1 + x.IntN(vocab))) })
}

func embedTrial(x *trial) func(s device.Stream) {
	rows, cols, vocab := x.atMost(30, 1000), x.cols(), x.atMost(50, 700)
	l := Lookup{Y: x.any(rows, cols), Table: x.any(vocab, cols), IDs: x.ids(rows, vocab)}
	return func(s device.Stream) { Embed(s, l) }
}

func embedGradTrial(x *trial) func(s device.Stream) {
	rows, cols, vocab := x.atMost(40, 5000), 1+x.IntN(60), x.atMost(700, 3000)
	switch x.IntN(4) {
	case 0:
		rows, cols = 2000+x.IntN(500), 1+x.IntN(3)
	case 1:
		rows, cols = x.atMost(30, 2000), 2000+x.IntN(200)
		vocab = 1 + x.IntN(30)
	}
	l := LookupGrad{DTable: x.any(vocab, cols), DY: x.any(rows, cols), IDs: x.ids(rows, vocab)}
	l.Scratch = x.waste(EmbedScratch(rows, vocab), exact)
	return func(s device.Stream) { EmbedGrad(s, l) }
}

// keptLossTrial draws a loss that the kernels for Hopper compute, with rows for every number
// of blocks that share one.
func keptLossTrial(x *trial) func(s device.Stream) {
	t := x.number()
	n := 16 / int(t.Size())
	f := lossForms[t][x.IntN(len(lossForms[t]))]
	cols := n * (1 + x.IntN(f.threads*f.keep*f.cluster))
	rows := min(x.atMost(4, 300), 1+4<<20/cols)
	l := Loss{Losses: x.floats(rows), Scale: 0.25}
	switch x.IntN(4) {
	case 0:
		l.Logits = x.even(t, rows, cols)
	case 1:
		l.Logits = x.even(t, rows, cols)
		l.Grad = l.Logits
		if t == kernels.F32 {
			l.Grad = l.Logits.Half()
			x.halves(l.Logits)
		}
	case 2:
		l.Logits = x.even(t, rows, cols)
		l.Grad = l.Logits
	case 3:
		l.Logits, l.Grad = x.even(t, rows, cols), x.even(x.number(), rows, cols)
	}
	l.Targets = x.targets(rows, cols)
	return func(s device.Stream) { CrossEntropy(s, l) }
}

// targets places targets of rows, some of which are None.
func (x *trial) targets(rows, cols int) device.Range {
	return x.words(rows, func(int) uint32 {
		if x.IntN(4) == 0 {
			return None
		}
		return uint32(x.IntN(cols))
	})
}

func lossTrial(x *trial) func(s device.Stream) {
	rows, cols := x.atMost(5, 100), x.cols()
	if x.large && x.maybe() || x.IntN(8) == 0 {
		// Some rows are longer than a block keeps.
		cols = 8000 + 4*x.IntN(8000)
		rows = min(rows, 300)
	}
	l := Loss{Logits: x.any(rows, cols), Losses: x.floats(rows), Scale: 0.25}
	switch x.IntN(4) {
	case 0:
	case 1:
		if l.Logits.Type == kernels.F32 {
			l.Logits = x.matrix(kernels.F32, rows, cols)
			l.Grad = l.Logits.Half()
			x.halves(l.Logits)
		}
	case 2:
		l.Grad = x.any(rows, cols)
	case 3:
		l.Grad = l.Logits
	}
	l.Targets = x.targets(rows, cols)
	return func(s device.Stream) { CrossEntropy(s, l) }
}

// halves marks the second half of each row of the last matrix, which is fp32, as bf16, and
// the rest as exact.
func (x *trial) halves(m Matrix) {
	x.marks = x.marks[:len(x.marks)-1]
	half := 2 * m.Cols
	for r := range m.Rows {
		at := int(m.Off) + 4*r*m.pitch()
		x.marks = append(x.marks, mark{exact, at, at + half}, mark{bf16, at + half, at + 2*half})
	}
}

func totalTrial(x *trial) func(s device.Stream) {
	t := Total{Sum: x.floats(1), X: x.floats(x.atMost(5000, 100000)), Factor: 0.5}
	x.positive(t.X)
	return func(s device.Stream) { AddUp(s, t) }
}

// hyper places the settings of the optimiser.
func (x *trial) hyper(clip float32) device.Range {
	h := Hyper{LR: 1e-2, Beta1: 0.9, Beta2: 0.95, Epsilon: 1e-8, Decay: 0.1, Correct1: 3, Correct2: 5, Clip: clip}
	return x.place(h.Encode(), exact, 4, 3)
}

func adamTrial(x *trial) func(s device.Stream) {
	n := x.atMost(5000, 300000)
	a := Adam{W: x.floats(n), M: x.floats(n), GType: x.number(), Hyper: x.hyper(float32(x.IntN(3))), NoDecay: x.maybe()}
	a.G = x.numbers(a.GType, n, 1)
	a.V = x.floats(n)
	x.positive(a.V)
	if x.maybe() {
		a.ParamType = x.number()
		a.Param = x.numbers(a.ParamType, n, 1)
	}
	if x.maybe() {
		a.Norm = x.place(binary.LittleEndian.AppendUint32(nil, math.Float32bits(4)), exact, 4, 3)
	}
	return func(s device.Stream) { AdamW(s, a) }
}

func (x *trial) squares() Squares {
	n := x.atMost(60000, 3000000)
	q := Squares{Sum: x.floats(1), Type: x.number(), Scratch: x.floats(int(SquaresScratch(n) / 4))}
	q.X = x.numbers(q.Type, n, 1)
	return q
}

func squaresTrial(x *trial) func(s device.Stream) {
	q := x.squares()
	return func(s device.Stream) { s.Launch(squaresLaunch(q)) }
}

func addSquaresTrial(x *trial) func(s device.Stream) {
	q := x.squares()
	return func(s device.Stream) { AddSquares(s, q) }
}
