// This file owns the messages of the MPI in memory.

package mpi

import (
	"bytes"
	"fmt"
	"slices"
	"unsafe"

	"github.com/stowage-dev/stowage/internal/mpi"
)

// memoryAt returns the memory at an address.
func memoryAt(addr uintptr, n int) []byte {
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&addr))), n)
}

// begin makes a request. MPI promises tags below 32768.
func (l *memoryLibrary) begin(name string, c mpi.Comm, q *request) error {
	if q.t.hold != nil {
		name += " news"
	}
	leave, err := l.enter(name)
	if err != nil {
		return err
	}
	defer leave()
	e := l.end(c)
	if q.tag < 0 || q.tag >= 1<<15 || q.n < 0 || q.peer != anyone && (q.peer < 0 || q.peer >= len(e.members)) {
		l.t.Errorf("MPI: rank %d calls %s with %d bytes, peer %d of %d and tag %d", l.rank, name, q.n, q.peer, len(e.members), q.tag)
	}
	q.comm = e.id
	if q.peer != anyone {
		q.peer = e.members[q.peer]
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, q)
	if l.note != nil && q.t.o != nil {
		l.note(fmt.Sprintf("%s on %d, peer %d, tag %#x: %d bytes", name, q.comm, q.peer, q.tag, q.n))
	}
	if q.send {
		m := &mail{comm: e.id, from: l.rank, tag: q.tag, send: q, late: max(l.rng.IntN(6)-3, 0)}
		if q.t.hold != nil || l.rng.IntN(2) == 0 { // news leave at once: a rank that has failed no longer listens
			m.bytes, q.over = bytes.Clone(memoryAt(q.addr, q.n)), true
		}
		l.posted[q.peer] = append(l.posted[q.peer], m)
	}
	return nil
}

func (l *memoryLibrary) Send(c mpi.Comm, addr uintptr, n, to, tag int, t token) error {
	return l.begin("Send", c, &request{t: t, send: true, addr: addr, n: n, peer: to, tag: tag})
}

func (l *memoryLibrary) Receive(c mpi.Comm, addr uintptr, n, from, tag int, t token) error {
	return l.begin("Receive", c, &request{t: t, addr: addr, n: n, peer: from, tag: tag})
}

func (l *memoryLibrary) ReceiveAny(c mpi.Comm, addr uintptr, n, tag int, t token) error {
	return l.begin("ReceiveAny", c, &request{t: t, addr: addr, n: n, peer: anyone, tag: tag})
}

func (l *memoryLibrary) Len() int { return len(l.all) }

func (l *memoryLibrary) Token(i int) token { return l.all[i].t }

func (l *memoryLibrary) Cancel(i int) error {
	leave, err := l.enter("Cancel")
	if err != nil {
		return err
	}
	defer leave()
	if q := l.all[i]; q.send {
		l.t.Errorf("MPI: rank %d cancels a send", l.rank)
	} else {
		q.cancelled = true
	}
	return nil
}

// Some receives what has arrived.
func (l *memoryLibrary) Some(done func(t token, err error)) (int, error) {
	leave, err := l.enter("Some")
	if err != nil {
		return 0, err
	}
	l.mu.Lock()
	for _, m := range l.posted[l.rank] {
		m.late--
	}
	for _, q := range l.all {
		if !q.send && !q.over && !l.receive(q) && q.cancelled {
			q.over = true
		}
	}
	var over []*request
	for _, q := range l.all {
		if q.over {
			over = append(over, q)
		}
	}
	l.all = slices.DeleteFunc(l.all, func(q *request) bool { return q.over })
	l.rng.Shuffle(len(over), func(i, k int) { over[i], over[k] = over[k], over[i] })
	l.mu.Unlock()
	leave()
	for _, q := range over {
		done(q.t, q.err)
	}
	return len(over), nil
}

// receive takes the message for a receive, if it has arrived.
func (l *memoryLibrary) receive(q *request) bool {
	for i, m := range l.posted[l.rank] {
		if m.comm != q.comm || m.tag != q.tag || q.peer != anyone && q.peer != m.from {
			continue
		}
		if m.late >= 0 {
			return false
		}
		if m.bytes == nil {
			m.bytes, m.send.over = memoryAt(m.send.addr, m.send.n), true
		}
		name := "message"
		if q.t.news {
			name = "news"
		}
		if q.err = l.fail(name); len(m.bytes) > q.n {
			q.err = fmt.Errorf("a message of %d bytes is truncated to %d", len(m.bytes), q.n)
		}
		if q.err == nil {
			copy(memoryAt(q.addr, q.n), m.bytes)
		}
		q.over = true
		l.posted[l.rank] = slices.Delete(l.posted[l.rank], i, i+1)
		return true
	}
	return false
}

// Forget drops requests. The memory of a receive may be written until it has ended, so it must have.
func (l *memoryLibrary) Forget(which func(t token) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, list := range l.posted {
		for _, m := range list {
			if m.bytes == nil && slices.Contains(l.all, m.send) && which(m.send.t) {
				m.bytes = bytes.Clone(memoryAt(m.send.addr, m.send.n))
			}
		}
	}
	l.all = slices.DeleteFunc(l.all, func(q *request) bool {
		if which(q.t) && !q.send && !l.broken {
			l.t.Errorf("MPI: rank %d forgets a receive that may still come", l.rank)
		}
		return which(q.t)
	})
}
