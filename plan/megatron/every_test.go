// This file owns two tables of all flags that are read: what each of them does to a few jobs with
// every value that it may have, and what several do together. Write them anew with -update if a
// change is meant.

package megatron

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/plantest"
	"github.com/stowage-dev/stowage/plan"
)

// jobs have something of everything, so that flags which need others have an effect.
var jobs = []struct {
	name, flags string
	gpus        int
}{
	{"dense", "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 48 --vocab-size 1000 --bf16 --use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2", 24},
	{"experts", "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 48 --vocab-size 1000 --bf16 --swiglu --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4 --multi-latent-attention --qk-layernorm --mtp-num-layers 1 --moe-grouped-gemm --moe-token-dispatcher-type flex --use-distributed-optimizer --fp8-format e4m3 --fp8-recipe mxfp8 --fine-grained-activation-offloading --offload-modules moe_act --recompute-granularity selective --recompute-modules mla_up_proj --moe-layer-freq 2", 24},
	{"hybrid", "--hybrid-layer-pattern M*-M*-ME --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 48 --vocab-size 1000 --bf16 --num-experts 8 --use-megatron-fsdp --window-size 16,0 --cuda-graph-impl local --cuda-graph-modules attn", 24},
}

// outcome returns what arguments become: the setup's values, or words.
func outcome(args map[string]any, gpus int) (fields map[string]string, said string) {
	s, warnings, err := FromArgs(args, Options{GPUs: gpus})
	if err != nil {
		return nil, " " + err.Error()
	}
	fields = plantest.Fields(s)
	for _, w := range warnings {
		said += " (" + w.String() + ")"
	}
	return fields, said
}

// readFlags returns the flags that are read for arguments.
func readFlags(t *testing.T, args map[string]any, gpus int) []string {
	r, err := newReader(maps.Clone(args))
	if err == nil {
		err = refuse(r, Options{})
	}
	s := &plan.Setup{}
	for _, step := range []func(*reader, *plan.Setup, Options) error{readModel, readLayout, readBatch, readPrecision, readOptimizer, readKernels, readMemory, check} {
		if err == nil {
			err = step(r, s, Options{GPUs: gpus})
		}
	}
	if err != nil || r.err != nil {
		t.Fatal(err, r.err)
	}
	return slices.Sorted(maps.Keys(r.known))
}

// differing returns what only one of two lists has.
func differing(a, b []string) (only []string) {
	for _, x := range append(slices.Clone(a), b...) {
		if !slices.Contains(a, x) || !slices.Contains(b, x) {
			only = append(only, x)
		}
	}
	return only
}

// Which flags are read does not depend on the values of others: one that is not read is reported as
// unknown.
func TestEveryFlag(t *testing.T) {
	var b strings.Builder
	var changes []map[string]any // of the last job, each accepted by itself
	for _, job := range jobs {
		args, err := Parse("job.sh", []byte("python pretrain_gpt.py "+job.flags), ParseOptions{})
		if err != nil {
			t.Fatal(err)
		}
		was, said := outcome(args, job.gpus)
		if was == nil {
			t.Fatalf("%s: %s", job.name, said)
		}
		fmt.Fprintf(&b, "%s:%s%s\n", job.name, plantest.Changes(nil, was), said)
		read := readFlags(t, args, job.gpus)
		for _, name := range read {
			values := []any{nil, true, "0", "1", "2", "3", "0.5", "-1", "x"}
			effects := map[string][]string{}
			for i := 0; i < len(values); i++ {
				changed := maps.Clone(args)
				if changed[name] = values[i]; values[i] == nil {
					delete(changed, name)
				}
				fields, said := outcome(changed, job.gpus)
				if _, list, ok := strings.Cut(said, "choose from "); ok && values[i] == "x" { // the words that it takes
					for word := range strings.SplitSeq(list, ", ") {
						values = append(values, word)
					}
				}
				said = strings.ReplaceAll(said, "--"+name, "it")
				effect := said
				if fields != nil {
					if now := readFlags(t, changed, job.gpus); !slices.Equal(now, read) {
						t.Errorf("%s: with --%s %v other flags are read: %v", job.name, name, values[i], differing(now, read))
					}
					if effect = plantest.Changes(was, fields) + said; effect != "" {
						changes = append(changes, map[string]any{name: values[i]})
					}
				}
				if _, _, unknown := strings.Cut(said, "is unknown;"); values[i] == "x" || !unknown {
					effects[effect] = append(effects[effect], fmt.Sprint(values[i]))
				}
			}
			for _, effect := range slices.Sorted(maps.Keys(effects)) {
				if len(effect) > 0 && !strings.Contains(effect, "takes no value") && !strings.Contains(effect, "number is expected") && !strings.Contains(effect, "it takes one value") {
					fmt.Fprintf(&b, "  %s %s:%s\n", name, strings.Join(effects[effect], "|"), effect)
				}
			}
		}
		// Several at once, as a digest each.
		rng := rand.New(rand.NewPCG(1, uint64(len(job.name))))
		for i := range 200 {
			changed := maps.Clone(args)
			for range 2 + rng.IntN(4) {
				maps.Copy(changed, changes[rng.IntN(len(changes))])
			}
			maps.DeleteFunc(changed, func(_ string, v any) bool { return v == nil })
			fields, said := outcome(changed, job.gpus)
			if fields != nil {
				sum := sha256.Sum256([]byte(plantest.Changes(was, fields) + said))
				said = fmt.Sprintf(" %x", sum[:4])
			}
			fmt.Fprintf(&b, "  together %d:%s\n", i, said)
		}
		changes = nil
	}
	golden.Check(t, "every.txt", b.String())
}

// A flag may have a limit that follows from others: the layers of the model, its heads, the GPUs. For
// each flag that takes some numbers beyond one and refuses others, these are written down.
func TestNumbersOfFlags(t *testing.T) {
	numbers := []int{47, 48, 49, 63, 64, 65} // the batch and the sequence of the jobs
	for n := range 18 {                      // all that they have fewer of
		numbers = append(numbers, n+1)
	}
	slices.Sort(numbers)
	var b strings.Builder
	for _, job := range jobs {
		args, err := Parse("job.sh", []byte("python pretrain_gpt.py "+job.flags), ParseOptions{})
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "%s:\n", job.name)
		for _, name := range readFlags(t, args, job.gpus) {
			said := map[string][]string{} // numbers by the words about them
			changed := maps.Clone(args)
			for _, n := range numbers {
				changed[name] = fmt.Sprint(n)
				fields, why := outcome(changed, job.gpus)
				if why = digits.ReplaceAllString(strings.ReplaceAll(why, "--"+name, "it"), "#"); fields != nil {
					why = " ok" + why
				}
				said[why] = append(said[why], fmt.Sprint(n))
			}
			if len(said) == 1 || len(said) == 2 && slices.ContainsFunc(slices.Collect(maps.Values(said)), func(of []string) bool { return slices.Equal(of, []string{"1"}) }) {
				continue
			}
			for _, why := range slices.Sorted(maps.Keys(said)) {
				fmt.Fprintf(&b, "  %s %s:%s\n", name, strings.Join(said[why], ","), why)
			}
		}
	}
	golden.Check(t, "numbers.txt", b.String())
}

var digits = regexp.MustCompile(`[0-9]+`)
