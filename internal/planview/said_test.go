// This file owns the table of what is said about searches, questions and groups: texts as
// they stand in a terminal, and the rest of each report as JSON. A change of any figure or word
// is seen. Write it anew with -update if the change is meant.

package planview

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/megatron"
)

// job is a small mixture on two stages of unlike length, as arguments and as a setup.
func job(t *testing.T, more map[string]any) (map[string]any, *plan.Setup) {
	t.Helper()
	args := map[string]any{
		"num-layers": 6, "hidden-size": 1024, "num-attention-heads": 8, "ffn-hidden-size": 4096, "seq-length": 4096, "max-position-embeddings": 4096,
		"num-experts": 8, "moe-router-topk": 2, "moe-grouped-gemm": true, "moe-token-dispatcher-type": "alltoall", "swiglu": true, "untie-embeddings-and-output-weights": true,
		"micro-batch-size": 4, "global-batch-size": 32, "transformer-impl": "transformer_engine", "pipeline-model-parallel-size": 2, "expert-model-parallel-size": 2, "bf16": true, "use-distributed-optimizer": true,
		"log-interval": 10, "nnodes": 1,
	}
	for name, v := range more {
		args[name] = v
	}
	gpu, err := hardware.ByName("h100")
	if err != nil {
		t.Fatal(err)
	}
	s, _, err := megatron.FromArgs(args, megatron.Options{GPUs: 4, Vocab: 32000, Hardware: gpu, Name: "toy"})
	if err != nil {
		t.Fatal(err)
	}
	return args, s
}

// paper is what a table is written on.
type paper struct {
	t *testing.T
	strings.Builder
	hints Hints
}

// note writes a value as JSON, the end of a long one as a sum.
func (p *paper) note(name string, v any) {
	text, err := json.Marshal(v)
	if err != nil {
		p.t.Fatal(err)
	}
	if len(text) > 400 {
		text = fmt.Appendf(text[:300], "... %x", sha256.Sum256(text))
	}
	fmt.Fprintf(p, "%s: %s\n", name, text)
}

// report asks for a report and writes it.
func (p *paper) report(name string, q Request) {
	p.t.Helper()
	fmt.Fprintf(p, "\n=== %s\n", name)
	r, err := New(q)
	if err != nil {
		p.note("error", err.Error())
		return
	}
	r.WriteText(p, []int{0, len(r.Ranks) - 1}, p.hints)
	p.note("search", r.Search)
	p.note("decisions", r.Decisions)
	p.note("flags", r.Flags)
	p.note("warnings", append(r.Warnings, r.Command))
	p.note("node", r.Node)
	p.note("timeline", r.Timeline)
	p.note("settings", settings(r))
}

func TestSaidOfSearches(t *testing.T) {
	p := &paper{t: t, hints: Hints{NoBudget: "NO BUDGET", TooLarge: "TOO LARGE", OtherFlags: "OTHERS", AllFlags: "ALL"}}
	const gib = memory.GiB
	for _, x := range [][2]memory.Bytes{{0, 0}, {80, 0}, {80, 10}, {75, 40}, {10, 0}} {
		_, s := job(t, nil)
		s.Budget, s.HostMemory, s.Layout.NodeGPUs = x[0]*gib/10, x[1]*gib/10, 4
		p.report(fmt.Sprintf("policies in %d, host %d", x[0], x[1]), Request{Setup: s, Search: Policies, Command: "a command", BudgetFrom: "a test", HostFrom: "a host"})
	}
	for _, budget := range []memory.Bytes{6, 1} {
		_, s := job(t, nil)
		s.Budget = budget * gib
		calls := 0
		p.report(fmt.Sprintf("layouts in %d GiB", budget), Request{Setup: s, Search: Layouts, BudgetFrom: "a test", Progress: func(done, all int) { calls++ }})
		if calls == 0 {
			t.Error("no progress was told")
		}
	}
	// Without a search: what fits, may not fit, and does not, for want of either memory, and what the settings do to groups.
	for i, change := range []func(s *plan.Setup){
		func(s *plan.Setup) { s.Budget = 12 * gib }, func(s *plan.Setup) { s.Budget = 13 * gib }, func(s *plan.Setup) { s.Budget = 9 * gib },
		func(s *plan.Setup) { s.Hardware = nil }, func(s *plan.Setup) { s.Hardware, s.Budget = nil, 9*gib },
		func(s *plan.Setup) { s.Hardware.Free = 70 * gib; s.Layout.FSDP.Shard = plan.ShardOptimizer },
		func(s *plan.Setup) {
			s.Offload.Modules, s.Offload.Fractions = []string{"core_attn", "moe_act"}, []float64{0.25, 0.75}
			s.HostMemory, s.Layout.NodeGPUs = 3*gib, 4
		},
		func(s *plan.Setup) {
			s.Offload.Modules, s.Offload.Fraction, s.Recompute.Modules = []string{"core_attn", "moe_act"}, 1, []string{"layernorm", "moe_act"}
			s.HostMemory, s.Layout.NodeGPUs = gib, 4
		},
		func(s *plan.Setup) {
			s.Recompute.Full, s.Recompute.Method, s.Recompute.Layers = true, "block", 1
			s.Layout.TP, s.Layout.World, s.Layout.SequenceParallel = 2, 8, true
		},
		func(s *plan.Setup) { s.Recompute.Full, s.Recompute.Method, s.Recompute.Layers = true, "uniform", 1 },
		func(s *plan.Setup) {
			s.Layout.NodeGPUs = 1
			s.Offload.Modules = []string{"core_attn"}
			s.Hardware.NodeMemory = 0
		},
	} {
		_, s := job(t, nil)
		change(s)
		p.report(fmt.Sprint("as given ", i), Request{Setup: s, Search: NoSearch, BudgetFrom: "a test", HostFrom: "a host"})
	}
	// The flags of a file change where the policy does, and nowhere else.
	for _, more := range []map[string]any{
		nil, {"recompute-granularity": "selective", "recompute-modules": []string{"mlp", "layernorm"}},
		{"fine-grained-activation-offloading": true, "offload-modules": []string{"core_attn", "moe_act"}},
	} {
		for _, file := range []string{"", "job.sh"} {
			args, s := job(t, more)
			s.Budget = 8 * gib
			r, err := New(Request{Setup: s, Search: Policies, Given: &Given{File: file, Args: args, Setup: s}})
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(p, "\n=== flags in %q with %v\n", file, more)
			p.note("flags", r.Flags)
			writeFlags(p, r.Flags[0], p.hints)
		}
	}
	golden.Check(t, "searches.txt", p.String())
}

func TestSaidOfGroups(t *testing.T) {
	p := &paper{t: t}
	for _, budget := range []memory.Bytes{0, 8 * memory.GiB, memory.GiB} {
		for _, group := range []string{"attn_norm", "core_attn", "expert_fc1", "moe_act", "none"} {
			_, s := job(t, nil)
			s.Budget = budget
			fmt.Fprintf(p, "\n=== %s in %d GiB\n", group, budget/memory.GiB)
			e, err := Explain(s, group)
			if err != nil {
				p.note("error", err.Error())
				continue
			}
			e.WriteText(p)
			p.note("explanation", e)
		}
	}
	_, s := job(t, nil)
	s.Hardware.Usable = memory.GiB
	s.Budget = memory.GiB
	e, err := Explain(s, "core_attn")
	if err != nil {
		t.Fatal(err)
	}
	p.note("a small GPU", e.NoPolicy)
	_, s = job(t, nil)
	s.Offload.Modules, s.Recompute.Modules = []string{"gdp_qkv", "core_attn"}, []string{"mla_up_proj", "moe_act", "layernorm", "shared_experts"}
	notes, err := WithoutEffect(s)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range notes {
		p.note("without effect", n.Error())
	}
	golden.Check(t, "groups.txt", p.String())
}

func TestSaidOfQuestions(t *testing.T) {
	p := &paper{t: t}
	for _, over := range []SearchSpace{NoSearch, Policies, Layouts} {
		for _, x := range []struct {
			name   string
			change func(s *plan.Setup, v int) error
		}{
			{"microbatch", func(s *plan.Setup, v int) error {
				if v == 12 {
					return errors.New("it is unlucky")
				}
				s.Batch.Micro, s.Batch.Global = v, 16*v
				return nil
			}},
			{"host", func(s *plan.Setup, v int) error {
				s.Batch.Micro, s.Batch.Global = v, 16*v
				s.Offload.Modules, s.Offload.Fraction, s.HostMemory, s.Layout.NodeGPUs = []string{"core_attn", "moe_act"}, 1, 3*memory.GiB, 4
				return nil
			}},
		} {
			for _, scan := range []bool{false, true} {
				for _, smallest := range []bool{false, true} {
					if over == Layouts && (scan || smallest || x.name == "host") || over == Policies && (smallest || x.name == "microbatch" && scan) {
						continue
					}
					var progress []string
					q := Question{
						Name: "NAME", What: "WHAT", Smallest: smallest, Step: 1, Start: 3, Most: 20, End: "END", Search: over,
						Flags: func(v int) string { return fmt.Sprintf("--flag %d", v) },
						Setup: func(v int) (*plan.Setup, error) {
							_, s := job(t, nil)
							s.Budget = 8 * memory.GiB
							return s, x.change(s, v)
						},
						Progress: func(done, all int) { progress = append(progress, fmt.Sprintf("%d/%d", done, all)) },
					}
					if over == Layouts {
						q.Start, q.Most = 1, 1
					}
					if scan {
						q.Values, q.Tried = []int{1, 2, 4, 8, 12}, "powers of two"
					}
					fmt.Fprintf(p, "\n=== %s, %s, scan %v, smallest %v\n", x.name, over, scan, smallest)
					a, err := q.Answer()
					if err != nil {
						p.note("error", err.Error())
						var none *NoneFits
						if errors.As(err, &none) {
							p.note("none", none)
						}
						continue
					}
					writeAnswer(p, a)
					p.note("answer", a)
					p.note("progress", progress)
				}
			}
		}
	}
	for _, a := range []Answer{
		{Method: "scan", Planned: 3, End: "the end"}, {Method: "scan", Planned: 1, Tried: "a few"}, {Method: "bisection", Step: 1, Planned: 2, Next: &Trial{Value: 9, Problem: "no"}},
		{Method: "bisection", Step: 2, Planned: 2, Tried: "some"}, {Method: "bisection", Step: 2, Planned: 5, Next: &Trial{Value: 3, Limit: hostLimit, Policy: "a policy", Node: &Node{GPUs: 8}}},
	} {
		writeAnswer(p, &a)
	}
	golden.Check(t, "questions.txt", p.String())
}
