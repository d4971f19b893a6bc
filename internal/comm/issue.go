// This file owns the work that a call puts on the streams. Ranks pull: each stream reads
// the other ranks' memory and writes its own rank's. So only two orders are needed: a
// source is ready before others read it, and others have read it before its rank's stream
// overwrites it.

package comm

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// work issues the work of a complete call.
func (g *group) work(r int) {
	switch c := &g.calls[r]; c.kind {
	case allGather:
		g.allGather(c.bytes)
	case reduceScatter:
		g.reduceScatter(c.bytes)
	case allReduce:
		g.allReduce(c.bytes)
	case allToAll:
		g.allToAll(c.bytes)
	case allToAllV:
		g.allToAllV()
	case broadcast:
		g.broadcast(c.root)
	case barrier:
		g.gate()
	case gather:
		g.heard = make([][]byte, len(g.calls)) // ranks may still hold the last one
		for p := range g.calls {
			g.heard[p] = g.calls[p].said
		}
	case beginCapture:
		g.beginCapture()
	case endCapture:
		g.endCapture(c.graph)
	case replay:
		g.replay(c.graph)
	case send, recv, exchange:
		g.exchange()
	}
}

// join makes the hub's stream wait for the streams of ranks below n.
func (g *group) join(hub, n int) {
	for _, p := range g.here {
		if p != hub && p < n {
			g.follow(hub, p)
		}
	}
}

// fork makes the streams of ranks below n wait for the hub's.
func (g *group) fork(hub, n int) {
	if n == 1 && hub == 0 {
		return
	}
	g.calls[hub].s.Record(g.events[hub])
	for _, p := range g.here {
		if p != hub && p < n {
			g.calls[p].s.Wait(g.events[hub])
		}
	}
}

// follow makes rank r's stream wait for the work so far of rank p's.
func (g *group) follow(r, p int) {
	g.calls[p].s.Record(g.events[p])
	g.calls[r].s.Wait(g.events[p])
}

// gate makes every stream wait for all others. It goes through one stream, which takes
// 2(n-1) waits instead of n(n-1).
func (g *group) gate() {
	g.join(g.here[0], len(g.calls))
	g.fork(g.here[0], len(g.calls))
}

func (g *group) allGather(n memory.Bytes) {
	if n == 0 {
		return
	}
	g.gate()
	for _, r := range g.here {
		g.gather(r, func(p int) (part, src device.Range) {
			return g.calls[r].dst.Slice(n*memory.Bytes(p), n), g.calls[p].src
		})
	}
	g.gate()
}

// gather copies a part from each rank to rank r. It begins with rank r itself and goes on
// with its neighbours, so that ranks do not all read from the same one. It does not copy a
// part that is already in place.
func (g *group) gather(r int, part func(p int) (dst, src device.Range)) {
	n := len(g.calls)
	for k := range n {
		p := (r + k) % n
		dst, src := part(p)
		if src.Len > 0 && src.Addr() != dst.Addr() {
			g.calls[r].s.Copy(dst, src)
		}
	}
}

func (g *group) reduceScatter(n memory.Bytes) {
	if n == 0 {
		return
	}
	g.gate()
	for _, r := range g.here {
		g.reduce(r, g.calls[r].dst, n*memory.Bytes(r), n)
	}
	g.gate()
}

// allReduce is a reduce-scatter of equal parts into the destinations, and an all-gather of
// them. Until the owner of a part has reduced it, no other rank reads or writes that part
// of any source, so the two ranges may be the same. If there are fewer vectors than ranks,
// the last ranks own no part.
func (g *group) allReduce(bytes memory.Bytes) {
	if bytes == 0 {
		return
	}
	n := memory.Bytes(len(g.calls))
	const vector = 16
	each := (bytes + n*vector - 1) / (n * vector) * vector
	part := func(p int) (off, size memory.Bytes) {
		off = min(each*memory.Bytes(p), bytes)
		return off, min(each, bytes-off)
	}
	owners, hub := int((bytes+each-1)/each), g.here[0]
	g.join(hub, int(n))
	g.fork(hub, owners)
	for _, r := range g.here {
		if r < owners {
			off, size := part(r)
			g.reduce(r, g.calls[r].dst.Slice(off, size), off, size)
		}
	}
	g.join(hub, owners)
	g.fork(hub, int(n))
	for _, r := range g.here {
		if len(g.absent) > 0 {
			// The slowest rank, for which all wait, gathers every part but the last, or every
			// part if it owns none.
			for p := range min(owners, int(n)-1) {
				off, size := part(p)
				g.calls[r].s.Fill(g.calls[r].dst.Slice(off, size), 0)
			}
			continue
		}
		g.gather(r, func(p int) (dst, src device.Range) {
			off, size := part(p)
			return g.calls[r].dst.Slice(off, size), g.calls[p].dst.Slice(off, size)
		})
	}
	g.join(hub, int(n))
	g.fork(hub, owners)
}

func (g *group) allToAll(n memory.Bytes) {
	if n == 0 {
		return
	}
	g.gate()
	for _, r := range g.here {
		g.gather(r, func(p int) (dst, src device.Range) {
			return g.calls[r].dst.Slice(n*memory.Bytes(p), n), g.calls[p].src.Slice(n*memory.Bytes(r), n)
		})
	}
	g.gate()
}

// allToAllV orders only ranks that exchange bytes.
func (g *group) allToAllV() {
	for _, r := range g.here {
		for _, p := range g.here {
			if s, t := g.calls[p].send[r], g.calls[r].recv[p]; s.Len != t.Len {
				g.disagree("comm: in %s, rank %d sends %d bytes to rank %d, which expects %d bytes", g.name(r), g.ranks[p], s.Len, g.ranks[r], t.Len)
				return
			}
		}
	}
	g.cross(func(reader, source int) bool { return g.calls[reader].recv[source].Len > 0 })
	for _, r := range g.here {
		g.gather(r, func(p int) (dst, src device.Range) {
			s, t := g.calls[p].send[r], g.calls[r].recv[p]
			if s.Len != t.Len { // rank p is absent
				return dst, src
			}
			return g.calls[r].dst.Slice(t.Off, t.Len), g.calls[p].src.Slice(s.Off, s.Len)
		})
	}
	g.cross(func(source, reader int) bool { return g.calls[reader].recv[source].Len > 0 })
}

// cross makes rank a's stream wait for rank b's if after says so. It records all events
// before the first wait: an event recorded after a wait would include that wait.
func (g *group) cross(after func(a, b int) bool) {
	for _, b := range g.here {
		for _, a := range g.here {
			if a != b && after(a, b) {
				g.calls[b].s.Record(g.events[b])
				break
			}
		}
	}
	for _, b := range g.here {
		for _, a := range g.here {
			if a != b && after(a, b) {
				g.calls[a].s.Wait(g.events[b])
			}
		}
	}
}

func (g *group) broadcast(root int) {
	for _, a := range g.absent {
		if a.rank == root {
			root = a.like
		}
	}
	src, n := g.calls[root].dst, len(g.calls)
	if src.Len == 0 || n == 1 {
		return
	}
	g.fork(root, n)
	for _, r := range g.here {
		if r != root {
			g.calls[r].s.Copy(g.calls[r].dst, src)
		}
	}
	g.join(root, n)
}
