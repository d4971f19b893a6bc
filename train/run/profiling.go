// This file owns the profile of a run: which steps are profiled, and its figures.

package run

import (
	"fmt"

	"github.com/stowage-dev/stowage/internal/profile"
	"github.com/stowage-dev/stowage/plan/cost"
)

// A profiled run first takes settleSteps, in which the runtime records, decides and loads
// code, then steps that give the undisturbed time, and at its end profiledSteps.
const (
	settleSteps   = 4
	profiledSteps = 3
	leastProfiled = settleSteps + 1 + profiledSteps
)

// profiling is the profile of a run under way. A nil profiling profiles nothing.
type profiling struct {
	*profile.Profiler
	limits       profile.Limits
	settling     int
	plain, timed []float64 // seconds of steps
}

// profile prepares the profile of a run with so many steps left, if one is asked for.
func (j *Job) profile(left int) (*profiling, error) {
	if j.Profile == nil {
		return nil, nil
	}
	if left < leastProfiled {
		return nil, refuse("Steps", fmt.Sprint(j.Options.Steps), fmt.Sprintf("leaves %d to profile", max(left, 0)),
			fmt.Sprintf("give %d more at least: %d to settle, one that is not disturbed, and %d that are profiled", leastProfiled-left, settleSteps, profiledSteps))
	}
	p := &profiling{Profiler: j.Profile, settling: settleSteps}
	var err error
	if p.Measure != nil {
		p.limits, err = p.Measure()
	}
	return p, err
}

// begin announces a step; left counts it and those behind it.
func (p *profiling) begin(left int) {
	if p != nil && left <= profiledSteps {
		p.Start()
	}
}

// end announces the end of a step that took so many seconds.
func (p *profiling) end(left int, took float64) error {
	switch {
	case p == nil:
		return nil
	case left <= profiledSteps:
		p.timed = append(p.timed, took)
		return p.Stop()
	case p.settling > 0:
		p.settling--
	default:
		p.plain = append(p.plain, took)
	}
	return nil
}

// result returns the figures, or nil if the run was stopped before the last step.
func (p *profiling) result(j *Job) *profile.Result {
	if p == nil || len(p.timed) < profiledSteps {
		return nil
	}
	c, sum := &j.config, 0.0
	for _, s := range p.timed {
		sum += s
	}
	return p.Result(profile.Run{
		Steps: len(p.timed), Millis: 1e3 * sum / float64(len(p.timed)), Plain: 1e3 * median(p.plain), Ranks: c.Layout.Ranks(),
		Flops: cost.TokenFlops(c.Model, c.Batch.Seq) * float64(c.Layout.DP*c.Batch.Microbatches*c.Batch.Micro*c.Batch.Seq),
	}, p.limits)
}
