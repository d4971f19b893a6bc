// Package letter is what ranks in several processes tell each other about their calls, and
// how calls are named. Engines between processes pass a letter with each call, so that ranks
// that disagree fail with a sentence and do not wait for ever.
package letter

import (
	"encoding/binary"
	"fmt"

	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// Kind is what a call does.
type Kind uint8

const (
	AllGather Kind = iota
	ReduceScatter
	AllReduce
	AllToAll
	AllToAllV
	Broadcast
	Barrier
	Gather
	Split
	Capture
	Replay
	Send
	Recv
	Exchange
)

func (k Kind) String() string {
	if k > Exchange {
		return fmt.Sprintf("call %d", uint8(k))
	}
	return [...]string{"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "all-to-all-v", "broadcast", "barrier", "gather", "split", "begin-capture", "replay", "send", "receive", "exchange"}[k]
}

// Pair reports whether the call passes messages between two ranks. Other calls concern all
// ranks.
func (k Kind) Pair() bool { return k >= Send }

// Signature is the part of a collective that must be the same on all ranks.
type Signature struct {
	Kind  Kind
	Type  comm.Type
	Op    comm.Op
	Root  int // in the group
	Bytes memory.Bytes
}

// Call is one call of a rank.
type Call struct {
	Signature
	Number uint64 // among all calls of the rank in the group
	Peer   int    // of a single message
}

// Name describes a call as ranks in one process do. ranks are those of the group, numbered
// as in the world.
func (c *Call) Name(ranks []int) string {
	world := func(r int) int { // r may be what another process says
		if r < 0 || r >= len(ranks) {
			return -1
		}
		return ranks[r]
	}
	s := fmt.Sprintf("%v #%d", c.Kind, c.Number)
	switch c.Kind {
	case ReduceScatter, AllReduce:
		s += fmt.Sprintf(" of %d bytes (%v, %v)", c.Bytes, c.Type, c.Op)
	case Barrier, Gather, AllToAllV, Split, Capture, Replay, Exchange:
	case Send:
		s += fmt.Sprintf(" of %d bytes to rank %d", c.Bytes, world(c.Peer))
	case Recv:
		s += fmt.Sprintf(" of %d bytes from rank %d", c.Bytes, world(c.Peer))
	case Broadcast:
		s += fmt.Sprintf(" of %d bytes from rank %d", c.Bytes, world(c.Root))
	default:
		s += fmt.Sprintf(" of %d bytes a rank", c.Bytes)
	}
	return s
}

// Size is the size of a letter.
const Size = 56

// AnyBytes expects any number of bytes.
const AnyBytes memory.Bytes = -1

// Letter is a call, and how many bytes its rank sends to the rank that gets the letter. Turn
// is its number among all calls of the rank, if the engine needs one order of them.
type Letter struct {
	Call
	Sent memory.Bytes
	Turn uint64
}

// Write writes a letter to Size bytes.
func (l *Letter) Write(b []byte) {
	clear(b[:8])
	b[0], b[1], b[2] = byte(l.Kind), byte(l.Type), byte(l.Op)
	for i, v := range [...]uint64{l.Number, uint64(l.Root), uint64(l.Bytes), uint64(l.Sent), uint64(l.Peer), l.Turn} {
		binary.LittleEndian.PutUint64(b[8+8*i:], v)
	}
}

// Read reads a letter.
func Read(b []byte) (l Letter) {
	at := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8+8*i:]) }
	l.Signature = Signature{Kind: Kind(b[0]), Type: comm.Type(b[1]), Op: comm.Op(b[2]), Root: int(at(1)), Bytes: memory.Bytes(at(2))}
	l.Number, l.Sent, l.Peer, l.Turn = at(0), memory.Bytes(at(3)), int(at(4)), at(5)
	return l
}

// Disagreement compares a call of rank me with the letter of a peer, which should send so
// many bytes. It returns what is wrong, or nothing.
func (c *Call) Disagreement(ranks []int, me, peer int, theirs *Letter, expected memory.Bytes) string {
	mine, other := ranks[me], ranks[peer]
	switch {
	case c.Kind.Pair() != theirs.Kind.Pair() || !c.Kind.Pair() && theirs.Signature != c.Signature:
		return fmt.Sprintf("comm: rank %d calls %s, but rank %d calls %s; make the same calls in the same order on all ranks", mine, c.Name(ranks), other, theirs.Name(ranks))
	case expected != theirs.Sent && expected != AnyBytes && c.Kind.Pair():
		return fmt.Sprintf("comm: rank %d calls %s and sends %d bytes to rank %d, which calls %s and expects %d bytes", other, theirs.Name(ranks), theirs.Sent, mine, c.Name(ranks), expected)
	case expected != theirs.Sent && expected != AnyBytes:
		return fmt.Sprintf("comm: in %s, rank %d sends %d bytes to rank %d, which expects %d bytes", c.Name(ranks), other, theirs.Sent, mine, expected)
	}
	return ""
}
