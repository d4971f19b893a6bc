// This file owns the tests of what plans say about the host memory of nodes.

package main

import (
	"os"
	"strings"
	"testing"
)

const offloading = "plan --model mixtral-8x7b --gpu h100 --gpus 32 --pp 4 --ep 8 --gbs 64 --seq 4096 --offload core_attn moe_act --rank none"

// SPEC S6.1: a job does not fit if its nodes lack the memory that their ranks pin, in
// text, JSON and page alike.
func TestPlanHostMemory(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, x := range []struct {
		flags   string
		fits    bool
		gpus    int
		text    string
		page    string
		without string
	}{
		{"", true, 8, "to spare", "Host memory: ", "DOES NOT FIT"},
		{" --host-memory 136GiB", true, 8, "135.21 GiB pinned by the 8 GPUs of node 0 of 136.00 (--host-memory)", "✓ Fits", "DOES NOT FIT"},
		{" --host-memory 135GiB", false, 8, "DOES NOT FIT: host memory is too small", "✗ Does not fit: host memory", "FITS: up to"},
		{" --host-memory 135GiB --gpus-per-node 4", true, 4, "67.61 GiB pinned by the 4 GPUs of node 0", "✓ Fits", "DOES NOT FIT"},
		// All four pipeline ranks are on one node.
		{" --host-memory 333GiB --gpus-per-node 32", false, 32, "GiB are missing", "✗ Does not fit", "FITS: up to"},
	} {
		r, _ := planJSON(t, offloading+x.flags)
		if r.Fits != x.fits || r.Node == nil || r.Node.GPUs != x.gpus || r.Node.Pinned == 0 || (r.Node.Missing == 0) != x.fits {
			t.Errorf("%q: fits %v, node %+v", x.flags, r.Fits, r.Node)
		}
		stdout, _, code := command(strings.Fields(offloading + x.flags + " --html p.html")...)
		if plain := strings.Join(strings.Fields(stdout), " "); code != exitOK || !strings.Contains(plain, x.text) || strings.Contains(plain, x.without) {
			t.Errorf("%q: code %d, %q is missing or %q is there:\n%s", x.flags, code, x.text, x.without, stdout)
		}
		page, err := os.ReadFile("p.html")
		if err != nil || !strings.Contains(string(page), x.page) {
			t.Errorf("%q: the page has no %q (%v)", x.flags, x.page, err)
		}
	}
}

// A search chooses no policy that a node has no memory for, and says so if that leaves
// none.
func TestPlanSearchKeepsHostMemory(t *testing.T) {
	const job = "plan --model mixtral-8x7b --gpu h100 --gpus 32 --pp 4 --ep 8 --gbs 64 --seq 4096 --budget 52GiB"
	r, _ := planJSON(t, job+" --host-memory 60GiB")
	if !r.Fits || r.Node.Pinned == 0 || r.Node.Missing > 0 {
		t.Errorf("node %+v", r.Node)
	}
	const adam = "plan --model mixtral-8x7b --gpu h100 --gpus 8 --ep 8 --optimizer-cpu-offload --gbs 64 --search policy --host-memory 100GiB"
	stdout, stderr, code := command(strings.Fields(adam)...)
	if code != exitFailure || stdout != "" || !strings.Contains(stderr, "host memory of a node, 100.00 GiB (--host-memory)") {
		t.Errorf("code %d, output %q, errors %q", code, stdout, stderr)
	}
}

// Another order of ranks puts others on a node, and a note says that it is not counted.
func TestPlanHostOrder(t *testing.T) {
	for flags, want := range map[string]bool{"": false, " --use-tp-pp-dp-mapping": true} {
		r, _ := planJSON(t, offloading+flags)
		if got := strings.Contains(strings.Join(r.Warnings, "\n"), "default order of ranks"); got != want {
			t.Errorf("%q: notes %q", flags, r.Warnings)
		}
	}
}

// If a node lacks the memory for the fastest policy, the plan and the explanation say so, and
// not otherwise.
func TestPlanHostCost(t *testing.T) {
	const job = " --model mixtral-8x7b --gpu h100 --gpus 32 --pp 4 --ep 8 --gbs 64 --seq 4096 --budget 52GiB"
	for flags, want := range map[string]bool{"": false, " --host-memory 20GiB": true} {
		r, _ := planJSON(t, "plan"+job+flags)
		if got := strings.Contains(strings.Join(r.Warnings, "\n"), "% longer: offloading of"); got != want {
			t.Errorf("%q: notes %q", flags, r.Warnings)
		}
		stdout, _, code := command(strings.Fields("plan explain moe_act" + job + flags)...)
		plain := strings.Join(strings.Fields(stdout), " ")
		if code != exitOK || strings.Contains(plain, "needs more host memory than a node has") != want || strings.Contains(plain, "too little alone") {
			t.Errorf("%q: code %d:\n%s", flags, code, stdout)
		}
	}
}
