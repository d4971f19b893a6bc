// This file tests that every command answers a wrong command line in the same way.

package main

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
)

// badInputs has wrong endings for command lines. Each line of text is one; words in
// single quotes may be empty or have spaces.
var badInputs = []struct{ command, endings string }{
	{"", `
trian
''
--verbose
-q
help trian
help bench offlaod
bench
bench pool
bench ''
version 2
version --json=2
doctor --jsn
doctor now
doctor --json=''
completion
completion powershell
completion bash zsh
-h trian
--version now
-- train
bench -- copy
plan compare --help
plan -h nonsense
bench -h cpoy
plan scan loop
plan --model llama-3-8b --gpu h100 -- --gpus 8
plan explain core_attn --model llama-3-8b -- --gpus 8
plan --model llama-3-8b -- nonsense
plan --model llama-3-8b --gpus 8 --etp 2
plan --model llama-3-8b --gpus 8 --expert-tensor-parallel-size 2`},
	{"train --dry-run --micro 1 --seq 16 ", `
--out -
--config a.yaml --config=b.yaml
--data a.txt --data=b.txt
--pp 0
--pp -1
--pp 1.5
--pp 0x2
--pp 0b1
--pp 1_0
--pp 2e0
--pp ' 2'
--pp '2 '
--pp ٢
--steps=0x10
--steps 0o7
--seed 0x1
--seed 18446744073709551616
--seed -3
--steps -99999999999999999999
--lr nonsense
--lr 0x1p-9
--lr 1_0e-3
--lr '0.1 '
--lr ٠.١
--lr 0,1
--lr 1e
--lr 1e999
--aux-loss 0x1
--device cuda:+1
--pp ''
--pp 99999999999999999999
--pp 300
--vpp 0
--vpp 2 --pp 1
--ep 0
--ep 3
--ep 99999999
--dp 0
--dp 100000 --pp 1 --ep 1
--dp 3 --ep 2
--capacity-factor 0
--capacity-factor -1
--capacity-factor NaN
--capacity-factor 1e300
--capacity-factor Inf
--grad-comm-dtype bf16
--grad-comm-dtype fp32
--grad-comm-dtype fp8 --pool arena
--prefetch 2
--prefetch 0 --pool arena
--min-lr 1e-5
--min-lr 1 --decay 100
--decay 10
--decay 10 --warm-up 10
--decay -1
--warm-up -1
--save-every 5
--keep 3
--keep 0 --out q
--eval-every 5
--policy ''
--policy zzz
--policy nothing
--policy stash,offload
--model ''
--model zzz
--model meta-llama/Llama-3-8B
--model tiny-moee
--model .
--model /
--model text.txt
--data ''
--data nope
--data empty
--steps 0
--steps -3
--steps 1e3
--steps 010
--seed=007
--steps 99999999999
--seed -1
--seed x
--hold-out 1
--hold-out NaN
--hold-out ''
--out ''
--out '' --policy none
--config ''
--config nope
--config empty
--config text.txt
--config part.yaml
--resume
--resume --out nope
--serve ''
--serve :8080
--trace=maybe
--plain=2
--micro 0
--micro 99999999
--seq 99999999
--seq 0
--microbatches 0
--microbatches ''
--microbatches 1048577
--micro 1048576 --seq 4096
--dispatch ''
--dispatch rings
--device ''
--device tpu
--device cpu:0
--device cuda:-1
--budget ''
--budget 0
--budget 0B
--budget 60XB
--budget 60
--budget -60MiB
--budget 1e300MiB
--budget 99999999999TiB
--offload-modules ''
--offload-modules ,
--offload-modules
--offload-modules zzz
--offload-fraction 2
--offload-fraction NaN
--recompute-modules ''
--stash-modules ''
--stash-modules core_attn
--stash-modules moe_act --model tiny-dense --ep 1
--graph ''
--graph zzz
--graph attn attn
--pool ''
--pool zzz
--bf16=perhaps
--lr 0
--lr -1
--lr NaN
--lr Inf
--lr 1e300
--min-lr 1e300 --decay 99
--weight-decay -1
--weight-decay 1e300
--clip -1
--clip 1e300
--beta1 1
--beta2 NaN
--aux-loss -1
--aux-loss much
--bias-rate 1e300
--bias-rate -1
--config negative.yaml
--config word.yaml
--config list.yaml
fast
--lr 1e-300
--policy ' none '
--out --json
--model --policy none
--polcy none`},
	{"train --policy none --steps 1 ", `
--trace
--resume --out text.txt`},
	{"train --serve 127.0.0.1:0 ", `
--pp 300
--policy zzz
--dry-run
--data nope
--budget 60XB`},
	{"plan --model mixtral-8x7b --gpu h100 --pp 4 --ep 8 ", `
--html --json
--tp 0x2
--tp 1_0
--tp 2e0
--pipeline-model-parallel-size 4.0
--seq '4096 '
--gpus 0x20
--gpus 3_2
--gpus-per-node 0b1
--routing skewed:0x2
--routing skewed:inf
--rank +1
--fraction 0x1p-1 --offload core_attn
--stash 1_0
--offload-bytes 0x1p-1 --offload core_attn
--gpus 0
--gpus -8
--gpus ''
--gpus 1.5
--gpus 99999999999
--gpus 99999999999999999999
--vocab 0
--vocab -1
--vocab 99999999999
--budget ''
--budget 0
--budget 60XB
--budget NaN
--gpu ''
--gpu zzz
--gpu empty
--gpu ./h100
--model ''
--model zzz
--config ''
--megatron ''
--config small.json
--routing ''
--routing skewed
--routing skewed:0.5
--routing skewed:NaN
--routing skewed:1e9
--graph full_iteration,attn
--routing skewed:4.5
--routing counts:nope
--routing counts:
--routing 0
--search ''
--search fast
--rank ''
--rank 4
--rank -1
--rank one
--flags ''
--flags zzz
--flags megatron --json
--html ''
--html empty
--html -
--html no/page.html
--html page/
--html text.txt/page.html
--html loop
--tp 0
--tp ''
--tp 3
--tp 1.5
--tp ' 2x'
--seq ''
--mbs 0
--gbs -1
--layout ''
--recompute ''
--recompute ,
--recompute zzz
--offload ''
--offload zzz
--graph ''
--graph zzz
--graph full_iteration attn
--fsdp ''
--pool max
--prefetch 1.5
--prefetch 2
--prefetch 99
--stash ''
--stash -1
--precision int3
--expandable ''
--offload-bytes ''
--offload-bytes 0.5
--fraction 2
--fraction 0 --offload moe_act
--gpu h100,h200
--frobnicate 3
ring
--compare a`},
	{"plan ", `
--model small.json --html small.json
--compare text.txt
--compare nope nope
--compare '' ''
--model llama-3-8b --fraction 0.5
--model llama-3-8b --dispatcher deepep
--model llama-3-8b --routing balanced
--model mixtral-8x7b --gpus 8 --routing skewed:1.5
--model llama-3-8b --gpus 8 --gbs 67108864
--model llama-3-8b --gpus 8 --layout 'Et*16|t*16L'
--model llama-3-8b --gpus 8 --pp 2 --vpp 1000
explain
explain '' --model llama-3-8b --gpu h100
explain zzz --model llama-3-8b --gpu h100
explain core_attn --model llama-3-8b --gpu h100 --gpus 0
ring --top-k 999
ring --top-k 0
ring --top-k 5 --experts 4
ring --experts 0
ring --experts 255
ring --ep 0
ring --ep -4
ring --batch 0
ring --seq ''
ring --seq=0100
ring --batch -010
ring --width 0
ring --margin 0
ring --margin Inf
ring --margin 9
ring --margin 1e308
ring --seq 9223372036854775807 --batch 9223372036854775807
ring --json=2
ring 5
validate
validate --cases ''
validate --cases nope
validate --cases empty
validate --cases text.txt`},
	{"report ", `
''
nope
empty
text.txt
small.json --out small.json
nope --out ''
nope --perfetto ''
nope --memory-viz ''
nope --out no/page.html
nope --out a --perfetto a
nope --out empty
nope --perfetto loop
run`},
	{"bench pools ", `
--model llama-3-8b --tp 7
--model ''
--model zzz
--model nope.json
--model text.txt
--ep 0
--ep 3
--ep 99999999999
--dp 0
--tp ''
--etp 0
--prefetch 0
--prefetch 1001
--recompute -1
--recompute 99999
--grad-comm-dtype ''
--fallback ''
--fp8=8
--svg ''
--svg empty
--svg -
--report -
--svg no/x.svg
--svg loop
--report ''
--report no/x.html
--svg a --report a
--model small.json --svg small.json
--model llama-3-8b --ep 2
--model llama-3-8b --etp 2
--model mixtral-8x7b --ep 8 --etp 3`},
	{"bench stash ", `
--synth zipf --skew 1e308
--trace /nosuch
--trace empty
--trace text.txt
--trace ''
--trace text.txt --report text.txt
--synth ''
--synth zipff
--synth zipf --trace x
--synth zipf --save-trace ''
--synth zipf --save-trace no/x
--synth zipf --save-trace a --report a
--synth zipf --rows 3
--synth zipf --pp 0
--synth zipf --vpp 0
--synth zipf --stage -1
--synth zipf --ranks 0
--synth zipf --experts 0
--synth zipf --top-k 0
--synth zipf --top-k 999
--synth zipf --tokens 0
--synth zipf --steps 0
--synth zipf --skew NaN
--synth zipf --seed -1
--synth zipf --sets 65
--synth zipf --device-pool ''
--synth zipf --device-pool 1B
--synth zipf --max-rows 99999999999
--save-trace x
--rank 0
--rows 0
--rows ''
--max-rows 0
--width -1
--width 2000000000
--skew -1
--skew 1e10
--page ''
--page 3KiB
--page 4KiB,8KiB
--groups 0
--tensors 0
--time 0
--time 1s1
--time ''
--time 2h
--device ''
--report ''
--report no/x.html`},
	{"bench copy ", `
--size ''
--size 0B
--size 4XB
--size ,
--size 1MiB,,2MiB
--time -1s
--time 5
--report empty
--device cpu:1
now`},
	{"bench offload --layers 1 --seq 1 ", `
--intensity 1e300
--memory-gbps 1e-9
--model ''
--model nope.json
--layers 0
--seq ''
--mbs 0
--mbs 1025
--pp 0
--rank 1
--steps 0
--tflops 0
--tflops Inf
--memory-gbps NaN
--intensity 0
--budget ''
--budget 0
--budget 1XB
--budget 1TiB --offload-modules moe_act
--no-recompute
--offload-modules ''
--offload-modules a"b
--offload-modules zzz
--margin 3
--graph ''
--graph all
--delay-offload-until-cuda-graph --offload-modules moe_act
--cuda-graph-scope ''
--cuda-graph-scope zzz
--link-gbps ''
--link-gbps 0
--link-gbps 1,2,3
--link-gbps 0x1
--link-gbps 1_0
--trace ''
--trace no/x
--trace a --report a
--report ''
--report no/x.html`},
	{"bench record ", `
''
nope
empty
text.txt
text.txt --to ''
text.txt --date ''
text.txt --date 2026-13-01
result.json --to no/history.jsonl
result.json --command 'stowage train' --to history.jsonl
result.json --to empty
result.json --to loop
result.json --to result.json
result.json --to text.txt`},
}

// A wrong command line is answered with one sentence that names no part of Go, with code 2
// and before anything is printed or written.
func TestBadInputs(t *testing.T) {
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	fixtures(t)
	before, n := files(t), 0
	var all strings.Builder
	for _, group := range badInputs {
		for ending := range strings.Lines(strings.TrimSpace(group.endings)) {
			n++
			line := group.command + strings.TrimSpace(ending)
			stdout, stderr, code := command(words(line)...)
			text, ended := strings.CutSuffix(stderr, "\n")
			fmt.Fprintf(&all, "$ stowage %s\n%s", line, stderr)
			switch {
			case code != exitUsage, stdout != "", !ended, strings.Contains(text, "\n"), !strings.HasPrefix(text, "stowage: "), !strings.HasSuffix(text, "`"):
				t.Errorf("%s\n\tcode %d, output %.60q, errors %q", line, code, stdout, stderr)
			case goWords.MatchString(text):
				t.Errorf("%s\n\tthe sentence %q has %q", line, text, goWords.FindString(text))
			case strings.Contains(text, "  "), strings.Contains(text, " ;"), strings.Contains(text, " :"), strings.Contains(text, ";;"):
				t.Errorf("%s\n\tthe sentence %q has a hole", line, text)
			}
			if after := files(t); after != before {
				t.Fatalf("%s: the files are\n%s\nand were\n%s", line, after, before)
			}
		}
	}
	if n < 300 {
		t.Errorf("there are only %d lines", n)
	}
	t.Chdir(here)
	golden.Check(t, "bad-inputs.txt", all.String())
}

// A variable that is wrong is refused, also by a process that was started alone and does
// not use it.
func TestBadEnvironment(t *testing.T) {
	for _, line := range []string{"STOWAGE_PATIENCE=soon", "STOWAGE_PATIENCE=-1s", "STOWAGE_PORT=x", "STOWAGE_PORT=70000", "STOWAGE_COLLECTIVES=zzz", "STOWAGE_GEMM=zzz", "RANK=0", "RANK=0 WORLD_SIZE=2"} {
		t.Run(line, func(t *testing.T) {
			for pair := range strings.FieldsSeq(line) {
				name, value, _ := strings.Cut(pair, "=")
				t.Setenv(name, value)
			}
			stdout, stderr, code := command("train", "--dry-run", "--policy", "none", "--micro", "1", "--seq", "16")
			if code != exitUsage || stdout != "" || strings.Count(stderr, "\n") != 1 || goWords.MatchString(stderr) || strings.Contains(stderr, "SIZE does") {
				t.Errorf("code %d, output %q, errors %q", code, stdout, stderr)
			}
		})
	}
}

// Control characters in a name do not reach the terminal.
func TestControlCharacters(t *testing.T) {
	for _, args := range [][]string{
		{"plan", "--model", "llama-3-8b", "--search", "\x1b[31mred"}, {"plan", "--model", "\x1b]0;title\a"}, {"report", "\x1b[2Jgone"},
		{"bench", "pools", "--model", "\r\x1b[K/x.json"}, {"\x1b[31mred"}, {"train", "--policy", "\x9b31m"},
	} {
		_, stderr, code := command(args...)
		if code != exitUsage || strings.Count(stderr, "\n") != 1 || strings.ContainsAny(stderr, "\x1b\a\r\u009b") {
			t.Errorf("%q: code %d, errors %q", args, code, stderr)
		}
	}
}
