// This file tests the values of flags of training.

package main

import (
	"slices"
	"testing"
)

// Words of a list are separated by commas or spaces, also inside of quotes.
func TestListValue(t *testing.T) {
	for text, want := range map[string][]string{
		"attn": {"attn"}, "attn,mlp": {"attn", "mlp"}, "attn mlp": {"attn", "mlp"}, " attn ,, mlp\t": {"attn", "mlp"}, ", ": {},
	} {
		var got []string
		if err := (listValue{&got}).Set(text); err != nil || !slices.Equal(got, want) || got == nil {
			t.Errorf("%q: %q, %v, want %q", text, got, err, want)
		}
	}
}
