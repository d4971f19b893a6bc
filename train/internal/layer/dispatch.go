// This file owns how rows reach the ranks that have their experts, and how they return:
// within one rank, by all-to-all, and around the ring of experts.

package layer

import (
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/engine"
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
	link     *Link     // what they exchange travels on it
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
	rows := math.Ceil(d.capacity * float64(tokens*d.topK) / float64(d.experts))
	return int(max(1, min(rows, float64(tokens)))) // a token has at most one row for an expert
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

// expect returns the rows that this rank's experts get if all ranks get as many.
func (t *tables) expect() int { return t.d.tokens * t.d.topK }

// arrivals are what a rank must know of the choices of others before it can sort rows: all
// choices in a ring, and otherwise how many rows come for each expert.
type arrivals struct {
	*engine.Tensor
	sent *engine.Tensor // what others read; nil if it is not ours
	wait func()
}

// announce tells the other ranks what the tokens of this one chose. If rows go to the ranks
// that have their experts, it sorts them for that. It does not ask whether the exchange
// failed, because an engine may have to wait for other hosts to know. A rank that fails
// leaves words that are no choices or counts: sorting takes any, and writes only into its tables.
func (d *dispatcher) announce(p *Pass, t *tables, index device.Range) (a arrivals) {
	switch {
	case d.ranks == 1:
		return a
	case d.how == Ring:
		a.Tensor = p.words(d.ranks * d.tokens * d.topK)
		a.wait = d.link.begin(p.S, func(s device.Stream) { d.comm.AllGather(s, a.Range(), index) })
	default:
		a.Tensor, a.sent = p.words(d.experts), p.words(d.experts)
		seg := p.words(2 * d.experts)
		sortRows(p, nn.Sorting{
			Index: index, Tokens: d.tokens, TopK: d.topK, Experts: d.experts, Group: d.local(), Slot: d.mostSent(), Room: d.ranks * d.mostSent(),
			Capacity: d.limit(d.tokens), Seg: nn.Segments{Range: seg.Range(), Experts: d.experts}, Source: t.out, Place: t.home, Counts: a.sent.Range(),
		})
		seg.Free()
		a.wait = d.link.begin(p.S, func(s device.Stream) { d.comm.AllToAll(s, a.Range(), a.sent.Range()) })
	}
	return a
}

// sort computes the tables of a microbatch from the choices of its tokens and those of other
// ranks, and writes the number of rows to count. With slot, the rows of experts begin at
// its multiples.
func (d *dispatcher) sort(p *Pass, t *tables, index device.Range, a arrivals, count device.Range, slot int) {
	s := nn.Sorting{
		Index: index, Tokens: d.tokens, TopK: d.topK, Experts: d.local(), Group: 1, Slot: slot, Room: t.room,
		Capacity: d.limit(d.tokens), Seg: t.segments(), Source: t.source, Place: t.place, Count: count,
	}
	if d.ranks == 1 {
		sortRows(p, s)
		return
	}
	a.wait()
	if d.how == Ring {
		s.Index, s.Tokens, s.First, s.Capacity = a.Range(), d.ranks*d.tokens, d.rank*d.local(), d.limit(d.ranks*d.tokens)
		sortRows(p, s)
	} else {
		nn.Regroup(p.S, nn.Regrouping{
			Counts: a.Range(), Ranks: d.ranks, Experts: d.local(), Part: d.mostSent(), Slot: slot, Room: t.room,
			Seg: t.segments(), Source: t.source, Place: t.place, Count: count,
		})
		a.sent.Free()
	}
	a.Free()
}

func sortRows(p *Pass, s nn.Sorting) {
	scratch := p.bytes(nn.SortScratch(s.Tokens, s.TopK, s.Experts))
	s.Scratch = scratch.Range()
	nn.SortRows(p.S, s)
	scratch.Free()
}

// parcel is rows on their way between ranks. A parcel within one rank is the rows.
type parcel struct {
	sent, came Mat
	rows       nn.Matrix // what came
	wait       func()
}

// arrived orders compute after a parcel's way, and returns its rows. The caller frees it.
func (x *parcel) arrived() nn.Matrix {
	if x.wait != nil {
		x.wait()
	}
	if x.sent.t != nil {
		x.sent.Free()
	}
	x.wait, x.sent = nil, Mat{}
	return x.rows
}

func (x parcel) free() {
	if x.came.t != nil {
		x.came.Free()
	}
}

// send sends the row of each token to the ranks of its experts. If pairs is set, x has a row
// for each pair. x must stay until the parcel is taken.
func (t *tables) send(p *Pass, x nn.Matrix, pairs bool) (y parcel) {
	d := t.d
	switch {
	case d.ranks == 1:
		return parcel{rows: x}
	case d.how == Ring:
		y.came = p.newOf(x.Type, d.ranks*x.Rows, x.Cols)
		y.wait = d.link.begin(p.S, func(s device.Stream) { d.comm.AllGather(s, y.came.Range, x.Range) })
	default:
		y.sent, y.came = p.newOf(x.Type, d.received(), x.Cols), p.newOf(x.Type, d.received(), x.Cols)
		// Unused rows are zero, so nothing undefined is sent.
		nn.TakeRows(p.S, nn.Taking{Dst: y.sent.Matrix, Src: x, Source: t.out, Every: t.every(pairs), Zero: true})
		y.wait = d.link.begin(p.S, func(s device.Stream) { d.comm.AllToAll(s, y.came.Range, y.sent.Range) })
	}
	y.rows = y.came.Matrix
	return y
}

// every returns how many rows follow from one that is sent.
func (t *tables) every(pairs bool) int {
	if pairs {
		return 1
	}
	return t.d.topK
}

// take copies a parcel of send to the rows of the experts.
func (t *tables) take(p *Pass, rows nn.Matrix, x parcel, pairs bool) {
	every, from := t.every(pairs || t.d.ranks > 1 && t.d.how == AllToAll), x.arrived()
	if spread := (nn.Spreading{Dst: rows, Src: from, Place: t.place, Every: every}); every > 1 && spread.Fits() {
		nn.SpreadRows(p.S, spread)
	} else {
		nn.TakeRows(p.S, nn.Taking{Dst: rows, Src: from, Source: t.source, Every: every})
	}
	x.free()
}

// giveBack sends the results of rows back to the ranks of their tokens, and frees the rows. A
// ring adds them up on the way, into y if it is given. If pairs is set, rows hold one number
// for each pair.
func (t *tables) giveBack(p *Pass, results Mat, y nn.Matrix, pairs bool) (x parcel) {
	d, rows := t.d, results.Matrix
	if d.ranks == 1 {
		return parcel{came: results, rows: rows}
	}
	defer results.Free()
	switch {
	case d.how == AllToAll:
		x.sent, x.came = p.newOf(rows.Type, d.received(), rows.Cols), p.newOf(rows.Type, d.received(), rows.Cols)
		x.rows = x.came.Matrix
		nn.TakeRows(p.S, nn.Taking{Dst: x.sent.Matrix, Src: rows, Source: t.place, Every: 1, Zero: true})
		x.wait = d.link.begin(p.S, func(s device.Stream) { d.comm.AllToAll(s, x.came.Range, x.sent.Range) })
		return x
	case pairs:
		x.sent = p.newOf(rows.Type, d.ranks*y.Rows, y.Cols)
		nn.TakeRows(p.S, nn.Taking{Dst: x.sent.Matrix, Src: rows, Source: t.place, Every: 1, Zero: true})
	default:
		x.sent = p.newOf(rows.Type, d.ranks*d.tokens, rows.Cols)
		nn.CombineRows(p.S, nn.Combining{Dst: x.sent.Matrix, Src: rows, Place: t.place, Every: d.topK})
	}
	if x.rows = y; y.Rows == 0 {
		x.came = p.newOf(rows.Type, d.tokens, rows.Cols)
		x.rows = x.came.Matrix
	}
	x.wait = d.link.begin(p.S, func(s device.Stream) {
		d.comm.ReduceScatter(s, x.rows.Range, x.sent.Range, commType(x.rows.Type), comm.Sum)
	})
	return x
}

// collect adds up the results of each token's experts, plus a matrix if one is given.
func (t *tables) collect(p *Pass, y nn.Matrix, x parcel, plus nn.Matrix) {
	d, rows := t.d, x.arrived()
	switch {
	case d.ranks > 1 && d.how == Ring:
		if plus.Rows > 0 {
			nn.Add(p.S, nn.Sum{Y: y, A: rows, B: plus})
		}
	default:
		nn.CombineRows(p.S, nn.Combining{Dst: y, Src: rows, Place: t.homes(), Every: d.topK, Plus: plus})
	}
	x.free()
}

// collectPairs copies one number of each row back to its pair of token and choice.
func (t *tables) collectPairs(p *Pass, y nn.Matrix, x parcel) {
	rows := x.arrived()
	if t.d.ranks == 1 || t.d.how == AllToAll {
		nn.TakeRows(p.S, nn.Taking{Dst: y, Src: rows, Source: t.homes(), Every: 1, Zero: true})
	}
	x.free()
}

// homes maps the pairs of this rank's tokens to rows that came back.
func (t *tables) homes() device.Range {
	if t.d.ranks == 1 {
		return t.place
	}
	return t.home
}

func commType(n kernels.Number) comm.Type {
	if n == kernels.BF16 {
		return comm.BF16
	}
	return comm.F32
}
