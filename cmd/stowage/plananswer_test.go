// This file owns the tests of --largest and --fewest-gpus.

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/planview"
)

// The job fits with the answer and not with the next value, when each is planned by hand.
// SPEC S6.1
func TestPlanAnswers(t *testing.T) {
	for _, job := range []string{
		"--model llama-3-8b --gpu h100 --gpus 8 --tp 2 --largest microbatch",
		"--model llama-3-8b --gpu h100 --gpus 8 --tp 2 --gbs 64 --largest microbatch",
		"--model llama-3-8b --gpu h100 --gpus 8 --tp 2 --largest seq --search policy",
		"--model llama-3-8b --gpu h100 --tp 2 --fewest-gpus",
		"--model llama-3-8b --gpu h100 --tp 2 --gbs 24 --fewest-gpus --search policy",
		"--model llama-3-8b --gpu h100 --fewest-gpus --search layout --gbs 16",
		"--model mixtral-8x7b --gpu h100 --gpus 32 --pp 4 --ep 8 --largest microbatch --budget 60GiB",
		"--model mixtral-8x7b --gpu h100 --gpus 32 --pp 4 --ep 8 --largest seq --offload moe_act core_attn --host-memory 300GiB",
		"--model mixtral-8x7b --gpu h100 --gpus 32 --pp 4 --ep 8 --largest layers",
		"--model mixtral-8x7b --gpu h100 --pp 2 --ep 8 --fewest-gpus",
		"--model deepseek-v3 --gpu gb200 --gpus 256 --pp 8 --ep 32 --gbs 2048 --largest seq",
		"--model deepseek-v3 --gpu gb200 --gpus 256 --pp 8 --ep 32 --gbs 2048 --largest layers",
		"--model nemotron-h-56b --gpu h100 --gpus 64 --tp 8 --pp 2 --largest seq",
		"--model nemotron-h-56b --gpu h100 --gpus 64 --tp 8 --pp 2 --largest layers",
	} {
		r, _ := planJSON(t, "plan "+job)
		a := r.Answer
		if a == nil || !r.Fits || a.Value < 1 || a.Planned < 1 || a.Flags == "" {
			t.Errorf("%s: answer %+v, fits %v", job, a, r.Fits)
			continue
		}
		var rest []string
		words := strings.Fields(job)
		for i := 0; i < len(words); i++ {
			switch words[i] {
			case "--largest":
				i++
			case "--fewest-gpus":
			default:
				rest = append(rest, words[i])
			}
		}
		again := "plan " + strings.Join(rest, " ") + " "
		if same, _ := planJSON(t, again+a.Flags); !same.Fits || same.Reserved != r.Reserved || same.Setup.GPUs != r.Setup.GPUs {
			t.Errorf("%s: planned again with %s: fits %v, %+v", job, a.Flags, same.Fits, same.Reserved)
		}
		if a.Next == nil {
			if a.End == "" {
				t.Errorf("%s: there is no next value, and no reason", job)
			}
			continue
		}
		if a.Next.Fits || a.Next.Limit == "" || a.Next.Need <= a.Next.Budget && a.Next.Node.Missing == 0 {
			t.Errorf("%s: next %+v", job, a.Next)
		}
		next := strings.Replace(a.Flags, fmt.Sprint(a.Value), fmt.Sprint(a.Next.Value), 1)
		stdout, _, code := command(strings.Fields(again + next + " --json")...)
		var report planview.Report
		if code == exitOK && (json.Unmarshal([]byte(stdout), &report) != nil || report.Fits) || code == exitUsage {
			t.Errorf("%s: with %s the code is %d and the job fits", job, next, code)
		}
	}
}

// A GPU with more memory never has a smaller largest value, nor needs more GPUs.
func TestPlanAnswersAreMonotone(t *testing.T) {
	for _, job := range []string{
		"--model llama-3-8b --gpus 8 --tp 2 --largest microbatch --search none",
		"--model llama-3-8b --gpus 8 --tp 2 --gbs 256 --largest microbatch --search none",
		"--model mixtral-8x7b --gpus 32 --pp 4 --ep 8 --largest seq --search none",
		"--model qwen3-30b-a3b --gpus 16 --ep 8 --largest layers --search none",
		"--model mixtral-8x7b --pp 2 --ep 8 --fewest-gpus --search none",
		"--model llama-3-8b --gpus 8 --tp 2 --largest seq --search policy",
	} {
		last := 0
		for _, budget := range []int{66, 72, 90, 130} {
			r, _ := planJSON(t, fmt.Sprintf("plan %s --gpu h200 --budget %dGiB", job, budget))
			v := r.Answer.Value
			if strings.Contains(job, "--fewest-gpus") {
				v = -v
			}
			if last != 0 && v < last {
				t.Errorf("%s: %d with %d GiB, and %d with less", job, v, budget, last)
			}
			last = v
		}
	}
}

// The answer is in the text and on the page; flags and changes are those of the answer.
func TestPlanAnswerEverywhere(t *testing.T) {
	planFiles(t, map[string]string{"job.sh": "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 " +
		"--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --bf16 --use-distributed-optimizer " +
		"--position-embedding-type rope --vocab-size 32000 --swiglu --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"})
	const job = "plan --megatron job.sh --gpu h100 --largest seq"
	stdout, stderr, code := command(strings.Fields(job + " --html p.html --rank none")...)
	if code != exitOK || stderr != "" || !strings.HasPrefix(stdout, "longest sequence with which the job fits: 26752 (--seq 26752 --max-position-embeddings 26752)\n") {
		t.Errorf("code %d, errors %q:\n%s", code, stderr, stdout)
	}
	page, err := os.ReadFile("p.html")
	if err != nil || !strings.Contains(string(page), "longest sequence with which the job fits: 26752") || !strings.Contains(string(page), "device memory stops it.") {
		t.Errorf("the page lacks the answer (%v)", err)
	}
	stdout, _, code = command(strings.Fields(job + " --flags changes")...)
	if want := "- --max-position-embeddings 4096\n+ --max-position-embeddings 26752\n- --seq-length 4096\n+ --seq-length 26752\n"; code != exitOK || stdout != want {
		t.Errorf("code %d, changes %q", code, stdout)
	}
}

// If no value fits, the answer is one sentence that names the nearest one and what stops
// it, and the code is 1.
func TestPlanNoAnswer(t *testing.T) {
	for job, want := range map[string]string{
		"--model llama-3-70b --gpu h100 --gpus 8 --tp 8 --largest microbatch":                                                  "no microbatch fits: 1 would need up to",
		"--model llama-3-70b --gpu h100 --gpus 8 --tp 8 --largest seq --search policy":                                         "no sequence fits: 128 would need",
		"--model llama-3-70b --gpu h100 --tp 8 --gbs 8 --fewest-gpus --budget 10GiB --search none":                             "no number of GPUs fits: 64 would need",
		"--model llama-3-8b --gpu h100 --gpus 8 --tp 8 --largest layers --optimizer-cpu-offload --host-memory 1GiB":            "host memory stops it",
		"--model llama-3-8b --gpu h100 --gpus 8 --tp 8 --largest seq --optimizer-cpu-offload --host-memory 1GiB --search none": "host memory stops it",
	} {
		stdout, stderr, code := command(strings.Fields("plan " + job)...)
		if code != exitFailure || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%s: code %d, output %q, errors %q", job, code, stdout, stderr)
		}
	}
}

// A search over layouts finds every number of GPUs up to a node, though fewer or more do not
// divide the batch. If none fits, the answer names what was tried.
func TestPlanFewestOfAllLayouts(t *testing.T) {
	const job = "plan --model llama-3-8b --gpu h100 --seq 4096 --search layout"
	for batch, want := range map[string]int{" --gbs 63": 3, " --gbs 48": 3, "": 3, " --gbs 20": 3} {
		r, _ := planJSON(t, job+batch+" --fewest-gpus")
		if r.Answer.Value != want || !r.Fits {
			t.Errorf("%s: %+v", batch, r.Answer)
		}
	}
	// The layout of the command line, all replicas, does not divide this batch.
	if r, _ := planJSON(t, job+" --gbs 2 --gpus 8"); !r.Fits || r.Setup.GPUs != 8 || strings.Contains(strings.Join(r.Warnings, "\n"), "number of GPUs") {
		t.Errorf("8 GPUs and 2 sequences: %+v", r.Setup)
	}
	stdout, stderr, code := command(strings.Fields(job + " --gbs 8 --budget 1GiB --fewest-gpus")...)
	if want := "no number of GPUs fits of those that were tried, multiples of 8 up to 544 and doublings of that: "; code != exitFailure || stdout != "" || !strings.Contains(stderr, want) {
		t.Errorf("code %d, output %q, errors %q", code, stdout, stderr)
	}
}

// No layout fits on fewer GPUs than can hold the state of the parameters, so none is lost
// that is not tried.
func TestPlanLeastGPUs(t *testing.T) {
	for _, job := range []string{
		"--model llama-3-8b --gpu h100",
		"--model llama-3-8b --gpu h100 --budget 40GiB --use-precision-aware-optimizer --main-grads-dtype bf16",
		"--model moonlight-16b-a3b --gpu h200",
	} {
		r, _ := planJSON(t, "plan "+job+" --fewest-gpus --search layout")
		for n := 1; n < r.Answer.Value; n++ {
			_, _, code := command(strings.Fields(fmt.Sprintf("plan %s --search layout --gpus %d", job, n))...)
			if code == exitOK && (n <= 8 || n%8 == 0) {
				t.Errorf("%s: %d GPUs are the fewest, and %d fit", job, r.Answer.Value, n)
			}
		}
	}
}
