// This file owns a training loop in miniature, of copies only, so that it runs on
// every device and its results are known without one.

package offload

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// how says how a loop issues its steps.
type how uint8

const (
	eager   how = iota
	whole       // one graph a step
	scopes      // one graph a layer
	delayed     // the same, with copies behind the graphs
)

func (h how) String() string {
	return [...]string{"eager", "captured whole", "scopes", "delayed scopes"}[h]
}

// loopConfig is a loop. Leave chooses the groups that leave; ahead is how many
// events before its load a group comes back.
type loopConfig struct {
	Config
	pipeline schedule.Pipeline
	rank     int
	layers   int
	how      how
	leave    func(i int) bool // of the groups in the order of saving; nil is none
	ahead    int
	borrowed bool // inputs of passes are the loop's own memory
	uniform  bool // all layers are as large as the others
}

// loop is a training loop: the forward pass of a layer copies what it is to
// compute from a prepared buffer, and saves it with its input, which is the output
// of the layer before; the backward pass copies both to where the test looks.
type loop struct {
	loopConfig
	dev      device.Device
	compute  device.Stream
	m        *Manager
	passes   []schedule.Pass
	place    map[memory.GroupID]int
	pass     map[[2]int]int
	from, to *device.Buffer // what layers compute, what their backward passes saw
	spare    *device.Buffer // what nobody compares
	bytes    []byte
	plan     *residency.Plan
	graph    device.Graph
	scopes   map[string]*Scope
	live     int         // borrowed inputs that are not freed
	moved    int         // scopes that were captured again
	closes   bool        // scopes at once
	slow     func() bool // whether to issue the next scope eagerly
}

const cell = 2048 // bytes of a place in the buffers

func newLoop(dev device.Device, c loopConfig) (l *loop, err error) {
	l = &loop{loopConfig: c, dev: dev, place: map[memory.GroupID]int{}, pass: map[[2]int]int{}, scopes: map[string]*Scope{}}
	if l.passes, err = c.pipeline.Passes(c.rank); err != nil {
		return l, err
	}
	for _, p := range l.passes {
		if p.Backward {
			continue
		}
		l.pass[[2]int{p.Chunk, p.Microbatch}] = len(l.pass)
		for i := range c.layers {
			l.place[l.group(p, i)] = len(l.place)
		}
	}
	if l.compute, err = dev.NewStream("compute"); err != nil {
		return l, err
	}
	n := memory.Bytes(cell * (len(l.place) + len(l.pass)))
	for _, b := range []struct {
		to   **device.Buffer
		size memory.Bytes
	}{{&l.from, n}, {&l.to, 2 * n}, {&l.spare, cell}} {
		if *b.to, err = dev.Alloc(memory.Device, b.size, "test"); err != nil {
			return l, err
		}
	}
	l.m, err = New(dev, l.compute, c.Config)
	return l, err
}

func (l *loop) close() (err error) {
	for _, s := range l.scopes {
		err = errors.Join(err, s.Close())
	}
	if l.graph != nil {
		err = errors.Join(err, l.graph.Close())
	}
	if l.m != nil {
		err = errors.Join(err, l.m.Close())
	}
	for _, b := range []*device.Buffer{l.from, l.to, l.spare} {
		if b != nil {
			l.compute.Free(b)
		}
	}
	if l.compute != nil {
		err = errors.Join(err, l.compute.Close())
	}
	return err
}

func (l *loop) group(p schedule.Pass, layer int) memory.GroupID {
	return memory.GroupID{Name: []string{"attn", "mlp"}[layer%2], Chunk: p.Chunk, Layer: layer, Microbatch: p.Microbatch}
}

// size is the bytes of a layer's output: they differ, and are no multiples of much.
func (l *loop) size(layer int) memory.Bytes {
	if l.uniform {
		return 1024
	}
	return memory.Bytes(700 + 300*(layer*7%5))
}

// source is what a layer computes; -1 is a pass's input.
func (l *loop) source(p schedule.Pass, layer int) device.Range {
	if layer < 0 {
		return l.from.Slice(memory.Bytes(cell*(len(l.place)+l.pass[[2]int{p.Chunk, p.Microbatch}])), l.size(layer))
	}
	return l.from.Slice(memory.Bytes(cell*l.place[l.group(p, layer)]), l.size(layer))
}

// feed prepares new contents.
func (l *loop) feed(rng *rand.Rand) {
	l.bytes = make([]byte, l.from.Size())
	for i := range l.bytes {
		l.bytes[i] = byte(rng.Uint32())
	}
	l.compute.Upload(l.from.All(), l.bytes)
	l.compute.Fill(l.to.All(), 0xee)
}

// input makes the storage that the first layer of a pass reads.
func (l *loop) input(p schedule.Pass) (s *Storage, err error) {
	src := l.source(p, -1)
	if !l.borrowed || l.compute.Capturing() {
		if s, err = l.m.Alloc(src.Len); err != nil {
			return nil, err
		}
	} else {
		b, err := l.dev.Alloc(memory.Device, src.Len, "input")
		if err != nil {
			return nil, err
		}
		l.live++
		if s, err = l.m.Borrow(b.All(), func() { l.live--; l.compute.Free(b) }); err != nil {
			return nil, err
		}
	}
	l.compute.Copy(s.Range(), src)
	return s, nil
}

// forward is the forward pass of a layer.
func (l *loop) forward(p schedule.Pass, layer int, in *Storage) (*Storage, error) {
	src := l.source(p, layer)
	out, err := l.m.Alloc(src.Len)
	if err != nil {
		return nil, err
	}
	l.compute.Copy(out.Range(), src)
	_, err = l.m.Save(l.group(p, layer), flat(in), flat(out))
	if err != nil {
		return nil, err
	}
	// Every storage is used right before it is given back, or the mark there would
	// guard nothing that an earlier one does not.
	l.compute.Copy(l.spare.Slice(0, in.Size()), in.Range())
	in.Free()
	if layer == l.layers-1 {
		l.compute.Copy(l.spare.Slice(0, out.Size()), out.Range())
		out.Free()
	}
	return out, nil
}

// flat is a storage as a tensor.
func flat(s *Storage) Tensor { return Tensor{Storage: s, Element: 1, Shape: []int{int(s.Size())}} }

// backward is the backward pass of a layer, with memory of its own.
func (l *loop) backward(p schedule.Pass, layer int) error {
	g := l.group(p, layer)
	grad, err := l.m.Alloc(l.size(layer))
	if err != nil {
		return err
	}
	l.compute.Fill(grad.Range(), 0)
	if err := l.m.Load(g); err != nil {
		return err
	}
	for i, s := range l.m.Saved(g) {
		r := s.Tensor().Range()
		l.compute.Copy(l.to.Slice(memory.Bytes(cell*(2*l.place[g]+i)), r.Len), r)
	}
	l.m.Release(g)
	l.compute.Copy(l.spare.Slice(0, grad.Size()), grad.Range())
	grad.Free()
	return nil
}

// part issues a part of a step, as the loop issues them.
func (l *loop) part(name string, made func(*Scope), body func() error) error {
	if l.how < scopes || l.plan == nil {
		return body()
	}
	if l.slow != nil && l.slow() {
		return l.m.Eager(body)
	}
	if s := l.scopes[name]; s != nil {
		err := s.Replay()
		var moved *Moved
		if !errors.As(err, &moved) {
			if err == nil {
				made(s)
			}
			return err
		}
		l.moved++
		delete(l.scopes, name)
		if err := s.Close(); err != nil {
			return err
		}
	}
	var options []ScopeOption
	if l.how == delayed {
		options = append(options, Delay)
	}
	s, err := l.m.Capture(body, options...)
	switch {
	case err != nil:
	case l.closes:
		err = s.Close()
	default:
		l.scopes[name] = s
	}
	return err
}

// body issues the passes of a step.
func (l *loop) body() error {
	for _, p := range l.passes {
		var x *Storage
		var err error
		if !p.Backward {
			if x, err = l.input(p); err != nil {
				return err
			}
		}
		for i := range l.layers {
			name := fmt.Sprint(p, i)
			if p.Backward {
				err = l.part(name, func(*Scope) {}, func() error { return l.backward(p, l.layers-1-i) })
			} else {
				err = l.part(name, func(s *Scope) { x = s.Storages()[0] }, func() (err error) { x, err = l.forward(p, i, x); return err })
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// one issues a step.
func (l *loop) one() error {
	l.m.Begin(l.plan)
	err := l.body()
	return errors.Join(err, l.m.End())
}

// train runs steps with new contents each, and compares. The first has no plan;
// what it records is what the others follow.
func (l *loop) train(steps int, rng *rand.Rand) error {
	for i := range steps {
		l.feed(rng)
		if err := l.still(func() error { return l.issue(i) }); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		if err := l.compare(); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		if i == 0 {
			l.plan = l.planned(l.m.Tape().Schedule())
		}
	}
	return nil
}

// still runs part of a loop that must not make the host wait.
func (l *loop) still(f func() error) error {
	before := l.dev.Counters()
	err := f()
	after := l.dev.Counters()
	if err == nil && (after.HostReads != before.HostReads || after.HostSyncs != before.HostSyncs) {
		err = fmt.Errorf("the host read %d times and waited %d times", after.HostReads-before.HostReads, after.HostSyncs-before.HostSyncs)
	}
	return err
}

// issue issues step i, the loop's way. A step that is captured whole is captured
// after one that followed the plan.
func (l *loop) issue(i int) (err error) {
	if l.how != whole || i < 2 {
		return l.one()
	}
	if l.graph == nil {
		l.compute.BeginCapture()
		err = l.one()
		g, failed := l.compute.EndCapture()
		if l.graph = g; err != nil || failed != nil {
			return errors.Join(err, failed)
		}
	}
	l.compute.Replay(l.graph)
	return nil
}

// planned is the plan for a schedule.
func (l *loop) planned(s *schedule.Schedule) *residency.Plan {
	p := &residency.Plan{Schedule: s, Offload: map[memory.GroupID]bool{}, Prefetch: make([][]memory.GroupID, s.Len())}
	saves := 0
	for i := range s.Len() {
		e := s.At(i)
		if e.Load {
			at, _ := s.Saved(e.Group)
			if from := i - l.ahead; l.ahead > 0 && from > at && p.Offload[e.Group] {
				p.Prefetch[from] = append(p.Prefetch[from], e.Group)
			}
			continue
		}
		p.Offload[e.Group] = l.leave != nil && l.leave(saves)
		saves++
	}
	return p
}

// compare tells whether the backward passes saw what was saved.
func (l *loop) compare() error {
	got := make([]byte, l.to.Size())
	if err := l.compute.Download(got, l.to.All()); err != nil {
		return err
	}
	if l.live != 0 {
		return fmt.Errorf("%d inputs were not given back", l.live)
	}
	for _, p := range l.passes {
		for i := range l.layers {
			g := l.group(p, i)
			for k, r := range []device.Range{l.source(p, i-1), l.source(p, i)} {
				at := cell * (2*l.place[g] + k)
				if !bytes.Equal(got[at:at+int(r.Len)], l.bytes[r.Off:r.Off+r.Len]) {
					return fmt.Errorf("tensor %d of %v is not what was saved", k, g)
				}
			}
		}
	}
	return nil
}

func all(int) bool      { return true }
func every3(i int) bool { return i%3 != 2 }

var pipelines = []struct {
	name string
	schedule.Pipeline
	rank, layers int
	tight        memory.Bytes // too little for what the step would take
}{
	{"pp1", schedule.Pipeline{Ranks: 1, Chunks: 1, Microbatches: 2}, 0, 6, 8 * memory.KiB},
	{"1f1b", schedule.Pipeline{Ranks: 3, Chunks: 1, Microbatches: 3}, 0, 2, 7 * memory.KiB},
	{"interleaved", schedule.Pipeline{Ranks: 2, Chunks: 2, Microbatches: 4}, 1, 2, 7 * memory.KiB},
}

// onLoop trains a loop on a device and closes it.
func onLoop(dev device.Device, c loopConfig, steps int, after func(l *loop) error) error {
	l, err := newLoop(dev, c)
	if err == nil {
		err = l.train(steps, rand.New(rand.NewPCG(1, uint64(steps))))
	}
	if err == nil && after != nil {
		err = after(l)
	}
	return errors.Join(err, l.close())
}

func openCPU(t testing.TB) device.Device {
	t.Helper()
	d, err := cpuDevice()
	if err != nil {
		t.Fatal(err)
	}
	return d
}
