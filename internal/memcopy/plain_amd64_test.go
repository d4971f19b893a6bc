//go:build amd64 && !race && !purego

// This file owns the tests of copies without vector instructions.

package memcopy

import "testing"

// Without vector instructions that store past the caches everything works as well.
func TestPlain(t *testing.T) {
	defer func(k kind) { best = k }(best)
	best = kindPlain
	for name, test := range map[string]func(*testing.T){
		"large": TestLarge, "shorter": TestLengthIsTheShorter, "2D": TestCopy2D, "fill": TestFill, "pieces": TestPieces, "variants": TestVariants,
	} {
		t.Run(name, test)
	}
	for _, v := range Variants() {
		if v.Supported != (v.Name == "copy") {
			t.Errorf("%s is supported: %t", v.Name, v.Supported)
		}
	}
}
