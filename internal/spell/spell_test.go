package spell

import "testing"

func TestDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{
		{"", "", 0}, {"", "abc", 3}, {"abc", "", 3}, {"cuda", "cuda", 0},
		{"cdua", "cuda", 1}, {"cude", "cuda", 1}, {"cud", "cuda", 1}, {"train", "trian", 1},
		{"kitten", "sitting", 3}, {"ab", "ba", 1}, {"abcd", "badc", 2},
	} {
		if got := Distance(c.a, c.b); got != c.want {
			t.Errorf("%q to %q: %d, want %d", c.a, c.b, got, c.want)
		}
	}
}

// A suggestion must be close: a far one sends the reader astray.
func TestNearest(t *testing.T) {
	presets := []string{"deepseek-v3", "glm-4.5", "glm-4.5-air", "kimi-k2", "llama-3-8b", "mixtral-8x7b", "tiny-moe"}
	for _, c := range []struct {
		word  string
		known []string
		want  string
	}{
		{"zzz", presets, ""}, {"", presets, ""}, {"0", presets, ""}, {"-1", presets, ""}, {"abc", presets, ""}, {"Inf", presets, ""}, {"99999999999", presets, ""},
		{"mixtrall", presets, "mixtral-8x7b"}, {"Mixtral", presets, "mixtral-8x7b"}, {"llama", presets, "llama-3-8b"}, {"lama-3-8b", presets, "llama-3-8b"},
		{"glm-4.5-ari", presets, "glm-4.5-air"}, {"GLM", presets, "glm-4.5"}, {"tinymoe", presets, "tiny-moe"},
		{"cdua", []string{"cpu", "cuda"}, "cuda"}, {"gpu", []string{"cpu", "cuda"}, "cpu"}, {"xy", []string{"ab"}, ""}, {"xy", []string{"y"}, ""},
		{"moeact", []string{"moe", "moe_act"}, "moe_act"}, {"1e300", []string{"mlp", "attn"}, ""}, {"trian", []string{"plan", "train"}, "train"},
		{"stash", nil, ""}, {"polcy", []string{"policy", "polcxyz"}, "policy"}, {"polcy", []string{"polcxyz", "policy"}, "polcxyz"},
	} {
		if got := Nearest(c.word, c.known); got != c.want {
			t.Errorf("%q among %v: %q, want %q", c.word, c.known, got, c.want)
		}
	}
}
