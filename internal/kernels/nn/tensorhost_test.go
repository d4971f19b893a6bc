// This file owns matrix products and attention for GPUs, run without a GPU: the source is
// compiled for the host, and testdata has the instructions.

package nn

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/ptx"
)

// tensorProgram is a source compiled for the host, and the entries of its PTX in
// order.
type tensorProgram struct {
	path    string
	entries []ptx.Entry
}

// newTensorProgram compiles a source. Loops are not unrolled, because that takes long and
// changes nothing.
func newTensorProgram(t testing.TB, source, compiled string) *tensorProgram {
	t.Helper()
	_, err := ptx.Find()
	var missing *device.Unsupported
	if errors.As(err, &missing) {
		t.Skip(err)
	}
	p := &tensorProgram{path: filepath.Join(t.TempDir(), "program"), entries: ptx.Entries(compiled)}
	dir := filepath.Dir(p.path)
	var table bytes.Buffer
	table.WriteString("\nEntry host_entries[] = {")
	for _, e := range p.entries {
		// The caller passes 16 parameters to every entry, whatever it takes.
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
		case "tensor.cuh", "hopper.cuh":
			from = "testdata/" + name
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
	cmd := exec.Command("clang-19", "-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing",
		"-fsanitize=bounds", "-fsanitize-trap=bounds", "source.cc", "-lm", "-o", p.path)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		if strings.Contains(string(out), "file not found") {
			t.Skipf("clang-19 cannot make programs for this machine: %s", out)
		}
		t.Fatalf("%v\n%s", err, out)
	}
	return p
}

// entry returns the number of the entry of a launch. The entry must have been compiled
// for the launch's number of arguments and threads.
func (p *tensorProgram) entry(t testing.TB, l device.Launch) int {
	t.Helper()
	i := slices.IndexFunc(p.entries, func(e ptx.Entry) bool { return e.Name == l.Kernel.Name })
	if i < 0 {
		t.Fatalf("%s is no entry of %s", l.Kernel.Name, l.Kernel.Image.Name)
	}
	params := len(l.Args())
	if l.Kernel == l.Tuned.Kernel {
		params += len(l.Tuned.Maps())
	}
	if e := p.entries[i]; len(e.Params) != params || !strings.Contains(e.Body, fmt.Sprintf(".maxntid %d, 1, 1", l.Block[0])) {
		t.Fatalf("%s is not compiled for %d arguments and %d threads", e.Name, params, l.Block[0])
	}
	return i
}

// run executes launches on a copy of memory that they address as beginning at from, and
// returns the result.
func (p *tensorProgram) run(t testing.TB, memory []byte, from uintptr, launches ...device.Launch) []byte {
	t.Helper()
	var in bytes.Buffer
	word := func(v uint64) { in.Write(binary.LittleEndian.AppendUint64(nil, v)) }
	word(uint64(len(memory)))
	word(uint64(from))
	word(uint64(len(launches)))
	for _, l := range launches {
		word(uint64(p.entry(t, l)))
		word(uint64(l.Grid[0]))
		word(uint64(l.Block[0]) | uint64(l.Shared)<<32)
		var args [16]uint64
		copy(args[:], l.Args())
		for _, a := range args {
			word(a)
		}
		word(uint64(max(l.Tuned.Cluster, 1)) | uint64(len(l.Args()))<<32)
		var maps [8]device.TensorMap
		copy(maps[:], l.Tuned.Maps())
		for _, m := range maps {
			word(uint64(m.Addr))
			word(uint64(m.Cols) | uint64(m.Rows)<<32)
			word(uint64(m.Pitch))
			word(uint64(m.BoxRows))
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
