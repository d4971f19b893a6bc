// This file owns the other ways to copy inside device memory: as a node of a
// graph, by a kernel, and by a kernel in a graph. On GPUs they differ: a copy
// node ran at two thirds of the speed of the same copy outside of a graph.

package bench

import (
	"cmp"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

// graphCopies is the number of copies in a graph. It spreads the cost of one replay (a few
// microseconds) over several copies.
const graphCopies = 8

// otherCopies captures the graphs. The function end closes them.
func (r *rig) otherCopies() (ways []way, end func(), err error) {
	dst, src := r.accel[1].All(), r.accel[0].All()
	copyNode := func() { r.out.Copy(dst, src) }
	copyKernel := func() { kernels.Copy(r.out, dst, src) }

	var graphs []device.Graph
	end = func() {
		for _, g := range graphs {
			_ = g.Close() // what failed was already reported by a Sync
		}
	}
	for _, issue := range []func(){copyNode, copyKernel} {
		g, err := captureWork(r.out, graphCopies, issue)
		if err != nil {
			end()
			return nil, nil, err
		}
		graphs = append(graphs, g)
	}
	replay := func(g device.Graph) func(int) error {
		return func(n int) error {
			for range n {
				r.out.Replay(g)
			}
			return r.out.Sync()
		}
	}
	return []way{
		{"graph", graphCopies, replay(graphs[0])},
		{"kernel", 1, func(n int) error {
			for range n {
				copyKernel()
			}
			return r.out.Sync()
		}},
		{"kernel graph", graphCopies, replay(graphs[1])},
	}, end, nil
}

// captureWork makes a graph of n pieces of work.
func captureWork(s device.Stream, n int, issue func()) (device.Graph, error) {
	s.BeginCapture()
	for range n {
		issue()
	}
	g, err := s.EndCapture()
	return g, cmp.Or(err, s.Sync())
}
