// Package comm provides the collectives by which ranks exchange data.
//
// A communicator is one rank's end of a group of ranks. Its calls are stream-ordered:
// they issue work on the caller's stream and return, and what they read and write follows
// the order of that stream on every rank. All ranks of a group must make the same calls
// in the same order. Only messages are exempt: they concern two ranks.
//
// This file owns the interface, which NCCL and MPI fit. local.go owns ranks in one
// process, meet.go how their calls meet, pair.go how messages meet, issue.go the work of
// a call, capture.go graphs of several ranks, lockstep.go the drivers that run a function
// on every rank, and errors.go the errors of a rank that fails. All engines share
// caller.go, which checks arguments, and reduce.go, which adds.
package comm

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Type is the number format of the elements of a reduction.
type Type uint8

const (
	F32 Type = iota
	BF16
)

// Size returns the size of one element.
func (t Type) Size() memory.Bytes {
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

// Op says how a reduction combines the elements of all ranks.
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

// Comm is one rank's end of a group of ranks. Ranges must lie on the rank's own device,
// and the ranges of one call must not overlap unless the call allows it. Calls panic if
// lengths do not fit or a rank does not exist.
type Comm interface {
	Rank() int
	Size() int
	// Split returns a communicator of some of this one's ranks, in the given order.
	// All of those ranks must call it with the same list. It may wait for them, so ranks
	// must make their splits in an order that they share. Close ends it.
	Split(ranks []int) (Comm, error)

	// AllGather copies every rank's src to that rank's place in every rank's dst. src
	// may be the rank's own place in dst; it is not copied then.
	AllGather(s device.Stream, dst, src device.Range)
	// ReduceScatter combines the src of all ranks and writes to each rank's dst the
	// part at that rank's place. dst may be the rank's own place in src.
	ReduceScatter(s device.Stream, dst, src device.Range, t Type, op Op)
	// AllReduce combines the src of all ranks and writes the result to every rank's
	// dst. The two may be the same range.
	AllReduce(s device.Stream, dst, src device.Range, t Type, op Op)
	// AllToAll sends the i-th of Size equal parts of src to rank i, and receives the
	// part from rank i at the i-th place of dst.
	AllToAll(s device.Stream, dst, src device.Range)
	// AllToAllV is AllToAll with parts of different sizes: send[i] is the part of src
	// that goes to rank i, and recv[i] the part of dst that comes from rank i. The
	// caller may change the lists afterwards.
	AllToAllV(s device.Stream, dst, src device.Range, send, recv []Part)
	// Broadcast copies the root's r to the r of every other rank.
	Broadcast(s device.Stream, r device.Range, root int)
	// Send and Recv pass one message. A rank receives the messages of another rank in
	// the order in which they are sent.
	Send(s device.Stream, src device.Range, to int)
	Recv(s device.Stream, dst device.Range, from int)
	// Exchange passes any number of messages at once: two ranks may send to each
	// other, and all ranks of a ring to their neighbours. Its messages may meet those
	// of another rank's Exchange, Send or Recv. The caller may change the lists
	// afterwards.
	Exchange(s device.Stream, sends, recvs []Message)
	// Barrier orders the later work of the stream after the earlier work of the
	// streams that the other ranks pass to it.
	Barrier(s device.Stream)

	// Gather passes small messages between hosts: it returns the bytes of all ranks in
	// the order of ranks, and waits until all of them have called it. It uses no stream
	// and is ordered with no work. Lengths may differ. The caller may change b
	// afterwards, but not what it gets. Gather returns the error of Err if the call was
	// not made.
	Gather(b []byte) ([][]byte, error)

	// Err returns an error if the communicator has failed because a rank gave up.
	// Calls do nothing then. Err does not report errors of devices; Stream.Sync does.
	Err() error
	// Abort makes the communicator fail on every rank, with all communicators that
	// Split made of the same ranks. Ranks that wait in a call return from it.
	Abort(err error)
	// Close ends the communicator. All ranks must call it. A rank that waits for a
	// rank that has closed returns, and Err then says so.
	Close() error
}

// Registrar is a Comm that is faster with memory that it was told of.
type Registrar interface {
	Comm
	// Register tells the communicator of memory that many of its calls use: each call at the same
	// place on all ranks. All ranks must call it, and it waits for them, so it belongs to no step.
	// The caller calls release before it frees the memory, when no call and no graph uses it any
	// more.
	Register(r device.Range) (release func())
}

// Register tells communicators of memory that many of their calls use, if they can be told.
// Some may be nil. See [Registrar].
func Register(r device.Range, cs ...Comm) (release func()) {
	var all []func()
	for _, c := range cs {
		if x, can := c.(Registrar); can {
			all = append(all, x.Register(r))
		}
	}
	return func() {
		for _, f := range all {
			f()
		}
	}
}

// Message is a range that is sent to a rank, or received from it.
type Message struct {
	Peer  int
	Range device.Range
}

// Part is a run of bytes inside a range.
type Part struct {
	Off, Len memory.Bytes
}
