// This file owns YAML that costs far more than its size.

package inputtest

import (
	"fmt"
	"strings"
)

// laughs returns YAML whose last value stands for 10^n words.
func laughs(n int) string {
	var b strings.Builder
	b.WriteString("a0: &a0 [" + strings.Repeat("x,", 9) + "x]\n")
	for i := 1; i < n; i++ {
		one := fmt.Sprintf("*a%d,", i-1)
		fmt.Fprintf(&b, "a%d: &a%d [%s]\n", i, i, strings.TrimSuffix(strings.Repeat(one, 10), ","))
	}
	return b.String()
}

// Keys returns n keys of one mapping.
func Keys(n int, separator string) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "key%d: %d%s", i, i, separator)
	}
	return b.String()
}

// Steps returns n mappings, each inside of the one before.
func Steps(n int) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(strings.Repeat(" ", i) + "a:\n")
	}
	return b.String()
}

// HostileYAML lists small texts that take gigabytes or minutes without bounds, with words
// of the sentence that refuses each.
var HostileYAML = map[string]struct{ Text, Want string }{
	"aliases":          {laughs(9), "aliases stand for"},
	"nested aliases":   {"x: &c [&b [&a [1,1,1,1], *a,*a,*a,*a], *b,*b,*b,*b]\ny: [" + strings.Repeat("*c,", 3000) + "*c]", "aliases stand for"},
	"alias of itself":  {"a: &a [*a, *a]", "themselves"},
	"merged into self": {"a: &a {<<: *a}", "themselves"},
	"brackets":         {strings.Repeat("[", 60_000), "levels"},
	"closed brackets":  {strings.Repeat("[", 30_000) + strings.Repeat("]", 30_000), "levels"},
	"braces":           {strings.Repeat("{a: ", 15_000), "levels"},
	"dashes":           {strings.Repeat("- ", 50_000), "levels"},
	"question marks":   {strings.Repeat("? ", 50_000), "levels"},
	"indentation":      {Steps(500), "levels"},
	"dashes and keys":  {strings.Repeat("- a: ", 15_000), "levels"},
	"flat keys":        {Keys(20_000, "\n"), "keys"},
	"anchors":          {strings.Repeat("&a ", 30_000), "an anchor and a tag"},
	"tags":             {strings.Repeat("!!a ", 60_000), "an anchor and a tag"},
	"long path":        {strings.Repeat("k", 100_000) + ": {" + Keys(10_000, ",") + "}", "short keys"},
	"size":             {"a: " + strings.Repeat("x", 3<<20), "at most 1.0 MiB of YAML, got 3.0 MiB"},
	"a long line":      {"[" + strings.Repeat("[],", 20_000) + "]", "line 1: sequence was used"},
	"commas":           {"a: [" + strings.Repeat("1,", 300_000) + "]", "words and signs"},
}
