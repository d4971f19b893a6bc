// This file owns reports: verdicts as text, as JSON and as an error.

package capture

import (
	"errors"
	"fmt"
	"strings"
)

// Group is the verdict on one group that is not kept.
type Group struct {
	Name    string  `json:"name"`
	Of      string  `json:"of,omitempty"` // the name in the policy, if it stands for several
	Layers  Layers  `json:"layers"`
	Choice  Choice  `json:"choice"`
	Verdict Verdict `json:"verdict"`
	Scope   string  `json:"scope,omitempty"` // that holds it, or a part of it
	Why     string  `json:"why"`
}

// Finding is the verdict on a scope or a setting.
type Finding struct {
	Name    string  `json:"name"`
	Verdict Verdict `json:"verdict"`
	Why     string  `json:"why,omitempty"`
}

// Report is what Detect found.
type Report struct {
	Asked Set `json:"asked"`
	// Captured is what is left of it without the scopes that were refused or
	// switched off. Groups are judged as if refused scopes were captured, so that
	// everything there is to mend is said at once; to do without them, detect
	// Captured.
	Captured Set       `json:"captured"`
	Scopes   []Finding `json:"scopes"`
	Groups   []Group   `json:"groups"`
	Settings []Finding `json:"settings"`
}

// Err names everything that is impossible, a sentence a line, or is nil.
func (r *Report) Err() error {
	var all []error
	for _, f := range r.Scopes {
		if f.Verdict == Refused {
			all = append(all, errors.New(f.Why))
		}
	}
	for _, g := range r.Groups {
		if g.Verdict == Refused {
			all = append(all, errors.New(g.Why))
		}
	}
	return errors.Join(all...)
}

// Kept are the groups that must be kept because what the policy chose for them is
// impossible. A group that is impossible in some layers is kept in all.
func (r *Report) Kept() map[string]bool {
	kept := map[string]bool{}
	for _, g := range r.Groups {
		if g.Verdict == Refused {
			kept[g.Name] = true
		}
	}
	return kept
}

// InScope are the names of groups that a captured scope holds in some layers.
func (r *Report) InScope() map[string]bool {
	in := map[string]bool{}
	for _, g := range r.Groups {
		if g.Verdict == Inside {
			in[g.Name] = true
		}
	}
	return in
}

// String is the report in lines.
func (r *Report) String() string {
	var s strings.Builder
	fmt.Fprintf(&s, "captured: %v", r.Captured)
	if r.Captured != r.Asked {
		fmt.Fprintf(&s, " (asked for %v)", r.Asked)
	}
	s.WriteString("\n")
	line := func(name, choice string, v Verdict, why string) {
		s.WriteString(strings.TrimRight(fmt.Sprintf("  %-30s %-9s %-12s %s", name, choice, v, why), " ") + "\n")
	}
	for _, f := range r.Scopes {
		if f.Why != "" {
			line("scope "+f.Name, "", f.Verdict, f.Why)
		}
	}
	for _, g := range r.Groups {
		name := g.Name
		if g.Layers != AllLayers {
			name += ", " + g.Layers.String()
		}
		line(name, g.Choice.String(), g.Verdict, g.Why)
	}
	for _, f := range r.Settings {
		line(f.Name, "", f.Verdict, f.Why)
	}
	return s.String()
}
