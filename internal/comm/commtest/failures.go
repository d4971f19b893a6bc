// This file owns the tests of ranks that give up, leave, disagree, or call wrongly.

package commtest

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// complaint makes calls, waits for the stream, and returns what the engine says: an engine
// may panic in the call or tell through Err, but never hang.
func complaint(c comm.Comm, s device.Stream, f func()) (text string) {
	defer func() {
		if p := recover(); p != nil {
			text = fmt.Sprint(p)
		}
	}()
	f()
	err := errors.Join(s.Sync(), c.Err())
	return fmt.Sprint(err)
}

func expect(text string, words ...string) (err error) {
	for _, w := range words {
		if !strings.Contains(text, w) {
			err = errors.Join(err, fmt.Errorf("the engine says %q; want words %q", text, w))
		}
	}
	return err
}

// abort makes the last rank give up while the others wait, in two communicators. Later
// calls do nothing.
func abort(t *testing.T, w World) {
	x := open(t, w, 1, 2048)
	last := w.Size - 1
	err := x.run(func(c comm.Comm, at *place) error {
		s, b := at.streams[0], at.bufs[0]
		if err := c.Err(); err != nil {
			return err
		}
		all := make([]int, w.Size)
		for i := range all {
			all[i] = (i + 1) % w.Size
		}
		sub, err := c.Split(all)
		if err != nil {
			return err
		}
		deep, err := sub.Split(all)
		if err != nil {
			return err
		}
		c.Barrier(s)
		if err := errors.Join(s.Sync(), c.Err()); err != nil {
			return err
		}
		if _, err := c.Gather(nil); err != nil { // all ranks know that the barrier was made
			return err
		}
		if c.Rank() == last { // a reason may be long, in characters that letters spell out
			c.Abort(errors.New("the disk is full" + " \"\n<é>" + strings.Repeat("\x01", 20_000)))
		}
		on := c
		if c.Rank()%2 == 0 {
			on = sub
		}
		said := complaint(on, s, func() { on.AllGather(s, b.Slice(1024, 16*memory.Bytes(w.Size)), b.Slice(0, 16)) })
		err = expect(said, "comm: all-gather #", fmt.Sprintf("of rank %d was not made: rank %d gave up: the disk is full", c.Rank(), last))
		for _, one := range []comm.Comm{c, sub, deep} { // all number ranks as the world does
			if _, e := one.Gather(nil); e == nil {
				err = errors.Join(err, errors.New("a gather after the failure returns no error"))
			}
			one.AllReduce(s, b.Slice(0, 64), b.Slice(0, 64), comm.F32, comm.Sum)
			var f *comm.Failure
			if e := one.Err(); !errors.As(e, &f) || f.Rank != c.Rank() || f.By != last {
				err = errors.Join(err, fmt.Errorf("rank %d: Err is %v", c.Rank(), e))
			}
		}
		return errors.Join(err, s.Sync(), deep.Close(), sub.Close())
	})
	var f *comm.Failure
	if !errors.As(err, &f) || f.By != last {
		t.Error(err)
	}
}

// closing makes rank 0 close a communicator with work in flight. The work is done; a rank
// that makes one more call returns and learns why. Other communicators go on.
func closing(t *testing.T, w World) {
	x := open(t, w, 1, 2048)
	err := x.run(func(c comm.Comm, at *place) error {
		s, b := at.streams[0], at.bufs[0]
		all := make([]int, w.Size)
		for i := range all {
			all[i] = (i + 1) % w.Size
		}
		sub, err := c.Split(all)
		if err != nil {
			return err
		}
		s.Fill(b.Slice(0, 64), byte(c.Rank()))
		sub.Broadcast(s, b.Slice(0, 64), 0)
		if c.Rank() > 0 {
			said := complaint(sub, s, func() { sub.Barrier(s) })
			err = expect(said, fmt.Sprintf("comm: barrier #2 of rank %d was not made: rank ", c.Rank()), "has closed the communicator")
		}
		err = errors.Join(err, sub.Close())
		c.Barrier(s)
		got := make([]byte, 64)
		err = errors.Join(err, s.Download(got, b.Slice(0, 64)), c.Err())
		if got[0] != 1 || got[63] != 1 {
			err = errors.Join(err, fmt.Errorf("rank %d got %v", c.Rank(), got))
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// disagreements makes ranks call different things. All of them are told.
func disagreements(t *testing.T, w World) {
	const sentence = "make the same calls in the same order on all ranks"
	for _, test := range []struct {
		name  string
		call  func(c comm.Comm, s device.Stream, b *device.Buffer)
		words []string
		late  bool // only the receiver finds out at once, and the others with their next call
	}{
		{"kinds", func(c comm.Comm, s device.Stream, b *device.Buffer) {
			if c.Rank() == 0 {
				c.AllGather(s, b.Slice(1024, 16*memory.Bytes(w.Size)), b.Slice(0, 16))
			} else {
				c.Barrier(s)
			}
		}, []string{"barrier #1", "all-gather #1 of 16 bytes a rank", sentence}, false},
		{"sizes", func(c comm.Comm, s device.Stream, b *device.Buffer) {
			n := memory.Bytes(64)
			if c.Rank() == w.Size-1 {
				n = 512
			}
			c.AllReduce(s, b.Slice(0, n), b.Slice(0, n), comm.F32, comm.Sum)
		}, []string{"all-reduce #1 of 64 bytes (f32, sum)", "all-reduce #1 of 512 bytes (f32, sum)", sentence}, false},
		{"operations", func(c comm.Comm, s device.Stream, b *device.Buffer) {
			op := comm.Sum
			if c.Rank() == 0 {
				op = comm.Max
			}
			c.AllReduce(s, b.Slice(0, 64), b.Slice(0, 64), comm.F32, op)
		}, []string{"all-reduce #1 of 64 bytes (f32, sum)", "all-reduce #1 of 64 bytes (f32, max)", sentence}, false},
		{"roots", func(c comm.Comm, s device.Stream, b *device.Buffer) {
			c.Broadcast(s, b.Slice(0, 64), min(c.Rank(), 1))
		}, []string{"broadcast #1 of 64 bytes from rank 0", "broadcast #1 of 64 bytes from rank 1", sentence}, false},
		{"sizes of gathers", func(c comm.Comm, s device.Stream, b *device.Buffer) {
			n := memory.Bytes(16 + 8*min(c.Rank(), 1))
			c.AllGather(s, b.Slice(1024, n*memory.Bytes(w.Size)), b.Slice(0, n))
		}, []string{"all-gather #1 of 16 bytes a rank", "all-gather #1 of 24 bytes a rank", sentence}, false},
		{"sizes of scatters", func(c comm.Comm, s device.Stream, b *device.Buffer) {
			n := memory.Bytes(16 + 8*min(c.Rank(), 1))
			c.ReduceScatter(s, b.Slice(0, n), b.Slice(1024, n*memory.Bytes(w.Size)), comm.F32, comm.Sum)
		}, []string{"reduce-scatter #1 of 16 bytes (f32, sum)", "reduce-scatter #1 of 24 bytes (f32, sum)", sentence}, false},
		{"types of scatters", func(c comm.Comm, s device.Stream, b *device.Buffer) {
			c.ReduceScatter(s, b.Slice(0, 16), b.Slice(1024, 16*memory.Bytes(w.Size)), []comm.Type{comm.F32, comm.BF16}[min(c.Rank(), 1)], comm.Sum)
		}, []string{"reduce-scatter #1 of 16 bytes (f32, sum)", "reduce-scatter #1 of 16 bytes (bf16, sum)", sentence}, false},
		{"operations of scatters", func(c comm.Comm, s device.Stream, b *device.Buffer) {
			c.ReduceScatter(s, b.Slice(0, 16), b.Slice(1024, 16*memory.Bytes(w.Size)), comm.F32, []comm.Op{comm.Mean, comm.Max}[min(c.Rank(), 1)])
		}, []string{"reduce-scatter #1 of 16 bytes (f32, mean)", "reduce-scatter #1 of 16 bytes (f32, max)", sentence}, false},
		{"types", func(c comm.Comm, s device.Stream, b *device.Buffer) {
			c.AllReduce(s, b.Slice(0, 16), b.Slice(0, 16), []comm.Type{comm.F32, comm.BF16}[min(c.Rank(), 1)], comm.Sum)
		}, []string{"all-reduce #1 of 16 bytes (f32, sum)", "all-reduce #1 of 16 bytes (bf16, sum)", sentence}, false},
		{"sizes of exchanges", func(c comm.Comm, s device.Stream, b *device.Buffer) {
			n := memory.Bytes(8+8*min(c.Rank(), 1)) * memory.Bytes(w.Size)
			c.AllToAll(s, b.Slice(1024, n), b.Slice(0, n))
		}, []string{"all-to-all #1 of 8 bytes a rank", "all-to-all #1 of 16 bytes a rank", sentence}, false},
		{"sizes of broadcasts", func(c comm.Comm, s device.Stream, b *device.Buffer) {
			c.Broadcast(s, b.Slice(0, memory.Bytes(8+8*min(c.Rank(), 1))), 0)
		}, []string{"broadcast #1 of 8 bytes from rank 0", "broadcast #1 of 16 bytes from rank 0", sentence}, false},
		{"parts", func(c comm.Comm, s device.Stream, b *device.Buffer) {
			send, recv := make([]comm.Part, w.Size), make([]comm.Part, w.Size)
			switch c.Rank() {
			case 0:
				send[1].Len = 4
			case 1:
				recv[0].Len = 8
			}
			c.AllToAllV(s, b.Slice(1024, 64), b.Slice(0, 64), send, recv)
		}, []string{"all-to-all-v #1, rank 0 sends 4 bytes to rank 1, which expects 8 bytes"}, true},
		{"messages", func(c comm.Comm, s device.Stream, b *device.Buffer) {
			switch c.Rank() {
			case 0:
				c.Send(s, b.Slice(0, 8), 1)
			case 1:
				c.Recv(s, b.Slice(0, 16), 0)
			}
		}, []string{"sends 8 bytes to rank 1", "expects 16 bytes"}, true},
	} {
		x := open(t, w, 1, 2048)
		_ = x.run(func(c comm.Comm, at *place) error {
			s, b := at.streams[0], at.bufs[0]
			said := complaint(c, s, func() {
				test.call(c, s, b)
				if test.late {
					c.Barrier(s)
				}
			})
			if err := expect(said, test.words...); err != nil {
				t.Errorf("%s: rank %d: %v", test.name, c.Rank(), err)
			}
			return nil
		})
	}
}

// misuse makes wrong calls, which panic on the rank that makes them and leave the
// communicator as it was.
func misuse(t *testing.T, w World) {
	x := open(t, w, 1, 2048)
	n := memory.Bytes(w.Size)
	err := x.run(func(c comm.Comm, p *place) (err error) {
		s, b, r := p.streams[0], p.bufs[0], c.Rank()
		at := b.Slice
		parts := make([]comm.Part, w.Size)
		wrong := make([]comm.Part, w.Size)
		wrong[0] = comm.Part{Off: 60, Len: 8}
		for words, f := range map[string]func(){
			"all-gather on rank %d: expected a destination of": func() { c.AllGather(s, at(0, 15*n), at(1024, 16)) },
			"all-gather on rank %d: the source overlaps":       func() { c.AllGather(s, at(0, 16*n), at(1, 16)) },
			"reduce-scatter on rank %d: expected a source of":  func() { c.ReduceScatter(s, at(0, 16), at(1024, 12*n), comm.F32, comm.Sum) },
			"all-reduce on rank %d: expected whole numbers":    func() { c.AllReduce(s, at(2, 8), at(2, 8), comm.F32, comm.Sum) },
			"all-reduce on rank %d: expected a known type":     func() { c.AllReduce(s, at(0, 8), at(0, 8), 9, comm.Sum) },
			"all-to-all on rank %d":                            func() { c.AllToAll(s, at(0, 16*n), at(8, 16*n)) },
			"all-to-all-v on rank %d: send[0] is bytes":        func() { c.AllToAllV(s, at(1024, 64), at(0, 64), wrong, parts) },
			"all-to-all-v on rank %d: 1 parts of":              func() { c.AllToAllV(s, at(1024, 64), at(0, 64), parts[:1], parts) },
			"broadcast on rank %d: expected a rank below":      func() { c.Broadcast(s, at(0, 8), w.Size) },
			"send on rank %d: a rank cannot send":              func() { c.Send(s, at(0, 8), r) },
			"receive on rank %d: expected a rank below":        func() { c.Recv(s, at(0, 8), -1) },
			"exchange on rank %d: bytes [4,12)": func() {
				o := (r + 1) % w.Size
				c.Exchange(s, []comm.Message{{Peer: o, Range: at(0, 8)}}, []comm.Message{{Peer: o, Range: at(4, 8)}})
			},
			"barrier on rank %d: the stream is nil": func() { c.Barrier(nil) },
			"rank %d calls Split with []":           func() { _, _ = c.Split(nil) },
			"rank %d calls Split with [99]":         func() { _, _ = c.Split([]int{99}) },
		} {
			err = errors.Join(err, expect(fmt.Sprint(panicOf(f)), strings.Replace(words, "%d", fmt.Sprint(r), 1)))
		}
		only, e := c.Split([]int{r})
		if err = errors.Join(err, e); err != nil {
			return err
		}
		// An empty range stands for no bytes.
		only.AllGather(s, device.Range{}, device.Range{})
		only.AllReduce(s, device.Range{}, device.Range{}, comm.F32, comm.Sum)
		only.Exchange(s, nil, nil)
		only.AllToAllV(s, device.Range{}, device.Range{}, make([]comm.Part, 1), make([]comm.Part, 1))
		c.AllGather(s, device.Range{}, device.Range{})
		c.AllReduce(s, at(0, 0), at(0, 0), comm.F32, comm.Sum)
		err = errors.Join(err, only.Close(),
			expect(fmt.Sprint(panicOf(func() { only.Barrier(s) })), fmt.Sprintf("barrier is called on rank %d after it closed the communicator", r)),
			expect(fmt.Sprint(panicOf(func() { _ = only.Close() })), fmt.Sprintf("rank %d closes its communicator twice", r)))
		return errors.Join(err, s.Sync(), c.Err())
	})
	if err != nil {
		t.Error(err)
	}
}

func panicOf(f func()) (p any) {
	defer func() { p = recover() }()
	f()
	return nil
}
