// This file owns the cost of issuing work: what a launch or a replay takes of
// the host's time, and how long it lasts on the device when there is next to
// nothing to do.

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
	// Elapsed is from the first issue until all work is done, a piece.
	Elapsed float64 `json:"elapsed_us"`
}

const (
	// issueBatch stays below the 1024 pieces of work that a queue holds before
	// the host must wait, which would be measured as well.
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

// overhead issues batches and takes the medians. A goroutine may change threads,
// and then the clock of the thread says nothing about the batch, which does not
// count; tying it to one thread would make every call into the driver slower.
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
