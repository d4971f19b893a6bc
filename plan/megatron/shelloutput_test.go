package megatron

import "testing"

// Outputs of commands count where the text decides them, and are kept as they are written elsewhere.
func TestOutputsOfCommands(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"here-documents as values", `L=4
A="$(cat <<EOF
--layers $L # it's "one"
  --heads \${L}
EOF
)"
B=$(cat <<-'END'
	--don't $L (
	END
)
C=$(cat - << "X" | tr '\n' ' '
--c 1
--d 2
X
)
read -r -d '' D <<EOF
  --e 5
  --f $L
EOF
python x.py --a "$(echo "$L" 8)" $A $B $C $D --z $(( 1 << 3 ))`, "a=4 8 c=1 d=2 don't=$L,( e=5 f=4 heads=${L} layers=4,#,it's,\"one\" z=8"},
		{"here-documents that commands read", "A=$(sort <<E\n--x 1\nE\n)\nB=$(cat f)\nC=$(echo 1; echo 2)\nD=$(echo -e '1\\n2')\npython x.py --a $A --b $B --c $C --d $D", "a=$(sort <<E\n--x 1\nE\n) b=$(cat f) c=$(echo 1; echo 2) d=$(echo -e '1\\n2')"},
		{"outputs that the text decides", "A=`expr 2 \\* 3 + 1`\nB=$(echo \"$A*(64-60)\" | bc)\nC=$(expr 010 + 1)\nD=$(echo 7/2.0 | bc -l)\nE=$(printf '%s ' --e 1 --f 2)\npython x.py --a $A --b $B --c $C --d $D $E --g $(expr $A / 0)", "a=7 b=28 c=$(expr 010 + 1) d=$(echo 7/2.0 | bc -l) e=1 f=2 g=$(expr $A / 0)"},
		{"commands of no words", "E=''\nA=\"$($E)x\"\nB=$(\"$@\")\npython x.py --a $A $B --c $(echo 1 | $E)", "a=x c=$(echo 1 | $E)"},
		{"what Slurm sets", "#SBATCH --nodes=4 --ntasks-per-node=8\n#SBATCH --gpus-per-node=h100:8\nsrun python x.py --w $((SLURM_NNODES*SLURM_GPUS_PER_NODE)) --k $SLURM_NTASKS", "k=32 nnodes=4 nproc-per-node=8 w=32"},
		{"what is not known among flags", "A=\"$U --x 1 $(f --y 2)\"\nB=$(f --w 3)\npython x.py --a $B $A --z 4", "a=$(f --w 3) x=1 z=4"},
	} {
		args, err := parseCommand(c.text, ParseOptions{})
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if got := flat(args); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}
