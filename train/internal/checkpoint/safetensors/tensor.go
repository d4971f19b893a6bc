// Package safetensors reads and writes the safetensors format: eight bytes with
// the length of a header, little-endian; the header, JSON with type, shape and place
// of every tensor; and their data, one after the other without holes.
//
// Reading trusts nothing: a Reader exists only for a file whose header, shapes,
// places and length all agree. Writing streams: what the file holds is declared
// first, and the data follow in pieces of any size.
//
// This file owns the description of a tensor.
package safetensors

import (
	"fmt"
	"math"
	"math/bits"
)

// DType is the type of a tensor's elements.
type DType uint8

const (
	F32 DType = iota
	BF16
	F16
	U8
	U32
	I64
	U64
)

var dtypes = [...]struct {
	name string
	size int64
}{F32: {"F32", 4}, BF16: {"BF16", 2}, F16: {"F16", 2}, U8: {"U8", 1}, U32: {"U32", 4}, I64: {"I64", 8}, U64: {"U64", 8}}

// String is the name that the format has for the type.
func (d DType) String() string {
	if int(d) >= len(dtypes) {
		return fmt.Sprintf("DType(%d)", uint8(d))
	}
	return dtypes[d].name
}

// Size is the bytes of one element.
func (d DType) Size() int64 {
	if int(d) >= len(dtypes) {
		panic(fmt.Sprintf("safetensors: %v is no type of elements", d))
	}
	return dtypes[d].size
}

func parseDType(name string) (DType, bool) {
	for d := range dtypes {
		if dtypes[d].name == name {
			return DType(d), true
		}
	}
	return 0, false
}

// Tensor says what a tensor is; its data are elsewhere. No dimension is a scalar,
// a dimension of zero is a tensor without data.
type Tensor struct {
	Name  string
	DType DType
	Shape []int
}

// Bytes is the length of the tensor's data. A shape with a negative dimension or
// with more than 2^63-1 bytes panics.
func (t Tensor) Bytes() int64 {
	n, ok := t.bytes()
	if !ok {
		panic(fmt.Sprintf("safetensors: tensor %q of shape %v has no length", t.Name, t.Shape))
	}
	return n
}

// bytes is false for shapes whose elements cannot be counted. A zero does not
// excuse the other dimensions: other readers multiply from the left.
func (t Tensor) bytes() (int64, bool) {
	n := uint64(t.DType.Size())
	for _, d := range t.Shape {
		if d < 0 {
			return 0, false
		}
		hi, lo := bits.Mul64(n, uint64(d))
		if hi != 0 || lo > math.MaxInt64 {
			return 0, false
		}
		n = lo
	}
	return int64(n), true
}
