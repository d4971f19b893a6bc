// This file owns the checks of a call's arguments, which all engines share.

package comm

import (
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Caller checks the calls of one rank for its engine. Each method checks the call of its
// name and panics if the arguments are wrong. It does so on the rank that made the mistake,
// before the call meets others. The zero Range stands for no bytes.
type Caller struct {
	Rank, Size int
	World      int // the rank in the first communicator, for messages
}

// Split returns the rank's place in the list.
func (c Caller) Split(ranks []int) int {
	mine := slices.Index(ranks, c.Rank)
	bad := mine < 0
	once := make([]bool, c.Size)
	for _, r := range ranks {
		if bad = bad || r < 0 || r >= c.Size || once[r]; bad {
			break
		}
		once[r] = true
	}
	if bad {
		panic(fmt.Sprintf("comm: rank %d calls Split with %v; expected a list of its own rank and others below %d, each once", c.Rank, ranks, c.Size))
	}
	return mine
}

func (c Caller) AllGather(s device.Stream, dst, src device.Range) {
	c.check(allGather, s, dst, src)
	own := src.Len * memory.Bytes(c.Rank)
	if dst.Len != src.Len*memory.Bytes(c.Size) {
		c.misuse(allGather, "expected a destination of %d bytes for sources of %d bytes, got %d", src.Len*memory.Bytes(c.Size), src.Len, dst.Len)
	}
	if overlap(dst, src) && src.Addr() != dst.Addr()+uintptr(own) {
		c.misuse(allGather, "the source overlaps the destination, but is not the rank's own place in it")
	}
}

func (c Caller) ReduceScatter(s device.Stream, dst, src device.Range, t Type, op Op) {
	c.check(reduceScatter, s, dst, src)
	c.checkNumbers(reduceScatter, dst, src, t, op)
	own := dst.Len * memory.Bytes(c.Rank)
	if src.Len != dst.Len*memory.Bytes(c.Size) {
		c.misuse(reduceScatter, "expected a source of %d bytes for destinations of %d bytes, got %d", dst.Len*memory.Bytes(c.Size), dst.Len, src.Len)
	}
	if overlap(dst, src) && dst.Addr() != src.Addr()+uintptr(own) {
		c.misuse(reduceScatter, "the destination overlaps the source, but is not the rank's own place in it")
	}
}

func (c Caller) AllReduce(s device.Stream, dst, src device.Range, t Type, op Op) {
	c.check(allReduce, s, dst, src)
	c.checkNumbers(allReduce, dst, src, t, op)
	if src.Len != dst.Len {
		c.misuse(allReduce, "expected a destination of %d bytes, got %d", src.Len, dst.Len)
	}
	if overlap(dst, src) && dst.Addr() != src.Addr() {
		c.misuse(allReduce, "the two ranges overlap, but are not the same")
	}
}

func (c Caller) AllToAll(s device.Stream, dst, src device.Range) {
	c.check(allToAll, s, dst, src)
	if src.Len != dst.Len || src.Len%memory.Bytes(c.Size) != 0 || overlap(dst, src) {
		c.misuse(allToAll, "%s to %s: expected ranges that do not overlap, have the same length, and divide into %d equal parts", src, dst, c.Size)
	}
}

func (c Caller) AllToAllV(s device.Stream, dst, src device.Range, send, recv []Part) {
	c.check(allToAllV, s, dst, src)
	if len(send) != c.Size || len(recv) != c.Size || overlap(dst, src) {
		c.misuse(allToAllV, "%d parts of %s to %d parts of %s: expected %d parts of each, one for each rank, and ranges that do not overlap", len(send), src, len(recv), dst, c.Size)
	}
	for i := range send {
		c.checkPart("send", i, send[i], src)
		c.checkPart("recv", i, recv[i], dst)
		for k := range i {
			if recv[i].Off < recv[k].Off+recv[k].Len && recv[k].Off < recv[i].Off+recv[i].Len {
				c.misuse(allToAllV, "the parts received from ranks %d and %d overlap", k, i)
			}
		}
	}
}

func (c Caller) Broadcast(s device.Stream, r device.Range, root int) {
	c.check(broadcast, s, r, device.Range{})
	c.checkRank(broadcast, root)
}

// Capture also panics if the stream is captured already.
func (c Caller) Capture(s device.Stream) {
	c.check(beginCapture, s, device.Range{}, device.Range{})
	if s.Capturing() {
		c.misuse(beginCapture, "stream %s is being captured already; end that capture first", s.Name())
	}
}

func (c Caller) Barrier(s device.Stream) {
	c.check(barrier, s, device.Range{}, device.Range{})
}

// Send checks a call of Send.
func (c Caller) Send(s device.Stream, src device.Range, to int) {
	c.messages(send, s, []Message{{to, src}}, nil)
}

// Recv checks a call of Recv.
func (c Caller) Recv(s device.Stream, dst device.Range, from int) {
	c.messages(recv, s, nil, []Message{{from, dst}})
}

// Exchange checks a call of Exchange.
func (c Caller) Exchange(s device.Stream, sends, recvs []Message) {
	c.messages(exchange, s, sends, recvs)
}

func (c Caller) messages(k kind, s device.Stream, sends, recvs []Message) {
	for _, m := range sends {
		c.checkMessage(k, s, device.Range{}, m.Range, m.Peer)
	}
	for i, m := range recvs {
		c.checkMessage(k, s, m.Range, device.Range{}, m.Peer)
		for _, others := range [...][]Message{sends, recvs[:i]} {
			for _, o := range others {
				if overlap(m.Range, o.Range) {
					c.misuse(k, "%s is received into, but another message uses it; give each message a range of its own", m.Range)
				}
			}
		}
	}
}

// checkMessage panics if a message is invalid.
func (c Caller) checkMessage(k kind, s device.Stream, dst, src device.Range, peer int) {
	c.check(k, s, dst, src)
	c.checkRank(k, peer)
	if peer == c.Rank {
		c.misuse(k, "a rank cannot send a message to itself; copy the range instead")
	}
}

// misuse panics with the call and the rank.
func (c Caller) misuse(k kind, format string, args ...any) {
	panic(fmt.Sprintf("comm: %v on rank %d: %s", k, c.World, fmt.Sprintf(format, args...)))
}

// check panics if a stream or range is invalid. It does so on the rank that made the
// mistake; issuing the work would panic on the rank that came last. The zero Range stands
// for no bytes.
func (c Caller) check(k kind, s device.Stream, dst, src device.Range) {
	if s == nil {
		c.misuse(k, "the stream is nil")
	}
	for _, r := range [...]device.Range{dst, src} {
		if r != (device.Range{}) {
			device.CheckAccess(device.Reads(r))
		}
	}
}

// checkNumbers panics unless type and operation are known and the ranges hold whole
// numbers.
func (c Caller) checkNumbers(k kind, dst, src device.Range, t Type, op Op) {
	if t > BF16 || op > Max {
		c.misuse(k, "expected a known type and operation, got %v and %v", t, op)
	}
	size := t.Size()
	for _, r := range [...]device.Range{dst, src} {
		if r.Len%size != 0 || r.Len > 0 && r.Addr()%uintptr(size) != 0 {
			c.misuse(k, "expected whole numbers of %[2]d bytes at a multiple of %[2]d, got %[1]s", r, size)
		}
	}
}

// checkRank panics unless the rank exists.
func (c Caller) checkRank(k kind, rank int) {
	if rank < 0 || rank >= c.Size {
		c.misuse(k, "expected a rank below %d, got %d", c.Size, rank)
	}
}

// checkPart panics unless a part lies inside a range.
func (c Caller) checkPart(name string, i int, p Part, r device.Range) {
	if p.Off < 0 || p.Len < 0 || p.Off > r.Len-p.Len {
		c.misuse(allToAllV, "%s[%d] is bytes [%d,%d), which lie outside %s", name, i, p.Off, p.Off+p.Len, r)
	}
}

// overlap reports whether two ranges share a byte.
func overlap(a, b device.Range) bool {
	return a.Len > 0 && b.Len > 0 && a.Addr() < b.Addr()+uintptr(b.Len) && b.Addr() < a.Addr()+uintptr(a.Len)
}
