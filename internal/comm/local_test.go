package comm

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/memory"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/kernels"
)

// driver is Run or Lockstep.
type driver func(cs []Comm, f func(c Comm) error) error

// play runs a program on a new world and compares all memory with the model. The host
// waits for nothing until everything is issued and the communicators are closed, because
// it would add an order that the streams lack.
func (p *program) play(drive driver, shared bool, open opener, o Options) (err error) {
	x, err := newSetting(p.n, p.streams, shared, open, o, 7)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.close()) }()
	err = drive(x.comms, func(c Comm) error {
		mine, err := p.split(c)
		if err != nil {
			return err
		}
		p.issue(x, c.Rank(), mine)
		for _, m := range mine[1:] {
			if m != nil {
				err = errors.Join(err, m.Close())
			}
		}
		return errors.Join(err, c.Err())
	})
	if err = errors.Join(err, x.leave()); err != nil {
		return err
	}
	want := p.want(x, 1)
	for r := range p.n {
		if err := p.compare(x, r, want); err != nil {
			return err
		}
	}
	return nil
}

// Every collective agrees with the model on 1 to 8 ranks, on communicators of all and of
// some ranks in any order, on several streams, for both types, in place and not, with
// counts from zero on. SPEC S6.3
func TestCollectives(t *testing.T) {
	for name, drive := range map[string]driver{"run": Run, "lockstep": Lockstep} {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				n := rapid.IntRange(1, 8).Draw(t, "ranks")
				calls := rapid.IntRange(1, 12).Draw(t, "calls")
				rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
				p := randomProgram(rng, n, 1+rng.IntN(3), calls, rng.IntN(2) == 0)
				if err := p.play(drive, rng.IntN(4) == 0, openCPU, Options{}); err != nil {
					t.Fatalf("%+v: %v", p.actions, err)
				}
			})
		})
	}
}

// All collectives agree with the model on a GPU, with all ranks on it. SPEC S6.3
func TestCollectivesOnGPU(t *testing.T) {
	open := func(int) (device.Device, error) { return cuda.Open(cuda.Options{CopyKernel: kernels.GraphCopy}) }
	rng := rand.New(rand.NewPCG(21, 0))
	for n := 1; n <= 8; n++ {
		err := randomProgram(rng, n, 2, 40, true).play(Run, true, open, Options{})
		var missing *device.Unsupported
		if errors.As(err, &missing) {
			t.Skip(err)
		}
		if err != nil {
			t.Errorf("%d ranks: %v", n, err)
		}
	}
}

// More ranks than a launch has sources give the same bits: fp32 sums in the order of
// ranks, rounded once. SPEC S6.3
func TestManyRanks(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for _, n := range []int{12, 13, 24, 25, 30} {
		p := &program{n: n, streams: 2, ranks: [][]int{ranksBelow(n)}}
		for _, k := range []kind{reduceScatter, allReduce, allReduce} {
			for _, t := range []Type{F32, BF16} {
				for _, op := range []Op{Sum, Mean, Max} {
					a := randomAction(rng, n)
					a.sig = sig{kind: k, t: t, op: op, bytes: 64 + 4*memory.Bytes(rng.IntN(40))}
					if k == reduceScatter {
						a.bytes = min(a.bytes, half/2/memory.Bytes(n)/4*4)
					}
					a.stream = rng.IntN(2)
					p.actions = append(p.actions, a, action{touch: true, stream: a.stream})
				}
			}
		}
		if err := p.play(Run, false, openCPU, Options{scratch: 64}); err != nil {
			t.Errorf("%d ranks: %v", n, err)
		}
	}
}

// The declarations of a launch's last sources are cached by source, so reductions that
// share only some of their sources are told apart.
func TestDeclaredSources(t *testing.T) {
	x := ofTest(t, 1, 1, Options{})
	g, b := x.comms[0].(*Local).g.reducers[0], x.places[0].bufs[0]
	rng := rand.New(rand.NewPCG(1, 1))
	for range 100 {
		srcs := make([]device.Range, 1+rng.IntN(kernels.MaxReduceSources))
		for i := range srcs {
			srcs[i] = b.Slice(memory.Bytes(rng.IntN(2)*16), 16)
		}
		for range 2 {
			if got, want := g.rest(srcs), kernels.ReduceRest(srcs...); !slices.Equal(got, want) {
				t.Fatalf("%v: %v, want %v", srcs, got, want)
			}
		}
	}
}
