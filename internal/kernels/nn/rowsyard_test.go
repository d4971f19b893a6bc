// This file owns the yard in which the kernels of routing and rows are tested: a stream
// that executes at once and checks that a launch uses only the bytes that it declares.

package nn

import (
	"bytes"
	"math"
	"math/rand/v2"
	"runtime"
	"testing"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// failing is a test or a property that can fail.
type failing interface {
	Helper()
	Fatalf(format string, args ...any)
}

// yard is a stream, and memory from which ranges are cut one after the other, with gaps.
type yard struct {
	device.Stream // nil: only Launch and Fill exist
	t             failing
	rng           *rand.Rand
	memory        []byte
	buf           *device.Buffer
	end           memory.Bytes
	strict        bool
}

func newYard(t testing.TB, size int) *yard {
	mem := make([]byte, size)
	var pin runtime.Pinner
	pin.Pin(&mem[0])
	t.Cleanup(pin.Unpin)
	n := memory.Bytes(size)
	y := &yard{t: t, memory: mem, strict: true, rng: rand.New(rand.NewPCG(1, 2))}
	y.buf = device.NewBuffer(memory.Device, uintptr(unsafe.Pointer(&mem[0])), n, n, "yard")
	if _, err := rand.NewChaCha8([32]byte{1}).Read(mem); err != nil {
		t.Fatal(err)
	}
	return y
}

// reset forgets all ranges.
func (y *yard) reset(t failing) { y.t, y.end = t, 0 }

// place returns memory for n numbers. Its address is a multiple of their size and of
// nothing larger.
func place[T any](y *yard, n int) device.Range {
	var x T
	size := memory.Bytes(unsafe.Sizeof(x))
	y.end = (y.end/64+1)*64 + memory.Bytes(y.rng.IntN(8))*size
	r := y.buf.Slice(y.end, size*memory.Bytes(n))
	y.end += r.Len
	return r
}

// numbersAt returns the numbers of a range.
func numbersAt[T any](r device.Range) []T {
	var x T
	return device.Slice[T](uint64(r.Addr()), int(r.Len)/int(unsafe.Sizeof(x)))
}

func put[T any](y *yard, v []T) device.Range {
	r := place[T](y, len(v))
	copy(numbersAt[T](r), v)
	return r
}

// matrix returns memory for rows, sometimes with a pitch.
func (y *yard) matrix(kind kernels.Number, rows, cols int) Matrix {
	pitch := cols + y.rng.IntN(2)*y.rng.IntN(5)
	n := (rows-1)*pitch + cols
	m := Matrix{Type: kind, Rows: rows, Cols: cols, Pitch: pitch}
	if kind == kernels.F32 {
		m.Range = place[float32](y, n)
	} else {
		m.Range = place[uint16](y, n)
	}
	return m
}

// number returns the index of a number of a matrix.
func (m Matrix) number(row, col int) int { return row*m.pitch() + col }

func (m Matrix) get(row, col int) float32 {
	if m.Type == kernels.F32 {
		return numbersAt[float32](m.Range)[m.number(row, col)]
	}
	return math.Float32frombits(uint32(numbersAt[uint16](m.Range)[m.number(row, col)]) << 16)
}

func (m Matrix) set(row, col int, v float32) {
	if m.Type == kernels.F32 {
		numbersAt[float32](m.Range)[m.number(row, col)] = v
	} else {
		numbersAt[uint16](m.Range)[m.number(row, col)] = uint16(math.Float32bits(stored(m.Type, v)) >> 16)
	}
}

// stored returns a number as it is stored: bf16 rounds to the nearest neighbour, ties to
// even.
func stored(kind kernels.Number, v float32) float32 {
	if kind == kernels.F32 {
		return v
	}
	low := math.Float32frombits(math.Float32bits(v) &^ 0xffff)
	high := math.Float32frombits(math.Float32bits(low) + 0x10000)
	down, up := math.Abs(float64(v)-float64(low)), math.Abs(float64(high)-float64(v))
	if down < up || down == up && math.Float32bits(low)>>16%2 == 0 {
		return low
	}
	return high
}

func (y *yard) fill(m Matrix, f func() float32) {
	for i := range m.Rows {
		for j := range m.Cols {
			m.set(i, j, f())
		}
	}
}

func (y *yard) Fill(r device.Range, value byte) {
	for i := range numbersAt[byte](r) {
		numbersAt[byte](r)[i] = value
	}
}

// Launch executes a launch twice, the second time with other bytes wherever the launch
// declares nothing. The launch must write the same bytes both times and leave the rest
// unchanged.
func (y *yard) Launch(l device.Launch) {
	l.Check()
	if !y.strict {
		l.Kernel.Go(&l)
		return
	}
	memory := y.memory[:min(len(y.memory), int(y.end)+256)] // all ranges, and some more
	mode := make([]device.Mode, len(memory))
	for a := range l.Accesses {
		for row := range a.Rows {
			r := a.Row(row)
			for i := range mode[r.Off : r.Off+r.Len] {
				mode[int(r.Off)+i] = max(mode[int(r.Off)+i], a.Mode)
			}
		}
	}
	before := bytes.Clone(memory)
	l.Kernel.Go(&l)
	for i, b := range memory {
		if b != before[i] && mode[i] != device.Write {
			y.t.Fatalf("%s wrote byte %d, which it does not declare", l.Kernel.Name, i)
		}
	}
	after := bytes.Clone(memory)
	for i, m := range mode {
		if memory[i] = before[i]; m == 0 {
			memory[i] ^= 0xa5
		}
	}
	l.Kernel.Go(&l)
	for i, b := range memory {
		if b != after[i] && mode[i] == device.Write {
			y.t.Fatalf("%s made byte %d of something that it does not declare", l.Kernel.Name, i)
		}
	}
	copy(memory, after)
}

// The yard notices kernels that read or write what they do not declare.
func TestYardNotices(t *testing.T) {
	y := newYard(t, 1<<12)
	y.strict = true
	from, to := place[uint32](y, 4), place[uint32](y, 4)
	for name, work := range map[string]func(l *device.Launch){
		"a read":  func(l *device.Launch) { numbersAt[uint32](to)[0] = numbersAt[uint32](from)[0] },
		"a write": func(l *device.Launch) { numbersAt[uint32](from)[0]++ },
	} {
		var f fails
		y.t = &f
		func() {
			defer func() { _ = recover() }()
			l := device.NewLaunch(&device.Kernel{Name: name, Go: work}, 1, 1)
			l.Write(to)
			y.Launch(l)
		}()
		if !f {
			t.Errorf("%s goes unnoticed", name)
		}
	}
}

// fails is a test that records whether it failed.
type fails bool

func (f *fails) Helper()               {}
func (f *fails) Fatalf(string, ...any) { *f = true; panic("failed") }

// threads runs f with several numbers of threads and compares the results.
func threads(t *testing.T, f func() []byte) {
	t.Helper()
	var first []byte
	for _, n := range []int{1, 2, 4} {
		before := runtime.GOMAXPROCS(n)
		got := f()
		runtime.GOMAXPROCS(before)
		if first == nil {
			first = got
		} else if !bytes.Equal(got, first) {
			t.Errorf("%d threads give other bytes than one", n)
		}
	}
}

// checked returns a stream of a CPU device under the race checker.
func checked(t testing.TB) (device.Device, device.Stream) {
	t.Helper()
	inner, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	d := check.New(check.Options{Report: func(err error) { t.Error(err) }}).Wrap(inner)
	s, err := d.NewStream("test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d, s
}
