// This file owns the check of device code without a GPU: sources compiled for the host
// must compute what the twins compute.

package nn

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/ptx"
)

// encode returns a trial in the form that the program reads.
func encode(t *testing.T, x *trial, ops []tapeOp, p *tensorProgram) (in []byte) {
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
			word(uint64(p.entry(t, op.Launch)))
			// Any grid is correct, and a small one is fast.
			word(min(uint64(op.Grid[0]), 1+x.Uint64N(5)))
			word(uint64(op.Block[0]) | uint64(op.Shared)<<32)
			copy(args[:], op.Args())
		}
		for _, a := range args {
			word(a)
		}
		word(1) // blocks of a cluster
		for range 8 * 4 {
			word(0) // no tensor maps
		}
	}
	return append(in, x.data...)
}

// Every kernel's source, compiled for the host, computes what its twin computes, for any
// grid, odd shapes, pitches, alignments and mixes of types. SPEC S6.3
func TestSourcesOnTheHost(t *testing.T) {
	for source, kinds := range deviceCode() {
		t.Run(source, func(t *testing.T) {
			t.Parallel()
			compiled, err := os.ReadFile(ptx.File(source+".cu", "sm_80"))
			if err != nil {
				t.Fatal(err)
			}
			p := newTensorProgram(t, source+".cu", string(compiled))
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
					in.Write(encode(t, x, ops, p))
					trials, wants, names = append(trials, x), append(wants, bytes.Clone(want)), append(names, fmt.Sprintf("%s, trial %d", name, seed))
				}
			}
			cmd := exec.Command(p.path)
			var out, complaints bytes.Buffer
			cmd.Stdin, cmd.Stdout, cmd.Stderr = &in, &out, &complaints
			err = cmd.Run()
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
