// This file owns the tests of policies.

package memory

import (
	"encoding/json"
	"reflect"
	"testing"

	"pgregory.net/rapid"
)

func TestPolicyJSON(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := Policy{}
		for range rapid.IntRange(0, 10).Draw(t, "units") {
			u := Unit{rapid.StringMatching(`[a-z_]{1,9}`).Draw(t, "name"), rapid.IntRange(0, 3).Draw(t, "chunk"), rapid.IntRange(0, 70).Draw(t, "layer")}
			p[u] = Choice(rapid.IntRange(1, Choices-1).Draw(t, "choice"))
		}
		text, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		var q Policy
		if err := json.Unmarshal(text, &q); err != nil || !reflect.DeepEqual(p, q) {
			t.Fatalf("%s becomes %v, %v", text, q, err)
		}
	})
	p := Policy{{"moe_act", 0, 2}: Offload, {"core_attn", 0, 1}: Recompute, {"moe_act", 0, 1}: Stash, {"moe_act", 0, 0}: Keep}
	text, _ := json.Marshal(p)
	if want := `[{"name":"core_attn","chunk":0,"layer":1,"choice":"recompute"},{"name":"moe_act","chunk":0,"layer":1,"choice":"stash"},{"name":"moe_act","chunk":0,"layer":2,"choice":"offload"}]`; string(text) != want {
		t.Errorf("%s\nwant %s", text, want)
	}
	if _, err := json.Marshal(Policy{{"a", 0, 0}: Choices}); err == nil {
		t.Error("a choice that is none was written")
	}
}

var badPolicies = []string{
	`{}`, `[{"name":"a","chunk":0,"layer":0,"choice":"drop"}]`, `[{"name":"","chunk":0,"layer":0,"choice":"keep"}]`,
	`[{"name":"a","chunk":-1,"layer":0,"choice":"keep"}]`, `[{"name":"a","layer":-1,"choice":"keep"}]`,
	`[{"name":"a","choice":"keep"},{"name":"a","choice":"offload"}]`, `[{"name":"a","weight":1}]`, `[`, `[{"name":"a","choice":3}]`,
}

func TestPolicyJSONRefusals(t *testing.T) {
	for _, text := range badPolicies {
		p := Policy{{"before", 0, 0}: Offload}
		if err := json.Unmarshal([]byte(text), &p); err == nil {
			t.Errorf("%s was read as %v", text, p)
		}
		if p[Unit{"before", 0, 0}] != Offload {
			t.Errorf("%s was refused, but changed the policy", text)
		}
	}
	if err := new(Policy).UnmarshalJSON([]byte(`[] []`)); err == nil {
		t.Error("two lists were read as one")
	}
}

// What is read is written and read as the same.
func FuzzPolicyJSON(f *testing.F) {
	f.Add([]byte(`[{"name":"core_attn","chunk":0,"layer":1,"choice":"recompute"}]`))
	for _, text := range badPolicies {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var p, q Policy
		if json.Unmarshal(text, &p) != nil {
			return
		}
		out, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(out, &q); err != nil || !reflect.DeepEqual(p.Units(), q.Units()) {
			t.Fatalf("%s becomes %s: %v", text, out, err)
		}
		for _, u := range p.Units() {
			if p[u] != q[u] {
				t.Fatalf("%v is %v, then %v", u, p[u], q[u])
			}
		}
	})
}
