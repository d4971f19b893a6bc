// This file owns the fuzzing of copies of any length and alignment.

package memcopy

import (
	"fmt"
	"testing"
)

// FuzzCopy holds every way of copying a range against plain copy, with guards.
func FuzzCopy(f *testing.F) {
	f.Add(uint32(0), uint8(0), uint8(0), uint8(1))
	f.Add(uint32(8*pageBytes+63), uint8(1), uint8(3), uint8(2))
	f.Add(uint32(StreamFrom+1), uint8(63), uint8(5), uint8(3))
	src := random(f, StreamFrom+chunkBytes+lineBytes, 8)
	f.Fuzz(func(t *testing.T, size uint32, at, from, threads uint8) {
		n := int(size % (StreamFrom + chunkBytes))
		s := src[from%lineBytes:][:n]
		ways := append(supported(), Variant{Name: "Parallel",
			Func: func(dst, src []byte) { Parallel(dst, src, int(threads%5)) }})
		for _, v := range ways {
			a := newArena(n, int(at%lineBytes))
			v.Func(a.bytes(), s)
			a.check(t, fmt.Sprintf("%s, %d bytes at %d, %d", v.Name, n, at%lineBytes, from%lineBytes),
				func(d []byte) { copy(d, s) })
		}
	})
}

// FuzzCopy2D does the same for rows, with the kernels at every size.
func FuzzCopy2D(f *testing.F) {
	f.Add(uint16(128), uint8(17), uint8(64), uint8(0), uint8(0))
	f.Add(uint16(4097), uint8(40), uint8(63), uint8(9), uint8(33))
	f.Add(uint16(2111), uint8(9), uint8(1), uint8(0), uint8(5))
	src := random(f, 256*(1<<16+1<<8), 9)
	f.Fuzz(func(t *testing.T, width uint16, height, dgap, sgap, at uint8) {
		w, h := int(width)+1, int(height)+1
		dpitch, spitch := w+int(dgap), w+int(sgap)
		if height%2 == 0 {
			dpitch = (dpitch + lineBytes - 1) &^ (lineBytes - 1) // the aligned case, else rare
		}
		for k := kindPlain; k <= best; k++ {
			a := newArena((h-1)*dpitch+w, int(at%lineBytes))
			if k == kindPlain {
				Copy2D(a.bytes(), dpitch, src, spitch, w, h)
			} else {
				streamRows(k, a.bytes(), dpitch, src, spitch, w, h)
			}
			a.check(t, fmt.Sprintf("%v, %d rows of %d at %d, pitches %d, %d", k, h, w, at%lineBytes, dpitch, spitch),
				func(d []byte) {
					for i := range h {
						copy(d[i*dpitch:][:w], src[i*spitch:][:w])
					}
				})
		}
	})
}
