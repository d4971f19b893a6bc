// This file owns the rules: what captured scopes mean for a policy.

package capture

import (
	"fmt"
	"maps"
	"slices"
)

// Choice is what a policy does with a group.
type Choice uint8

const (
	Keep Choice = iota
	Stash
	Offload
	Recompute
	choices
)

var (
	choiceNames = [choices]string{"keep", "stash", "offload", "recompute"}
	pastNames   = [choices]string{"kept", "stashed", "offloaded", "recomputed"}
)

func (c Choice) String() string {
	if c < choices {
		return choiceNames[c]
	}
	return fmt.Sprintf("Choice(%d)", uint8(c))
}

// MarshalText gives the name.
func (c Choice) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// Verdict is what becomes of a group, scope or setting.
type Verdict uint8

const (
	Inside      Verdict = iota // captured with the scope
	Outside                    // issued eagerly
	Delayed                    // queued while a scope is replayed, and issued right after it
	SwitchedOff                // without effect, and nothing is lost
	Refused                    // impossible
)

func (v Verdict) String() string {
	return [...]string{"inside", "outside", "delayed", "switched off", "refused"}[v]
}

// MarshalText gives the name.
func (v Verdict) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// Settings are what Detect looks at.
type Settings struct {
	// Choices are the policy, by the names of groups.
	Choices map[string]Choice
	// Dense and MoE say which layers the model has; neither stands for both.
	Dense, MoE bool
	// WarmUp is how many eager calls come before a capture.
	WarmUp int
	// Delay asks that offloads outside of scopes be issued after replays.
	Delay bool
	// ForwardOnly says that backward passes are not captured.
	ForwardOnly bool
	// HostCounts says that the host reads how many rows each expert gets.
	HostCounts bool
	// Outgrows says that memory may grow beyond the addresses reserved for it.
	Outgrows bool

	own map[string]Scope // groups that the caller placed
}

// Detect says what captured scopes mean for a policy: group by group, in the order
// of names, then for scopes and settings.
func Detect(asked Set, s Settings) *Report {
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
	judged Set // scopes that some layer has: a refused one is judged as if it were not
}

// scopes judges the scopes themselves.
func (d *detector) scopes() {
	d.judged = d.Asked
	for _, s := range d.Asked.List() {
		f := Finding{Name: s.String(), Verdict: Inside}
		switch {
		case s == MLP && !d.Dense:
			f.Verdict, f.Why = SwitchedOff, "no layer of the model has a dense mlp; leave mlp out of the scopes"
			d.judged &^= 1 << s
		case (s == MoE || s == MoERouter) && !d.MoE:
			f.Verdict, f.Why = SwitchedOff, fmt.Sprintf("no layer of the model has experts; leave %v out of the scopes", s)
			d.judged &^= 1 << s
		case d.WarmUp < 1:
			f.Verdict, f.Why = Refused, fmt.Sprintf("%v cannot be captured without warm-up steps, which load code that cannot be loaded during a capture and let addresses settle; allow at least 1", s)
		case s == MoE && d.HostCounts:
			f.Verdict, f.Why = Refused, "moe cannot be captured while the host reads how many rows each expert gets: a replay runs without the host and would repeat the counts of the captured step; count rows on the device, or capture moe_router in place of moe"
		case s == FullIteration && d.HostCounts && d.MoE:
			f.Verdict, f.Why = Refused, "full_iteration cannot be captured while the host reads how many rows each expert gets: a replay runs without the host and would repeat the counts of the captured step; count rows on the device, or capture attn,moe_router in its place"
		}
		if f.Verdict != Inside {
			d.Captured &^= 1 << s
		}
		d.Scopes = append(d.Scopes, f)
	}
}

// groups judges every group that is not kept.
func (d *detector) groups() {
	for _, name := range slices.Sorted(maps.Keys(d.Choices)) {
		c := d.Choices[name]
		if c >= choices {
			panic(fmt.Sprintf("capture: group %s has choice %d, which there is not", name, uint8(c)))
		}
		if c == Keep {
			continue
		}
		parts, ok := together[name]
		if !ok {
			parts = []string{name}
		}
		for _, part := range parts {
			g := Group{Name: part, Choice: c}
			if part != name {
				g.Of = name
			}
			p, known := d.find(part)
			for _, l := range d.kinds(p) {
				g.Layers = l
				g.Verdict, g.Scope, g.Why = d.judge(g, p, known)
				d.Groups = append(d.Groups, g)
			}
		}
	}
}

// kinds are the layers to tell apart for a place.
func (d *detector) kinds(p place) (kinds []Layers) {
	if p.experts == nil {
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

// judge is the verdict on one group, the scope that it lies in or "", and why.
func (d *detector) judge(g Group, p place, known bool) (v Verdict, scope, why string) {
	parts := p.in(g.Layers)
	by, whole := d.judged.covered(parts)
	done := pastNames[g.Choice]
	if d.judged.Has(FullIteration) {
		return Inside, FullIteration.String(), fmt.Sprintf("%s as a part of the captured step", done)
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
	case g.Choice == Stash:
		why = fmt.Sprintf("%s cannot be stashed inside the captured scope %s: a graph ends only when the streams that it forked have joined it, so compute would wait at the end of every replay until the copies are done; capture full_iteration, or leave %s out of the scopes",
			g.Name, scope, scope)
	case g.Choice == Offload && p.input:
		why = fmt.Sprintf("%s cannot be offloaded while %s is captured: its tensor is made before the scope begins and saved inside it, so the graph reads it at one address, which has to stay free for whoever makes it before the next replay, and moving it away would save nothing; keep %s, or leave %s out of the scopes, or capture full_iteration",
			g.Name, scope, g.Name, scope)
	case g.Choice == Recompute && d.ForwardOnly:
		why = fmt.Sprintf("%s cannot be recomputed while only the forward pass of %s is captured: random state advances inside the graph, so the same work outside of it would give other bits; capture backward passes too, or keep %s, or leave %s out of the scopes",
			g.Name, scope, g.Name, scope)
	default:
		return Inside, scope, fmt.Sprintf("%s as a part of the captured scope %s", done, scope)
	}
	return Refused, scope, why
}

// outside is the verdict on a group that no scope holds.
func (d *detector) outside(g Group, known bool) (v Verdict, why string) {
	v, why = Outside, pastNames[g.Choice]+" eagerly"
	switch {
	case d.judged == 0:
	case g.Choice == Offload && d.Delay:
		v, why = Delayed, "queued while a scope is replayed, and issued in order right after it"
	default:
		why += ", outside of the captured scopes"
	}
	if d.judged != 0 && !known {
		why += "; it is no known module: if a captured scope holds it, place it there"
	}
	return v, why
}

// settings judges what concerns no single group.
func (d *detector) settings() {
	delayed := slices.ContainsFunc(d.Groups, func(g Group) bool { return g.Verdict == Delayed })
	add := func(name, why string) {
		d.Report.Settings = append(d.Report.Settings, Finding{Name: name, Verdict: SwitchedOff, Why: why})
	}
	switch {
	case !d.Delay || delayed:
	case d.judged == 0:
		add("delay", "nothing is captured, so there is no replay to delay offloads until; name scopes, or drop the delay")
	case d.judged.Has(FullIteration):
		add("delay", "every offload lies inside full_iteration, so none is left to issue after its replay; drop the delay")
	default:
		add("delay", fmt.Sprintf("no offloaded group lies outside of the scopes %v; drop the delay", d.judged))
	}
	if d.Outgrows && d.judged != 0 {
		add("growth", "graphs hold addresses, and memory that outgrows those reserved for it moves; reserve the most that the budget may become")
	}
}
