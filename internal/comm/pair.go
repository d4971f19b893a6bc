// This file owns messages between two ranks: how their ends meet, and the work they put on
// the streams. A rank's call is over when each of its messages has met a call of another
// rank.

package comm

import (
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/device"
)

// end is a rank's end of a message.
type end struct {
	peer int
	recv bool
	r    device.Range
	met  bool // it has met the end of the peer
}

// move is a message whose ends have met.
type move struct {
	from, to int
	dst, src device.Range
}

func (c *Local) Send(s device.Stream, src device.Range, to int) {
	c.pass(send, s, []Message{{to, src}}, nil)
}

func (c *Local) Recv(s device.Stream, dst device.Range, from int) {
	c.pass(recv, s, nil, []Message{{from, dst}})
}

func (c *Local) Exchange(s device.Stream, sends, recvs []Message) {
	c.pass(exchange, s, sends, recvs)
}

// pass makes a call of messages. It copies the lists, so that they need not be on the
// heap.
func (c *Local) pass(k kind, s device.Stream, sends, recvs []Message) {
	c.caller().messages(k, s, sends, recvs)
	if len(sends)+len(recvs) == 0 {
		return
	}
	g := c.g
	for _, all := range [...][]Message{sends, recvs} {
		for _, m := range all {
			if g.w.devs[g.ranks[m.Peer]] == nil {
				panic(fmt.Sprintf("comm: %v on rank %d: rank %d is absent; pass messages between present ranks", k, g.ranks[c.rank], g.ranks[m.Peer]))
			}
		}
	}
	g.mu.Lock()
	defer g.unlock()
	g.enter(c.rank, call{sig: sig{kind: k}, s: s})
	ends := g.ends[c.rank][:0]
	for _, m := range sends {
		ends = append(ends, end{peer: m.Peer, r: m.Range})
	}
	for _, m := range recvs {
		ends = append(ends, end{peer: m.Peer, recv: true, r: m.Range})
	}
	g.ends[c.rank] = ends
	g.attend(c.rank)
}

// open reports whether rank r has a message with rank p that has not met its other end.
func (g *group) open(r, p int) bool {
	return slices.ContainsFunc(g.ends[r], func(e end) bool { return e.peer == p && !e.met })
}

// match finds the other ends of a rank's messages: of each peer, the first end in the
// opposite direction that has not met. It returns false if two lengths differ.
func (g *group) match(r int) bool {
	for i := range g.ends[r] {
		e := &g.ends[r][i]
		if p := &g.calls[e.peer]; !p.waiting || !p.kind.pair() {
			continue
		}
		k := slices.IndexFunc(g.ends[e.peer], func(o end) bool { return o.peer == r && o.recv != e.recv && !o.met })
		if k < 0 {
			continue
		}
		o := &g.ends[e.peer][k]
		m := move{from: r, to: e.peer, dst: o.r, src: e.r}
		if e.recv {
			m = move{from: e.peer, to: r, dst: e.r, src: o.r}
		}
		if m.dst.Len != m.src.Len {
			g.disagree("comm: rank %d calls %s and sends %d bytes to rank %d, which calls %s and expects %d bytes", g.ranks[m.from], g.name(m.from), m.src.Len, g.ranks[m.to], g.name(m.to), m.dst.Len)
			return false
		}
		e.met, o.met = true, true
		g.moves = append(g.moves, m)
	}
	return true
}

// passed reports whether all messages of a rank's call have met.
func (g *group) passed(r int) bool {
	return !slices.ContainsFunc(g.ends[r], func(e end) bool { return !e.met })
}

// exchange issues all messages that have met.
func (g *group) exchange() {
	g.arrange(func(m move) (a, b int) { return m.to, m.from })
	for _, m := range g.moves {
		if m.src.Len > 0 {
			g.calls[m.to].s.Copy(m.dst, m.src)
		}
	}
	g.arrange(func(m move) (a, b int) { return m.from, m.to })
}

// arrange makes rank a's stream wait for rank b's for each message, once for each pair. As
// in cross, it records all events before the first wait.
func (g *group) arrange(ends func(m move) (a, b int)) {
	for wait := range 2 {
		for i, m := range g.moves {
			a, b := ends(m)
			again := m.src.Len == 0 || slices.ContainsFunc(g.moves[:i], func(o move) bool {
				c, d := ends(o)
				return o.src.Len > 0 && d == b && (c == a || wait == 0)
			})
			switch {
			case again:
			case wait == 0:
				g.calls[b].s.Record(g.events[b])
			default:
				g.calls[a].s.Wait(g.events[b])
			}
		}
	}
}

// messages describes the messages of a rank's call.
func (g *group) messages(r int) string {
	one := g.ends[r][0]
	switch g.calls[r].kind {
	case send:
		return fmt.Sprintf(" of %d bytes to rank %d", one.r.Len, g.ranks[one.peer])
	case recv:
		return fmt.Sprintf(" of %d bytes from rank %d", one.r.Len, g.ranks[one.peer])
	}
	var all []string
	for _, e := range g.ends[r] {
		way := "to"
		if e.recv {
			way = "from"
		}
		all = append(all, fmt.Sprintf("%d bytes %s rank %d", e.r.Len, way, g.ranks[e.peer]))
	}
	return " of " + strings.Join(all, ", ")
}
