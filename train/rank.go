// This file owns a rank: its device, its runtime, its part of the model, and its
// communicators.

package train

import (
	"errors"
	"hash/crc32"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// rank is one rank of a run. Rank p*DP + d is stage p of replica d.
type rank struct {
	cfg    *Config
	t      *Trainer
	index  int
	pp, dp int
	dev    device.Device
	s      device.Stream
	rt     *engine.Runtime
	kept   kept // for checkpoints

	world                   comm.Comm
	replicas, experts, twin comm.Comm // ranks of this stage; those that divide its experts; those with the same experts
	ends                    comm.Comm // the first and the last stage if both hold the embedding

	env     *layer.Env
	chunks  []*layer.Chunk
	units   []*layer.Unit
	program []action
	store   store
	optim   *optimiser

	// fixed holds the buffers that live as long as the rank.
	fixed    []*device.Buffer
	tokens   *device.Buffer // uint32 [microbatches][1+ahead][tokens]
	figures  device.Range   // fp32: losses, auxiliary loss, norm of gradients; read once per step
	balances []balance
	tables   map[int]device.Range
	spaces   map[int]*stash.Workspace
}

// balance is the memory of one router's load balancing.
type balance struct {
	name    string
	experts int
	layer.Balance
	all device.Range // the loads of all ranks
}

// bytesOf returns the memory of x as bytes.
func bytesOf[T any](x []T) []byte {
	if len(x) == 0 {
		return nil
	}
	var t T
	return unsafe.Slice((*byte)(unsafe.Pointer(&x[0])), len(x)*int(unsafe.Sizeof(t)))
}

// newRank allocates everything on a rank's device; begin or resume sets the parameters.
// The caller must close the rank even if newRank returns an error.
func newRank(t *Trainer, index int, dev device.Device, world comm.Comm) (r *rank, err error) {
	c := t.cfg
	r = &rank{
		cfg: c, t: t, index: index, pp: index / c.Layout.DP, dp: index % c.Layout.DP, dev: dev, world: world,
		tables: map[int]device.Range{}, spaces: map[int]*stash.Workspace{},
	}
	if r.s, err = dev.NewStream("compute"); err != nil {
		return r, err
	}
	if err := r.split(); err != nil {
		return r, err
	}
	all, err := programs(schedule.Pipeline{Ranks: c.Layout.PP, Chunks: c.Layout.VPP, Microbatches: c.Batch.Microbatches})
	if err != nil {
		return r, err
	}
	r.program = all[r.pp]
	if err := layer.Guard(func() { r.build() }); err != nil {
		return r, err
	}
	if r.store, err = r.newStore(); err != nil {
		return r, err
	}
	if r.optim, err = newOptimiser(r); err != nil {
		return r, err
	}
	if err := r.openRuntime(); err != nil {
		return r, err
	}
	return r, r.s.Sync()
}

// newStore allocates the parameters. It frees everything if it returns an error.
func (r *rank) newStore() (store, error) {
	if r.cfg.Sharding == nil {
		w, err := newWhole(r, r.units)
		if err != nil {
			return nil, err
		}
		return w, nil
	}
	x, err := newSharded(r, r.units)
	if err != nil {
		x.close(r.s)
		return nil, err
	}
	return x, nil
}

// split creates the rank's communicators. All ranks create theirs in the same order.
func (r *rank) split() (err error) {
	l := r.cfg.Layout
	group := func(of func(pp, dp int) bool) comm.Comm {
		var ranks []int
		for i := range l.Ranks() {
			if of(i/l.DP, i%l.DP) {
				ranks = append(ranks, i)
			}
		}
		if len(ranks) == 1 || err != nil {
			return nil
		}
		var c comm.Comm
		c, err = r.world.Split(ranks)
		return c
	}
	r.replicas = group(func(pp, dp int) bool { return pp == r.pp })
	r.experts = group(func(pp, dp int) bool { return pp == r.pp && dp/l.EP == r.dp/l.EP })
	r.twin = group(func(pp, dp int) bool { return pp == r.pp && dp%l.EP == r.dp%l.EP })
	if r.sharesEnds() {
		r.ends = group(func(pp, dp int) bool { return dp == r.dp && (pp == 0 || pp == l.PP-1) })
	}
	return err
}

// sharesEnds reports whether this stage and another one hold the embedding.
func (r *rank) sharesEnds() bool {
	m, last := r.cfg.Model, r.cfg.Layout.PP-1
	return last > 0 && (m.Tied || m.MTP != nil) && (r.pp == 0 || r.pp == last)
}

// class returns the class of a parameter.
func (r *rank) class(p layer.Param) class {
	switch {
	case p.Expert:
		return expert
	case r.sharesEnds() && p.Name == "embedding.word_embeddings.weight":
		return shared
	}
	return dense
}

// sharers returns the communicators that add up a class's gradients, in order.
func (r *rank) sharers(c class) []comm.Comm {
	switch c {
	case expert:
		return []comm.Comm{r.twin}
	case shared:
		return []comm.Comm{r.replicas, r.ends}
	}
	return []comm.Comm{r.replicas}
}

// counts reports whether this rank's copy of a class counts for norms.
func (r *rank) counts(c class) bool {
	switch c {
	case expert:
		return r.dp < r.cfg.Layout.EP
	case shared:
		return r.dp == 0 && r.pp == 0
	}
	return r.dp == 0
}

// writes reports whether this rank writes a parameter to disk. The ranks that hold the same
// one take turns, by its name.
func (r *rank) writes(p layer.Param) bool {
	c, l := r.class(p), r.cfg.Layout
	copies, mine := l.DP, r.dp
	if c == expert {
		copies, mine = l.DP/l.EP, r.dp/l.EP
	}
	turn := int(crc32.ChecksumIEEE([]byte(p.Name)) % uint32(copies))
	return mine == turn && (c != shared || r.pp == 0)
}

// alloc allocates zeroed memory that lives as long as the rank.
func (r *rank) alloc(n memory.Bytes, owner string) device.Range {
	b, err := r.dev.Alloc(memory.Device, max(n, 4), owner)
	layer.Must(err)
	r.fixed = append(r.fixed, b)
	r.s.Fill(b.All(), 0)
	return b.All()
}

// build builds the rank's chunks of the model.
func (r *rank) build() {
	c := r.cfg
	ahead := layer.Ahead(c.Model)
	shape := layer.Shape{Batch: c.Batch.Micro, Seq: c.Batch.Seq, Number: c.Number, Scale: float32(1 / float64(c.Tokens()))}
	r.tokens = r.alloc(memory.Bytes(4*c.Batch.Microbatches*(1+ahead)*shape.Tokens()), "tokens").Buf
	r.figures = r.alloc(memory.Bytes(4*(ahead+2)), "figures")
	grad := kernels.F32
	if c.Sharding != nil {
		grad = c.Sharding.GradComm
	}
	r.env = &layer.Env{
		Model: c.Model, Settings: c.Settings, Shape: shape, Grad: grad, Expert: layer.Place{Rank: r.dp % c.Layout.EP, Ranks: c.Layout.EP},
		Comm: r.experts, Dispatch: c.Dispatch, Rows: c.Memory.Rows, Imbalance: c.assumed(),
		Space: r.space, Table: r.table, Balance: r.balance, Sums: layer.Sums{Range: r.sums(0, ahead)},
	}
	if c.Layout.EP == 1 {
		r.env.Comm = nil
	} else {
		var err error
		r.env.Link, err = layer.NewLink(r.dev)
		layer.Must(err)
	}
	stages := c.Layout.PP * c.Layout.VPP
	for v := range c.Layout.VPP {
		at := v*c.Layout.PP + r.pp
		from, to := c.span(at)
		chunk := layer.Build(r.env, layer.Span{From: from, To: to, First: at == 0, Last: at == stages-1})
		r.chunks = append(r.chunks, chunk)
		r.units = append(r.units, chunk.Units...)
	}
}

// table returns the rotary positions for heads of a number of columns.
func (r *rank) table(columns int) device.Range {
	if t, ok := r.tables[columns]; ok {
		return t
	}
	x := layer.RotaryTable(r.cfg.Batch.Seq, columns, r.cfg.Settings.Theta)
	t := r.alloc(memory.Bytes(4*len(x)), "positions")
	r.s.Upload(t, bytesOf(x))
	r.tables[columns] = t
	return t
}

// sums returns n of the rank's figures.
func (r *rank) sums(from, n int) device.Range {
	return r.figures.Slice(memory.Bytes(4*from), memory.Bytes(4*n))
}

// balance allocates the memory of a router's load balancing. All routers add their
// auxiliary losses to one figure.
func (r *rank) balance(name string, experts int, bias bool) layer.Balance {
	b := balance{name: name, experts: experts}
	n := memory.Bytes(4 * experts)
	b.Load, b.Loss = r.alloc(n, "router"), r.sums(layer.Ahead(r.cfg.Model), 1)
	if bias {
		b.Bias = r.alloc(n, "router")
	}
	b.all = b.Load
	if r.replicas != nil {
		b.all = r.alloc(n*memory.Bytes(r.cfg.Layout.DP), "router")
	}
	r.balances = append(r.balances, b)
	return b.Balance
}

// space returns the workspace for experts of a width.
func (r *rank) space(width int) *stash.Workspace {
	if w := r.spaces[width]; w != nil {
		return w
	}
	rows, worst := r.setRows(width)
	w, err := r.rt.NewWorkspace(layer.RowsGroup, r.sets(width), stash.Rows(worst),
		layer.RowTensors(r.cfg.Model.Hidden, width, r.cfg.Number, stash.Rows(rows))...)
	layer.Must(err)
	r.spaces[width] = w
	return w
}

// close frees everything that the rank holds.
func (r *rank) close() (err error) {
	if r.env != nil && r.env.Link != nil {
		err = r.env.Link.Close()
	}
	if r.rt != nil {
		err = errors.Join(err, r.rt.Close())
	}
	if r.optim != nil {
		r.optim.close()
	}
	if r.store != nil {
		r.store.close(r.s)
	}
	for _, b := range r.fixed {
		r.s.Free(b)
	}
	if r.s != nil {
		err = errors.Join(err, r.s.Close())
	}
	for _, c := range []comm.Comm{r.replicas, r.experts, r.twin, r.ends} {
		if c != nil {
			err = errors.Join(err, c.Close())
		}
	}
	return memory.OnRank(r.index, err)
}
