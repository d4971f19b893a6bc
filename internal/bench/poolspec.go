// This file owns how pools of sharded parameters see a model: FSDP units with their
// buckets, and the order in which a step uses them.

package bench

import (
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// PoolTypes are the data types that parameters are gathered in and gradients
// reduced in.
var PoolTypes = []bucket.Type{{Name: "bf16", Size: 2}, {Name: "fp32", Size: 4}, {Name: "fp8", Size: 1}}

// A bucket begins at a multiple of poolAlign bytes. A rank's part has a multiple of
// poolGrain elements, which is 16 bytes of bf16, as in sharded training.
const (
	poolAlign = device.Align
	poolGrain = 8
)

// PoolOptions says how models are divided and gathered.
type PoolOptions struct {
	Prefetch int // units gathered ahead, and as many gradients scattered behind
	DP       int // ranks that share the parameters
	TP, EP   int
	ETP      int // tensor parallelism of experts
	// Recompute is how many layers the backward pass recomputes together. Zero and one mean
	// the same for a pool.
	Recompute int
	FP8       bool // the matrices of linear layers are gathered in fp8
	Gradients bucket.Type
	Fallback  bucket.Fallback
}

// pooled is a model as pools see it. Layers are FSDP units. The embedding, the last norm,
// the output layer and the projections of MTP are not, as in Megatron-FSDP.
type pooled struct {
	units                   []bucket.FSDPUnit
	embedding, norm, output int // indices into units; output is the embedding if they are tied
	layers                  []int
	depths                  []depth
}

// depth is one depth of MTP: a projection around its layers.
type depth struct {
	projection int
	layers     []int
}

// poolUnits finds the units of a model.
func (o PoolOptions) poolUnits(m *model.Model) (p pooled, err error) {
	add := func(name string, loose bool, params []model.Param) int {
		buckets, e := o.buckets(params)
		if e != nil && err == nil {
			err = fmt.Errorf("%s, %s: %w", m.Name, name, e)
		}
		p.units = append(p.units, bucket.FSDPUnit{Name: name, Buckets: buckets, Loose: loose})
		return len(p.units) - 1
	}
	p.embedding = add("embedding", true, m.EmbeddingParams())
	for i, l := range m.Layers {
		p.layers = append(p.layers, add(fmt.Sprintf("layer %d", i), false, m.LayerParams(l)))
	}
	if m.MTP != nil {
		for n := range m.MTP.Depth {
			if n > 0 && m.MTP.Repeated {
				p.depths = append(p.depths, p.depths[0])
				continue
			}
			around := slices.DeleteFunc(m.MTPParams(n), func(q model.Param) bool { return strings.HasPrefix(q.Name, "mtp_model_layer.") })
			d := depth{projection: add(fmt.Sprintf("mtp %d", n), true, around)}
			for i, l := range m.MTP.Layers {
				d.layers = append(d.layers, add(fmt.Sprintf("mtp %d, layer %d", n, i), false, m.LayerParams(l)))
			}
			p.depths = append(p.depths, d)
		}
	}
	p.norm = add("final norm", true, m.FinalNormParams())
	if p.output = p.embedding; !m.Tied {
		p.output = add("output layer", true, m.OutputParams())
	}
	return p, err
}

// buckets groups parameters as Megatron-FSDP does: by data type, and with experts apart
// because they are sharded over other ranks.
func (o PoolOptions) buckets(params []model.Param) (buckets []bucket.Bucket, err error) {
	for _, p := range params {
		n, typ, name := p.Elements(), PoolTypes[0], "dense"
		switch p.Split {
		case model.Tensor:
			n = ceil(n, o.TP)
		case model.Expert:
			if name = "experts"; p.Count%o.EP != 0 {
				return nil, &memory.SettingError{Setting: "EP", Asked: fmt.Sprint(o.EP), Problem: fmt.Sprintf("does not divide %d experts", p.Count), Remedy: "choose one that does"}
			}
			n = ceil(n/int64(o.EP), o.ETP)
		}
		if o.FP8 && inFP8(p) {
			typ = PoolTypes[2]
			name += " fp8"
		}
		at := slices.IndexFunc(buckets, func(b bucket.Bucket) bool { return b.Name == name })
		if at < 0 {
			at, buckets = len(buckets), append(buckets, bucket.Bucket{Name: name, Type: typ})
		}
		buckets[at].Elements += n
	}
	return buckets, nil
}

func ceil(n int64, by int) int64 { return (n + int64(by) - 1) / int64(by) }

// inFP8 reports whether a parameter is a matrix of a linear layer. Vectors, routers, gates,
// convolutions, states and tables stay in bf16.
func inFP8(p model.Param) bool {
	if p.Cols == 1 || p.Rows == 1 {
		return false
	}
	for _, part := range []string{"router", "conv1d", "A_log", "embedding", "output_layer"} {
		if strings.Contains(p.Name, part) {
			return false
		}
	}
	return true
}

// order is an order under construction.
type order []bucket.OrderEntry

func (o *order) use(unit int, inside func()) {
	*o = append(*o, bucket.OrderEntry{Unit: unit})
	if inside != nil {
		inside()
	}
	*o = append(*o, bucket.OrderEntry{Unit: unit, Release: true})
}

func (o *order) useAll(units []int) {
	for _, u := range units {
		o.use(u, nil)
	}
}

func reversed(units []int) []int {
	units = slices.Clone(units)
	slices.Reverse(units)
	return units
}

// Weights returns the order in which a step gathers parameters, forward and then backward.
// The output layer stays gathered from its forward to its backward pass. The embedding
// needs no weights in the backward pass.
func (o PoolOptions) Weights(m *model.Model) (bucket.Spec, error) {
	p, err := o.poolUnits(m)
	if err != nil {
		return bucket.Spec{}, err
	}
	var e order
	e.use(p.embedding, nil)
	e.useAll(p.layers)
	for _, d := range p.depths {
		e.use(d.projection, func() {
			e.use(p.embedding, nil)
			e.useAll(d.layers)
		})
	}
	e.use(p.norm, nil)
	e.use(p.output, nil)
	for _, d := range slices.Backward(p.depths) {
		e.use(d.projection, func() { e.useAll(reversed(d.layers)) })
	}
	for _, chunk := range slices.Backward(slices.Collect(slices.Chunk(p.layers, max(1, o.Recompute)))) {
		if len(chunk) > 1 {
			e.useAll(chunk)
		}
		e.useAll(reversed(chunk))
	}
	return bucket.Spec{Units: p.units, Order: e, Prefetch: o.Prefetch, Align: poolAlign, Multiple: poolGrain * int64(o.DP)}, nil
}

// Grads returns the order in which a step reduces gradients, which is that of the backward
// pass. They have the pool's data type when they are sent.
func (o PoolOptions) Grads(m *model.Model) (bucket.Spec, error) {
	p, err := o.poolUnits(m)
	if err != nil {
		return bucket.Spec{}, err
	}
	for _, u := range p.units {
		for i := range u.Buckets {
			u.Buckets[i].Type = o.Gradients
		}
	}
	var e order
	e.use(p.output, nil)
	e.use(p.norm, nil)
	for _, d := range slices.Backward(p.depths) {
		e.use(d.projection, func() {
			e.useAll(reversed(d.layers))
			e.use(p.embedding, nil)
		})
	}
	e.useAll(reversed(p.layers))
	e.use(p.embedding, nil)
	return bucket.Spec{Units: p.units, Order: e, Behind: o.Prefetch, Align: poolAlign, Multiple: poolGrain * int64(o.DP)}, nil
}
