// This file owns sizes: the bytes of a bucket after padding and alignment, and the
// check that sizes are valid.

package bucket

import (
	"cmp"
	"fmt"

	"github.com/stowage-dev/stowage/memory"
)

// maxTotal limits the sum of all units, times their number: the largest pool has one
// block for each unit, each as large as all units together, and its size must not
// overflow.
const maxTotal = 1 << 62

// Padded returns the number of elements of a bucket, rounded up to a multiple of
// Multiple.
func (s Spec) Padded(b Bucket) int64 { return roundUp(b.Elements, s.Multiple) }

// PaddedBytes returns the size of a bucket's padded elements without alignment: what
// a gather writes.
func (s Spec) PaddedBytes(b Bucket) memory.Bytes { return memory.Bytes(s.Padded(b)) * b.Type.Size }

// Bytes returns the size of a bucket in a pool, padded and rounded up to a multiple of
// Align.
func (s Spec) Bytes(b Bucket) memory.Bytes { return roundUp(s.PaddedBytes(b), s.Align) }

// roundUp rounds n up to a multiple. Zero means one.
func roundUp[T ~int64](n, multiple T) T {
	multiple = cmp.Or(multiple, 1)
	return (n + multiple - 1) / multiple * multiple
}

// measure computes the sizes of all units and buckets. It returns an error for sizes
// that are negative or too large.
func (t *timeline) measure() error {
	s := t.spec
	if s.Align < 0 || s.Multiple < 0 || s.Align > 1<<40 || s.Multiple > 1<<40 {
		return fmt.Errorf("bucket: align is %d bytes and multiple %d elements; both must be between 0 and 2^40", int64(s.Align), s.Multiple)
	}
	var total float64
	t.size, t.bytes = make([]memory.Bytes, len(s.Units)), make([][]memory.Bytes, len(s.Units))
	var n int
	for _, u := range s.Units {
		n += len(u.Buckets)
	}
	all := make([]memory.Bytes, n)
	for i, u := range s.Units {
		t.bytes[i], all = all[:len(u.Buckets):len(u.Buckets)], all[len(u.Buckets):]
		for j, b := range u.Buckets {
			switch {
			case b.Type.Size <= 0:
				return fmt.Errorf("bucket: bucket %q of FSDP unit %q has the data type %q with %d bytes an element; give a type with a positive size", b.Name, u.Name, b.Type.Name, int64(b.Type.Size))
			case b.Elements < 0:
				return fmt.Errorf("bucket: bucket %q of FSDP unit %q has %d elements; expected zero or more", b.Name, u.Name, b.Elements)
			}
			about := (float64(b.Elements) + float64(s.Multiple)) * float64(b.Type.Size)
			if total += about + float64(s.Align); total*float64(len(s.Units)) > maxTotal {
				return fmt.Errorf("bucket: bucket %q of FSDP unit %q has %d elements, which makes the pool larger than 2^62 bytes; check the shapes of its parameters", b.Name, u.Name, b.Elements)
			}
			t.bytes[i][j] = s.Bytes(b)
			t.size[i] += t.bytes[i][j]
		}
	}
	return nil
}
