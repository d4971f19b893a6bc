// Package routing is how many rows each expert rank received: traces of real
// runs, and skewed ones that are made up. It is pure: the planner and the bench
// read the same traces, and nothing here knows a device.
//
// # Format
//
// A trace is a file of JSON lines. The first line is the header:
//
//	{"version":1,"ranks":8,"tokens":4096,"top_k":8,"layers":4,"microbatches":16,"experts":256}
//
// Ranks is the size of the expert-parallel group. Tokens are those of one
// microbatch on all of its ranks together, each of which is routed to top_k
// experts; so every layer of every microbatch has tokens*top_k rows, and a rank
// that receives its share has tokens*top_k/ranks. Layers are the layers with
// experts of the whole model. Experts may be left out; where it is given, it is a
// multiple of ranks, rank r has the experts from r*experts/ranks on, and a token
// sends a rank at most min(top_k, experts/ranks) rows.
//
// Every other line is one number of rows; all keys are required:
//
//	{"step":0,"layer":3,"microbatch":1,"rank":2,"rows":4123}
//
// Everything is counted from zero. Lines may come in any order, so that the logs
// of several ranks can be joined; steps must be complete: each layer, microbatch
// and rank once, and the rows of all ranks together tokens*top_k. Steps need not
// be announced, so that a running job can append them. Unknown keys are errors.
//
// This file owns the trace, read.go and write.go the format, synth.go traces
// that are made up, binomial.go the random numbers for them.
package routing

import (
	"fmt"
	"math"
)

// Rows is a number of rows.
type Rows int64

// Version is the version of the format.
const Version = 1

// Header says what a trace is of.
type Header struct {
	Ranks        int
	Tokens       int64 // of a microbatch, on all ranks together
	TopK         int
	Layers       int
	Microbatches int
	Experts      int // zero if it is not known
}

// Limits that no run comes near; they keep every product below 2^63 and a
// damaged header from asking for all memory.
const (
	maxCount   = 1 << 20 // ranks, layers, microbatches, experts, experts a token
	maxTokens  = 1 << 40
	maxEntries = 1 << 28 // of a step, and of a whole trace that is made up
)

// Check tells whether the header makes sense.
func (h Header) Check() error {
	for _, x := range []struct {
		name  string
		value int64
		most  int64
	}{
		{"ranks", int64(h.Ranks), maxCount}, {"tokens", h.Tokens, maxTokens}, {"top_k", int64(h.TopK), maxCount},
		{"layers", int64(h.Layers), maxCount}, {"microbatches", int64(h.Microbatches), maxCount},
	} {
		if x.value < 1 || x.value > x.most {
			return fmt.Errorf("%s is %d; it must be between 1 and %d", x.name, x.value, x.most)
		}
	}
	switch {
	case h.Experts < 0 || h.Experts > maxCount || h.Experts%h.Ranks != 0:
		return fmt.Errorf("experts is %d; it must be a multiple of the %d ranks and at most %d", h.Experts, h.Ranks, maxCount)
	case h.Experts > 0 && h.TopK > h.Experts:
		return fmt.Errorf("top_k is %d of %d experts", h.TopK, h.Experts)
	case int64(h.Ranks)*int64(h.Layers) > maxEntries/int64(h.Microbatches):
		return fmt.Errorf("%d ranks, %d layers and %d microbatches are more than %d numbers a step", h.Ranks, h.Layers, h.Microbatches, maxEntries)
	}
	return nil
}

// Total is the number of rows that all ranks receive together, of one layer of
// one microbatch.
func (h Header) Total() Rows { return Rows(h.Tokens) * Rows(h.TopK) }

// Balanced is what a rank receives if all receive the same, rounded up.
func (h Header) Balanced() Rows { return (h.Total() + Rows(h.Ranks) - 1) / Rows(h.Ranks) }

// Worst is the most that a rank can receive: every token sends it as many rows
// as it has experts, but no more than top_k.
func (h Header) Worst() Rows {
	k := h.TopK
	if h.Experts > 0 {
		k = min(k, h.Experts/h.Ranks)
	}
	return Rows(h.Tokens) * Rows(k)
}

// perStep is the number of entries of a step.
func (h Header) perStep() int { return h.Layers * h.Microbatches * h.Ranks }

// Trace is the rows of a number of steps. For each layer of each microbatch of
// each step, the rows of all ranks together are Total.
type Trace struct {
	Header
	rows []Rows // by step, layer, microbatch, rank
}

// Steps is the number of steps.
func (t *Trace) Steps() int { return len(t.rows) / t.perStep() }

// Rows is what a rank received.
func (t *Trace) Rows(step, layer, microbatch, rank int) Rows {
	if step < 0 || layer < 0 || layer >= t.Layers || microbatch < 0 || microbatch >= t.Microbatches || rank < 0 || rank >= t.Ranks {
		panic(fmt.Sprintf("routing: there is no rank %d of microbatch %d of layer %d of step %d", rank, microbatch, layer, step))
	}
	return t.rows[t.place(step, layer, microbatch)+rank]
}

// place is where the ranks of a microbatch begin.
func (t *Trace) place(step, layer, microbatch int) int {
	return ((step*t.Layers+layer)*t.Microbatches + microbatch) * t.Ranks
}

// Imbalance is the largest number of rows over the balanced one.
func (t *Trace) Imbalance() float64 {
	var most Rows
	for _, n := range t.rows {
		most = max(most, n)
	}
	return float64(most) * float64(t.Ranks) / math.Max(float64(t.Total()), 1)
}
