// This file owns how the messages of a call become work on a stream: directly between the
// memory of the ranks, or through pinned buffers in pieces.

package mpi

import (
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// piece is a range that goes to a peer or comes from one.
type piece struct {
	peer int
	r    device.Range
	tag  int
}

func bytesMessage(peer, tag int, send bool, b []byte) message {
	m := message{peer: peer, tag: tag, send: send, n: memory.Bytes(len(b))}
	if len(b) > 0 {
		m.addr = uintptr(unsafe.Pointer(&b[0]))
	}
	return m
}

// readable reports whether MPI can use the memory of a range.
func (w *world) readable(r device.Range) bool {
	return !w.staged || r.Buf.Kind() == memory.Host
}

// transfer passes pieces after letters.
func (g *group) transfer(s device.Stream, c *call, heads []*head, seqs []sequence, sends, recvs []piece) {
	if g.direct(sends) && g.direct(recvs) {
		g.round(s, c, heads, seqs, sends, recvs, nil)
		return
	}
	// Round k passes the k-th part of every piece, on both sides of each message.
	most := g.share(c)
	for len(heads) > 0 || longest(sends, recvs) > 0 {
		var out, in []piece
		var after []func()
		var used memory.Bytes
		for i := range sends {
			p := cut(&sends[i], most)
			if p.r.Len > 0 && !g.w.readable(p.r) {
				at := g.w.out.Slice(used, p.r.Len)
				if i > 0 && out[i-1].r.Len == p.r.Len && sends[i].r == sends[i-1].r { // the same bytes to another rank
					at = out[i-1].r
				} else {
					s.Copy(at, p.r)
					used += (p.r.Len + 255) &^ 255
				}
				p.r = at
			}
			out = append(out, p)
		}
		used = 0
		for i := range recvs {
			p := cut(&recvs[i], most)
			if p.r.Len > 0 && !g.w.readable(p.r) {
				to := p.r
				p.r = g.w.in.Slice(used, to.Len)
				used += (to.Len + 255) &^ 255
				from := p.r
				after = append(after, func() { s.Copy(to, from) })
			}
			in = append(in, p)
		}
		g.round(s, c, heads, seqs, out, in, after)
		heads = nil
	}
}

// cut takes the first bytes of a piece off it.
func cut(p *piece, most memory.Bytes) piece {
	n := min(most, p.r.Len)
	first := *p
	first.r.Len = n
	p.r.Off, p.r.Len = p.r.Off+n, p.r.Len-n
	return first
}

func longest(lists ...[]piece) (n memory.Bytes) {
	for _, l := range lists {
		for _, p := range l {
			n = max(n, p.r.Len)
		}
	}
	return n
}

// share returns how much of a piece fits the buffers, the same on both sides of a message.
// Collectives have a piece for each other rank, and exchanges up to mostMessages in each
// direction.
func (g *group) share(c *call) memory.Bytes {
	places := memory.Bytes(len(g.ranks) - 1)
	if c.Kind.Pair() {
		places = mostMessages
	}
	return g.w.o.Scratch / places &^ 255
}

// mostMessages is the most messages of an exchange in one direction that go through pinned
// buffers.
const mostMessages = 64

func (g *group) direct(all []piece) bool {
	for _, p := range all {
		if p.r.Len > 0 && !g.w.readable(p.r) {
			return false
		}
	}
	return true
}

// round issues the host function that passes pieces, and what follows it.
func (g *group) round(s device.Stream, c *call, heads []*head, seqs []sequence, sends, recvs []piece, after []func()) {
	o := &op{g: g, call: c, heads: heads, seqs: seqs, done: make(chan struct{}, 1)}
	var access []device.Access
	for k, list := range [...][]piece{recvs, sends} {
		for _, p := range list {
			if p.r.Len == 0 {
				continue
			}
			o.parts = append(o.parts, message{peer: p.peer, tag: p.tag, send: k == 1, addr: p.r.Addr(), n: p.r.Len})
			if k == 1 {
				access = append(access, device.Reads(p.r))
			} else {
				access = append(access, device.Writes(p.r))
			}
		}
	}
	s.Host(o.pass, access...)
	for _, f := range after {
		f()
	}
}
