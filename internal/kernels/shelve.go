// This file owns the shelve kernel, which copies the live rows of a tensor to a berth.

package kernels

import (
	_ "embed"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/memcopy"
	"github.com/stowage-dev/stowage/memory"
)

//go:embed shelve_sm80.ptx
var shelvePTX string

var shelveKernel = device.Kernel{Name: "stowage_shelve", Image: image("shelve.cu", shelvePTX), Go: shelveGo}

// ShelveNote is the state of a berth in device memory.
type ShelveNote struct {
	Rows uint64 // the most rows of any tensor since the note was cleared
	Fits uint64 // the rows that the berth has memory for
}

// ShelveNoteBytes is the size of a note.
const ShelveNoteBytes = memory.Bytes(unsafe.Sizeof(ShelveNote{}))

// shelveLeast is the least that the grid of a launch is sized for. A captured launch
// keeps its grid when its berth grows: a grid of one block would need 25600 iterations
// for 100 MiB, and one for 1 MiB needs 100. Reading 1 MiB for nothing takes negligible
// time.
const shelveLeast = memory.MiB

// ShelveLaunch returns a launch that copies the first rows of a tensor to a berth and
// clears the rest of the berth's memory. The int64 in rows gives the number of rows. The
// note keeps the largest number. If that is more than the berth fits, the berth's
// contents are not valid. The launch may read all rows of the tensor. The berth and the
// tensor must begin at multiples of 16 bytes, and the berth must end at one. The berth
// may grow after the launch is made: a replay reads its present size from the note.
func ShelveLaunch(berth, tensor, note, rows device.Range, row memory.Bytes) device.Launch {
	mustAlign("a berth", berth, 16)
	mustAlign("a tensor with rows", tensor, 16)
	l := device.NewLaunch(&shelveKernel, blocksFor(min(max(berth.Len, shelveLeast), tensor.Len), moveChunk, berth, tensor), moveThreads)
	l.Write(berth)
	l.Read(tensor)
	l.Write(note.Slice(0, ShelveNoteBytes))
	l.Read(rows.Slice(0, 8))
	l.Arg(uint64(tensor.Len))
	l.Arg(uint64(row))
	return l
}

func shelveGo(l *device.Launch) {
	a := l.Args()
	n, note, bytes, row := device.Slice[uint64](a[3], 1)[0], &device.Slice[ShelveNote](a[2], 1)[0], a[4], a[5]
	note.Rows = max(note.Rows, n)
	room, live := (note.Fits*row+15)&^15, min(n, note.Fits)*row
	if room > bytes {
		room = bytes
	}
	dst := device.Slice[byte](a[0], int(room))
	memcopy.Parallel(dst[:live], device.Slice[byte](a[1], int(bytes))[:live], 0)
	memcopy.Fill(dst[live:], 0)
}
