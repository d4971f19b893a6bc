package main

import (
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/planview"
)

// SPEC S3.1, S3.5: the published table of MaxText.
func TestPlanRing(t *testing.T) {
	stdout, stderr, code := command("plan", "ring")
	if code != exitOK || stderr != "" {
		t.Fatalf("code %d, errors %q", code, stderr)
	}
	golden.Check(t, "plan-ring.txt", stdout)
	stdout, _, _ = command("plan", "ring", "--json")
	var r planview.RingSizes
	if err := json.Unmarshal([]byte(stdout), &r); err != nil {
		t.Fatal(err)
	}
	if r.Rows != 262144 || r.Layer != 3758096384 {
		t.Errorf("%d rows, %d bytes a layer", r.Rows, r.Layer)
	}
	for i, want := range []float64{210, 105, 78, 52} { // GiB, the last two rounded down there
		if got := float64(r.Stores[i].Bytes) / (1 << 30); math.Floor(got) != want {
			t.Errorf("%s: %.1f GiB, published %.0f", r.Stores[i].Name, got, want)
		}
	}
	if _, stderr, code := command("plan", "ring", "--ep", "1"); code != exitOK {
		t.Errorf("one rank: code %d, errors %q", code, stderr)
	}
	// Two experts on a rank: a token comes there twice at most, not eight times.
	stdout, _, _ = command(strings.Fields("plan ring --experts 8 --json")...)
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || r.TightRows != r.Rows/4 {
		t.Errorf("%v, %d of %d rows", err, r.TightRows, r.Rows)
	}
}
