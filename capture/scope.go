// Package capture knows which parts of a training step become graphs. It says
// which groups of a policy lie in a captured scope and refuses what cannot be,
// with the reason; and it leads every captured instance through its life: eager
// warm-up, capture, replay, capture again when addresses moved.
//
// This file owns the scopes and their names, place.go which modules lie in which,
// detect.go what follows for a policy, report.go how that is told; scopes.go owns
// the life of instances, recorder.go the capture of a single stream.
package capture

import (
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/internal/spell"
)

// Scope is a part of a step that is captured as one graph for each pass of each
// layer of each microbatch, or the whole step.
type Scope uint8

const (
	// Attn is from the norm before attention to its output projection.
	Attn Scope = iota
	// MLP is a dense layer's, from the addition of attention's output to the
	// residual, which the norm reads, to the last product.
	MLP
	// MoERouter is the same beginning of a layer of experts up to the routing
	// decision, with the shared experts.
	MoERouter
	// MoE is a layer of experts whole, the router included.
	MoE
	// FullIteration is everything from a step's first launch to its last.
	FullIteration
	scopes
)

var scopeNames = [scopes]string{"attn", "mlp", "moe_router", "moe", "full_iteration"}

func (s Scope) String() string {
	if s < scopes {
		return scopeNames[s]
	}
	return fmt.Sprintf("Scope(%d)", uint8(s))
}

// ParseScope reads one name.
func ParseScope(name string) (Scope, error) {
	if i := slices.Index(scopeNames[:], name); i >= 0 {
		return Scope(i), nil
	}
	return 0, fmt.Errorf("unknown scope %q%s; the scopes are %s", name, guess(name), and(scopeNames[:]))
}

// guess is the name that was probably meant, which differs in less than half of
// the letters.
func guess(name string) string {
	best, least := "", len(name)/2+1
	for _, known := range scopeNames {
		if d := spell.Distance(strings.ToLower(name), known); d < least {
			best, least = fmt.Sprintf(" (did you mean %s?)", known), d
		}
	}
	return best
}

// and lists words.
func and(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:len(words)-1], ", ") + " and " + words[len(words)-1]
}

// MarshalText gives the name.
func (s Scope) MarshalText() ([]byte, error) {
	if s >= scopes {
		return nil, fmt.Errorf("capture: there is no scope %d", uint8(s))
	}
	return []byte(s.String()), nil
}

// UnmarshalText reads a name.
func (s *Scope) UnmarshalText(text []byte) (err error) {
	*s, err = ParseScope(string(text))
	return err
}

// Set is the scopes that are captured together; zero captures nothing.
type Set uint8

// Of is a set of scopes; those that exclude each other panic.
func Of(list ...Scope) Set {
	var set Set
	for _, s := range list {
		if s >= scopes {
			panic(fmt.Sprintf("capture: there is no scope %d", uint8(s)))
		}
		set |= 1 << s
	}
	if err := set.check(); err != nil {
		panic("capture: " + err.Error())
	}
	return set
}

// Has tells whether a scope is in the set.
func (t Set) Has(s Scope) bool { return t&(1<<s) != 0 }

// List is the scopes of the set in their order.
func (t Set) List() (list []Scope) {
	for s := range scopes {
		if t.Has(s) {
			list = append(list, s)
		}
	}
	return list
}

// String is what Parse reads.
func (t Set) String() string {
	var names []string
	for _, s := range t.List() {
		names = append(names, s.String())
	}
	if names == nil {
		return none
	}
	return strings.Join(names, ",")
}

// none is the word for the empty set.
const none = "none"

// check says which scopes exclude each other.
func (t Set) check() error {
	switch {
	case t.Has(FullIteration) && t != 1<<FullIteration:
		return fmt.Errorf("%v captures the whole step, so %v must not be given beside it; keep one of them", FullIteration, t&^(1<<FullIteration))
	case t.Has(MoE) && t.Has(MoERouter):
		return fmt.Errorf("%v holds %v already; keep one of them", MoE, MoERouter)
	}
	return nil
}

// Parse reads names separated by commas; nothing, or "none", is the empty set.
func Parse(list string) (Set, error) {
	if s := strings.TrimSpace(list); s == "" || s == none {
		return 0, nil
	}
	var set Set
	for name := range strings.SplitSeq(list, ",") {
		s, err := ParseScope(strings.TrimSpace(name))
		if err != nil {
			return 0, err
		}
		if set.Has(s) {
			return 0, fmt.Errorf("scope %v is given twice; name it once", s)
		}
		set |= 1 << s
	}
	return set, set.check()
}

// MarshalText gives what Parse reads.
func (t Set) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// UnmarshalText is Parse.
func (t *Set) UnmarshalText(text []byte) (err error) {
	*t, err = Parse(string(text))
	return err
}
