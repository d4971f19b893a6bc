package nn

import (
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/ptx"
)

// The source for Hopper, compiled for the host, computes what the twin computes. It is for taps
// and bias that can be read by vectors. SPEC S6.3
func TestHopperConvSourceOnTheHost(t *testing.T) {
	program := newTensorProgram(t, "convhopper.cu", convHopperPTX)
	memory, b := trialMemory(t)
	ran := 0
	for seed := range uint64(24) {
		x, ops, want := twin(wholeConvGradTrial, seed, false, memory, b)
		var launches []device.Launch
		for _, op := range ops {
			l := op.Launch
			if at := (l.Args()[2] | l.Args()[3]) % 16; len(launches) == 0 && (at == 0) != (l.Tuned.Kernel != nil) {
				t.Fatalf("trial %d: taps and bias at %d modulo 16, a kernel for Hopper: %v", seed, at, l.Tuned.Kernel != nil)
			}
			l.Kernel, l.Grid, l.Block, l.Shared = l.Tuned.Kernel, l.Tuned.Grid, l.Tuned.Block, l.Tuned.Shared
			launches = append(launches, l)
		}
		if launches[0].Kernel == nil {
			continue
		}
		ran++
		if err := x.compare(program.run(t, x.data, b.Addr(), launches...), want); err != nil {
			t.Fatalf("trial %d: %v", seed, err)
		}
	}
	if ran < 8 {
		t.Errorf("%d trials have kernels for Hopper", ran)
	}
}

// A sum that begins early waits for the first launch before it reads or writes, and that one lets
// it begin. On the host launches run in order, so no other test without a GPU would notice.
func TestLateSumWaits(t *testing.T) {
	sums, all := 0, ptx.Entries(convHopperPTX)
	for _, e := range all {
		wait, sum := strings.Index(e.Body, "griddepcontrol.wait"), strings.Contains(e.Name, "_sum_")
		if strings.Count(e.Body, "griddepcontrol") != 1 || sum != (wait >= 0) {
			t.Errorf("%s does not wait once for the launch before, or not let the next one begin once", e.Name)
		}
		if sum {
			sums++
		}
		if sum && (wait > strings.Index(e.Body, "ld.global") || wait > strings.Index(e.Body, "st.global")) {
			t.Errorf("%s does not wait before it reads and writes", e.Name)
		}
	}
	if sums != 1 || len(all) < 2 {
		t.Errorf("%d of %d kernels are sums", sums, len(all))
	}
}
