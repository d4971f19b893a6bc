// This file owns the twins of the embedding.

package nn

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/internal/vec"
)

// mustBeRow panics if a table has no row of a number.
func mustBeRow(id uint32, rows int) {
	if int(id) >= rows {
		panic(fmt.Sprintf("nn: a lookup of row %d in a table that has %d", id, rows))
	}
}

func embedTwin(l *device.Launch) {
	a := l.Args()
	rows, cols := unpackPair(a[3])
	yp, tp := unpackPair(a[4])
	vocab := int(a[5])
	y, table := stripOf(a[0], yp, a[6], 0), stripOf(a[1], tp, a[6], 1)
	ids := device.Slice[uint32](a[2], rows)
	parallel.For(rows, runRows(cols), func(from, to int) {
		withRoom(cols, func(room []float32) {
			for row := from; row < to; row++ {
				mustBeRow(ids[row], vocab)
				id := int(ids[row])
				switch {
				case y.typ == kernels.F32:
					// Numbers of bf16 are widened into their place.
					out := y.into(row, 0, cols, nil)
					copy(out, table.get(id, 0, cols, out))
				case table.typ == kernels.BF16:
					copy(y.bf16(row, 0, cols), table.bf16(id, 0, cols))
				default:
					y.put(row, 0, table.get(id, 0, cols, room))
				}
			}
		})
	})
}

const (
	// A thread handles embedRows table rows and embedCols columns at a time. They are few
	// enough to spread a table of 256 rows, of which few are common.
	embedRows = 64
	embedCols = 256
)

func embedSortTwin(l *device.Launch) {
	a := l.Args()
	rows, vocab := unpackPair(a[2])
	scratch := device.Slice[uint32](a[1], rows+vocab+1)
	sortByID(device.Slice[uint32](a[0], rows), scratch[:rows], scratch[rows:])
}

func embedGradTwin(l *device.Launch) {
	a := l.Args()
	rows, cols := unpackPair(a[4])
	tp, dp := unpackPair(a[5])
	vocab := int(a[6])
	table, dy := stripOf(a[0], tp, a[7], 0), stripOf(a[1], dp, a[7], 1)
	scratch := device.Slice[uint32](a[3], rows+vocab+1)
	order, start := scratch[:rows], scratch[rows:]
	groups := (vocab + embedRows - 1) / embedRows
	parallel.For(groups*((cols+embedCols-1)/embedCols), 1, func(task, _ int) {
		from := task % groups * embedRows
		col := task / groups * embedCols
		n := min(embedCols, cols-col)
		var room [2 * embedCols]float32
		for id := from; id < min(from+embedRows, vocab); id++ {
			mine := order[start[id]:start[id+1]]
			if len(mine) == 0 {
				continue
			}
			sum := table.get(id, col, n, room[:])
			for _, row := range mine {
				vec.Add(sum, sum, dy.get(int(row), col, n, room[embedCols:]))
			}
			table.put(id, col, sum)
		}
	})
}

// sortByID sorts the numbers of rows by their ids, and rows of one id by number. Those of
// id begin at start[id] and end where the next id begins.
func sortByID(ids, order, start []uint32) {
	vocab := len(start) - 1
	clear(start)
	for _, id := range ids {
		mustBeRow(id, vocab)
		start[id+1]++
	}
	for id := range vocab {
		start[id+1] += start[id]
	}
	// Placing the rows moves each beginning to its end, which is the next one's beginning.
	for row, id := range ids {
		order[start[id]] = uint32(row)
		start[id]++
	}
	copy(start[1:], start)
	start[0] = 0
}
