// This file owns the tests of the checksum.

package kernels

import (
	"encoding/binary"
	"math/bits"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"pgregory.net/rapid"
)

// modelChecksum computes the definition, word by word.
func modelChecksum(b []byte) (sum uint64) {
	words := make([]uint64, (len(b)+7)/8, (len(b)+7)/8+1)
	for i, c := range b {
		words[i/8] += uint64(c) << (8 * (i % 8))
	}
	words = append(words, uint64(len(b)))
	for i, w := range words {
		x := w + uint64(i+1)*11400714819323198485
		x = (x ^ x/(1<<30)) * 13787848793156543929
		x = (x ^ x/(1<<27)) * 10723151780598845931
		sum += x ^ x/(1<<31)
	}
	return sum
}

// Go and the device compute the same checksum for every alignment and grid, and sums add
// up.
func TestChecksumKernel(t *testing.T) {
	each(t, func(t *testing.T, x *lab) {
		sum := x.buf[memory.Device][0]
		data := noise(room, 7)
		for _, bs := range x.buf {
			x.Upload(bs[1].All(), data)
		}
		rapid.Check(t, func(t *rapid.T) {
			src := x.buf[rapid.IntRange(0, 1).Draw(t, "from")][1]
			n, at := length(70000).Draw(t, "length"), start().Draw(t, "src")
			first := rapid.Uint64().Draw(t, "sum so far")
			before := noise(room, 8)
			binary.LittleEndian.PutUint64(before[64:], first)
			x.Upload(sum.All(), before)
			l := ChecksumLaunch(sum.Slice(64, 8), src.Slice(memory.Bytes(at), memory.Bytes(n)))
			grid(t, &l)
			x.Launch(l)
			binary.LittleEndian.PutUint64(before[64:], first+modelChecksum(data[at:at+n]))
			x.want(t, sum, before)
		})
	})
}

func TestPutChecksum(t *testing.T) {
	each(t, func(t *testing.T, x *lab) {
		sum, src := x.buf[memory.Device][0], x.buf[memory.Device][1]
		data, want := noise(room, 9), noise(room, 10)
		x.Upload(src.All(), data)
		x.Upload(sum.All(), want)
		for range 2 { // the second must not see the first
			PutChecksum(x.Stream, sum.Slice(8, 8), src.Slice(5, 50000))
		}
		binary.LittleEndian.PutUint64(want[8:], modelChecksum(data[5:50005]))
		x.want(t, sum, want)
	})
}

// These values were computed once by other means than this package. They must never change,
// because checksums may be stored.
func TestChecksumValues(t *testing.T) {
	for _, c := range []struct {
		data string
		want uint64
	}{
		{"", 0xe220a8397b1dcdaf}, // SplitMix64's first number of the seed 0: mix(golden)
		{"\x00", 0xa10c35dae0acba16},
		{"stowage!", 0xc2a25e2b2f9ebc01},
		{"stowage keeps activations", 0x778bbefe5aa53fc0},
	} {
		if got := Checksum([]byte(c.data)); got != c.want {
			t.Errorf("checksum of %q is %#x, want %#x", c.data, got, c.want)
		}
	}
}

// The checksum shows any flipped bit, any two different words that change places, and any
// zero bytes at the end.
func TestChecksumSensitivity(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		data := rapid.SliceOfN(rapid.Byte(), 1, 100).Draw(t, "data")
		sum := Checksum(data)
		i := rapid.IntRange(0, 8*len(data)-1).Draw(t, "bit")
		data[i/8] ^= 1 << (i % 8)
		if Checksum(data) == sum {
			t.Fatalf("bit %d does not count", i)
		}
		data[i/8] ^= 1 << (i % 8)
		if Checksum(append(data, 0)) == sum {
			t.Fatal("a zero at the end does not count")
		}
		words := len(data) / 8
		if words < 2 {
			return
		}
		j, k := rapid.IntRange(0, words-1).Draw(t, "word"), rapid.IntRange(0, words-1).Draw(t, "other word")
		a, b := binary.LittleEndian.Uint64(data[8*j:]), binary.LittleEndian.Uint64(data[8*k:])
		binary.LittleEndian.PutUint64(data[8*j:], b)
		binary.LittleEndian.PutUint64(data[8*k:], a)
		if a != b && Checksum(data) == sum {
			t.Fatalf("words %d and %d may change places", j, k)
		}
	})
}

// Flipping a bit of the data flips half of the sum's bits. That is 32 on average with a
// deviation of 4, so the mean of 4096 samples deviates by 1/16.
func TestChecksumAvalanche(t *testing.T) {
	data := noise(512, 11)
	sum, flipped := Checksum(data), 0
	for i := range 4096 {
		data[i/8] ^= 1 << (i % 8)
		flipped += bits.OnesCount64(Checksum(data) ^ sum)
		data[i/8] ^= 1 << (i % 8)
	}
	if mean := float64(flipped) / 4096; mean < 31.5 || mean > 32.5 {
		t.Errorf("a flipped bit changes %.2f bits of 64 on average", mean)
	}
}

func FuzzChecksum(f *testing.F) {
	f.Add([]byte("stowage"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if got, want := Checksum(data), modelChecksum(data); got != want {
			t.Fatalf("checksum %#x, want %#x", got, want)
		}
	})
}

func BenchmarkChecksum(b *testing.B) {
	data := noise(memory.MiB, 12)
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		Checksum(data)
	}
}
