// This file owns the checksum kernel and the definition of the checksum.

package kernels

import (
	_ "embed"
	"encoding/binary"
	"sync/atomic"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

//go:embed checksum_sm80.ptx
var checksumPTX string

var checksumKernel = device.Kernel{Name: "stowage_checksum", Image: image("checksum.cu", checksumPTX), Go: checksumGo}

const (
	checksumBytes = memory.Bytes(8)
	// 12 blocks for each of the 132 multiprocessors of an H200 read at 4.4 TB/s;
	// 8 or 16 are 2 to 4 % slower.
	checksumThreads = 256
	checksumBlocks  = 12 * 132
)

// ChecksumLaunch returns a launch that adds the [Checksum] of src, of any length and
// alignment, to the eight bytes at sum. Set them to zero first. Launches may add the
// checksums of several ranges to the same sum, in any order or at the same time.
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

// PutChecksum sets the eight bytes at sum to the [Checksum] of src. It clears them and
// issues [ChecksumLaunch].
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

// Checksum returns a checksum that detects accidental corruption, not deliberate. It
// reads the n bytes as words of eight, the least significant byte first, and fills the
// last one up with zeros. One more word holds n. The checksum is the sum over all words
// of
//
//	mix(word i + (i+1) golden), modulo 2^64
//
// where mix is the bijection below. A change of any one word always changes the sum, and
// so does exchanging words. A sum does not depend on the order in which a GPU adds it up.
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

// mix is the finaliser of SplitMix64, which is a bijection.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
