// This file owns the steps of the loop in miniature, and what they must come to.

package engine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// body issues the passes of a step.
func (l *loop) body(s *Step) error {
	l.calls++
	if l.shift > 0 { // everything else moves
		x, err := s.New(l.shift)
		if err != nil {
			return err
		}
		defer x.Free()
	}
	ms, layers := l.chain()
	for _, p := range l.passes {
		if p.Backward && s.key.Phase == memory.Evaluate {
			continue
		}
		var x *Tensor
		var err error
		if !p.Backward {
			if x, err = l.input(s, p); err != nil {
				return err
			}
		}
		for from := 0; from < len(ms); {
			at, to := from, from+1
			if p.Backward {
				at = len(ms) - 1 - from
			}
			in := func(k int) bool { return ms[k].scope == ms[at].scope && layers[k] == layers[at] }
			for next := func() int { return at + (to-from)*sign(p) }; to < len(ms) && ms[at].scope != outside && in(next()); {
				to++
			}
			part := func() (out []*Tensor, err error) {
				for k := range to - from {
					if p.Backward {
						err = l.backward(s, p, at-k)
					} else {
						x, err = l.forward(s, p, at+k, x)
					}
					if err != nil {
						return nil, err
					}
				}
				if x != nil {
					out = append(out, x)
				}
				return out, nil
			}
			if err := l.scope(s, p, layers[at], ms[at].scope, part, &x); err != nil {
				return err
			}
			from = to
		}
		if x != nil {
			l.free(x)
		}
	}
	return l.more(s)
}

func sign(p schedule.Pass) int {
	if p.Backward {
		return -1
	}
	return 1
}

// scope issues a part of a pass.
func (l *loop) scope(s *Step, p schedule.Pass, layer int, scope memory.Scope, part func() ([]*Tensor, error), x **Tensor) error {
	if scope == outside {
		_, err := part()
		return err
	}
	out, err := s.Scope(scope, Pass{p.Chunk, layer, p.Microbatch, p.Backward}, part)
	if len(out) == 1 {
		*x = out[0]
	}
	return err
}

// more makes a step depart from its plan.
func (l *loop) more(s *Step) error {
	for i := range l.extra {
		g := memory.GroupID{Name: "extra", Layer: i}
		to := s.BeginGroup(g)
		x, err := s.New(512)
		if err != nil {
			return err
		}
		l.compute.Fill(x.Range(), 1)
		to.Save(x)
		x.Free()
		if err := to.End(); err != nil {
			return err
		}
		got, err := s.Load(g)
		if err != nil {
			return err
		}
		got.Done()
	}
	return nil
}

// feed gives the next step other inputs.
func (l *loop) feed(rng *rand.Rand) {
	l.seed = rng.Uint64()
	l.compute.Upload(l.seeds.Slice(0, 8), binary.LittleEndian.AppendUint64(nil, l.seed))
	raw := make([]byte, l.rows.Size())
	for g, salt := range l.salt {
		if l.most > 0 {
			l.live[g] = stash.Rows((l.seed>>8 + salt*7) % uint64(l.most+1))
			binary.LittleEndian.PutUint64(raw[8*salt:], uint64(l.live[g]))
		}
	}
	l.compute.Upload(l.rows.All(), raw)
	if !l.dry {
		l.compute.Fill(l.to.All(), 0xee)
	}
}

// want is the outputs of all modules in a step.
func (l *loop) want() map[memory.GroupID][]byte {
	all := map[memory.GroupID][]byte{}
	ms, layers := l.chain()
	for _, p := range l.passes {
		x := make([]byte, 1040*l.scale)
		kernels.Noise(x, l.seed, inputSalt(p))
		all[memory.GroupID{Name: "input", Chunk: p.Chunk, Microbatch: p.Microbatch}] = x
		for i, m := range ms {
			g := id(p, layers[i], m)
			y := make([]byte, l.size(m))
			if m.name == "expert_fc1" && l.space != nil {
				y = make([]byte, l.most*rowBytes)
				x = nil
			}
			n := l.taken(memory.Bytes(len(x)), memory.Bytes(len(y)))
			copy(y, x[:n])
			kernels.Noise(y[n:], l.seed, l.salt[g])
			all[g], x = y, y
			if m.name == "expert_fc1" && l.space != nil {
				all[g], x = y[:l.live[g]*rowBytes], nil
			}
		}
	}
	return all
}

// compare tells whether the backward passes were given what was saved.
func (l *loop) compare() error {
	got := make([]byte, l.used)
	if err := l.compute.Download(got, l.to.Slice(0, l.used)); err != nil {
		return err
	}
	if l.borrowed != 0 {
		return fmt.Errorf("%d inputs were not given back", l.borrowed)
	}
	want := l.want()
	if !l.dry && len(l.cells[l.now]) == 0 {
		return errors.New("there is nothing to compare")
	}
	for k, c := range l.cells[l.now] {
		w, t := want[c.of], c.tensor
		at := got[c.at:]
		switch {
		case t.Storage == nil: // rows
		case k.Name == "router" && k.i == 0 && t.Strides == nil: // packed
			var packed []byte
			for i := range t.Shape[0] {
				packed = append(packed, w[16+64*i:32+64*i]...)
			}
			w = packed
		case t.Strides != nil:
			w = w[t.Offset:][:(t.Shape[0]-1)*64+16]
		default:
			w = w[t.Offset:][:t.Bytes()]
		}
		for i := range w {
			if at[i] != w[i] {
				return fmt.Errorf("tensor %d of %v differs from byte %d on", k.i, k.GroupID, i)
			}
		}
	}
	return nil
}

// step runs a step.
func (l *loop) step(key memory.Key) error {
	if l.now = key; l.cells[key] == nil {
		l.cells[key] = map[cellKey]cell{}
	}
	return l.rt.Step(key, l.body)
}

// one runs a step and compares.
func (l *loop) one(key memory.Key, rng *rand.Rand) error {
	l.feed(rng)
	if err := l.step(key); err != nil {
		return err
	}
	if key.Phase == memory.Evaluate {
		return nil
	}
	return l.compare()
}

func (l *loop) key() memory.Key { return memory.Key{Microbatches: l.pipeline.Microbatches} }

// train runs steps with other inputs each, and compares.
func (l *loop) train(steps int, rng *rand.Rand) error {
	for i := range steps {
		if err := l.one(l.key(), rng); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
	}
	return nil
}
