// This file owns the calls.

package mpi

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/letter"
	"github.com/stowage-dev/stowage/memory"
)

// collective makes a call of all ranks: it numbers it, makes the letters, and runs issue
// with them. Calls that use the buffers are ordered by an event.
func (g *group) collective(s device.Stream, sig letter.Signature, buffers bool, issue func(c *call, heads []*head)) {
	w := g.w
	w.issue.Lock()
	defer w.issue.Unlock()
	c := g.enter(sig, 0)
	if c == nil {
		return
	}
	var heads []*head
	for k := 1; k < len(g.ranks); k++ {
		p := (g.me + k) % len(g.ranks)
		heads = append(heads, &head{peer: p, tag: g.tag(c), send: true}, &head{peer: p, tag: g.tag(c)})
	}
	g.ordered(s, buffers, func() { issue(c, heads) })
}

// ordered issues work that uses the buffers after their last use. If device memory goes
// through them, all work does.
func (g *group) ordered(s device.Stream, buffers bool, issue func()) {
	buffers = (buffers || g.w.staged) && len(g.ranks) > 1
	if buffers {
		s.Wait(g.w.turn)
	}
	issue()
	if buffers {
		s.Record(g.w.turn)
	}
}

// others calls f for every other rank, beginning with the next one, so that ranks do not
// all send to the same one.
func (g *group) others(f func(p int)) {
	for k := 1; k < len(g.ranks); k++ {
		f((g.me + k) % len(g.ranks))
	}
}

func copyUnlessSame(s device.Stream, dst, src device.Range) {
	if src.Len > 0 && dst.Addr() != src.Addr() {
		s.Copy(dst, src)
	}
}

func (g *group) AllGather(s device.Stream, dst, src device.Range) {
	g.caller().AllGather(s, dst, src)
	g.collective(s, letter.Signature{Kind: letter.AllGather, Bytes: src.Len}, false, func(c *call, heads []*head) {
		if src.Len > 0 {
			copyUnlessSame(s, dst.Slice(src.Len*memory.Bytes(g.me), src.Len), src)
		}
		g.spread(s, c, heads, src, func(p int) device.Range { return dst.Slice(src.Len*memory.Bytes(p), src.Len) })
	})
}

// spread sends src to all other ranks and receives a range from each.
func (g *group) spread(s device.Stream, c *call, heads []*head, src device.Range, from func(p int) device.Range) {
	var sends, recvs []piece
	g.others(func(p int) {
		if src.Len > 0 {
			sends = append(sends, piece{p, src, g.tag(c)})
		}
		if r := from(p); r.Len > 0 {
			recvs = append(recvs, piece{p, r, g.tag(c)})
		}
	})
	g.meet(s, c, heads, sends, recvs)
}

// meet passes the pieces of a collective, if there are other ranks.
func (g *group) meet(s device.Stream, c *call, heads []*head, sends, recvs []piece) {
	if len(g.ranks) > 1 {
		g.transfer(s, c, heads, nil, sends, recvs)
	}
}

// places returns how the buffer for parts that arrive is divided: the bytes of a part, and
// the place of the part of each rank. Places begin like the given address within a vector,
// which the kernels like.
func (g *group) places(like uintptr) (most memory.Bytes, at func(p int, n memory.Bytes) device.Range) {
	const vector = 16
	each := g.w.o.Scratch / memory.Bytes(len(g.ranks)-1) &^ 255
	return each - vector, func(p int, n memory.Bytes) device.Range {
		k := (p - g.me + len(g.ranks)) % len(g.ranks)
		return g.w.in.Slice(each*memory.Bytes(k-1)+memory.Bytes(like%vector), n)
	}
}

// reduceAt adds what has arrived to this rank's own elements, in the order of ranks.
func (g *group) reduceAt(s device.Stream, sig letter.Signature, dst, own device.Range, at func(p int, n memory.Bytes) device.Range) {
	sources := make([]device.Range, len(g.ranks))
	for p := range sources {
		if p == g.me {
			sources[p] = own
		} else {
			sources[p] = at(p, own.Len)
		}
	}
	g.w.reducer.Reduce(s, sig.Type, sig.Op, dst, sources)
}

func (g *group) ReduceScatter(s device.Stream, dst, src device.Range, t comm.Type, op comm.Op) {
	g.caller().ReduceScatter(s, dst, src, t, op)
	sig := letter.Signature{Kind: letter.ReduceScatter, Bytes: dst.Len, Type: t, Op: op}
	g.collective(s, sig, true, func(c *call, heads []*head) {
		if len(g.ranks) == 1 || dst.Len == 0 {
			if dst.Len > 0 {
				copyUnlessSame(s, dst, src)
			}
			g.meet(s, c, heads, nil, nil)
			return
		}
		part := func(p int) device.Range { return src.Slice(dst.Len*memory.Bytes(p), dst.Len) }
		most, at := g.places(part(g.me).Addr())
		for off := memory.Bytes(0); off < dst.Len; off += most {
			n := min(most, dst.Len-off)
			var sends, recvs []piece
			g.others(func(p int) {
				sends = append(sends, piece{p, part(p).Slice(off, n), g.tag(c)})
				recvs = append(recvs, piece{p, at(p, n), g.tag(c)})
			})
			g.meet(s, c, heads, sends, recvs)
			g.reduceAt(s, sig, dst.Slice(off, n), part(g.me).Slice(off, n), at)
			heads = nil
		}
	})
}

// small is the size up to which all ranks get all elements and add them up themselves,
// which takes one exchange instead of two.
const small = 16 * memory.KiB

func (g *group) AllReduce(s device.Stream, dst, src device.Range, t comm.Type, op comm.Op) {
	g.caller().AllReduce(s, dst, src, t, op)
	sig := letter.Signature{Kind: letter.AllReduce, Bytes: dst.Len, Type: t, Op: op}
	g.collective(s, sig, true, func(c *call, heads []*head) {
		switch n := memory.Bytes(len(g.ranks)); {
		case dst.Len == 0:
			g.meet(s, c, heads, nil, nil)
		case n == 1:
			copyUnlessSame(s, dst, src)
		case dst.Len <= small/(n-1):
			_, at := g.places(src.Addr())
			g.spread(s, c, heads, src, func(p int) device.Range { return at(p, src.Len) })
			g.reduceAt(s, sig, dst, src, at)
		default:
			g.allReduce(s, c, sig, heads, dst, src)
		}
	})
}

// allReduce is a reduce-scatter of equal parts into the destinations and an all-gather of
// them, piece by piece. A part of the source is sent before the same part of the
// destination arrives, so the two ranges may be the same.
func (g *group) allReduce(s device.Stream, c *call, sig letter.Signature, heads []*head, dst, src device.Range) {
	n := memory.Bytes(len(g.ranks))
	most, at := g.places(src.Addr())
	most = most / 16 * 16
	for off := memory.Bytes(0); off < dst.Len; off += most * n {
		left := min(most*n, dst.Len-off)
		each := (left + n*16 - 1) / (n * 16) * 16
		part := func(r device.Range, p int) device.Range {
			from := min(each*memory.Bytes(p), left)
			return r.Slice(off+from, min(each, left-from))
		}
		mine := part(src, g.me)
		var sends, recvs []piece
		g.others(func(p int) {
			if r := part(src, p); r.Len > 0 {
				sends = append(sends, piece{p, r, g.tag(c)})
			}
			if mine.Len > 0 {
				recvs = append(recvs, piece{p, at(p, mine.Len), g.tag(c)})
			}
		})
		g.meet(s, c, heads, sends, recvs)
		heads = nil
		if mine.Len > 0 {
			g.reduceAt(s, sig, part(dst, g.me), mine, at)
		}
		g.spread(s, c, nil, part(dst, g.me), func(p int) device.Range { return part(dst, p) })
	}
}

func (g *group) AllToAll(s device.Stream, dst, src device.Range) {
	g.caller().AllToAll(s, dst, src)
	n := src.Len / memory.Bytes(len(g.ranks))
	g.collective(s, letter.Signature{Kind: letter.AllToAll, Bytes: n}, false, func(c *call, heads []*head) {
		var sends, recvs []piece
		if n > 0 {
			part := func(r device.Range, p int) device.Range { return r.Slice(n*memory.Bytes(p), n) }
			s.Copy(part(dst, g.me), part(src, g.me))
			g.others(func(p int) {
				sends = append(sends, piece{p, part(src, p), g.tag(c)})
				recvs = append(recvs, piece{p, part(dst, p), g.tag(c)})
			})
		}
		g.meet(s, c, heads, sends, recvs)
	})
}

func (g *group) AllToAllV(s device.Stream, dst, src device.Range, send, recv []comm.Part) {
	g.caller().AllToAllV(s, dst, src, send, recv)
	g.collective(s, letter.Signature{Kind: letter.AllToAllV}, false, func(c *call, heads []*head) {
		for _, h := range heads {
			if h.send {
				h.len = send[h.peer].Len
			} else {
				h.len = recv[h.peer].Len
			}
		}
		part := func(r device.Range, p comm.Part) device.Range {
			if p.Len == 0 {
				return device.Range{}
			}
			return r.Slice(p.Off, p.Len)
		}
		if send[g.me].Len > 0 {
			s.Copy(part(dst, recv[g.me]), part(src, send[g.me]))
		}
		var sends, recvs []piece
		g.others(func(p int) {
			sends = append(sends, piece{p, part(src, send[p]), g.tag(c)})
			recvs = append(recvs, piece{p, part(dst, recv[p]), g.tag(c)})
		})
		g.meet(s, c, heads, sends, recvs)
	})
}

func (g *group) Broadcast(s device.Stream, r device.Range, root int) {
	g.caller().Broadcast(s, r, root)
	g.collective(s, letter.Signature{Kind: letter.Broadcast, Bytes: r.Len, Root: root}, false, func(c *call, heads []*head) {
		switch {
		case root == g.me:
			g.spread(s, c, heads, r, func(int) device.Range { return device.Range{} })
		case r.Len == 0:
			g.meet(s, c, heads, nil, nil)
		default:
			g.meet(s, c, heads, nil, []piece{{root, r, g.tag(c)}})
		}
	})
}

func (g *group) Barrier(s device.Stream) {
	g.caller().Barrier(s)
	g.collective(s, letter.Signature{Kind: letter.Barrier}, false, func(c *call, heads []*head) { g.meet(s, c, heads, nil, nil) })
}

func (g *group) Send(s device.Stream, src device.Range, to int) {
	g.caller().Send(s, src, to)
	g.messages(s, letter.Send, []comm.Message{{Peer: to, Range: src}}, nil)
}

func (g *group) Recv(s device.Stream, dst device.Range, from int) {
	g.caller().Recv(s, dst, from)
	g.messages(s, letter.Recv, nil, []comm.Message{{Peer: from, Range: dst}})
}

func (g *group) Exchange(s device.Stream, sends, recvs []comm.Message) {
	g.caller().Exchange(s, sends, recvs)
	if len(sends)+len(recvs) > 0 {
		g.messages(s, letter.Exchange, sends, recvs)
	}
}

// messages makes a call of messages between two ranks. Those of two ranks are counted, so
// that they pass in order whatever streams they are on.
func (g *group) messages(s device.Stream, k letter.Kind, sends, recvs []comm.Message) {
	w := g.w
	if w.staged && max(len(sends), len(recvs)) > mostMessages {
		panic(fmt.Sprintf("comm: %v on rank %d: expected at most %d messages in each direction, got %d and %d; pass them in several calls", k, g.ranks[g.me], mostMessages, len(sends), len(recvs)))
	}
	w.issue.Lock()
	defer w.issue.Unlock()
	sig, peer := letter.Signature{Kind: k}, 0
	for _, m := range append(append([]comm.Message{}, sends...), recvs...) {
		sig.Bytes, peer = m.Range.Len, m.Peer
	}
	c := g.enter(sig, peer)
	if c == nil {
		return
	}
	var heads []*head
	var seqs []sequence
	number := func(list []comm.Message, send bool, count []uint64) (all []piece) {
		g.mu.Lock()
		defer g.mu.Unlock()
		for _, m := range list {
			count[m.Peer]++
			tag := tagPair + int(count[m.Peer]%tagCount)
			heads = append(heads, &head{peer: m.Peer, tag: tag, send: send, len: m.Range.Len})
			seqs = append(seqs, sequence{m.Peer, send, count[m.Peer]})
			all = append(all, piece{m.Peer, m.Range, tag})
		}
		return all
	}
	out, in := number(sends, true, g.sent), number(recvs, false, g.got)
	g.ordered(s, false, func() { g.transfer(s, c, heads, seqs, out, in) })
}
