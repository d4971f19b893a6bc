// This file owns the running of matrix products and attention as they are written for
// GPUs without one: compiled for the host, where testdata has the instructions.

package nn

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/ptx"
	"github.com/stowage-dev/stowage/kernels"
)

// tensorProgram is a source compiled for the host, and its entries in order.
type tensorProgram struct {
	path    string
	entries []string
}

// newTensorProgram compiles a source. Loops are not unrolled: it takes long and
// changes nothing.
func newTensorProgram(t testing.TB, source, compiled string) *tensorProgram {
	t.Helper()
	_, err := ptx.Find()
	var missing *device.Unsupported
	if errors.As(err, &missing) {
		t.Skip(err)
	}
	p := &tensorProgram{path: filepath.Join(t.TempDir(), "program")}
	dir := filepath.Dir(p.path)
	var table bytes.Buffer
	table.WriteString("\nEntry host_entries[] = {")
	for _, e := range ptx.Entries(compiled) {
		p.entries = append(p.entries, e.Name)
		// Entries have 16 parameters for the caller, whatever they take.
		table.WriteString("(Entry)(void *)" + e.Name + ",")
	}
	table.WriteString("};\n")
	headers, err := filepath.Glob("*.cuh")
	if err != nil {
		t.Fatal(err)
	}
	unroll := regexp.MustCompile(`#pragma unroll.*`)
	for _, name := range append(headers, source) {
		from := name
		switch name {
		case "words.cuh":
			from = "testdata/host.cuh"
		case "tensor.cuh":
			from = "testdata/tensor.cuh"
		}
		text, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		text = unroll.ReplaceAll(text, nil)
		if name == source {
			name, text = "source.cc", append(text, table.Bytes()...)
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("clang-19", "-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "source.cc", "-lm", "-o", p.path)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		if strings.Contains(string(out), "file not found") {
			t.Skipf("clang-19 cannot make programs for this machine: %s", out)
		}
		t.Fatalf("%v\n%s", err, out)
	}
	return p
}

// run does launches on a memory that they take to begin at from, and gives what they
// make of it.
func (p *tensorProgram) run(t testing.TB, memory []byte, from uintptr, launches ...device.Launch) []byte {
	t.Helper()
	var in bytes.Buffer
	word := func(v uint64) { in.Write(binary.LittleEndian.AppendUint64(nil, v)) }
	word(uint64(len(memory)))
	word(uint64(from))
	word(uint64(len(launches)))
	for _, l := range launches {
		entry := slices.Index(p.entries, l.Kernel.Name)
		if entry < 0 {
			t.Fatalf("%s is no entry of the program", l.Kernel.Name)
		}
		word(uint64(entry))
		word(uint64(l.Grid[0]))
		word(uint64(l.Block[0]) | uint64(l.Shared)<<32)
		for i := range 16 {
			if i < len(l.Args()) {
				word(l.Args()[i])
			} else {
				word(0)
			}
		}
	}
	in.Write(memory)
	cmd := exec.Command(p.path)
	var out, complaints bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = &in, &out, &complaints
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s: %v %s", launches[0].Kernel.Name, err, complaints.String())
	}
	if out.Len() != len(memory) {
		t.Fatalf("%d bytes came back of %d", out.Len(), len(memory))
	}
	return out.Bytes()
}

// tensorMemory is memory in which matrices lie, for twins and for programs of the host.
type tensorMemory struct {
	bytes []byte
	buf   *device.Buffer
	end   device.Bytes
}

func newTensorMemory(t testing.TB, size int) *tensorMemory {
	m := &tensorMemory{bytes: make([]byte, size)}
	var pin runtime.Pinner
	pin.Pin(&m.bytes[0])
	t.Cleanup(pin.Unpin)
	m.buf = device.NewBuffer(device.Accel, m.from(), device.Bytes(size), device.Bytes(size), "test")
	return m
}

func (m *tensorMemory) from() uintptr { return uintptr(unsafe.Pointer(&m.bytes[0])) }

// matrix is room for a matrix with a pitch. With even all rows begin at multiples of
// 16 bytes, otherwise only where numbers may.
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
	x.Range = m.buf.Slice(m.end, size*device.Bytes((rows-1)*pitch+cols))
	m.end += x.Range.Len
	return x
}

// fill writes numbers all over the memory: normal ones as fp32 or, on the whole range
// of a matrix of that type, as bf16.
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

// compare fails unless two memories are alike: within the tolerance, times one plus
// the number itself, in the matrices, and equal elsewhere.
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
