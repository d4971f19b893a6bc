// This file owns chunks: the part of a model that one stage of a pipeline has, and its
// passes.

package layer

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/memory"
)

// part is a mixer or a feed-forward part, with its norm and its residual connection. The
// caller frees its input and its output.
type part interface {
	Forward(p *Pass, x Mat) Mat
	Backward(p *Pass, dy Mat) Mat
}

// block is one layer: a mixer, a feed-forward part, or both.
type block struct {
	unit  int // of the chunk
	parts []part
}

// Forward returns the output of the layer.
func (b *block) Forward(p *Pass, x Mat) Mat {
	in := x
	for _, q := range b.parts {
		y := q.Forward(p, in)
		if in != x {
			in.Free()
		}
		in = y
	}
	return in
}

// Backward returns the gradient of its input.
func (b *block) Backward(p *Pass, dy Mat) Mat {
	in := dy
	for i := len(b.parts) - 1; i >= 0; i-- {
		dx := b.parts[i].Backward(p, in)
		if in != dy {
			in.Free()
		}
		in = dx
	}
	return in
}

// Store has the parameters of a rank. Use binds units until done is called: their
// parameters, and also their gradients if the pass makes gradients.
type Store interface {
	Use(grads bool, units ...*Unit) (done func(), err error)
}

// Chunk is the part of a model that a stage has.
type Chunk struct {
	Units  []*Unit
	Hidden int

	embed  *embedding
	blocks []*block
	last   *output
	heads  []*further
	// These are the units of the ends: the embedding, the output layer, and each further
	// head.
	first, final []*Unit
	further      [][]*Unit
	sums         Sums
}

// Sums is where losses are added up in fp32: the first for the next token, then one for
// each further head.
type Sums struct{ device.Range }

func (s Sums) at(i int) device.Range { return s.Slice(memory.Bytes(4*i), 4) }

// First reports whether the chunk begins with the embedding.
func (c *Chunk) First() bool { return c.embed != nil }

// Last reports whether the chunk ends with the loss.
func (c *Chunk) Last() bool { return c.last != nil }

// withParams runs work with parameters.
func withParams(s Store, grads bool, units []*Unit, work func()) {
	done, err := s.Use(grads, units...)
	must(err)
	work()
	done()
}

// passOf returns the pass of a layer.
func passOf(p Pass, layer int) *Pass {
	p.Layer = layer
	return &p
}

// headLayer returns the number of the first layer of a further headLayer. These layers follow the
// chunk's own, and the output layer follows all of them.
func (c *Chunk) headLayer(k int) int {
	n := len(c.blocks)
	for _, f := range c.heads[:k] {
		n += len(f.blocks)
	}
	return n
}

// Forward runs the chunk over a microbatch. The first chunk reads tokens, the others the
// output of the chunk before, which the caller keeps. The last chunk has no output.
func (c *Chunk) Forward(p Pass, s Store, tokens Tokens, x Mat) (y Mat) {
	in := x
	if c.embed != nil {
		withParams(s, false, c.first, func() { in = c.embed.forward(passOf(p, 0), tokens.row(0)) })
	}
	for i, b := range c.blocks {
		var out Mat
		withParams(s, false, []*Unit{c.Units[b.unit]}, func() { out = b.Forward(passOf(p, i), in) })
		if i > 0 || c.embed != nil {
			in.Free()
		}
		in = out
	}
	if c.last == nil {
		return in
	}
	withParams(s, !p.Evaluate, c.final, func() { c.last.forward(passOf(p, c.headLayer(len(c.heads))), in, tokens.row(1), c.sums.at(0)) })
	for k, f := range c.heads {
		q := passOf(p, c.headLayer(k))
		var out Mat
		withParams(s, !p.Evaluate, c.further[k], func() {
			out = f.forward(q, tokens.row(1+k), in)
			f.output.forward(q, out, tokens.row(2+k), c.sums.at(1+k))
		})
		in.Free()
		in = out
	}
	in.Free()
	return Mat{}
}

// Backward runs the backward pass. The last chunk needs no gradient. The others read the
// gradient of their output, which the caller keeps. The first chunk returns nothing.
func (c *Chunk) Backward(p Pass, s Store, tokens Tokens, dy Mat) (dx Mat) {
	p.Backward = true
	in := dy
	own := false // in is ours to free
	if c.last != nil {
		in, own = c.backwardHeads(p, s, tokens), true
	}
	for i := len(c.blocks) - 1; i >= 0; i-- {
		b := c.blocks[i]
		var out Mat
		withParams(s, true, []*Unit{c.Units[b.unit]}, func() { out = b.Backward(passOf(p, i), in) })
		if own {
			in.Free()
		}
		in, own = out, true
	}
	if c.embed == nil {
		return in
	}
	withParams(s, true, c.first, func() { c.embed.backward(passOf(p, 0), tokens.row(0), in.Matrix) })
	if own {
		in.Free()
	}
	return Mat{}
}

// backwardHeads returns the gradient of the hidden states that the output layer and the
// further heads read.
func (c *Chunk) backwardHeads(p Pass, s Store, tokens Tokens) (dx Mat) {
	var plus nn.Matrix
	for k := len(c.heads) - 1; k >= 0; k-- {
		f, q := c.heads[k], passOf(p, c.headLayer(k))
		var out Mat
		withParams(s, true, c.further[k], func() {
			d := f.output.backward(q, c.Hidden, plus)
			if plus.Rows > 0 {
				dx.Free()
			}
			out = f.backward(q, tokens.row(1+k), d)
		})
		dx, plus = out, out.Matrix
	}
	var out Mat
	withParams(s, true, c.final, func() { out = c.last.backward(passOf(p, c.headLayer(len(c.heads))), c.Hidden, plus) })
	if plus.Rows > 0 {
		dx.Free()
	}
	return out
}
