// This file owns the tests of the launches themselves: what they declare, what
// they refuse, and that they allocate nothing.

package kernels

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

// rangeOf makes Go memory look like a device's, for kernels that are run without
// one.
func rangeOf(t testing.TB, b []byte, off, n int) device.Range {
	var pin runtime.Pinner
	p := unsafe.SliceData(b)
	if len(b) > 0 {
		pin.Pin(p)
		t.Cleanup(pin.Unpin)
	}
	size := memory.Bytes(len(b))
	return device.NewBuffer(memory.Device, uintptr(unsafe.Pointer(p)), size, size, "go").Slice(memory.Bytes(off), memory.Bytes(n))
}

// run does a launch's work at once.
func run(l device.Launch) { l.Kernel.Go(&l) }

// everyLaunch returns one launch of each kernel on two buffers of room bytes.
func everyLaunch(a, b *device.Buffer) map[string]func() device.Launch {
	many := make([]device.Range, MaxReduceSources)
	for i := range many {
		many[i] = b.Slice(memory.Bytes(2*i), 1000)
	}
	rest := ReduceRest(many...)
	return map[string]func() device.Launch{
		"reduce f32": func() device.Launch {
			return ReduceLaunch(Reduction{Dst: a.Slice(4, 1000)}, b.Slice(8, 1000), b.Slice(2000, 1000))
		},
		"reduce bf16": func() device.Launch {
			return ReduceLaunch(Reduction{From: BF16, To: BF16, Dst: a.Slice(6, 1000), Rest: rest}, many...)
		},
		"convert to bf16": func() device.Launch { return ConvertLaunch(a.Slice(2, 500), BF16, b.Slice(4, 1000), F32) },
		"add to f32": func() device.Launch {
			return ReduceLaunch(Reduction{From: BF16, Dst: a.Slice(4, 1000), Acc: a.Slice(4, 1000)}, b.Slice(2, 500))
		},
		"copy":     func() device.Launch { return CopyLaunch(a.Slice(3, 5000), b.Slice(8, 5000)) },
		"fill":     func() device.Launch { return FillLaunch(a.Slice(3, 5000), 1) },
		"checksum": func() device.Launch { return ChecksumLaunch(a.Slice(8, 100), b.Slice(8, 5000)) },
		"mark":     func() device.Launch { return MarkLaunch(a.Slice(8, 100)) },
		"wait":     func() device.Launch { return WaitLaunch(a.Slice(8, 100), 1) },
		"noise":    func() device.Launch { return NoiseLaunch(a.Slice(16, 5001), b.Slice(8, 100), 3) },
	}
}

// A launch declares exactly the bytes that its kernel touches. SPEC S6.2
func TestDeclarations(t *testing.T) {
	a := device.NewBuffer(memory.Device, 1<<20, room, room, "a")
	b := device.NewBuffer(memory.Device, 1<<30, room, room, "b")
	want := map[string]string{
		"copy":       "write a 3+5000, read b 8+5000",
		"fill":       "write a 3+5000",
		"checksum":   "atomic access a 8+8, read b 8+5000",
		"mark":       "write a 8+16",
		"wait":       "write a 8+16",
		"noise":      "write a 16+5001, read b 8+8",
		"reduce f32": "write a 4+1000, read b 8+1000, read b 2000+1000",
		"reduce bf16": "write a 6+1000, read b 0+1000, read b 2+1000, read b 4+1000, read b 6+1000, read b 8+1000, read b 10+1000, " +
			"read b 12+1000, read b 14+1000, read b 16+1000, read b 18+1000, read b 20+1000, read b 22+1000",
		"convert to bf16": "write a 2+500, read b 4+1000",
		"add to f32":      "write a 4+1000, read a 4+1000, read b 2+500",
	}
	for name, launch := range everyLaunch(a, b) {
		l := launch()
		var got []string
		for a := range l.Accesses {
			got = append(got, fmt.Sprintf("%v %s %d+%d", a.Mode, a.Buf.Owner(), a.Off, a.Len))
		}
		if s := strings.Join(got, ", "); s != want[name] {
			t.Errorf("%s declares %q, want %q", name, s, want[name])
		}
	}
}

// A launch on the CPU device leaves the Go heap alone. SPEC S6.3
func TestLaunchesAllocateNothing(t *testing.T) {
	d, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	x := newLab(t, d)
	a, b := x.buf[memory.Device][0], x.buf[memory.Device][1]
	x.Stream.Fill(b.All(), 0)
	for name, launch := range everyLaunch(a, b) {
		issue := func() {
			x.Launch(launch())
			if err := x.Stream.Sync(); err != nil {
				t.Fatal(err)
			}
		}
		issue()
		if n := testing.AllocsPerRun(50, issue); n != 0 {
			t.Errorf("%s allocates %v times a launch", name, n)
		}
	}
	Copy(x.Stream, a.All(), b.All())
	issue := func() { Copy(x.Stream, a.All(), b.All()); _ = x.Stream.Sync() }
	if n := testing.AllocsPerRun(20, issue); n != 0 {
		t.Errorf("Copy allocates %v times", n)
	}
}

// Blocks cover all bytes, and copies over the link leave room for compute.
func TestGrids(t *testing.T) {
	accel := device.NewBuffer(memory.Device, 1<<40, memory.GiB, memory.GiB, "a")
	host := device.NewBuffer(memory.Host, 1<<41, memory.GiB, memory.GiB, "h")
	for _, c := range []struct {
		l    device.Launch
		want uint32
	}{
		{CopyLaunch(accel.Slice(0, 0), host.Slice(0, 0)), 1},
		{FillLaunch(accel.Slice(0, 4096), 0), 1},
		{FillLaunch(accel.Slice(0, 4097), 0), 2},
		{FillLaunch(accel.All(), 0), 1 << 18},
		{CopyLaunch(accel.All(), host.All()), linkBlocks},
		{CopyLaunch(host.Slice(0, 8192), accel.Slice(0, 8192)), 2},
		{ConvertLaunch(accel.Slice(0, 1<<20), F32, accel.Slice(1<<20, 1<<19), BF16), 1 << 18 / (reduceThreads * 8)},
		{ConvertLaunch(accel.Slice(1<<20, 1<<19), BF16, accel.Slice(0, 1<<20), F32), 1 << 18 / (reduceThreads * 8)},
		{ConvertLaunch(accel.Slice(0, 1<<20), F32, accel.Slice(1<<20, 1<<20), F32), 1 << 18 / (reduceThreads * 4)},
	} {
		if c.l.Grid != [3]uint32{c.want, 1, 1} {
			t.Errorf("%s of %d bytes: grid %v, want %d blocks", c.l.Kernel.Name, c.l.Args()[1], c.l.Grid, c.want)
		}
	}
}

func TestProgrammersErrorsPanic(t *testing.T) {
	a := device.NewBuffer(memory.Device, 1<<20, room, room, "a")
	b := device.NewBuffer(memory.Device, 1<<30, room, room, "b")
	for want, f := range map[string]func(){
		"lengths differ": func() { CopyLaunch(a.Slice(0, 1), b.Slice(0, 2)) },
		"they overlap":   func() { CopyLaunch(a.Slice(0, 10), a.Slice(9, 10)) },
		"expected a checksum at a multiple of 8 bytes, got bytes [4,12)": func() { ChecksumLaunch(a.Slice(4, 8), b.All()) },
		"expected at least 8 bytes for a checksum":                       func() { ChecksumLaunch(a.Slice(0, 7), b.All()) },
		"expected a clock at a multiple of 8 bytes, got bytes [4,20)":    func() { MarkLaunch(a.Slice(4, 16)) },
		"expected at least 16 bytes for a clock, got bytes [0,15)":       func() { WaitLaunch(a.Slice(0, 15), 0) },
		"expected noise at a multiple of 16 bytes, got bytes [8,16)":     func() { NoiseLaunch(a.Slice(8, 8), b.All(), 0) },
		"expected a seed at a multiple of 8 bytes, got bytes [4,12)":     func() { NoiseLaunch(a.All(), b.Slice(4, 8), 0) },
		"got 0 sources":  func() { ReduceLaunch(Reduction{Dst: a.All()}) },
		"got 13 sources": func() { ReduceLaunch(Reduction{Dst: a.All()}, make([]device.Range, 13)...) },
		"expected F32 or BF16, got number format 2":                                          func() { ConvertLaunch(a.All(), 2, b.All(), F32) },
		"expected 12 bytes for the destination of a reduction":                               func() { ConvertLaunch(a.Slice(0, 15), F32, b.Slice(0, 15), F32) },
		"expected 8 bytes for a source of a reduction":                                       func() { ConvertLaunch(a.Slice(0, 16), F32, b.Slice(0, 16), BF16) },
		"expected the destination of a reduction at a multiple of 4 bytes, got bytes [2,18)": func() { ConvertLaunch(a.Slice(2, 16), F32, b.Slice(0, 16), F32) },
		"expected a source of a reduction at a multiple of 4 bytes, got bytes [2,18)":        func() { ConvertLaunch(a.Slice(0, 16), F32, b.Slice(2, 16), F32) },
		"expected 16 bytes for the accumulator of a reduction, got bytes [0,8)": func() {
			ReduceLaunch(Reduction{Dst: a.Slice(0, 16), Acc: b.Slice(0, 8)}, b.Slice(0, 16))
		},
	} {
		func() {
			defer func() {
				if p := fmt.Sprint(recover()); !strings.Contains(p, want) {
					t.Errorf("panic %q, want one with %q", p, want)
				}
			}()
			f()
		}()
	}
}

// allKernels returns the kernels that have an image.
func allKernels() []*device.Kernel {
	return []*device.Kernel{
		&copyKernel, &fillKernel, &checksumKernel, &markKernel, &waitKernel, &noiseKernel,
		&reduceKernels[F32][F32], &reduceKernels[F32][BF16], &reduceKernels[BF16][F32], &reduceKernels[BF16][BF16],
	}
}

// Each kernel has both of its forms, and no two share a name.
func TestKernelsAreComplete(t *testing.T) {
	var names []string
	for _, k := range allKernels() {
		if k.Go == nil || k.Image == nil || len(k.Image.Variants) == 0 {
			t.Errorf("%s lacks one of its forms", k.Name)
		}
		if slices.Contains(names, k.Name) {
			t.Errorf("two kernels are called %s", k.Name)
		}
		names = append(names, k.Name)
	}
}
