// This file owns random programs of collectives, and the obvious model of what they
// do.

package comm

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/stowage-dev/stowage/memory"

	"github.com/stowage-dev/stowage/device"
)

// action is one call of all ranks of a communicator, or a rewrite of all memory by each
// rank.
type action struct {
	sig
	touch  bool
	comm   int // which communicator
	stream int
	src    []memory.Bytes // where a rank's source is, in the first half
	dst    []memory.Bytes // where its destination is, in the second half
	same   []bool         // source and destination are one place, as far as the call allows
	parts  [][]Part       // of AllToAllV and Exchange: what rank i sends to rank k, and where it lies
	places [][]Part       // and where rank k puts what it gets of rank i
	turn   int            // where lists of messages begin
	from   int            // who sends a single message
	to     int            // and to whom
}

// program is a list of actions on communicators of some of the ranks.
type program struct {
	n       int
	streams int
	ranks   [][]int // of each communicator; the first is all
	actions []action
}

// randomProgram draws a program. If touches is set, all memory is rewritten on its own
// stream between two calls, so that each wait of a call matters.
func randomProgram(rng *rand.Rand, n, streams, calls int, touches bool) *program {
	p := &program{n: n, streams: streams, ranks: [][]int{ranksBelow(n)}}
	for range rng.IntN(4) {
		p.ranks = append(p.ranks, rng.Perm(n)[:1+rng.IntN(n)])
	}
	for range calls {
		c := rng.IntN(len(p.ranks))
		a := randomAction(rng, len(p.ranks[c]))
		a.comm, a.stream = c, rng.IntN(streams)
		p.actions = append(p.actions, a)
		if touches {
			p.actions = append(p.actions, action{touch: true, comm: 0, stream: a.stream})
		}
	}
	return p
}

// randomAction draws a call of n ranks.
func randomAction(rng *rand.Rand, n int) action {
	a := action{sig: sig{kind: kind(rng.IntN(int(exchange) + 1)), t: Type(rng.IntN(2)), op: Op(rng.IntN(3))}}
	if a.kind == recv { // the other end of
		a.kind = send
	}
	if a.kind >= gather && a.kind <= replay { // they have tests of their own
		a.kind = barrier
	}
	if a.kind == send && n == 1 {
		a.kind = barrier
	}
	count := memory.Bytes(rng.IntN(120))
	switch rng.IntN(4) {
	case 0:
		count = memory.Bytes(rng.IntN(4))
	case 1:
		count *= 8
	}
	a.bytes = min(count, half/8/memory.Bytes(n)) * 4
	a.root = rng.IntN(n)
	if a.kind == send {
		p := rng.Perm(n)
		a.from, a.to = p[0], p[1]
	}
	for range n {
		a.src = append(a.src, memory.Bytes(rng.IntN(8))*4)
		a.dst = append(a.dst, half+memory.Bytes(rng.IntN(8))*4)
		a.same = append(a.same, rng.IntN(3) == 0)
	}
	if a.kind == allToAllV || a.kind == exchange {
		a.turn = rng.IntN(n)
		a.randomParts(rng, n)
	}
	return a
}

func (a *action) randomParts(rng *rand.Rand, n int) {
	a.parts, a.places = make([][]Part, n), make([][]Part, n)
	ends := make([]memory.Bytes, n)
	for i := range n {
		at := memory.Bytes(0)
		for k := range n {
			size := memory.Bytes(rng.IntN(int(half) / 2 / n))
			if rng.IntN(3) == 0 {
				size = 0
			}
			a.parts[i] = append(a.parts[i], Part{at, size})
			a.places[k] = append(a.places[k], Part{ends[k], size})
			at += size
			ends[k] += size
		}
	}
}

// ranges returns the two ranges of rank r. dst begins at half.
func (a *action) ranges(r int, b *device.Buffer, n int) (dst, src device.Range) {
	dn, sn, own := a.bytes, a.bytes, a.bytes*memory.Bytes(r)
	switch a.kind {
	case allGather:
		dn *= memory.Bytes(n)
	case reduceScatter:
		sn *= memory.Bytes(n)
	case allToAll:
		dn, sn = dn*memory.Bytes(n), sn*memory.Bytes(n)
	case allToAllV, exchange:
		dn, sn = half-a.dst[r]+half, half-a.src[r]
	}
	dst, src = b.Slice(a.dst[r], dn), b.Slice(a.src[r], sn)
	if a.same[r] {
		switch a.kind {
		case allGather:
			src = dst.Slice(own, sn)
		case reduceScatter:
			dst = src.Slice(own, dn)
		case allReduce:
			dst = src
		}
	}
	return dst, src
}

// issue makes the call of rank r.
func (a *action) issue(c Comm, s device.Stream, b *device.Buffer) {
	r := c.Rank()
	dst, src := a.ranges(r, b, c.Size())
	switch a.kind {
	case allGather:
		c.AllGather(s, dst, src)
	case reduceScatter:
		c.ReduceScatter(s, dst, src, a.t, a.op)
	case allReduce:
		c.AllReduce(s, dst, src, a.t, a.op)
	case allToAll:
		c.AllToAll(s, dst, src)
	case allToAllV:
		c.AllToAllV(s, dst, src, a.parts[r], a.places[r])
	case broadcast:
		c.Broadcast(s, dst, a.root)
	case barrier:
		c.Barrier(s)
	case send:
		if r == a.from {
			c.Send(s, src, a.to)
		} else if r == a.to {
			c.Recv(s, dst, a.from)
		}
	case exchange:
		a.exchange(c, s, dst, src)
	}
}

// exchange passes all parts except a rank's own. Each part is one message or two. All are
// in one call, or in a single send or receive if a rank has only one.
func (a *action) exchange(c Comm, s device.Stream, dst, src device.Range) {
	r, n := c.Rank(), c.Size()
	var sends, recvs []Message
	add := func(to *[]Message, peer int, in device.Range, p Part) {
		if peer == r {
			return
		}
		if p.Len%2 == 1 {
			*to = append(*to, Message{peer, in.Slice(p.Off, 1)})
			p.Off, p.Len = p.Off+1, p.Len-1
		}
		if p.Len > 0 {
			*to = append(*to, Message{peer, in.Slice(p.Off, p.Len)})
		}
	}
	for i := range n {
		p := (i + a.turn) % n
		add(&sends, p, src, a.parts[r][p])
		add(&recvs, n-1-p, dst, a.places[r][n-1-p])
	}
	switch {
	case len(sends) == 1 && len(recvs) == 0:
		c.Send(s, sends[0].Range, sends[0].Peer)
	case len(sends) == 0 && len(recvs) == 1:
		c.Recv(s, recvs[0].Range, recvs[0].Peer)
	default:
		c.Exchange(s, sends, recvs)
	}
}

// model applies the action to the bytes of the ranks.
func (a *action) model(bufs []*device.Buffer, mem [][]byte) {
	n := len(mem)
	old := make([][]byte, n)
	for r := range mem {
		old[r] = slices.Clone(mem[r])
	}
	in := func(r int) []byte { _, s := a.ranges(r, bufs[r], n); return old[r][s.Off : s.Off+s.Len] }
	out := func(r int) []byte { d, _ := a.ranges(r, bufs[r], n); return mem[r][d.Off : d.Off+d.Len] }
	for r := range mem {
		for p := range mem {
			at := int(a.bytes)
			switch a.kind {
			case allGather:
				copy(out(r)[p*at:], in(p))
			case allToAll:
				copy(out(r)[p*at:], in(p)[r*at:(r+1)*at])
			case allToAllV, exchange:
				if s, d := a.parts[p][r], a.places[r][p]; p != r || a.kind == allToAllV {
					copy(out(r)[d.Off:d.Off+d.Len], in(p)[s.Off:s.Off+s.Len])
				}
			case broadcast:
				copy(out(r), old[a.root][a.dst[a.root]:][:at])
			case send:
				if p == a.from && r == a.to {
					copy(out(r), in(p))
				}
			}
		}
		switch a.kind {
		case reduceScatter:
			reduceModel(out(r), in, n, r*int(a.bytes), a.t, a.op)
		case allReduce:
			reduceModel(out(r), in, n, 0, a.t, a.op)
		}
	}
}

// reduceModel combines the sources' elements from off on.
func reduceModel(dst []byte, in func(int) []byte, n, off int, t Type, op Op) {
	size := int(t.Size())
	for i := 0; i < len(dst); i += size {
		number := func(p int) float32 {
			if t == F32 {
				return math.Float32frombits(binary.LittleEndian.Uint32(in(p)[off+i:]))
			}
			return math.Float32frombits(uint32(binary.LittleEndian.Uint16(in(p)[off+i:])) << 16)
		}
		if n == 1 {
			copy(dst[i:i+size], in(0)[off+i:])
			continue
		}
		a := number(0)
		for p := 1; p < n; p++ {
			if x := number(p); op != Max {
				a += x
			} else if x != x || x > a {
				a = x
			}
		}
		if op == Mean {
			a /= float32(n)
		}
		v := math.Float32bits(a)
		switch {
		case t == F32 && a != a:
			v = 0x7fffffff
		case t == BF16 && a != a:
			v = 0x7fff
		case t == BF16 && v&0xffff == 0x8000: // ties go to even
			v = (v + v>>16&1<<15) >> 16
		case t == BF16:
			v = (v + 0x8000) >> 16
		}
		if t == F32 {
			binary.LittleEndian.PutUint32(dst[i:], v)
		} else {
			binary.LittleEndian.PutUint16(dst[i:], uint16(v))
		}
	}
}

// split opens a rank's ends of all communicators of a program.
func (p *program) split(c Comm) ([]Comm, error) {
	mine := []Comm{c}
	for _, ranks := range p.ranks[1:] {
		if !slices.Contains(ranks, c.Rank()) {
			mine = append(mine, nil)
			continue
		}
		s, err := c.Split(ranks)
		if err != nil {
			return nil, err
		}
		mine = append(mine, s)
	}
	return mine, nil
}

// issue makes all of a rank's calls.
func (p *program) issue(x *setting, rank int, mine []Comm) {
	at := x.places[rank]
	for i := range p.actions {
		a := &p.actions[i]
		s, b := at.streams[a.stream], at.bufs[a.stream]
		switch c := mine[a.comm]; {
		case a.touch:
			at.rotate(a.stream)
		case c != nil:
			a.issue(c, s, b)
		}
	}
}

// want returns what the buffers of all ranks hold after the program has run a number of
// times, by rank and stream.
func (p *program) want(x *setting, times int) [][][]byte {
	mem := make([][][]byte, p.n)
	for r := range mem {
		for range p.streams {
			mem[r] = append(mem[r], slices.Clone(x.places[r].first))
		}
	}
	for range times {
		for i := range p.actions {
			a := &p.actions[i]
			var bufs []*device.Buffer
			var some [][]byte
			for _, r := range p.ranks[a.comm] {
				bufs, some = append(bufs, x.places[r].bufs[a.stream]), append(some, mem[r][a.stream])
				if a.touch {
					rotateBytes(mem[r][a.stream])
				}
			}
			if !a.touch {
				a.model(bufs, some)
			}
		}
	}
	return mem
}

// compare downloads all buffers of a rank and compares them.
func (p *program) compare(x *setting, rank int, want [][][]byte) error {
	at := x.places[rank]
	for i, b := range at.bufs {
		got := make([]byte, b.Size())
		if err := at.streams[i].Download(got, b.All()); err != nil {
			return err
		}
		for k := range got {
			if got[k] != want[rank][i][k] {
				return fmt.Errorf("rank %d, stream %d: byte %d is %#x, want %#x", rank, i, k, got[k], want[rank][i][k])
			}
		}
	}
	return nil
}
