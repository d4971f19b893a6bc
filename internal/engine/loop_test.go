// This file owns a training loop in miniature, of kernels that run on every device,
// whose results are known without one.

package engine

import (
	"cmp"
	"errors"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// module is a part of a layer: it makes its output from its input and from noise,
// and saves it, some their input too.
type module struct {
	name  string
	size  memory.Bytes
	scope memory.Scope // or none
	redo  bool         // it can be recomputed
}

const outside = memory.FullIteration // a module in no scope of its own

// Layers in turn are dense ones and mixtures of experts. Sizes differ, and are
// multiples of 16 as the noise kernel wants.
var (
	denseLayer = []module{
		{"attn_norm", 1040, memory.Attn, false}, {"qkv_linear", 1536, memory.Attn, true}, {"core_attn", 2048, memory.Attn, true},
		{"attn_proj", 528, memory.Attn, true}, {"mlp_norm", 1040, memory.MLP, true}, {"mlp", 3088, memory.MLP, true},
	}
	expertLayer = []module{
		{"attn_norm", 1040, memory.Attn, false}, {"qkv_linear", 1536, memory.Attn, true}, {"core_attn", 2048, memory.Attn, true},
		{"attn_proj", 528, memory.Attn, true}, {"mlp_norm", 1040, memory.MoERouter, true}, {"router", 272, memory.MoERouter, false},
		{"expert_fc1", 2560, outside, true}, {"moe_act", 4112, outside, true},
	}
)

func layerOf(i int) []module {
	if i%2 == 1 {
		return expertLayer
	}
	return denseLayer
}

// loopConfig is a loop.
type loopConfig struct {
	Config
	pipeline schedule.Pipeline
	rank     int // of the pipeline
	layers   int
	scale    memory.Bytes  // of all sizes; zero stands for one
	work     time.Duration // of a module's forward pass; twice that backward
	borrows  bool          // inputs of passes are the loop's own memory
	dry      bool          // nothing is computed, only time passes
	most     stash.Rows    // of an expert, with a stash
	limit    stash.Rows    // up to which its sets may grow
	sets     int           // of the workspace; zero stands for three
}

// cell is where the backward pass of a group puts one of the tensors it was given.
type cell struct {
	at     memory.Bytes
	of     memory.GroupID // whose output it is a view of
	tensor Tensor
}

type cellKey struct {
	memory.GroupID
	i int
}

// loop is a training loop. Its backward passes copy what they are given to where the
// test looks.
type loop struct {
	loopConfig
	dev      device.Device
	compute  device.Stream
	rt       *Runtime
	space    *stash.Workspace
	passes   []schedule.Pass
	salt     map[memory.GroupID]uint64
	seeds    *device.Buffer // a seed and a clock
	rows     *device.Buffer // by group
	to       *device.Buffer
	spare    *device.Buffer // what nobody compares
	now      memory.Key     // of the step under way
	cells    map[memory.Key]map[cellKey]cell
	used     memory.Bytes // of to
	seed     uint64
	live     map[memory.GroupID]stash.Rows
	borrowed int
	again    int // forward passes for the second time
	extra    int // tensors that the next step makes besides
	shift    memory.Bytes
	fail     func(memory.GroupID) error
	calls    int // of body
}

const rowBytes = 512

func newLoop(dev device.Device, c loopConfig) (l *loop, err error) {
	c.scale = max(c.scale, 1)
	c.Effort = cmp.Or(c.Effort, 0.05) // few tests are about how good a decision is
	l = &loop{loopConfig: c, dev: dev, salt: map[memory.GroupID]uint64{}, cells: map[memory.Key]map[cellKey]cell{}, live: map[memory.GroupID]stash.Rows{}}
	if l.passes, err = c.pipeline.Passes(c.rank); err != nil {
		return l, err
	}
	var room memory.Bytes
	for _, p := range l.passes {
		for i := range c.layers {
			for _, m := range layerOf(i) {
				if g := id(p, i, m); l.salt[g] == 0 {
					l.salt[g] = uint64(len(l.salt) + 1)
					room += 20 * memory.KiB * c.scale
				}
			}
		}
	}
	if l.compute, err = dev.NewStream("compute"); err != nil {
		return l, err
	}
	for _, b := range []struct {
		to   **device.Buffer
		size memory.Bytes
	}{{&l.seeds, 64}, {&l.rows, memory.Bytes(8 * (len(l.salt) + 1))}, {&l.to, room}, {&l.spare, 4112 * c.scale}} {
		if *b.to, err = dev.Alloc(memory.Device, b.size, "test"); err != nil {
			return l, err
		}
	}
	l.compute.Fill(l.seeds.All(), 0)
	c.Device, c.Compute = dev, l.compute
	c.Config.Rank, c.Config.Stage = c.rank, c.rank
	if l.rt, err = Open(c.Config); err != nil {
		return l, err
	}
	if c.Stash != nil {
		l.space, err = l.rt.NewWorkspace("expert_fc1", cmp.Or(c.sets, 3), c.limit, stash.Tensor{Name: "rows", Row: rowBytes, MaxRows: c.most})
	}
	return l, err
}

func (l *loop) close() (err error) {
	if l.rt != nil {
		err = l.rt.Close()
	}
	for _, b := range []*device.Buffer{l.seeds, l.rows, l.to, l.spare} {
		if b != nil {
			l.compute.Free(b)
		}
	}
	if l.compute != nil {
		err = errors.Join(err, l.compute.Close())
	}
	return err
}

func id(p schedule.Pass, layer int, m module) memory.GroupID {
	return memory.GroupID{Name: m.name, Chunk: p.Chunk, Layer: layer, Microbatch: p.Microbatch}
}

// chain is the modules of a pass with their layers.
func (l *loop) chain() (ms []module, layers []int) {
	for i := range l.layers {
		for _, m := range layerOf(i) {
			ms, layers = append(ms, m), append(layers, i)
		}
	}
	return ms, layers
}

func (l *loop) size(m module) memory.Bytes { return m.size * l.scale }

// taken is how much of its input a module's output begins with.
func (l *loop) taken(in, out memory.Bytes) memory.Bytes { return min(in, out) / 32 * 16 }

// noise fills a range.
func (l *loop) noise(to device.Range, salt uint64) {
	if !l.dry {
		l.compute.Launch(kernels.NoiseLaunch(to, l.seeds.Slice(0, 8), salt))
	}
}

func (l *loop) wait(d time.Duration, body func() error) error {
	if l.work == 0 {
		return body()
	}
	clock := l.seeds.Slice(16, kernels.ClockBytes)
	l.compute.Launch(kernels.MarkLaunch(clock))
	err := body()
	l.compute.Launch(kernels.WaitLaunch(clock, d))
	return err
}

// input makes what the first module of a pass reads.
func (l *loop) input(s *Step, p schedule.Pass) (x *Tensor, err error) {
	n := 1040 * l.scale
	if !l.borrows || l.compute.Capturing() {
		if x, err = s.New(n); err != nil {
			return nil, err
		}
	} else {
		b, err := l.dev.Alloc(memory.Device, n, "input")
		if err != nil {
			return nil, err
		}
		l.borrowed++
		if x, err = s.Borrow(b.All(), func() { l.borrowed--; l.compute.Free(b) }); err != nil {
			return nil, err
		}
	}
	l.noise(x.Range(), inputSalt(p))
	return x, nil
}

func inputSalt(p schedule.Pass) uint64 { return 1<<32 + uint64(p.Chunk)<<16 + uint64(p.Microbatch) }

// saved are the views that a module saves of its input, and then its output:
// attention gets three that share a storage, the router one that is sparse, and its
// output stays.
func (l *loop) saved(m module, x, out *Tensor) []*Tensor {
	n := int(x.Storage.Size())
	switch m.name {
	case "core_attn":
		w := n / 48
		three := func(i int) *Tensor { return x.View(memory.Bytes(i*16*w), 16, []int{w}, nil) }
		return []*Tensor{three(0), three(1), three(2), out}
	case "router":
		return []*Tensor{x.View(16, 16, []int{n / 64, 1}, []int{4, 1}), out.KeepOnDevice()}
	case "attn_norm":
		return []*Tensor{x, out}
	case "mlp_norm":
		if m.scope == memory.MoERouter { // else the router's view were not alone
			return []*Tensor{x}
		}
	}
	return []*Tensor{out}
}

// forward is the forward pass of a module; the loop gives its input away.
func (l *loop) forward(s *Step, p schedule.Pass, at int, x *Tensor) (out *Tensor, err error) {
	ms, layers := l.chain()
	m, g := ms[at], id(p, layers[at], ms[at])
	if l.fail != nil {
		if err := l.fail(g); err != nil {
			return nil, err
		}
	}
	if m.name == "expert_fc1" && l.space != nil {
		return l.expert(s, g, x)
	}
	pass := func(to *Group) error {
		in := x
		var from *Loaded
		if to.Recomputing() {
			l.again++
			if from, err = s.Load(id(p, layers[at-1], ms[at-1])); err != nil {
				return err
			}
			in = from.Tensor(from.Len() - 1)
		}
		y, err := s.New(l.size(m))
		if err != nil {
			return err
		}
		err = l.wait(l.work, func() error {
			n := memory.Bytes(0)
			if in != nil {
				if n = l.taken(in.Storage.Size(), y.Storage.Size()); !l.dry {
					l.compute.Copy(y.Range().Slice(0, n), in.Range().Slice(0, n))
				}
				to.Save(l.saved(m, in, y)...)
			} else {
				to.Save(y)
			}
			l.noise(y.Range().Slice(n, y.Storage.Size()-n), l.salt[g])
			return nil
		})
		if from != nil {
			from.Done()
		}
		if !to.Recomputing() {
			out = y
		}
		return err
	}
	if m.redo && (at == 0 || l.space == nil || ms[at-1].name != "expert_fc1") {
		err = s.Run(g, pass)
	} else {
		to := s.BeginGroup(g)
		if err = pass(to); err == nil {
			err = to.End()
		}
	}
	if err == nil && x != nil {
		l.free(x)
	}
	return out, err
}

// free uses a tensor once more and frees it: a mark there that comes without a use
// would guard nothing that an earlier one does not.
func (l *loop) free(x *Tensor) {
	if r := x.Range(); !l.dry {
		l.compute.Copy(l.spare.Slice(0, r.Len), r)
	}
	x.Free()
}

// expert is the module whose rows are counted on the device; what follows it has no
// input.
func (l *loop) expert(s *Step, g memory.GroupID, x *Tensor) (*Tensor, error) {
	l.free(x)
	set := s.Lease(l.space, g)
	return nil, l.wait(l.work, func() error {
		l.compute.Copy(set.Counts().Slice(0, 8), l.rows.Slice(memory.Bytes(8*l.salt[g]), 8))
		l.noise(set.Tensor(0), l.salt[g])
		if s.key.Phase == memory.Train {
			set.Saved()
		} else {
			set.Drop()
		}
		return nil
	})
}

// backward is the backward pass of a module, with memory of its own.
func (l *loop) backward(s *Step, p schedule.Pass, at int) error {
	ms, layers := l.chain()
	m, g := ms[at], id(p, layers[at], ms[at])
	if m.name == "expert_fc1" && l.space != nil {
		set := s.Restore(l.space, g)
		return l.wait(2*l.work, func() error {
			l.put(cellKey{g, 0}, g, Tensor{}, set.Tensor(0))
			set.Done()
			return nil
		})
	}
	grad, err := s.New(l.size(m))
	if err != nil {
		return err
	}
	got, err := s.Load(g)
	if err != nil {
		return err
	}
	err = l.wait(2*l.work, func() error {
		if !l.dry {
			l.compute.Fill(grad.Range(), 0)
		}
		for i := range got.Len() {
			of := g
			if i < got.Len()-1 || m.name == "mlp_norm" && m.scope == memory.MoERouter {
				of = memory.GroupID{Name: "input", Chunk: p.Chunk, Microbatch: p.Microbatch}
				if at > 0 {
					of = id(p, layers[at-1], ms[at-1])
				}
			}
			l.put(cellKey{g, i}, of, *got.Tensor(i), got.Range(i))
		}
		return nil
	})
	got.Done()
	l.free(grad)
	return err
}

// put copies what a backward pass was given to its cell.
func (l *loop) put(k cellKey, of memory.GroupID, t Tensor, r device.Range) {
	if l.dry {
		return
	}
	cells := l.cells[l.now]
	c, ok := cells[k]
	if !ok {
		c.at = l.used
		n := r.Len
		if t.Storage == nil {
			n = max(n, rowBytes*memory.Bytes(l.limit)) // sets may grow
		}
		l.used += (n + 15) / 16 * 16
	}
	c.of, c.tensor = of, t
	cells[k] = c
	l.compute.Copy(l.to.Slice(c.at, r.Len), r)
}
