package megatron

import (
	"errors"
	"fmt"
	"maps"
	"os"
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
		if slices.Contains(besides, name) {
			continue
		}
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
		{"brackets at the end", "--bf16 --moe-layer-freq ([0]*3+[1]*58)", "bf16= moe-layer-freq=([0]*3+[1]*58)"},
		{"layout at the end", "--bf16 --pipeline-model-parallel-layout E(tt|)", "bf16= pipeline-model-parallel-layout=E(tt|)"},
		{"bare layout", "--pipeline-model-parallel-layout Et*2|(tt|)*5t|tmL --bf16", "bf16= pipeline-model-parallel-layout=Et*2|(tt|)*5t|tmL"},
		{"bare brackets", "--window-size (127,0) --moe-layer-freq ([0]*3+([1]*2)) --bf16", "bf16= moe-layer-freq=([0]*3+([1]*2)) window-size=(127,0)"},
		{"subshell", "(cd x; python y.py --bf16 --x 1)", "bf16= x=1"},
		{"comments", "# a job\n--num-layers 2 # two\n#--bf16\n--swiglu", "num-layers=2 swiglu="},
		{"arrays", "H=4096\nARGS=(\n  --hidden-size $H # wide\n  --num-layers ${L:-32}\n  --bf16\n)\ntorchrun x.py ${ARGS[@]} \"${MORE[@]}\" --swiglu", "bf16= hidden-size=4096 num-layers=32 swiglu="},
		{"variables", "OPTS=\"\n --num-layers 2 \\\n --bf16\n\"\npython x.py $OPTS --swiglu", "bf16= num-layers=2 swiglu="},
		{"blanks around a value", "A=' --x 1 '\npython y.py --w${A}--y 2", "w= x=1 y=2"},
		{"command in quotes", "run=\"python -u x.py --bf16 --num-layers 2\"\nsrun --nodes=2 sh -c \"${run}\"", "bf16= nnodes=2 num-layers=2"},
		{"twice", "--num-layers 2 --num-layers 4", "num-layers=4"},
		{"negative", "--x -1 --y 1e-3", "x=-1 y=1e-3"},
		{"windows", "--num-layers 2 \\\r\n--bf16\r\n", "bf16= num-layers=2"},
		{"open", "--data-path $DATA --bf16", "bf16= data-path=$DATA"},
		{"redirected", "python y.py --num-layers 2 --bf16 2>&1 | tee log", "bf16= num-layers=2"},
		{"redirected and away", "python y.py --bf16 --x 1 >> log 2>err &", "bf16= x=1"},
		{"redirected and away too", "python y.py --y 3 &> log", "y=3"},
		{"two jobs", "python y.py --x 1 --y 2\npython y.py --y 3", "y=3"},
		{"arguments of a function", `go() { local t=${1:-1}; shift; python x.py --t $t --k $# "$@"; }
set -- --w 9
go 8 --u 2
python -c 1 --v $2`, "k=2 t=8 u=2"},
		{"assignments that compute", "A=1\n((A*=8))\nlet A=A+2 'B = A - 1'\n((A++))\n((C=A*D))\npython x.py --a $A --b $B --c $C", "a=11 b=9 c=$((A*D))"},
		{"patterns", "case 70b in [!78]*) T=1;; ?0[ab]) T=2;; *) T=3;; esac\n[[ a/b/c == a*c ]] && U=4\npython x.py --t $T --u $U", "t=2 u=4"},
		{"local variables", "T=1\ngo() { local T=8 U=3; declare -i V; V=2; W=4; python -c $T; }\ngo\npython x.py --t $T --u ${U:-0} --v ${V:-0} --w $W", "t=1 u=0 v=0 w=4"},
		{"subshells", "X=1\n(X=4; Y=2; f() { Z=3; }; set -- a b)\n( ( X=5 ) )\nf() { Z=9; }; f\npython x.py --x $X --y ${Y:-0} --z $Z --k $#", "k=0 x=1 y=0 z=9"},
		{"a job in a subshell", "X=1\n(X=4; python x.py --x $X)", "x=4"},
		{"pipelines", "X=1\nX=2 | cat\necho 3 | while read l; do X=3; done\ntrue && X=4 | cat\npython x.py --x $X", "x=1"},
		{"the background", "X=1\nX=2 &\n{ X=3; } &\nif true; then X=4; fi & wait\npython x.py --x $X", "x=1"},
		{"substitutions", "X=1\nA=$(X=2; echo $X)\nB=`X=3`\ncat <(X=4) >/dev/null\npython x.py --x $X", "x=1"},
		{"other shells", "export X=1\nbash -c 'X=2'\nsh <<E\nX=3\nE\neval Y=4 'Z=5'\npython x.py --x $X --y $Y --z $Z", "x=1 y=4 z=5"},
		{"variables of one command", "X=1\nX=2 python -c 1\nf() { python x.py --x $X --y $Y; }\nY=8 X=3 f\nX=4 python -c $X\npython x.py --x $X --y ${Y:-0}", "x=1 y=0"},
		{"locals of subshells", "X=1\nf() { ( local X=5; X=6 ); X=2; }\nf\npython x.py --x $X", "x=2"},
		{"both outputs", "X=1\nX=2 &> log\necho a &>> log && X=${X}3\npython x.py --x $X", "x=23"},
		{"functions that are subshells", "X=1\nf() (\n X=2; local Y=3\n)\nf\npython x.py --x $X --y ${Y:-0}", "x=1 y=0"},
		{"locals of functions", "X=1; Y=1; Z=1\ng() { X=5; declare -g Z=6; local Y; Y=7; }\nf() { local X; python -c ${X:-0}; g; X=${X}0; python x.py --in $X; }\nf\npython x.py --x $X --y $Y --z $Z", "x=1 y=1 z=6"},
		{"a loop that counts", "for ((i=0; i<4; i++)); do python x.py --t 2; done", "t=2"},
		{"arrays by name", "declare -A L=([8b]=32 [70b]=80)\nL[405b]=126\nS=70b\npython x.py --l ${L[$S]} --m ${L[405b]} --k ${L[1x]} --o 1", "k=${L[1x]} l=80 m=126 o=1"},
		{"redirected before the end", "python y.py > log --x 2 1>&2 --y 3", "x=2 y=3"},
		{"no redirection", `--x 2 '>' --y "2>&1"`, "x=2,> y=2>&1"},
		{"separated", "export A=1; cd x && python y.py --bf16 | tee log", "bf16="},
		{"arithmetic", "A=4\nB=$((A*64))\npython x.py --a $(( $A + 2 * (B - 6) )) --b $((B/100)) --c $((B>9?1:2))", "a=504 b=2 c=1"},
		{"bases, powers and shifts", "python x.py --a $((0x20)) --b $((010)) --c $((2**3**2)) --d $((1<<10>>2)) --e $((-2**2)) --f $((3<4<<1))", "a=32 b=8 c=512 d=256 e=4 f=1"},
		{"numbers that are none", "python x.py --a $((08)) --b $((0b1)) --c $((1_0)) --d $((1<<99)) --e $((2**-1)) --f $((2**99))", "a=$((08)) b=$((0b1)) c=$((1_0)) d=$((1<<99)) e=$((2**-1)) f=$((2**99))"},
		{"not computed", "python x.py --a $((X*2)) --b $((1/0))", "a=$((X*2)) b=$((1/0))"},
		{"defaults", `: ${X:=4}
Y=${Y:-"$(date +"%y-%m") late"}
Z=${Z-${X}8}
python x.py --x $X --z $Z --w ${W:-"a b"} --v ${V:+set} --u ${X:+set}`, "u=set v= w=a b x=4 z=48"},
		{"if", `A=1
if [ "$A" = 1 ]; then B=2; else B=3; fi
if [[ $A -gt 1 || -n "$C" ]]; then B=4; elif [ ! -z "$A" ]; then D=5; fi
[ -z $E ] && E=6
[[ $A == 2 ]] && E=7
python x.py --b $B --d $D --e $E`, "b=2 d=5 e=6"},
		{"a file decides", "A=1\nif [ -f x ]; then A=2; else A=3; fi\npython x.py --a $A", "a=3"},
		{"case", `S=8B
case "${S}" in
  "1B"|2B) H=1;;
  8B)
    H=2
    ;;
  *) H=3; exit 1 ;;
esac
python x.py --h $H`, "h=2"},
		{"arguments of the script", `while [[ $# -gt 0 ]]; do
  case $1 in
    --layers) L="$2"; shift 2 ;;
    -h|--help) echo "--help" ; exit 0 ;;
  esac
done
python x.py --l ${L:-12} --m ${1:-3} "$@"`, "l=12 m=3"},
		{"loops and functions", `go() { A=$((A+1)); }
A=0
for x in 1 2 3; do go; done
python x.py --a $A`, "a=3"},
		{"arrays that grow", `A=(--x 1)
A+=("--y 2" --z)
if [ "${#A[@]}" -gt 3 ]; then A=("${A[@]}" --w "$(nproc)"); fi
python x.py ${A[@]} "${B[@]}" ${A[1]}`, "w=$(nproc),1 x=1 y=2 z="},
		{"the branch that is not taken", `F=0
ARGS="--num-layers 2"
if [ "$F" = 1 ]; then ARGS="$ARGS --fp16"; else ARGS+=" --bf16"; fi
python pretrain_gpt.py $ARGS`, "bf16= num-layers=2"},
		{"slurm", `#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8 --gpus-per-node=8
srun python pretrain_gpt.py --world $((SLURM_NNODES*8)) --bf16`, "bf16= nnodes=4 nproc-per-node=8 world=32"},
		{"srun", "srun -N 4 --ntasks-per-node=8 --container-image x python pretrain_gpt.py --bf16", "bf16= nnodes=4 nproc-per-node=8"},
		{"srun with all tasks", "srun -N 2 -n 16 python pretrain_gpt.py --bf16", "bf16= nnodes=2 nproc-per-node=8"},
		{"torchrun in srun", "srun --nodes=4 --ntasks-per-node=1 torchrun --nnodes 4 --nproc-per-node=8 pretrain_gpt.py --bf16", "bf16= nnodes=4 nproc-per-node=8"},
		{"one task on a node", "srun -N 2 --ntasks-per-node=1 --gpus-per-node=8 python pretrain_gpt.py --bf16", "bf16= nnodes=2 nproc-per-node=8"},
		{"one task", "srun -N 2 --ntasks-per-node=2 --gpus-per-node=8 -n 32 python pretrain_gpt.py --bf16", "bf16= nnodes=2 nproc-per-node=2"},
		{"tasks that nodes cannot share", "srun -N 3 -n 16 python pretrain_gpt.py --bf16", "bf16= nnodes=3"},
		{"gres", "#SBATCH --gres=gpu:h100:8\nsrun python pretrain_gpt.py --bf16", "bf16= nproc-per-node=8"},
		{"to be filled in", "torchrun --nnodes your_nodes --nproc-per-node auto pretrain_gpt.py --bf16", "bf16= nnodes=your_nodes nproc-per-node=auto"},
		{"mpirun", "mpirun -np 16 python pretrain_gpt.py --bf16", "bf16= nproc-per-node=16"},
		{"a text for a shell", "CMD=\"cd x; python pretrain_gpt.py --bf16 --x ${X:-1}\"\nsrun -N 2 bash -c \"$CMD\" 2>&1 | tee log", "bf16= nnodes=2 x=1"},
		{"here", "X=1\nsbatch <<EOF\n#SBATCH --nodes=2\npython pretrain_gpt.py --x $X --y \\$Z\nEOF\necho done", "nnodes=2 x=1 y=$Z"},
		{"here for others", "python - a <<'PY'\nprint('--x')\nPY\npython pretrain_gpt.py --bf16", "bf16="},
		{"the program that trains", "python convert_model.py --a 1\npython pretrain_gpt.py --b 2\npython tools/report.py --c 3", "b=2"},
		{"a module", "python -m torch.distributed.run --nproc-per-node 2 -m examples.pretrain_gpt --bf16", "bf16= nproc-per-node=2"},
		{"held by a variable alone", "MODEL_ARGS=\" \\\n --num-layers 2 \\\n --hidden-size 8 \\\n\"\nTOKENIZER_MODEL=a/b", "hidden-size=8 num-layers=2 tokenizer-model=a/b"},
		{"more arguments than the text has", "python pretrain_gpt.py --seed 42 ${MORE} --bf16 $OTHER", "bf16=$OTHER seed=42"},
		{"dollars", "A=\"x-$$\"\nB=${B:-\"a$$\"}\npython x.py --a 1", "a=1"},
		{"cut", "F=dir/model.tar.gz\npython x.py --a ${F##*/} --b ${F%.gz} --c ${F%%.*} --d ${F#*/} --e ${F:4:5}", "a=model.tar.gz b=dir/model.tar c=dir/model d=model.tar.gz e=model"},
	} {
		args, err := parseCommand(c.text, ParseOptions{})
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
		"if [ 1 = 1 ]; then --x":                                   `"fi" is missing behind "if"`,
		"[[ -n x":                                                  `"]]" is missing behind "[["`,
		"for i in 1; --x":                                          `"do" is missing behind "for"`,
		strings.Repeat("$(", 60_000):                               "nested more than 100 deep",
		strings.Repeat("(", 100_000):                               "nested more than 100 deep",
		strings.Repeat("if ", 60_000):                              "nested more than 100 deep",
		"f() { f; }; f":                                            "nested without end",
		"A='sh \"$A\" --x'\nsh \"$A\"":                             "", // single quotes put nothing in
		"A='$A --x y'\nsh $A":                                      "", // held as it is, not put in again
	} {
		if _, err := parseCommand(text, ParseOptions{}); (err == nil) != (want == "") || (err != nil && !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: error %v, want %q", text, err, want)
		}
	}
}

// An empty value is a word of its own.
func TestCommandLineOfAnEmptyValue(t *testing.T) {
	if got, want := CommandLine([]string{"--a", "", "b c", "--d"}), "--a '' 'b c' \\\n--d"; got != want {
		t.Errorf("%s, want %s", got, want)
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
				if strings.HasSuffix(v, ".py") || strings.HasPrefix(v, "--") || v == "-m" || strings.Contains(v, " --") || isAssignment(v) || strings.ContainsRune(v, '$') {
					t.Skip("means something else")
				}
			}
			flags = append(append(flags, "--"+name), values...)
			want[name] = values
		}
		text := CommandLine(flags)
		got, err := parseCommand(text, ParseOptions{})
		if err != nil || flat(got) != flat(want) {
			t.Fatalf("%s\nis read as %v (%v), not %v", text, got, err, want)
		}
	})
}

// What a file takes from its environment can be given, and files that it sources are read.
// What a script leaves to its machine, and what it launches beside the job, is noted.
func TestGuesses(t *testing.T) {
	const model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --bf16 --vocab-size 64 "
	for _, c := range []struct{ text, want string }{
		{"if [ -f x ]; then T=1; else T=2; fi\npython pretrain_gpt.py --tensor-model-parallel-size $T " + model, "--tensor-model-parallel-size: a condition of the script that is not known decides it"},
		{"if [ -f x ]; then S=--swiglu; fi\npython pretrain_gpt.py $S " + model, "--swiglu: a condition of the script that is not known decides it"},
		{"if [ -f x ]; then S='--save y'; fi\npython pretrain_gpt.py $S " + model, ""},
		{"if [ -f x ]; then python pretrain_gpt.py " + model + "; fi", ""},
		{"for m in 1 2; do python pretrain_gpt.py " + model + " --micro-batch-size $m; done", "the script launches pretrain_gpt.py more than once, with different arguments"},
		{"for m in 1 2; do python pretrain_gpt.py " + model + "; done", ""},
		{"for n in 1 2; do torchrun --nproc_per_node 1 --nnodes $n pretrain_gpt.py " + model + "; done", "the script launches pretrain_gpt.py more than once, with different arguments"},
		{"python pretrain_gpt.py " + model + "\\\n # --swiglu \\\n --bf16", "a line begins with --bf16, which a shell takes for a command of its own"},
		{"deepspeed pretrain_gpt.py --deepspeed --deepspeed_config=ds.json " + model, "--deepspeed: is not part of the forecast: DeepSpeed's own configuration can shard"},
		{"python pretrain_gpt.py --num-experts 4 --moe-token-dispatcher-type flex " + model, "--moe-token-dispatcher-type: Megatron-LM refuses flex where one rank has all experts"},
		{"torchrun --nnodes 1:4 --nproc_per_node 2 pretrain_gpt.py --tensor-model-parallel-size 4 " + model, "--nnodes: is 1:4, which is no number; 2 x 2 GPUs"},
		{"torchrun --nnodes 2 --nproc_per_node gpu pretrain_gpt.py --tensor-model-parallel-size 4 " + model, "--nproc-per-node: is gpu: the number of GPUs is not in the arguments; 4"},
		{"torchrun --nnodes $N --nproc_per_node 2 pretrain_gpt.py --tensor-model-parallel-size 4 " + model, "--nnodes: is $N, which the text does not set; 2 x 2 GPUs"},
	} {
		args, err := Parse("x.sh", []byte(c.text), ParseOptions{})
		if err != nil {
			t.Fatal(err)
		}
		_, warnings, err := FromArgs(args, Options{})
		if err != nil {
			t.Fatalf("%s: %v", c.text, err)
		}
		found := c.want == ""
		for _, w := range warnings {
			if c.want == "" && (strings.Contains(w.Text, "condition") || strings.Contains(w.Text, "launches")) {
				t.Errorf("%s: %s", c.text, w)
			}
			found = found || strings.HasPrefix(w.String(), c.want)
		}
		if !found {
			t.Errorf("%s: %v, want %s", c.text, warnings, c.want)
		}
	}
}

// Arrays without letters cannot grow without end either.
func TestArraysAreBounded(t *testing.T) {
	_, err := Parse("x.sh", []byte("A=('' '')\n"+strings.Repeat("A+=(\"${A[@]}\")\n", 40)), ParseOptions{})
	if err == nil || !strings.Contains(err.Error(), "grow beyond") {
		t.Errorf("%v", err)
	}
}

func TestParseOptions(t *testing.T) {
	o := ParseOptions{
		Env: map[string]string{"NLS": "4", "HOSTS": "2"},
		Open: func(name string) ([]byte, error) {
			if name != "conf/sizes.sh" {
				return nil, os.ErrNotExist
			}
			return []byte("HS=64\nsource \"$(dirname $0)/conf/sizes.sh\"\n"), nil
		},
	}
	args, err := parseCommand("source ${DIR}/conf/sizes.sh\nHOSTS=$(nproc)\nNAH=${NAH:-2}\n. missing.sh\npython x.py --num-layers $NLS --hidden-size $HS --heads $NAH --hosts $HOSTS", o)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := flat(args), "heads=2 hidden-size=64 hosts=2 num-layers=4"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	cat, err := parseCommand("python x.py $(cat conf/sizes.txt) --a $(cat missing.txt)", ParseOptions{Open: func(name string) ([]byte, error) {
		if name != "conf/sizes.txt" {
			return nil, os.ErrNotExist
		}
		return []byte("--num-layers 2\n--heads 4\n"), nil
	}})
	if got, want := flat(cat), "a=$(cat missing.txt) heads=4 num-layers=2"; err != nil || got != want {
		t.Errorf("%s, want %s; %v", got, want, err)
	}
	if got := args[sourcedKey]; !slices.Contains(got.([]string), "missing.sh") {
		t.Errorf("not found: %v", got)
	}
	args, err = parseYAML([]byte("num-layers: ${NLS}\nhidden-size: $HS\n"), o.Env)
	if err != nil || args["num-layers"] != "4" || args["hidden-size"] != "${HS}" {
		t.Errorf("%v, %v", args, err)
	}
	_, _, err = FromArgs(small("hidden-size", "${HS}", "seq-length", "${SEQ}", "data-path", "${DATA}"), Options{})
	var refused *Refused
	if !errors.As(err, &refused) || !refused.NoJob || !slices.Equal(refused.Variables, []string{"HS", "SEQ"}) {
		t.Errorf("%v: %+v", err, refused)
	}
}

// Letters of a number are no variable.
func TestVariablesInArithmetic(t *testing.T) {
	if got := variablesIn("$((0x20 * N + 1e3))", "$((M<<2))"); !slices.Equal(got, []string{"N", "M"}) {
		t.Errorf("the variables are %q", got)
	}
}

// A variable that a file does not use, or that it overwrites, gets a note.
func TestUnusedVariables(t *testing.T) {
	const unused = "the variable %s changes nothing: the file does not use it, or sets it itself"
	for _, c := range []struct{ name, file, text, want string }{
		{"NODES", "x.sh", "A=$NODES\npython x.py --a $A", ""},
		{"NODES", "x.sh", "python x.py --a ${NODES:-2}", ""},
		{"NODES", "x.sh", "python x.py --a $((NODES*2))", ""},
		{"NODES", "x.sh", "[[ -v NODES ]] && X=1\npython x.py --a 1", ""},
		{"NODES", "x.sh", "NODES=$(nproc)\npython x.py --a $NODES", ""},
		{"NODES", "x.sh", "if [ -f x ]; then A=$NODES; fi\npython x.py --a 1", ""},
		{"NODES", "x.sh", "NODES+=8\npython x.py --a $NODES", ""},
		{"NODES", "x.sh", "NODES=8\npython x.py --a $NODES", unused},
		{"NODE", "x.sh", "python x.py --a ${NODES:-2}", unused + " (did you mean NODES?)"},
		{"TYPO", "x.sh", "python x.py --a 2", unused},
		{"NODES", "x.yaml", "a: ${NODES}", ""},
		{"NODE", "x.yaml", "a: ${NODES}", unused + " (did you mean NODES?)"},
		{"TYPO", "x.yaml", "a: 2", unused},
	} {
		args, err := Parse(c.file, []byte(c.text), ParseOptions{Env: map[string]string{c.name: "4"}})
		got := ""
		if notes, ok := args[unusedKey].([]string); ok {
			got = strings.Join(notes, "; ")
		}
		if want := strings.Replace(c.want, "%s", c.name, 1); err != nil || got != want {
			t.Errorf("%s in %q: %q, %v, want %q", c.name, c.text, got, err, want)
		}
	}
}

func isAssignment(s string) bool {
	name, _, ok := strings.Cut(s, "=")
	return ok && isName(name)
}

func FuzzParseCommand(f *testing.F) {
	for _, s := range []string{
		"torchrun --nnodes 2 x.py --num-layers 32 --bf16", "A=(\n--x 1\n)\n$A", `--x "a\"b" 'c'`, "--x \\\n--y", "A='$A $A --x' sh -c \"$A\"",
		"if [ -z $A ]; then B=1; elif x; then :; else C=2; fi; --x $B", "case $A in a|b) x;; *) y;; esac", "for i in a b; do f; done; f() { g; }", "sbatch <<E\n--x $A\nE\n",
		"#SBATCH --nodes=2 --gres=gpu:8\nsrun -N 2 x.py --y", "A+=(1 \"$B\"); ${A[@]} ${#A[@]} ${A[1]} ${A%x*}", "$((A<2?B:(3*C)))", "[[ a == b* && ( -n $C || ! -v D ) ]] && --x",
		"--l Et*2|(tt|)*5", "${A:-${B}} --x", "$((1+2)) --x", "# only\n", "--=", "--x 2>&1 >", "9",
		"A=''\nB=$($A) C=`expr 1 + 2`\nx.py --x $B$C $(echo 1 | bc | xargs)", "A=$(cat <<E | tr '\n' ' '\n--x 1\nE\n)\nread -r -d '' B <<E\n--y\nE\nx.py $A $B",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		defer inputtest.Bound(t, len(s))()
		args, err := parseCommand(s, ParseOptions{})
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
  --num-layers: 12
TEST_TYPE: regular
`), nil)
	if err != nil {
		t.Fatal(err)
	}
	r, err := newReader(args)
	if err != nil {
		t.Fatal(err)
	}
	if n := r.count("num-layers", 0); n != 12 {
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
		"a: 1\n--a: 2":                 "lines 1 and 2 give one flag different values, as a and as --a",
		"- a\n- b":                     "the YAML cannot be read",
	} {
		if _, err := parseYAML([]byte(text), nil); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: error %v, want %q", text, err, want)
		}
	}
}

func FuzzParseYAML(f *testing.F) {
	for _, s := range []string{"a: 1", "MODEL_ARGS:\n  --x: true", "num_layers: [1, 2]", "x: {a: 1}", "a: 1\na: &b 2\n? [c]\n: *b", "? a\n: b", "x: !!binary aGk="} {
		f.Add([]byte(s))
	}
	for _, c := range inputtest.HostileYAML {
		f.Add([]byte(c.Text))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		defer inputtest.Bound(t, len(data))()
		if args, err := parseYAML(data, nil); err == nil {
			_, _, _ = FromArgs(args, Options{Vocab: 100})
		}
	})
}

// What may hold further arguments is noted, wherever it stands.
func TestMoreArguments(t *testing.T) {
	const job = "python pretrain_gpt.py --num-layers 2" + plainJob
	const more = " may hold more arguments, which are not in the text and take no part"
	for text, want := range map[string]string{
		job: "", job + ` "$@"`: "", job + " $EXTRA": "$EXTRA" + more, job + " $MORE --bf16 $EXTRA": "$MORE" + more + "; $EXTRA" + more,
		job + " --bf16 $(cat more.txt)": "$(cat more.txt)" + more, job + " $(cat more.txt)": "$(cat more.txt)" + more, job + " --data-path $DATA": "",
		"A=$EXTRA\nA+=' --bf16'\n" + job + " $A": "$EXTRA" + more,
	} {
		notes, _, _, _ := notesOf(t, "job.sh", text)
		notes = slices.DeleteFunc(notes, func(n string) bool { return !strings.Contains(n, "arguments, which") })
		if got := strings.Join(notes, "; "); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}

// An error that comes from a given variable names it, and not what the file makes of it.
func TestWrongVariables(t *testing.T) {
	const job = " --hidden-size 64 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --vocab-size 50"
	computes := "D=$((8*NODES/2))\nB=$((D*4))\ntorchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 --global-batch-size $B" + job
	for _, c := range []struct{ file, text, value, want string }{
		{"x.sh", computes, "4", ""},
		{"x.sh", computes, "four", `the variable NODES is "four", and the file computes with it, so it must be a whole number`},
		{"x.sh", strings.Replace(computes, "*NODES", "*$NODES", 1), "four", "it must be a whole number"},
		{"x.sh", "N=$NODES\n" + strings.Replace(computes, "NODES", "N", 1), "4.5", "it must be a whole number"},
		{"x.sh", computes, "1e3", "it must be a whole number"},
		{"x.sh", "if (( NODES )); then A=1; fi\npretrain_gpt.py --num-layers 2" + job, "yes", ""},
		{"x.sh", "pretrain_gpt.py --num-layers $NODES" + job, "four", "the variable NODES is wrong: --num-layers four: a whole number is expected"},
		{"x.sh", "pretrain_gpt.py --num-layers $NODES" + job, "0", "the variable NODES is wrong: --num-layers 0"},
		{"x.yaml", "num-layers: ${NODES}\n" + strings.NewReplacer(" --", "\n", " ", ": ").Replace(job), "four", "the variable NODES is wrong: --num-layers four"},
		{"x.sh", "torchrun --nnodes $NODES --nproc-per-node 8 pretrain_gpt.py --num-layers 2" + job, "four", "the variable NODES is wrong: --nnodes four: a whole number is expected"},
		{"x.sh", "torchrun --nnodes $NODES --nproc-per-node 8 pretrain_gpt.py --num-layers 2" + job, "1:4", ""},
		{"x.sh", "torchrun --nproc-per-node $NODES pretrain_gpt.py --num-layers 2" + job, "eight", "the variable NODES is wrong: --nproc-per-node eight"},
		{"x.sh", "torchrun --nproc-per-node $NODES pretrain_gpt.py --num-layers 2" + job, "gpu", ""},
		{"x.sh", "pretrain_gpt.py --num-layers $NODES" + job, "4 8", "the variable NODES is wrong: --num-layers takes one value, but 2 are given"},
		{"x.sh", "pretrain_gpt.py --num-layers $NODES" + job, "", "the variable NODES is wrong: --num-layers takes one value, but none is given"},
	} {
		args, err := Parse(c.file, []byte(c.text), ParseOptions{Env: map[string]string{"NODES": c.value, "OTHER": "x"}})
		if err == nil {
			_, _, err = FromArgs(args, Options{})
		}
		var refused *Refused
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%q in %q: %v", c.value, c.text, err)
		case c.want != "" && (!errors.As(err, &refused) || !strings.Contains(err.Error(), c.want) || !slices.Equal(refused.Variables, []string{"NODES"})):
			t.Errorf("%q in %q: %v, want %q", c.value, c.text, err, c.want)
		}
	}
}
