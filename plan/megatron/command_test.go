package megatron

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/input/inputtest"
	"github.com/stowage-dev/stowage/memory"
	"pgregory.net/rapid"
)

// flat writes arguments in one line, sorted.
func flat(args map[string]any) string {
	words := []string{}
	for _, name := range slices.Sorted(maps.Keys(args)) {
		words = append(words, fmt.Sprintf("%s=%s", name, strings.Join(args[name].([]string), ",")))
	}
	return strings.Join(words, " ")
}

func TestParseCommand(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"plain", "--num-layers 32 --bf16 --lr=1e-4", "bf16= lr=1e-4 num-layers=32"},
		{"launcher", "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc_per_node 8 --nnodes=4 pretrain_gpt.py --seq-length 4096", "nnodes=4 nproc-per-node=8 seq-length=4096"},
		{"continued", "python pretrain_gpt.py \\\n  --num-layers 2 \\\n  --bf16 \\\n  --offload-modules moe_act core_attn\necho done", "bf16= num-layers=2 offload-modules=moe_act,core_attn"},
		{"quoted", `--hybrid-layer-pattern "M-M*|M-" --spec 'a b' --x "it's"`, "hybrid-layer-pattern=M-M*|M- spec=a b x=it's"},
		{"escaped", `--pipeline-model-parallel-layout Et\*2\|\(tt\|\)\*5t\|tmL --bf16`, "bf16= pipeline-model-parallel-layout=Et*2|(tt|)*5t|tmL"},
		{"bare layout", "--pipeline-model-parallel-layout Et*2|(tt|)*5t|tmL --bf16", "bf16= pipeline-model-parallel-layout=Et*2|(tt|)*5t|tmL"},
		{"bare brackets", "--window-size (127,0) --moe-layer-freq ([0]*3+([1]*2)) --bf16", "bf16= moe-layer-freq=([0]*3+([1]*2)) window-size=(127,0)"},
		{"subshell", "(cd x; python y.py --bf16 --x 1)", "bf16= x=1"},
		{"comments", "# a job\n--num-layers 2 # two\n#--bf16\n--swiglu", "num-layers=2 swiglu="},
		{"arrays", "H=4096\nARGS=(\n  --hidden-size $H # wide\n  --num-layers ${L:-32}\n  --bf16\n)\ntorchrun x.py ${ARGS[@]} \"${MORE[@]}\" --swiglu", "bf16= hidden-size=4096 num-layers=32 swiglu="},
		{"variables", "OPTS=\"\n --num-layers 2 \\\n --bf16\n\"\npython x.py $OPTS --swiglu", "bf16= num-layers=2 swiglu="},
		{"command in quotes", "run=\"python -u x.py --bf16 --num-layers 2\"\nsrun --nodes=2 sh -c \"${run}\"", "bf16= nodes=2 num-layers=2"},
		{"twice", "--num-layers 2 --num-layers 4", "num-layers=4"},
		{"negative", "--x -1 --y 1e-3", "x=-1 y=1e-3"},
		{"windows", "--num-layers 2 \\\r\n--bf16\r\n", "bf16= num-layers=2"},
		{"open", "--data-path $DATA --bf16", "bf16= data-path=$DATA"},
		{"redirected", "python y.py --num-layers 2 --bf16 2>&1 | tee log", "bf16= num-layers=2"},
		{"redirected and away", "python y.py --bf16 --x 1 >> log 2>err &\npython y.py --y 3 &> log", "bf16= x=1 y=3"},
		{"redirected before the end", "python y.py > log --x 2 1>&2 --y 3", "x=2 y=3"},
		{"no redirection", `--x 2 '>' --y "2>&1"`, "x=2,> y=2>&1"},
		{"separated", "export A=1; cd x && python y.py --bf16 | tee log", "bf16="},
	} {
		args, err := parseCommand(c.text)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		} else if got := flat(args); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
	for text, want := range map[string]string{
		"":            "no flags are in the text",
		"python x.py": "no flags are in the text",
		"--x 'open":   "a quote (') is not closed",
		`--x "open`:   `a quote (") is not closed`,
		`--x \`:       "ends with a backslash",
		"A=aaaaaaaa\n" + strings.Repeat("A=$A$A\n", 40) + "--x $A": "the variables of the text grow",
		"A='sh \"$A\" --x'\nsh \"$A\"":                             "", // single quotes put nothing in
		"A='$A --x y'\nsh $A":                                      "", // held as it is, not put in again
	} {
		if _, err := parseCommand(text); (err == nil) != (want == "") || (err != nil && !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: error %v, want %q", text, err, want)
		}
	}
}

// A shell reads the same values from what is written, whatever the values.
func TestCommandLineRoundTrip(t *testing.T) {
	value := rapid.StringMatching(`[a-zA-Z0-9_.,'"$#|()*\\;&!+=:/-][a-zA-Z0-9 _.,'"$#|()*\\;&!+=:/]{0,8}`)
	rapid.Check(t, func(t *rapid.T) {
		flags, want := []string{}, map[string]any{}
		for i := range rapid.IntRange(1, 6).Draw(t, "flags") {
			name := fmt.Sprintf("flag-%d", i)
			values := rapid.SliceOfN(value, 0, 3).Draw(t, "values")
			for _, v := range values {
				if strings.HasSuffix(v, ".py") || strings.HasPrefix(v, "--") || strings.Contains(v, " --") || isAssignment(v) || strings.ContainsRune(v, '$') {
					t.Skip("means something else")
				}
			}
			flags = append(append(flags, "--"+name), values...)
			want[name] = values
		}
		text := CommandLine(flags)
		got, err := parseCommand(text)
		if err != nil || flat(got) != flat(want) {
			t.Fatalf("%s\nis read as %v (%v), not %v", text, got, err, want)
		}
	})
}

func isAssignment(s string) bool {
	name, _, ok := strings.Cut(s, "=")
	return ok && isName(name)
}

func FuzzParseCommand(f *testing.F) {
	for _, s := range []string{
		"torchrun --nnodes 2 x.py --num-layers 32 --bf16", "A=(\n--x 1\n)\n$A", `--x "a\"b" 'c'`, "--x \\\n--y", "A='$A $A --x' sh -c \"$A\"",
		"--l Et*2|(tt|)*5", "${A:-${B}} --x", "$((1+2)) --x", "# only\n", "--=", "--x 2>&1 >", "9",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		defer inputtest.Bound(t, len(s))()
		args, err := parseCommand(s)
		if err != nil {
			return
		}
		// FromArgs accepts or refuses anything that parses, without a panic.
		_, _, _ = FromArgs(args, Options{Vocab: 100})
	})
}

func TestParseYAML(t *testing.T) {
	args, err := parseYAML([]byte(`
ENV_VARS:
  NCCL_ALGO: Ring
MODEL_ARGS:
  --num-layers: 12
  --bf16: true
  --no-bias-gelu-fusion: false
  --moe-layer-freq: ([0]*3+[1]*9)
  --rampup-batch-size: [384 384 97656250]
  --offload-modules: [moe_act, core_attn]
  --num-layers: 14
TEST_TYPE: regular
`))
	if err != nil {
		t.Fatal(err)
	}
	r, err := newReader(args)
	if err != nil {
		t.Fatal(err)
	}
	if n := r.count("num-layers", 0); n != 14 {
		t.Errorf("num-layers is %d", n)
	}
	if !r.flag("bf16") || r.flag("no-bias-gelu-fusion") {
		t.Error("flags are wrong")
	}
	if words, _ := r.get("rampup-batch-size"); strings.Join(words, "+") != "384+384+97656250" {
		t.Errorf("ramp-up is %q", words)
	}
	if got := r.modules("offload-modules", memory.Offload); !slices.Equal(got, []string{"moe_act", "core_attn"}) {
		t.Errorf("modules are %v", got)
	}
	if w := r.word("moe-layer-freq", ""); w != "([0]*3+[1]*9)" {
		t.Errorf("frequency is %q", w)
	}
	if r.err != nil {
		t.Error(r.err)
	}
	for text, want := range map[string]string{
		"":                             "has no arguments",
		"MODEL_ARGS: 5":                "MODEL_ARGS must hold flags",
		"language_model:\n  layers: 5": `"language_model" holds keys of its own`,
		"a: [":                         "the YAML cannot be read",
		"- a\n- b":                     "the YAML cannot be read",
	} {
		if _, err := parseYAML([]byte(text)); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: error %v, want %q", text, err, want)
		}
	}
}

func FuzzParseYAML(f *testing.F) {
	for _, s := range []string{"a: 1", "MODEL_ARGS:\n  --x: true", "num_layers: [1, 2]", "x: {a: 1}", "? a\n: b", "x: !!binary aGk="} {
		f.Add([]byte(s))
	}
	for _, c := range inputtest.HostileYAML {
		f.Add([]byte(c.Text))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		defer inputtest.Bound(t, len(data))()
		if args, err := parseYAML(data); err == nil {
			_, _, _ = FromArgs(args, Options{Vocab: 100})
		}
	})
}
