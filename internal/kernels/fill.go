// This file owns the fill kernel.

package kernels

import (
	_ "embed"
	"encoding/binary"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/memcopy"
)

//go:embed fill_sm80.ptx
var fillPTX string

var fillKernel = device.Kernel{Name: "stowage_fill", Image: image("fill.cu", fillPTX), Go: fillGo}

// FillLaunch returns a launch that fills dst, of any length and alignment, with a
// pattern of four bytes: byte i of dst becomes byte i mod 4 of the pattern, counted from
// the least significant.
func FillLaunch(dst device.Range, pattern uint32) device.Launch {
	l := device.NewLaunch(&fillKernel, blocksFor(dst.Len, moveChunk, dst), moveThreads)
	l.Write(dst)
	l.Arg(uint64(dst.Len))
	l.Arg(uint64(pattern))
	return l
}

// Fill issues [FillLaunch].
func Fill(s device.Stream, dst device.Range, pattern uint32) { s.Launch(FillLaunch(dst, pattern)) }

func fillGo(l *device.Launch) {
	a := l.Args()
	dst, pattern := device.Slice[byte](a[0], int(a[1])), uint32(a[2])
	if b := byte(pattern); pattern == uint32(b)*0x01010101 {
		memcopy.Fill(dst, b)
		return
	}
	var seed [4]byte
	binary.LittleEndian.PutUint32(seed[:], pattern)
	// Each copy doubles what is written, up to a size that fits into caches.
	const most = 32 << 10
	n := copy(dst, seed[:])
	for n < len(dst) {
		n += copy(dst[n:], dst[:min(n, most)])
	}
}
