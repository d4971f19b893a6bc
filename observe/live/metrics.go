// This file owns the metrics for Prometheus. docs/METRICS.md lists them and
// docs/grafana.json draws them; tests compare both with this file. A name keeps its
// meaning once it is released.

package live

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics holds the metrics of a run in a registry of their own.
type metrics struct {
	registry *prometheus.Registry

	info, step, steps, loss, held, speed, memory   *prometheus.GaugeVec
	tokens, reruns, copied, spilled, evicted, late *prometheus.CounterVec
	seconds                                        *prometheus.HistogramVec

	before map[string]Step // the last step of each policy
}

// The labels. Each metric has the policy, so that a comparison has a series for each.
const (
	byPolicy, byRank, byTier, byKind, byDirection = "policy", "rank", "tier", "kind", "direction"
)

// stepBuckets are the bounds of the histogram in seconds: from a millisecond, for the
// smallest models, by factors of 2 to half an hour (0.001 * 2^21 s = 35 min).
var stepBuckets = prometheus.ExponentialBuckets(0.001, 2, 22)

func newMetrics() *metrics {
	m := &metrics{registry: prometheus.NewPedanticRegistry(), before: map[string]Step{}}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
		m.registry.MustRegister(v)
		return v
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		m.registry.MustRegister(v)
		return v
	}
	m.info = gauge("stowage_info", "Always 1; the labels describe the run.", "version", "model", "layout", byPolicy)
	m.step = gauge("stowage_step", "Steps that are done, including those before the run was resumed.", byPolicy)
	m.steps = gauge("stowage_steps", "Steps that the run will have in all.", byPolicy)
	m.loss = gauge("stowage_loss", "Loss of the last step, in nats a token.", byPolicy)
	m.held = gauge("stowage_held_out_loss", "Loss on held-out text at the last evaluation, in nats a token.", byPolicy)
	m.tokens = counter("stowage_tokens_total", "Tokens that the program has trained on since it began.", byPolicy)
	m.speed = gauge("stowage_tokens_per_second", "Tokens a second of the last step.", byPolicy)
	m.seconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "stowage_step_seconds", Help: "Duration of steps.", Buckets: stepBuckets}, []string{byPolicy})
	m.registry.MustRegister(m.seconds)
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
	for _, p := range r.Policies {
		m.info.WithLabelValues(version, r.Model, r.Layout, p).Set(1)
		m.step.WithLabelValues(p).Set(float64(r.From))
		m.steps.WithLabelValues(p).Set(float64(r.Steps))
	}
}

// observe notes a step. Reruns and spilled pages arrive as totals of a trainer; their
// differences go to the counters. A step number that does not grow means a new trainer.
func (m *metrics) observe(s Step) {
	before := m.before[s.Policy]
	if s.Number <= before.Number {
		before = Step{}
	}
	m.before[s.Policy] = s
	m.step.WithLabelValues(s.Policy).Set(float64(s.Number))
	m.loss.WithLabelValues(s.Policy).Set(s.Loss)
	if s.Held != nil {
		m.held.WithLabelValues(s.Policy).Set(*s.Held)
	}
	m.tokens.WithLabelValues(s.Policy).Add(float64(s.Tokens))
	m.speed.WithLabelValues(s.Policy).Set(s.Speed())
	m.seconds.WithLabelValues(s.Policy).Observe(s.Seconds)
	m.reruns.WithLabelValues(s.Policy).Add(float64(max(0, s.Reruns-before.Reruns)))
	for i, r := range s.Ranks {
		rank, spilled := strconv.Itoa(i), int64(0)
		if i < len(before.Ranks) {
			spilled = before.Ranks[i].Spilled
		}
		m.spilled.WithLabelValues(s.Policy, rank).Add(float64(max(0, r.Spilled-spilled)))
		m.evicted.WithLabelValues(s.Policy, rank).Add(float64(r.Evicted))
		m.late.WithLabelValues(s.Policy, rank).Add(float64(r.Late))
		m.copied.WithLabelValues(s.Policy, rank, "out").Add(float64(r.Out))
		m.copied.WithLabelValues(s.Policy, rank, "in").Add(float64(r.In))
		for tier, mem := range map[string]Memory{"device": r.Device, "host": r.Host} {
			for kind, bytes := range map[string]int64{"in_use": mem.InUse, "peak": mem.Peak, "capacity": mem.Capacity, "budget": mem.Budget} {
				if kind != "budget" || bytes > 0 {
					m.memory.WithLabelValues(s.Policy, rank, tier, kind).Set(float64(bytes))
				}
			}
		}
	}
}
