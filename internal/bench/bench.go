// Package bench measures what a device does: copies in every direction, with
// the best plain copy beside them on the CPU, and the cost of issuing work.
//
// Method: everything that is compared runs in turns. A turn repeats the work
// until it lasts long enough for the clock, a round gives every way of doing the
// work one turn, the order rotates from round to round, and the figure of a way
// is the first quartile of its turns: disturbances only ever make a turn longer,
// and the very shortest may have been luck. What disturbs the machine for a while
// disturbs all ways alike.
//
// This file owns the method; rig.go the buffers and streams, copies.go the
// copies, graphs.go those in graphs and by kernels, issue.go the cost of issuing,
// stash.go the stash, replay.go the replay of routing traces, text.go the tables.
package bench

import (
	"slices"
	"time"

	"github.com/stowage-dev/stowage/memory"
)

// Options says what to measure, and for how long.
type Options struct {
	Sizes []memory.Bytes
	// Line is the time for one line of the table. It takes at least minRounds rounds, even
	// if they last longer.
	Line time.Duration
	// Progress, if it is not nil, is told how much of a line has been measured.
	Progress func(done, all int)
	// Plain adds the best plain copy to every line if the host can reach the bytes.
	Plain bool
	// Graphs adds copies in graphs and by kernels.
	Graphs bool
}

// Defaults returns options that give steady figures in a few seconds a size.
func Defaults() Options {
	return Options{
		Line:   800 * time.Millisecond,
		Plain:  true,
		Graphs: true,
	}
}

// Sizes returns the sizes that show how a device copies: some fit in caches, and some do
// not.
func Sizes(backend string) []memory.Bytes {
	if backend == "cpu" {
		return []memory.Bytes{memory.MiB, 16 * memory.MiB, 256 * memory.MiB}
	}
	return []memory.Bytes{memory.MiB, 64 * memory.MiB, memory.GiB}
}

// turnTime returns the least time of one turnTime: 16 ms by default, so that waking the
// goroutine or the GPU (up to 50 µs each way) and filling another core's cache
// (a turnTime of the device's goroutine follows one of ours) count for less than one
// per cent.
func (o Options) turnTime() time.Duration { return o.Line / 50 }

// The first quartile of seven turns is the second: other work may disturb five of them.
const (
	minRounds = 7
	maxRounds = 101
)

// way is one way of doing the work. It does the work n times and waits for the end. The
// work consists of a number of pieces.
type way struct {
	name   string
	pieces int
	do     func(n int) error
}

// compare returns the time of one piece of work for each way.
func (o Options) compare(ways []way) ([]time.Duration, error) {
	repeats := make([]int, len(ways))
	for i, w := range ways {
		n, err := o.calibrate(w)
		if err != nil {
			return nil, err
		}
		repeats[i] = n
	}
	turns := make([][]time.Duration, len(ways))
	begin := time.Now()
	for round := 0; round < maxRounds && (round < minRounds || time.Since(begin) < o.Line); round++ {
		for k := range ways {
			i := (k + round) % len(ways)
			from := time.Now()
			if err := ways[i].do(repeats[i]); err != nil {
				return nil, err
			}
			turns[i] = append(turns[i], time.Since(from)/time.Duration(repeats[i]*ways[i].pieces))
		}
		if o.Progress != nil {
			o.Progress(int(time.Since(begin).Milliseconds()), int(o.Line.Milliseconds()))
		}
	}
	times := make([]time.Duration, len(ways))
	for i := range turns {
		times[i] = quartile(turns[i])
	}
	return times, nil
}

// compareFastest compares a way with the fastest of several others, in rounds of their own. The
// fastest of many noisy figures would be slower if it were measured once more.
func (o Options) compareFastest(w way, others []way, times []time.Duration) (best string, two []time.Duration, err error) {
	i := slices.Index(times, slices.Min(times))
	two, err = o.compare([]way{w, others[i]})
	return others[i].name, two, err
}

// calibrate finds how often the work must be repeated to fill a turn. It also
// warms up caches, page tables and clocks.
func (o Options) calibrate(w way) (int, error) {
	for n := 1; ; n *= 2 {
		from := time.Now()
		if err := w.do(n); err != nil {
			return 0, err
		}
		if took := time.Since(from); took >= o.turnTime() || n >= 1<<20 {
			return n, nil
		}
	}
}

func quartile(ts []time.Duration) time.Duration {
	slices.Sort(ts)
	return ts[len(ts)/4]
}

// gbps returns decimal gigabytes a second, as link and memory speeds are quoted.
func gbps(n memory.Bytes, t time.Duration) float64 {
	return float64(n) / float64(max(t, 1))
}
