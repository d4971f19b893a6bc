// This file owns the yard in which the kernels of routing and rows are tested: a
// stream that works at once and proves of every launch that it uses no byte that it
// has not declared.

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

// failing is the failing of a test or of a property.
type failing interface {
	Helper()
	Fatalf(format string, args ...any)
}

// yard is memory from which ranges are cut one after the other, with gaps between
// them, and a stream.
type yard struct {
	device.Stream // no stream: only Launch and Fill are there
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

// take is room for n numbers with an address that is a multiple of their size alone.
func take[T any](y *yard, n int) device.Range {
	var x T
	size := memory.Bytes(unsafe.Sizeof(x))
	y.end = (y.end/64+1)*64 + memory.Bytes(y.rng.IntN(8))*size
	r := y.buf.Slice(y.end, size*memory.Bytes(n))
	y.end += r.Len
	return r
}

// at are the numbers of a range.
func at[T any](r device.Range) []T {
	var x T
	return device.Slice[T](uint64(r.Addr()), int(r.Len)/int(unsafe.Sizeof(x)))
}

func put[T any](y *yard, v []T) device.Range {
	r := take[T](y, len(v))
	copy(at[T](r), v)
	return r
}

// matrix is room for rows, now and then with a pitch.
func (y *yard) matrix(kind kernels.Number, rows, cols int) Matrix {
	pitch := cols + y.rng.IntN(2)*y.rng.IntN(5)
	n := (rows-1)*pitch + cols
	m := Matrix{Type: kind, Rows: rows, Cols: cols, Pitch: pitch}
	if kind == kernels.F32 {
		m.Range = take[float32](y, n)
	} else {
		m.Range = take[uint16](y, n)
	}
	return m
}

// number is where a number of a matrix lies.
func (m Matrix) number(row, col int) int { return row*m.pitch() + col }

func (m Matrix) get(row, col int) float32 {
	if m.Type == kernels.F32 {
		return at[float32](m.Range)[m.number(row, col)]
	}
	return math.Float32frombits(uint32(at[uint16](m.Range)[m.number(row, col)]) << 16)
}

func (m Matrix) set(row, col int, v float32) {
	if m.Type == kernels.F32 {
		at[float32](m.Range)[m.number(row, col)] = v
	} else {
		at[uint16](m.Range)[m.number(row, col)] = uint16(math.Float32bits(stored(m.Type, v)) >> 16)
	}
}

// stored is what becomes of a number that is stored: bf16 is rounded to the closer
// of its neighbours, of two the even one.
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
	for i := range at[byte](r) {
		at[byte](r)[i] = value
	}
}

// Launch does the work twice, the second time with other bytes wherever the launch
// declares nothing. What it writes must be the same, and the rest untouched.
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
	from, to := take[uint32](y, 4), take[uint32](y, 4)
	for name, work := range map[string]func(l *device.Launch){
		"a read":  func(l *device.Launch) { at[uint32](to)[0] = at[uint32](from)[0] },
		"a write": func(l *device.Launch) { at[uint32](from)[0]++ },
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

// fails is a test that has failed or not.
type fails bool

func (f *fails) Helper()               {}
func (f *fails) Fatalf(string, ...any) { *f = true; panic("failed") }

// threads runs f with several numbers of threads and compares what it gives.
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

// checked is a stream of a CPU device that is watched for races.
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
