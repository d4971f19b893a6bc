// This file compares where rows go with a count of the choices: what all policies have in
// common no comparison of policies can show.

package layer

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// routed is a drawn layout of experts, and what the tokens of all ranks choose.
type routed struct {
	how                  Dispatch
	ranks, experts, topK int
	tokens               int // of a rank
	capacity             float64
	slots, link          bool
	chosen               [][]int // by token of all ranks
}

func drawRouted(rng *rand.Rand) routed {
	x := routed{how: Dispatch(rng.IntN(2)), ranks: 1 + rng.IntN(4), tokens: 1 + rng.IntN(9), slots: rng.IntN(2) == 0, link: rng.IntN(2) == 0}
	x.experts = x.ranks * (1 + rng.IntN(3))
	x.topK = 1 + rng.IntN(min(3, x.experts))
	if rng.IntN(4) > 0 {
		x.capacity = 0.25 + 1.5*rng.Float64()
	}
	crowd := 1 + rng.IntN(x.experts)
	for range x.ranks * x.tokens {
		all := rng.Perm(x.experts)
		if rng.IntN(2) == 0 { // some experts are chosen more often
			slices.SortStableFunc(all, func(a, b int) int { return a/crowd - b/crowd })
		}
		x.chosen = append(x.chosen, all[:x.topK])
	}
	return x
}

// kept returns the pairs of token and choice that each expert computes, in the order of
// tokens: as many as the capacity allows of all tokens in a ring, and of each rank's otherwise.
func (x *routed) kept() [][][2]int {
	share := x.tokens
	if x.how == Ring || x.ranks == 1 {
		share *= x.ranks
	}
	most := math.MaxInt
	if x.capacity > 0 {
		most = max(1, int(math.Ceil(x.capacity*float64(share*x.topK)/float64(x.experts))))
	}
	of := make([][][2]int, x.experts)
	for from := 0; from < len(x.chosen); from += share {
		taken := make([]int, x.experts)
		for token := from; token < from+share; token++ {
			for k, e := range x.chosen[token] {
				if taken[e]++; taken[e] <= most {
					of[e] = append(of[e], [2]int{token, k})
				}
			}
		}
	}
	return of
}

// numbers returns fp32 or uint32 in memory of the CPU device.
func numbers[T float32 | uint32](r device.Range) []T {
	return device.Slice[T](uint64(r.Addr()), int(r.Len/4))
}

const dispatchCols = 3

// value is what a token has in a column, and weight what it gives a choice.
func value(token, col int) float32  { return float32(100*token + col + 1) }
func weightOf(token, k int) float32 { return float32(10*token + k + 1) }

// pass sends the rows of a rank's tokens to their experts, which multiply them by their number,
// and back.
func (x *routed) pass(p *Pass, d *dispatcher, kept [][][2]int) {
	rank, first := d.rank, d.rank*x.tokens
	rooms, slot := d.Worst(), 0
	if x.slots {
		rooms, slot = d.Padded(), d.slot()
	}
	index, weights, in, plus := p.words(x.tokens*x.topK), p.newOf(kernels.F32, x.tokens*x.topK, 1), p.newOf(kernels.F32, x.tokens, dispatchCols), p.newOf(kernels.F32, x.tokens, dispatchCols)
	p.S.Host(func() {
		for i := range x.tokens {
			for c := range dispatchCols {
				numbers[float32](in.Range)[i*dispatchCols+c], numbers[float32](plus.Range)[i*dispatchCols+c] = value(first+i, c), 0.5
			}
			for k, e := range x.chosen[first+i] {
				numbers[uint32](index.Range())[i*x.topK+k], numbers[float32](weights.Range)[i*x.topK+k] = uint32(e), weightOf(first+i, k)
			}
		}
	})
	tab := p.words(d.words(rooms))
	t := d.view(tab.Range(), rooms)
	came := d.announce(p, t, index.Range())
	rows, ws := t.send(p, in.Matrix, false), t.send(p, weights.Matrix, true)
	count := p.bytes(8)
	d.sort(p, t, index.Range(), came, count.Range(), slot)
	got, gotW := p.newOf(kernels.F32, rooms, dispatchCols), p.newOf(kernels.F32, rooms, 1)
	t.take(p, got.Matrix, rows, false)
	t.take(p, gotW.Matrix, ws, true)

	var n [8]byte
	must(p.S.Download(n[:], count.Range()))
	seg, at, total := numbers[uint32](t.seg), 0, 0
	for e := range d.local() {
		pairs := kept[rank*d.local()+e]
		if x.slots {
			at = e * slot
		}
		if int(seg[2*e]) != at || int(seg[2*e+1]) != len(pairs) {
			must(fmt.Errorf("rank %d: expert %d has %d rows from %d on, want %d from %d", rank, e, seg[2*e+1], seg[2*e], len(pairs), at))
		}
		for i, pair := range pairs {
			for c := range dispatchCols {
				v := &numbers[float32](got.Range)[(at+i)*dispatchCols+c]
				if want := value(pair[0], c); *v != want {
					must(fmt.Errorf("rank %d: row %d of expert %d is %v, want %v", rank, i, e, *v, want))
				}
				*v *= float32(rank*d.local() + e + 1)
			}
			w := &numbers[float32](gotW.Range)[at+i]
			if want := weightOf(pair[0], pair[1]); *w != want {
				must(fmt.Errorf("rank %d: weight %d of expert %d is %v, want %v", rank, i, e, *w, want))
			}
			*w *= float32(rank*d.local() + e + 1)
		}
		if at += len(pairs); len(pairs) > 0 {
			total = at // the end of the last row
		}
	}
	if n[0] != byte(total) || n[1] != byte(total>>8) {
		must(fmt.Errorf("rank %d counts %v rows, want %d", rank, n, total))
	}

	sums, back := make([]float32, x.tokens*dispatchCols), make([]float32, x.tokens*x.topK)
	for i := range sums {
		sums[i] = 0.5
	}
	for e, pairs := range kept {
		for _, pair := range pairs {
			if i := pair[0] - first; i >= 0 && i < x.tokens {
				for c := range dispatchCols {
					sums[i*dispatchCols+c] += value(pair[0], c) * float32(e+1)
				}
				back[i*x.topK+pair[1]] = weightOf(pair[0], pair[1]) * float32(e+1)
			}
		}
	}
	y, dw := p.newOf(kernels.F32, x.tokens, dispatchCols), p.newOf(kernels.F32, x.tokens*x.topK, 1)
	pairs := t.giveBack(p, gotW, dw.Matrix, true)
	results := t.giveBack(p, got, nn.Matrix{}, false)
	t.collectPairs(p, dw.Matrix, pairs)
	t.collect(p, y.Matrix, results, plus.Matrix)
	must(p.S.Sync())
	if !slices.Equal(numbers[float32](y.Range), sums) {
		must(fmt.Errorf("rank %d: tokens get %v, want %v", rank, numbers[float32](y.Range), sums))
	}
	if !slices.Equal(numbers[float32](dw.Range), back) {
		must(fmt.Errorf("rank %d: pairs get %v, want %v", rank, numbers[float32](dw.Range), back))
	}
	for _, m := range []Mat{y, dw, weights, in, plus} {
		m.Free()
	}
	for _, t := range []*engine.Tensor{index, tab, count} {
		t.Free()
	}
}

// Every row that the capacity allows reaches its expert, in the order of ranks and tokens, and
// returns to its token. No other does. SPEC S3.1
func TestRowsFindTheirExperts(t *testing.T) {
	rng := rand.New(rand.NewPCG(43, 191))
	for range 60 {
		x := drawRouted(rng)
		if err := x.run(); err != nil {
			t.Fatalf("%+v: %v", x, err)
		}
	}
}

// run runs the pass on all ranks, each with a device of its own.
func (x *routed) run() (err error) {
	devs := make([]device.Device, x.ranks)
	for r := range devs {
		if devs[r], err = cpu.Open(cpu.Options{Ordinal: r}); err != nil {
			return err
		}
	}
	comms := make([]comm.Comm, x.ranks)
	if x.ranks > 1 {
		if comms, err = comm.NewLocal(devs, comm.Options{}); err != nil {
			return err
		}
	}
	kept, errs := x.kept(), make([]error, x.ranks)
	var ranks sync.WaitGroup
	for r := range devs {
		ranks.Go(func() {
			errs[r] = x.rank(devs[r], comms[r], r, kept)
			if errs[r] != nil && comms[r] != nil {
				comms[r].Abort(errs[r])
			}
		})
	}
	ranks.Wait()
	for r := range devs {
		if comms[r] != nil {
			errs = append(errs, comms[r].Close())
		}
	}
	for _, d := range devs {
		errs = append(errs, d.Close())
	}
	return errors.Join(errs...)
}

func (x *routed) rank(dev device.Device, c comm.Comm, rank int, kept [][][2]int) error {
	s, err := dev.NewStream("compute")
	if err != nil {
		return err
	}
	rt, err := engine.Open(engine.Config{Device: dev, Compute: s, Links: memory.Links{Out: 1e10, In: 1e10}})
	if err != nil {
		return err
	}
	e := &Env{Model: &model.Model{Hidden: dispatchCols}, Dispatch: x.how, Comm: c, Expert: Place{rank, x.ranks}, Shape: Shape{Batch: 1, Seq: x.tokens}}
	e.Settings.Routing.Capacity = x.capacity
	if x.link {
		if e.Link, err = NewLink(dev); err != nil {
			return err
		}
	}
	err = rt.Step(memory.Key{Microbatches: 1}, func(st *engine.Step) error {
		return Guard(func() {
			p := &Pass{Step: st, S: s, Shape: e.Shape}
			for range 2 {
				x.pass(p, e.dispatcher(&model.MoE{Experts: x.experts, TopK: x.topK}), kept)
			}
		})
	})
	err = errors.Join(err, rt.Close())
	if x.link {
		err = errors.Join(err, e.Link.Close())
	}
	return errors.Join(err, s.Close())
}
