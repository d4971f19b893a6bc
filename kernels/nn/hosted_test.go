// This file owns the check of device code without a GPU: sources compiled for the
// host must do what the twins do.

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

// Loops are not unrolled here: it takes long and changes nothing.
var unroll = regexp.MustCompile(`#pragma unroll.*`)

var entryName = regexp.MustCompile(`(?m)^KERNEL\(.*\)\n(\w+)\(`)

// hosted compiles a source into a program of the host and gives its entries. The words
// that are instructions come from testdata/host.cuh.
func hosted(t *testing.T, source string) (program string, entries []string) {
	t.Helper()
	_, err := ptx.Find()
	var missing *device.Unsupported
	if errors.As(err, &missing) {
		t.Skip(err)
	}
	dir := t.TempDir()
	read := func(name string) []byte {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return unroll.ReplaceAll(text, nil)
	}
	text := read(source + ".cu")
	for _, m := range entryName.FindAllSubmatch(text, -1) {
		entries = append(entries, string(m[1]))
	}
	list := "\nEntry host_entries[] = {(Entry)" + strings.Join(entries, ", (Entry)") + "};\n"
	for name, text := range map[string][]byte{
		"source.cc": append(text, list...), "nn.cuh": read("nn.cuh"), "norm.cuh": read("norm.cuh"), "scan.cuh": read("scan.cuh"),
		"words.cuh": read("testdata/host.cuh"),
		"empty.cc":  []byte("#include <cstdio>\nint main() {}\n"),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	compile := func(source string) ([]byte, error) {
		cmd := exec.Command("clang-19", "-std=c++17", "-O1", "-fsanitize=bounds", "-fsanitize-trap=bounds", "-ffp-contract=off",
			"-Wno-unknown-pragmas", "-Wno-cast-function-type", source, "-o", "program", "-lm")
		cmd.Dir = dir
		return cmd.CombinedOutput()
	}
	if out, err := compile("empty.cc"); err != nil {
		t.Skipf("clang-19 cannot make programs for this machine: %s", out)
	}
	if out, err := compile("source.cc"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return filepath.Join(dir, "program"), entries
}

// encode is a trial as the program reads it.
func encode(t *testing.T, x *trial, ops []tapeOp, entries []string) (in []byte) {
	word := func(v uint64) { in = binary.LittleEndian.AppendUint64(in, v) }
	word(uint64(len(x.data)))
	word(uint64(x.buf.Addr()))
	word(uint64(len(ops)))
	for _, op := range ops {
		var args [16]uint64
		if op.Kernel == nil {
			word(^uint64(0))
			word(uint64(op.value))
			word(0)
			args[0], args[1] = uint64(op.fill.Addr()), uint64(op.fill.Len)
		} else {
			i := slices.Index(entries, op.Kernel.Name)
			if i < 0 {
				t.Fatalf("no entry %s among %v", op.Kernel.Name, entries)
			}
			word(uint64(i))
			// Any grid will do, and a small one is soon done.
			word(min(uint64(op.Grid[0]), 1+x.Uint64N(5)))
			word(uint64(op.Block[0]))
			copy(args[:], op.Args())
		}
		for _, a := range args {
			word(a)
		}
	}
	return append(in, x.data...)
}

// Every kernel's source, run on the host, gives what its twin gives, whatever the grid:
// for odd shapes, pitches, alignments and mixes of types. SPEC S6.3
func TestSourcesOnTheHost(t *testing.T) {
	for source, kinds := range deviceCode() {
		t.Run(source, func(t *testing.T) {
			t.Parallel()
			program, entries := hosted(t, source)
			memory, b := trialMemory(t)
			var in bytes.Buffer
			var trials []*trial
			var wants [][]byte
			var names []string
			for name, k := range kinds {
				for seed := range uint64(hostedTrials) {
					if seed >= hostedTrials/2 && strings.HasPrefix(source, "scan") {
						break // they take long
					}
					x, ops, want := twin(k, seed, false, memory, b)
					in.Write(encode(t, x, ops, entries))
					trials, wants, names = append(trials, x), append(wants, bytes.Clone(want)), append(names, fmt.Sprintf("%s, trial %d", name, seed))
				}
			}
			cmd := exec.Command(program)
			var out, complaints bytes.Buffer
			cmd.Stdin, cmd.Stdout, cmd.Stderr = &in, &out, &complaints
			err := cmd.Run()
			for i, want := range wants {
				if out.Len() < len(want) {
					t.Fatalf("%s: %v %s", names[i], err, complaints.String())
				}
				if err := trials[i].compare(out.Next(len(want)), want); err != nil {
					t.Fatalf("%s: %v", names[i], err)
				}
			}
			if err != nil {
				t.Fatalf("%v %s", err, complaints.String())
			}
		})
	}
}

const hostedTrials = 12
