// This file tests which launches take the kernels for vectors, and those tuned to one GPU. Their twins compute the same from
// any address, and only a GPU would fail.

package nn

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Kernels for vectors are given matrices whose rows begin at whole vectors and consist of these. Rows shorter than a
// vector, such as the taps of a convolution, are read one number at a time.
func TestVectorKernelsGetWholeVectors(t *testing.T) {
	const vector = 16
	_, b := trialMemory(t)
	taken := map[string]int{}
	seeds := map[string]uint64{"act": 40, "conv": 20, "gatednorm": 20, "loss": 100, "norm": 20, "rope": 20, "rows": 60}
	for source, kinds := range deviceCode() {
		for name, k := range kinds {
			for seed := range seeds[source] {
				x := &trial{Rand: rand.New(rand.NewPCG(seed, 1)), buf: b, whole: seed%2 == 1}
				issue := k(x)
				var s tape
				issue(&s)
				for _, op := range s.ops {
					for _, k := range []*device.Kernel{op.Kernel, op.Tuned.Kernel} {
						if k == nil || k == op.Kernel && !strings.HasSuffix(k.Name, "_wide") && !strings.HasSuffix(k.Name, "_ahead") {
							continue
						}
						taken[k.Name]++
						n := memory.Bytes(vector)
						if strings.HasPrefix(k.Name, "stowage_nn_cross_entropy_") {
							n = vector / 2 // four numbers, of bf16 or fp32
						}
						for a := range op.Accesses {
							if a.Rows > 1 && a.Len >= vector && (memory.Bytes(a.Addr())|a.Pitch|a.Len)%n != 0 {
								t.Errorf("%s, %s %d: %s is given rows of %d bytes, %d apart, at %#x", source, name, seed, k.Name, a.Len, a.Pitch, a.Addr())
							}
						}
					}
				}
			}
		}
	}
	for _, f := range slices.Concat(lossForms[0], lossForms[1]) {
		if taken[f.Name] == 0 && f.cluster == 1 {
			t.Errorf("no trial takes %s", f.Name)
		}
	}
	for _, w := range []*ways{swigluKernels, swigluGradKernels, convKernels, convGradKernels, gatedNormKernels, gatedNormGradKernels, lossKernels, normKernels, normGradKernels, ropeKernels, combineKernels} {
		if taken[w.wide.Name] == 0 {
			t.Errorf("no trial takes %s", w.wide.Name)
		}
	}
}
