// This file owns what the tests of the kernels share: a device with two buffers, the plain
// models, and random sizes. Every test runs on the CPU device, and on a GPU if there is
// one.

package kernels

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/memory"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(os.Exit))
}

// lab is a device with a stream and room of both kinds.
type lab struct {
	device.Device
	device.Stream
	t   *testing.T
	buf [memory.Kinds][2]*device.Buffer
}

const room = 96 * memory.KiB

// each runs a test on every available device. Closing the device at the end checks that all
// memory was freed.
func each(t *testing.T, test func(t *testing.T, x *lab)) {
	t.Run("cpu", func(t *testing.T) {
		d, err := cpu.Open(cpu.Options{})
		if err != nil {
			t.Fatal(err)
		}
		test(t, newLab(t, d))
	})
	t.Run("cuda", func(t *testing.T) {
		d, err := cuda.Open(cuda.Options{CopyKernel: GraphCopy})
		var missing *device.Unsupported
		if errors.As(err, &missing) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		test(t, newLab(t, d))
	})
}

func newLab(t *testing.T, d device.Device) *lab {
	t.Helper()
	s, err := d.NewStream("test")
	if err != nil {
		t.Fatal(err)
	}
	x := &lab{Device: d, Stream: s, t: t}
	for kind := range x.buf {
		for i := range x.buf[kind] {
			x.buf[kind][i] = x.alloc(memory.Kind(kind), room)
		}
	}
	t.Cleanup(func() {
		for _, bs := range x.buf {
			s.Free(bs[0])
			s.Free(bs[1])
		}
		if err := errors.Join(s.Close(), d.Close()); err != nil {
			t.Error(err)
		}
	})
	return x
}

func (x *lab) alloc(kind memory.Kind, size memory.Bytes) *device.Buffer {
	x.t.Helper()
	b, err := x.Device.Alloc(kind, size, "test")
	if err != nil {
		x.t.Fatal(err)
	}
	return b
}

// get reads a whole buffer after the stream's work is done.
func (x *lab) get(b *device.Buffer) []byte {
	x.t.Helper()
	got := make([]byte, b.Size())
	if err := x.Download(got, b.All()); err != nil {
		x.t.Fatal(err)
	}
	return got
}

// fails is the part of a test or of a property that reports failures.
type fails interface {
	Helper()
	Fatalf(format string, args ...any)
}

// want compares a whole buffer, so a byte written outside of a range fails as well.
func (x *lab) want(t fails, b *device.Buffer, want []byte) {
	t.Helper()
	got := x.get(b)
	if bytes.Equal(got, want) {
		return
	}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("byte %d of %v is %#x, want %#x", i, b, got[i], want[i])
		}
	}
	t.Fatalf("%v gives %d bytes, want %d", b, len(got), len(want))
}

// noise returns n bytes that are equal only by chance.
func noise(n memory.Bytes, seed uint64) []byte {
	b := make([]byte, n)
	c := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16), byte(seed >> 24)})
	if _, err := c.Read(b); err != nil {
		panic(err)
	}
	return b
}

// edges are lengths around which the kernels change their method: vectors, two vectors,
// chunks of 4 KiB, and several of them.
var edges = []int{0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 4080, 4095, 4096, 4097, 4112, 8191, 8192, 8209, 65535, 65536}

func length(most int) *rapid.Generator[int] {
	return rapid.OneOf(rapid.SampledFrom(edges), rapid.IntRange(0, 200), rapid.IntRange(0, most))
}

// start draws an offset with any alignment.
func start() *rapid.Generator[int] { return rapid.IntRange(0, 40) }

// grid sets any number of blocks, because a kernel is right with each of them.
func grid(t *rapid.T, l *device.Launch) {
	if n := rapid.IntRange(0, 5).Draw(t, "blocks"); n > 0 {
		l.Grid[0] = uint32(n)
	}
}
