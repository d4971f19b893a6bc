//go:build !amd64 || race || purego

// This file owns the build without assembly: every copy is a plain one.

package memcopy

// best is a constant here, so the compiler drops every call below.
const best = kindPlain

func (k kind) streams() int { return 1 }

func copyBlock(k kind, dst *byte, dstride int, src *byte, sstride, lines int) {
	panic("memcopy: no kernel in this build")
}

func fillBlock(dst *byte, value byte, n int) { panic("memcopy: no kernel in this build") }

func storeFence() {}
