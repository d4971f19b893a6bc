// This file owns the tests of the history of results.

package bench

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestReadEntry(t *testing.T) {
	for name, x := range map[string]struct {
		text    string
		figures map[string]float64
	}{
		"copy": {
			`{"command":"stowage bench copy","version":"1","device":{"backend":"cuda","name":"H200"},"ratio":0.9,"copies":[{"direction":"out","via":"stream","size":1,"gbps":9},{"direction":"out","via":"stream","size":2,"gbps":3},{"direction":"device","via":"kernel graph","size":2,"gbps":4}]}`,
			map[string]float64{"ratio": 0.9, "out_stream_gbps": 3, "device_kernel_graph_gbps": 4},
		},
		"stash":  {`{"pair_us":5,"gbps":2,"ratio":0.5}`, map[string]float64{"ratio": 0.5, "gbps": 2}},
		"replay": {`{"total":{"pool_over_live":1.5,"pool_over_bound":1.25}}`, map[string]float64{"pool_over_live": 1.5, "pool_over_bound": 1.25}},
		"pools": {
			`{"models":[{"weights":{"lower_bound_bytes":10,"pools":[{"pool":"max","bytes":20}]}},{"weights":{"lower_bound_bytes":30,"pools":[{"pool":"max","bytes":40}]}}]}`,
			map[string]float64{"weights_max_over_bound": 1.5},
		},
		"offload": {
			`{"offload_step_ms":4,"step_ratio":1.5,"peak_ratio":0.5,"link_utilisation":0.25,"hidden_fraction":1}`,
			map[string]float64{"offload_step_ms": 4, "step_ratio": 1.5, "peak_ratio": 0.5, "link_utilisation": 0.25, "hidden_fraction": 1},
		},
		"torch_moe":     {`{"bench":"torch_moe","hardware":"H200","command":"torch_moe.py","figures":{"wide8_stowage_none_ratio":1.25}}`, map[string]float64{"wide8_stowage_none_ratio": 1.25}},
		"torch_kernels": {`{"bench":"torch_kernels","figures":{"rows/copy_ratio":1}}`, map[string]float64{"rows/copy_ratio": 1}},
		"torch_mamba":   {`{"bench":"torch_mamba","figures":{"d2048-4k/forward_ratio":2}}`, map[string]float64{"d2048-4k/forward_ratio": 2}},
		"train": {
			`[{"policy":"none","peak_device_bytes":8,"step_ratio":1,"tokens_per_second":5,"params_sha256":"a"},{"policy":"stash","peak_device_bytes":4,"step_ratio":1.5,"params_sha256":"a"}]`,
			map[string]float64{"tokens_per_second": 5, "none_peak_device_bytes": 8, "none_step_ratio": 1, "stash_peak_device_bytes": 4, "stash_step_ratio": 1.5},
		},
	} {
		for _, key := range []string{"pair_us", "gbps", "ratio", "offload_step_ms", "step_ratio", "peak_ratio", "link_utilisation", "hidden_fraction"} {
			// A result that lacks one of its figures is none.
			if lacking := strings.Replace(x.text, `"`+key+`":`, `"x":`, 1); (name == "stash" || name == "offload" || name == "copy" && key == "ratio") && lacking != x.text {
				if e, err := ReadEntry([]byte(lacking)); err == nil {
					t.Errorf("%s without %s is read as %+v", name, key, e)
				}
			}
		}
		e, err := ReadEntry([]byte(x.text))
		if err != nil || e.Bench != name || !maps.Equal(e.Figures, x.figures) {
			t.Errorf("%s: %+v, %v", name, e, err)
		}
		if name == "copy" && (e.Hardware != "H200" || e.Command != "stowage bench copy" || e.Version != "1") {
			t.Errorf("the label is %+v", e)
		}
	}
	for _, text := range []string{
		"", "[]", "{}", "null", "3", `{"ratio":1}`, `[{"policy":"none"}]`, `[{"policy":"none","step_ratio":1}]`, `[{"policy":"none","params_sha256":"a"}]`, `[{"step_ratio":1,"params_sha256":"a"}]`, "[1]", `{"copies":3}`, `{"total":{}}`, `{"models":[]}`,
		`{"models":[{"weights":{"pools":[{"pool":"max","bytes":20}]}}]}`,
	} {
		if e, err := ReadEntry([]byte(text)); err == nil || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q is read as %+v, %v", text, e, err)
		}
	}
}

func TestHistory(t *testing.T) {
	old := Entry{Date: "2026-01-02", Bench: "stash", Hardware: "a <box>", Version: "1", Command: "c", Figures: map[string]float64{"gbps": 2, "step_ratio": 2, "ratio": 1, "gone": 1}}
	other := old
	other.Hardware = "another"
	var text strings.Builder
	for _, e := range []Entry{old, other} {
		line, err := e.Line()
		if err != nil {
			t.Fatal(err)
		}
		text.Write(line)
	}
	all, err := ReadHistory(strings.NewReader("\n" + text.String()))
	if err != nil || !reflect.DeepEqual(all, []Entry{old, other}) {
		t.Fatalf("%q becomes %+v, %v", text.String(), all, err)
	}
	now := old
	now.Date, now.Figures = "2026-01-03", map[string]float64{"gbps": 3, "step_ratio": 3, "ratio": 1.01, "fresh": 1}
	var out strings.Builder
	CompareText(&out, now, now.Previous(all))
	for _, want := range []string{"2026-01-02", "gbps 2 3 1.500 better", "step_ratio 2 3 1.500 worse", "ratio 1 1.01 1.010 same", "fresh - 1 - new"} {
		if !strings.Contains(strings.Join(strings.Fields(out.String()), " "), want) {
			t.Errorf("%q is not in\n%s", want, out.String())
		}
	}
	now.Command = "d"
	out.Reset()
	if CompareText(&out, now, now.Previous(all)); !strings.Contains(out.String(), "the first entry") {
		t.Errorf("%s", out.String())
	}
	for _, bad := range []string{"x", `{}`, `{"date":"soon","bench":"b","figures":{"a":1}}`, `{"date":"2026-01-02","bench":"b"}`, `{"date":"2026-01-02","bench":"b","figures":{"a":1},"more":1}`} {
		if _, err := ReadHistory(strings.NewReader(text.String() + bad)); err == nil || !strings.HasPrefix(err.Error(), "line 3 ") {
			t.Errorf("%s: %v", bad, err)
		}
	}
	for _, name := range []string{"zero", "nothing"} {
		if v := verdict(name, 0, 0); v != "same" || !slices.Contains([]string{"better", "worse", "same"}, verdict(name, 0, 1)) {
			t.Errorf("%s: %s", name, v)
		}
	}
}

// The entry that a result is compared with is the last one of the same benchmark, hardware
// and command.
func TestPrevious(t *testing.T) {
	e := Entry{Bench: "b", Hardware: "h", Command: "c"}
	var history []Entry
	add := func(change func(*Entry)) {
		x := e
		x.Date = fmt.Sprint(len(history))
		change(&x)
		history = append(history, x)
	}
	if e.Previous(history) != nil {
		t.Error("there is an entry before the first one")
	}
	others := func() {
		add(func(x *Entry) { x.Bench = "other" })
		add(func(x *Entry) { x.Hardware = "other" })
		add(func(x *Entry) { x.Command = "other" })
	}
	others()
	if p := e.Previous(history); p != nil {
		t.Errorf("compared with %+v", p)
	}
	add(func(*Entry) {})
	add(func(x *Entry) { x.Note, x.Version = "other", "other" })
	others()
	if p := e.Previous(history); p == nil || p.Note != "other" || p.Bench+p.Hardware+p.Command != "bhc" {
		t.Errorf("compared with %+v", p)
	}
}

// What nothing can measure is no entry.
func TestNegativeFigures(t *testing.T) {
	for name, wrong := range map[string]bool{"gbps": true, "step_ratio": true, "hidden_fraction": false} {
		e := Entry{Bench: "offload", Figures: map[string]float64{name: -0.5, "peak_ratio": 0}}
		if err := e.check(); (err != nil) != wrong || wrong && !strings.Contains(err.Error(), "the figure "+name+" is -0.5; run the benchmark again") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
