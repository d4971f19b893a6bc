// This file owns sharded parameters (ZeRO-3).

package train

import (
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/fsdp"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// sharded is a store that shards parameters and gathers them by FSDP unit.
type sharded struct {
	r     *rank
	units []*layer.Unit
	pipe  *fsdp.Pipeline
	own   []comm.Comm // communicators of groups with one rank
	step  fsdp.Step
	// shards are the rank's shards, and at[i] is the offset of the moments of shards[i].
	shards []fsdp.Shard
	at     []memory.Bytes
	mem    *device.Buffer // both moments
	size   memory.Bytes   // of one
}

// The groups of ranks that parameters are sharded over.
const (
	denseGroup = iota
	expertGroup
)

// newSharded allocates the store and fills it with zeros. The caller must close the store
// even if newSharded returns an error.
func newSharded(r *rank, units []*layer.Unit) (x *sharded, err error) {
	c := r.cfg
	x = &sharded{r: r, units: units}
	types := map[kernels.Number]bucket.Type{kernels.F32: fsdp.FP32, kernels.BF16: fsdp.BF16}
	group := func(name string, of comm.Comm) (fsdp.RankGroup, error) {
		if of == nil {
			alone, err := r.world.Split([]int{r.index})
			if err != nil {
				return fsdp.RankGroup{}, err
			}
			x.own = append(x.own, alone)
			of = alone
		}
		return fsdp.RankGroup{Name: name, Comm: of, Op: comm.Sum}, nil
	}
	var groups [2]fsdp.RankGroup
	if groups[denseGroup], err = group("dense", r.replicas); err != nil {
		return x, err
	}
	if groups[expertGroup], err = group("experts", r.twin); err != nil {
		return x, err
	}
	cfg := fsdp.Config{
		Rank: r.index, Groups: groups[:], Pool: c.Sharding.Pool, Prefetch: c.Sharding.Prefetch, Behind: 1,
		GradComm: types[c.Sharding.GradComm], MainGrads: fsdp.FP32, Log: c.Log,
	}
	for _, u := range units {
		f := fsdp.FSDPUnit{Name: u.Name, Loose: u.Loose}
		for _, p := range u.Params {
			g := denseGroup
			if p.Expert {
				g = expertGroup
			}
			f.Params = append(f.Params, fsdp.Param{Name: p.Name, Shape: []int64{int64(p.Rows), int64(p.Cols)}, Type: types[p.Type], Group: g})
		}
		cfg.Units = append(cfg.Units, f)
	}
	if x.pipe, err = fsdp.New(r.dev, cfg); err != nil {
		return x, err
	}
	x.shards = x.pipe.Shards()
	for _, s := range x.shards {
		x.at = append(x.at, x.size)
		x.size += (s.Weights.Len + paramAlign - 1) / paramAlign * paramAlign
	}
	if x.mem, err = r.dev.Alloc(memory.Device, max(2*x.size, paramAlign), "moments"); err != nil {
		return x, err
	}
	r.s.Fill(x.mem.All(), 0)
	return x, nil
}

func (x *sharded) begin(s device.Stream, evaluate bool) {
	k := memory.Key{Phase: memory.Train, Microbatches: x.r.cfg.Batch.Microbatches}
	if evaluate {
		k.Phase = memory.Evaluate
	}
	x.step = x.pipe.Begin(k, s)
}

func (x *sharded) end() error { return x.step.End() }

// Use gathers units, and allocates their gradients if grads is set.
func (x *sharded) Use(grads bool, units ...*layer.Unit) (func(), error) {
	var done []func()
	for _, u := range units {
		i := slices.Index(x.units, u)
		use, err := x.step.Use(i, x.r.s)
		if err != nil {
			return nil, err
		}
		var to func(int) device.Range
		if grads {
			g, err := x.step.Grad(i, x.r.s)
			if err != nil {
				return nil, err
			}
			to = g.Param
			done = append(done, g.Done)
		}
		u.Bind(use.Param, to)
		done = append(done, use.Done)
	}
	return func() {
		for i := len(done) - 1; i >= 0; i-- {
			done[i]()
		}
	}, nil
}

// reduce adds up the gradients of parameters that both the first and the last stage
// hold. The pipeline has already reduced the others.
func (x *sharded) reduce(s device.Stream) {
	if x.r.ends == nil {
		return
	}
	for _, sh := range x.shards {
		if x.class(sh) == shared {
			x.r.ends.AllReduce(s, sh.Grads, sh.Grads, comm.F32, comm.Sum)
		}
	}
}

func (x *sharded) class(sh fsdp.Shard) class {
	if len(sh.Pieces) == 0 {
		return dense
	}
	return x.r.class(x.units[sh.Unit].Params[sh.Pieces[0].Param])
}

// runs returns the pieces of parameters. Each is on one rank only, except for a shared
// embedding.
func (x *sharded) runs() (out []run) {
	for i, sh := range x.shards {
		for _, p := range sh.Pieces {
			at, n := memory.Bytes(4*p.At), memory.Bytes(4*p.Elements)
			out = append(out, run{
				w: sh.Weights.Slice(at, n), g: sh.Grads.Slice(at, n), gtype: kernels.F32,
				m: x.mem.Slice(x.at[i]+at, n), v: x.mem.Slice(x.size+x.at[i]+at, n),
				noDecay: x.units[sh.Unit].Params[p.Param].NoDecay,
				counted: x.class(sh) != shared || x.r.pp == 0,
			})
		}
	}
	return out
}

// longest returns the elements of the largest shard: shards have the same sizes on all
// ranks of a stage, and their pieces do not.
func (x *sharded) longest() (n int) {
	for _, sh := range x.shards {
		n = max(n, int(sh.Weights.Len/4))
	}
	return n
}

func (x *sharded) cast(s device.Stream) { x.pipe.Cast(s) }

func (x *sharded) load(k key, values []float32) error { return x.pipe.Load(k.unit, k.param, values) }

func (x *sharded) read(k key, _ []float32) ([]float32, error) {
	return x.pipe.Read(k.unit, k.param, fsdp.Weights)
}

// moments returns the moments of the rank's shards as parts of the parameters', so that
// what is saved does not depend on how parameters are sharded. The first stage writes those
// of an embedding that the last one holds too.
func (x *sharded) moments(all bool) (out []momentPart) {
	for i, sh := range x.shards {
		for _, p := range sh.Pieces {
			param := x.units[sh.Unit].Params[p.Param]
			if !all && x.r.class(param) == shared && x.r.pp != 0 {
				continue
			}
			for _, q := range pieces(param) {
				from, to := max(q.from, int(p.From)), min(q.from+q.n, int(p.From+p.Elements))
				if from >= to {
					continue
				}
				at, n := x.at[i]+memory.Bytes(4*(int(p.At)+from-int(p.From))), memory.Bytes(4*(to-from))
				out = append(out,
					momentPart{q.name + ".exp_avg", from - q.from, q.n, x.mem.Slice(at, n)},
					momentPart{q.name + ".exp_avg_sq", from - q.from, q.n, x.mem.Slice(x.size+at, n)})
			}
		}
	}
	return out
}

// flat returns the moments as earlier versions of the program saved them: a tensor for each
// shard of this rank.
func (x *sharded) flat() (out []momentPart) {
	for i, sh := range x.shards {
		name, n := fmt.Sprintf("rank%d.%s.bucket%d", x.r.index, x.units[sh.Unit].Name, sh.Bucket), int(sh.Weights.Len/4)
		out = append(out,
			momentPart{name + ".exp_avg", 0, n, x.mem.Slice(x.at[i], sh.Weights.Len)},
			momentPart{name + ".exp_avg_sq", 0, n, x.mem.Slice(x.size+x.at[i], sh.Weights.Len)})
	}
	return out
}

func (x *sharded) close(s device.Stream) {
	if x.pipe != nil {
		_ = x.pipe.Close() // closing the device reports the same error
	}
	if x.mem != nil {
		s.Free(x.mem)
	}
	for _, c := range x.own {
		_ = c.Close()
	}
}
