// This file owns a training loop in miniature, with kernels in Go, whose results
// are known without a device.

package stash

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// loop is a training loop in miniature: the forward pass of a group fills a set
// with as many rows as a routing table on the device says, and the backward
// pass folds the rows it finds into a gradient, in an order-sensitive way. What
// it computes is known without a device (want), so that a lost, stale or
// swapped row shows.
type loop struct {
	t       testing.TB
	dev     device.Device
	compute device.Stream
	m       *Manager
	w       *Workspace
	routing *device.Buffer // a uint64 row count for each group
	grads   *device.Buffer // a uint64 for each layer
	kept    *device.Buffer // the gradients before the step, or nil
	passes  []schedule.Pass
	layers  int
	place   map[memory.GroupID]int
	rows    []Rows
	seed    uint64
}

type loopConfig struct {
	ManagerConfig
	pipeline schedule.Pipeline
	rank     int
	layers   int
	sets     int
	maxRows  Rows
	limit    Rows
}

// expertRow is what row r of tensor i of a group contains.
func expertRow(seed uint64, place, tensor, row int, into []byte) {
	x := seed*0x9e3779b97f4a7c15 + uint64(place)<<40 + uint64(tensor)<<32 + uint64(row) + 1
	for i := range into {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		into[i] = byte(x >> 32)
	}
}

// fold is the gradient's next value.
func fold(grad uint64, rows []byte) uint64 {
	h := fnv.New64a()
	_, _ = h.Write(rows)
	return grad*31 + h.Sum64()
}

var loopRows = []memory.Bytes{96, 40} // of the two tensors

var forwardKernel = device.Kernel{Name: "forward", Go: func(l *device.Launch) {
	a := l.Args() // routing, counts, tensor 0, tensor 1, place, seed, maxRows
	rows := device.Slice[uint64](a[0]+8*a[4], 1)[0]
	device.Slice[uint64](a[1], 1)[0] = rows
	for t, width := range loopRows {
		for r := range min(rows, a[6]) {
			expertRow(a[5], int(a[4]), t, int(r), device.Slice[byte](a[2+t]+r*uint64(width), int(width)))
		}
	}
}}

var backwardKernel = device.Kernel{Name: "backward", Go: func(l *device.Launch) {
	a := l.Args() // counts, tensor 0, tensor 1, gradient, maxRows
	rows := min(device.Slice[uint64](a[0], 1)[0], a[4])
	grad := &device.Slice[uint64](a[3], 1)[0]
	for t, width := range loopRows {
		*grad = fold(*grad, device.Slice[byte](a[1+t], int(rows)*int(width)))
	}
}}

func newLoop(t testing.TB, dev device.Device, c loopConfig) (*loop, error) {
	t.Helper()
	passes, err := c.pipeline.Passes(c.rank)
	if err != nil {
		t.Fatal(err)
	}
	l := &loop{t: t, dev: dev, passes: passes, layers: c.layers, place: map[memory.GroupID]int{}, seed: 1}
	for _, p := range passes {
		for i := range c.layers {
			if !p.Backward {
				l.place[memory.GroupID{Name: "expert_fc1", Chunk: p.Chunk, Layer: i, Microbatch: p.Microbatch}] = len(l.place)
			}
		}
	}
	if l.compute, err = dev.NewStream("compute"); err != nil {
		return nil, err
	}
	if l.routing, err = dev.Alloc(memory.Device, memory.Bytes(8*len(l.place)), "routing"); err != nil {
		return nil, err
	}
	if l.grads, err = dev.Alloc(memory.Device, memory.Bytes(8*c.layers*c.pipeline.Chunks), "gradients"); err != nil {
		return nil, err
	}
	if l.m, err = NewManager(dev, l.compute, c.ManagerConfig); err != nil {
		return nil, err
	}
	l.w, err = l.m.NewWorkspace("experts", c.sets, c.limit,
		Tensor{Name: "fc1_in", Row: loopRows[0], MaxRows: c.maxRows}, Tensor{Name: "fc1_out", Row: loopRows[1], MaxRows: c.maxRows})
	return l, err
}

func (l *loop) close() error {
	l.compute.Free(l.routing)
	l.compute.Free(l.grads)
	if l.kept != nil {
		l.compute.Free(l.kept)
	}
	return errors.Join(l.m.Close(), l.compute.Close())
}

// route sets the row counts of the next step.
func (l *loop) route(rows []Rows) {
	l.rows = rows
	raw := make([]byte, 8*len(rows))
	for i, n := range rows {
		binary.LittleEndian.PutUint64(raw[8*i:], uint64(n))
	}
	l.compute.Upload(l.routing.All(), raw)
}

func (l *loop) gradient(p schedule.Pass, layer int) device.Range {
	return l.grads.Slice(memory.Bytes(8*(p.Chunk*l.layers+layer)), 8)
}

// body issues the step's passes.
func (l *loop) body(int) error {
	for _, p := range l.passes {
		for i := range l.layers {
			layer := i
			if p.Backward {
				layer = l.layers - 1 - i
			}
			g := memory.GroupID{Name: "expert_fc1", Chunk: p.Chunk, Layer: layer, Microbatch: p.Microbatch}
			if p.Backward {
				l.backward(g, l.gradient(p, layer))
			} else {
				l.forward(g).Saved()
			}
		}
	}
	return nil
}

func (l *loop) forward(g memory.GroupID) *Set {
	s := l.w.Forward(g)
	k := device.NewLaunch(&forwardKernel, 1, 1)
	k.Read(l.routing.All())
	k.Write(s.Counts())
	k.Write(s.Tensor(0))
	k.Write(s.Tensor(1))
	k.Arg(uint64(l.place[g]))
	k.Arg(l.seed)
	k.Arg(uint64(l.w.layout.Tensors[0].MaxRows))
	l.compute.Launch(k)
	return s
}

func (l *loop) backward(g memory.GroupID, grad device.Range) {
	s := l.w.Backward(g)
	k := device.NewLaunch(&backwardKernel, 1, 1)
	k.Read(s.Counts())
	k.Read(s.Tensor(0))
	k.Read(s.Tensor(1))
	k.Write(grad)
	k.Arg(uint64(l.w.layout.Tensors[0].MaxRows))
	l.compute.Launch(k)
	s.Done()
}

// want is the gradients after one more step from the given ones.
func (l *loop) want(grads []uint64) []uint64 {
	next := append([]uint64(nil), grads...)
	for _, p := range l.passes {
		for i := range l.layers {
			layer := l.layers - 1 - i
			if !p.Backward {
				continue
			}
			place := l.place[memory.GroupID{Name: "expert_fc1", Chunk: p.Chunk, Layer: layer, Microbatch: p.Microbatch}]
			grad := &next[p.Chunk*l.layers+layer]
			for t, width := range loopRows {
				raw := make([]byte, int(l.rows[place])*int(width))
				for r := range int(l.rows[place]) {
					expertRow(l.seed, place, t, r, raw[r*int(width):(r+1)*int(width)])
				}
				*grad = fold(*grad, raw)
			}
		}
	}
	return next
}

// read downloads the gradients.
func (l *loop) read() ([]uint64, error) {
	raw := make([]byte, l.grads.Size())
	if err := l.compute.Download(raw, l.grads.All()); err != nil {
		return nil, err
	}
	out := make([]uint64, len(raw)/8)
	for i := range out {
		out[i] = binary.LittleEndian.Uint64(raw[8*i:])
	}
	return out, nil
}

// keeper protects the gradients: a rerun must find them as they were.
type keeper struct {
	l    *loop
	copy *device.Buffer
}

func (k keeper) Save(s device.Stream)    { s.Copy(k.copy.All(), k.l.grads.All()) }
func (k keeper) Restore(s device.Stream) { s.Copy(k.l.grads.All(), k.copy.All()) }

func (l *loop) protect() {
	b, err := l.dev.Alloc(memory.Device, l.grads.Size(), "gradients before the step")
	if err != nil {
		l.t.Fatal(err)
	}
	l.m.Protect(keeper{l, b})
	l.kept = b
}

// run trains a number of steps with random routing and compares the gradients
// with those of the model after each.
func (l *loop) run(steps int, rng *rand.Rand, most Rows) error {
	grads := make([]uint64, l.grads.Size()/8)
	if err := l.zero(); err != nil {
		return err
	}
	for i := range steps {
		rows := make([]Rows, len(l.place))
		for j := range rows {
			rows[j] = Rows(rng.Int64N(int64(most) + 1))
		}
		l.route(rows)
		l.seed = rng.Uint64()
		before := l.dev.Counters()
		if err := l.m.Step(memory.Key{Microbatches: len(l.passes)}, l.body); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		after := l.dev.Counters()
		if reads := after.HostReads - before.HostReads; l.m.attempt == 0 && reads != 1 {
			return fmt.Errorf("step %d read device memory %d times", i, reads)
		}
		if after.HostSyncs != before.HostSyncs {
			return fmt.Errorf("step %d made the host wait", i)
		}
		grads = l.want(grads)
		if err := l.compare(grads); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
	}
	return nil
}

// compare tells whether the gradients are the given ones and the store is whole.
func (l *loop) compare(want []uint64) error {
	got, err := l.read()
	if err != nil {
		return err
	}
	for j := range want {
		if got[j] != want[j] {
			return fmt.Errorf("gradient %d is %x, want %x", j, got[j], want[j])
		}
	}
	return l.m.store.Check(l.compute)
}

func (l *loop) zero() error {
	l.compute.Fill(l.grads.All(), 0)
	return l.compute.Sync()
}
