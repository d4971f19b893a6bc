// This file owns both ends of a model: the embedding, the output layer with the loss,
// and the heads that predict further tokens.

package layer

import (
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/memory"
)

// Tokens are the tokens of one microbatch on the device: uint32 [1+ahead][tokens]. Row 0 is
// the input of the model, and row k is what comes k tokens later.
type Tokens struct {
	device.Range
	Count int // tokens of a row
}

// row returns the tokens that come k later.
func (t Tokens) row(k int) device.Range {
	n := memory.Bytes(4 * t.Count)
	return t.Range.Slice(memory.Bytes(k)*n, n)
}

// embedding turns tokens into vectors.
type embedding struct{ table weight }

func (e embedding) forward(p *Pass, ids device.Range) Mat {
	table := e.table.w()
	x := p.New(p.Tokens(), table.Cols)
	nn.Embed(p.S, nn.Lookup{Y: x.Matrix, Table: table, IDs: ids})
	return x
}

func (e embedding) backward(p *Pass, ids device.Range, dx nn.Matrix) {
	table := e.table.dw()
	scratch := p.bytes(nn.EmbedScratch(dx.Rows, table.Rows))
	nn.EmbedGrad(p.S, nn.LookupGrad{DTable: table, DY: dx, IDs: ids, Scratch: scratch.Range()})
	scratch.Free()
}

// output is the last norm, the output layer and the loss. Logits are as wide as the
// vocabulary, so they are computed for a few rows at a time. They are replaced by their
// gradient, which gives the gradients of the weights and of the norm's output at once. So
// the forward pass does this part of the backward pass. It saves, as output_layer, its
// input and the gradient of norm(x).
type output struct {
	norm   norm
	logits linear
	vocab  int
	factor float32 // of the loss
	// The memory of logits, and of their gradients in bf16, that exist at once.
	logitsRoom, gradientsRoom memory.Bytes
}

func newOutput(n norm, logits linear, vocab int, factor float32) output {
	return output{n, logits, vocab, factor, mostLogits, mostGradients}
}

// Fewer rows at a time make products slower. On an H200, 1,024 rows of logits of a
// vocabulary of 32,000 are enough. The gradient of the weights is read and written once for
// all rows whose gradients exist at once, so there are more of those.
const (
	mostLogits    = 128 * memory.MiB
	mostGradients = 256 * memory.MiB
)

// vector is the number of neighbours that fast products store at once.
const vector = 8

// cols returns the columns of logits: the vocabulary, and what a last vector takes more.
func (o output) cols() int { return (o.vocab + vector - 1) / vector * vector }

// rows returns how many of some rows are computed at a time within memory, in a format.
func (o output) rows(all int, most memory.Bytes, n kernels.Number) int {
	return min(all, max(64, int(most/(n.Size()*memory.Bytes(o.cols())))/64*64))
}

// forward adds the loss to a sum.
func (o output) forward(p *Pass, x Mat, targets, sum device.Range) {
	t := x.Rows
	xn := o.norm.forward(p, x.Matrix)
	dxn, losses := p.New(t, x.Cols), p.words(t)
	most := o.rows(t, o.logitsRoom, kernels.F32)
	if most < t && p.Number != kernels.F32 && !p.Evaluate {
		most = o.rows(t, o.gradientsRoom, p.Number)
	}
	for at := 0; at < t; at += most {
		n := min(most, t-at)
		o.part(p, dxn.Part(at, n), xn.Part(at, n), words(targets, at, n), words(losses.Range(), at, n))
	}
	nn.AddUp(p.S, nn.Total{Sum: sum, X: losses.Range(), Factor: p.Scale})
	losses.Free()
	xn.Free()
	p.save("output_layer", x.t, dxn.t)
	dxn.Free()
}

// words returns n words of a range, beginning with word at.
func words(r device.Range, at, n int) device.Range {
	return r.Slice(memory.Bytes(4*at), memory.Bytes(4*n))
}

// part computes the loss and the gradients of some rows. Logits are fp32, and their gradient
// has the format of activations, because products are fast in one format only. It lies in
// the memory of the logits if these are of all the rows.
func (o output) part(p *Pass, dxn, xn nn.Matrix, targets, losses device.Range) {
	n := o.rows(xn.Rows, o.logitsRoom, kernels.F32)
	logits := p.newOf(kernels.F32, n, o.cols())
	if o.vocab < o.cols() { // no product writes the last columns: of minus infinity, exponential and gradient are zero
		kernels.Fill(p.S, logits.Range, math.Float32bits(float32(math.Inf(-1))))
	}
	grad := logits
	switch {
	case n < xn.Rows && !p.Evaluate:
		grad = p.New(xn.Rows, o.cols())
		defer grad.Free()
	case p.Number != kernels.F32:
		grad.Matrix = logits.Half()
	}
	for at := 0; at < xn.Rows; at += n {
		n := min(n, xn.Rows-at)
		some := logits.Part(0, n)
		for _, l := range o.products(some, xn.Part(at, n)) {
			nn.Gemm(p.S, l)
		}
		loss := nn.Loss{Logits: some, Targets: words(targets, at, n), Losses: words(losses, at, n), Scale: p.Scale * o.factor}
		if !p.Evaluate {
			loss.Grad = grad.Part(at, n)
		}
		nn.CrossEntropy(p.S, loss)
	}
	if !p.Evaluate {
		dy := grad.Columns(0, o.vocab)
		o.logits.addGrad(p, dy, xn)
		o.logits.backward(p, dxn, dy, nn.Matrix{})
	}
	logits.Free()
}

// products returns the products that compute logits. Columns that are no whole vector have one of their own.
func (o output) products(logits, xn nn.Matrix) (ps []nn.Product) {
	for at, w := 0, o.logits.w(); at < o.vocab; {
		n := max(o.vocab/vector*vector-at, o.vocab%vector)
		ps = append(ps, nn.Product{A: xn, B: w.Part(at, n), C: logits.Columns(at, n), TransB: true})
		at += n
	}
	return ps
}

// backward returns the gradient of its input, plus a matrix if one is given.
func (o output) backward(p *Pass, cols int, plus nn.Matrix) Mat {
	t := p.Tokens()
	g := p.load("output_layer")
	dx := p.New(t, cols)
	o.norm.backward(p, dx.Matrix, g.mat(0, p.Number, t, cols), g.mat(1, p.Number, t, cols), plus)
	g.Done()
	return dx
}

// further predicts one token further than the head before it. It reads that head's hidden
// states and the embedding of the token that it was to predict. It saves
//
//	mtp_norm  the embedding and the hidden states
//	mtp_proj  both normalised, side by side
type further struct {
	embedding    embedding
	enorm, hnorm norm
	proj         linear
	blocks       []*block
	output       output
}

// pass returns the pass of layer i of the head.
func (f *further) pass(p *Pass, i int) *Pass {
	q := *p
	q.Layer += i
	return &q
}

// forward returns its hidden states.
func (f *further) forward(p *Pass, ids device.Range, h Mat) Mat {
	t, c := h.Rows, h.Cols
	e := f.embedding.forward(p, ids)
	p.save("mtp_norm", e.t, h.t)
	var cat Mat
	p.run("mtp_proj", func(again bool) []*engine.Tensor {
		from, hidden := e.Matrix, h.Matrix
		if again {
			g := p.load("mtp_norm")
			defer g.Done()
			from, hidden = g.mat(0, p.Number, t, c), g.mat(1, p.Number, t, c)
		}
		cat = p.New(t, 2*c)
		nn.RMSNorm(p.S, nn.Norm{Y: cat.Columns(0, c), X: from, W: row(f.enorm.w()), Epsilon: f.enorm.epsilon})
		nn.RMSNorm(p.S, nn.Norm{Y: cat.Columns(c, c), X: hidden, W: row(f.hnorm.w()), Epsilon: f.hnorm.epsilon})
		return []*engine.Tensor{cat.t}
	})
	e.Free()
	x := p.New(t, c)
	f.proj.forward(p, x.Matrix, cat.Matrix, nn.Matrix{})
	cat.Free()
	for i, b := range f.blocks {
		y := b.Forward(f.pass(p, i), x)
		x.Free()
		x = y
	}
	return x
}

// backward returns the gradient of the hidden states that it read. It frees dx, the
// gradient of its own.
func (f *further) backward(p *Pass, ids device.Range, dx Mat) Mat {
	for i := len(f.blocks) - 1; i >= 0; i-- {
		d := f.blocks[i].Backward(f.pass(p, i), dx)
		dx.Free()
		dx = d
	}
	t, c := dx.Rows, dx.Cols
	g := p.load("mtp_proj")
	f.proj.addGrad(p, dx.Matrix, g.mat(0, p.Number, t, 2*c))
	g.Done()
	dcat := p.New(t, 2*c)
	f.proj.backward(p, dcat.Matrix, dx.Matrix, nn.Matrix{})
	dx.Free()
	in := p.load("mtp_norm")
	de, dh := p.New(t, c), p.New(t, c)
	f.enorm.backward(p, de.Matrix, in.mat(0, p.Number, t, c), dcat.Columns(0, c), nn.Matrix{})
	f.hnorm.backward(p, dh.Matrix, in.mat(1, p.Number, t, c), dcat.Columns(c, c), nn.Matrix{})
	in.Done()
	dcat.Free()
	f.embedding.backward(p, ids, de.Matrix)
	de.Free()
	return dh
}
