// This file owns a rank's step: its passes and the update after them. It also owns
// evaluation, which has forward passes only.

package train

import (
	"errors"
	"math"

	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train/internal/data"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// key returns the key of training steps.
func (r *rank) key() memory.Key {
	return memory.Key{Phase: memory.Train, Microbatches: r.cfg.Batch.Microbatches}
}

// train runs one step on this rank.
func (r *rank) train(step int) error {
	r.upload(r.t.loader, step)
	if r.cfg.forecast {
		r.world.Barrier(r.s) // the clocks of ranks of a stage show the same time in each step
	}
	if err := r.run(); err != nil {
		return err
	}
	r.optim.update(step)
	r.rebalance()
	return r.world.Err()
}

// run computes the gradients of all ranks.
func (r *rank) run() error {
	if err := r.rt.Step(r.key(), func(s *engine.Step) error { return r.issue(s, false) }); err != nil {
		return err
	}
	return r.world.Err()
}

// evaluate returns the losses of one batch of the held-out text. It saves no tensors and
// changes nothing that training depends on.
func (r *rank) evaluate(batch int) (f figures, err error) {
	r.upload(r.t.held, batch)
	k := r.key()
	k.Phase = memory.Evaluate
	if err := r.rt.Step(k, func(s *engine.Step) error { return r.issue(s, true) }); err != nil {
		return f, err
	}
	if err := r.world.Err(); err != nil {
		return f, err
	}
	return r.read()
}

// upload copies a step's tokens to the device if this stage needs them.
func (r *rank) upload(from *data.Loader, step int) {
	c := r.cfg
	if r.pp != 0 && r.pp != c.Layout.PP-1 {
		return
	}
	n, ahead := c.Batch.Micro*c.Batch.Seq, layer.Ahead(c.Model)
	all := make([]uint32, c.Batch.Microbatches*(1+ahead)*n)
	for m := range c.Batch.Microbatches {
		at := all[m*(1+ahead)*n:]
		from.Batch(step, r.dp, m, at[:n], at[n:(1+ahead)*n])
	}
	r.s.Upload(r.tokens.All(), bytesOf(all))
}

// microbatch returns the tokens of a microbatch.
func (r *rank) microbatch(m int) layer.Tokens {
	n := r.cfg.Batch.Micro * r.cfg.Batch.Seq
	size := memory.Bytes(4 * n * (1 + layer.Ahead(r.cfg.Model)))
	return layer.Tokens{Range: r.tokens.Slice(memory.Bytes(m)*size, size), Count: n}
}

// issue issues the work of a step, or only its forward passes if evaluate is set. Ranks
// then leave out the same transfers, so those that are left keep their shared order.
func (r *rank) issue(s *engine.Step, evaluate bool) error {
	return layer.Guard(func() {
		r.s.Fill(r.figures, 0)
		for _, b := range r.balances {
			if !evaluate {
				r.s.Fill(b.Load, 0)
			}
		}
		r.store.begin(r.s, evaluate)
		w := &work{rank: r, step: s, evaluate: evaluate, in: map[schedule.Pass]layer.Mat{}, out: map[schedule.Pass]layer.Mat{}}
		for _, a := range r.program {
			if !evaluate || !a.pass.Backward {
				w.do(a)
			}
		}
		layer.Must(r.store.end())
		if !evaluate {
			r.store.reduce(r.s)
		}
	})
}

// work is a step in progress, with received inputs and outputs that are not sent yet.
type work struct {
	*rank
	step     *engine.Step
	evaluate bool
	in, out  map[schedule.Pass]layer.Mat
}

func (w *work) pass(p schedule.Pass) layer.Pass {
	return layer.Pass{Step: w.step, S: w.s, Chunk: p.Chunk, Microbatch: p.Microbatch, Evaluate: w.evaluate, Shape: w.env.Shape}
}

func (w *work) do(a action) {
	switch a.verb {
	case receive:
		p := w.pass(a.pass)
		x := p.New(p.Tokens(), w.cfg.Model.Hidden)
		w.world.Recv(w.s, x.Range, a.peer*w.cfg.Layout.DP+w.dp)
		w.in[a.pass] = x
	case send:
		x := w.out[a.pass]
		delete(w.out, a.pass)
		w.world.Send(w.s, x.Range, a.peer*w.cfg.Layout.DP+w.dp)
		x.Free()
	default:
		w.compute(a.pass)
	}
}

// compute runs a pass of a chunk.
func (w *work) compute(p schedule.Pass) {
	chunk, tokens := w.chunks[p.Chunk], w.microbatch(p.Microbatch)
	in, came := w.in[p]
	delete(w.in, p)
	var out layer.Mat
	last := chunk.Last()
	if p.Backward {
		out, last = chunk.Backward(w.pass(p), w.store, tokens, in), chunk.First()
	} else {
		out = chunk.Forward(w.pass(p), w.store, tokens, in)
	}
	if came {
		in.Free()
	}
	if last {
		return
	}
	w.out[p] = out
}

// rebalance updates the routers' biases with the loads of all replicas.
func (r *rank) rebalance() {
	for _, b := range r.balances {
		if b.Bias.Buf == nil {
			continue
		}
		if r.replicas != nil {
			r.replicas.AllGather(r.s, b.all, b.Load)
		}
		nn.UpdateBias(r.s, nn.Rebalance{Bias: b.Bias, Load: b.all, Experts: b.experts, Ranks: int(b.all.Len / b.Load.Len), Rate: r.cfg.Settings.Routing.BiasRate})
	}
}

// figures holds a step's results on one rank: the losses of the next token and of
// multi-token-prediction heads, the routers' auxiliary loss, and the norm of all
// gradients.
type figures struct {
	Heads     []float64
	Aux, Norm float64
}

// read reads the figures of the last step from the device.
func (r *rank) read() (f figures, err error) {
	x := make([]float32, r.figures.Len/4)
	if err := r.s.Download(bytesOf(x), r.figures); err != nil {
		return f, err
	}
	n := len(x) - 2
	for _, v := range x[:n] {
		f.Heads = append(f.Heads, float64(v))
	}
	f.Aux, f.Norm = float64(x[n]), math.Sqrt(float64(x[n+1]))
	if math.IsNaN(f.Heads[0]) {
		return f, memory.OnRank(r.index, errors.New("the loss is not a number; lower the learning rate, or use fp32"))
	}
	return f, nil
}
