// Package eta estimates when a run ends, and writes times for people.
//
// This file owns both.
package eta

import (
	"fmt"
	"time"
)

// recent is how many of the last steps an estimate uses. The first steps are slow, and the
// load of a machine changes.
const recent = 16

// Pace knows how many steps of a run are done and how fast the last ones were. A run has
// several parts if it is a comparison, and all have the same number of steps. A nil Pace
// knows nothing.
type Pace struct {
	parts       []string
	steps, from int
	done        map[string]int
	times       []time.Time // of the last steps
}

// NewPace returns the pace of a run whose parts have done from of their steps.
func NewPace(parts []string, steps, from int) *Pace {
	return &Pace{parts: parts, steps: steps, from: from, done: map[string]int{}}
}

// Step notes that a part has done a number of steps.
func (p *Pace) Step(part string, number int, now time.Time) {
	if p == nil {
		return
	}
	p.done[part] = number
	if p.times = append(p.times, now); len(p.times) > recent {
		p.times = p.times[1:]
	}
}

// Progress returns the steps that are done and all steps, over all parts.
func (p *Pace) Progress() (done, all int) {
	if p == nil {
		return 0, 0
	}
	for _, part := range p.parts {
		done += max(p.from, p.done[part])
	}
	return done, len(p.parts) * p.steps
}

// Left estimates the time until the end. It returns false before the second step.
func (p *Pace) Left(now time.Time) (time.Duration, bool) {
	if p == nil || len(p.times) < 2 {
		return 0, false
	}
	done, all := p.Progress()
	n := len(p.times)
	each := p.times[n-1].Sub(p.times[0]) / time.Duration(n-1)
	return max(0, time.Duration(all-done)*each-now.Sub(p.times[n-1])), true
}

// Clock formats a duration with its two largest units.
func Clock(d time.Duration) string {
	s := int(d.Round(time.Second) / time.Second)
	switch {
	case s >= 24*3600:
		return fmt.Sprintf("%dd%02dh", s/(24*3600), s/3600%24)
	case s >= 3600:
		return fmt.Sprintf("%dh%02dm", s/3600, s/60%60)
	case s >= 60:
		return fmt.Sprintf("%dm%02ds", s/60, s%60)
	}
	return fmt.Sprintf("%ds", s)
}
