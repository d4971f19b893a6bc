// This file owns the models that the tests train.

package fsdp

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// instr is a line of a forward pass. The backward pass does the opposite.
type instr struct {
	do    func(r *rank, i *instr, backward bool) // nil: enter or leave
	leave bool
	unit  int // entered, left, or whose parameters the layer uses
	in    int // numbers of activations
	out   int
	also  int // another unit, or how far ahead the token to be found is
}

// model has units and a forward pass over them.
type model struct {
	units []FSDPUnit
	pass  []instr
	acts  int
	embed int
	param bucket.Type
	local int64 // experts on a rank
}

const dense, experts = 0, 1 // groups

func (m *model) unit(name string, loose bool, ps ...Param) int {
	m.units = append(m.units, FSDPUnit{Name: name, Loose: loose, Params: ps})
	return len(m.units) - 1
}

func (m *model) matrix(name string, shape ...int64) Param {
	return Param{Name: name, Shape: shape, Type: m.param}
}

func (m *model) enter(u int) { m.pass = append(m.pass, instr{unit: u}) }
func (m *model) leave(u int) { m.pass = append(m.pass, instr{unit: u, leave: true}) }

// run adds a layer that reads the last activation and makes the next.
func (m *model) run(do func(*rank, *instr, bool), unit, also int) {
	m.pass = append(m.pass, instr{do: do, unit: unit, also: also, in: m.acts - 1, out: m.acts})
	m.acts++
}

// layer adds a unit of one layer.
func (m *model) layer(name string, do func(*rank, *instr, bool), ps ...Param) {
	u := m.unit(name, false, ps...)
	m.enter(u)
	m.run(do, u, 0)
	m.leave(u)
}

func (m *model) mlp(hidden int64) {
	m.layer(fmt.Sprint("mlp ", len(m.units)), mlpLayer,
		m.matrix("w1", hidden, width), m.matrix("w2", hidden, width), m.matrix("b", hidden))
}

func (m *model) scan() {
	m.layer(fmt.Sprint("scan ", len(m.units)), scanLayer, m.matrix("a", width), m.matrix("b", width), m.matrix("c", width))
}

func (m *model) moe() {
	m.layer(fmt.Sprint("moe ", len(m.units)), moeLayer,
		Param{Name: "router", Shape: []int64{2, width}, Type: FP32},
		Param{Name: "experts", Shape: []int64{m.local, width, width}, Type: m.param, Group: experts})
}

// head predicts the token that is ahead positions away, with the tied embedding.
func (m *model) head(ahead int) {
	m.enter(m.embed)
	m.pass = append(m.pass, instr{do: headLayer, unit: m.embed, also: ahead, in: m.acts - 1})
	m.leave(m.embed)
}

// mtp adds a unit that predicts a second token. Inside, it uses a projection that is no
// unit, and the embedding.
func (m *model) mtp(hidden int64) {
	project := m.unit("mtp projection", true, m.matrix("p", width, 2*width))
	u := m.unit("mtp", false, m.matrix("w1", hidden, width), m.matrix("w2", hidden, width), m.matrix("b", hidden))
	m.enter(u)
	m.enter(project)
	m.enter(m.embed)
	m.run(joinLayer, project, m.embed)
	m.leave(m.embed)
	m.leave(project)
	m.run(mlpLayer, u, 0)
	m.leave(u)
	m.head(2)
}

// newModel returns a model by name. A rank has local of the two experts.
func newModel(name string, param bucket.Type, local int64) *model {
	m := &model{param: param, local: local}
	m.embed = m.unit("embedding", true, m.matrix("e", vocab, width))
	m.enter(m.embed)
	m.run(embedLayer, m.embed, 0)
	m.leave(m.embed)
	switch name {
	case "small":
		m.moe()
		m.mlp(3)
		m.head(1)
	case "dense":
		for range 4 {
			m.mlp(16)
		}
		m.head(1)
	case "moe":
		m.mlp(16)
		m.moe()
		m.mlp(16)
		m.moe()
		m.head(1)
	case "hybrid": // units of unequal shapes, MTP, a tied embedding
		m.mlp(24)
		m.scan()
		m.moe()
		m.scan()
		m.mlp(5)
		m.head(1)
		m.mtp(12)
	}
	return m
}

// setup is one way to train.
type setup struct {
	model        string
	ranks, ep    int
	param        bucket.Type
	gradComm     bucket.Type
	mainGrads    bucket.Type
	kind         bucket.PoolKind
	fallback     bucket.Fallback
	prefetch     int
	behind       int
	microbatches int
	steps        int
	plain        bool          // no sharding: data parallel with all-reduce
	touched      bool          // what collectives read is rewritten around them
	left         *memory.Bytes // receives the bytes that nobody freed
}

func (c setup) String() string {
	return fmt.Sprintf("%s, %d ranks, ep %d, %s %s %s, %v (fallback %d), prefetch %d", c.model, c.ranks, c.ep, c.param.Name, c.gradComm.Name, c.mainGrads.Name, c.kind, c.fallback, c.prefetch)
}

type ranges = []device.Range

// typeFlag encodes a type for the kernels of the tests.
func typeFlag(t bucket.Type) uint64 {
	if t == BF16 {
		return 1
	}
	return 0
}

func embedLayer(r *rank, x *instr, backward bool) {
	if backward {
		r.launch(&embedBackward, "rrw", ranges{r.token(length), r.dact[x.out], r.grads[x.unit](0)}, typeFlag(r.c.gradComm))
		return
	}
	r.launch(&embedForward, "rrw", ranges{r.params[x.unit](0), r.token(length), r.act[x.out]}, typeFlag(r.param))
}

func headLayer(r *rank, x *instr, backward bool) {
	e, tok := r.params[x.unit](0), r.token(length+x.also)
	if backward {
		r.launch(&headBackward, "rrrww", ranges{e, tok, r.act[x.in], r.dact[x.in], r.grads[x.unit](0)}, typeFlag(r.param), typeFlag(r.c.gradComm), uint64(x.also))
		return
	}
	r.launch(&headForward, "rrrw", ranges{e, tok, r.act[x.in], r.loss.All()}, typeFlag(r.param), uint64(x.also))
}

func joinLayer(r *rank, x *instr, backward bool) {
	p, e, tok := r.params[x.unit](0), r.params[x.also](0), r.token(length+1)
	if backward {
		r.launch(&joinBackward, "rrrrrwww", ranges{p, e, tok, r.act[x.in], r.dact[x.out], r.dact[x.in], r.grads[x.unit](0), r.grads[x.also](0)}, typeFlag(r.param), typeFlag(r.c.gradComm))
		return
	}
	r.launch(&joinForward, "rrrrw", ranges{p, e, tok, r.act[x.in], r.act[x.out]}, typeFlag(r.param))
}

func mlpLayer(r *rank, x *instr, backward bool)  { r.three(x, backward, &mlpForward, &mlpBackward) }
func scanLayer(r *rank, x *instr, backward bool) { r.three(x, backward, &scanForward, &scanBackward) }

// three runs a layer with three parameters.
func (r *rank) three(x *instr, backward bool, f, b *device.Kernel) {
	p, hidden := r.params[x.unit], uint64(r.units[x.unit].Params[2].Elements())
	if backward {
		g := r.grads[x.unit]
		r.launch(b, "rrrrrwwww", ranges{p(0), p(1), p(2), r.act[x.in], r.dact[x.out], r.dact[x.in], g(0), g(1), g(2)}, typeFlag(r.param), typeFlag(r.c.gradComm), hidden)
		return
	}
	r.launch(f, "rrrrw", ranges{p(0), p(1), p(2), r.act[x.in], r.act[x.out]}, typeFlag(r.param), hidden)
}

// moeLayer exchanges positions with the ranks that have the other experts.
func moeLayer(r *rank, x *instr, backward bool) {
	ep, p := r.comms[2], r.params[x.unit]
	n, local := length*ep.Size(), 2/ep.Size()
	first := uint64(ep.Rank() * local)
	row := memory.Bytes(4 * length * width)
	in, dout := r.all.Slice(0, row*memory.Bytes(ep.Size())), r.all.Slice(row*memory.Bytes(ep.Size()), row*memory.Bytes(ep.Size()))
	mine, routed := r.choices.Slice(0, 8*length), r.choices.Slice(8*length, 8*memory.Bytes(n))
	r.launch(&route, "rrw", ranges{p(0), r.act[x.in], mine})
	ep.AllGather(r.compute, in, r.act[x.in])
	ep.AllGather(r.compute, routed, mine)
	if !backward {
		r.launch(&expertForward, "rrrw", ranges{p(1), in, routed, r.part}, typeFlag(r.param), first, uint64(local), uint64(n))
		back := r.mine.Slice(0, row)
		ep.ReduceScatter(r.compute, back, r.part, comm.F32, comm.Sum)
		r.launch(&addInto, "rrw", ranges{r.act[x.in], back, r.act[x.out]})
		return
	}
	g := r.grads[x.unit]
	ep.AllGather(r.compute, dout, r.dact[x.out])
	r.launch(&expertBackward, "rrrrww", ranges{p(1), in, routed, dout, r.dpart, g(1)}, typeFlag(r.param), typeFlag(r.c.gradComm), first, uint64(local), uint64(n))
	ep.ReduceScatter(r.compute, r.mine, r.dpart, comm.F32, comm.Sum)
	r.launch(&routeBackward, "rrrrrww", ranges{p(0), r.act[x.in], mine, r.dact[x.out], r.mine, r.dact[x.in], g(0)}, typeFlag(r.c.gradComm))
}
