// This file owns how much of the collectives was hidden: the time that each kind took on its
// stream, and how much of that time compute worked. Both come from what the device says of
// its streams. Evaluations are left out: the figures are those of steps.

package run

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/observe/trace"
)

// The kinds of collectives that have streams of their own, with the streams' names. What
// stages of a pipeline pass on, and figures of a few bytes, are work of compute.
const (
	exchanges = iota // of expert rows
	gathers          // of sharded parameters
	sums             // of gradients
	collectives
)

var collectiveStreams = [collectives]string{"exchange", "gather", "reduce"}

// shares has, by kind, the nanoseconds that collectives took and those of them in which
// compute worked.
type shares [collectives]struct{ Took, Hidden int64 }

func (s *shares) add(t shares) {
	for k := range s {
		s[k].Took += t[k].Took
		s[k].Hidden += t[k].Hidden
	}
}

// interval is a time in which a stream worked.
type interval struct {
	from, to int64
	kind     int // of the collective
}

// meter adds up the shares of one rank. Streams report their work in order, each for itself
// and some time later. So a collective is counted not at the next count but at the one
// after it: by then compute has reported what it did at the same time.
type meter struct {
	mu      sync.Mutex
	compute []interval
	others  []interval
	until   int64 // the end of compute's work when the meter counted last
	fresh   int   // pieces that came since
	sum     shares
}

// mostMetered is about how many pieces of work a meter holds. It counts after half as many.
const mostMetered = 1 << 14

// note takes a span of a stream.
func (m *meter) note(e trace.Event) {
	if e.Kind == trace.Wait || !e.Kind.Span() || e.Took <= 0 {
		return
	}
	kind := slices.Index(collectiveStreams[:], e.Stream)
	if kind < 0 && e.Stream != computeStream {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	at := interval{e.Time, e.Time + e.Took, kind}
	if kind < 0 {
		m.compute = append(m.compute, at)
	} else {
		m.others = append(m.others, at)
	}
	if m.fresh++; m.fresh >= mostMetered/2 {
		before := m.until
		m.fresh = 0
		if n := len(m.compute); n > 0 {
			m.until = m.compute[n-1].to
		}
		m.count(before)
	}
}

// shares returns what the meter has seen.
func (m *meter) shares() shares {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, x := range append(m.compute, m.others...) {
		m.until = max(m.until, x.to)
	}
	m.count(m.until)
	return m.sum
}

// count counts collectives that ended up to a time, and forgets them and the work of compute
// before those that are left.
func (m *meter) count(until int64) {
	if len(m.others) > mostMetered { // compute says nothing
		until = math.MaxInt64
	}
	byTime := func(a, b interval) int { return cmp.Compare(a.from, b.from) }
	slices.SortFunc(m.compute, byTime)
	left, keep := m.others[:0], until
	for _, x := range m.others {
		if x.to > until {
			left, keep = append(left, x), min(keep, x.from)
			continue
		}
		s := &m.sum[x.kind]
		s.Took += x.to - x.from
		i, _ := slices.BinarySearchFunc(m.compute, x.from, func(c interval, at int64) int { return cmp.Compare(c.to, at) })
		for ; i < len(m.compute) && m.compute[i].from < x.to; i++ {
			s.Hidden += max(0, min(x.to, m.compute[i].to)-max(x.from, m.compute[i].from))
		}
	}
	m.others = left
	m.compute = slices.DeleteFunc(m.compute, func(c interval) bool { return c.to <= keep })
}

// pauses are times whose work counts for no step. A span is reported some time after it, so all
// of them are kept.
type pauses struct {
	mu  sync.RWMutex
	all []interval // in order; the last one may have no end yet
}

// begin begins a pause and returns what ends it.
func (p *pauses) begin(now func() int64) (end func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = append(p.all, interval{from: now(), to: math.MaxInt64})
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.all[len(p.all)-1].to = now()
	}
}

// has reports whether a moment is in a pause.
func (p *pauses) has(at int64) bool {
	p.mu.RLock()
	defer p.mu.RUnlock()
	i, _ := slices.BinarySearchFunc(p.all, at, func(x interval, at int64) int { return cmp.Compare(x.to, at) })
	return i < len(p.all) && p.all[i].from <= at
}

// hidden is what the summary says of collectives: the time of each kind, in a step and on a
// rank, and how much of it was hidden behind compute. What did not happen is nil.
type hidden struct {
	Exchange     *float64 `json:"exchange_ms,omitempty"`
	ExchangeHid  *float64 `json:"exchange_hidden_percent,omitempty"`
	Gather       *float64 `json:"gather_ms,omitempty"`
	GatherHid    *float64 `json:"gather_hidden_percent,omitempty"`
	Reduction    *float64 `json:"reduction_ms,omitempty"`
	ReductionHid *float64 `json:"reduction_hidden_percent,omitempty"`
}

// fields returns the pairs of figures by kind.
func (h *hidden) fields() [collectives][2]**float64 {
	return [...][2]**float64{{&h.Exchange, &h.ExchangeHid}, {&h.Gather, &h.GatherHid}, {&h.Reduction, &h.ReductionHid}}
}

// hiddenOf returns the figures of shares that ranks had in steps.
func hiddenOf(s shares, steps, ranks int) (h hidden) {
	for k, f := range h.fields() {
		if s[k].Took == 0 || steps*ranks == 0 {
			continue
		}
		ms, percent := float64(s[k].Took)/1e6/float64(steps*ranks), 100*float64(s[k].Hidden)/float64(s[k].Took)
		*f[0], *f[1] = &ms, &percent
	}
	return h
}

// write prints the figures in a sentence.
func (h hidden) write(w io.Writer) {
	var words []string
	for k, f := range h.fields() {
		if *f[0] != nil {
			what := [...]string{"exchanges of experts", "gathers of parameters", "sums of gradients"}[k]
			words = append(words, fmt.Sprintf("%s %.3g ms (%.0f %% hidden behind compute)", what, **f[0], **f[1]))
		}
	}
	if len(words) > 0 {
		fmt.Fprintf(w, "in a step, a rank spent on %s\n", strings.Join(words, ", "))
	}
}

// hidden returns the figures of the ranks of this process.
func (t *tracing) hidden() hidden {
	if t == nil {
		return hidden{}
	}
	return hiddenOf(t.shares(), t.begun, len(t.ranks))
}

func (t *tracing) shares() (s shares) {
	for _, r := range t.ranks {
		s.add(r.meter.shares())
	}
	return s
}

// hiddenOfAll returns the figures of the ranks of all processes.
func (t *tracing) hiddenOfAll(p *comm.Process) (hidden, error) {
	if t == nil || p == nil {
		return t.hidden(), nil
	}
	mine, err := json.Marshal(t.shares())
	if err != nil {
		return hidden{}, err
	}
	texts, err := p.Control.Gather(mine)
	if err != nil {
		return hidden{}, err
	}
	var all shares
	for _, text := range texts {
		var s shares
		if err := json.Unmarshal(text, &s); err != nil {
			return hidden{}, err
		}
		all.add(s)
	}
	return hiddenOf(all, t.begun, len(t.ranks)*len(texts)), nil
}
