// This file owns the taking and the combining of rows in Go.

package nn

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/internal/vec"
)

const (
	// rowsRun is about how many bytes a run of rows has.
	rowsRun = 256 << 10
	// rowsBlock fp32 numbers take 4 KiB. The sum, two terms and their sources fit into a
	// first-level cache of 32 KiB.
	rowsBlock = 1024
)

func takeTwin(l *device.Launch) {
	a := l.Args()
	t := taking{
		rows: int(uint32(a[3])), srcRows: int(a[3] >> 32), row: int(uint32(a[4])),
		dstPitch: int(a[5]), srcPitch: int(a[6]), every: uint32(a[7]), zero: a[7]>>32 != 0,
	}
	t.dst = device.Slice[byte](a[0], (t.rows-1)*t.dstPitch+t.row)
	t.src = device.Slice[byte](a[1], (t.srcRows-1)*t.srcPitch+t.row)
	source := device.Slice[uint32](a[2], t.rows)
	parallel.For(t.rows, max(1, rowsRun/t.row), func(from, to int) {
		if t.row == 4 && t.dstPitch == 4 && t.srcPitch == 4 {
			takeWords(device.Slice[uint32](a[0], t.rows)[from:to], device.Slice[uint32](a[1], t.srcRows), source[from:to], t.every, t.zero)
			return
		}
		t.copyRows(from, source[from:to])
	})
}

// taking is a launch. row and the pitches are in bytes.
type taking struct {
	rows, srcRows           int
	row, dstPitch, srcPitch int
	every                   uint32
	zero                    bool
	dst, src                []byte
}

func (t *taking) copyRows(from int, source []uint32) {
	for i, n := range source {
		to := t.dst[(from+i)*t.dstPitch:][:t.row]
		switch {
		case n != None:
			copy(to, t.src[int(n/t.every)*t.srcPitch:][:t.row])
		case t.zero:
			clear(to)
		}
	}
}

func spreadRowsTwin(l *device.Launch) {
	a := l.Args()
	rows, dstRows := unpackPair(a[3])
	row, dstPitch, srcPitch, every := int(a[4]), int(a[5]), int(a[6]), int(a[7])
	dst, src := device.Slice[byte](a[0], (dstRows-1)*dstPitch+row), device.Slice[byte](a[1], (rows-1)*srcPitch+row)
	place := device.Slice[uint32](a[2], rows*every)
	parallel.For(rows, max(1, rowsRun/(row*every)), func(from, to int) {
		for i := from; i < to; i++ {
			for _, n := range place[i*every:][:every] {
				if n != None {
					copy(dst[int(n)*dstPitch:][:row], src[i*srcPitch:][:row])
				}
			}
		}
	})
}

// takeWords takes rows of one number of four bytes.
func takeWords(dst, src, source []uint32, every uint32, zero bool) {
	dst = dst[:len(source)]
	for i, n := range source {
		switch {
		case n != None:
			dst[i] = src[n/every]
		case zero:
			dst[i] = 0
		}
	}
}

func combineTwin(l *device.Launch) {
	a := l.Args()
	rows, srcRows, cols, every := int(uint32(a[4])), int(a[4]>>32), int(uint32(a[5])), int(a[5]>>32)
	c := combining{
		dst:  rowNumbersAt(a[0], a[8], rows, cols, int(uint32(a[6]))),
		src:  rowNumbersAt(a[1], a[8]>>8, srcRows, cols, int(a[6]>>32)),
		cols: cols,
	}
	place := device.Slice[uint32](a[2], rows*every)
	if a[3] != 0 {
		c.plus = rowNumbersAt(a[3], a[8]>>16, rows, cols, int(a[7]))
	}
	parallel.For(rows, max(1, rowsRun/(4*cols*every)), func(from, to int) {
		var room [3][rowsBlock]float32
		for i := from; i < to; i++ {
			c.row(i, place[i*every:][:every], &room)
		}
	})
}

// rowNumbers is a matrix of a launch, as fp32 or as bf16.
type rowNumbers struct {
	f32   []float32
	bf16  []uint16
	pitch int
}

func rowNumbersAt(addr, kind uint64, rows, cols, pitch int) rowNumbers {
	n := (rows-1)*pitch + cols
	if kernels.Number(uint8(kind)) == kernels.F32 {
		return rowNumbers{f32: device.Slice[float32](addr, n), pitch: pitch}
	}
	return rowNumbers{bf16: device.Slice[uint16](addr, n), pitch: pitch}
}

// part returns n numbers of a row as fp32. It converts bf16 into the room.
func (m *rowNumbers) part(row, col, n int, room []float32) []float32 {
	at := row*m.pitch + col
	if m.bf16 == nil {
		return m.f32[at:][:n]
	}
	vec.Widen(room[:n], m.bf16[at:][:n])
	return room[:n]
}

type combining struct {
	dst, src, plus rowNumbers
	cols           int
}

// row sets a row of dst, a block of columns at a time, so the sum stays in the cache. An
// fp32 sum is computed in its place if nothing reads dst afterwards.
func (c *combining) row(i int, place []uint32, room *[3][rowsBlock]float32) {
	for col := 0; col < c.cols; col += rowsBlock {
		n := min(rowsBlock, c.cols-col)
		sum, at := room[0][:n], i*c.dst.pitch+col
		if c.dst.bf16 == nil && c.plus.pitch == 0 {
			sum = c.dst.f32[at:][:n]
		}
		var so []float32 // the sum so far: nothing, a single term, or sum
		for _, row := range place {
			switch {
			case row == None:
			case so == nil:
				so = c.src.part(int(row), col, n, room[1][:])
			default:
				vec.Add(sum, so, c.src.part(int(row), col, n, room[2][:]))
				so = sum
			}
		}
		switch {
		case c.plus.pitch == 0:
		case so == nil:
			so = c.plus.part(i, col, n, room[1][:])
		default:
			vec.Add(sum, so, c.plus.part(i, col, n, room[2][:]))
			so = sum
		}
		if so == nil {
			so = sum
			clear(so)
		}
		if c.dst.bf16 != nil {
			vec.Narrow(c.dst.bf16[at:][:n], so)
		} else {
			copy(c.dst.f32[at:][:n], so) // does nothing if it is in its place
		}
	}
}
