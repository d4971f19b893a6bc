// Package planruns has published training runs: the setup of each, and the tokens that a
// GPU processed in a second. The time model is fitted to them, and forecasts are compared
// with them.
package planruns

import (
	_ "embed"
	"encoding/csv"
	"fmt"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/model"
)

//go:embed runs.csv
var table string

// Run is one published run.
type Run struct {
	// Layout is what publications state: model, hardware, precision, GPUs, batch,
	// microbatch, sequence, TP, PP, CP, VPP and EP. Settings is Layout with everything
	// that the recipe adds. Release is where the run was published.
	Layout, Settings, Release string
	// Model is the name of the preset.
	Model string
	Setup *plan.Setup
	// Tokens and TFLOPS are of one GPU in a second. TFLOPS is zero if it is not
	// published.
	Tokens, TFLOPS float64
}

// The columns of the table that do not follow from their place in the list of a layout.
const (
	columnFSDP    = 12
	columnRelease = 23
	columns       = 26
)

// All returns the runs. Runs with the same settings share a setup. It panics if the table
// is damaged, because the table is part of the program.
func All() []Run {
	r := csv.NewReader(strings.NewReader(table))
	r.Comment, r.FieldsPerRecord = '#', columns
	rows, err := r.ReadAll()
	if err != nil {
		panic("planruns: " + err.Error())
	}
	setups := map[string]*plan.Setup{}
	var runs []Run
	for _, f := range rows[1:] {
		run := Run{
			Layout: strings.Join(f[:columnFSDP], ","), Settings: strings.Join(f[:columnRelease], ","), Release: f[columnRelease],
			Tokens: number(f[columnRelease+1]), TFLOPS: number(f[columnRelease+2]),
		}
		run.Model, _, _ = strings.Cut(f[0], ":")
		run.Setup = setups[run.Settings]
		if run.Setup == nil {
			run.Setup, err = setup(f)
			if err != nil {
				panic(fmt.Sprintf("planruns: %s: %v", run.Settings, err))
			}
			setups[run.Settings] = run.Setup
		}
		runs = append(runs, run)
	}
	return runs
}

func number(s string) float64 {
	v, err := strconv.ParseFloat(s, 64)
	if err != nil {
		panic("planruns: " + err.Error())
	}
	return v
}

// setup returns the setup of a row. What recipes do not say is what large jobs use.
func setup(f []string) (*plan.Setup, error) {
	n := func(i int) int { return int(number(f[i])) }
	is := func(i int) bool { return n(i) > 0 }
	m, err := part(f[0])
	if err != nil {
		return nil, err
	}
	g, err := hardware.ByName(f[1])
	if err != nil {
		return nil, err
	}
	s := &plan.Setup{
		Model: m, Hardware: g,
		Layout: plan.Layout{World: n(3), TP: n(7), PP: n(8), CP: n(9), VPP: n(10), EP: n(11), ETP: 1, SequenceParallel: n(7) > 1},
		Batch:  plan.Batch{Global: n(4), Micro: n(5), Seq: n(6)},
	}
	s.Optimizer.Distributed = true
	s.Kernels = plan.Kernels{GroupedGEMM: true, PermuteFusion: true, GradFusion: true, RouterFP32: true, NoAttentionMask: true, Loss: "te", Dispatcher: f[16]}
	s.Precision.Compute = map[string]plan.Format{"bf16": plan.BF16, "fp8": plan.FP8, "mxfp8": plan.MXFP8, "nvfp4": plan.NVFP4}[f[2]]
	if is(columnFSDP) {
		s.Layout.FSDP.Shard = plan.ShardParameters
	}
	s.Graph.Scopes, s.Recompute.Modules = strings.Fields(f[13]), strings.Fields(f[14])
	s.Layout.OverlapEP = is(15)
	if is(17) {
		s.Kernels.OpFuser = true
		s.Stash.Modules, s.Stash.RankCapacity = memory.MegatronModules(memory.Stash), 1.5
	}
	s.Precision.OutputLayer, s.Precision.Attention = is(18), is(19)
	s.Offload.Layers = n(20)
	if is(21) {
		s.Model.MTP.Depth, s.Model.MTP.Repeated = n(21), true
	}
	s.Kernels.TPCommOverlap = is(22)
	if strings.HasPrefix(f[columnRelease], "26.") {
		// Bridge's recipes reduce gradients in bf16 and store parameters in fp8.
		s.Precision.GradsInBF16 = true
		s.Precision.ParamGather = s.Precision.Compute == plan.FP8 || s.Precision.Compute == plan.MXFP8
	}
	return s, nil
}

// part returns a preset, or n layers of it from layer a on if the name is "name:a+n".
func part(name string) (*model.Model, error) {
	name, some, cut := strings.Cut(name, ":")
	m, err := model.Preset(name)
	if err != nil || !cut {
		return m, err
	}
	var first, n int
	if _, err := fmt.Sscanf(some, "%d+%d", &first, &n); err != nil {
		return nil, err
	}
	m.Layers, m.MTP = m.Layers[first:first+n], nil
	return m, nil
}
