package hardware

import (
	"encoding/json"
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
		{`1e12`, `-1e12`, `"hbm" is -1e+12; it must not be negative`},
		{`48000000000`, `0`, `"memory_bytes" is missing or zero`},
		{`48000000000`, `-5`, `"memory_bytes" is -5; it must not be negative`},
		{`48000000000`, `1.5`, `hardware file: "memory_bytes" has the wrong kind of value (number 1.5)`},
		{`"bf16"`, `"tf32"`, `"flops" has no "bf16"`},
		{`{"bf16":1e14}`, `{"bf16":1e14,"tf32":1e13}`, `the formats are bf16, fp8`},
		{`{"bf16":1e14}`, `{"bf16":1e14,"fp8":-1}`, `"flops" of "fp8" is -1`},
		{`"mine"`, `""`, `"name" is missing`},
		{`"host_out":2e10`, `"host_out":2e10,"host_both":9e10`, `"host_both"`},
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
