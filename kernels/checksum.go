// This file owns the checksum kernel and the definition of the checksum.

package kernels

import (
	_ "embed"
	"encoding/binary"
	"sync/atomic"

	"github.com/stowage-dev/stowage/device"
)

//go:embed checksum_sm80.ptx
var checksumPTX string

var checksumKernel = device.Kernel{Name: "stowage_checksum", Image: image("checksum.cu", checksumPTX), Go: checksumGo}

const (
	checksumBytes = device.Bytes(8)
	// 12 blocks for each of the 132 multiprocessors of an H200 read at 4.4 TB/s;
	// 8 or 16 are 2 to 4 % slower.
	checksumThreads = 256
	checksumBlocks  = 12 * 132
)

// ChecksumLaunch adds the [Checksum] of src, of any length and alignment, to the
// eight bytes at sum. Somebody must have set them before, to zero as a rule; sums
// of several ranges can be added up, in any order or at the same time.
func ChecksumLaunch(sum, src device.Range) device.Launch {
	mustAlign("a checksum", sum, checksumBytes)
	mustHold("a checksum", sum, checksumBytes)
	blocks := min(blocksFor(src.Len, moveChunk, src), checksumBlocks)
	l := device.NewLaunch(&checksumKernel, blocks, checksumThreads)
	l.Atomic(sum.Slice(0, checksumBytes))
	l.Read(src)
	l.Arg(uint64(src.Len))
	return l
}

// PutChecksum sets the eight bytes at sum to the [Checksum] of src: it clears them
// and issues [ChecksumLaunch].
func PutChecksum(s device.Stream, sum, src device.Range) {
	l := ChecksumLaunch(sum, src)
	s.Fill(sum.Slice(0, checksumBytes), 0)
	s.Launch(l)
}

func checksumGo(l *device.Launch) {
	a := l.Args()
	sum := &device.Slice[uint64](a[0], 1)[0]
	atomic.AddUint64(sum, Checksum(device.Slice[byte](a[1], int(a[2]))))
}

// Checksum finds corruption, by accident and not by design. The n bytes are read
// as words of eight, the least significant byte first, the last one filled up
// with zeros; one more word holds n. The checksum is the sum over all words of
//
//	mix(word i + (i+1) golden), modulo 2^64
//
// with mix the bijection below. So a change of any one word always changes the
// sum, and where a word stands counts; and as a sum it does not depend on the
// order in which a GPU adds it up.
func Checksum(b []byte) uint64 {
	n := uint64(len(b))
	var sum, step uint64
	for len(b) >= 8 {
		step += golden
		sum += mix(binary.LittleEndian.Uint64(b) + step)
		b = b[8:]
	}
	if len(b) > 0 {
		var last [8]byte
		copy(last[:], b)
		step += golden
		sum += mix(binary.LittleEndian.Uint64(last[:]) + step)
	}
	return sum + mix(n+step+golden)
}

const golden = 0x9e3779b97f4a7c15 // 2^64 divided by the golden ratio, odd

// mix is the finisher of SplitMix64, which is a bijection.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
