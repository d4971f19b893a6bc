// This file owns checksums of what moves: taken before a copy out and after the copy
// in that brings it back.

package offload

import (
	"encoding/binary"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/kernels"
	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/schedule"
)

// sums are the checksums of a step: two words for each copy out, of which the second
// is set when it has come back.
type sums struct {
	buf  *device.Buffer // nil: none are taken
	outs int
	back []trip
}

// trip is a storage that left and came back.
type trip struct {
	pair  int
	group schedule.Group
}

const (
	sumWord = device.Bytes(8)
	sumPair = 2 * sumWord
	sumsMax = 1 << 20 // copies of a step
)

// Corrupted is a transfer that changed what it carried.
type Corrupted struct {
	Rank  int
	Group schedule.Group
}

func (e *Corrupted) Error() string {
	return fmt.Sprintf("offload: rank %d: a tensor of %v came back from host memory changed; check the machine's memory and link", e.Rank, e.Group)
}

// take issues a checksum on the lane of a copy: of what leaves before it does, and
// of what has come back.
func (c *sums) take(m *Manager, l residency.Lane, s *Storage, g schedule.Group) {
	if c.buf == nil {
		return
	}
	word := device.Bytes(0)
	if l == residency.Out {
		s.pair = c.outs
		c.outs++
		if err := m.dev.Grow(c.buf, max(c.buf.Size(), device.Bytes(c.outs)*sumPair)); err != nil {
			_ = m.fail(g, "take a checksum", err)
			panic(failed{})
		}
	} else {
		c.back = append(c.back, trip{s.pair, g})
		word = sumWord
	}
	put, here := c.buf.Slice(device.Bytes(s.pair)*sumPair+word, sumWord), s.here()
	if m.tail != nil {
		m.tail.add(l, func(stream device.Stream) { kernels.PutChecksum(stream, put, here) })
		return
	}
	kernels.PutChecksum(m.lane[l].Stream, put, here)
}

// Verify waits for the step that was issued last, or replayed, and compares the
// checksums of what left with those of what came back. With Config.Checksums End
// does so itself, except inside of a capture.
func (m *Manager) Verify() error {
	c := &m.sums
	if c.buf == nil || len(c.back) == 0 {
		return nil
	}
	raw := make([]byte, c.buf.Size())
	if err := m.lane[residency.Compute].Stream.Download(raw, c.buf.All()); err != nil {
		return err
	}
	for _, t := range c.back {
		at := t.pair * int(sumPair)
		if binary.LittleEndian.Uint64(raw[at:]) != binary.LittleEndian.Uint64(raw[at+8:]) {
			return &Corrupted{m.cfg.Rank, t.group}
		}
	}
	return nil
}
