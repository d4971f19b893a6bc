// This file owns messages in flight: the messages of a call that pass together. Between its
// begin and its end, only who holds the lock of MPI touches an operation.

package mpi

import (
	"fmt"
	"slices"
	"time"
	"unsafe"

	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/letter"
	"github.com/stowage-dev/stowage/internal/launcher"
	"github.com/stowage-dev/stowage/memory"
)

// message is a run of bytes of this process that goes to a peer or comes from one.
type message struct {
	peer int
	tag  int
	send bool
	addr uintptr
	n    memory.Bytes
}

// op is a number of messages that pass together. A captured call posts the same operation
// at every replay.
type op struct {
	g     *group
	call  *call
	heads []*head // pass before the messages
	parts []message
	seqs  []sequence // of messages between two ranks, or of a split
	where string     // what notes call it
	done  chan struct{}

	since time.Time
	left  int   // requests that have not ended
	over  bool  // done was told
	err   error // of a message
}

// sequence is the place of a message, or of a split, among those of two ranks.
type sequence struct {
	peer int
	send bool
	n    uint64
}

// token is the caller's side of a request.
type token struct {
	w    *world
	o    *op
	h    *head
	recv bool
	hold []byte // a control message, which is sent
	news bool   // the receive of control messages
}

// ended tells what a request was for that it has ended.
func (t token) ended(err error) {
	switch {
	case t.news:
		t.w.hear(err)
	case t.hold != nil:
		t.w.telling--
	case t.o != nil:
		t.o.ended(t, err)
	}
}

// pass makes the messages of the operation pass, and returns when they have, or never can.
// The goroutine calls MPI itself, unless device memory goes through buffers: then this may
// be the host function of a GPU, in which a library must not ask the driver about memory.
func (o *op) pass() {
	w := o.g.w
	if w.staged {
		w.p.post(o.begin)
		<-o.done
		return
	}
	w.p.mu.Lock()
	o.begin()
	w.p.mu.Unlock()
	w.p.begun.Add(1)
	w.p.nap.wake()
	w.p.await(o.done)
}

// begin starts all messages.
func (o *op) begin() {
	w := o.g.w
	o.left, o.over, o.since = 0, false, time.Now() // an error of a message ended the world, and all operations with it
	w.active[o] = struct{}{}
	if w.o.Note != nil {
		if o.where == "" {
			o.where = o.words()
		}
		w.o.Note(o.where, nil)
	}
	if f := o.hopeless(); f != nil {
		o.abandon(f)
		return
	}
	for _, h := range o.heads {
		if h.come = false; h.send {
			h.encode(o.call)
		}
		o.start(h.send, uintptr(unsafe.Pointer(&h.raw)), letter.Size, h.peer, h.tag, h)
	}
	for i := range o.parts {
		m := &o.parts[i]
		for off := memory.Bytes(0); off < m.n; off += w.o.largest {
			o.start(m.send, m.addr+uintptr(off), int(min(m.n-off, w.o.largest)), m.peer, m.tag, nil)
		}
	}
	o.finish()
}

func (o *op) start(send bool, addr uintptr, n, peer, tag int, h *head) {
	if o.err != nil {
		return
	}
	q, t := o.g.w.p.requests, token{w: o.g.w, o: o, h: h, recv: !send}
	if send {
		o.err = q.Send(o.g.c, addr, n, peer, tag, t)
	} else {
		o.err = q.Receive(o.g.c, addr, n, peer, tag, t)
	}
	if o.err == nil {
		o.left++
	}
}

// ended counts a request that has ended. A letter is compared at once, because the
// messages of a rank that disagrees may never come. The error of a message counts when all
// have ended: it may follow from a disagreement.
func (o *op) ended(t token, err error) {
	o.left--
	if o.over {
		return
	}
	if err != nil && o.err == nil {
		o.err = err
	}
	if t.h != nil && t.recv && err == nil {
		t.h.come = true
		if wrong := o.g.disagreement(o.call, t.h); wrong != "" {
			o.g.w.disagree(o.g, wrong)
			return
		}
	}
	o.finish()
}

// finish ends the operation if nothing is in flight.
func (o *op) finish() {
	if o.left > 0 || o.over {
		return
	}
	if o.err != nil {
		o.g.w.fail(o.g.w.rank, o.err, true)
		return
	}
	o.end()
}

func (o *op) end() {
	o.over = true
	delete(o.g.w.active, o)
	o.done <- struct{}{}
}

// abandon ends the operation because it can never pass. The memory of its receives is the
// caller's again when they have ended.
func (o *op) abandon(f *comm.Failure) {
	o.g.lose(o.call, f)
	q := o.g.w.p.requests
	waits := func() bool {
		for i := range q.Len() {
			if t := q.Token(i); t.o == o && t.recv {
				return true
			}
		}
		return false
	}
	o.over = true
	for i := range q.Len() {
		if t := q.Token(i); t.o == o && t.recv {
			_ = q.Cancel(i)
		}
	}
	for range 1000 {
		if !waits() {
			break
		}
		if _, err := q.Some(func(t token, err error) { t.ended(err) }); err != nil {
			break
		}
	}
	q.Forget(func(t token) bool { return t.o == o })
	o.end()
}

// words names the call for notes. Numbers are those that the other ranks of the call have.
func (o *op) words() string {
	if !o.call.Kind.Pair() {
		return fmt.Sprintf("%v %d of %s", o.call.Kind, o.call.serial, o.g.members)
	}
	var peers []int
	for _, s := range o.seqs {
		if r := o.g.ranks[s.peer]; !slices.Contains(peers, r) {
			peers = append(peers, r)
		}
	}
	return fmt.Sprintf("%v %d %s %s", o.call.Kind, o.seqs[0].n, [...]string{"to", "from", "with"}[o.call.Kind-letter.Send], launcher.Ranks(peers))
}

// absent returns the ranks, numbered as in the world, that have not made the call.
func (o *op) absent() (ranks []int) {
	for _, h := range o.heads {
		if !h.send && !h.come && !slices.Contains(ranks, o.g.ranks[h.peer]) {
			ranks = append(ranks, o.g.ranks[h.peer])
		}
	}
	slices.Sort(ranks)
	return ranks
}

// hopeless returns why the operation can never pass, or nil.
func (o *op) hopeless() *comm.Failure {
	if f := o.g.w.failed.Load(); f != nil {
		return f
	}
	for peer, n := range o.g.gone() {
		if o.needs(peer, n) {
			return closedBy(o.g.ranks[peer])
		}
	}
	return nil
}

// needs reports whether a message of the operation is one that a rank which has closed did
// not pass.
func (o *op) needs(peer int, n *news) bool {
	if !o.call.Kind.Pair() && o.call.Kind != letter.Split {
		return o.call.serial > n.Serial
	}
	return slices.ContainsFunc(o.seqs, func(s sequence) bool {
		made := n.Sent
		switch {
		case o.call.Kind == letter.Split:
			made = n.Met
		case s.send:
			made = n.Got
		}
		return s.peer == peer && s.n > made
	})
}
