// This file owns the equipment of the tests of products and attention for GPUs: cases in
// memory, which the compiled source or a GPU executes, and then the twin.

package nn

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"runtime"
	"testing"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// tensorCase has launches on a memory, and the place of their results.
type tensorCase struct {
	name      string
	memory    *tensorMemory
	launches  func(b *device.Buffer) []device.Launch // on another buffer with the same bytes
	results   []Matrix
	scratch   []Matrix // of which the kernels may leave anything
	tolerance float64
}

// inBuffer returns the matrix at the same place of another buffer.
func (m Matrix) inBuffer(b *device.Buffer) Matrix {
	if m.Buf != nil {
		m.Range = b.Slice(m.Off, m.Len)
	}
	return m
}

func (s Segments) inBuffer(b *device.Buffer) Segments {
	s.Range = b.Slice(s.Off, s.Len)
	return s
}

// check executes the twins and compares.
func (c *tensorCase) check(t testing.TB, got []byte) {
	t.Helper()
	for _, l := range c.launches(c.memory.buf) {
		l.Kernel.Go(&l)
	}
	for _, x := range c.scratch {
		copy(got[x.Off:x.Off+x.Len], c.memory.bytes[x.Off:])
	}
	c.memory.compare(t, c.name, got, c.tolerance, c.results...)
}

// trim removes the memory behind the last matrix, except for a little that nobody may
// write.
func (m *tensorMemory) trim() { m.bytes = m.bytes[:min(len(m.bytes), int(m.end)+64)] }

// onHost runs the case in a program of the host, with any grid.
func (c *tensorCase) onHost(t testing.TB, p *tensorProgram) {
	t.Helper()
	c.memory.trim()
	launches := c.launches(c.memory.buf)
	for i := range launches {
		launches[i].Grid[0] = min(launches[i].Grid[0], uint32(2+i%4))
		launches[i].Tuned = device.Tuned{}
	}
	c.check(t, p.run(t, c.memory.bytes, c.memory.from(), launches...))
}

// tunedOnHost does the same for the tuned kernels, with any grid if blocks are resident. It
// reports whether the case has tuned kernels.
func (c *tensorCase) tunedOnHost(t testing.TB, p *tensorProgram) bool {
	t.Helper()
	c.memory.trim()
	launches := c.launches(c.memory.buf)
	for i := range launches {
		l := &launches[i]
		if l.Tuned.Kernel == nil {
			return false
		}
		l.Kernel, l.Grid, l.Block, l.Shared = l.Tuned.Kernel, l.Tuned.Grid, l.Tuned.Block, l.Tuned.Shared
		if l.Tuned.Resident {
			l.Grid[0] = min(l.Grid[0], uint32(1+i%4)*max(l.Tuned.Cluster, 1))
		}
	}
	c.check(t, p.run(t, c.memory.bytes, c.memory.from(), launches...))
	return true
}

// plain returns the case without tuned kernels.
func (c *tensorCase) plain() *tensorCase {
	p := *c
	p.launches = func(b *device.Buffer) []device.Launch {
		launches := c.launches(b)
		for i := range launches {
			launches[i].Tuned = device.Tuned{}
		}
		return launches
	}
	return &p
}

// tensorGPU is a GPU with a stream.
type tensorGPU struct {
	device.Device
	device.Stream
}

func newTensorGPU(t testing.TB) *tensorGPU {
	t.Helper()
	d, err := cuda.Open(cuda.Options{CopyKernel: kernels.GraphCopy})
	var missing *device.Unsupported
	if errors.As(err, &missing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.NewStream("test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(s.Close(), d.Close()); err != nil {
			t.Error(err)
		}
	})
	return &tensorGPU{d, s}
}

func (g *tensorGPU) alloc(t testing.TB, n memory.Bytes) *device.Buffer {
	t.Helper()
	b, err := g.Device.Alloc(memory.Device, n, "test")
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// onceOnGPU returns the memory after a run on a GPU.
func (c *tensorCase) onceOnGPU(t testing.TB, g *tensorGPU) []byte {
	t.Helper()
	c.memory.trim()
	b := g.alloc(t, memory.Bytes(len(c.memory.bytes)))
	defer g.Free(b)
	got := make([]byte, len(c.memory.bytes))
	g.Upload(b.All(), c.memory.bytes)
	for _, l := range c.launches(b) {
		g.Launch(l)
	}
	if err := g.Download(got, b.All()); err != nil {
		t.Fatalf("%s: %v", c.name, err)
	}
	return got
}

// onGPU runs the case on a GPU twice. The bits must be the same.
func (c *tensorCase) onGPU(t testing.TB, g *tensorGPU) {
	t.Helper()
	got := c.onceOnGPU(t, g)
	if !bytes.Equal(got, c.onceOnGPU(t, g)) {
		t.Errorf("%s: two runs differ", c.name)
	}
	c.check(t, got)
}

// tensorMemory is memory with matrices in it, for twins and for programs of the host.
type tensorMemory struct {
	bytes []byte
	buf   *device.Buffer
	end   memory.Bytes
}

func newTensorMemory(t testing.TB, size int) *tensorMemory {
	m := &tensorMemory{bytes: make([]byte, size)}
	var pin runtime.Pinner
	pin.Pin(&m.bytes[0])
	t.Cleanup(pin.Unpin)
	m.buf = device.NewBuffer(memory.Device, m.from(), memory.Bytes(size), memory.Bytes(size), "test")
	return m
}

func (m *tensorMemory) from() uintptr { return uintptr(unsafe.Pointer(&m.bytes[0])) }

// matrix returns memory for a matrix with a pitch. If even is set, all rows begin at
// multiples of 16 bytes; otherwise they begin anywhere that numbers may.
func (m *tensorMemory) matrix(kind kernels.Number, rows, cols, spare int, even bool) Matrix {
	size := kind.Size()
	pitch := cols + spare
	m.end = (m.end+15)/16*16 + 16
	if even {
		pitch = (pitch + 7) / 8 * 8
	} else {
		m.end += size
	}
	x := Matrix{Type: kind, Rows: rows, Cols: cols, Pitch: pitch}
	x.Range = m.buf.Slice(m.end, size*memory.Bytes((rows-1)*pitch+cols))
	m.end += x.Range.Len
	return x
}

// fill writes numbers to the whole memory: normal fp32 numbers, and bf16 in the range of
// a matrix of that type.
func (m *tensorMemory) fill(rng *rand.Rand, ms ...Matrix) {
	for _, x := range ms {
		for i := range int(x.Range.Len / x.Type.Size()) {
			v := math.Float32bits(float32(rng.NormFloat64()))
			at := m.bytes[int(x.Range.Off)+i*int(x.Type.Size()):]
			if x.Type == kernels.F32 {
				binary.LittleEndian.PutUint32(at, v)
			} else {
				binary.LittleEndian.PutUint16(at, uint16(v>>16))
			}
		}
	}
}

// compare fails unless two memories agree. Numbers in matrices may differ by the
// tolerance times one plus the number; all other bytes must be equal.
func (m *tensorMemory) compare(t testing.TB, what string, got []byte, tolerance float64, ms ...Matrix) {
	t.Helper()
	want := bytes.Clone(m.bytes)
	for k, x := range ms {
		size := int(x.Type.Size())
		for i := range x.Rows * x.Cols {
			off := int(x.Range.Off) + (i/x.Cols*x.pitch()+i%x.Cols)*size
			a, b := hostNumber(got[off:], size), hostNumber(want[off:], size)
			if !(math.Abs(a-b) <= tolerance*(1+math.Abs(b))) {
				t.Fatalf("%s: matrix %d has %g at (%d, %d), want %g", what, k, a, i/x.Cols, i%x.Cols, b)
			}
			copy(got[off:off+size], want[off:])
		}
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("%s: bytes outside of the results were written", what)
	}
}

func hostNumber(b []byte, size int) float64 {
	if size == 2 {
		return float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(b)) << 16))
	}
	return float64(math.Float32frombits(binary.LittleEndian.Uint32(b)))
}
