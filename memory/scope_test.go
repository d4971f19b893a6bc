// This file owns the tests of names and sets.

package memory

import (
	"encoding/json"
	"strings"
	"testing"
)

// SPEC S4.1: the scopes have the field's names; what cannot be read is said with
// what can.
func TestParseScopes(t *testing.T) {
	for _, c := range []struct {
		list string
		want Scopes
		err  string
	}{
		{"", 0, ""},
		{" none ", 0, ""},
		{"attn", ScopesOf(Attn), ""},
		{"moe, attn ,mlp", ScopesOf(Attn, MLP, MoE), ""},
		{"moe_router", ScopesOf(MoERouter), ""},
		{"full_iteration", ScopesOf(FullIteration), ""},
		{"atn", 0, `unknown scope "atn" (did you mean attn?); the scopes are attn, mlp, moe_router, moe and full_iteration`},
		{"Attn", 0, `unknown scope "Attn" (did you mean attn?); the scopes are attn, mlp, moe_router, moe and full_iteration`},
		{"attn,something", 0, `unknown scope "something"; the scopes are attn, mlp, moe_router, moe and full_iteration`},
		{"attn,", 0, `unknown scope ""; the scopes are attn, mlp, moe_router, moe and full_iteration`},
		{"attn,none", 0, `unknown scope "none"; the scopes are attn, mlp, moe_router, moe and full_iteration`},
		{"attn,mlp,attn", 0, "scope attn is given twice; give it once"},
		{"attn,full_iteration,mlp", 0, "full_iteration captures the whole step and excludes attn,mlp; remove one of them"},
		{"moe_router,moe", 0, "moe already contains moe_router; remove one of them"},
	} {
		got, err := ParseScopes(c.list)
		if c.err == "" && (err != nil || got != c.want) || c.err != "" && (err == nil || err.Error() != c.err) {
			t.Errorf("%q: %v, %v; want %v, %q", c.list, got, err, c.want, c.err)
		}
	}
}

func TestScopesOfPanics(t *testing.T) {
	for want, list := range map[string][]Scope{
		"whole step": {FullIteration, Attn},
		"contains":   {MoE, MoERouter},
		"Scope(77)":  {77},
	} {
		mustPanic(t, want, func() { ScopesOf(list...) })
	}
}

func mustPanic(t *testing.T, want string, f func()) {
	t.Helper()
	defer func() {
		t.Helper()
		if x := recover(); x == nil || !strings.Contains(x.(string), want) {
			t.Errorf("panic %v, want one with %q", x, want)
		}
	}()
	f()
}

func TestScopeJSON(t *testing.T) {
	type both struct {
		Scope Scope
		Set   Scopes
	}
	in := both{MoERouter, ScopesOf(Attn, MoERouter)}
	text, err := json.Marshal(in)
	if want := `{"Scope":"moe_router","Set":"attn,moe_router"}`; err != nil || string(text) != want {
		t.Errorf("%s, %v; want %s", text, err, want)
	}
	var out both
	if err := json.Unmarshal(text, &out); err != nil || out != in {
		t.Errorf("%+v, %v", out, err)
	}
	if err := json.Unmarshal([]byte(`{"Scope":"mpl"}`), &out); err == nil || !strings.Contains(err.Error(), "did you mean mlp?") {
		t.Error(err)
	}
	if _, err := json.Marshal(scopes); err == nil {
		t.Error("a scope that there is not has a name")
	}
}

func FuzzParseScopes(f *testing.F) {
	for _, s := range []string{"", "none", "attn,mlp", "moe, moe_router", "full_iteration", "attn,,", "ätn"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, list string) {
		set, err := ParseScopes(list)
		if err != nil {
			return
		}
		if set.check() != nil {
			t.Errorf("%q gives %v, which cannot be", list, set)
		}
		if again, err := ParseScopes(set.String()); err != nil || again != set {
			t.Errorf("%q gives %v, which gives %v, %v", list, set, again, err)
		}
		if ScopesOf(set.List()...) != set {
			t.Errorf("%q gives %v, whose list is %v", list, set, set.List())
		}
	})
}
