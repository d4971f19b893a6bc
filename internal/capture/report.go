// This file owns reports: where groups lie, as text, as JSON and as an error.

package capture

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/memory"
)

// Group says where one group lies that is not kept.
type Group struct {
	Name      string        `json:"name"`
	Of        string        `json:"of,omitempty"` // the name in the policy, if that stands for several
	Layers    Layers        `json:"layers"`
	Choice    memory.Choice `json:"choice"`
	Placement Placement     `json:"verdict"`
	Scope     string        `json:"scope,omitempty"` // the scope that holds it or a part of it
	Why       string        `json:"why"`
}

// Finding says what becomes of a scope or a setting.
type Finding struct {
	Name      string    `json:"name"`
	Placement Placement `json:"verdict"`
	Why       string    `json:"why,omitempty"`
}

// Report is the result of Detect.
type Report struct {
	Asked memory.Scopes `json:"asked"`
	// Captured are the scopes of Asked that were neither refused nor switched off.
	// Groups are judged as if refused scopes were captured, so that one report names
	// everything that has to change. To go on without the refused scopes, call Detect
	// with Captured.
	Captured memory.Scopes `json:"captured"`
	Scopes   []Finding     `json:"scopes"`
	Groups   []Group       `json:"groups"`
	Settings []Finding     `json:"settings"`
}

// Join adds the groups of a report on other choices for the same scopes, and returns r.
// A setting without effect stays in r only if it has none under the other choices either.
// Nothing changes if other is nil.
func (r *Report) Join(other *Report) *Report {
	if other == nil {
		return r
	}
	for _, g := range other.Groups {
		if !slices.Contains(r.Groups, g) {
			r.Groups = append(r.Groups, g)
		}
	}
	slices.SortStableFunc(r.Groups, func(a, b Group) int {
		return cmp.Or(strings.Compare(cmp.Or(a.Of, a.Name), cmp.Or(b.Of, b.Name)), int(a.Choice)-int(b.Choice))
	})
	r.Settings = slices.DeleteFunc(r.Settings, func(f Finding) bool {
		return !slices.ContainsFunc(other.Settings, func(o Finding) bool { return o.Name == f.Name })
	})
	return r
}

// Err returns an error with a line for everything that is refused, or nil.
func (r *Report) Err() error {
	var all []error
	for _, f := range r.Scopes {
		if f.Placement == Refused {
			all = append(all, errors.New(f.Why))
		}
	}
	for _, g := range r.Groups {
		if g.Placement == Refused {
			all = append(all, errors.New(g.Why))
		}
	}
	return errors.Join(all...)
}

// String returns the report in lines.
func (r *Report) String() string {
	var s strings.Builder
	fmt.Fprintf(&s, "captured: %v", r.Captured)
	if r.Captured != r.Asked {
		fmt.Fprintf(&s, " (asked for %v)", r.Asked)
	}
	s.WriteString("\n")
	line := func(name, choice string, v Placement, why string) {
		s.WriteString(strings.TrimRight(fmt.Sprintf("  %-30s %-9s %-12s %s", name, choice, v, why), " ") + "\n")
	}
	for _, f := range r.Scopes {
		if f.Why != "" {
			line("scope "+f.Name, "", f.Placement, f.Why)
		}
	}
	for _, g := range r.Groups {
		name := g.Name
		if g.Layers != AllLayers {
			name += ", " + g.Layers.String()
		}
		line(name, g.Choice.String(), g.Placement, g.Why)
	}
	for _, f := range r.Settings {
		line(f.Name, "", f.Placement, f.Why)
	}
	return s.String()
}
