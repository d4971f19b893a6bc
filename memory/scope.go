// This file owns the scopes of a step that can be captured as graphs.

package memory

import (
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/internal/spell"
)

// Scope is a part of a step that is captured as one graph. Every scope but
// FullIteration has one graph for each pass of each layer of each microbatch.
type Scope uint8

const (
	// Attn reaches from the norm before attention to attention's output projection.
	Attn Scope = iota
	// MLP is the feed-forward part of a dense layer. It begins with the addition of
	// attention's output to the residual, which the norm reads.
	MLP
	// MoERouter is the beginning of a mixture-of-experts layer up to the routing
	// decision, with the shared experts.
	MoERouter
	// MoE is the whole of a mixture-of-experts layer, the router included.
	MoE
	// FullIteration is the whole step, from its first launch to its last.
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

// ParseScope reads the name of a scope.
func ParseScope(name string) (Scope, error) {
	if i := slices.Index(scopeNames[:], name); i >= 0 {
		return Scope(i), nil
	}
	return 0, fmt.Errorf("unknown scope %q%s; the scopes are %s", name, guess(name), and(scopeNames[:]))
}

// guess suggests the scope that was probably meant, or nothing.
func guess(name string) string {
	if near := spell.Nearest(name, scopeNames[:]); near != "" {
		return fmt.Sprintf(" (did you mean %s?)", near)
	}
	return ""
}

// and joins words into a list with "and" before the last.
func and(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:len(words)-1], ", ") + " and " + words[len(words)-1]
}

// MarshalText returns the scope's name.
func (s Scope) MarshalText() ([]byte, error) {
	if s >= scopes {
		return nil, fmt.Errorf("memory: Scope(%d) is not a scope", uint8(s))
	}
	return []byte(s.String()), nil
}

// UnmarshalText reads a scope's name.
func (s *Scope) UnmarshalText(text []byte) (err error) {
	*s, err = ParseScope(string(text))
	return err
}

// Scopes is a set of scopes that are captured together. The zero value captures
// nothing.
type Scopes uint8

// ScopesOf returns the set of the given scopes. It panics if they exclude each other.
func ScopesOf(list ...Scope) Scopes {
	var set Scopes
	for _, s := range list {
		if s >= scopes {
			panic(fmt.Sprintf("memory: Scope(%d) is not a scope", uint8(s)))
		}
		set |= 1 << s
	}
	if err := set.check(); err != nil {
		panic("memory: " + err.Error())
	}
	return set
}

// Has reports whether the set contains a scope.
func (t Scopes) Has(s Scope) bool { return t&(1<<s) != 0 }

// List returns the scopes of the set in order.
func (t Scopes) List() (list []Scope) {
	for s := range scopes {
		if t.Has(s) {
			list = append(list, s)
		}
	}
	return list
}

// String returns the set in the form that ParseScopes reads.
func (t Scopes) String() string {
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

// check returns an error if the scopes exclude each other.
func (t Scopes) check() error {
	switch {
	case t.Has(FullIteration) && t != 1<<FullIteration:
		return fmt.Errorf("%v captures the whole step and excludes %v; remove one of them", FullIteration, t&^(1<<FullIteration))
	case t.Has(MoE) && t.Has(MoERouter):
		return fmt.Errorf("%v already contains %v; remove one of them", MoE, MoERouter)
	}
	return nil
}

// ParseScopes reads names separated by commas. Nothing, or "none", is the empty set.
func ParseScopes(list string) (Scopes, error) {
	if s := strings.TrimSpace(list); s == "" || s == none {
		return 0, nil
	}
	var set Scopes
	for name := range strings.SplitSeq(list, ",") {
		s, err := ParseScope(strings.TrimSpace(name))
		if err != nil {
			return 0, err
		}
		if set.Has(s) {
			return 0, fmt.Errorf("scope %v is given twice; give it once", s)
		}
		set |= 1 << s
	}
	return set, set.check()
}

// MarshalText returns what ParseScopes reads.
func (t Scopes) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// UnmarshalText reads what ParseScopes reads.
func (t *Scopes) UnmarshalText(text []byte) (err error) {
	*t, err = ParseScopes(string(text))
	return err
}

// Cover returns the scopes of the set that hold the given parts of a module, and
// whether they hold all of them.
func (t Scopes) Cover(parts []Scope) (by []Scope, whole bool) {
	whole = len(parts) > 0
	for _, p := range parts {
		switch {
		case t.Has(FullIteration):
			p = FullIteration
		case p == MoERouter && t.Has(MoE):
			p = MoE
		}
		if t.Has(p) {
			by = append(by, p)
		} else {
			whole = false
		}
	}
	return by, whole || t.Has(FullIteration)
}
