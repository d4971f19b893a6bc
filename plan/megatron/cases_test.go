// This file owns the arguments of measured jobs: each is understood and means what its
// authors say.

package megatron

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

// measured is a job of testdata/cases.json: arguments as in Megatron-LM's functional tests,
// and the layout that was stated with them.
type measured struct {
	ID          string         `json:"id"`
	GPUs        int            `json:"n_gpus"`
	Args        map[string]any `json:"args"`
	Parallelism map[string]int `json:"parallelism"`
	Batch       map[string]int `json:"batch"`
	Recompute   []string       `json:"recompute"`
	Offload     []string       `json:"offload"`
	Precision   string         `json:"precision"`
}

func measuredCases(t testing.TB) (cases []measured) {
	data, err := os.ReadFile("testdata/cases.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	if len(cases) < 50 {
		t.Fatalf("only %d cases", len(cases))
	}
	return cases
}

// SPEC S6.1
func TestMeasuredCases(t *testing.T) {
	for _, c := range measuredCases(t) {
		t.Run(c.ID, func(t *testing.T) {
			s, warnings, err := FromArgs(c.Args, Options{GPUs: c.GPUs, Vocab: 50257})
			if err != nil {
				t.Fatal(err)
			}
			for _, w := range warnings {
				t.Errorf("warning: %s", w)
			}
			l := s.Layout
			got := map[string]int{"TP": l.TP, "PP": l.PP, "CP": l.CP, "EP": l.EP, "ETP": l.ETP, "DP": l.DP(), "EDP": l.EDP(), "VPP": l.VPP}
			for name, want := range c.Parallelism {
				if name == "VPP" {
					want = max(want, 1) // null stands for none
				}
				if got[name] != want {
					t.Errorf("%s is %d, want %d", name, got[name], want)
				}
			}
			if b := (plan.Batch{Micro: c.Batch["MBS"], Global: c.Batch["GBS"], Seq: c.Batch["seq"]}); s.Batch != b {
				t.Errorf("batch %+v, want %+v", s.Batch, b)
			}
			if !s.Recompute.Full && !slices.Equal(s.Recompute.Modules, c.Recompute) {
				t.Errorf("recompute %v, want %v", s.Recompute.Modules, c.Recompute)
			}
			if !slices.Equal(s.Offload.Modules, c.Offload) {
				t.Errorf("offload %v, want %v", s.Offload.Modules, c.Offload)
			}
			checkStages(t, s)
			if want := c.Precision; want != precisionName(s) {
				t.Errorf("precision %s, want %s", precisionName(s), want)
			}
			if err := s.Check(); err != nil {
				t.Errorf("the planner refuses it: %v", err)
			}
			again, _, err := FromArgs(asArgs(t, s), Options{GPUs: c.GPUs})
			if err != nil {
				t.Fatal(err)
			}
			sameSetup(t, s, again)
		})
	}
}

func precisionName(s *plan.Setup) string {
	switch p := s.Precision; {
	case p.Compute == plan.FP8 && p.Blockwise:
		return "fp8:blockwise"
	case p.Compute == plan.FP8:
		return "fp8:tensorwise"
	case p.Compute == plan.MXFP8:
		return "fp8:mxfp8"
	case p.Params == plan.BF16:
		return "bf16"
	case p.Params == plan.FP16:
		return "fp16"
	}
	return "fp32"
}

// checkStages checks that every layer is in exactly one stage, in order.
func checkStages(t testing.TB, s *plan.Setup) {
	t.Helper()
	l, next := s.Layout, 0
	if len(l.Stages) != l.PP*l.VPP {
		t.Errorf("%d stages for PP %d and VPP %d", len(l.Stages), l.PP, l.VPP)
	}
	for i, st := range l.Stages {
		if st.First != next || st.Last < st.First {
			t.Errorf("stage %d holds %d to %d after %d", i, st.First, st.Last, next)
		}
		next = st.Last
		if st.Embedding != (i == 0) || st.Loss != (i == len(l.Stages)-1) {
			t.Errorf("stage %d: %+v", i, st)
		}
	}
	if next != len(s.Model.Layers) {
		t.Errorf("stages hold %d layers of %d", next, len(s.Model.Layers))
	}
}

// asArgs converts a setup to flags, to a command line and back to arguments.
func asArgs(t testing.TB, s *plan.Setup) map[string]any {
	t.Helper()
	line := "torchrun --nnodes=$N pretrain_gpt.py " + CommandLine(Flags(s)) + "\n"
	args, err := parseCommand(line, ParseOptions{})
	if err != nil {
		t.Fatalf("%s\n%v", line, err)
	}
	return args
}

func sameSetup(t *testing.T, want, got *plan.Setup) {
	t.Helper()
	compareSetups(t, want, got)
}

// failer is what tests and properties share.
type failer interface {
	Fatal(...any)
	Fatalf(string, ...any)
}

// compareSetups compares two setups field by field, as JSON, so a difference is readable.
func compareSetups(t failer, want, got *plan.Setup) {
	text := func(s *plan.Setup) []string {
		c := *s
		c.Hardware = nil
		data, err := json.MarshalIndent(c, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		return strings.Split(string(data), "\n")
	}
	a, b := text(want), text(got)
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			from := max(0, i-3)
			t.Fatalf("read back differently:\n%s\ninstead of\n%s", strings.Join(b[from:i+1], "\n"), strings.Join(a[from:i+1], "\n"))
		}
	}
	if len(a) != len(b) {
		t.Fatalf("read back with %d lines instead of %d", len(b), len(a))
	}
}

// Sizes that follow from arguments agree with those computed by hand.
func TestModelsByHand(t *testing.T) {
	byID := map[string]measured{}
	for _, c := range measuredCases(t) {
		byID[c.ID] = c
	}
	read := func(id string) *plan.Setup {
		c, ok := byID[id]
		if !ok {
			t.Fatalf("no case %s", id)
		}
		s, _, err := FromArgs(c.Args, Options{GPUs: c.GPUs, Vocab: 256000})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := read("gpt3_15b_8t_release@h100")
	want := model.Layer{
		Attention: &model.Attention{Heads: 48, KVHeads: 8, HeadDim: 128, Rotary: true},
		Dense:     &model.Dense{Width: 24576}, // squared ReLU: 4 x 6144
	}
	if got := fmt.Sprintf("%+v %+v", *s.Model.Layers[31].Attention, *s.Model.Layers[31].Dense); got != fmt.Sprintf("%+v %+v", *want.Attention, *want.Dense) {
		t.Errorf("layer is %s", got)
	}
	if s.Model.Norm != model.LayerNorm || s.Model.Bias || s.Model.Tied || s.Model.LearnedPositions {
		t.Errorf("model is %+v", s.Model)
	}
	if !s.Layout.SequenceParallel || !s.Optimizer.Distributed || !s.Kernels.GradFusion || s.Kernels.Dropout != 0 {
		t.Errorf("settings are %+v", s)
	}
}
