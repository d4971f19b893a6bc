// Package comm has the collectives that ranks exchange data with. A communicator
// is one rank's end of a group of ranks; its calls are stream-ordered: they issue
// work on the caller's stream and return, and what they read and write follows
// the stream's order on every rank. All ranks of a group make the same calls in
// the same order, but for messages, which only their two ranks know of.
//
// This file owns the interface, which NCCL and MPI fit; local.go ranks in one
// process, meet.go how their calls find each other, pair.go how messages do,
// issue.go and reduce.go what a call puts on the streams, lockstep.go the drivers
// that run a function on every rank, errors.go what is said when a rank fails.
package comm

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
)

// Type is the number format of the elements of a reduction.
type Type uint8

const (
	F32 Type = iota
	BF16
)

// Size is the bytes of an element.
func (t Type) Size() device.Bytes {
	if t == BF16 {
		return 2
	}
	return 4
}

func (t Type) String() string {
	if t > BF16 {
		return fmt.Sprintf("Type(%d)", uint8(t))
	}
	return [...]string{"f32", "bf16"}[t]
}

// Op is what a reduction does with the elements of all ranks.
type Op uint8

const (
	Sum  Op = iota
	Mean    // the sum divided by the number of ranks
	Max
)

func (o Op) String() string {
	if o > Max {
		return fmt.Sprintf("Op(%d)", uint8(o))
	}
	return [...]string{"sum", "mean", "max"}[o]
}

// Comm is one rank's end of a group of ranks. Ranges are of the rank's own
// device; none may overlap another of the same call, except where a call says
// so. Misuse (lengths that do not fit, a wrong rank) panics.
type Comm interface {
	Rank() int
	Size() int
	// Split is a communicator of some of this one's ranks, in the given order.
	// All of those ranks call it with the same list; Close ends it.
	Split(ranks []int) (Comm, error)

	// AllGather puts every rank's src at its rank's place in every rank's dst.
	// A src that is the rank's own place in dst is not copied.
	AllGather(s device.Stream, dst, src device.Range)
	// ReduceScatter combines all ranks' src and leaves in each rank's dst the
	// part at its rank's place. The dst may be the rank's own place in src.
	ReduceScatter(s device.Stream, dst, src device.Range, t Type, op Op)
	// AllReduce combines all ranks' src in every rank's dst. The two may be the
	// same range.
	AllReduce(s device.Stream, dst, src device.Range, t Type, op Op)
	// AllToAll sends the i-th of Size equal parts of src to rank i, and receives
	// rank i's at the i-th place of dst.
	AllToAll(s device.Stream, dst, src device.Range)
	// AllToAllV is AllToAll with parts of varying bytes: send[i] and recv[i] are
	// what goes to and comes from rank i, each within src and dst. The lists may
	// be changed once it has returned.
	AllToAllV(s device.Stream, dst, src device.Range, send, recv []Part)
	Broadcast(s device.Stream, r device.Range, root int)
	// Send and Recv pass one message. From one rank to another, messages are
	// received in the order in which they are sent.
	Send(s device.Stream, src device.Range, to int)
	Recv(s device.Stream, dst device.Range, from int)
	// Exchange passes any number of messages at once: two ranks may send to each
	// other, and all of a ring to their neighbours. It meets the other ranks'
	// exchanges as well as their single messages. The lists may be changed once
	// it has returned.
	Exchange(s device.Stream, sends, recvs []Message)
	// Barrier orders the stream's later work after the earlier work of the
	// streams that the other ranks call it with.
	Barrier(s device.Stream)

	// Err says why calls of this rank were not made, or will not be: a rank gave
	// up. From then on calls do nothing. It is nil as long as all is well, and
	// knows nothing of errors of the devices, which their Sync returns.
	Err() error
	// Abort makes the communicator fail, with all that Split made of it or beside
	// it, on every rank: ranks that wait in a call come back from it.
	Abort(err error)
	// Close ends the communicator; all ranks call it. A rank that waits for one
	// that has closed comes back, and Err tells it so.
	Close() error
}

// Message is what is sent to a rank, or received from it.
type Message struct {
	Peer  int
	Range device.Range
}

// Part is a run of bytes inside a range.
type Part struct {
	Off, Len device.Bytes
}
