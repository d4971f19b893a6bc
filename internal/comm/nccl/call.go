// This file owns what a call is: its name, and what ranks tell each other about it.

package nccl

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
	capture
	replay
	send
	recv
	exchange
)

func (k kind) String() string {
	if k > exchange {
		return fmt.Sprintf("call %d", uint8(k))
	}
	return [...]string{"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "all-to-all-v", "broadcast", "barrier", "gather", "begin-capture", "replay", "send", "receive", "exchange"}[k]
}

// pair reports whether the call passes messages between two ranks. Other calls concern all
// ranks.
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
	peer   int    // of a single message
}

// name describes a call as ranks in one process do.
func (g *group) name(c *call) string {
	s := fmt.Sprintf("%v #%d", c.kind, c.number)
	switch c.kind {
	case reduceScatter, allReduce:
		s += fmt.Sprintf(" of %d bytes (%v, %v)", c.bytes, c.t, c.op)
	case barrier, gather, allToAllV, capture, replay, exchange:
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

// letterSize is the size of a letter.
const letterSize = 64

// letter is what a rank tells another about a call: the call, and how many bytes it sends to
// the other.
type letter struct {
	peer int
	len  memory.Bytes // that are sent, or expected; only calls with parts of their own have it
}

func encode(b []byte, c *call, n memory.Bytes) {
	b[0], b[1], b[2] = byte(c.kind), byte(c.t), byte(c.op)
	for i, v := range [...]uint64{c.number, uint64(c.root), uint64(c.bytes), uint64(n), uint64(c.peer)} {
		binary.LittleEndian.PutUint64(b[8+8*i:], v)
	}
}

func decode(b []byte) (c call, n memory.Bytes) {
	at := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8+8*i:]) }
	c.signature = signature{kind: kind(b[0]), t: comm.Type(b[1]), op: comm.Op(b[2]), root: int(at(1)), bytes: memory.Bytes(at(2))}
	c.number, c.peer = at(0), int(at(4))
	return c, memory.Bytes(at(3))
}

// disagreement compares a letter with a call of this rank. It returns what is wrong, or
// nothing.
func (g *group) disagreement(c *call, from letter, b []byte) string {
	theirs, n := decode(b)
	me, peer := g.ranks[g.me], g.ranks[from.peer]
	switch {
	case c.kind.pair() != theirs.kind.pair() || !c.kind.pair() && theirs.signature != c.signature:
		return fmt.Sprintf("comm: rank %d calls %s, but rank %d calls %s; make the same calls in the same order on all ranks", me, g.name(c), peer, g.name(&theirs))
	case from.len != n && c.kind.pair():
		return fmt.Sprintf("comm: rank %d calls %s and sends %d bytes to rank %d, which calls %s and expects %d bytes", peer, g.name(&theirs), n, me, g.name(c), from.len)
	case from.len != n:
		return fmt.Sprintf("comm: in %s, rank %d sends %d bytes to rank %d, which expects %d bytes", g.name(c), peer, n, me, from.len)
	}
	return ""
}
