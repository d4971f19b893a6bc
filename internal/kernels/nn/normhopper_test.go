package nn

import (
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/ptx"
)

// The source for Hopper, compiled for the host, computes what the twin computes. SPEC S6.3
func TestHopperNormSourceOnTheHost(t *testing.T) {
	program := newTensorProgram(t, "normhopper.cu", normHopperPTX)
	memory, b := trialMemory(t)
	ran := map[*device.Kernel]bool{}
	for seed := range uint64(16) {
		x, ops, want := twin(lateNormTrial, seed, false, memory, b)
		var launches []device.Launch
		for _, op := range ops {
			l := op.Launch
			if l.Tuned.Kernel == nil {
				t.Fatalf("trial %d has no kernel for Hopper", seed)
			}
			ran[l.Tuned.Kernel] = true
			l.Kernel, l.Grid, l.Block, l.Shared = l.Tuned.Kernel, l.Tuned.Grid, l.Tuned.Block, l.Tuned.Shared
			launches = append(launches, l)
		}
		if err := x.compare(program.run(t, x.data, b.Addr(), launches...), want); err != nil {
			t.Fatalf("trial %d: %v", seed, err)
		}
	}
	if len(ran) != 3 {
		t.Errorf("trials ran %d kernels", len(ran))
	}
}

// The second launch begins early behind the first of these kernels alone, which both launches
// agree about.
func TestHopperNormIsForSomeShapes(t *testing.T) {
	_, b := trialMemory(t)
	for _, c := range []struct {
		cols, width int
		kind        kernels.Number
		late        bool
	}{
		{512, 512, kernels.BF16, true}, {8192, 8192, kernels.BF16, true}, {504, 504, kernels.BF16, false}, {8200, 8200, kernels.BF16, false},
		{1028, 1028, kernels.BF16, false}, {1024, 512, kernels.BF16, false}, {1024, 1024, kernels.F32, false},
	} {
		m := NewMatrix(b.Slice(0, c.kind.Size()*4*8200), c.kind, 4, c.cols)
		w := NewMatrix(b.Slice(0, c.kind.Size()*8200), c.kind, 1, c.width)
		n := NormGrad{DX: m, DW: w, X: m, W: w, DY: m, Scratch: b.Slice(0, NormScratch(4, c.width))}
		first, second := normGradLaunch(n), normWeightLaunch(n)
		if (first.Tuned.Kernel != nil) != c.late || second.Tuned.Early != c.late {
			t.Errorf("%d columns, norms of %d of type %d: late %v, the sum early %v, want %v", c.cols, c.width, c.kind, first.Tuned.Kernel != nil, second.Tuned.Early, c.late)
		}
	}
}

// The first launch lets the second begin once, behind its only writes of fp32 and a barrier that
// all threads pass. The second begins with a fence, reads parts from L2 alone and waits for the
// end of the first before it ends. On the host launches run in order, so no other test without a
// GPU would notice.
func TestEarlySumWaits(t *testing.T) {
	early, others := 0, 0
	defer func() {
		if early != 1 || others == 0 {
			t.Errorf("%d kernels begin early, %d come before them", early, others)
		}
	}()
	for _, e := range ptx.Entries(normHopperPTX) {
		at := func(word string) int { return strings.Index(e.Body, word) }
		last := func(word string) int { return strings.LastIndex(e.Body, word) }
		if e.Name == normEarlyKernel.Name {
			early++
			// The only other word that it reads is the gradient that it adds to.
			if strings.Count(e.Body, "ld.global.u32") > 1 {
				t.Errorf("%s reads parts that may not be in L2", e.Name)
			}
			fence, wait := at("fence.acq_rel.gpu"), at("griddepcontrol.wait")
			if fence < 0 || fence > at("ld.relaxed.gpu.global.u32") || strings.Count(e.Body, "griddepcontrol.wait") != 1 ||
				wait < last("st.global") || wait < last("ld.") || strings.Count(e.Body, "ret;") != 1 || last("ret;") < wait {
				t.Errorf("%s does not begin with a fence, or not end with a wait", e.Name)
			}
			continue
		}
		others++
		// The sums of a part are written as vectors between the last two barriers of the block.
		let, barrier := at("fence.acq_rel.gpu; griddepcontrol.launch_dependents;"), last("bar.sync 0;")
		if let < 0 || strings.Count(e.Body, "griddepcontrol") != 1 || barrier < 0 || barrier > let {
			t.Errorf("%s does not let the next launch begin behind a barrier", e.Name)
			continue
		}
		before := strings.LastIndex(e.Body[:barrier], "bar.sync 0;")
		if before < 0 || !strings.Contains(e.Body[before:barrier], "st.global.v4.u32") || strings.Contains(e.Body[barrier:let], "st.global") {
			t.Errorf("%s lets the next launch begin before it has written its part", e.Name)
		}
	}
}
