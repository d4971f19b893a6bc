// This file owns the metrics for Prometheus. docs/METRICS.md lists them and
// docs/grafana.json draws them; tests compare both with this file. A name keeps its
// meaning once it is released.

package live

import (
	"strconv"
	"strings"
	"sync"
)

// metrics holds the metrics of a run.
type metrics struct {
	info, step, steps, loss, held, speed, memory   *family
	tokens, reruns, copied, spilled, evicted, late *family
	seconds                                        *family

	mu     sync.Mutex // guards what follows, and the values
	all    []*family
	before map[string]Step // the last step of each policy
}

// The labels. Each metric has the policy, so that a comparison has a series for each.
const (
	byPolicy, byRank, byTier, byKind, byDirection = "policy", "rank", "tier", "kind", "direction"
)

func newMetrics() *metrics {
	m := &metrics{before: map[string]Step{}}
	add := func(kind, name, help string, labels ...string) *family {
		f := newFamily(kind, name, help, labels)
		m.all = append(m.all, f)
		return f
	}
	gauge := func(name, help string, labels ...string) *family { return add("gauge", name, help, labels...) }
	counter := func(name, help string, labels ...string) *family { return add("counter", name, help, labels...) }
	m.info = gauge("stowage_info", "Always 1; the labels describe the run.", "version", "model", "layout", byPolicy)
	m.step = gauge("stowage_step", "Steps that are done, including those before the run was resumed.", byPolicy)
	m.steps = gauge("stowage_steps", "Steps that the run will have in all.", byPolicy)
	m.loss = gauge("stowage_loss", "Loss of the last step, in nats a token.", byPolicy)
	m.held = gauge("stowage_held_out_loss", "Loss on held-out text at the last evaluation, in nats a token.", byPolicy)
	m.tokens = counter("stowage_tokens_total", "Tokens that the program has trained on since it began.", byPolicy)
	m.speed = gauge("stowage_tokens_per_second", "Tokens a second of the last step.", byPolicy)
	m.seconds = add("histogram", "stowage_step_seconds", "Duration of steps.", byPolicy)
	m.memory = gauge("stowage_memory_bytes", "Memory of a rank after the last step. Kinds: in_use, peak (since the run began), capacity, and budget if there is one.",
		byPolicy, byRank, byTier, byKind)
	m.copied = counter("stowage_copied_bytes_total", "Bytes of saved tensors that were offloaded (out) and reloaded (in).", byPolicy, byRank, byDirection)
	m.spilled = counter("stowage_spilled_pages_total", "Pages of the stash that were spilled to host memory.", byPolicy, byRank)
	m.reruns = counter("stowage_reruns_total", "Steps that were rerun because a pool was too small.", byPolicy)
	m.evicted = counter("stowage_evictions_total", "Storages that were offloaded because there was no room, not by plan.", byPolicy, byRank)
	m.late = counter("stowage_late_copies_total", "Storages that were reloaded only when they were needed.", byPolicy, byRank)
	return m
}

func (m *metrics) begin(r Run, version string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range r.Policies {
		m.info.of(version, r.Model, r.Layout, p).set(1)
		m.step.of(p).set(float64(r.From))
		m.steps.of(p).set(float64(r.Steps))
	}
}

// observe notes a step. Reruns and spilled pages arrive as totals of a trainer; their
// differences go to the counters. A step number that does not grow means a new trainer.
func (m *metrics) observe(s Step) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.before[s.Policy]
	if s.Number <= before.Number {
		before = Step{}
	}
	m.before[s.Policy] = s
	m.step.of(s.Policy).set(float64(s.Number))
	m.loss.of(s.Policy).set(s.Loss)
	if s.Held != nil {
		m.held.of(s.Policy).set(*s.Held)
	}
	m.tokens.of(s.Policy).add(float64(s.Tokens))
	m.speed.of(s.Policy).set(s.Speed())
	m.seconds.of(s.Policy).observe(s.Seconds)
	m.reruns.of(s.Policy).add(float64(max(0, s.Reruns-before.Reruns)))
	for i, r := range s.Ranks {
		rank, spilled := strconv.Itoa(i), int64(0)
		if i < len(before.Ranks) {
			spilled = before.Ranks[i].Spilled
		}
		m.spilled.of(s.Policy, rank).add(float64(max(0, r.Spilled-spilled)))
		m.evicted.of(s.Policy, rank).add(float64(r.Evicted))
		m.late.of(s.Policy, rank).add(float64(r.Late))
		m.copied.of(s.Policy, rank, "out").add(float64(r.Out))
		m.copied.of(s.Policy, rank, "in").add(float64(r.In))
		for tier, mem := range map[string]Memory{"device": r.Device, "host": r.Host} {
			for kind, bytes := range map[string]int64{"in_use": mem.InUse, "peak": mem.Peak, "capacity": mem.Capacity, "budget": mem.Budget} {
				if kind != "budget" || bytes > 0 {
					m.memory.of(s.Policy, rank, tier, kind).set(float64(bytes))
				}
			}
		}
	}
}

// text returns the metrics as Prometheus reads them.
func (m *metrics) text() string {
	var b strings.Builder
	m.mu.Lock()
	defer m.mu.Unlock()
	write(&b, m.all)
	return b.String()
}
