//go:build amd64 && !race && !purego

// This file owns the declarations of the reduction's assembly. The race detector does
// not see its stores, so builds for it leave the file out.

package kernels

import "github.com/stowage-dev/stowage/internal/sysinfo"

var hasAVX2 = sysinfo.ReadInstructions().AVX2

// vectors returns how many of n numbers the assembly handles.
func vectors(n int) int {
	if hasAVX2 {
		return n &^ 15
	}
	return 0
}

//go:noescape
func addF32AVX2(to, a, x *float32, n int)

//go:noescape
func addBF16AVX2(a *float32, x *uint16, n int)

//go:noescape
func widenAVX2(a *float32, x *uint16, n int)

//go:noescape
func maxF32AVX2(a, x *float32, n int)

//go:noescape
func divideAVX2(a *float32, n int, over float32)

//go:noescape
func storeF32AVX2(to, a *float32, n int)

//go:noescape
func storeBF16AVX2(to *uint16, a *float32, n int)
