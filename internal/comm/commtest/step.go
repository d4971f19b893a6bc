// This file owns single calls: how they are drawn, how a rank makes them, and the obvious
// model of what they do.

package commtest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// step is one call of all ranks of a communicator.
type step struct {
	name   string
	comm   int // which communicator of the program
	stream int
	// call makes the call of a rank on a buffer.
	call func(c comm.Comm, s device.Stream, b *device.Buffer)
	// model changes the bytes of rank r. old holds the bytes of all ranks before.
	model func(r int, old [][]byte, mem []byte)
}

// kinds are the calls that a program is made of.
var kinds = []func(d *drawer) step{
	(*drawer).allGather, (*drawer).reduceScatter, (*drawer).allReduce, (*drawer).allToAll, (*drawer).allToAllV,
	(*drawer).broadcast, (*drawer).barrier, (*drawer).message, (*drawer).ring, (*drawer).exchange,
}

// drawer draws the calls of n ranks.
type drawer struct {
	*rand.Rand
	n        int
	half     memory.Bytes
	src, dst []memory.Bytes // where the ranges of each rank begin
	same     []bool         // whether they are in one place, as far as the call allows
	tame     bool           // reduce numbers of which any two have one sum and one mean
}

// draw draws a call of the given kind.
func draw(rng *rand.Rand, kind, n int, half memory.Bytes, tame bool) step {
	d := &drawer{Rand: rng, n: n, half: half, tame: tame}
	for range n {
		d.src = append(d.src, memory.Bytes(rng.IntN(8))*4)
		d.dst = append(d.dst, half+memory.Bytes(rng.IntN(8))*4)
		d.same = append(d.same, rng.IntN(3) == 0)
	}
	return kinds[kind](d)
}

// bytes draws a size that fits one of so many places in half a buffer: often small, often
// zero, often as large as it can be.
func (d *drawer) bytes(places int, unit memory.Bytes) memory.Bytes {
	most := (d.half - 32) / memory.Bytes(places) / unit
	switch d.IntN(6) {
	case 0:
		return unit * memory.Bytes(d.IntN(4))
	case 1:
		return unit * most
	}
	return unit * memory.Bytes(d.IntN(int(most)))
}

func part(b []byte, off, n memory.Bytes) []byte { return b[off : off+n] }

func (d *drawer) allGather() step {
	n := d.bytes(d.n, 1)
	source := func(r int) memory.Bytes {
		if d.same[r] {
			return d.dst[r] + n*memory.Bytes(r)
		}
		return d.src[r]
	}
	return step{
		name: fmt.Sprintf("all-gather of %d bytes", n),
		call: func(c comm.Comm, s device.Stream, b *device.Buffer) {
			r := c.Rank()
			c.AllGather(s, b.Slice(d.dst[r], n*memory.Bytes(d.n)), b.Slice(source(r), n))
		},
		model: func(r int, old [][]byte, mem []byte) {
			for p := range old {
				copy(mem[d.dst[r]+n*memory.Bytes(p):], part(old[p], source(p), n))
			}
		},
	}
}

func (d *drawer) reduceScatter() step {
	t, op := comm.Type(d.IntN(2)), comm.Op(d.IntN(3))
	n := d.bytes(d.n, t.Size())
	return step{
		name: fmt.Sprintf("reduce-scatter of %d bytes (%v, %v)", n, t, op),
		call: func(c comm.Comm, s device.Stream, b *device.Buffer) {
			r := c.Rank()
			src := b.Slice(d.src[r], n*memory.Bytes(d.n))
			d.tameRange(s, src, r)
			dst := b.Slice(d.dst[r], n)
			if d.same[r] {
				dst = src.Slice(n*memory.Bytes(r), n)
			}
			c.ReduceScatter(s, dst, src, t, op)
		},
		model: func(r int, old [][]byte, mem []byte) {
			d.tameBytes(n*memory.Bytes(d.n), r, old, mem)
			own := n * memory.Bytes(r)
			to := d.dst[r]
			if d.same[r] {
				to = d.src[r] + own
			}
			reduce(part(mem, to, n), len(old), t, op, func(p int) []byte { return part(old[p], d.src[p]+own, n) })
		},
	}
}

func (d *drawer) allReduce() step {
	t, op := comm.Type(d.IntN(2)), comm.Op(d.IntN(3))
	n := d.bytes(1, t.Size())
	return step{
		name: fmt.Sprintf("all-reduce of %d bytes (%v, %v)", n, t, op),
		call: func(c comm.Comm, s device.Stream, b *device.Buffer) {
			r := c.Rank()
			src, dst := b.Slice(d.src[r], n), b.Slice(d.dst[r], n)
			d.tameRange(s, src, r)
			if d.same[r] {
				dst = src
			}
			c.AllReduce(s, dst, src, t, op)
		},
		model: func(r int, old [][]byte, mem []byte) {
			d.tameBytes(n, r, old, mem)
			to := d.dst[r]
			if d.same[r] {
				to = d.src[r]
			}
			reduce(part(mem, to, n), len(old), t, op, func(p int) []byte { return part(old[p], d.src[p], n) })
		},
	}
}

func (d *drawer) allToAll() step {
	n := d.bytes(d.n, 1)
	return step{
		name: fmt.Sprintf("all-to-all of %d bytes", n),
		call: func(c comm.Comm, s device.Stream, b *device.Buffer) {
			r, all := c.Rank(), n*memory.Bytes(d.n)
			c.AllToAll(s, b.Slice(d.dst[r], all), b.Slice(d.src[r], all))
		},
		model: func(r int, old [][]byte, mem []byte) {
			for p := range old {
				copy(mem[d.dst[r]+n*memory.Bytes(p):], part(old[p], d.src[p]+n*memory.Bytes(r), n))
			}
		},
	}
}

// tamed calls f with the parts of a source of n bytes that hold the same number, and the
// byte that it is made of. The numbers are from 0.01 to 200 in both formats.
func tamed(n memory.Bytes, rank int, f func(off, n memory.Bytes, value byte)) {
	each := (n/4 + 4) &^ 3
	for i := memory.Bytes(0); i*each < n; i++ {
		f(i*each, min(each, n-i*each), 0x3c+byte(rank*3+int(i)*5)%8)
	}
}

// tameRange fills the source of a reduction with tame numbers, if the engine wants them.
func (d *drawer) tameRange(s device.Stream, src device.Range, rank int) {
	if d.tame {
		tamed(src.Len, rank, func(off, n memory.Bytes, value byte) { s.Fill(src.Slice(off, n), value) })
	}
}

// tameBytes does the same in the model, in the old bytes of all ranks and those of rank r.
func (d *drawer) tameBytes(n memory.Bytes, r int, old [][]byte, mem []byte) {
	if !d.tame {
		return
	}
	fill := func(b []byte, rank int) {
		tamed(n, rank, func(off, n memory.Bytes, value byte) {
			copy(part(b, d.src[rank]+off, n), bytes.Repeat([]byte{value}, int(n)))
		})
	}
	for p := range old {
		fill(old[p], p)
	}
	fill(mem, r)
}

// parts draws what every rank sends to every other: where it lies in the source, and where
// in the destination.
func (d *drawer) parts() (send, recv [][]comm.Part) {
	send, recv = make([][]comm.Part, d.n), make([][]comm.Part, d.n)
	ends := make([]memory.Bytes, d.n)
	for i := range d.n {
		at := memory.Bytes(0)
		for k := range d.n {
			size := d.bytes(d.n, 1)
			if d.IntN(3) == 0 {
				size = 0
			}
			send[i] = append(send[i], comm.Part{Off: at, Len: size})
			recv[k] = append(recv[k], comm.Part{Off: ends[k], Len: size})
			at += size
			ends[k] += size
		}
	}
	return send, recv
}

func (d *drawer) allToAllV() step {
	send, recv := d.parts()
	return step{
		name: fmt.Sprintf("all-to-all-v of %v", send),
		call: func(c comm.Comm, s device.Stream, b *device.Buffer) {
			r := c.Rank()
			c.AllToAllV(s, b.Slice(d.dst[r], d.half-32), b.Slice(d.src[r], d.half-32), send[r], recv[r])
		},
		model: func(r int, old [][]byte, mem []byte) {
			for p := range old {
				copy(mem[d.dst[r]+recv[r][p].Off:], part(old[p], d.src[p]+send[p][r].Off, send[p][r].Len))
			}
		},
	}
}

func (d *drawer) broadcast() step {
	n, root := d.bytes(1, 1), d.IntN(d.n)
	return step{
		name: fmt.Sprintf("broadcast of %d bytes from rank %d", n, root),
		call: func(c comm.Comm, s device.Stream, b *device.Buffer) {
			c.Broadcast(s, b.Slice(d.dst[c.Rank()], n), root)
		},
		model: func(r int, old [][]byte, mem []byte) {
			copy(part(mem, d.dst[r], n), part(old[root], d.dst[root], n))
		},
	}
}

func (d *drawer) barrier() step {
	return step{
		name:  "barrier",
		call:  func(c comm.Comm, s device.Stream, b *device.Buffer) { c.Barrier(s) },
		model: func(int, [][]byte, []byte) {},
	}
}

func (d *drawer) message() step {
	if d.n == 1 {
		return d.barrier()
	}
	n, p := d.bytes(1, 1), d.Perm(d.n)
	from, to := p[0], p[1]
	return step{
		name: fmt.Sprintf("message of %d bytes from rank %d to rank %d", n, from, to),
		call: func(c comm.Comm, s device.Stream, b *device.Buffer) {
			switch c.Rank() {
			case from:
				c.Send(s, b.Slice(d.src[from], n), to)
			case to:
				c.Recv(s, b.Slice(d.dst[to], n), from)
			}
		},
		model: func(r int, old [][]byte, mem []byte) {
			if r == to {
				copy(mem[d.dst[to]:], part(old[from], d.src[from], n))
			}
		},
	}
}

// ring makes every rank send to the next one and receive from the one before.
func (d *drawer) ring() step {
	if d.n == 1 {
		return d.barrier()
	}
	n, by := d.bytes(1, 1), 1+d.IntN(d.n-1)
	return step{
		name: fmt.Sprintf("ring of %d bytes by %d", n, by),
		call: func(c comm.Comm, s device.Stream, b *device.Buffer) {
			r := c.Rank()
			c.Exchange(s, []comm.Message{{Peer: (r + by) % d.n, Range: b.Slice(d.src[r], n)}},
				[]comm.Message{{Peer: (r + d.n - by) % d.n, Range: b.Slice(d.dst[r], n)}})
		},
		model: func(r int, old [][]byte, mem []byte) {
			p := (r + d.n - by) % d.n
			copy(mem[d.dst[r]:], part(old[p], d.src[p], n))
		},
	}
}

// exchange passes a part from every rank to every other, in one message or in two. The
// lists of messages begin anywhere.
func (d *drawer) exchange() step {
	send, recv := d.parts()
	turn := d.IntN(d.n)
	add := func(to []comm.Message, peer int, b *device.Buffer, at memory.Bytes, p comm.Part) []comm.Message {
		if p.Len%2 == 1 {
			to = append(to, comm.Message{Peer: peer, Range: b.Slice(at+p.Off, 1)})
			p.Off, p.Len = p.Off+1, p.Len-1
		}
		if p.Len > 0 {
			to = append(to, comm.Message{Peer: peer, Range: b.Slice(at+p.Off, p.Len)})
		}
		return to
	}
	return step{
		name: fmt.Sprintf("exchange of %v", send),
		call: func(c comm.Comm, s device.Stream, b *device.Buffer) {
			r := c.Rank()
			var sends, recvs []comm.Message
			for i := range d.n {
				if p := (i + turn) % d.n; p != r {
					sends = add(sends, p, b, d.src[r], send[r][p])
				}
				if p := d.n - 1 - (i+turn)%d.n; p != r {
					recvs = add(recvs, p, b, d.dst[r], recv[r][p])
				}
			}
			c.Exchange(s, sends, recvs)
		},
		model: func(r int, old [][]byte, mem []byte) {
			for p := range old {
				if p != r {
					copy(mem[d.dst[r]+recv[r][p].Off:], part(old[p], d.src[p]+send[p][r].Off, send[p][r].Len))
				}
			}
		},
	}
}

// reduce combines n sources in the order of ranks in fp32 and rounds once.
func reduce(dst []byte, n int, t comm.Type, op comm.Op, src func(p int) []byte) {
	if n == 1 {
		copy(dst, src(0))
		return
	}
	size := int(t.Size())
	for i := 0; i < len(dst); i += size {
		number := func(p int) float32 {
			if t == comm.F32 {
				return math.Float32frombits(binary.LittleEndian.Uint32(src(p)[i:]))
			}
			return math.Float32frombits(uint32(binary.LittleEndian.Uint16(src(p)[i:])) << 16)
		}
		a := number(0)
		for p := 1; p < n; p++ {
			if x := number(p); op != comm.Max {
				a += x
			} else if x != x || x > a {
				a = x
			}
		}
		if op == comm.Mean {
			a /= float32(n)
		}
		bits := math.Float32bits(a)
		if a != a {
			bits = 0x7fffffff
		}
		if t == comm.F32 {
			binary.LittleEndian.PutUint32(dst[i:], bits)
			continue
		}
		if a == a {
			bits += 0x7fff + bits>>16&1 // to nearest, ties to even
		}
		binary.LittleEndian.PutUint16(dst[i:], uint16(bits>>16))
	}
}
