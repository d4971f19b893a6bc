// This file owns the cost of issuing work: the host's time for a launch or a replay, and
// its duration on the device if there is almost nothing to do.

package bench

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// Overhead is the cost of one piece of work that does next to nothing.
type Overhead struct {
	What string `json:"what"`
	// CPU is the processor time of the issuing thread, in microseconds.
	CPU float64 `json:"cpu_us"`
	// Elapsed is the time of a piece, from the first issue until all work is done.
	Elapsed float64 `json:"elapsed_us"`
}

const (
	// issueBatch is less than the 1024 pieces of work that a queue holds. Beyond that the
	// host waits, and the wait would be measured too.
	issueBatch  = 512
	issueRounds = 51
	// graphNodes is the size of the graph whose cost is spread over its nodes.
	graphNodes = 64
)

// Overheads measures launches and replays. The kernel fills a page.
func Overheads(dev device.Device, done func(Overhead) error) error {
	r, err := newRig(dev, 4*memory.KiB)
	if err != nil {
		return err
	}
	err = r.overheads(done)
	return cmp.Or(err, r.close())
}

func (r *rig) overheads(done func(Overhead) error) error {
	launch := func() { kernels.Fill(r.out, r.accel[0].All(), 7) }
	if err := r.overhead("launch", issueBatch, 1, launch, done); err != nil {
		return err
	}
	for _, nodes := range []int{1, graphNodes} {
		g, err := captureWork(r.out, nodes, launch)
		if err != nil {
			return err
		}
		name := fmt.Sprintf("replay of a graph of %d", nodes)
		if nodes > 1 {
			name += ", a node"
		}
		err = r.overhead(name, issueBatch/nodes, nodes, func() { r.out.Replay(g) }, done)
		if err = cmp.Or(err, g.Close()); err != nil {
			return err
		}
	}
	return nil
}

// overhead issues batches and takes the medians. A batch does not count if the goroutine
// changed threads, because the clock of the thread then says nothing. Locking the goroutine
// to a thread would make every call of the driver slower.
func (r *rig) overhead(what string, batch, pieces int, issue func(), done func(Overhead) error) error {
	var cpu, elapsed []time.Duration
	for tries := 0; len(cpu) < issueRounds && tries < 10*issueRounds; tries++ {
		began := time.Now()
		thread, cpuBegan := threadTime()
		for range batch {
			issue()
		}
		threadEnd, cpuEnd := threadTime()
		if err := r.out.Sync(); err != nil {
			return err
		}
		if took := time.Since(began); threadEnd == thread {
			cpu, elapsed = append(cpu, cpuEnd-cpuBegan), append(elapsed, took)
		}
	}
	if len(cpu) == 0 {
		return errors.New("the cost of issuing work could not be measured, because the machine is too busy; try again")
	}
	micros := func(ts []time.Duration) float64 {
		slices.Sort(ts)
		return float64(ts[len(ts)/2]) / float64(batch*pieces) / float64(time.Microsecond)
	}
	return done(Overhead{What: what, CPU: micros(cpu), Elapsed: micros(elapsed)})
}
