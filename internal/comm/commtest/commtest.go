// Package commtest is the conformance suite of communicators. Every engine behind
// comm.Comm passes it: ranks in one process, and ranks in processes of their own.
//
// A process holds some of the ranks of a world, and the suite runs in all processes at
// once. Everything that is random follows from fixed seeds, so each process knows what
// every rank does and compares the memory of its own ranks with a model of all.
//
// This file owns the suite and the worlds that it opens, step.go the calls and their
// model, values.go the tests of values, and failures.go those of ranks that give up, leave
// or disagree.
package commtest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// World says how to open a world of ranks.
type World struct {
	Size int   // the number of ranks in all processes, at least two
	Held []int // the ranks of this process, in rising order
	// Device opens the device of a rank that this process holds.
	Device func(rank int) (device.Device, error)
	// Open makes a communicator of all ranks and returns the ends of the ranks that this
	// process holds, which are on the given devices. The suite opens many worlds, one
	// after the other, the same ones in all processes.
	Open func(devs []device.Device) ([]comm.Comm, error)
	// OwnOrder says that the engine does not reduce in the order of ranks, nor as exactly as
	// our own kernels do. The suite then takes numbers for which that makes no difference, if
	// there are two ranks.
	OwnOrder bool
	// Large is more bytes than an engine moves in one piece. Zero means 3 MiB.
	Large memory.Bytes
}

// Run runs the suite. A process that finds a mistake ends its test at once if other
// processes hold ranks, because it is out of step with them.
func Run(t *testing.T, w World) {
	if w.Large == 0 {
		w.Large = 3 * memory.MiB
	}
	for _, test := range []struct {
		name string
		run  func(*testing.T, World)
	}{
		{"every call", everyCall},
		{"random programs", randomPrograms},
		{"many calls in flight", manyInFlight},
		{"large", large},
		{"captures", captures},
		{"split", splits},
		{"gather", gathers},
		{"no wait of the host", noHostWait},
		{"misuse", misuse},
		{"abort", abort},
		{"close", closing},
		{"disagreement", disagreements},
	} {
		ok := t.Run(test.name, func(t *testing.T) { test.run(t, w) })
		if !ok && len(w.Held) < w.Size {
			t.FailNow()
		}
	}
}

// place is one rank of this process: its end of the world, and a stream and a buffer for
// each line of work, so that work on different streams never meets.
type place struct {
	device.Device
	comm    comm.Comm
	streams []device.Stream
	bufs    []*device.Buffer
	spares  []*device.Buffer
}

// setting is an open world.
type setting struct {
	World
	half   memory.Bytes // sources lie in the first half of a buffer, destinations in the second
	places map[int]*place
	comms  []comm.Comm
}

// open opens a world that ends with the test.
func open(t *testing.T, w World, streams int, half memory.Bytes) *setting {
	t.Helper()
	x := &setting{World: w, half: half, places: map[int]*place{}}
	var devs []device.Device
	for _, r := range w.Held {
		d, err := w.Device(r)
		if err != nil {
			t.Fatal(err)
		}
		devs = append(devs, d)
		p := &place{Device: d}
		x.places[r] = p
		for i := range streams {
			s, err := d.NewStream(fmt.Sprintf("rank %d stream %d", r, i))
			if err != nil {
				t.Fatal(err)
			}
			b, err := d.Alloc(memory.Device, 2*half, fmt.Sprintf("rank %d buffer %d", r, i))
			if err != nil {
				t.Fatal(err)
			}
			spare, err := d.Alloc(memory.Device, 2*half, "spare")
			if err != nil {
				t.Fatal(err)
			}
			p.streams, p.bufs, p.spares = append(p.streams, s), append(p.bufs, b), append(p.spares, spare)
			s.Upload(b.All(), x.first(r, i))
		}
	}
	cs, err := w.Open(devs)
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range w.Held {
		x.places[r].comm = cs[i]
	}
	x.comms = cs
	t.Cleanup(func() {
		if err := x.close(); err != nil {
			t.Error(err)
		}
	})
	return x
}

// close closes all that open opened. Devices report what was not freed.
func (x *setting) close() error {
	closed := make(chan error)
	for _, r := range x.Held { // each may wait for the others
		go func() { closed <- x.places[r].comm.Close() }()
	}
	var err error
	for range x.Held {
		err = errors.Join(err, <-closed)
	}
	for _, r := range x.Held {
		p := x.places[r]
		for i, s := range p.streams {
			s.Free(p.bufs[i])
			s.Free(p.spares[i])
			err = errors.Join(err, s.Close())
		}
	}
	for _, r := range x.Held {
		err = errors.Join(err, x.places[r].Close())
	}
	return err
}

// run runs f on every rank of this process and returns the error of comm.Run.
func (x *setting) run(f func(c comm.Comm, p *place) error) error {
	return comm.Run(x.comms, func(c comm.Comm) error { return f(c, x.places[c.Rank()]) })
}

// first returns what a buffer of any rank holds at first.
func (x *setting) first(rank, stream int) []byte {
	rng := rand.New(rand.NewPCG(uint64(rank), uint64(stream)))
	b := make([]byte, 2*x.half)
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

// rotate moves every byte of a buffer one place to the front.
func (p *place) rotate(i int) {
	s, b, spare := p.streams[i], p.bufs[i], p.spares[i]
	n := b.Size()
	s.Copy(spare.Slice(0, n-1), b.Slice(1, n-1))
	s.Copy(spare.Slice(n-1, 1), b.Slice(0, 1))
	s.Copy(b.All(), spare.All())
}

func rotateBytes(b []byte) {
	first := b[0]
	copy(b, b[1:])
	b[len(b)-1] = first
}
