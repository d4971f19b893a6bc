// This file owns the copy kernel. Stream.Copy is better for copies outside of graphs.
// Inside a graph, the driver's copy of 1 GiB ran at 2.7 TB/s on an H200 and this kernel
// at 4.2 TB/s.

package kernels

import (
	_ "embed"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/devicekit"
	"github.com/stowage-dev/stowage/internal/memcopy"
)

//go:embed copy_sm80.ptx
var copyPTX string

var copyKernel = device.Kernel{Name: "stowage_copy", Image: image("copy.cu", copyPTX), Go: copyGo}

// CopyLaunch returns a launch that copies src to dst. The ranges may have any alignment.
// CopyLaunch panics if their lengths differ or they overlap.
func CopyLaunch(dst, src device.Range) device.Launch {
	devicekit.CheckCopy(dst, src)
	l := device.NewLaunch(&copyKernel, blocksFor(dst.Len, moveChunk, dst, src), moveThreads)
	l.Write(dst)
	l.Read(src)
	l.Arg(uint64(dst.Len))
	return l
}

// Copy issues [CopyLaunch].
func Copy(s device.Stream, dst, src device.Range) { s.Launch(CopyLaunch(dst, src)) }

// GraphCopy is [CopyLaunch] with the signature of the hook by which a device asks for a
// kernel that copies inside graphs.
func GraphCopy(dst, src device.Range) (device.Launch, bool) { return CopyLaunch(dst, src), true }

func copyGo(l *device.Launch) {
	a := l.Args()
	n := int(a[2])
	memcopy.Parallel(device.Slice[byte](a[0], n), device.Slice[byte](a[1], n), 0)
}
