// This file owns the optimiser: the norm of all gradients and the update of weights.

package train

import (
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// optimiser runs AdamW on one rank.
type optimiser struct {
	r       *rank
	mem     *device.Buffer // hyper and scratch
	hyper   device.Range
	norm    device.Range
	scratch device.Range
	runs    []run
}

func newOptimiser(r *rank) (*optimiser, error) {
	o := &optimiser{r: r, runs: r.store.runs()}
	scratch := nn.SquaresScratch(r.store.longest())
	var err error
	if o.mem, err = r.dev.Alloc(memory.Device, 256+scratch, "optimiser"); err != nil {
		return nil, err
	}
	o.hyper, o.norm, o.scratch = o.mem.Slice(0, nn.HyperBytes), r.sums(layer.Ahead(r.cfg.Model)+1, 1), o.mem.Slice(256, scratch)
	return o, nil
}

// update applies one step of AdamW to all weights.
func (o *optimiser) update(step int) {
	c, s := o.r.cfg.Optim, o.r.s
	t := float64(step + 1)
	s.Upload(o.hyper, nn.Hyper{
		LR: float32(c.rate(step)), Beta1: float32(c.Beta1), Beta2: float32(c.Beta2), Epsilon: float32(c.Epsilon), Decay: float32(c.WeightDecay),
		Correct1: float32(1 / (1 - math.Pow(c.Beta1, t))), Correct2: float32(1 / (1 - math.Pow(c.Beta2, t))), Clip: float32(c.Clip),
	}.Encode())
	s.Fill(o.norm, 0)
	for _, x := range o.runs {
		if x.counted {
			nn.AddSquares(s, nn.Squares{Sum: o.norm, X: x.g, Type: x.gtype, Scratch: o.scratch})
		}
	}
	if o.r.world.Size() > 1 {
		o.r.world.AllReduce(s, o.norm, o.norm, comm.F32, comm.Sum)
	}
	for _, x := range o.runs {
		nn.AdamW(s, nn.Adam{
			W: x.w, M: x.m, V: x.v, G: x.g, GType: x.gtype, Param: x.param, ParamType: x.ptype,
			Hyper: o.hyper, Norm: o.norm, NoDecay: x.noDecay,
		})
	}
	o.r.store.cast(s)
}

func (o *optimiser) close() { o.r.s.Free(o.mem) }
