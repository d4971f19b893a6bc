// This file owns what ranks tell each other about a call, and how calls are named.

package mpi

import (
	"encoding/binary"
	"fmt"

	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

type kind uint8

const (
	allGather kind = iota
	reduceScatter
	allReduce
	allToAll
	allToAllV
	broadcast
	barrier
	gather
	split
	send
	recv
	exchange
)

func (k kind) String() string {
	if k > exchange {
		return fmt.Sprintf("call %d", uint8(k))
	}
	return [...]string{"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "all-to-all-v", "broadcast", "barrier", "gather", "split", "send", "receive", "exchange"}[k]
}

func (k kind) pair() bool { return k >= send }

// signature is the part of a collective that must be the same on all ranks.
type signature struct {
	kind  kind
	t     comm.Type
	op    comm.Op
	root  int // in the group
	bytes memory.Bytes
}

// call is one call of this rank.
type call struct {
	signature
	number uint64 // among all calls of the rank in the group
	serial uint64 // among its collectives, or among its splits
	peer   int    // of a single message
}

// name describes a call as ranks in one process do.
func (g *group) name(c *call) string {
	s := fmt.Sprintf("%v #%d", c.kind, c.number)
	switch c.kind {
	case reduceScatter, allReduce:
		s += fmt.Sprintf(" of %d bytes (%v, %v)", c.bytes, c.t, c.op)
	case barrier, gather, allToAllV, split, exchange:
	case send:
		s += fmt.Sprintf(" of %d bytes to rank %d", c.bytes, g.world(c.peer))
	case recv:
		s += fmt.Sprintf(" of %d bytes from rank %d", c.bytes, g.world(c.peer))
	case broadcast:
		s += fmt.Sprintf(" of %d bytes from rank %d", c.bytes, g.world(c.root))
	default:
		s += fmt.Sprintf(" of %d bytes a rank", c.bytes)
	}
	return s
}

// world returns the number in the world of a rank that another process names.
func (g *group) world(r int) int {
	if r < 0 || r >= len(g.ranks) {
		return -1
	}
	return g.ranks[r]
}

// headSize is the size of a header.
const headSize = 48

// head is a header to or from a peer: the call of its sender, and how many bytes it sends
// to the receiver.
type head struct {
	peer int
	tag  int
	send bool
	len  memory.Bytes // that are sent, or expected; anyLen expects any number
	come bool         // it has arrived
	raw  [headSize]byte
}

const anyLen memory.Bytes = -1

func (h *head) encode(c *call) {
	h.raw = [headSize]byte{byte(c.kind), byte(c.t), byte(c.op)}
	for i, v := range [...]uint64{c.number, uint64(c.root), uint64(c.bytes), uint64(h.len), uint64(c.peer)} {
		binary.LittleEndian.PutUint64(h.raw[8+8*i:], v)
	}
}

func (h *head) decode() (c call, n memory.Bytes) {
	at := func(i int) uint64 { return binary.LittleEndian.Uint64(h.raw[8+8*i:]) }
	c.signature = signature{kind: kind(h.raw[0]), t: comm.Type(h.raw[1]), op: comm.Op(h.raw[2]), root: int(at(1)), bytes: memory.Bytes(at(2))}
	c.number, c.peer = at(0), int(at(4))
	return c, memory.Bytes(at(3))
}

// disagreement compares a received header with a call of this rank. It returns what is
// wrong, or nothing.
func (g *group) disagreement(c *call, h *head) string {
	theirs, n := h.decode()
	me, peer := g.ranks[g.me], g.ranks[h.peer]
	switch {
	case c.kind.pair() && h.len != n:
		return fmt.Sprintf("comm: rank %d calls %s and sends %d bytes to rank %d, which calls %s and expects %d bytes", peer, g.name(&theirs), n, me, g.name(c), h.len)
	case c.kind.pair():
		return ""
	case theirs.signature != c.signature:
		return fmt.Sprintf("comm: rank %d calls %s, but rank %d calls %s; make the same calls in the same order on all ranks", me, g.name(c), peer, g.name(&theirs))
	case h.len != anyLen && h.len != n:
		return fmt.Sprintf("comm: in %s, rank %d sends %d bytes to rank %d, which expects %d bytes", g.name(c), peer, n, me, h.len)
	}
	return ""
}
