package planscan

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
)

// values is a file of measured values with peaks, and with memory between steps.
func values(peaks, between string) string {
	return fmt.Sprintf(`{"lm loss": {"values": {"1": 10.5}}, "iteration-time": 3, "mem-max-allocated-bytes": {"values": %s}, "mem-allocated-bytes": {"values": %s}}`, peaks, between)
}

func TestUsualGPUs(t *testing.T) {
	for _, c := range []struct {
		test, gpu string
		want      int
	}{{"moe", "h100", 8}, {"moe_1node", "h100", 8}, {"moe", "gb200", 8}, {"moe_1node", "gb200", 4}, {"moe_release_1node", "gb200", 0}, {"moe_release", "h100", 0}} {
		if got := usualGPUs(c.test, c.gpu); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}

func TestMeasuredPeak(t *testing.T) {
	for _, c := range []struct {
		text string
		want int64
	}{
		{values(`{"1": 100, "10": 300, "5": 200}`, `{"1": 50, "5": 50}`), 200},               // the first lacks moments
		{values(`{"1": 100, "5": 200, "10": 300, "11": "nan"}`, `{"1": 50, "10": 90}`), 300}, // the first steps were skipped
		{values(`{"1": 100}`, `{}`), 100},
		{`{"lm loss": {"values": {"1": 10.5}}}`, 0},
	} {
		dir := folder(t, map[string]string{"golden.json": c.text})
		if got, err := measuredPeak(filepath.Join(dir, "golden.json")); err != nil || int64(got) != c.want {
			t.Errorf("%s: %d, %v, want %d", c.text, got, err, c.want)
		}
	}
}

// Measured peaks are compared with the forecast of the last pipeline rank, with the GPUs that
// a recipe states.
func TestCompare(t *testing.T) {
	small := values(`{"1": 1e6, "5": 1e6}`, `{"1": 1e6}`)
	dir := folder(t, map[string]string{
		"test_utils/recipes/h100/gpt.yaml":                     "spec:\n  nodes: 1\n  gpus: 4\nproducts:\n  - test_case: [one, two]\n    products:\n      - environment: [dev]\n",
		"test_utils/recipes/h100/again.yaml":                   "spec:\n  gpus: 4\nproducts:\n  - test_case: [one]\n",             // states no number of nodes
		"test_utils/recipes/h100/moe.yaml":                     "spec:\n  nodes: 2\n  gpus: 8\nproducts:\n  - test_case: [one]\n", // the first recipe that states a size counts
		"test_utils/recipes/gb200/gpt.yaml":                    "spec:\n  nodes: 2\n  gpus: 8\nproducts:\n  - test_case: [one]\n",
		"functional/cases/one/model.sh":                        job + "--pipeline-model-parallel-size 2 --global-batch-size 16",
		"functional/cases/one/golden_values_dev_dgx_h100.json": small, "functional/cases/one/golden_values_dev_dgx_gb200.json": small,
		"functional/cases/one/golden_values_dev_dgx_h100_2nd.json": small, // a second run that resumed
		"functional/cases/two/model.sh":                            job + "--global-batch-size 6", "functional/cases/two/golden_values_dev_dgx_h100.json": small,
		"functional/cases/two/golden_values_lts_dgx_a100.json": "{", "functional/cases/two/golden_values_dev_dgx_a100.json": `{"lm loss": 2}`,
		"functional/cases/old/model.sh": job, "functional/cases/old/golden_values_lts_dgx_a100.json": small,
		"functional/cases/old_release/model.sh": job, "functional/cases/old_release/golden_values_lts_dgx_a100.json": small,
		"functional/cases/refused/model.sh": "echo", "functional/cases/refused/golden_values_lts_dgx_a100.json": small,
	})
	files, err := Find([]string{dir}, []string{"model.sh"})
	if err != nil {
		t.Fatal(err)
	}
	r := Scan(files, "h100", func(int, int) {})
	if err := r.Compare(func(int, int) {}); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range r.Golden.Peaks {
		got = append(got, fmt.Sprintf("%s %s %s %d %v", filepath.Base(filepath.Dir(p.File)), p.Container, p.GPU, p.GPUs, p.Stated))
		if p.Measured != 1e6 || p.Predicted <= 1e6 || p.Heaviest < p.Predicted || p.Last != (p.Heaviest == p.Predicted) || p.Error <= 0 {
			t.Errorf("%+v", p)
		}
	}
	if want := "old lts a100 8 false, one dev gb200 16 true, one dev h100 4 true"; strings.Join(got, ", ") != want {
		t.Errorf("%s, want %s", strings.Join(got, ", "), want)
	}
	got = nil
	for _, s := range r.Golden.Skipped {
		got = append(got, filepath.Base(filepath.Dir(s.File))+": "+s.Reason)
	}
	want := "old_release: no recipe states its number of GPUs\n" +
		"two: with 4 GPUs: --global-batch-size 6 does not divide by --micro-batch-size 1 x 4 data-parallel replicas; the nearest that does is 8\n" +
		"two: expected a JSON object with measured values: it ends too early"
	if strings.Join(got, "\n") != want {
		t.Errorf("skipped:\n%s\nwant\n%s", strings.Join(got, "\n"), want)
	}
	if a := r.Golden.Accuracy; a[0].Name != "all" || a[0].Peaks != 3 || a[0].Within8 != 0 {
		t.Errorf("%+v", a)
	}
	var text strings.Builder
	r.WriteText(&text)
	for _, want := range []string{"976.6 KiB measured", "\nall                                     3       0.0 %       0.0 %", "\nold container (lts)  ", "not compared:"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("%q is missing in\n%s", want, text.String())
		}
	}
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
}

func TestAccuracy(t *testing.T) {
	g := &Golden{}
	for i, e := range []float64{0.01, -0.02, 0.05, -0.5} {
		g.Peaks = append(g.Peaks, Peak{Error: e, GPU: "h100", Container: "dev", Last: i < 2})
	}
	g.sum()
	if a := g.Accuracy[0]; a.Peaks != 4 || a.Within3 != 0.5 || a.Within8 != 0.75 || a.Mean != 0.145 || a.Median != 0.035 {
		t.Errorf("%+v", a)
	}
	if a := g.Accuracy[len(g.Accuracy)-1]; a.Peaks != 2 || a.Within8 != 1 || a.Median != 0.015 {
		t.Errorf("%+v", a)
	}
}
