// This file owns the tests of bytes that go through pinned buffers.

package mpi

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// tooLarge is a message that does not go through the buffer of 64 KiB in one round: each of an exchange has 1 KiB of it.
const tooLarge = 3000

// Messages of one call may begin or end at the same byte and have different lengths. Each gets the bytes
// of its own range: a buffer holds bytes twice only if a message has others.
func TestMessagesThatOverlap(t *testing.T) {
	for _, ranges := range [][]comm.Part{
		{{Off: 0, Len: 100}, {Off: 40, Len: 60}},
		{{Off: 40, Len: 60}, {Off: 0, Len: 100}},
		{{Off: 0, Len: 100}, {Off: 0, Len: 60}, {Off: 0, Len: 100}, {Off: 0, Len: 100}},
		{{Off: 0, Len: tooLarge}, {Off: 1000, Len: tooLarge - 1000}},
		{{Off: 0, Len: tooLarge}, {Off: 1000, Len: 24}, {Off: 0, Len: 1024}, {Off: 0, Len: tooLarge}},
	} {
		for _, staged := range []bool{false, true} {
			_, ps := startJob(t, 2, 5)
			err := together(ps, func(p *Process) error {
				c, d, s, b, err := rank(p, Options{Staged: staged, Scratch: 64 * memory.KiB})
				if err != nil {
					return err
				}
				said := make([]byte, tooLarge)
				for i := range said {
					said[i] = byte(i*7 + p.Rank())
				}
				s.Upload(b.Slice(0, tooLarge), said)
				var sends, recvs []comm.Message
				var want []byte
				to := memory.Bytes(tooLarge)
				for _, r := range ranges {
					sends = append(sends, comm.Message{Peer: 1 - p.Rank(), Range: b.Slice(r.Off, r.Len)})
					recvs = append(recvs, comm.Message{Peer: 1 - p.Rank(), Range: b.Slice(to, r.Len)})
					for i := r.Off; i < r.Off+r.Len; i++ {
						want = append(want, byte(int(i)*7+1-p.Rank()))
					}
					to += r.Len
				}
				c.Exchange(s, sends, recvs)
				got := make([]byte, len(want))
				err = errors.Join(s.Download(got, b.Slice(tooLarge, memory.Bytes(len(got)))), c.Err())
				if !bytes.Equal(got, want) {
					err = errors.Join(err, errors.New("other bytes came than were sent"))
				}
				s.Free(b)
				return errors.Join(err, s.Close(), c.Close(), d.Close())
			})
			if err != nil {
				t.Errorf("%+v, staged %v: %v", ranges, staged, err)
			}
		}
	}
}

// The buffers are divided among the other ranks, whatever their number: every part begins at a multiple of 256 bytes
// and fits.
func TestBuffersOfManyRanks(t *testing.T) {
	const n = 50_000 // more than a share
	for size := 2; size <= 7; size++ {
		_, ps := startJob(t, size, 5)
		err := together(ps, func(p *Process) error {
			c, d, s, b, err := rank(p, Options{Staged: true, Scratch: 64*memory.KiB + 300})
			if err != nil {
				return err
			}
			parts := func(at int) device.Range { return b.Slice(memory.Bytes(at)*n, memory.Bytes(size)*n) }
			for r := range size {
				s.Fill(b.Slice(memory.Bytes(r)*n, n), byte(10*p.Rank()+r))
			}
			c.AllToAll(s, parts(size), parts(0))
			got := make([]byte, size*n)
			err = errors.Join(s.Download(got, parts(size)), c.Err())
			for r := range size {
				if part := got[r*n : (r+1)*n]; !bytes.Equal(part, bytes.Repeat([]byte{byte(10*r + p.Rank())}, n)) {
					err = errors.Join(err, fmt.Errorf("from rank %d came other bytes than it sent", r))
				}
			}
			s.Free(b)
			return errors.Join(err, s.Close(), c.Close(), d.Close())
		})
		if err != nil {
			t.Errorf("%d ranks: %v", size, err)
		}
	}
}
