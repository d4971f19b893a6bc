// Package choose answers a caller that describes a training step and asks what to do with
// what it saves: keep, offload or recompute, for every unit. It is pure. The answer is that
// of the solver in package policy, which counts memory and does not place it: the caller's
// allocator does that.
//
// This file owns the answer, request.go the description of a step and its limits, order.go
// the order of its events, tape.go the step as the solver reads it.
package choose

import (
	"fmt"
	"time"

	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// Machine is what a step runs on.
type Machine struct {
	Links memory.Links
	Host  memory.Bytes // of host memory that offloaded storages may take
	Least memory.Bytes // storages of fewer bytes are never offloaded
}

// Answer holds the choices for a step and their forecast. Before means with everything kept.
type Answer struct {
	Nothing    bool            `json:"nothing"` // everything fits, so there is nothing to do
	Choices    []memory.Choice `json:"choices"` // for every unit
	Step       time.Duration   `json:"step_ns"`
	Before     time.Duration   `json:"before_ns"`
	Peak       memory.Bytes    `json:"peak"` // the most that storages hold at once
	BeforePeak memory.Bytes    `json:"before_peak"`
	Moved      memory.Bytes    `json:"moved"`      // bytes that are offloaded
	Waiting    time.Duration   `json:"waiting_ns"` // compute's waits for copies
	Copying    time.Duration   `json:"copying_ns"` // time of copies, in both directions
	Again      time.Duration   `json:"again_ns"`   // time of recomputation
	Tried      int             `json:"tried"`
	Notes      []string        `json:"notes"`
}

// Solve returns the choices with the shortest step whose storages keep to the request's
// limit. It returns a *memory.BudgetError with the smallest limit that would do if no
// choices keep to it.
func (r *Request) Solve(m Machine) (*Answer, error) {
	if r.Links != nil {
		m.Links = r.Links.rates()
	}
	if !r.Offload { // nothing is copied, so any rates do
		m.Links = memory.Links{Out: 1, In: 1}
	}
	cfg := residency.Config{Host: m.Host, Align: 1, Least: m.Least, Borrowed: true}
	d, err := policy.Solve(r.profile(), m.Links, cfg, r.Limit, policy.Allowed{Offload: r.Offload, Recompute: r.Recompute, Effort: r.Effort})
	if err != nil {
		return nil, err
	}
	f := &d.Forecast
	a := &Answer{
		Nothing: d.Nothing, Choices: make([]memory.Choice, len(r.Units)), Step: f.Step, Before: d.Before.Step, Peak: f.Peak, BeforePeak: d.Before.Peak,
		Moved: f.Counts.OutBytes, Waiting: f.Waiting, Copying: f.OutBusy + f.InBusy, Again: f.Compute - d.Before.Compute, Tried: d.Tried, Notes: append([]string{}, d.Notes...),
	}
	for i := range r.Units {
		a.Choices[i] = d.Policy[r.unit(i)]
	}
	if n := f.Counts.HostFull; n > 0 {
		a.Notes = append(a.Notes, fmt.Sprintf("%d storages stay because %v of host memory are full; give more host memory", n, m.Host))
	}
	return a, nil
}

// NeedsLinks reports whether the answer depends on the rates of Machine.
func (r *Request) NeedsLinks() bool { return r.Offload && r.Links == nil }
