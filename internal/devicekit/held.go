// This file owns the record of the memory that a graph was captured with.

package devicekit

import "github.com/stowage-dev/stowage/device"

// HeldBuffers counts the buffers that the work of a graph declares, so that a device can
// refuse to replay a graph that would use freed memory. A buffer is held as often as it
// was added. The zero value holds nothing. The caller provides the lock.
type HeldBuffers struct {
	count map[*device.Buffer]int
	list  []*device.Buffer // the keys of count, or nil when they are to be listed anew
}

// Add holds a buffer.
func (h *HeldBuffers) Add(b *device.Buffer) {
	if h.count == nil {
		h.count = map[*device.Buffer]int{}
	}
	h.count[b]++
	if h.count[b] == 1 {
		h.list = nil
	}
}

// Remove undoes one Add.
func (h *HeldBuffers) Remove(b *device.Buffer) {
	switch n := h.count[b]; n {
	case 0:
		panic("device: a graph releases " + b.String() + ", which it does not hold")
	case 1:
		delete(h.count, b)
		h.list = nil
	default:
		h.count[b] = n - 1
	}
}

// AddLaunch holds the buffers that a launch declares.
func (h *HeldBuffers) AddLaunch(l *device.Launch) {
	for a := range l.Accesses {
		h.Add(a.Buf)
	}
}

// RemoveLaunch undoes one AddLaunch.
func (h *HeldBuffers) RemoveLaunch(l *device.Launch) {
	for a := range l.Accesses {
		h.Remove(a.Buf)
	}
}

// CheckLive panics if a held buffer was freed. Devices call it at every replay, so it
// costs one load for each buffer, however many nodes the graph has.
func (h *HeldBuffers) CheckLive() {
	if h.list == nil {
		for b := range h.count {
			h.list = append(h.list, b)
		}
	}
	for _, b := range h.list {
		if !b.Live() {
			panic("device: use after free of " + b.String() + " by the replay of a graph")
		}
	}
}
