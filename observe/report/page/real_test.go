// This file tests the page on a run that was really trained: what it says is what the
// run's summary.json says.

package page

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	driver "github.com/stowage-dev/stowage/internal/browser"
	"github.com/stowage-dev/stowage/observe/report"
)

// trained trains a small model with the command that users have, and gives its folder.
func trained(t *testing.T) string {
	t.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("there is no go command here to build stowage with, so nothing is trained")
	}
	dir := t.TempDir()
	tool, run := filepath.Join(dir, "stowage"), filepath.Join(dir, "run")
	for _, args := range [][]string{
		{"go", "build", "-o", tool, "../../../cmd/stowage"},
		{tool, "train", "--policy", "offload", "--steps", "3", "--seq", "64", "--microbatches", "2", "--plain", "--out", run},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	return run
}

// SPEC S6.5: the page of a run says what the run's own summary says, of all ranks.
func TestRealRunInBrowser(t *testing.T) {
	if testing.Short() {
		t.Skip("trains a model and starts a browser")
	}
	driver.Find(t)
	run := trained(t)
	b := startBrowser(t)
	text, err := os.ReadFile(filepath.Join(run, "summary.json"))
	if err != nil {
		t.Fatal(err)
	}
	var summary struct {
		Device    int64   `json:"peak_device_bytes"`
		Host      int64   `json:"peak_host_bytes"`
		Predicted int64   `json:"predicted_device_bytes"`
		Loss      float64 `json:"final_loss"`
		Sum       string  `json:"params_sha256"`
		Ranks     []struct {
			Rank   int   `json:"rank"`
			Device int64 `json:"peak_device_bytes"`
		} `json:"by_rank"`
	}
	if err := json.Unmarshal(text, &summary); err != nil {
		t.Fatal(err)
	}
	r, err := report.Read(run)
	if err != nil {
		t.Fatal(err)
	}
	url := saved(t, r)
	b.Window(1440, "light")
	b.open(url)
	b.picture("real")
	b.wantText("#card-device", size(summary.Device))
	b.wantText("#card-device", "predicted "+size(summary.Predicted))
	b.wantText("#card-host", size(summary.Host))
	b.wantText("#card-loss", fmt.Sprintf("%.4f", summary.Loss))
	b.wantText("#card-sum", summary.Sum[:10])
	if len(summary.Ranks) < 2 {
		t.Fatalf("the run has %d ranks", len(summary.Ranks))
	}
	eval[bool](b, `document.getElementById("memory").scrollIntoView(), true`)
	for i, rank := range summary.Ranks {
		eval[bool](b, fmt.Sprintf(`document.querySelectorAll("#memory .ranks button")[%d].click(), true`, i))
		b.Until(fmt.Sprintf(`document.querySelectorAll("#memory .ranks button")[%d].getAttribute("aria-pressed") === "true"`, i))
		b.Press("m", "p")
		b.frame()
		b.wantText("#memory .readout .when", "the peak")
		b.wantText("#memory .readout .tier b", size(rank.Device))
		b.wantText("#said", "peak: "+size(rank.Device))
	}
	b.Press("Enter")
	if rows := eval[int](b, `document.querySelectorAll("#tensors tbody tr").length`); rows == 0 {
		t.Error("no tensors are alive at the peak")
	}
	b.Press("g", "ArrowRight")
	if b.text("#span-said") == "" {
		t.Error("the streams have no spans")
	}
	for _, c := range b.Complaints(url) {
		t.Error(c)
	}
}
