// This file owns how rows reach the ranks that have their experts, and how they return:
// within one rank, by all-to-all, and around the ring of experts.

package layer

import (
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/memory"
)

// Dispatch is how rows find their experts.
type Dispatch uint8

const (
	// AllToAll sends each token's row to the ranks that have its experts.
	AllToAll Dispatch = iota
	// Ring sends all tokens around all expert ranks. Each computes with its own experts,
	// and the results are added up.
	Ring
)

func (d Dispatch) String() string { return [...]string{"alltoall", "ring"}[d] }

// dispatcher knows sizes. What a microbatch needs is in its tables.
type dispatcher struct {
	how      Dispatch
	comm     comm.Comm // of the expert ranks; nil if there is one
	ranks    int
	rank     int
	experts  int // of all ranks
	topK     int
	tokens   int // of one rank's microbatch
	capacity float64
}

// local returns the number of experts of this rank.
func (d *dispatcher) local() int { return d.experts / d.ranks }

// limit returns the most rows that an expert can have from a number of tokens, or zero if
// there is no limit.
func (d *dispatcher) limit(tokens int) int {
	if d.capacity == 0 {
		return 0
	}
	return max(1, int(math.Ceil(d.capacity*float64(tokens*d.topK)/float64(d.experts))))
}

// mostSent returns the most rows that one rank sends to another. A token has at most one row
// for each of the other's experts.
func (d *dispatcher) mostSent() int {
	rows := d.tokens * min(d.topK, d.local())
	if c := d.limit(d.tokens); c > 0 {
		rows = min(rows, c*d.local())
	}
	return rows
}

// Worst returns the most rows that this rank can receive: EP x tokens x min(top-k, local
// experts), the bound of SPEC S3.1, or less under a capacity.
func (d *dispatcher) Worst() int {
	if d.how == Ring && d.capacity > 0 {
		all := d.tokens * d.ranks
		return min(all*min(d.topK, d.local()), d.limit(all)*d.local())
	}
	return d.ranks * d.mostSent()
}

// Padded returns the rows of a buffer in which every expert has room for all tokens that
// may choose it, so no row must be counted.
func (d *dispatcher) Padded() int { return d.local() * d.slot() }

func (d *dispatcher) slot() int {
	all := d.tokens * d.ranks
	if c := d.limit(d.tokens); c > 0 && d.how == AllToAll {
		return min(all, c*d.ranks)
	}
	if c := d.limit(all); c > 0 {
		return min(all, c)
	}
	return all
}

// tables say where rows were sent. They are saved as the group dispatch.
type tables struct {
	d    *dispatcher
	room int
	seg  device.Range // segments of the rows
	// source maps rows to what was received, and place maps back. Received are pairs of
	// tokens and choices, of all ranks in a ring. After an all-to-all, received are rows in
	// the order of ranks; out and home are the same maps on the sender's side.
	source, place device.Range
	out, home     device.Range
}

// received returns how many rows of the all-to-all, or pairs, are received.
func (d *dispatcher) received() int {
	switch {
	case d.ranks == 1:
		return d.tokens * d.topK
	case d.how == Ring:
		return d.ranks * d.tokens * d.topK
	}
	return d.ranks * d.mostSent()
}

// sizes returns the sizes of the tables, in order.
func (d *dispatcher) sizes(room int) []int {
	sizes := []int{2 * d.local(), room, d.received()}
	if d.ranks > 1 && d.how == AllToAll {
		sizes = append(sizes, d.received(), d.tokens*d.topK)
	}
	return sizes
}

// view divides one piece of memory into the tables.
func (d *dispatcher) view(r device.Range, room int) *tables {
	t := &tables{d: d, room: room}
	at := memory.Bytes(0)
	for i, n := range d.sizes(room) {
		*[]*device.Range{&t.seg, &t.source, &t.place, &t.out, &t.home}[i] = r.Slice(at, memory.Bytes(4*n))
		at += memory.Bytes(4 * n)
	}
	return t
}

func (d *dispatcher) words(room int) (n int) {
	for _, k := range d.sizes(room) {
		n += k
	}
	return n
}

func (t *tables) segments() nn.Segments { return nn.Segments{Range: t.seg, Experts: t.d.local()} }

// sort computes the tables of a microbatch from the choices of its tokens, and writes the
// number of rows to count. With slot, the rows of experts begin at its multiples.
func (d *dispatcher) sort(p *Pass, t *tables, index, count device.Range, slot int) {
	s := nn.Sorting{
		Index: index, Tokens: d.tokens, TopK: d.topK, Experts: d.local(), Group: 1, Slot: slot, Room: t.room,
		Capacity: d.limit(d.tokens), Seg: t.segments(), Source: t.source, Place: t.place, Count: count,
	}
	switch {
	case d.ranks == 1:
		sortRows(p, s)
	case d.how == Ring:
		all := p.words(d.ranks * d.tokens * d.topK)
		d.comm.AllGather(p.S, all.Range(), index)
		must(d.comm.Err()) // otherwise these are not choices, and could be more rows than possible
		s.Index, s.Tokens, s.First, s.Capacity = all.Range(), d.ranks*d.tokens, d.rank*d.local(), d.limit(d.ranks*d.tokens)
		sortRows(p, s)
		all.Free()
	default:
		counts, came, seg := p.words(d.experts), p.words(d.experts), p.words(2*d.experts)
		sortRows(p, nn.Sorting{
			Index: index, Tokens: d.tokens, TopK: d.topK, Experts: d.experts, Group: d.local(), Slot: d.mostSent(), Room: d.ranks * d.mostSent(),
			Capacity: d.limit(d.tokens), Seg: nn.Segments{Range: seg.Range(), Experts: d.experts}, Source: t.out, Place: t.home, Counts: counts.Range(),
		})
		d.comm.AllToAll(p.S, came.Range(), counts.Range())
		must(d.comm.Err()) // otherwise these are not counts
		nn.Regroup(p.S, nn.Regrouping{
			Counts: came.Range(), Ranks: d.ranks, Experts: d.local(), Part: d.mostSent(), Slot: slot, Room: t.room,
			Seg: t.segments(), Source: t.source, Place: t.place, Count: count,
		})
		seg.Free()
		came.Free()
		counts.Free()
	}
}

func sortRows(p *Pass, s nn.Sorting) {
	scratch := p.bytes(nn.SortScratch(s.Tokens, s.TopK, s.Experts))
	s.Scratch = scratch.Range()
	nn.SortRows(p.S, s)
	scratch.Free()
}

// send copies the row of each token to the rows of its experts. If pairs is set, x has a
// row for each pair.
func (t *tables) send(p *Pass, rows, x nn.Matrix, pairs bool) {
	d := t.d
	every := d.topK
	if pairs {
		every = 1
	}
	switch {
	case d.ranks == 1:
		nn.TakeRows(p.S, nn.Taking{Dst: rows, Src: x, Source: t.source, Every: every})
	case d.how == Ring:
		all := p.newOf(x.Type, d.ranks*x.Rows, x.Cols)
		d.comm.AllGather(p.S, all.Range, x.Range)
		nn.TakeRows(p.S, nn.Taking{Dst: rows, Src: all.Matrix, Source: t.source, Every: every})
		all.Free()
	default:
		out, in := p.newOf(x.Type, d.received(), x.Cols), p.newOf(x.Type, d.received(), x.Cols)
		// Unused rows are zero, so nothing undefined is sent.
		nn.TakeRows(p.S, nn.Taking{Dst: out.Matrix, Src: x, Source: t.out, Every: every, Zero: true})
		d.comm.AllToAll(p.S, in.Range, out.Range)
		out.Free()
		nn.TakeRows(p.S, nn.Taking{Dst: rows, Src: in.Matrix, Source: t.source, Every: 1})
		in.Free()
	}
}

// collect adds up the results of each token's experts, plus a matrix if one is given.
func (t *tables) collect(p *Pass, y, rows, plus nn.Matrix) {
	d := t.d
	switch {
	case d.ranks == 1:
		nn.CombineRows(p.S, nn.Combining{Dst: y, Src: rows, Place: t.place, Every: d.topK, Plus: plus})
	case d.how == Ring:
		all := p.newOf(y.Type, d.ranks*y.Rows, y.Cols)
		nn.CombineRows(p.S, nn.Combining{Dst: all.Matrix, Src: rows, Place: t.place, Every: d.topK})
		if plus.Rows == 0 {
			d.comm.ReduceScatter(p.S, y.Range, all.Range, commType(y.Type), comm.Sum)
			all.Free()
			return
		}
		mine := p.newOf(y.Type, y.Rows, y.Cols)
		d.comm.ReduceScatter(p.S, mine.Range, all.Range, commType(y.Type), comm.Sum)
		all.Free()
		nn.Add(p.S, nn.Sum{Y: y, A: mine.Matrix, B: plus})
		mine.Free()
	default:
		in := t.returnRows(p, rows)
		nn.CombineRows(p.S, nn.Combining{Dst: y, Src: in.Matrix, Place: t.home, Every: d.topK, Plus: plus})
		in.Free()
	}
}

// collectPairs copies one number of each row back to its pair of token and choice.
func (t *tables) collectPairs(p *Pass, y, rows nn.Matrix) {
	d := t.d
	switch {
	case d.ranks == 1:
		nn.TakeRows(p.S, nn.Taking{Dst: y, Src: rows, Source: t.place, Every: 1, Zero: true})
	case d.how == Ring:
		all := p.newOf(y.Type, d.ranks*y.Rows, y.Cols)
		nn.TakeRows(p.S, nn.Taking{Dst: all.Matrix, Src: rows, Source: t.place, Every: 1, Zero: true})
		d.comm.ReduceScatter(p.S, y.Range, all.Range, commType(y.Type), comm.Sum)
		all.Free()
	default:
		in := t.returnRows(p, rows)
		nn.TakeRows(p.S, nn.Taking{Dst: y, Src: in.Matrix, Source: t.home, Every: 1, Zero: true})
		in.Free()
	}
}

// returnRows returns rows to the ranks that sent them.
func (t *tables) returnRows(p *Pass, rows nn.Matrix) Mat {
	d := t.d
	out, in := p.newOf(rows.Type, d.received(), rows.Cols), p.newOf(rows.Type, d.received(), rows.Cols)
	nn.TakeRows(p.S, nn.Taking{Dst: out.Matrix, Src: rows, Source: t.place, Every: 1, Zero: true})
	d.comm.AllToAll(p.S, in.Range, out.Range)
	out.Free()
	return in
}

func commType(n kernels.Number) comm.Type {
	if n == kernels.BF16 {
		return comm.BF16
	}
	return comm.F32
}
