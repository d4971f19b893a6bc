// This file owns sizes: what a bucket takes once it is padded and aligned, and
// which sizes make no sense.

package bucket

import (
	"cmp"
	"fmt"
)

// A pool takes at most a block as large as all units together for each of them,
// and that must not overflow.
const most = 1 << 62

// Padded is the number of elements that a bucket takes, a multiple of Multiple.
func (s Spec) Padded(b Bucket) int64 { return roundUp(b.Elements, s.Multiple) }

// Bytes is what a bucket takes in a pool, padded and a multiple of Align.
func (s Spec) Bytes(b Bucket) int64 { return roundUp(s.Padded(b)*b.Type.Size, s.Align) }

// roundUp rounds n up to a multiple; zero stands for one.
func roundUp(n, multiple int64) int64 {
	multiple = cmp.Or(multiple, 1)
	return (n + multiple - 1) / multiple * multiple
}

// measure fills in the sizes and refuses those that make no sense.
func (t *timeline) measure() error {
	s := t.spec
	if s.Align < 0 || s.Multiple < 0 || s.Align > 1<<40 || s.Multiple > 1<<40 {
		return fmt.Errorf("bucket: align is %d bytes and multiple %d elements; both must lie between 0 and 2^40", s.Align, s.Multiple)
	}
	var total float64
	t.size, t.bytes = make([]int64, len(s.Units)), make([][]int64, len(s.Units))
	var n int
	for _, u := range s.Units {
		n += len(u.Buckets)
	}
	all := make([]int64, n)
	for i, u := range s.Units {
		t.bytes[i], all = all[:len(u.Buckets):len(u.Buckets)], all[len(u.Buckets):]
		for j, b := range u.Buckets {
			switch {
			case b.Type.Size <= 0:
				return fmt.Errorf("bucket: bucket %q of unit %q has the data type %q of %d bytes; give a type whose size is known", b.Name, u.Name, b.Type.Name, b.Type.Size)
			case b.Elements < 0:
				return fmt.Errorf("bucket: bucket %q of unit %q has %d elements; there must be none or more", b.Name, u.Name, b.Elements)
			}
			about := (float64(b.Elements) + float64(s.Multiple)) * float64(b.Type.Size)
			if total += about + float64(s.Align); total*float64(len(s.Units)) > most {
				return fmt.Errorf("bucket: bucket %q of unit %q has %d elements, more than pools are planned for; check them", b.Name, u.Name, b.Elements)
			}
			t.bytes[i][j] = s.Bytes(b)
			t.size[i] += t.bytes[i][j]
		}
	}
	return nil
}
