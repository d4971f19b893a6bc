package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/planvalidate"
)

// A case that is made up for the command: its figures say nothing about the
// planner, and it is of a kind that is modelled. The second cannot be.
const twoCases = `{"cases": [
 {"id": "toy", "gpu": "H100", "n_gpus": 8, "args": {
   "num-layers": 4, "hidden-size": 1024, "num-attention-heads": 16, "vocab-size": 32000, "seq-length": 1024, "max-position-embeddings": 1024,
   "micro-batch-size": 1, "global-batch-size": 8, "bf16": true},
  "measured": {"mem_max_allocated_bytes_last": 3000000000, "mem_allocated_bytes_last": 2000000000}},
 {"id": "lost", "gpu": "H100", "n_gpus": 8, "args": {"num-layers": 4}, "measured": {"mem_max_allocated_bytes_last": 1}}
]}`

func TestPlanValidate(t *testing.T) {
	planFiles(t, map[string]string{"cases.json": twoCases})
	stdout, stderr, code := command("plan", "validate", "--cases", "cases.json")
	if code != exitOK || stderr != "" {
		t.Fatalf("code %d, errors %q", code, stderr)
	}
	for _, want := range []string{"toy", "skipped lost: ", "1 of 2 cases modelled", "mean abs error"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("%q is missing in %s", want, stdout)
		}
	}
	stdout, _, code = command("plan", "validate", "--cases", "cases.json", "--json")
	var r struct {
		planvalidate.Report
		Rows []struct {
			planvalidate.Row
			Error float64 `json:"error"`
		} `json:"rows"`
	}
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != exitOK || len(r.Rows) != 2 || len(r.Skipped) != 1 {
		t.Fatalf("code %d, %v, %s", code, err, stdout)
	}
	if n := r.Counts; len(n) != 1 || n[0].Kind != "dense" || n[0].Modelled != 1 || n[0].Skipped != 1 || r.Skipped[0].Kind != "dense" || r.Kinds[0].Skipped != 1 {
		t.Errorf("%+v, %+v", n, r.Skipped)
	}
	for _, row := range r.Rows {
		if want := float64(row.Predicted)/float64(row.Measured) - 1; row.Error != want || row.Predicted <= 0 {
			t.Errorf("%+v, want the error %g", row, want)
		}
	}
}
