package megatron

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/spell"
)

const plainJob = " --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --vocab-size 128 --micro-batch-size 1"

// notesOf returns the setup's warnings, which are all that a file is planned with in silence otherwise.
func notesOf(t *testing.T, name, text string) (notes []string, tp, layers, kv int) {
	t.Helper()
	args, err := Parse(name, []byte(text), ParseOptions{})
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	s, warnings, err := FromArgs(args, Options{})
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	for _, w := range warnings {
		notes = append(notes, w.String())
	}
	return notes, s.Layout.TP, len(s.Model.Layers), s.Model.Layers[0].Attention.KVHeads
}

// The only flag that begins as a word does is meant by it, as for argparse.
func TestAbbreviatedFlags(t *testing.T) {
	for _, c := range []struct {
		text       string
		tp, layers int
		note       string
	}{
		{"python pretrain_gpt.py --num-layers 2 --tensor-model-par 2" + plainJob, 2, 2, "--tensor-model-par is read as --tensor-model-parallel-size, the only flag that begins so, as argparse does"},
		{"python pretrain_gpt.py --num-layers 2 --tensor_model_par=2" + plainJob, 2, 2, "--tensor-model-par is read as"},
		{"python pretrain_gpt.py --num-layers 2 --tensor-model-parallel-size 4 --tensor-model-par 2" + plainJob, 2, 2, "--tensor-model-par is read as"},
		{"python pretrain_gpt.py --num-layers 2 --tensor-model-par 4 --tensor-model-parallel-size 2" + plainJob, 2, 2, "--tensor-model-par is read as"},
		{"ARGS='--num-layers 2 --tensor-model-par 2" + plainJob + "'", 2, 2, "--tensor-model-par is read as"},
		{"python pretrain_gpt.py --num-layers 2 --context-par 1 --expert-model 1 --make-vocab 64" + plainJob, 1, 2, "--make-vocab is read as --make-vocab-size-divisible-by"},
		{"python pretrain_gpt.py --num-layers 2 --disable-ckpt 3" + plainJob, 1, 2, "--disable-ckpt is read as --disable-ckpt-load-validate-sharding-integrity"},
		{"python pretrain_gpt.py --num-layers 2 --context-parallel 1" + plainJob, 1, 2, "--context-parallel is read as --context-parallel-size"},
		{"python pretrain_gpt.py --num-layers 2 --adam-beta 0.9" + plainJob, 1, 2, "--adam-beta: is the beginning of --adam-beta1 and --adam-beta2, so Megatron-LM refuses it; it was left out"},
		{"python pretrain_gpt.py --num-layers 2 --log 3" + plainJob, 1, 2, "--log: is the beginning of --log-"},
	} {
		notes, tp, layers, _ := notesOf(t, "job.sh", c.text)
		if tp != c.tp || layers != c.layers || !strings.Contains(strings.Join(notes, "; "), c.note) {
			t.Errorf("%s: tp %d, %d layers, notes %q; want %q", c.text, tp, layers, notes, c.note)
		}
	}
	yaml := "num-layers: 2\ntensor-model-par: 2" + strings.NewReplacer(" --", "\n", " ", ": ").Replace(plainJob)
	if notes, tp, _, _ := notesOf(t, "job.yaml", yaml); tp != 2 || !slices.ContainsFunc(notes, func(n string) bool { return strings.HasPrefix(n, "--tensor-model-par is read as") }) {
		t.Errorf("YAML: tp %d, %q", tp, notes)
	}
	if notes, tp, _, _ := notesOf(t, "job.yaml", yaml+"\ntensor_model_parallel_size: 1"); tp != 1 || len(notes) == 0 {
		t.Errorf("YAML with both: tp %d, %q", tp, notes)
	}
}

// Groups of queries without the flag that switches them on are left out with a note.
func TestQueryGroupsWithoutTheirFlag(t *testing.T) {
	const job = "python pretrain_gpt.py --num-layers 2" + plainJob
	const want = "--num-query-groups: is 2, and Megatron-LM leaves it out without --group-query-attention: each of the 4 heads has keys and values of its own"
	if notes, _, _, kv := notesOf(t, "job.sh", job+" --num-query-groups 2"); kv != 4 || !slices.Contains(notes, want) {
		t.Errorf("%d groups, %q", kv, notes)
	}
	for _, quiet := range []string{"", " --num-query-groups 4", " --num-query-groups 2 --group-query-attention"} {
		if notes, _, _, _ := notesOf(t, "job.sh", job+quiet); strings.Contains(strings.Join(notes, ";"), "query") {
			t.Errorf("%s: %q", quiet, notes)
		}
	}
}

// What a flag that is not known costs does not grow with the flags that are: a file may have thousands of them.
func TestManyUnknownFlags(t *testing.T) {
	made := func(n int) float64 {
		args := map[string]any{"num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 128, "max-position-embeddings": 128, "vocab-size": 128, "micro-batch-size": 1}
		for i := range n {
			args[fmt.Sprintf("surprising-thing-%d", i)] = true
		}
		return testing.AllocsPerRun(1, func() {
			if _, warnings, err := FromArgs(args, Options{}); err != nil || len(warnings) < n {
				t.Errorf("%d notes, %v", len(warnings), err)
			}
		})
	}
	if few, many := made(10), made(110); (many-few)/100 > 200 {
		t.Errorf("each of 100 unknown flags takes %.0f allocations", (many-few)/100)
	}
}

// What passes over far words takes none for farther than it is.
func TestAtLeast(t *testing.T) {
	if n := atLeast("layers-num", "num-layers"); n != 0 {
		t.Errorf("%d letters of the same word in another order have to change", n)
	}
	if n := atLeast("tp", "--tp=44"); n != 5 {
		t.Errorf("%d letters have to be inserted, want 5", n)
	}
	flags := (&abbreviations{}).beginning("m")
	for i, a := range flags {
		for _, b := range flags[:min(i, 9)] {
			if n := spell.Distance(a, b); atLeast(a, b) > n || atLeast(a[:len(a)/2], a) != len(a)-len(a)/2 {
				t.Errorf("%s and %s are %d letters apart, not at least %d", a, b, n, atLeast(a, b))
			}
		}
	}
}
