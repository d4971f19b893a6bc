// This file owns the calls.

package nccl

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/letter"
	"github.com/stowage-dev/stowage/internal/nccl"
	"github.com/stowage-dev/stowage/memory"
)

// work is what a call does on its stream.
type work struct {
	access []device.Access
	f      func(c nccl.Comm, stream uintptr) error
}

// collective makes a call of all ranks. Nothing reaches the library if the work is nil.
func (g *group) collective(s device.Stream, sig letter.Signature, of func(p int) (send, recv memory.Bytes), issue func() *work) {
	sends, recvs := g.parts(of)
	g.issue(s, sig, 0, sends, recvs, issue)
}

func (g *group) issue(s device.Stream, sig letter.Signature, peer int, sends, recvs []part, issue func() *work) {
	g.w.order.mu.Lock()
	defer g.w.order.mu.Unlock()
	if g.enter(sig, peer, sends, recvs) == nil {
		return
	}
	x := issue()
	if x == nil {
		return
	}
	g.w.ordered(s, func() {
		launch(s, sig.Kind.String(), x.access, func(stream uintptr) {
			g.run(func(c nccl.Comm) error { return x.f(c, stream) })
		})
	})
}

// ordered issues work of NCCL after the work of NCCL before it, on whatever stream that is.
func (w *world) ordered(s device.Stream, issue func()) {
	switch {
	case !s.Capturing():
		w.order.take(w)
		s.Wait(w.turn)
		issue()
		s.Record(w.turn)
	case w.joint:
		if w.begun {
			s.Wait(w.inner)
		}
		issue()
		s.Record(w.inner)
		w.begun = true
	default: // a capture of the caller's own
		issue()
	}
}

func copyUnlessSame(s device.Stream, dst, src device.Range) {
	if src.Len > 0 && dst.Addr() != src.Addr() {
		s.Copy(dst, src)
	}
}

func number(t comm.Type) nccl.Type {
	if t == comm.BF16 {
		return nccl.BFloat16
	}
	return nccl.Float32
}

func operation(op comm.Op) nccl.Op {
	return [...]nccl.Op{comm.Sum: nccl.Sum, comm.Mean: nccl.Mean, comm.Max: nccl.Max}[op]
}

func (g *group) AllGather(s device.Stream, dst, src device.Range) {
	g.caller().AllGather(s, dst, src)
	g.collective(s, letter.Signature{Kind: letter.AllGather, Bytes: src.Len}, nil, func() *work {
		if src.Len == 0 || g.alone() {
			copyUnlessSame(s, dst, src)
			return nil
		}
		return &work{[]device.Access{device.Writes(dst), device.Reads(src)}, func(c nccl.Comm, stream uintptr) error {
			return g.w.lib.AllGather(c, dst.Addr(), src.Addr(), int(src.Len), stream)
		}}
	})
}

func (g *group) ReduceScatter(s device.Stream, dst, src device.Range, t comm.Type, op comm.Op) {
	g.caller().ReduceScatter(s, dst, src, t, op)
	g.collective(s, letter.Signature{Kind: letter.ReduceScatter, Bytes: dst.Len, Type: t, Op: op}, nil, func() *work {
		if dst.Len == 0 || g.alone() {
			copyUnlessSame(s, dst, src)
			return nil
		}
		return &work{[]device.Access{device.Writes(dst), device.Reads(src)}, func(c nccl.Comm, stream uintptr) error {
			return g.w.lib.ReduceScatter(c, dst.Addr(), src.Addr(), int(dst.Len/t.Size()), number(t), operation(op), stream)
		}}
	})
}

func (g *group) AllReduce(s device.Stream, dst, src device.Range, t comm.Type, op comm.Op) {
	g.caller().AllReduce(s, dst, src, t, op)
	g.collective(s, letter.Signature{Kind: letter.AllReduce, Bytes: dst.Len, Type: t, Op: op}, nil, func() *work {
		if dst.Len == 0 || g.alone() {
			copyUnlessSame(s, dst, src)
			return nil
		}
		return &work{[]device.Access{device.Writes(dst), device.Reads(src)}, func(c nccl.Comm, stream uintptr) error {
			return g.w.lib.AllReduce(c, dst.Addr(), src.Addr(), int(dst.Len/t.Size()), number(t), operation(op), stream)
		}}
	})
}

func (g *group) AllToAll(s device.Stream, dst, src device.Range) {
	g.caller().AllToAll(s, dst, src)
	n := src.Len / memory.Bytes(len(g.ranks))
	g.collective(s, letter.Signature{Kind: letter.AllToAll, Bytes: n}, nil, func() *work {
		if n == 0 {
			return nil
		}
		var sends, recvs []comm.Message
		for p := range g.ranks {
			from, to := src.Slice(n*memory.Bytes(p), n), dst.Slice(n*memory.Bytes(p), n)
			if p == g.me {
				s.Copy(to, from)
				continue
			}
			sends, recvs = append(sends, comm.Message{Peer: p, Range: from}), append(recvs, comm.Message{Peer: p, Range: to})
		}
		return g.messages(sends, recvs)
	})
}

func (g *group) AllToAllV(s device.Stream, dst, src device.Range, send, recv []comm.Part) {
	g.caller().AllToAllV(s, dst, src, send, recv)
	of := func(p int) (memory.Bytes, memory.Bytes) { return send[p].Len, recv[p].Len }
	g.collective(s, letter.Signature{Kind: letter.AllToAllV}, of, func() *work {
		var sends, recvs []comm.Message
		for p := range g.ranks {
			if p != g.me {
				sends = appendPart(sends, p, src, send[p])
				recvs = appendPart(recvs, p, dst, recv[p])
			} else if send[p].Len > 0 {
				s.Copy(dst.Slice(recv[p].Off, recv[p].Len), src.Slice(send[p].Off, send[p].Len))
			}
		}
		return g.messages(sends, recvs)
	})
}

func appendPart(to []comm.Message, peer int, r device.Range, p comm.Part) []comm.Message {
	if p.Len == 0 {
		return to
	}
	return append(to, comm.Message{Peer: peer, Range: r.Slice(p.Off, p.Len)})
}

func (g *group) Broadcast(s device.Stream, r device.Range, root int) {
	g.caller().Broadcast(s, r, root)
	g.collective(s, letter.Signature{Kind: letter.Broadcast, Bytes: r.Len, Root: root}, nil, func() *work {
		if r.Len == 0 || g.alone() {
			return nil
		}
		access := device.Writes(r)
		if root == g.me {
			access = device.Reads(r)
		}
		return &work{[]device.Access{access}, func(c nccl.Comm, stream uintptr) error {
			return g.w.lib.Broadcast(c, r.Addr(), int(r.Len), root, stream)
		}}
	})
}

// Barrier adds up a number that nobody needs.
func (g *group) Barrier(s device.Stream) {
	g.caller().Barrier(s)
	g.collective(s, letter.Signature{Kind: letter.Barrier}, nil, func() *work {
		if g.alone() {
			return nil
		}
		r := g.w.spot.Slice(0, 4)
		return &work{[]device.Access{device.Writes(r)}, func(c nccl.Comm, stream uintptr) error {
			return g.w.lib.AllReduce(c, r.Addr(), r.Addr(), 1, nccl.Float32, nccl.Sum, stream)
		}}
	})
}

func (g *group) Send(s device.Stream, src device.Range, to int) {
	g.caller().Send(s, src, to)
	g.pass(s, letter.Send, []comm.Message{{Peer: to, Range: src}}, nil)
}

func (g *group) Recv(s device.Stream, dst device.Range, from int) {
	g.caller().Recv(s, dst, from)
	g.pass(s, letter.Recv, nil, []comm.Message{{Peer: from, Range: dst}})
}

func (g *group) Exchange(s device.Stream, sends, recvs []comm.Message) {
	g.caller().Exchange(s, sends, recvs)
	if len(sends)+len(recvs) > 0 {
		g.pass(s, letter.Exchange, sends, recvs)
	}
}

// pass makes a call of messages between two ranks.
func (g *group) pass(s device.Stream, k letter.Kind, sends, recvs []comm.Message) {
	sig, peer := letter.Signature{Kind: k}, 0
	list := func(all []comm.Message) (parts []part) {
		for _, m := range all {
			sig.Bytes, peer = m.Range.Len, m.Peer
			parts = append(parts, part{peer: m.Peer, len: m.Range.Len})
		}
		return parts
	}
	a, b := list(sends), list(recvs)
	g.issue(s, sig, peer, a, b, func() *work { return g.messages(sends, recvs) })
}

// messages returns the work of passing messages at once. Those without bytes are left out,
// on both sides.
func (g *group) messages(sends, recvs []comm.Message) *work {
	type message struct {
		send bool
		peer int
		addr uintptr
		n    int
	}
	var all []message // the caller may change the lists
	x := &work{}
	for k, list := range [...][]comm.Message{recvs, sends} {
		for _, m := range list {
			if m.Range.Len == 0 {
				continue
			}
			all = append(all, message{k == 1, m.Peer, m.Range.Addr(), int(m.Range.Len)})
			if k == 1 {
				x.access = append(x.access, device.Reads(m.Range))
			} else {
				x.access = append(x.access, device.Writes(m.Range))
			}
		}
	}
	if len(all) == 0 {
		return nil
	}
	x.f = func(c nccl.Comm, stream uintptr) (err error) {
		for _, m := range all {
			if err != nil {
				break
			}
			if m.send {
				err = g.w.lib.Send(c, m.addr, m.n, m.peer, stream)
			} else {
				err = g.w.lib.Recv(c, m.addr, m.n, m.peer, stream)
			}
		}
		return err
	}
	return x
}
