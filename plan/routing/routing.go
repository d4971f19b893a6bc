// Package routing reads, writes and generates routing counts: how many rows each expert
// rank received in every layer of every microbatch of every step. The planner takes the
// imbalance of experts from them, and the benchmarks replay them.
//
// # Format
//
// Routing counts are a file of JSON lines. The first line is the header:
//
//	{"version":1,"ranks":8,"tokens":4096,"top_k":8,"layers":4,"microbatches":16,"experts":256}
//
// Ranks is the number of expert-parallel ranks. Tokens is the number of tokens of one
// microbatch on all ranks together. Each token is routed to top_k experts, so every
// layer of every microbatch has tokens*top_k rows, and a balanced rank receives
// tokens*top_k/ranks of them. Layers counts the layers with experts of the whole model.
// Experts is optional and a multiple of ranks. If it is given, rank r has the experts
// from r*experts/ranks on, and a token sends a rank at most min(top_k, experts/ranks)
// rows.
//
// Every other line is one number of rows, with all of these keys:
//
//	{"step":0,"layer":3,"microbatch":1,"rank":2,"rows":4123}
//
// All numbers count from zero. Lines may come in any order, so the logs of several ranks
// can be joined. Steps must be complete: each layer, microbatch and rank comes once, and
// the rows of all ranks together are tokens*top_k. The header does not state the number
// of steps, so a running job can append to the file. Unknown keys are errors.
package routing

// This file owns the counts, read.go and write.go their format, synth.go generated
// counts.

import (
	"fmt"
)

// Rows is a number of rows.
type Rows int64

// version is the version of the format.
const version = 1

// Header describes the run that counts come from.
type Header struct {
	Ranks        int
	Tokens       int64 // of a microbatch, on all ranks together
	TopK         int
	Layers       int
	Microbatches int
	Experts      int // zero if it is not known
}

// No run comes near these limits. They keep every product below 2^63, and keep a damaged
// header from requesting all memory.
const (
	maxCount   = 1 << 20 // ranks, layers, microbatches, experts, experts a token
	maxTokens  = 1 << 40
	maxEntries = 1 << 28 // of a step, and of all generated counts
)

// check returns an error if the header is not sound.
func (h Header) check() error {
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
		return fmt.Errorf("top_k is %d of %d experts; it must be at most the number of experts", h.TopK, h.Experts)
	case int64(h.Ranks)*int64(h.Layers) > maxEntries/int64(h.Microbatches):
		return fmt.Errorf("%d ranks, %d layers and %d microbatches are more than %d numbers a step", h.Ranks, h.Layers, h.Microbatches, maxEntries)
	}
	return nil
}

// Total returns the rows that all ranks receive together in one layer of one microbatch.
func (h Header) Total() Rows { return Rows(h.Tokens) * Rows(h.TopK) }

// Balanced returns the rows of a rank if all ranks receive the same number, rounded up.
func (h Header) Balanced() Rows { return (h.Total() + Rows(h.Ranks) - 1) / Rows(h.Ranks) }

// Worst returns the most rows that a rank can receive: every token sends it as many rows
// as it has experts, but no more than top_k.
func (h Header) Worst() Rows {
	k := h.TopK
	if h.Experts > 0 {
		k = min(k, h.Experts/h.Ranks)
	}
	return Rows(h.Tokens) * Rows(k)
}

// perStep returns the number of entries of a step.
func (h Header) perStep() int { return h.Layers * h.Microbatches * h.Ranks }

// Counts holds the routing counts of some steps. For each layer of each microbatch of
// each step, the rows of all ranks add up to Total.
type Counts struct {
	Header
	rows []Rows // by step, layer, microbatch, rank
}

// Steps returns the number of steps.
func (t *Counts) Steps() int { return len(t.rows) / t.perStep() }

// Rows returns the rows that a rank received. It panics if there is no such step, layer,
// microbatch or rank.
func (t *Counts) Rows(step, layer, microbatch, rank int) Rows {
	if step < 0 || layer < 0 || layer >= t.Layers || microbatch < 0 || microbatch >= t.Microbatches || rank < 0 || rank >= t.Ranks {
		panic(fmt.Sprintf("routing: there is no rank %d of microbatch %d of layer %d of step %d", rank, microbatch, layer, step))
	}
	return t.rows[t.place(step, layer, microbatch)+rank]
}

// place returns the index at which the ranks of a microbatch begin.
func (t *Counts) place(step, layer, microbatch int) int {
	return ((step*t.Layers+layer)*t.Microbatches + microbatch) * t.Ranks
}

// Imbalance returns the rows of the fullest rank over the mean, which is at least one.
// It adds up the rows of all layers before it compares ranks: at the peak of memory the
// rows of all layers are live.
func (t *Counts) Imbalance() float64 {
	var most Rows
	for step := range t.Steps() {
		for microbatch := range t.Microbatches {
			for rank := range t.Ranks {
				var rows Rows
				for layer := range t.Layers {
					rows += t.Rows(step, layer, microbatch, rank)
				}
				most = max(most, rows)
			}
		}
	}
	mean := float64(t.Total()) / float64(t.Ranks) * float64(t.Layers)
	return max(float64(most)/mean, 1)
}
