// This file compares sizes, lists and scopes with rules that are written out.

package memory

import (
	"errors"
	"fmt"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// A size is its number times its unit, without the part of a byte, from 1B to 1024TiB.
func TestParseBytesByFractions(t *testing.T) {
	units := map[string]int64{
		"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40,
		"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
	}
	names := []string{"B", "KiB", "MiB", "GiB", "TiB", "K", "M", "G", "T", "KB", "MB", "GB", "TB"}
	most := big.NewInt(1 << 50)
	rng := rand.New(rand.NewPCG(1, 92))
	for range 3000 {
		number := fmt.Sprint(rng.Uint64() >> rng.IntN(64))
		switch unit := units[names[rng.IntN(len(names))]]; rng.IntN(4) {
		case 0:
			number = fmt.Sprint((1<<50)/unit + int64(rng.IntN(3)-1)) // at the limit
		case 1:
			number += []string{".5", ".25", ".0", ".125", ".875"}[rng.IntN(5)]
		case 2:
			number += strings.Repeat("0", rng.IntN(20))
		}
		for _, name := range names {
			exact, ok := new(big.Rat).SetString(number)
			if !ok {
				t.Fatal(number)
			}
			exact.Mul(exact, new(big.Rat).SetInt64(units[name]))
			want := new(big.Int).Quo(exact.Num(), exact.Denom())
			got, err := ParseBytes(number + name)
			switch {
			case want.Sign() == 0:
				if err == nil || !strings.Contains(err.Error(), "at least 1B") {
					t.Errorf("%s%s is %d: %v", number, name, got, err)
				}
			case want.Cmp(most) > 0:
				if err == nil || !strings.Contains(err.Error(), "at most 1024TiB") {
					t.Errorf("%s%s is %d: %v", number, name, got, err)
				}
			case err != nil || want.Cmp(big.NewInt(int64(got))) != 0:
				t.Errorf("%s%s is %d, want %d: %v", number, name, got, want, err)
			}
		}
	}
}

// Exact writes a size with the largest unit that it is a multiple of, and ParseBytes reads it
// back.
func TestExactBytes(t *testing.T) {
	for want, b := range map[string]Bytes{"1B": 1, "1023B": 1023, "1KiB": 1024, "1025B": 1025, "3MiB": 3 << 20, "3073KiB": 3<<20 + 1<<10, "7GiB": 7 << 30, "1TiB": 1 << 40, "1024TiB": 1 << 50, "1025GiB": 1<<40 + 1<<30} {
		if got := b.Exact(); got != want {
			t.Errorf("%d is %s, want %s", b, got, want)
		}
		if got, err := ParseBytes(want); got != b {
			t.Errorf("%s is %d: %v", want, got, err)
		}
	}
}

// Each wrong rate is found whatever the others are.
func TestLinksOneByOne(t *testing.T) {
	for _, bad := range []float64{0, -1} {
		for i := range 2 {
			l := Links{Out: 1, In: 1}
			*[]*float64{&l.Out, &l.In}[i] = bad
			if l.Check() == nil {
				t.Errorf("%+v is accepted", l)
			}
		}
	}
}

// A list includes a module by the first of its names that is the module or covers it.
func TestIncludingByTheTable(t *testing.T) {
	covers := map[string][]string{}
	var names []string
	for _, m := range Modules() {
		covers[m.Name] = m.Covers
		names = append(names, m.Name)
	}
	for _, a := range append(names, "mine") {
		for _, b := range append(names, "mine") {
			for _, module := range append(names, "mine", "yours", "") {
				want := ""
				for _, name := range []string{a, b} {
					if want == "" && module != "" && (name == module || slices.Contains(covers[name], module)) {
						want = name
					}
				}
				if got := Including([]string{a, b}, module); got != want {
					t.Fatalf("%s, %s include %q by %q, want %q", a, b, module, got, want)
				}
			}
		}
	}
	if m, known := LookupModule("mine"); known || m.Name != "mine" || m.Choices != 0 {
		t.Errorf("an unknown module is %+v", m)
	}
}

// A set of scopes holds a part that is one of them, all parts if it is the whole step, and the
// router if it has the whole layer.
func TestCoverOfEverySet(t *testing.T) {
	for set := range Scopes(1 << scopes) {
		for parts := range Scopes(1 << scopes) {
			var want []Scope
			whole := parts != 0 || set.Has(FullIteration)
			for _, p := range parts.List() {
				switch {
				case set.Has(FullIteration):
					want = append(want, FullIteration)
				case p == MoERouter && set.Has(MoE):
					want = append(want, MoE)
				case set.Has(p):
					want = append(want, p)
				default:
					whole = false
				}
			}
			if by, all := set.Cover(parts.List()); !slices.Equal(by, want) || all != whole {
				t.Fatalf("%v covers %v by %v, wholly: %v; want %v, %v", set, parts, by, all, want, whole)
			}
		}
	}
}

func TestAnd(t *testing.T) {
	for want, words := range map[string][]string{"": nil, "a": {"a"}, "a and b": {"a", "b"}, "a, b and c": {"a", "b", "c"}} {
		if got := and(words); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// The sentence names own groups too, each once, and every pair of choices of a module excludes
// each other.
func TestModulesOfTheCaller(t *testing.T) {
	err := CheckModules(map[Choice][]string{Stash: {"theirs"}}, "mine", "moe_act", "other")
	var wrong *ModuleError
	if !errors.As(err, &wrong) || wrong.Choice != Stash || wrong.Module != "theirs" || !strings.HasSuffix(wrong.Remedy, ", mine, other") || strings.Count(wrong.Remedy, "moe_act") != 1 {
		t.Errorf("%+v", err)
	}
	for c := Keep + 1; c < Choices; c++ {
		for other := c + 1; other < Choices; other++ {
			err := CheckModules(map[Choice][]string{c: {"first", "mine"}, other: {"mine"}}, "first", "mine")
			if !errors.As(err, &wrong) || wrong.Choice != c || wrong.Module != "mine" || wrong.Problem != fmt.Sprintf("is also chosen for %v", other) {
				t.Errorf("%v and %v: %v", c, other, err)
			}
		}
	}
}

// An error that a setting caused says problem and remedy itself. Blanks are quoted.
func TestNamedSettings(t *testing.T) {
	cause := errors.New("no such file")
	for want, e := range map[string]*SettingError{
		"--data books: no such file":     {Setting: "Data", Asked: "books", Problem: "is bad", Remedy: "mend it", Err: cause},
		"--data: no such file":           {Err: cause},
		`--data " x" is bad; mend it`:    {Asked: " x", Problem: "is bad", Remedy: "mend it"},
		`--data "a  b" is bad`:           {Asked: "a  b", Problem: "is bad"},
		"--data a b is bad":              {Asked: "a b", Problem: "is bad"},
		"--data is missing; give a name": {Problem: "is missing", Remedy: "give a name"},
	} {
		if got := e.Named("--data"); got != want || errors.Is(e, cause) != (e.Err != nil) {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
