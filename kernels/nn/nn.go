// Package nn holds the kernels that models are made of: matrix products, norms,
// rotary positions, attention, activations, routing and moving of rows to experts,
// scans, losses and the optimiser. As in package kernels each has a typed launch,
// the same work in Go (its twin), which the CPU device runs, and device code.
//
// All of them are deterministic: sums are taken in an order that depends on shapes
// alone, never on threads, blocks or timing. Numbers are stored as fp32 or bf16
// and computed with in fp32; a result is rounded once, to nearest even, where it
// is stored.
//
// This file owns what the kernels share: matrices, segments of rows, checks.
package nn

import (
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/kernels"
)

// Matrix is rows of numbers in memory, one behind the other or Pitch apart.
type Matrix struct {
	// Range begins with the first number and reaches at least to the last one.
	device.Range
	Type       kernels.Number
	Rows, Cols int
	Pitch      int // numbers from a row to the next; zero stands for Cols
}

// NewMatrix is a matrix without gaps at the beginning of a range.
func NewMatrix(r device.Range, t kernels.Number, rows, cols int) Matrix {
	return Matrix{Range: r.Slice(0, t.Size()*device.Bytes(rows*cols)), Type: t, Rows: rows, Cols: cols}
}

// Columns are n columns of the matrix, from one on.
func (m Matrix) Columns(from, n int) Matrix {
	if from < 0 || n <= 0 || from+n > m.Cols {
		panic(fmt.Sprintf("nn: columns %d to %d of a matrix that has %d", from, from+n, m.Cols))
	}
	size := m.Type.Size()
	pitch := m.pitch()
	m.Range = m.Range.Slice(size*device.Bytes(from), size*device.Bytes((m.Rows-1)*pitch+n))
	m.Cols, m.Pitch = n, pitch
	return m
}

// Part is n rows of the matrix, from one on.
func (m Matrix) Part(from, n int) Matrix {
	if from < 0 || n <= 0 || from+n > m.Rows {
		panic(fmt.Sprintf("nn: rows %d to %d of a matrix that has %d", from, from+n, m.Rows))
	}
	size, pitch := m.Type.Size(), m.pitch()
	m.Range = m.Range.Slice(size*device.Bytes(from*pitch), size*device.Bytes((n-1)*pitch+m.Cols))
	m.Rows = n
	return m
}

func (m Matrix) pitch() int {
	if m.Pitch == 0 {
		return m.Cols
	}
	return m.Pitch
}

// extent is the bytes from the first number to behind the last.
func (m Matrix) extent() device.Bytes {
	return m.Type.Size() * device.Bytes((m.Rows-1)*m.pitch()+m.Cols)
}

// used is the range that the matrix occupies. Too short a range, a pitch below the
// columns or an odd address is a programmer's error.
func (m Matrix) used(what string) device.Range {
	if m.Rows <= 0 || m.Cols <= 0 || m.pitch() < m.Cols || m.Range.Len < m.extent() || m.Addr()%uintptr(m.Type.Size()) != 0 {
		panic(fmt.Sprintf("nn: %s is a matrix of %d x %d, pitch %d, in %d bytes; that is none", what, m.Rows, m.Cols, m.pitch(), m.Range.Len))
	}
	return m.Range.Slice(0, m.extent())
}

// shape panics unless the matrix has the given shape.
func (m Matrix) shape(what string, rows, cols int) {
	if m.Rows != rows || m.Cols != cols {
		panic(fmt.Sprintf("nn: %s is a matrix of %d x %d; %d x %d was expected", what, m.Rows, m.Cols, rows, cols))
	}
}

// None stands in tables of rows and of tokens for no row, and in targets for a
// token that is not predicted.
const None = math.MaxUint32

// Segments say which rows of a matrix belong to which expert: for each one two
// uint32, the first row and the number of rows. They lie on the device, and the
// host does not know them.
type Segments struct {
	device.Range
	Experts int
}

// SegmentsBytes is the memory that segments take.
func SegmentsBytes(experts int) device.Bytes { return device.Bytes(8 * experts) }

// live are the segments that a kernel is restricted to, or nothing: then it takes
// all rows.
func (s Segments) live() bool { return s.Experts > 0 }

// bits packs a float32 into an argument.
func bits(f float32) uint64 { return uint64(math.Float32bits(f)) }
