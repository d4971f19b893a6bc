// This file owns what a graph must remember of the memory it was captured with.

package device

// Held counts the memory that the work of a graph declares, so that a device
// can refuse to replay a graph that would touch freed memory. A buffer is held
// as often as it was added. The zero value holds nothing; its user locks it.
type Held struct {
	count map[*Buffer]int
	list  []*Buffer // the keys of count, or nil when they are to be listed anew
}

// Add holds a buffer.
func (h *Held) Add(b *Buffer) {
	if h.count == nil {
		h.count = map[*Buffer]int{}
	}
	h.count[b]++
	if h.count[b] == 1 {
		h.list = nil
	}
}

// Drop undoes one Add.
func (h *Held) Drop(b *Buffer) {
	switch n := h.count[b]; n {
	case 0:
		panic("device: a graph lets go of " + b.String() + ", which it does not hold")
	case 1:
		delete(h.count, b)
		h.list = nil
	default:
		h.count[b] = n - 1
	}
}

// AddLaunch holds what a launch declares.
func (h *Held) AddLaunch(l *Launch) {
	for a := range l.Accesses {
		h.Add(a.Buf)
	}
}

// DropLaunch undoes one AddLaunch.
func (h *Held) DropLaunch(l *Launch) {
	for a := range l.Accesses {
		h.Drop(a.Buf)
	}
}

// Check panics if a buffer is dead. Devices call it at every replay, so it
// costs one load a buffer, whatever the number of nodes.
func (h *Held) Check() {
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
