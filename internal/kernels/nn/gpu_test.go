package nn

import (
	"bytes"
	"testing"

	"github.com/stowage-dev/stowage/internal/ptx"
	"github.com/stowage-dev/stowage/memory"
)

// Every kernel is an entry of its image. The entry has eight bytes for each parameter,
// one parameter for each argument of the launch, and the launch's number of threads.
func TestPTXMatchesLaunches(t *testing.T) {
	_, b := trialMemory(t)
	for source, kinds := range deviceCode() {
		for name, k := range kinds {
			for seed := range uint64(4) {
				_, issue := draw(k, seed, false, b)
				var s tape
				issue(&s)
				for _, op := range s.ops {
					if op.Kernel == nil {
						continue
					}
					if want := "nn/" + source + ".cu"; op.Kernel.Image.Name != want {
						t.Errorf("%s: %s comes from %s, not from %s", name, op.Kernel.Name, op.Kernel.Image.Name, want)
					}
					p := tensorProgram{entries: ptx.Entries(op.Kernel.Image.Variants[0].PTX)}
					p.entry(t, op.Launch)
				}
			}
		}
	}
}

// A GPU computes what the twins compute: integers to the bit, and the same bits each
// time. SPEC S6.3
func TestKernelsOnGPU(t *testing.T) {
	g := newTensorGPU(t)
	mem, b := trialMemory(t)
	there := g.alloc(t, trialSize)
	defer g.Free(there)
	all := deviceCode()
	all["chains"] = chains()
	for source, kinds := range all {
		for name, k := range kinds {
			t.Run(source+"/"+name, func(t *testing.T) {
				for seed := range uint64(24) {
					large := seed >= 16
					x, _, want := twin(k, seed, large, mem, b)
					y, issue := draw(k, seed, large, there)
					var got [2][]byte
					for i := range got {
						g.Upload(there.Slice(0, memory.Bytes(len(y.data))), y.data)
						issue(g.Stream)
						got[i] = make([]byte, len(y.data))
						if err := g.Download(got[i], there.Slice(0, memory.Bytes(len(y.data)))); err != nil {
							t.Fatalf("trial %d: %v", seed, err)
						}
					}
					if err := x.compare(got[0], want); err != nil {
						t.Fatalf("trial %d: %v", seed, err)
					}
					if !bytes.Equal(got[0], got[1]) {
						t.Fatalf("trial %d: two runs give different bits", seed)
					}
				}
			})
		}
	}
}
