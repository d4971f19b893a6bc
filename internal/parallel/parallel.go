// Package parallel divides the work of one kernel over the processor's threads.
//
// This file owns the division into runs, crew.go the goroutines.
package parallel

import (
	"runtime"
	"sync/atomic"
)

// perProcessor is how many threads a processor is given at most. Go lets GOMAXPROCS be any
// number, and thousands of threads do nothing but wait for each other.
const perProcessor = 8

var most = perProcessor * runtime.NumCPU()

// Threads returns the number of threads that a job is divided over: GOMAXPROCS, or a few for
// each processor if that is less.
func Threads() int { return min(runtime.GOMAXPROCS(0), most) }

// For calls f for consecutive runs of grain numbers below n, the last one perhaps
// shorter, from several goroutines, and returns when all are done. Where runs
// begin depends on n and grain alone, so that what a run computes does not depend
// on the number of threads. A panic in f is passed on.
func For(n, grain int, f func(from, to int)) {
	if n <= 0 {
		return
	}
	runs := (n + grain - 1) / grain
	helpers := min(Threads(), runs) - 1
	if helpers <= 0 {
		for at := 0; at < n; at += grain {
			f(at, min(at+grain, n))
		}
		return
	}
	j := job{n: n, grain: grain, f: f}
	NewCrew(j.takeRuns).Run(helpers)
}

type job struct {
	n, grain int
	f        func(from, to int)
	next     atomic.Int64 // runs taken so far, may pass the end
}

func (j *job) takeRuns() {
	for {
		at := (int(j.next.Add(1)) - 1) * j.grain
		if at >= j.n {
			return
		}
		j.f(at, min(at+j.grain, j.n))
	}
}
