// This file owns the check of the reduction's CUDA source without a GPU: compiled for the
// host, it must give the same bits as the twin.

package kernels

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/ptx"
	"github.com/stowage-dev/stowage/memory"
)

// Two loads and stores of two bytes are written in PTX; the rest of the source is
// plain C++.
var wordAccess = []struct{ ptx, host string }{
	{`asm volatile\("ld\.global\.cs\.u16[^;]*;[^;]*;`, "v = *host_at<u16>(p);"},
	{`asm volatile\("st\.global\.cs\.u16[^;]*;[^;]*;`, "*host_at<u16>(p) = v;"},
}

// hosted compiles reduce.cu into a program of the host.
func hosted(t *testing.T) string {
	t.Helper()
	_, err := ptx.Find()
	var missing *device.Unsupported
	if errors.As(err, &missing) {
		t.Skip(err)
	}
	src, err := os.ReadFile("reduce.cu")
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range wordAccess {
		re := regexp.MustCompile(a.ptx)
		if n := len(re.FindAll(src, -1)); n != 1 {
			t.Fatalf("reduce.cu has %d places like %s, want 1", n, a.ptx)
		}
		src = re.ReplaceAll(src, []byte(a.host))
	}
	src = append(src, "\nEntry host_entries[] = {stowage_reduce_f32, stowage_reduce_f32_bf16, stowage_reduce_bf16_f32, stowage_reduce_bf16};\n"...)
	words, err := os.ReadFile("testdata/host.cuh")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, text := range map[string][]byte{"reduce.cc": src, "prelude.cuh": words, "empty.cc": []byte("#include <cstdio>\nint main() {}\n")} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	compile := func(source string) ([]byte, error) {
		cmd := exec.Command("clang-19", "-std=c++17", "-O1", "-ffp-contract=off", "-Wno-unknown-pragmas", source, "-o", "program")
		cmd.Dir = dir
		return cmd.CombinedOutput()
	}
	if out, err := compile("empty.cc"); err != nil {
		t.Skipf("clang-19 cannot make programs for this machine: %s", out)
	}
	if out, err := compile("reduce.cc"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return filepath.Join(dir, "program")
}

// hostedCase returns a random launch in a memory of its own, and what the twin makes of
// that memory.
func hostedCase(t *testing.T, rng *rand.Rand) (in, want []byte) {
	from, to := Number(rng.IntN(2)), Number(rng.IntN(2))
	count, n := 1+rng.IntN(MaxReduceSources), rng.IntN(40)
	if rng.IntN(4) == 0 {
		n = rng.IntN(1500)
	}
	mem := make([]byte, 0, 1<<16)
	// Runs have an alignment each, or all have the same. The bytes between them must not
	// change.
	same := rng.IntN(2) == 0
	skew := rng.IntN(16)
	place := func(x Number, fill []byte) int {
		size := int(x.Size())
		s := skew / 4 * size
		if !same {
			s = rng.IntN(8) * size
		}
		at := (len(mem)+15)/16*16 + s
		mem = append(mem, make([]byte, at-len(mem))...)
		mem = append(mem, fill...)
		return at
	}
	r := Reduction{Op: ReduceOp(rng.IntN(3)), From: from, To: to}
	acc := -1
	if rng.IntN(2) == 0 {
		acc = place(F32, numbers(rng, F32, n))
	}
	var srcs []int
	for range count {
		srcs = append(srcs, place(from, numbers(rng, from, n)))
	}
	dst := place(to, make([]byte, n*int(to.Size())))
	switch rng.IntN(4) {
	case 0:
		if to == from {
			dst = srcs[rng.IntN(count)]
		}
	case 1:
		if to == F32 && acc >= 0 {
			dst = acc
		}
	}
	mem = append(mem, make([]byte, 32)...)
	twin := bytes.Clone(mem)
	all := rangeOf(t, twin, 0, len(twin))
	at := func(off int, x Number) device.Range { return all.Slice(memory.Bytes(off), memory.Bytes(n)*x.Size()) }
	r.Dst = at(dst, to)
	var sources []device.Range
	for _, s := range srcs {
		sources = append(sources, at(s, from))
	}
	if acc >= 0 {
		r.Acc = at(acc, F32)
	}
	l := ReduceLaunch(r, sources...)
	blocks := 1 + rng.IntN(3)
	head := []uint64{uint64(from)<<1 | uint64(to), uint64(blocks), 128, uint64(len(mem)), 1}
	var args []byte
	for i, a := range l.Args() {
		switch {
		case i == 0:
			a = uint64(dst)
		case i == 1 && acc >= 0:
			a, head[4] = uint64(acc), head[4]|2
		case i >= 4 && i < 4+count:
			a, head[4] = uint64(srcs[i-4]), head[4]|1<<i
		}
		args = binary.LittleEndian.AppendUint64(args, a)
	}
	for _, h := range head {
		in = binary.LittleEndian.AppendUint64(in, h)
	}
	run(l)
	return append(append(in, args...), mem...), twin
}

func TestReduceSourceOnTheHost(t *testing.T) {
	program := hosted(t)
	rng := rand.New(rand.NewPCG(1, 2))
	const cases = 2000
	var in bytes.Buffer
	var wants [][]byte
	for range cases {
		i, want := hostedCase(t, rng)
		in.Write(i)
		wants = append(wants, want)
	}
	cmd := exec.Command(program)
	var out, complaints bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = &in, &out, &complaints
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v %s", err, complaints.String())
	}
	for i, want := range wants {
		if got := out.Next(len(want)); !bytes.Equal(got, want) {
			for k := range want {
				if k >= len(got) || got[k] != want[k] {
					t.Fatalf("case %d: byte %d of %d differs", i, k, len(want))
				}
			}
		}
	}
	if out.Len() != 0 {
		t.Errorf("%d bytes too many", out.Len())
	}
}
