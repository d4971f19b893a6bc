// This file owns what the tests share: ranks with streams and memory.

package comm

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stowage-dev/stowage/memory"

	"go.uber.org/goleak"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, goleak.Cleanup(os.Exit)) }

// place is one rank: a device, and a buffer for each of its streams, so that work on
// different streams never meets.
type place struct {
	device.Device
	streams []device.Stream
	bufs    []*device.Buffer
	spares  []*device.Buffer
	first   []byte // what all buffers hold at first
}

// half is the size of the two halves of a buffer. Sources lie in the first, and
// destinations in the second.
const half memory.Bytes = 2048

// capacity keeps devices small, and makes it unnecessary to ask the machine for its
// memory.
var capacity = [memory.Kinds]memory.Bytes{256 * memory.MiB, memory.MiB}

// opener opens the device of a rank.
type opener func(rank int) (device.Device, error)

func openCPU(rank int) (device.Device, error) {
	return cpu.Open(cpu.Options{Ordinal: rank, Capacity: capacity})
}

// setting is a world of ranks.
type setting struct {
	places []*place
	comms  []Comm
	graphs atomic.Int32 // that are open
}

// graphing is a stream whose graphs are counted while they are open.
type graphing struct {
	device.Stream
	x *setting
}

type countedGraph struct {
	device.Graph
	x *setting
}

func (s graphing) EndCapture() (device.Graph, error) {
	g, err := s.Stream.EndCapture()
	if err != nil {
		return nil, err
	}
	s.x.graphs.Add(1)
	return countedGraph{g, s.x}, nil
}

func (s graphing) Replay(g device.Graph) { s.Stream.Replay(g.(countedGraph).Graph) }

func (g countedGraph) Close() error {
	g.x.graphs.Add(-1)
	return g.Graph.Close()
}

// newSetting opens n ranks with a number of streams each. If shared, all of them
// are on one device.
func newSetting(n, streams int, shared bool, open opener, o Options, seed uint64) (*setting, error) {
	x := &setting{}
	var devs []device.Device
	for r := range n {
		var d device.Device
		var err error
		if shared && r > 0 {
			d = devs[0]
		} else if d, err = open(r); err != nil {
			return nil, err
		}
		devs = append(devs, d)
		p := &place{Device: d, first: make([]byte, 2*half)}
		rng := rand.New(rand.NewPCG(seed, uint64(r)))
		for i := range p.first {
			p.first[i] = byte(rng.Uint32())
		}
		for i := range streams {
			s, err := d.NewStream(fmt.Sprintf("rank %d stream %d", r, i))
			if err != nil {
				return nil, err
			}
			b, err := d.Alloc(memory.Device, 2*half, fmt.Sprintf("rank %d buffer %d", r, i))
			if err != nil {
				return nil, err
			}
			spare, err := d.Alloc(memory.Device, 2*half, "spare")
			if err != nil {
				return nil, err
			}
			p.streams, p.bufs, p.spares = append(p.streams, graphing{s, x}), append(p.bufs, b), append(p.spares, spare)
			s.Upload(b.All(), p.first)
		}
		x.places = append(x.places, p)
	}
	var err error
	x.comms, err = NewLocal(devs, o)
	return x, err
}

// leave closes the communicators.
func (x *setting) leave() (err error) {
	for _, c := range x.comms {
		err = errors.Join(err, c.Close())
	}
	x.comms = nil
	return err
}

// close frees everything. Devices report what nobody freed. A world that has not failed leaves
// no graph open, and one that has failed neither.
func (x *setting) close() (err error) {
	err = x.leave()
	if n := x.graphs.Load(); n != 0 {
		err = errors.Join(err, fmt.Errorf("%d graphs are open", n))
	}
	for _, p := range x.places {
		for i, s := range p.streams {
			s.Free(p.bufs[i])
			s.Free(p.spares[i])
			err = errors.Join(err, s.Close())
		}
	}
	var closed []device.Device
	for _, p := range x.places {
		if !slices.Contains(closed, p.Device) {
			err = errors.Join(err, p.Close())
			closed = append(closed, p.Device)
		}
	}
	return err
}

// ofTest returns a setting that ends with the test.
func ofTest(t testing.TB, n, streams int, o Options) *setting {
	t.Helper()
	x, err := newSetting(n, streams, false, openCPU, o, 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := x.close(); err != nil {
			t.Error(err)
		}
	})
	return x
}

// rotate rewrites a buffer: every byte moves one place to the front.
func (at *place) rotate(i int) {
	s, b, spare := at.streams[i], at.bufs[i], at.spares[i]
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
