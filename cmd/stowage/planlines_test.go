// This file owns the table of what plans of many kinds print: answers, errors and exit codes as
// digests, with the first lines. Write it anew with -update if a change is meant.

package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/memory"
)

// planLines are command lines behind the job that they are about.
const planLines = `
--doctor two.json
--doctor two.json --gpu a100
--doctor two.json --gpu h100
--doctor one.json --search policy
--doctor full.json
--doctor none.json
--doctor bad.json
--doctor odd.json
--fewest-gpus
--fewest-gpus --gbs 7
--fewest-gpus --gbs 64 --pp 2
--fewest-gpus --ep 8 --etp 2
--largest microbatch --pp 2
--largest microbatch --gbs 96 --pp 2 --recompute full
--largest seq --pp 2 --recompute full
--largest seq --cp 4 --pp 2
--largest layers
--largest layers --pp 2 --vpp 2
--largest layers --layout 'Et*16|t*16L' --pp 2
--largest rows
--budget 40GiB --largest seq
--rank all --pp 2
--rank 1 --pp 2
--rank 2 --pp 2
--rank none --pp 2
--rank heaviest --pp 2
--host-memory 100GiB --offload core_attn
--host-memory 1GiB --offload core_attn
--gpus-per-node 4 --offload core_attn
--budget 30GiB --offload core_attn
--budget 30GiB --offload core_attn --html page.html
--flags megatron --offload core_attn --recompute layernorm
--flags maxtext --offload core_attn
--flags stowage --offload core_attn
--flags other
--json --rank none --tp 2
--compare a.json
--compare a.json other.sh third.sh
--compare a.json other.sh
--compare bad.json a.json
--compare a.json b.json
--compare a.json other.sh --json
--compare other.sh other.sh --tp 2
--counts counts.txt
--routing skewed:1.3
--routing skewed:0
--routing balanced
--routing natural
--precision nvfp4
--env A=1 --env B
--env A=1
--vocab 100
explain core_attn
explain moe_act --offload moe_act
explain core
explain mlp --recompute mlp
ring
scan .
`

func TestTableOfPlans(t *testing.T) {
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	planFiles(t, map[string]string{"bad.json": "{}", "other.sh": "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 64 --num-attention-heads 8 --vocab-size 1000 --max-position-embeddings 64 --seq-length 64 --micro-batch-size 1 --global-batch-size 64 --bf16\n"})
	doctorFile(t, "two.json", 300*memory.GiB, "NVIDIA H100 80GB HBM3", 70, "NVIDIA H100 80GB HBM3", 60)
	doctorFile(t, "one.json", 90*memory.GiB, "NVIDIA H100 80GB HBM3", 30)
	doctorFile(t, "full.json", 90*memory.GiB, "NVIDIA H100 80GB HBM3", 0)
	doctorFile(t, "none.json", 90*memory.GiB)
	doctorFile(t, "odd.json", 90*memory.GiB, "NVIDIA H100 80GB HBM3", 30, "NVIDIA A100-SXM4-80GB", 40)
	const job = " --model mixtral-8x7b --gpus 16 --ep 8 --seq 4096"
	json, _, _ := command(words("plan" + job + " --gpu h100 --pp 2 --json")...)
	writeFile(t, "a.json", json)
	json, _, _ = command(words("plan" + job + " --gpu h100 --tp 2 --offload core_attn --json")...)
	writeFile(t, "b.json", json)
	version := regexp.MustCompile(`(?m)^.*(stowage [0-9v(]|version).*$`)
	var b strings.Builder
	for line := range strings.Lines(strings.TrimSpace(planLines)) {
		args := words(strings.TrimSpace(line))
		switch first := args[0]; {
		case first == "ring":
			args = words("plan ring --model mixtral-8x7b --ep 8 --seq 4096")
		case first == "scan":
			args = []string{"plan", "scan", "."}
		case strings.HasPrefix(first, "--"):
			base := job
			if strings.Contains(line, "--fewest-gpus") {
				base = strings.Replace(base, " --gpus 16", "", 1)
			}
			if strings.Contains(line, "--largest seq") {
				base = strings.Replace(base, " --seq 4096", "", 1)
			}
			if strings.Contains(line, "--compare") {
				base = ""
			}
			args = append(words("plan"+base), args...)
		default:
			args = append([]string{"plan"}, append(args, words(job)...)...)
		}
		if !strings.Contains(line, "doctor") && !strings.Contains(line, "--gpu ") && args[1] != "ring" && args[1] != "scan" {
			args = append(args, "--gpu", "h100")
		}
		stdout, stderr, code := command(args...)
		stdout = version.ReplaceAllString(stdout, "")
		sum := sha256.Sum256([]byte(stdout))
		fmt.Fprintf(&b, "$ stowage %s\ncode %d, %d lines, %x\n%s", strings.Join(args, " "), code, strings.Count(stdout, "\n"), sum[:4], stderr)
		for i, l := range strings.SplitAfter(stdout, "\n") {
			if i < 6 || strings.HasPrefix(l, "note") {
				b.WriteString(l)
			}
		}
	}
	t.Chdir(here)
	golden.Check(t, "plan-lines.txt", b.String())
}
