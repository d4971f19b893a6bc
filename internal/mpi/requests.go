// This file owns pending sends and receives.

package mpi

import (
	"encoding/binary"
	"fmt"
	"unsafe"

	"github.com/ebitengine/purego"
)

// Largest is the most bytes of one message. Counts are 32-bit numbers.
const Largest = 1 << 30

// Requests is a list of pending sends and receives, each with a token of the caller.
type Requests[T any] struct {
	l        *Library
	handles  []byte // as the library lays them out
	tokens   []T
	indices  []int32
	statuses []byte
	count    *int32
	some     uintptr
}

// NewRequests returns an empty list.
func NewRequests[T any](l *Library) *Requests[T] {
	return &Requests[T]{l: l, count: new(int32), some: l.procs["MPI_Testsome"]}
}

// Len returns the number of pending requests.
func (q *Requests[T]) Len() int { return len(q.tokens) }

// Token returns the token of a request.
func (q *Requests[T]) Token(i int) T { return q.tokens[i] }

// Send begins to send n bytes at an address.
func (q *Requests[T]) Send(c Comm, addr uintptr, n, to, tag int, token T) error {
	return q.begin("MPI_Isend", c, addr, n, int32(to), tag, token)
}

// Receive begins to receive up to n bytes at an address.
func (q *Requests[T]) Receive(c Comm, addr uintptr, n, from, tag int, token T) error {
	return q.begin("MPI_Irecv", c, addr, n, int32(from), tag, token)
}

// ReceiveAny is Receive from any rank.
func (q *Requests[T]) ReceiveAny(c Comm, addr uintptr, n, tag int, token T) error {
	return q.begin("MPI_Irecv", c, addr, n, q.l.abi.anySource, tag, token)
}

func (q *Requests[T]) begin(name string, c Comm, addr uintptr, n int, peer int32, tag int, token T) error {
	if n > Largest {
		return fmt.Errorf("mpi: a message of %d bytes; the most is %d", n, Largest)
	}
	at := len(q.handles)
	q.handles = append(q.handles, make([]byte, q.l.abi.handle)...)
	err := q.l.call(name, addr, uintptr(n), q.l.abi.bytes, uintptr(peer), uintptr(tag), uintptr(c), uintptr(unsafe.Pointer(&q.handles[at])))
	if err != nil {
		q.handles = q.handles[:at]
		return err
	}
	q.tokens = append(q.tokens, token)
	return nil
}

// Cancel asks for the end of a receive, which then completes.
func (q *Requests[T]) Cancel(i int) error {
	return q.l.call("MPI_Cancel", uintptr(unsafe.Pointer(&q.handles[i*q.l.abi.handle])))
}

// Some makes progress and calls done for every request that has ended since. It returns
// how many there were.
func (q *Requests[T]) Some(done func(token T, err error)) (int, error) {
	n := len(q.tokens)
	if n == 0 {
		return 0, nil
	}
	if cap(q.indices) < n {
		q.indices = make([]int32, 2*n)
		q.statuses = make([]byte, 2*n*q.l.abi.status)
	}
	q.indices = q.indices[:cap(q.indices)]
	*q.count = 0
	r, _, _ := purego.SyscallN(q.some, uintptr(n), uintptr(unsafe.Pointer(&q.handles[0])), uintptr(unsafe.Pointer(q.count)),
		uintptr(unsafe.Pointer(&q.indices[0])), uintptr(unsafe.Pointer(&q.statuses[0])))
	code := int32(r)
	if code != 0 && q.l.class(code) != q.l.abi.inStatus {
		return 0, q.l.check("MPI_Testsome", code)
	}
	k := int(*q.count)
	if k <= 0 {
		return 0, nil
	}
	type ended struct {
		token T
		err   error
	}
	var all []ended
	gone := make([]bool, n)
	for i, at := range q.indices[:k] {
		var err error
		if code != 0 {
			e := int32(binary.NativeEndian.Uint32(q.statuses[i*q.l.abi.status+q.l.abi.statusError:]))
			err = q.l.check("a message", e)
		}
		gone[at] = true
		all = append(all, ended{q.tokens[at], err})
	}
	q.keep(gone)
	for _, e := range all {
		done(e.token, e.err)
	}
	return k, nil
}

// keep removes requests that have ended from the list.
func (q *Requests[T]) keep(gone []bool) {
	h, to := q.l.abi.handle, 0
	for i := range gone {
		if gone[i] {
			continue
		}
		q.tokens[to] = q.tokens[i]
		copy(q.handles[to*h:(to+1)*h], q.handles[i*h:(i+1)*h])
		to++
	}
	clear(q.tokens[to:])
	q.tokens, q.handles = q.tokens[:to], q.handles[:to*h]
}

// Forget removes requests from the list that the caller no longer waits for.
func (q *Requests[T]) Forget(which func(T) bool) {
	gone := make([]bool, len(q.tokens))
	for i, t := range q.tokens {
		gone[i] = which(t)
	}
	q.keep(gone)
}
