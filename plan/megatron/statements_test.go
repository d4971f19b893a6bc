// This file owns the comparison of our reading of statements with bash, and a table of scripts that
// bash cannot judge: those that depend on what is not known, and those that cannot be read.

package megatron

import (
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
)

// program draws scripts whose variables are all set.
type program struct {
	*rand.Rand
	b           strings.Builder
	deep, loops int
}

func (p *program) one(of ...string) string { return of[p.IntN(len(of))] }

func (p *program) value() string {
	return p.one("1", "2", "7", "ab", "a.b", `"$X"`, `"$Y"`, `"${X}c"`, "${#A[@]}", "$((N + 1))", `"u v"`, "''")
}

func (p *program) test() string {
	number := func() string { return p.one("$N", "1", "2", "7") }
	t := p.one(
		`"$X" = `+p.one("ab", "1", `"$Y"`), `"$Y" != `+p.one("ab", "2"), `-z "$Y"`, `-n "$X"`, `"$X"`, `! -z "$X"`,
		number()+" "+p.one("-eq", "-ne", "-lt", "-le", "-gt", "-ge")+" "+number())
	switch p.IntN(4) {
	case 0:
		return "[ " + t + " ]"
	case 1:
		return "[[ " + t + " " + p.one("&&", "||") + " " + p.one(`"$X" == a*`, `$Y == [0-9]`, `$Y == ?b`, `$N -gt 2`, `-n "$Y"`) + " ]]"
	case 2:
		return "test " + t
	}
	return p.one("true", "false", "(( N > 2 ))", "! [ $N -eq 3 ]", "((N % 2 == 0))", `[ "$X" = ab -o $N -lt 5 ]`, `[ "$X" = ab -a $N -lt 5 ]`)
}

// line writes a line.
func (p *program) line(text string) { p.b.WriteString(strings.Repeat("  ", p.deep) + text + "\n") }

func (p *program) body() {
	p.deep++
	for range 1 + p.IntN(2) {
		p.statement()
	}
	p.deep--
}

func (p *program) statement() {
	kind := p.IntN(24)
	if p.deep > 3 {
		kind = p.IntN(8)
	}
	switch kind {
	case 0, 1:
		p.line(p.one("X", "Y") + "=" + p.value())
	case 2:
		p.line(p.one("X+=z", `Y+="$X"`, "A+=(k)", `A+=("l m" n)`, "A=(q)", "A[1]=w", "A=()", "N=$((N * 2))", "N=3", "((N++))", "((N = N - 1))", "let N=N+2", `export X="$Y"`, "unset A; A=(v)"))
	case 3:
		p.line(p.one(`call "$X" p q`, `call "${A[@]}"`, "call", `set -- "$Y" "$X"`, `X="$1"; Y="$*"`, `A+=("$@")`, "shift", `X="$#"`))
	case 4:
		p.line(p.test() + p.one(" && ", " || ") + p.one("X=t", "Y=f", "{ X=g; Y=h; }", "(X=i)", "true || X=j", "false && X=j", "A+=(o)"))
	case 5:
		p.line(`python x.py --x "$X" --y $Y --a "${A[@]}" --count $N --flag`)
	case 6:
		p.line(p.one(`eval "X=e; Y=\$N"`, "echo 'X=never'", `eval 'A=(1 2)'`, ": ${X:=5}", `bash -c 'X=inner; true'`, "X=only true", "X=both &> /dev/null", "call r &>> /dev/null", "X=q |& cat", "true # X=comment", "X=1; Y=2; N=4"))
	case 7:
		p.line("X=cont\\\ninued")
	case 8, 9:
		p.line("if " + p.test() + "; then")
		p.body()
		for range p.IntN(2) {
			p.line("elif " + p.test() + p.one("\n", "; ") + "then")
			p.body()
		}
		if p.IntN(2) == 0 {
			p.line("else")
			p.body()
		}
		p.line("fi")
	case 10, 11:
		p.line("case " + p.one(`"$X"`, "$N", "${Y}") + " in")
		for range 1 + p.IntN(3) {
			p.line(p.one("", "(") + p.one("ab", "a*", "1|2", "[0-9]", "*b | 7", "?", "*", `"u v"`) + ")")
			p.body()
			p.line(";;")
		}
		p.line("esac")
	case 12, 13:
		p.line(p.one("for X in 1 b c; do", `for X in "${A[@]}" z; do`, "for Y in $N $X\ndo", "for N in 1 2; do"))
		p.body()
		p.line("done")
	case 14:
		p.line(p.one("(", "{"))
		open := strings.HasSuffix(p.b.String(), "(\n")
		p.body()
		p.line(map[bool]string{true: ")", false: "}"}[open])
	case 15, 16:
		p.line(p.one("call() {", "function call {", "function call() {", "call ()\n{"))
		p.line("  local " + p.one("X", "X=$1", "Y=$2", "X=in Y=side"))
		p.line(`  X="${1:-none}"; A+=("$#")`)
		p.line(p.one("  N=$((N + 1))", "  shift; Y=\"$*\"", "  python x.py --x \"$X\" --y \"$@\" --flag", "  declare -g N=9", "  ( local Y=u N=8; Y=t )"))
		p.line("}")
	case 17:
		p.line(p.one("while false; do", "until true; do"))
		p.body()
		p.line("done")
	case 20, 21:
		head := p.one("for ((K = 0; K < 3; K++)); do", "for ((K=2;K;K--))\ndo", "for X in {1..3} $Y; do", `while [ $((K++)) -lt 3 ]; do`, "while ((K++ < 4)); do", "until [[ $K -ge 2 ]]; do K=$((K + 1))", "for ((;;)); do ((++K > 9)) && break", "while true; do if (( K++ >= 3 )); then break; fi")
		p.loops++ // nested loops count apart
		p.line(strings.ReplaceAll("K=0; "+head, "K", fmt.Sprint("K", p.loops)))
		if p.IntN(2) == 0 {
			p.line(p.test() + p.one(" && continue", " && break", " || continue", " && break 2"))
		}
		p.body()
		p.line("done")
	case 22:
		p.line("case " + p.one(`"$X"`, "$N", "${Y}") + " in")
		for range 2 + p.IntN(2) {
			p.line(p.one("ab", "a*", "1|2", "[0-9]", "'*'", `\?`, "[[:digit:]]", `"$Y"`, "$X", "[!a]*", "*") + ")")
			p.body()
			p.line(p.one(";;", ";&", ";;&"))
		}
		p.line("esac")
	case 23:
		p.line(p.one("f() { if "+p.test()+"; then X=ret; return; fi; X=end; }; f", "f() { for X in 1 2 3; do [ $X = 2 ] && return 1; done; }; f", "declare -i N; N=N+1", "declare -u Y; Y=low; declare +u Y; Y=low$Y", "f() { local -i Y=N+1; X=$Y; local -u N=low; X+=$N; }; f; Y=1+1; X+=$Y", "declare -u Y; f() { local Y=low; X=$Y; }; f; Y=v; declare +u Y", "A+=x; X=${A[0]}", "A=one; X=${A[@]}", "A[0]+=y", "A[-1]=last", "X=${X%%[0-9]*}; X=${X:-0}", "Y=${Y//[!a-z]/}; Y=${Y:-0}", `IFS=, ; X="${A[*]}"; Y='p,q'; Y=$Y; set -- $Y; unset IFS`, "(( N = N > 5 ? 1 : N + 1, Y = N ))", "X=8; Y=$(( X / 2 > 3 ? 4 : 2 ))", "shopt -s extglob"))
	case 18:
		p.line("bash <<" + p.one("END", "'END'"))
		p.line("X=here")
		p.b.WriteString("END\n")
	default:
		p.line(p.one("echo a | ", "true && ", "false || ", "! ") + p.one("{ X=p; }", "X=q", "call r"))
	}
}

func words(v any) []string {
	list, _ := v.([]string)
	return list
}

// Drawn scripts launch the same job as in bash, if there is one.
func TestStatementsAsInBash(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("there is no bash")
	}
	const given, launch = "X=ab\nY=2\nN=3\nA=(r 's t')\ncall() { Y=\"called $#\"; }\nset -- first 'second one'\n", "python x.py --x \"$X\" --y \"$Y\" --a \"${A[@]}\" --count $N --rest \"$@\" --flag\n"
	var scripts []string
	all := `python() { printf '\n@'; printf ' <%s>' "$@"; }; export -f python` + "\n"
	for i := range 400 {
		p := &program{Rand: rand.New(rand.NewPCG(uint64(i), 3))}
		for range 1 + p.IntN(6) {
			p.statement()
		}
		scripts = append(scripts, given+p.b.String()+launch)
		all += "(\n" + scripts[i] + ")\nprintf '\\n=\\n'\n"
	}
	run := exec.Command(bash)
	run.Stdin = strings.NewReader(all)
	said, err := run.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	for i, text := range strings.Split(strings.TrimSuffix(string(said), "\n=\n"), "\n=\n") {
		want := text[strings.LastIndex(text, "\n@ ")+3:]
		args, err := parseCommand(scripts[i], ParseOptions{})
		if err != nil {
			t.Errorf("script %d launches nothing: %v\n%s", i, err, scripts[i])
			continue
		}
		got := "<x.py>"
		for _, name := range []string{"x", "y", "a", "count", "rest", "flag"} {
			got += " <--" + name + ">"
			for _, w := range words(args[name]) {
				got += " <" + w + ">"
			}
		}
		if got != want {
			t.Errorf("script %d launches %s\nand in bash   %s\n%s", i, got, want, scripts[i])
		}
	}
}

// scripts depend on what is not known, or cannot be read.
const scripts = `
python x.py --a $U --b "$U" --c ${U} --d ${U:-5} --e "${U:+6}" $MORE
if [ -f data ]; then A=1; else A=2; fi; python x.py --a $A
if [ "$U" = 1 ]; then A=1; elif [ "$V" = 2 ]; then A=2; fi; python x.py --a $A --b
if [ -d x ] && [ 1 = 2 ]; then A=1; else A=3; fi; python x.py --a $A
if [ -d x ] || [ 1 = 1 ]; then A=1; else A=3; fi; python x.py --a $A
if [[ -d x || $U == 1 && 1 == 2 ]]; then A=1; else A=3; fi; python x.py --a $A
if [ -v A ]; then B=1; else B=2; fi; python x.py --b $B
A=; if [ -v A ]; then B=1; else B=2; fi; python x.py --b $B
if [ x -eq 1 ]; then B=1; else B=2; fi; python x.py --b $B
if [ 1 2 3 4 ]; then B=1; else B=2; fi; python x.py --b $B
if [[ 1 =~ 2 ]]; then B=1; else B=2; fi; python x.py --b $B
while read x; do A=$x; done; python x.py --a $A
while [ $U -lt 3 ]; do A=7; done; python x.py --a $A
until grep x y; do A=7; done; python x.py --a $A
for ((i=0; i<3; i++)); do A=$i; done; python x.py --a $A
for i in $U; do A=$i; done; python x.py --a $A
select i in 1 2; do A=$i; done; python x.py --a $A
case $U in 1) A=1;; *) A=2;; esac; python x.py --a $A
case $(hostname) in n1) A=1;; *) A=2;; esac; python x.py --a $A
case a/b in a*) A=1;; esac; python x.py --a $A
case ab in [!x]b) A=1;; esac; python x.py --a $A
case ab in [) A=1;; ab) A=2;& x) A=3;; esac; python x.py --a $A
source other.sh; python x.py --a $OTHER
. ./other.sh && python x.py --a $OTHER
source $(pwd)/other.sh; source ${DIR}/more.sh; python x.py --a $OTHER
source missing.sh; python x.py --a 1
A=$(nproc); python x.py --a $A --b $(date)
A=\x60nproc\x60; python x.py --a $A
python x.py --a 1; python x.py --a 2
python x.py --a 1; python x.py --a 1
python pretrain_gpt.py --a 1; python tools/eval.py --a 2
python tools/eval.py --a 2; python tools/convert.py --a 3
python tools/eval.py --a 2; torchrun --nnodes 2 --nproc_per_node=4 pretrain_gpt.py --a 1
torchrun --nnodes $NODES --nproc-per-node auto pretrain_gpt.py --a 1
torchrun --nnodes 1:4 --nproc-per-node 8 -m megatron.train --a 1
srun -N 4 --ntasks-per-node=8 python x.py --a 1
srun --nodes=4 --gres=gpu:h100:4 python x.py --a 1
srun --gpus-per-node=h100:4 -N 2 python x.py --a 1
mpirun -np 16 python x.py --a 1
mpirun -n 16 --nnodes 3 python x.py --a 1
deepspeed --num_gpus 4 x.py --a 1
#SBATCH --nodes=3 --gpus-per-node=8|srun python x.py --a $SLURM_NNODES --b $SLURM_GPUS_ON_NODE --c $SLURM_NTASKS_PER_NODE
#SBATCH -N 5|#SBATCH --ntasks-per-node 2|torchrun --nnodes=$SLURM_JOB_NUM_NODES --nproc-per-node=$SLURM_NTASKS_PER_NODE x.py --a 1
srun bash -c "python x.py --a 1 --b 2"
srun -N 2 bash -c 'cd x && python x.py --a 1'
ssh node "python x.py --a 1"
bash <<E|python x.py --a 1 --b $A|E
A=3; bash <<E|python x.py --a 1 --b $A|E
A=3; bash <<'E'|A=4; python x.py --a 1 --b $A|E
bash <<-E|	python x.py --a 1|	E
cat <<E > f|python x.py --a 1|E|python x.py --a 2
CMD="python x.py --a 1"; eval $CMD
CMD="python x.py --a 1"; $CMD --b 2
CMD="python x.py --a 1"; eval "$CMD --b 2" &
OPTIONS="--num-layers 2 --hidden-size 8"; OTHER="--a 5 --num-layers 3"; run $UNKNOWN
OPTIONS="--a 1 \|  --b 2"; python x.py $OPTIONS
python x.py --a=1 --b="x y" --c= -d 4 --e_f 5 -- g
python x.py --a 1 2 3 --b -1 --c "" --a 4
python x.py --layout Et*3|(tt|)*29m|L --w (127,0) --x a|b
python x.py --a 1 > log 2>&1 < in &> all
python x.py --a 1 | tee log
FOO=1 BAR=$FOO python x.py --a $FOO --b $BAR
A=1; A=2 python x.py --a $A; python x.py --a $A
A[2]=x; A[U]=y; declare -A M=([k]=v [l]=w); python x.py --a ${A[2]} --b ${M[k]} --c ${M[l]} --d ${#A[@]}
f() { python x.py --a $1; }; f 1; g() { f 2; }; g
f() { f; }; f
if true; then python x.py --a 1
case a in a) python x.py --a 1
for i in 1 2; do python x.py --a $i
{ python x.py --a 1
( python x.py --a 1
python x.py --a "1
python x.py --a 1 \
[[ a == b
fi; done; python x.py --a 1
echo a; ;; python x.py --a 1
! ; python x.py --a 1
&& python x.py --a 1
python x.py --a $((1 +)) --b $((U + 1)) --c $((2 ** 3)) --d $((7 / 0)) --e $((7 % 4 << 2)) --f $((1 ? 2 : 3)) --g $(( 5 > 3 && 0 || 1 ))
python x.py --a ${U?missing} --b ${#U} --c ${U%x} --d ${U:1:2} --e ${!U} --f $# --g $1 --h $? --i $$
ls -l; cd /x; export A=1 B; python x.py --a $A --b $B
function f { local a=1; readonly b=2; python x.py --a $a --b $b; }; f; python x.py --c $a --d $b
`

// What becomes of scripts that bash cannot judge. A bar in a line stands for its end.
func TestTableOfScripts(t *testing.T) {
	var b strings.Builder
	open := func(name string) ([]byte, error) {
		if name == "other.sh" {
			return []byte("OTHER=from-a-file\n"), nil
		}
		return nil, fs.ErrNotExist
	}
	for _, text := range strings.Split(strings.TrimSpace(scripts), "\n") {
		script := strings.ReplaceAll(text, `\x60`, "`")
		if strings.Contains(text, "SBATCH") || strings.Contains(text, "<<") || strings.Contains(text, `\|`) {
			script = strings.ReplaceAll(script, "|", "\n")
		}
		for _, env := range []map[string]string{nil, {"U": "1", "NODES": "6", "MOER": "x", "OTHER": "z"}} {
			if env != nil && !strings.ContainsAny(text, "UO") {
				continue
			}
			args, err := parseCommand(script, ParseOptions{Env: env, Open: open})
			fmt.Fprintf(&b, "%s\n", text)
			if err != nil {
				fmt.Fprintf(&b, "  error: %v\n", err)
			}
			for _, name := range slices.Sorted(maps.Keys(args)) {
				fmt.Fprintf(&b, "  %s: %q\n", name, args[name])
			}
			text = "  with variables"
		}
	}
	golden.Check(t, "scripts.txt", b.String())
}
