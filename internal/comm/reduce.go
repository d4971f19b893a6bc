// This file owns the launches of a reduction, and the scratch memory that it needs if
// there are more ranks than a launch takes sources.

package comm

import (
	"errors"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// Both packages number formats and operations alike. If not, this does not compile:
// false is a key twice.
var _ = map[bool]bool{false: true, Type(kernels.BF16) == BF16 && Op(kernels.Mean) == Mean && Op(kernels.Max) == Max: true}

// Reducer combines the elements of all ranks on one rank's device. All engines use it, so
// that a sum has the same bits whatever moved its terms: elements are combined in the
// order of sources, in fp32, and rounded once. It has scratch memory if there are more
// sources than a launch takes: a run of fp32, and an event that marks its last use on any
// stream. One goroutine uses it at a time.
type Reducer struct {
	dev   device.Device
	rests map[restKey][]device.Access
	some  []device.Range // of one launch, if a reduction needs several
	room  *device.Buffer
	used  device.Event
}

// NewReducer returns a reducer of so many sources. scratch is the size of its scratch
// memory if it needs any; zero means 1 MiB.
func NewReducer(d device.Device, sources int, scratch memory.Bytes) (*Reducer, error) {
	x := &Reducer{dev: d, rests: map[restKey][]device.Access{}}
	if sources <= kernels.MaxReduceSources {
		return x, nil
	}
	if scratch == 0 {
		scratch = memory.MiB
	}
	var err error
	if x.room, err = d.Alloc(memory.Device, scratch, "comm scratch"); err != nil {
		return nil, err
	}
	if x.used, err = d.NewEvent(device.External); err != nil {
		return nil, errors.Join(err, x.Close())
	}
	return x, nil
}

// Reduce combines sources into dst. A single source is copied as it is.
func (x *Reducer) Reduce(s device.Stream, t Type, op Op, dst device.Range, sources []device.Range) {
	if len(sources) == 1 {
		if dst.Addr() != sources[0].Addr() {
			s.Copy(dst, sources[0])
		}
		return
	}
	n := kernels.Number(t)
	y := kernels.Reduction{Op: kernels.ReduceOp(op), To: n, From: n, Dst: dst}
	if len(sources) > kernels.MaxReduceSources {
		x.inPasses(s, y, sources)
		return
	}
	y.Rest = x.rest(sources)
	kernels.Reduce(s, y, sources...)
}

// inPasses reduces in several launches, part by part. The first ones write to the scratch
// memory in fp32, which loses nothing. The last one continues from there, divides and
// rounds.
func (x *Reducer) inPasses(s device.Stream, r kernels.Reduction, sources []device.Range) {
	s.Wait(x.used)
	step := x.room.Size() / 4 * r.To.Size()
	for off := memory.Bytes(0); off < r.Dst.Len; off += step {
		n := min(step, r.Dst.Len-off)
		acc := x.room.Slice(0, n/r.To.Size()*4)
		for k := 0; k < len(sources); k += kernels.MaxReduceSources {
			some := sources[k:min(k+kernels.MaxReduceSources, len(sources))]
			x.some = x.some[:0]
			for _, src := range some {
				x.some = append(x.some, src.Slice(off, n))
			}
			y := kernels.Reduction{Op: kernels.Sum, From: r.From, To: kernels.F32, Dst: acc, Rest: x.rest(x.some)}
			if r.Op == kernels.Max {
				y.Op = kernels.Max
			}
			if k > 0 {
				y.Acc = acc
			}
			if k+len(some) == len(sources) {
				y.Op, y.To, y.Dst, y.Divide = r.Op, r.To, r.Dst.Slice(off, n), len(sources)
			}
			kernels.Reduce(s, y, x.some...)
		}
	}
	s.Record(x.used)
}

// rest returns the declarations of a launch's last sources. It keeps them, because the
// same ranges come again at every step and a launch refers to them. It forgets all of them
// when there are too many.
func (x *Reducer) rest(srcs []device.Range) []device.Access {
	if len(srcs) <= kernels.ReduceInline {
		return nil
	}
	var key restKey
	copy(key[:], srcs[kernels.ReduceInline:])
	all, ok := x.rests[key]
	if !ok {
		if len(x.rests) == mostRests {
			clear(x.rests)
		}
		all = kernels.ReduceRest(srcs...)
		x.rests[key] = all
	}
	return all
}

type restKey [kernels.MaxReduceSources - kernels.ReduceInline]device.Range

const mostRests = 4096

// Close frees the scratch memory after its last use.
func (x *Reducer) Close() error {
	if x.room == nil {
		return nil
	}
	s, err := x.dev.NewStream("comm scratch")
	if err == nil {
		if x.used != nil {
			s.Wait(x.used)
		}
		s.Free(x.room)
		err = s.Close()
	} else {
		err = fmt.Errorf("comm: freeing scratch: %w", err) // the device's end says that the memory was not freed
	}
	if x.used != nil {
		err = errors.Join(err, x.used.Close())
	}
	return err
}

// reduce combines the part at off of all ranks' sources on rank r.
func (g *group) reduce(r int, dst device.Range, off, n memory.Bytes) {
	for p := range g.calls {
		g.sources[p] = g.calls[p].src.Slice(off, n)
	}
	c := &g.calls[r]
	g.reducers[r].Reduce(c.s, c.t, c.op, dst, g.sources)
}
