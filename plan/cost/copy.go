// This file owns the cost of a policy: recomputed modules, and copies to host memory and
// back with the windows that hide them.

package cost

import (
	"slices"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

// inside lists the parts of modules that no part is named after.
var inside = map[string][]part{
	"moe":          {router, dispatch, expertFC1, moeAct, expertFC2, combine, sharedExperts},
	"gdn_norm_out": {mambaScan},
	"gdp_in_proj":  {qkvLinear},
	"gdp_qkv":      {mambaScan},
}

// partsOf returns the parts of a layer that recomputing a module runs again. It is
// empty if no time is known for the module.
func partsOf(name string) []part {
	if list, ok := inside[name]; ok {
		return list
	}
	names := []string{name}
	if m, _ := memory.LookupModule(name); len(m.StandsFor) > 0 {
		names = m.StandsFor
	}
	var list []part
	for m := range parts {
		if slices.Contains(names, m.String()) {
			list = append(list, m)
		}
	}
	return list
}

// Recompute returns the time that recompute adds to the backward pass of a layer. A
// module that two names include runs once. If the device waits for the host, the time to
// launch the modules again counts too.
func (l *Layer) Recompute(r plan.Recompute) (t Seconds) {
	if r.Full {
		return l.Forward
	}
	var seen [parts]bool
	for _, name := range r.Modules {
		for _, m := range partsOf(name) {
			if !seen[m] {
				seen[m] = true
				p := l.timeOf(m)
				t += p.Forward
				if l.Waiting {
					t += p.Launch
				}
			}
		}
	}
	return t
}

// Copies describes how one layer's bytes of one microbatch are copied to host memory and
// back.
//
// Out begins when the bytes are saved. The next layer saves as many again, so each copy
// must end within the forward time of a layer, its window, or copies pile up. Back
// begins one layer ahead of use. Its window is the backward time of a layer with its
// recompute. A copy that is longer than its window delays the step.
type Copies struct {
	Bytes             memory.Bytes
	Out, Back         Seconds
	Forward, Backward Seconds // the windows
	LateOut, LateBack Seconds
}

// hostRates returns the rates of the host link for the copies of a pass over a number of
// layers. The copies of a pass's last layer still run when the next pass begins. In steady
// 1F1B the next pass is a backward pass that reloads its own, so both directions share the
// link for one layer of a pass. With overlapped expert communication, forward and backward
// passes run side by side and always share it.
func (m *Model) hostRates(layers int) (out, back float64) {
	g := m.gpu
	shared := 0.0
	switch lay := m.setup.Layout; {
	case lay.OverlapEP:
		shared = 1
	case lay.PP > 1:
		shared = 1 / float64(max(layers, 1))
	}
	mix := func(alone float64) float64 {
		if g.HostBoth <= 0 {
			return alone
		}
		return 1 / ((1-shared)/alone + shared*max(1/alone, 2/g.HostBoth))
	}
	return mix(g.HostOut), mix(g.HostIn)
}

// Copies returns the times of copying bytes of a layer in a pass over a number of
// layers. recompute is what recompute adds to the backward pass of the layer.
func (m *Model) Copies(l *Layer, bytes memory.Bytes, layers int, recompute Seconds) Copies {
	out, back := m.hostRates(layers)
	c := Copies{
		Bytes: bytes,
		Out:   Seconds(float64(bytes) / out), Back: Seconds(float64(bytes) / back),
		Forward: l.Forward, Backward: l.Backward + recompute,
	}
	c.LateOut, c.LateBack = max(c.Out-c.Forward, 0), max(c.Back-c.Backward, 0)
	return c
}

// PolicyTimes is what recompute and offload add to the stages of a setup.
type PolicyTimes struct {
	// Passes is the time of every stage's passes, with recompute and late copies.
	Passes []Pass
	// Recompute and Late are what each adds to one microbatch, by stage.
	Recompute, Late []Seconds
}

// Policy returns the times of the setup's own policy.
func (m *Model) Policy() PolicyTimes { return m.PolicyOf(m.setup.Recompute, m.setup.Offload) }

// PolicyOf returns the times of another policy for the same setup.
func (m *Model) PolicyOf(r plan.Recompute, o plan.Offload) PolicyTimes {
	s := *m.setup
	s.Recompute, s.Offload = r, o
	p := PolicyTimes{Passes: m.Stages()}
	p.Recompute, p.Late = make([]Seconds, len(p.Passes)), make([]Seconds, len(p.Passes))
	moved := map[model.Kind]memory.Bytes{}
	shares := offloadShares(&s)
	for i, st := range s.Layout.Stages {
		layers := slices.Clone(s.Model.Layers[st.First:st.Last])
		own := len(layers)
		if st.MTP && s.Model.MTP != nil {
			for range s.Model.MTP.Depth {
				layers = append(layers, s.Model.MTP.Layers...)
			}
		}
		for j, l := range layers {
			t := m.Layer(l)
			var again Seconds
			// Under "block" only the first layers of a stage are recomputed,
			// and none of the heads that predict further tokens.
			if !r.Full || r.Method != "block" || j < min(own, r.Layers) {
				again = t.Recompute(r)
			}
			bytes, ok := moved[model.KindOf(l)]
			if !ok && len(o.Modules) > 0 {
				bytes = OffloadedBytes(&s, l)
				moved[model.KindOf(l)] = bytes
			}
			bytes = memory.Bytes(float64(bytes) * shares[i%s.Layout.PP])
			if j < o.Layers {
				bytes = 0
				for _, g := range plan.Activations(&s, l) {
					bytes += g.Bytes
				}
			}
			c := m.Copies(t, bytes, len(layers), again)
			p.Recompute[i] += again
			p.Late[i] += c.LateOut + c.LateBack
			p.Passes[i].Forward += c.LateOut
			p.Passes[i].Backward += again + c.LateBack
		}
	}
	return p
}

// offloadShares returns which part of the offloadable bytes each pipeline rank offloads.
func offloadShares(s *plan.Setup) []float64 {
	shares := make([]float64, s.Layout.PP)
	for r := range shares {
		o := s.Offload.Rank(r)
		switch {
		case len(o.Modules) == 0:
		case o.Fraction == 1:
			shares[r] = 1
		default:
			shares[r] = plan.OffloadShare(s, r)
		}
	}
	return shares
}

// OffloadedBytes returns how many bytes of a layer and microbatch the setup's modules
// offload, at a fraction of one.
func OffloadedBytes(s *plan.Setup, l model.Layer) memory.Bytes {
	var n memory.Bytes
	for _, g := range plan.Activations(s, l) {
		if memory.Including(s.Offload.Modules, g.Offload) != "" && g.Elements >= s.Offload.MinElements && !s.Recompute.Full && !overlap(g.Recompute, s.Recompute.Modules) {
			n += g.Bytes
		}
	}
	return n
}

func overlap(a, b []string) bool {
	return slices.ContainsFunc(a, func(x string) bool { return slices.Contains(b, x) })
}
