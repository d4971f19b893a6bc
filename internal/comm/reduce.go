// This file owns the launches of a reduction, and the scratch memory that it needs if
// there are more ranks than a launch takes sources.

package comm

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// Both packages number formats and operations alike. If not, this does not compile:
// false is a key twice.
var _ = map[bool]bool{false: true, Type(kernels.BF16) == BF16 && Op(kernels.Mean) == Mean && Op(kernels.Max) == Max: true}

// reduce combines the part at off of all ranks' sources on rank r.
func (g *group) reduce(r int, dst device.Range, off, n memory.Bytes) {
	for p := range g.calls {
		g.sources[p] = g.calls[p].src.Slice(off, n)
	}
	c := &g.calls[r]
	if len(g.calls) == 1 {
		if dst.Addr() != g.sources[0].Addr() {
			c.s.Copy(dst, g.sources[0])
		}
		return
	}
	t := kernels.Number(c.t)
	x := kernels.Reduction{Op: kernels.ReduceOp(c.op), To: t, From: t, Dst: dst}
	if len(g.sources) > kernels.MaxReduceSources {
		g.reduceInPasses(r, x)
		return
	}
	x.Rest = g.rest(g.sources)
	kernels.Reduce(c.s, x, g.sources...)
}

// scratch is the memory for reductions of more sources than a launch takes: a run of fp32
// on each rank, and an event that marks its last use on any stream.
type scratch struct {
	g    *group
	bufs []*device.Buffer
	used []device.Event
}

// newScratch allocates scratch memory if the group needs it.
func (g *group) newScratch() error {
	g.scratch.g = g
	if len(g.ranks) <= kernels.MaxReduceSources {
		return nil
	}
	for _, rank := range g.ranks {
		d := g.w.devs[rank]
		b, err := d.Alloc(memory.Device, g.w.o.scratch, "comm scratch")
		if err != nil {
			return err
		}
		g.scratch.bufs = append(g.scratch.bufs, b)
		e, err := d.NewEvent(device.External)
		if err != nil {
			return err
		}
		g.scratch.used = append(g.scratch.used, e)
	}
	return nil
}

// reduceInPasses reduces in several launches, part by part. The first ones write to the
// scratch memory in fp32, which loses nothing. The last one continues from there, divides
// and rounds.
func (g *group) reduceInPasses(r int, x kernels.Reduction) {
	s, room := g.calls[r].s, g.scratch.bufs[r]
	s.Wait(g.scratch.used[r])
	step := room.Size() / 4 * x.To.Size()
	for off := memory.Bytes(0); off < x.Dst.Len; off += step {
		n := min(step, x.Dst.Len-off)
		acc := room.Slice(0, n/x.To.Size()*4)
		for k := 0; k < len(g.sources); k += kernels.MaxReduceSources {
			some := g.sources[k:min(k+kernels.MaxReduceSources, len(g.sources))]
			g.some = g.some[:0]
			for _, src := range some {
				g.some = append(g.some, src.Slice(off, n))
			}
			y := kernels.Reduction{Op: kernels.Sum, From: x.From, To: kernels.F32, Dst: acc, Rest: g.rest(g.some)}
			if x.Op == kernels.Max {
				y.Op = kernels.Max
			}
			if k > 0 {
				y.Acc = acc
			}
			if k+len(some) == len(g.sources) {
				y.Op, y.To, y.Dst, y.Divide = x.Op, x.To, x.Dst.Slice(off, n), len(g.sources)
			}
			kernels.Reduce(s, y, g.some...)
		}
	}
	s.Record(g.scratch.used[r])
}

// rest returns the declarations of a launch's last sources. It keeps them, because the
// same ranges come again at every step and a launch refers to them. It forgets all of them
// when there are too many.
func (g *group) rest(srcs []device.Range) []device.Access {
	if len(srcs) <= kernels.ReduceInline {
		return nil
	}
	var key restKey
	copy(key[:], srcs[kernels.ReduceInline:])
	all, ok := g.rests[key]
	if !ok {
		if len(g.rests) == mostRests {
			clear(g.rests)
		}
		all = kernels.ReduceRest(srcs...)
		g.rests[key] = all
	}
	return all
}

type restKey [kernels.MaxReduceSources - kernels.ReduceInline]device.Range

const mostRests = 4096

// release frees the scratch memory after its last use.
func (x *scratch) release() error {
	for i, b := range x.bufs {
		s, err := x.g.w.devs[x.g.ranks[i]].NewStream("comm scratch")
		if err != nil {
			return fmt.Errorf("comm: freeing scratch: %w", err)
		}
		if i < len(x.used) {
			s.Wait(x.used[i])
		}
		s.Free(b)
		if err := s.Close(); err != nil {
			return err
		}
	}
	for _, e := range x.used {
		if err := e.Close(); err != nil {
			return err
		}
	}
	return nil
}
