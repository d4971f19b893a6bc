// This file owns the tests of plans with what `stowage doctor` measured.

package main

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/doctor"
	"github.com/stowage-dev/stowage/internal/sysinfo"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/hardware"
)

// doctorFile writes a report about a machine with GPUs, given as model and free GiB in
// turn.
func doctorFile(t *testing.T, name string, host memory.Bytes, gpus ...any) {
	t.Helper()
	r := doctor.Report{Version: "stowage test", Machine: sysinfo.Machine{Memory: sysinfo.Memory{Total: 2 * host, Available: host}}}
	r.Devices = append(r.Devices, doctor.Device{Name: "cpu:0", Total: 2 * host, Free: host})
	for i := 0; i < len(gpus); i += 2 {
		r.Devices = append(r.Devices, doctor.Device{Name: "cuda:" + string(rune('0'+i/2)), Model: gpus[i].(string), Total: 200 * memory.GiB, Free: memory.Bytes(gpus[i+1].(int)) * memory.GiB})
	}
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, text, 0o644); err != nil {
		t.Fatal(err)
	}
}

// A plan takes the free memory of the fullest GPU and the host memory that doctor found,
// less what jobs need beside them, and says so. Without the file nothing changes.
func TestPlanDoctor(t *testing.T) {
	t.Chdir(t.TempDir())
	doctorFile(t, "d.json", 300*memory.GiB, "NVIDIA H100 80GB HBM3", 70, "NVIDIA H100 80GB HBM3", 60)
	h100, err := hardware.ByName("h100")
	if err != nil {
		t.Fatal(err)
	}
	const job = "plan --model llama-3-8b --gpus 8 --tp 2 --gbs 8 --offload core_attn --rank none"
	plain, _ := planJSON(t, job+" --gpu h100")
	if plain.Hardware.Free != 0 || plain.Budget != h100.Usable || !strings.HasPrefix(plain.BudgetFrom, "what h100 leaves of") {
		t.Errorf("without the file: %+v, budget %v from %q", plain.Hardware, plain.Budget, plain.BudgetFrom)
	}
	for _, flags := range []string{" --doctor d.json", " --gpu h100 --doctor d.json", " --doctor=d.json --search policy"} {
		r, _ := planJSON(t, job+flags)
		if want := 60*memory.GiB - (h100.Memory - h100.Usable); r.Hardware.Name != "h100" || r.Hardware.Free != 60*memory.GiB || r.Budget != want || r.Hardware.Usable != want {
			t.Errorf("%s: %+v, budget %v, want %v", flags, r.Hardware, r.Budget, want)
		}
		if n := r.Node; n.GPUs != 2 || n.Room != 300*memory.GiB-2*8*memory.GiB || !strings.Contains(n.From, "doctor") {
			t.Errorf("%s: node %+v", flags, n)
		}
	}
	stdout, _, code := command(strings.Fields(job + " --doctor d.json --html p.html")...)
	for _, want := range []string{"what is left of the 60.00 GiB that doctor found free on h100", "what is left of the 300.00 GiB that doctor found available"} {
		if plain := strings.Join(strings.Fields(stdout), " "); code != exitOK || !strings.Contains(plain, want) {
			t.Errorf("code %d, %q is missing:\n%s", code, want, stdout)
		}
	}
	if page, err := os.ReadFile("p.html"); err != nil || !strings.Contains(string(page), "60.00 GiB measured to be free") {
		t.Errorf("the page does not say what was measured (%v)", err)
	}
	// More than the nameplate leaves is never taken.
	doctorFile(t, "idle.json", 300*memory.GiB, "NVIDIA H100 80GB HBM3", 199)
	if r, _ := planJSON(t, job+" --doctor idle.json"); r.Budget != h100.Usable {
		t.Errorf("budget %v, want %v", r.Budget, h100.Usable)
	}
	// Flags come before what was measured.
	if r, _ := planJSON(t, job+" --doctor d.json --host-memory 9GiB --gpus-per-node 4 --budget 50GiB"); r.Budget != 50*memory.GiB || r.Node.Room != 9*memory.GiB || r.Node.GPUs != 4 {
		t.Errorf("budget %v, node %+v", r.Budget, r.Node)
	}
}

// A wrong file is one sentence.
func TestPlanDoctorMistakes(t *testing.T) {
	t.Chdir(t.TempDir())
	doctorFile(t, "none.json", memory.GiB)
	doctorFile(t, "mixed.json", memory.GiB, "NVIDIA H100 80GB HBM3", 70, "NVIDIA H200", 130)
	doctorFile(t, "busy.json", memory.GiB, "NVIDIA H100 80GB HBM3", 3)
	doctorFile(t, "unknown.json", memory.GiB, "NVIDIA H100 80GB HBM3", 0)
	doctorFile(t, "small.json", memory.GiB, "NVIDIA L4", 22)
	doctorFile(t, "good.json", memory.GiB, "NVIDIA H100 80GB HBM3", 60)
	for name, text := range map[string]string{"report.json": `{"version": 1, "ranks": []}`, "broken.json": `{"version": "`, "list.json": `[]`, "empty.json": ``} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for flags, want := range map[string]string{
		"--doctor nowhere.json":                   "the file cannot be read",
		"--doctor report.json":                    "not what `stowage doctor --json` prints",
		"--doctor broken.json":                    "not what `stowage doctor --json` prints",
		"--doctor list.json":                      "not what `stowage doctor --json` prints",
		"--doctor empty.json":                     "not what `stowage doctor --json` prints",
		"--doctor none.json":                      "there is no GPU in it",
		"--doctor mixed.json":                     "name one of them with --gpu",
		"--doctor busy.json":                      "only 3.00 GiB are free",
		"--doctor unknown.json":                   "how much memory of cuda:0 is free",
		"--doctor small.json":                     "the figures of NVIDIA L4 are not built in",
		"--doctor good.json --gpu h200":           "there is no h200 in it",
		"--doctor good.json --budget 70GiB":       "more than the 60.00 GiB that --doctor found free",
		"--doctor good.json --gpu h1000":          "no built-in hardware",
		"--doctor":                                "needs a value",
		"--doctor= ":                              "is empty",
		"--megatron - --doctor -":                 "standard input is the launch file already; save one of the two and name its file",
		"--doctor mixed.json --gpu a100 --gpus 8": "there is no a100 in it",
	} {
		line := "plan --model llama-3-8b " + flags
		if strings.Contains(flags, "--megatron") {
			line = "plan " + flags
		}
		stdout, stderr, code := command(strings.Split(strings.TrimRight(line, " "), " ")...)
		if code != exitUsage || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%s: code %d, output %q, errors %q; want %q", flags, code, stdout, stderr, want)
		}
	}
	// Another GPU may stand for one that is not built in, if the machine has no other.
	doctorFile(t, "odd.json", memory.GiB, "NVIDIA L4", 22, "NVIDIA H100 80GB HBM3", 60)
	if r, _ := planJSON(t, "plan --model llama-3-8b --gpus 8 --tp 8 --doctor odd.json --gpu h100"); r.Hardware.Free != 60*memory.GiB || r.Node.GPUs != 1 {
		t.Errorf("an H100 beside an L4: %+v, %+v", r.Hardware, r.Node)
	}
	if r, _ := planJSON(t, "plan --model llama-3-8b --gpus 8 --tp 8 --doctor small.json --gpu h100"); r.Hardware.Free != 22*memory.GiB ||
		!strings.Contains(strings.Join(r.Warnings, "\n"), "the figures of h100 stand for those of NVIDIA L4") {
		t.Errorf("an L4 alone: %+v, %q", r.Hardware, r.Warnings)
	}
	if r, _ := planJSON(t, "plan --model llama-3-8b --gpus 8 --tp 8 --doctor mixed.json --gpu h200"); r.Hardware.Name != "h200" || r.Hardware.Free != 130*memory.GiB || r.Node.GPUs != 1 {
		t.Errorf("of two kinds: %+v, %+v", r.Hardware, r.Node)
	}
}
