package hardware

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/input/inputtest"
)

// SPEC S6.1
func TestBuiltIn(t *testing.T) {
	want := []string{"a100", "b200", "b300", "gb200", "gb300", "h100", "h200", "mi300x", "tpu-v6e", "tpu-v7x"}
	if got := Names(); strings.Join(got, " ") != strings.Join(want, " ") {
		t.Fatalf("names are %v, want %v", got, want)
	}
	for _, name := range want {
		g, err := ByName(name)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if g.Name != name {
			t.Errorf("%s is called %s inside", name, g.Name)
		}
		if len(g.Source) < 40 {
			t.Errorf("%s does not say where its figures come from", name)
		}
		if g.Usable >= g.Memory || g.Usable < g.Memory*9/10 {
			t.Errorf("%s: %d of %d bytes usable", name, g.Usable, g.Memory)
		}
		if g.HostBoth < max(g.HostOut, g.HostIn) {
			t.Errorf("%s: both directions at once are slower than one", name)
		}
		if g.FastLink >= g.HBM || g.Network >= g.FastLink {
			t.Errorf("%s: memory, fast links and network are not in that order", name)
		}
		for format, rate := range g.Flops {
			if rate < g.Flops["bf16"] {
				t.Errorf("%s: %s is slower than bf16", name, format)
			}
		}
	}
}

func TestNames(t *testing.T) {
	for given, want := range map[string]string{
		"H100-80GB (DGX)":             "h100",
		"NVIDIA H100 80GB HBM3":       "h100",
		"DGX_H100":                    "h100",
		"GB200":                       "gb200",
		"B200":                        "b200",
		"NVIDIA A100-SXM4-80GB":       "a100",
		"H200 141GB":                  "h200",
		"TPU v6e":                     "tpu-v6e",
		"tpu7x-128":                   "tpu-v7x",
		"ironwood":                    "tpu-v7x",
		"AMD Instinct MI300X 192GB":   "mi300x",
		"a100-80gb":                   "a100",
		"gb300 (NVL72)":               "gb300",
		"2x b200, see gb200 for more": "b200",
	} {
		g, err := ByName(given)
		if err != nil {
			t.Errorf("%q: %v", given, err)
		} else if g.Name != want {
			t.Errorf("%q is taken for %s, not %s", given, g.Name, want)
		}
	}
	for given, want := range map[string]string{
		"GH200":           "choose from a100, b200",
		"RTX A1000":       "no built-in hardware",
		"":                "no built-in hardware",
		"A100-SXM4-40GB":  "has 86 GB; give a JSON file",
		"h100,h200":       `"h100,h200" names several; give one of them, such as h100`,
		"h200,":           "names several",
		"h100 94gb (nvl)": "", // within an eighth of 85.5 GB
	} {
		_, err := ByName(given)
		if (err == nil) != (want == "") || (err != nil && !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: error %v, want %q", given, err, want)
		}
	}
}

const own = `{"name":"mine","memory_bytes":48000000000,"flops":{"bf16":1e14},"hbm":1e12,"host_out":2e10,"host_in":2.1e10}`

func TestParse(t *testing.T) {
	g, err := Parse([]byte(own))
	if err != nil {
		t.Fatal(err)
	}
	if g.Usable != 48000000000-5<<30 || g.HostBoth != 4.1e10 || g.FastGroup != 1 {
		t.Errorf("filled in as %+v", g)
	}
	for _, c := range []struct{ old, new, want string }{
		{`"hbm"`, `"hmb"`, `unknown key "hmb"; the keys are`},
		{`"hbm":1e12`, `"hbm":1e12,"HBM":2e12`, `unknown key "HBM"; the keys are`},
		{`1e12`, `-1e12`, `"hbm" is -1e+12; it must not be negative`},
		{`48000000000`, `0`, `"memory_bytes" is missing or zero`},
		{`48000000000`, `-5`, `"memory_bytes" is -5; it must not be negative`},
		{`48000000000`, `1000000000000000000000000000000`, `hardware file: "memory_bytes" is 1000000000000000000000000000000; it must be a whole number below 2^63`},
		{`48000000000`, `1.5`, `hardware file: "memory_bytes" is 1.5; it must be a whole number in digits`},
		{`"hbm":1e12`, `"hbm":1e400`, `hardware file: "hbm" is 1e400; it must be a number that is not too large`},
		{`"hbm":1e12`, `"hbm":1e12,"hbm":2e12`, "hardware file: line 1 gives hbm different values; leave one of them out"},
		{`"bf16":1e14`, `"bf16":1e14,"bf16":2e14`, "hardware file: line 1 gives bf16 different values"},
		{`"bf16"`, `"tf32"`, `"flops" has no "bf16"`},
		{`{"bf16":1e14}`, `{"bf16":1e14,"tf32":1e13}`, `the formats are bf16, fp8`},
		{`{"bf16":1e14}`, `{"bf16":1e14,"fp8":-1}`, `"flops" of "fp8" is -1`},
		{`"mine"`, `""`, `"name" is missing`},
		{`"host_out":2e10`, `"host_out":2e10,"host_both":9e10`, `"host_both"`},
		{`"host_out":2e10`, `"host_out":1e10,"host_both":3.2e10`, `"host_both" 3.2e+10 is more than "host_out" and "host_in" together`},
		{`"host_out":2e10`, `"host_out":3e10,"host_both":5.2e10`, `"host_both" 5.2e+10 is more`},
		{`"host_out":2e10`, `"host_out":2e10,"usable_bytes":48000000001`, `"usable_bytes" 48000000001 is more`},
		{`}}`, `}`, `hardware file:`},
		{`2.1e10}`, `2.1e10} {}`, `more follows`},
	} {
		text := strings.Replace(own, c.old, c.new, 1)
		_, err := Parse([]byte(text))
		if c.old == `}}` {
			_, err = Parse([]byte(own[:len(own)-1]))
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", text, err, c.want)
		}
	}
}

// What is accepted survives being written and read again.
func FuzzParse(f *testing.F) {
	f.Add([]byte(own))
	for _, name := range Names() {
		data, err := files.ReadFile("data/" + name + ".json")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		defer inputtest.Bound(t, len(data))()
		g, err := Parse(data)
		if err != nil {
			return
		}
		if g.Memory <= 0 || g.Usable <= 0 || g.Usable > g.Memory || g.HostOut <= 0 || g.FastGroup < 1 {
			t.Fatalf("accepted %+v", g)
		}
		text, err := json.Marshal(g)
		if err != nil {
			t.Fatal(err)
		}
		again, err := Parse(text)
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if second, err := json.Marshal(again); err != nil || string(second) != string(text) {
			t.Fatalf("%s became %s (%v)", text, second, err)
		}
	})
}

// Each figure is checked by itself: none is negative, those that are needed are positive, and
// all lie between 1 and what can be counted.
func TestEachFigure(t *testing.T) {
	var figures map[string]any
	if err := json.Unmarshal([]byte(own), &figures); err != nil {
		t.Fatal(err)
	}
	whole := []string{"memory_bytes", "usable_bytes", "fast_group", "node_gpus", "node_memory_bytes", "generation"}
	needed := []string{"memory_bytes", "hbm", "host_out", "host_in"}
	for _, key := range append(whole, "hbm", "host_out", "host_in", "host_both", "fast_link", "network", "watts", "exponentials") {
		for _, value := range []float64{-1, 0, 0.5, 1, 1e30, 2e30} {
			if slices.Contains(whole, key) && (value != math.Trunc(value) || value > 1e18) {
				continue
			}
			changed := maps.Clone(figures)
			changed[key] = value
			if key == "node_memory_bytes" {
				changed["node_gpus"] = 8
			}
			if key == "host_both" {
				changed["host_out"] = 1e30
			}
			text, err := json.Marshal(changed)
			if err != nil {
				t.Fatal(err)
			}
			want := ""
			switch {
			case value < 0:
				want = fmt.Sprintf("%q is %g; it must not be negative", key, value)
			case value == 0 && slices.Contains(needed, key):
				want = fmt.Sprintf("%q is missing or zero", key)
			case value == 0.5 || value == 2e30:
				want = fmt.Sprintf("%q is %g; it must be a number from 1 to 1e+30", key, value)
			}
			if _, err := Parse(text); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("%s %g: %v, want %q", key, value, err, want)
			}
		}
	}
	for rate, ok := range map[float64]bool{0.5: false, 1: true, 1e30: true, 2e30: false} {
		changed := maps.Clone(figures)
		changed["flops"] = map[string]float64{"bf16": 1e14, "fp8": rate}
		text, err := json.Marshal(changed)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(text); (err == nil) != ok {
			t.Errorf("fp8 at %g: %v", rate, err)
		}
	}
	changed := maps.Clone(figures)
	changed["node_memory_bytes"] = 1 << 40
	text, err := json.Marshal(changed)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Parse(text); err == nil || !strings.Contains(err.Error(), `needs "node_gpus"`) {
		t.Errorf("memory of a node without GPUs: %v", err)
	}
	changed["node_gpus"], changed["usable_bytes"] = 8, changed["memory_bytes"]
	if text, err = json.Marshal(changed); err != nil {
		t.Fatal(err)
	}
	if _, err := Parse(text); err != nil {
		t.Errorf("all memory is usable: %v", err)
	}
	for _, name := range []string{"a/h100", `a\h100`} {
		if _, err := ByName(name); err == nil || !strings.Contains(err.Error(), "is the path of no JSON file") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
