// This file owns the rules that say what captured scopes mean for a policy.

package capture

import (
	"fmt"
	"maps"
	"slices"

	"github.com/stowage-dev/stowage/memory"
)

var pastNames [memory.Choices]string = [...]string{"kept", "stashed", "offloaded", "recomputed"}

// Placement says what becomes of a group, a scope or a setting.
type Placement uint8

const (
	Inside      Placement = iota // it is captured with the scope
	Outside                      // it is issued eagerly
	Delayed                      // it is queued while a scope is replayed, and issued right after
	SwitchedOff                  // it has no effect, and nothing is lost
	Refused                      // it is impossible
)

// String returns the placement in words.
func (v Placement) String() string {
	return [...]string{"inside", "outside", "delayed", "switched off", "refused"}[v]
}

// MarshalText returns the placement in words.
func (v Placement) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// Settings are the input of Detect.
type Settings struct {
	// Choices holds the choice for the groups of each name.
	Choices map[string]memory.Choice
	// Dense and MoE say which kinds of layers the model has. If neither is set, it has
	// both.
	Dense, MoE bool
	// WarmUp is the number of eager calls before a capture.
	WarmUp int
	// Delay makes offloads outside of scopes begin after replays.
	Delay bool

	own map[string]memory.Scope // groups that the caller placed
}

// Detect returns what captured scopes mean for the groups of a policy, in the order of
// their names, and for the scopes and settings themselves.
func Detect(asked memory.Scopes, s Settings) *Report {
	if !s.Dense && !s.MoE {
		s.Dense, s.MoE = true, true
	}
	r := &Report{Asked: asked, Captured: asked, Scopes: []Finding{}, Groups: []Group{}, Settings: []Finding{}}
	d := detector{Settings: s, Report: r}
	d.scopes()
	d.groups()
	d.settings()
	return r
}

// detector fills a report.
type detector struct {
	Settings
	*Report
	judged memory.Scopes // the scopes that some layer has, refused ones included
}

// scopes judges the scopes themselves.
func (d *detector) scopes() {
	d.judged = d.Asked
	for _, s := range d.Asked.List() {
		f := Finding{Name: s.String(), Placement: Inside}
		switch {
		case s == memory.MLP && !d.Dense:
			f.Placement, f.Why = SwitchedOff, "no layer of the model has a dense mlp; leave mlp out of the scopes"
			d.judged &^= 1 << s
		case (s == memory.MoE || s == memory.MoERouter) && !d.MoE:
			f.Placement, f.Why = SwitchedOff, fmt.Sprintf("no layer of the model has experts; leave %v out of the scopes", s)
			d.judged &^= 1 << s
		case d.WarmUp < 1:
			f.Placement, f.Why = Refused, fmt.Sprintf("%v cannot be captured without warm-up steps, which load code that cannot be loaded during a capture and let addresses settle; allow at least 1", s)
		}
		if f.Placement != Inside {
			d.Captured &^= 1 << s
		}
		d.Scopes = append(d.Scopes, f)
	}
}

// groups places every group that is not kept.
func (d *detector) groups() {
	for _, name := range slices.Sorted(maps.Keys(d.Choices)) {
		c := d.Choices[name]
		if c >= memory.Choices {
			panic(fmt.Sprintf("capture: group %s has choice %d, which does not exist", name, uint8(c)))
		}
		if c == memory.Keep {
			continue
		}
		parts := []string{name}
		if m, _ := d.find(name); len(m.StandsFor) > 0 {
			parts = m.StandsFor
		}
		for _, part := range parts {
			g := Group{Name: part, Choice: c}
			if part != name {
				g.Of = name
			}
			p, known := d.find(part)
			for _, l := range d.kinds(p) {
				g.Layers = l
				g.Placement, g.Scope, g.Why = d.judge(g, p, known)
				d.Groups = append(d.Groups, g)
			}
		}
	}
}

// kinds returns the kinds of layers in which a module lies in different scopes.
func (d *detector) kinds(m memory.Module) (kinds []Layers) {
	if m.MoEScopes == nil {
		return []Layers{AllLayers}
	}
	if d.Dense {
		kinds = append(kinds, DenseLayers)
	}
	if d.MoE {
		kinds = append(kinds, MoELayers)
	}
	return kinds
}

// judge places one group. It returns the scope that the group lies in, or "", and why.
func (d *detector) judge(g Group, m memory.Module, known bool) (v Placement, scope, why string) {
	by, whole := d.judged.Cover(m.In(g.Layers == MoELayers))
	done := pastNames[g.Choice]
	if d.judged.Has(memory.FullIteration) {
		return Inside, memory.FullIteration.String(), fmt.Sprintf("%s as a part of the captured step", done)
	}
	if len(by) == 0 {
		v, why = d.outside(g, known)
		return v, "", why
	}
	scope = by[0].String()
	switch {
	case !whole:
		why = fmt.Sprintf("%s cannot be %s while %s captures a part of it: it must lie wholly inside one scope or outside of all; capture moe in place of %s, or leave %s out of the scopes",
			g.Name, done, scope, scope, scope)
	case g.Choice == memory.Stash:
		why = fmt.Sprintf("%s cannot be stashed inside the captured scope %s: a graph ends only when the streams that it forked have joined it, so compute would wait at the end of every replay until the copies are done; capture full_iteration, or leave %s out of the scopes",
			g.Name, scope, scope)
	case g.Choice == memory.Offload && m.Input:
		why = fmt.Sprintf("%s cannot be offloaded while %s is captured: its tensor is made before the scope begins and saved inside it, so the graph reads it at one address, which has to stay free for whoever makes it before the next replay, and moving it away would save nothing; keep %s, or leave %s out of the scopes, or capture full_iteration",
			g.Name, scope, g.Name, scope)
	default:
		return Inside, scope, fmt.Sprintf("%s as a part of the captured scope %s", done, scope)
	}
	return Refused, scope, why
}

// outside places a group that no scope holds.
func (d *detector) outside(g Group, known bool) (v Placement, why string) {
	v, why = Outside, pastNames[g.Choice]+" eagerly"
	switch {
	case d.judged == 0:
	case g.Choice == memory.Offload && d.Delay:
		v, why = Delayed, "queued while a scope is replayed, and issued in order right after it"
	default:
		why += ", outside of the captured scopes"
	}
	if d.judged != 0 && !known {
		why += "; it is no known module: if a captured scope holds it, place it there"
	}
	return v, why
}

// settings judges what concerns more than one group.
func (d *detector) settings() {
	delayed := slices.ContainsFunc(d.Groups, func(g Group) bool { return g.Placement == Delayed })
	add := func(name, why string) {
		d.Report.Settings = append(d.Report.Settings, Finding{Name: name, Placement: SwitchedOff, Why: why})
	}
	switch {
	case !d.Delay || delayed:
	case d.judged == 0:
		add("delay", "nothing is captured, so there is no replay to delay offloads until; name scopes, or drop the delay")
	case d.judged.Has(memory.FullIteration):
		add("delay", "every offload lies inside full_iteration, so none is left to issue after its replay; drop the delay")
	default:
		add("delay", fmt.Sprintf("no offloaded group lies outside of the scopes %v; drop the delay", d.judged))
	}
}
