// This file owns the parts of a block of attention: its memory, the conversion of rows to
// and from fp32, and which keys of a block a query sees.

package nn

import (
	"sync"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/gemm"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/vec"
)

const (
	// A block has attendTile keys and attendRows queries. There are fewer queries, because
	// half of a block on the diagonal is computed in vain. Products work on 12 rows and 32
	// columns: 48 is 4 x 12, and 96 is 8 x 12 and 3 x 32. Scores then take 18 KiB, and keys
	// 24 KiB for heads of 64. Of seven pairs from 24 x 64 to 60 x 128 this one was the
	// fastest or near it for heads of 32 to 128.
	attendTile = 96
	attendRows = 48
	// attendLanes is how many numbers of a row of a block the loops handle at a time. A
	// tile is a multiple of it.
	attendLanes = 16
)

// attendRoom is the memory of a piece of work. It grows to the largest piece and is kept,
// so a launch in steady state allocates nothing.
type attendRoom struct {
	all  []float32
	used int
}

var attendRooms = sync.Pool{New: func() any { return new(attendRoom) }}

func (r *attendRoom) reset() { r.used = 0 }

// alloc returns n numbers of any content.
func (r *attendRoom) alloc(n int) []float32 {
	if r.used+n > len(r.all) {
		// Earlier slices keep their old memory.
		r.all, r.used = make([]float32, 2*len(r.all)+n), 0
	}
	r.used += n
	return r.all[r.used-n : r.used : r.used]
}

// load returns n rows of some columns as fp32 without gaps.
func (v view) load(room *attendRoom, row, col, n, cols int) []float32 {
	to := room.alloc(n * cols)
	v.read(to, row, col, n, cols)
	return to
}

// loadTransposed returns n rows of some columns as fp32, in transposed blocks of attendTile rows. A
// short last block has the size of a whole one and any content at its end.
func (v view) loadTransposed(room *attendRoom, row, col, n, cols int) []float32 {
	to, line := room.alloc((n+attendTile-1)/attendTile*attendTile*cols), room.alloc(attendTile*cols)
	for i := 0; i < n; i += attendTile {
		rows, pitch, count := line, cols, min(attendTile, n-i)
		if v.typ == kernels.F32 {
			rows, pitch = device.Slice[float32](v.addr+4*uint64((row+i)*v.pitch+col), (count-1)*v.pitch+cols), v.pitch
		} else {
			v.read(rows, row+i, col, count, cols)
		}
		gemm.Transpose(to[i*cols:], attendTile, rows, pitch, count, cols)
	}
	return to
}

func (v view) read(to []float32, row, col, n, cols int)    { v.readTimes(to, row, col, n, cols, 1) }
func (v view) write(from []float32, row, col, n, cols int) { v.writeTimes(from, row, col, n, cols, 1) }

// readTimes reads rows as fp32, multiplied by a factor.
func (v view) readTimes(to []float32, row, col, n, cols int, by float32) {
	for i := range n {
		at, line := uint64((row+i)*v.pitch+col), to[i*cols:(i+1)*cols]
		switch {
		case v.typ == kernels.BF16:
			vec.Widen(line, device.Slice[uint16](v.addr+2*at, cols))
			if by != 1 {
				vec.Scale(line, line, by)
			}
		case by != 1:
			vec.Scale(line, device.Slice[float32](v.addr+4*at, cols), by)
		default:
			copy(line, device.Slice[float32](v.addr+4*at, cols))
		}
	}
}

// writeTimes writes rows to the matrix, multiplied by a factor.
func (v view) writeTimes(from []float32, row, col, n, cols int, by float32) {
	for i := range n {
		at, line := uint64((row+i)*v.pitch+col), from[i*cols:(i+1)*cols]
		switch {
		case v.typ == kernels.BF16:
			if by != 1 {
				vec.Scale(line, line, by)
			}
			vec.Narrow(device.Slice[uint16](v.addr+2*at, cols), line)
		case by != 1:
			vec.Scale(device.Slice[float32](v.addr+4*at, cols), line, by)
		default:
			copy(device.Slice[float32](v.addr+4*at, cols), line)
		}
	}
}

// visible returns the part of a row of scores that a query sees, widened to whole lanes.
// The row begins with key j. Scores that the query does not see become hidden inside the
// part. Outside they become zero, because products read the whole row.
func (w *attendWork) visible(row []float32, query, j int, hidden float32) []float32 {
	to := max(0, min(len(row), query+1-j))
	from := min(max(0, query-w.window+1-j), to)
	if to-from == len(row) {
		return row
	}
	first, last := from/attendLanes*attendLanes, (to+attendLanes-1)/attendLanes*attendLanes
	if from == to {
		last = first
	}
	clear(row[:first])
	for i := first; i < from; i++ {
		row[i] = hidden
	}
	for i := to; i < last; i++ {
		row[i] = hidden
	}
	clear(row[last:])
	return row[first:last]
}
