// Package nn holds the kernels of models: matrix products, norms, rotary positions,
// attention, activations, routing, moving rows to experts, scans, losses and the
// optimiser. As in package kernels, each has a typed launch, device code, and the same
// work in Go (its twin), which the CPU device runs.
//
// All kernels are deterministic: the order of a sum depends on shapes alone, never on
// threads, blocks or timing. Numbers are stored as fp32 or bf16. Kernels compute in fp32
// and round a result once, to nearest even, when they store it.
//
// Functions panic if shapes, types or sizes do not fit: that is a programmer's error.
//
// This file owns what the kernels share: matrices, segments of rows, checks.
package nn

import (
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// Matrix is rows of numbers in memory, without gaps or Pitch numbers apart.
type Matrix struct {
	// Range begins with the first number and reaches at least to the last one.
	device.Range
	Type       kernels.Number
	Rows, Cols int
	Pitch      int // numbers from a row to the next; zero stands for Cols
}

// NewMatrix returns a matrix without gaps at the beginning of a range.
func NewMatrix(r device.Range, t kernels.Number, rows, cols int) Matrix {
	return Matrix{Range: r.Slice(0, t.Size()*memory.Bytes(rows*cols)), Type: t, Rows: rows, Cols: cols}
}

// Columns returns n columns of the matrix, beginning with column from.
func (m Matrix) Columns(from, n int) Matrix {
	if from < 0 || n <= 0 || from+n > m.Cols {
		panic(fmt.Sprintf("nn: expected columns within the %d of a matrix, got %d to %d", m.Cols, from, from+n))
	}
	size := m.Type.Size()
	pitch := m.pitch()
	m.Range = m.Range.Slice(size*memory.Bytes(from), size*memory.Bytes((m.Rows-1)*pitch+n))
	m.Cols, m.Pitch = n, pitch
	return m
}

// Part returns n rows of the matrix, beginning with row from.
func (m Matrix) Part(from, n int) Matrix {
	if from < 0 || n <= 0 || from+n > m.Rows {
		panic(fmt.Sprintf("nn: expected rows within the %d of a matrix, got %d to %d", m.Rows, from, from+n))
	}
	size, pitch := m.Type.Size(), m.pitch()
	m.Range = m.Range.Slice(size*memory.Bytes(from*pitch), size*memory.Bytes((n-1)*pitch+m.Cols))
	m.Rows = n
	return m
}

func (m Matrix) pitch() int {
	if m.Pitch == 0 {
		return m.Cols
	}
	return m.Pitch
}

// extent returns the bytes from the first number to the end of the last.
func (m Matrix) extent() memory.Bytes {
	return m.Type.Size() * memory.Bytes((m.Rows-1)*m.pitch()+m.Cols)
}

// used returns the range that the matrix occupies. It panics if the range is too short,
// the pitch is below the columns, or the address is not aligned.
func (m Matrix) used(what string) device.Range {
	if m.Rows <= 0 || m.Cols <= 0 || m.pitch() < m.Cols || m.Range.Len < m.extent() || m.Addr()%uintptr(m.Type.Size()) != 0 {
		panic(fmt.Sprintf("nn: %s: a matrix of %d x %d with pitch %d does not fit into %s; give a larger or aligned range", what, m.Rows, m.Cols, m.pitch(), m.Range))
	}
	return m.Range.Slice(0, m.extent())
}

// shape panics unless the matrix has the given shape.
func (m Matrix) shape(what string, rows, cols int) {
	if m.Rows != rows || m.Cols != cols {
		panic(fmt.Sprintf("nn: %s: expected a matrix of %d x %d, got %d x %d", what, rows, cols, m.Rows, m.Cols))
	}
}

// None means no row in tables of rows and of tokens, and a token that is not predicted in
// targets.
const None = math.MaxUint32

// Segments says which rows of a matrix belong to which expert. It has two uint32 for each
// expert: the first row and the number of rows. They lie in device memory, and the host
// does not know them.
type Segments struct {
	device.Range
	Experts int
}

// SegmentsBytes returns the size of the segments of some experts.
func SegmentsBytes(experts int) memory.Bytes { return memory.Bytes(8 * experts) }

// live reports whether a kernel is restricted to the rows of segments. Otherwise it
// handles all rows.
func (s Segments) live() bool { return s.Experts > 0 }

// bits packs a float32 into an argument.
func bits(f float32) uint64 { return uint64(math.Float32bits(f)) }
