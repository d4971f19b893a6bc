// This file owns the shelve kernel.

package kernels

import (
	_ "embed"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/memcopy"
)

//go:embed shelve_sm80.ptx
var shelvePTX string

var shelveKernel = device.Kernel{Name: "stowage_shelve", Image: image("shelve.cu", shelvePTX), Go: shelveGo}

// ShelveNote is what a berth has on the device.
type ShelveNote struct {
	Rows uint64 // the most that a tensor had, as they were counted, since it was cleared
	Fits uint64 // rows that the berth has room for
}

// ShelveNoteBytes is the size of a note.
const ShelveNoteBytes = device.Bytes(unsafe.Sizeof(ShelveNote{}))

// shelveLeast is what a launch moves at a time at least. A captured one keeps its grid when
// its berth grows: with the one block of a few rows, 100 MiB would take 25600 turns of a
// block and not 100. Loading 1 MiB for nothing takes no time worth mentioning.
const shelveLeast = device.MiB

// ShelveLaunch copies the first rows of a tensor to a berth, as many as the int64 in rows
// says, and clears the rest of the berth's room. The note keeps the largest count: if it
// is more than the berth fits, what is there means nothing. All rows of the tensor may
// be read. Both begin at a multiple of 16 bytes, and a berth ends at one: up to there it
// is cleared. Berth is what it has now; the launch finds out what it has later.
func ShelveLaunch(berth, tensor, note, rows device.Range, row device.Bytes) device.Launch {
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
