// This file owns the copy kernel. Copies of known size outside of graphs are
// better left to Stream.Copy; inside of a graph the driver's own copy of 1 GiB ran
// at 2.7 TB/s on an H200 where this kernel runs at 4.2.

package kernels

import (
	_ "embed"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/memcopy"
)

//go:embed copy_sm80.ptx
var copyPTX string

var copyKernel = device.Kernel{Name: "stowage_copy", Image: image("copy.cu", copyPTX), Go: copyGo}

// CopyLaunch copies src to dst, two ranges of equal length that do not overlap, of
// any alignment.
func CopyLaunch(dst, src device.Range) device.Launch {
	device.CheckCopy(dst, src)
	l := device.NewLaunch(&copyKernel, blocksFor(dst.Len, moveChunk, dst, src), moveThreads)
	l.Write(dst)
	l.Read(src)
	l.Arg(uint64(dst.Len))
	return l
}

// Copy issues [CopyLaunch].
func Copy(s device.Stream, dst, src device.Range) { s.Launch(CopyLaunch(dst, src)) }

// GraphCopy is [CopyLaunch] in the form in which a device asks for a kernel that
// copies inside of graphs.
func GraphCopy(dst, src device.Range) (device.Launch, bool) { return CopyLaunch(dst, src), true }

func copyGo(l *device.Launch) {
	a := l.Args()
	n := int(a[2])
	memcopy.Parallel(device.Slice[byte](a[0], n), device.Slice[byte](a[1], n), 0)
}
