// This file owns the tests of values: programs of calls on a world, compared with the
// model bit for bit.

package commtest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// program is a list of calls on communicators of some of the ranks.
type program struct {
	size, streams int
	half          memory.Bytes
	ranks         [][]int // of each communicator; the first is all
	steps         []step
	touch         bool // rewrite all memory between two calls, so that each wait of a call matters
	own           bool // the engine reduces in an order of its own
}

func newProgram(w World, streams int, half memory.Bytes) *program {
	all := make([]int, w.Size)
	for i := range all {
		all[i] = i
	}
	return &program{size: w.Size, streams: streams, half: half, ranks: [][]int{all}, own: w.OwnOrder}
}

// add draws a call of the given kind.
func (p *program) add(rng *rand.Rand, kind int) {
	c := rng.IntN(len(p.ranks))
	s := draw(rng, kind, len(p.ranks[c]), p.half, p.own)
	s.comm, s.stream = c, rng.IntN(p.streams)
	p.steps = append(p.steps, s)
}

// randomProgram draws a program of calls.
func randomProgram(rng *rand.Rand, w World, streams, calls int, half memory.Bytes) *program {
	p := newProgram(w, streams, half)
	p.touch = rng.IntN(2) == 0
	for range rng.IntN(4) {
		p.ranks = append(p.ranks, rng.Perm(w.Size)[:1+rng.IntN(w.Size)])
	}
	for range calls {
		p.add(rng, rng.IntN(len(kinds)))
	}
	return p
}

// play runs the program on a new world. The host waits for nothing until all calls are
// made and the communicators of some ranks are closed, because that would add an order
// that the streams lack.
func (p *program) play(t *testing.T, w World) {
	t.Helper()
	x := open(t, w, p.streams, p.half)
	err := x.run(func(c comm.Comm, at *place) error {
		mine, err := p.split(c)
		if err != nil {
			return err
		}
		for i := range p.steps {
			s := &p.steps[i]
			if c := mine[s.comm]; c != nil {
				s.call(c, at.streams[s.stream], at.bufs[s.stream])
			}
			if p.touch {
				at.rotate(s.stream)
			}
		}
		for _, m := range mine[1:] {
			if m != nil {
				err = errors.Join(err, m.Close())
			}
		}
		return errors.Join(err, c.Err())
	})
	if err != nil {
		t.Fatal(err)
	}
	p.compare(t, x)
}

// compare compares the memory of the ranks of this process with the model's.
func (p *program) compare(t *testing.T, x *setting) {
	t.Helper()
	want := p.want(x)
	for _, r := range x.Held {
		at := x.places[r]
		for i, b := range at.bufs[:p.streams] {
			got := make([]byte, b.Size())
			if err := errors.Join(at.streams[i].Download(got, b.All()), at.comm.Err()); err != nil {
				t.Fatal(err)
			}
			if k := differs(got, want[r][i]); k >= 0 {
				t.Fatalf("rank %d, stream %d: byte %d is %#x, want %#x, after %s", r, i, k, got[k], want[r][i][k], p.names(i))
			}
		}
	}
}

// captures makes each call several times in one graph on two streams, and replays the graph.
// Engines whose calls need the host cannot.
func captures(t *testing.T, w World) {
	const replays = 3
	rng := rand.New(rand.NewPCG(7, 6))
	p := newProgram(w, 2, 2048)
	p.ranks = append(p.ranks, rng.Perm(w.Size))
	for kind := range kinds {
		p.add(rng, kind)
		p.add(rng, kind)
	}
	x := open(t, w, 3, p.half)
	if _, ok := x.comms[0].(comm.Capturer); !ok {
		t.Skip("the engine exchanges data through the host")
	}
	err := x.run(func(c comm.Comm, at *place) error {
		mine, err := p.split(c)
		if err != nil {
			return err
		}
		for i := range p.steps { // the first time an engine may do what cannot be captured
			s := draw(rand.New(rand.NewPCG(uint64(i), 8)), i%len(kinds), w.Size, 2048, p.own)
			s.call(mine[i%2], at.streams[2], at.bufs[2])
		}
		fork, err := at.NewEvent(0)
		if err != nil {
			return err
		}
		main, side := at.streams[0], at.streams[1]
		side.Record(fork)
		main.Wait(fork)
		g, err := c.(comm.Capturer).Capture(main, func() error {
			main.Record(fork)
			side.Wait(fork)
			for i := range p.steps {
				s := &p.steps[i]
				s.call(mine[s.comm], at.streams[s.stream], at.bufs[s.stream])
			}
			side.Record(fork)
			main.Wait(fork)
			return nil
		})
		if err != nil {
			return err
		}
		for range replays {
			if err := g.Replay(); err != nil {
				return err
			}
		}
		err = errors.Join(main.Sync(), c.Err())
		return errors.Join(err, g.Close(), fork.Close(), mine[1].Close())
	})
	if err != nil {
		t.Fatal(err)
	}
	steps := p.steps
	for range replays - 1 {
		p.steps = append(p.steps, steps...)
	}
	p.compare(t, x)
}

// split opens a rank's ends of all communicators of the program.
func (p *program) split(c comm.Comm) ([]comm.Comm, error) {
	mine := []comm.Comm{c}
	for _, ranks := range p.ranks[1:] {
		if !slices.Contains(ranks, c.Rank()) {
			mine = append(mine, nil)
			continue
		}
		s, err := c.Split(ranks)
		if err != nil {
			return nil, err
		}
		if s.Size() != len(ranks) || ranks[s.Rank()] != c.Rank() {
			return nil, fmt.Errorf("rank %d is rank %d of %d after Split(%v)", c.Rank(), s.Rank(), s.Size(), ranks)
		}
		mine = append(mine, s)
	}
	return mine, nil
}

// want returns what the buffers of all ranks hold in the end, by rank and stream.
func (p *program) want(x *setting) [][][]byte {
	mem := make([][][]byte, p.size)
	for r := range mem {
		for i := range p.streams {
			mem[r] = append(mem[r], x.first(r, i))
		}
	}
	for i := range p.steps {
		s := &p.steps[i]
		var old [][]byte
		for _, r := range p.ranks[s.comm] {
			old = append(old, slices.Clone(mem[r][s.stream]))
		}
		for k, r := range p.ranks[s.comm] {
			s.model(k, old, mem[r][s.stream])
		}
		if p.touch {
			for r := range mem {
				rotateBytes(mem[r][s.stream])
			}
		}
	}
	return mem
}

func (p *program) names(stream int) (all []string) {
	for _, s := range p.steps {
		if s.stream == stream {
			all = append(all, fmt.Sprintf("%s on %v", s.name, p.ranks[s.comm]))
		}
	}
	return all
}

// differs returns the first place at which two runs of bytes differ, or -1.
func differs(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

// everyCall makes each call several times on all ranks.
func everyCall(t *testing.T, w World) {
	for kind := range kinds {
		rng := rand.New(rand.NewPCG(uint64(kind), 0))
		p := newProgram(w, 1, 2048)
		p.touch = true
		for range 12 {
			p.add(rng, kind)
		}
		p.play(t, w)
	}
}

// randomPrograms mixes all calls on several communicators and streams.
func randomPrograms(t *testing.T, w World) {
	for seed := range uint64(10) {
		rng := rand.New(rand.NewPCG(seed, 1))
		randomProgram(rng, w, 1+rng.IntN(3), 30, 2048).play(t, w)
	}
}

// manyInFlight issues many calls on several streams before any of them need be done.
func manyInFlight(t *testing.T, w World) {
	rng := rand.New(rand.NewPCG(3, 2))
	randomProgram(rng, w, 4, 400, 1024).play(t, w)
}

// large moves more than an engine may move in one piece.
func large(t *testing.T, w World) {
	rng := rand.New(rand.NewPCG(4, 3))
	p := newProgram(w, 1, w.Large)
	for kind := range kinds {
		p.add(rng, kind)
	}
	p.play(t, w)
}

// splits makes communicators of communicators, and two of the same list, whose calls are
// kept apart.
func splits(t *testing.T, w World) {
	x := open(t, w, 2, 256)
	err := x.run(func(c comm.Comm, at *place) error {
		reversed := make([]int, w.Size)
		for i := range reversed {
			reversed[i] = w.Size - 1 - i
		}
		a, err := c.Split(reversed)
		if err != nil {
			return err
		}
		b, err := a.Split(reversed) // in the order of the world again
		if err != nil {
			return err
		}
		twin, err := a.Split(reversed)
		if err != nil {
			return err
		}
		if b.Rank() != c.Rank() || a.Rank() != w.Size-1-c.Rank() {
			return fmt.Errorf("rank %d is rank %d in reverse and %d twice reversed", c.Rank(), a.Rank(), b.Rank())
		}
		n := memory.Bytes(w.Size)
		for i, s := range at.streams {
			m := at.bufs[i]
			s.Fill(m.Slice(0, 1), byte(c.Rank()+1))
			a.AllGather(s, m.Slice(256, n), m.Slice(0, 1))
			[]comm.Comm{b, twin}[i].AllGather(s, m.Slice(320, n), m.Slice(0, 1))
		}
		err = errors.Join(a.Close(), b.Close(), twin.Close())
		for i, s := range at.streams {
			got := make([]byte, 128)
			err = errors.Join(err, s.Download(got, at.bufs[i].Slice(256, 128)))
			for r := range w.Size {
				if got[w.Size-1-r] != byte(r+1) || got[64+r] != byte(r+1) {
					return errors.Join(err, fmt.Errorf("rank %d, stream %d: got %v", c.Rank(), i, got))
				}
			}
		}
		return errors.Join(err, c.Err())
	})
	if err != nil {
		t.Error(err)
	}
}

// gathers passes bytes of different lengths between hosts, between calls on a stream.
func gathers(t *testing.T, w World) {
	x := open(t, w, 1, 256)
	err := x.run(func(c comm.Comm, at *place) error {
		order := rand.New(rand.NewPCG(6, 5)).Perm(w.Size)
		sub, err := c.Split(order)
		if err != nil {
			return err
		}
		for round := range 5 {
			of := func(c comm.Comm, r int) []byte {
				return bytes.Repeat([]byte{byte(round), byte(r + 1)}, (r+round)%4*1000)
			}
			for _, on := range []comm.Comm{c, sub} {
				on.Barrier(at.streams[0])
				mine := of(on, on.Rank())
				all, err := on.Gather(mine)
				if err != nil {
					return err
				}
				clear(mine) // the caller may
				for r := range w.Size {
					if !bytes.Equal(all[r], of(on, r)) {
						return fmt.Errorf("round %d: rank %d got %d bytes of rank %d, want %d", round, on.Rank(), len(all[r]), r, len(of(on, r)))
					}
				}
			}
		}
		return errors.Join(at.streams[0].Sync(), sub.Close(), c.Err())
	})
	if err != nil {
		t.Error(err)
	}
}

// noHostWait proves that calls neither wait for a device nor read its memory.
func noHostWait(t *testing.T, w World) {
	rng := rand.New(rand.NewPCG(5, 4))
	x := open(t, w, 1, 2048)
	var steps []step
	for kind := range kinds {
		steps = append(steps, draw(rng, kind, w.Size, 2048, w.OwnOrder))
	}
	before := map[int]device.Counters{}
	for r, at := range x.places {
		before[r] = at.Counters()
	}
	err := x.run(func(c comm.Comm, at *place) error {
		for _, s := range steps {
			s.call(c, at.streams[0], at.bufs[0])
		}
		return c.Err()
	})
	for r, at := range x.places {
		if a, b := before[r], at.Counters(); a.HostReads != b.HostReads || a.HostSyncs != b.HostSyncs {
			t.Errorf("rank %d: the host waited or read device memory: %+v, then %+v", r, a, b)
		}
		err = errors.Join(err, at.streams[0].Sync())
	}
	if err != nil {
		t.Error(err)
	}
}
