package input_test

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/internal/input/inputtest"
)

func TestHostileYAML(t *testing.T) {
	for name, c := range inputtest.HostileYAML {
		t.Run(name, func(t *testing.T) {
			defer inputtest.Bound(t, len(c.Text))()
			var v map[string]any
			err := input.UnmarshalYAML([]byte(c.Text), &v)
			if err == nil || !strings.Contains(err.Error(), c.Want) || strings.ContainsRune(err.Error(), '\n') {
				t.Errorf("got %.200v, want %q", err, c.Want)
			}
		})
	}
}

// Files of settings are far within the bounds, with aliases as well.
func TestUnmarshalYAML(t *testing.T) {
	for text, want := range map[string]any{
		"a: 1\nb: [x, y]\n":                          map[string]any{"a": uint64(1), "b": []any{"x", "y"}},
		"base: &b {x: 1}\nsecond:\n  <<: *b\n  y: 2": map[string]any{"base": map[string]any{"x": uint64(1)}, "second": map[string]any{"x": uint64(1), "y": uint64(2)}},
		"a: &n 5\nb: *n":                             map[string]any{"a": uint64(5), "b": uint64(5)},
	} {
		var got map[string]any
		if err := input.UnmarshalYAML([]byte(text), &got); err != nil || !reflect.DeepEqual(any(got), want) {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{inputtest.Keys(4000, "\n"), "{" + inputtest.Keys(15_000, ",\n") + "}", inputtest.Steps(40), strings.Repeat("- ", 50) + "x", "a: |\n" + strings.Repeat("  [[[{{{\n", 1000)} {
		if err := input.CheckYAML([]byte(text)); err != nil {
			t.Errorf("%.30q: %v", text, err)
		}
	}
	var v map[string]any
	if err := input.UnmarshalYAML([]byte("a: 1\na: 2"), &v, yaml.AllowDuplicateMapKey()); err != nil || v["a"] != uint64(2) {
		t.Errorf("%v, %v", v, err)
	}
	if err := input.UnmarshalYAML([]byte("a: ["), &v); err == nil {
		t.Error("half a list was read")
	}
	for text, line := range map[string]string{"a: 1\n---\nb: 2\n": "line 3: ", "a: 1\n---\n": "", "--- # one\na: '---'\n...\n": "", "%YAML 1.2\n---\na: |\n  ---\n": ""} {
		err := input.UnmarshalYAML([]byte(text), &v)
		if line == "" && err != nil || line != "" && (err == nil || !strings.HasPrefix(err.Error(), line+"expected one document")) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// Bounds hold at their last unit and not beyond it, also for brackets without their other half and
// for more values than numbers can count.
func TestBoundsOfYAML(t *testing.T) {
	doubled := func(n int) string {
		text := "- &a0 x\n"
		for i := range n {
			text += fmt.Sprintf("- &a%d [*a%d, *a%d]\n", i+1, i, i)
		}
		return text
	}
	for _, x := range []struct {
		name, text, want string
	}{
		{"keys", inputtest.Keys(4096, "\n"), ""},
		{"a key more", inputtest.Keys(4097, "\n"), "expected at most 4096 keys"},
		{"levels", strings.Repeat("[", 64), ""},
		{"a level more", strings.Repeat("[", 65), "at most 64 levels"},
		{"levels behind brackets that close nothing", strings.Repeat("]", 70) + strings.Repeat("[", 65), "at most 64 levels"},
		{"aliases", doubled(12), ""},
		{"more aliases", doubled(16), "aliases stand for at most"},
		{"aliases of as many values as 63 bits count", doubled(62), "aliases stand for at most"},
		{"aliases beyond 64 bits", doubled(70), "aliases stand for at most"},
	} {
		err := input.CheckYAML([]byte(x.text))
		if (err == nil) != (x.want == "") || err != nil && !strings.Contains(err.Error(), x.want) {
			t.Errorf("%s: %v, want %q", x.name, err, x.want)
		}
	}
}

func FuzzYAML(f *testing.F) {
	for _, c := range inputtest.HostileYAML {
		f.Add([]byte(c.Text[:min(len(c.Text), 2000)]))
	}
	f.Add([]byte("a: &a {b: 1}\nc: {<<: *a}\n? d\n: - !!binary aGk=\n  - |\n    x\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		defer inputtest.Bound(t, len(text))()
		var v map[string]any
		_ = input.UnmarshalYAML(text, &v)
		var w struct {
			A []string          `yaml:"a"`
			B map[string]string `yaml:"b"`
		}
		_ = input.UnmarshalYAML(text, &w, yaml.Strict())
	})
}
