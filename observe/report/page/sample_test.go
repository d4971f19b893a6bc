// This file owns a report to try the page with: a made-up training of a mixture of
// experts, several policies on several ranks, which follows rules so that its pictures
// have the shape of real ones.

package page

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/observe/report"
)

const mib = 1 << 20

// group is one kind of saved activations: bytes of a layer and what is done with it.
type group struct {
	name   string
	bytes  int64
	choice string
}

// groups gives the groups under a policy.
func groups(policy string) []group {
	all := []group{
		{"layernorm", 6 * mib, "keep"}, {"qkv_linear", 9 * mib, "keep"}, {"core_attn", 14 * mib, "keep"}, {"attn_proj", 5 * mib, "keep"},
		{"router", mib / 2, "keep"}, {"expert_fc1", 26 * mib, "keep"}, {"moe_act", 18 * mib, "keep"}, {"mlp", 11 * mib, "keep"},
	}
	for i := range all {
		switch {
		case policy == "offload" && slices.Contains([]string{"core_attn", "expert_fc1", "attn_proj"}, all[i].name):
			all[i].choice = "offload"
		case policy == "stash" && slices.Contains([]string{"expert_fc1", "moe_act"}, all[i].name):
			all[i].choice, all[i].bytes = "stash", all[i].bytes*6/10
		case policy == "recompute" && slices.Contains([]string{"moe_act", "layernorm", "mlp"}, all[i].name):
			all[i].choice, all[i].bytes = "recompute", 0
		case policy == "auto" && slices.Contains([]string{"core_attn", "expert_fc1"}, all[i].name):
			all[i].choice = "offload"
		case policy == "auto" && all[i].name == "moe_act":
			all[i].choice, all[i].bytes = "recompute", 0
		}
	}
	return all
}

// lane collects spans of a stream.
type lane struct {
	report.Stream
	index map[string]int
	end   float64
}

func newLane(name string) *lane {
	return &lane{Stream: report.Stream{Name: name}, index: map[string]int{}}
}

func (l *lane) add(what, name string, begin, took float64, size int64) float64 {
	of := -1
	if name != "" {
		i, ok := l.index[name]
		if !ok {
			i = len(l.Names)
			l.index[name], l.Names = i, append(l.Names, name)
		}
		of = i
	}
	l.Begin, l.Took, l.What = append(l.Begin, begin), append(l.Took, took), append(l.What, what)
	l.Of, l.Bytes, l.end = append(l.Of, of), append(l.Bytes, size), begin+took
	if what == "wait" {
		l.Waits += took
	} else {
		l.Busy += took
	}
	return l.end
}

// maker makes a step: microbatches forward through the layers, then back.
type maker struct {
	compute, out, in *lane
	storages         []report.Storage

	r      *rand.Rand
	groups []group
}

const layers, micros = 6, 4

func (m *maker) forward(now float64, micro, layer int) float64 {
	for _, g := range m.groups {
		took := 0.35 + 0.25*m.r.Float64() + float64(g.bytes)/(40*mib)
		begin := now
		now = m.compute.add("launch", g.name+" forward", now, took, 0)
		if g.bytes == 0 {
			continue
		}
		s := report.Storage{Group: g.name, Layer: layer, Micro: micro, Bytes: g.bytes, Offset: -1, Stays: []report.Stay{{Where: "device", Begin: begin}}}
		if g.choice == "offload" {
			from := max(now, m.out.end)
			to := m.out.add("copy", g.name, from, float64(g.bytes)/(22*1e6), g.bytes)
			s.Stays[0].End = from
			s.Stays = append(s.Stays, report.Stay{Where: "out", Begin: from, End: to}, report.Stay{Where: "host", Begin: to})
		}
		m.storages = append(m.storages, s)
	}
	return now
}

func (m *maker) backward(now float64, micro, layer int) float64 {
	for _, g := range slices.Backward(m.groups) {
		if g.choice == "recompute" {
			now = m.compute.add("launch", g.name+" again", now, 0.3, 0)
		}
		for i := range m.storages {
			s := &m.storages[i]
			if s.Group != g.name || s.Layer != layer || s.Micro != micro {
				continue
			}
			last := &s.Stays[len(s.Stays)-1]
			if last.Where == "host" {
				from := max(m.in.end, last.Begin, now-9)
				if gap := from - m.in.end; gap > 0 {
					m.in.add("wait", "", m.in.end, gap, 0)
				}
				to := m.in.add("copy", g.name, from, float64(g.bytes)/(20*1e6), g.bytes)
				last.End = from
				s.Stays = append(s.Stays, report.Stay{Where: "in", Begin: from, End: to}, report.Stay{Where: "device", Begin: to})
				if to > now {
					now = m.compute.add("wait", "in", now, to-now, 0)
				}
				last = &s.Stays[len(s.Stays)-1]
			}
			now = m.compute.add("launch", g.name+" backward", now, 0.6+0.4*m.r.Float64()+float64(g.bytes)/(24*mib), 0)
			last.End = max(now, last.Begin+0.01)
		}
	}
	return now
}

// step gives a step that begins at a time.
func step(number int, policy string, seed uint64, begin float64, why string) report.Detail {
	m := &maker{compute: newLane("compute"), out: newLane("offload out"), in: newLane("offload in"), r: rand.New(rand.NewPCG(seed, 7)), groups: groups(policy)}
	m.in.end, m.out.end = begin, begin
	now := begin
	for micro := range micros {
		for layer := range layers {
			now = m.forward(now, micro, layer)
		}
		if micro > 0 {
			for layer := range slices.Backward(make([]int, layers)) {
				now = m.backward(now, micro-1, layer)
			}
		}
	}
	for layer := range slices.Backward(make([]int, layers)) {
		now = m.backward(now, micros-1, layer)
	}
	comm := newLane("comm")
	comm.add("wait", "compute", begin, now-begin-6, 0)
	comm.add("copy", "all-reduce", now-6, 6, 96*mib)
	now = m.compute.add("graph", "optimizer", now, 4+m.r.Float64(), 0)
	d := report.Detail{Step: number, Why: why, Begin: begin, End: now, Storages: m.storages}
	for _, l := range []*lane{m.compute, m.out, m.in, comm} {
		if len(l.Begin) == 0 {
			continue
		}
		l.Busy, l.Waits = l.Busy/(now-begin), l.Waits/(now-begin)
		d.Streams = append(d.Streams, l.Stream)
	}
	place(d.Storages)
	return d
}

// place gives every storage the lowest place that is free for all its time.
func place(all []report.Storage) {
	for i := range all {
		from, to := all[i].Stays[0].Begin, all[i].Stays[len(all[i].Stays)-1].End
		at := int64(0)
		for moved := true; moved; {
			moved = false
			for j := range i {
				b := &all[j]
				if b.Stays[0].Begin < to && from < b.Stays[len(b.Stays)-1].End && b.Offset < at+all[i].Bytes && at < b.Offset+b.Bytes {
					at, moved = b.Offset+b.Bytes, true
				}
			}
		}
		all[i].Offset = at
	}
}

// held says what each group has on each tier at a time.
func held(d *report.Detail, t float64) map[string][2]int64 {
	out := map[string][2]int64{}
	for _, s := range d.Storages {
		for _, y := range s.Stays {
			if t < y.Begin || t >= y.End {
				continue
			}
			n := out[s.Group]
			if y.Where != "host" {
				n[0] += s.Bytes
			}
			if y.Where != "device" {
				n[1] += s.Bytes
			}
			out[s.Group] = n
		}
	}
	return out
}

// rank makes what one rank did: steps alike but for noise, some of them in full.
func rank(number, steps, samples int, policy string) report.Rank {
	gs := groups(policy)
	owners := []struct {
		name  string
		bytes int64
	}{{"parameters", 420 * mib}, {"gradients", 210 * mib}, {"optimizer", 840 * mib}, {"workspace", 48 * mib}}
	r := report.Rank{Rank: number, Budget: 3800 * mib}
	for _, o := range owners {
		r.Memory.Series = append(r.Memory.Series, report.Series{Tier: "device", Name: o.name})
	}
	for _, g := range gs {
		r.Memory.Series = append(r.Memory.Series, report.Series{Tier: "device", Name: g.name, Saved: true})
	}
	for _, g := range gs {
		if g.choice == "offload" {
			r.Memory.Series = append(r.Memory.Series, report.Series{Tier: "host", Name: g.name, Saved: true})
		}
	}
	begin := 0.0
	for k := range steps {
		d := step(k+1, policy, uint64(number*131+k%5), begin, "")
		span := d.End - d.Begin
		for i := range samples {
			t := d.Begin + span*float64(i)/float64(samples)
			r.Memory.Time = append(r.Memory.Time, math.Round(t*1e4)/1e4)
			var total, host int64
			have := held(&d, t)
			for s := range r.Memory.Series {
				x := &r.Memory.Series[s]
				var n int64
				if s < len(owners) {
					n = owners[s].bytes
				} else if x.Tier == "device" {
					n = have[x.Name][0] + int64(number)*3*mib/2
				} else {
					n = have[x.Name][1]
				}
				x.Bytes = append(x.Bytes, n)
				if x.Tier == "device" {
					total += n
				} else {
					host += n
				}
			}
			if total > r.Memory.Peak.Bytes {
				r.Memory.Peak.Bytes, r.Memory.Peak.Time, r.Memory.Peak.Step = total, r.Memory.Time[len(r.Memory.Time)-1], k+1
			}
			r.Memory.Peak.Host = max(r.Memory.Peak.Host, host)
			r.Rates.Time = append(r.Rates.Time, t)
			out, in := 0.0, 0.0
			if r.Memory.Peak.Host > 0 {
				out, in = 22e9*max(0, math.Sin(float64(i)/7)), 20e9*max(0, math.Sin(float64(i)/9-1.5))
			}
			r.Rates.Out, r.Rates.In = append(r.Rates.Out, math.Round(out)), append(r.Rates.In, math.Round(in))
		}
		r.Steps = append(r.Steps, report.StepTime{Step: k + 1, Begin: d.Begin, End: d.End})
		begin = d.End + 0.4
		r.Details = append(r.Details, d)
	}
	r.Memory.Events = steps * samples * 9
	finish(&r, gs, policy)
	return r
}

// finish keeps the details that a report keeps and adds the tables.
func finish(r *report.Rank, gs []group, policy string) {
	last := len(r.Details)
	var kept []report.Detail
	for i := range r.Details {
		d := r.Details[i]
		switch {
		case d.Step == r.Memory.Peak.Step:
			d.Why = "peak"
		case i == 0:
			d.Why = "first"
		case i == last-1:
			d.Why = "last"
		default:
			continue
		}
		kept = append(kept, d)
	}
	r.Details = kept
	for _, g := range gs {
		c := report.PolicyRow{Group: g.name, Units: map[string]int{g.choice: layers}, Saved: g.bytes * layers * micros, Reason: "nothing is won by moving it"}
		switch g.choice {
		case "offload":
			c.Units = map[string]int{"offload": layers - 1, "keep": 1}
			c.Moved, c.Reason = c.Saved, fmt.Sprintf("%d MiB a layer, window 9.1 ms, copy %.1f ms: the copy hides; the last layer is needed at once and stays", g.bytes/mib, float64(g.bytes)/22e6)
		case "recompute":
			c.Reason = "0.3 ms a layer to compute again, 18 MiB saved"
		case "stash":
			c.Reason = "only live rows are kept: 60 % of the buffer"
		}
		r.Policy = append(r.Policy, c)
	}
	n := len(r.Steps)
	pages := report.Pool{Name: "stash pages, device", Unit: 64 << 10}
	for i := range n {
		pages.Steps, pages.Size = append(pages.Steps, i+1), append(pages.Size, 8192)
		pages.Most = append(pages.Most, int64(6200+900*math.Sin(float64(i)/3)))
	}
	heap := report.Pool{Name: "activations, device", Unit: 1, Steps: pages.Steps}
	for i := range n {
		heap.Size, heap.Most = append(heap.Size, 2400*mib), append(heap.Most, r.Memory.Peak.Bytes-1518*mib-int64(i%4)*20*mib)
	}
	r.Pools = []report.Pool{pages, heap}
	if policy == "offload" || policy == "auto" {
		r.Counts = append(r.Counts, report.Figure{Name: "late", Label: "late copies", Unit: report.Count, Value: 3}, report.Figure{Name: "evictions", Label: "evictions", Unit: report.Count, Value: 1})
	}
	r.Counts = append(r.Counts, report.Figure{Name: "spills", Label: "pages spilled", Unit: report.Count, Value: 12}, report.Figure{Name: "reruns", Label: "steps rerun", Unit: report.Count})
}

// sample is a report of some policies, ranks and steps.
func sample(policies []string, ranks, steps, samples int) *report.Report {
	r := &report.Report{Title: "moe-tiny, five policies", Made: "2026-11-15T14:00:00Z", Version: "0.8.0"}
	for i, policy := range policies {
		run := report.Run{
			Name: policy, Command: "stowage train --model moe-tiny --policy " + policy + " --steps " + fmt.Sprint(steps) + " --budget 3.7GiB --out runs/compare/" + policy,
			Environment: map[string]string{"cpu": "2 cores, AVX-512", "device": "cpu", "go": "go1.26", "os": "linux/amd64", "memory": "23.4 GiB"},
			Options:     "model: moe-tiny\npolicy: " + policy + "\nsteps: " + fmt.Sprint(steps) + "\nlayout: {pp: 2, ep: 2}\n",
		}
		for k := range ranks {
			run.Ranks = append(run.Ranks, rank(k, steps, samples, policy))
		}
		var peak, host int64
		for _, k := range run.Ranks {
			peak, host = max(peak, k.Memory.Peak.Bytes), max(host, k.Memory.Peak.Host)
		}
		s := &run.Steps
		noise := rand.New(rand.NewPCG(3, uint64(i)))
		for k := range steps {
			b := run.Ranks[0].Steps[k]
			ms := b.End - b.Begin + 4*noise.Float64()
			s.Step, s.Loss = append(s.Step, k+1), append(s.Loss, 5.54-1.9*(1-math.Exp(-float64(k)/12))+0.03*math.Sin(float64(k)*1.7))
			s.Millis, s.Tokens = append(s.Millis, ms), append(s.Tokens, 8192/ms*1000)
			s.Device, s.Host = append(s.Device, peak-int64(k%3)*8*mib), append(s.Host, host)
			s.Spills, s.Reruns = append(s.Spills, int64(k%4)), append(s.Reruns, 0)
			if k%5 == 4 {
				s.HeldAt, s.Held = append(s.HeldAt, k+1), append(s.Held, s.Loss[k]+0.06)
			}
		}
		foretold, none := float64(peak)*0.991, float64(host)*1.004
		run.Figures = []report.Figure{
			{Name: "peak_device_bytes", Label: "device peak", Unit: report.Bytes, Value: float64(peak), Predicted: &foretold},
			{Name: "peak_host_bytes", Label: "host peak", Unit: report.Bytes, Value: float64(host), Predicted: &none},
			{Name: "final_loss", Label: "loss at the end", Unit: report.Count, Value: s.Loss[steps-1]},
			{Name: "tokens_per_second", Label: "tokens a second", Unit: report.Count, Value: s.Tokens[steps/2]},
			{Name: "params_sha256", Label: "parameters", Unit: report.Text, Text: strings.Repeat("5e884898da280471", 4)},
			{Name: "reruns", Label: "steps rerun", Unit: report.Count},
		}
		r.Runs = append(r.Runs, run)
	}
	return r
}

var policies = []string{"keep", "stash", "offload", "recompute", "auto"}
