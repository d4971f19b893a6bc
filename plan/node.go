// This file owns nodes: which ranks share one, and the host memory that they pin together.

package plan

import "github.com/stowage-dev/stowage/memory"

// Node is the host memory of the node whose ranks pin most of it.
type Node struct {
	// GPUs is how many GPUs of the job a node has. It is zero if that is not known, and
	// then nothing else is.
	GPUs int
	// Number is the node, counted from zero, and Pinned is what its ranks pin together.
	Number int
	Pinned memory.Bytes
	// Room is the host memory that the ranks of a node may pin together: that of the
	// setup, or what the hardware's nodes leave. It is zero if it is not known.
	Room memory.Bytes
	// Missing is how much Pinned exceeds Room. It is zero if the memory is enough, or if
	// Room is not known.
	Missing memory.Bytes
}

// hostReserve is what the process of a rank uses of its node's memory beside what it pins:
// the interpreter, libraries, the context and loaders of data. It is an estimate.
const hostReserve = 8 * memory.GiB

// Node returns the node whose ranks pin most, if each GPU of pipeline rank r pins pinned[r].
// GPUs are numbered as Megatron-LM does by default, with pipeline ranks outermost, and nodes
// are filled in that order. The setup must be normalised.
func (s *Setup) Node(pinned []memory.Bytes) Node {
	world := s.Layout.World
	n := Node{GPUs: min(s.Layout.NodeGPUs, world), Room: s.HostMemory}
	if n.GPUs == 0 {
		return Node{}
	}
	if h := s.Hardware; n.Room == 0 && h != nil && h.NodeMemory > 0 {
		n.Room = max(h.NodeMemory-memory.Bytes(n.GPUs)*hostReserve, 1)
	}
	span := world / s.Layout.PP // GPUs of a pipeline rank
	if span == 0 {
		return n
	}
	for r := range s.Layout.PP {
		// The nodes behind the first of a pipeline rank hold it alone and are alike, but for one that
		// the next rank begins in, which is that rank's first.
		for _, node := range []int{r * span / n.GPUs, r*span/n.GPUs + 1} {
			var sum memory.Bytes
			for at, end := node*n.GPUs, min((node+1)*n.GPUs, world); at < end; {
				rank := min(at/span, s.Layout.PP-1)
				next := min((rank+1)*span, end)
				if rank == s.Layout.PP-1 {
					next = end
				}
				sum += memory.Bytes(next-at) * pinned[rank]
				at = next
			}
			if sum > n.Pinned {
				n.Number, n.Pinned = node, sum
			}
		}
	}
	if n.Room > 0 {
		n.Missing = max(n.Pinned-n.Room, 0)
	}
	return n
}
