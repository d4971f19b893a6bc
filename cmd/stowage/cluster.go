// This file owns `stowage train` in several processes: it joins the others, says what
// happened if one of them fails, and leaves them.

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/mpi"
	"github.com/stowage-dev/stowage/internal/launcher"
	"github.com/stowage-dev/stowage/internal/rendezvous"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train/run"
)

// cluster is this process among those that a launcher started together. A nil cluster is a
// process that was started alone. Its life:
//
//  1. join starts MPI and the rendezvous with the other processes.
//  2. Runs use process, whose ranks are one: that of this process.
//  3. leave ends it, after success or an error that all processes have.
//
// If a process fails, the lowest rank that is left says which one, and all end.
type cluster struct {
	place   launcher.Place
	cmd     *cobra.Command
	mpi     *mpi.Process
	pmi     *rendezvous.PMI // what MPI talks to if the launcher knows nothing of MPI, or nil
	session *rendezvous.Session
	host    device.Device // of control
	process *comm.Process
	offset  time.Duration // to the clock of rank 0
	within  time.Duration // the most by which offset may be wrong
	run     string        // names what the processes do, the same in all
	said    chan struct{} // closed when a failure was printed

	mu    sync.Mutex
	comms []comm.Comm // that must fail if a process does
}

// silentError is an error that another process prints.
type silentError struct{ err error }

func (e *silentError) Error() string { return e.err.Error() }
func (e *silentError) Unwrap() error { return e.err }

// findPlace returns the place of this process among others, or nil if it was started alone.
func findPlace() (*launcher.Place, error) {
	p, err := launcher.Find(os.Getenv)
	if err != nil {
		return nil, usagef("%v", err)
	}
	if p == nil || p.Size == 1 {
		return nil, nil
	}
	return p, nil
}

// speaks reports whether this process prints: only one does.
func (c *cluster) speaks() bool { return c == nil || c.place.Rank == 0 }

// agree returns the error of the first process that has one.
func (c *cluster) agree(err error) error {
	if c == nil {
		return err
	}
	return c.process.Share(nil, err)
}

// fits returns an error if a layout does not have as many ranks as there are processes.
func (c *cluster) fits(o *run.Options) error {
	if c == nil || o.PP*o.DP == c.place.Size {
		return nil
	}
	n := c.place.Size
	would := fmt.Sprintf("--pp %d --dp %d", o.PP, n/o.PP)
	if n%o.PP != 0 || (n/o.PP)%o.EP != 0 {
		would = fmt.Sprintf("--pp 1 --ep 1 --dp %d", n)
	}
	return usagef("%s started %d processes, but the layout has %d ranks (pp %d x dp %d); start as many, or give %s", c.place.Launcher, n, o.PP*o.DP, o.PP, o.DP, would)
}

// once silences an error from before the processes can agree, except on one process of a
// machine.
func once(p *launcher.Place, err error) error {
	if p.LocalKnown && p.LocalRank > 0 || !p.LocalKnown && p.Rank > 0 {
		return &silentError{err}
	}
	return err
}

// join meets the other processes.
func join(cmd *cobra.Command, place *launcher.Place) (c *cluster, err error) {
	c = &cluster{cmd: cmd, said: make(chan struct{})}
	if os.Getenv("UCX_LOG_LEVEL") == "" { // after a failure it would warn of messages that nobody took
		_ = os.Setenv("UCX_LOG_LEVEL", "error")
	}
	o := rendezvous.Options{Version: thisVersion().String(), Now: func() int64 { return time.Now().UnixNano() }}
	if place.HasMPI {
		if c.mpi, err = mpi.Start(os.Getenv); err != nil {
			return nil, once(place, err)
		}
		o.Exchange = c.mpi.Exchange
	}
	if c.session, err = rendezvous.Join(context.Background(), place, o); err != nil {
		return nil, once(place, err)
	}
	c.place = c.session.Place()
	go c.watch()
	var trip time.Duration
	c.offset, trip = c.session.Offset()
	c.within = trip / 2
	if c.mpi == nil {
		if err := c.startMPI(); err != nil {
			return nil, c.leave(err)
		}
	}
	if c.mpi.Rank() != place.Rank || c.mpi.Size() != place.Size {
		name, _ := c.mpi.Library()
		return nil, c.leave(fmt.Errorf("%s says that this is rank %d of %d, but %s says rank %d of %d; start with the mpirun of that library, or set STOWAGE_MPI to the library of the launcher",
			place.Launcher, place.Rank, place.Size, name, c.mpi.Rank(), c.mpi.Size()))
	}
	if c.host, err = openCPU(nil); err != nil {
		return nil, c.leave(err)
	}
	control, err := c.open(c.host, 64*memory.KiB)
	if err != nil {
		return nil, c.leave(err)
	}
	c.process = &comm.Process{
		Ranks: []int{place.Rank}, Control: control,
		Join:     func(_ int, dev device.Device) (comm.Comm, error) { return c.open(dev, 0) },
		Describe: func(err error) (string, int) { return readable(oneLine(describe(cmd, err))), exitCode(err) },
	}
	names, err := control.Gather(fmt.Appendf(nil, "%x-%x", time.Now().UnixNano(), os.Getpid()))
	if err != nil {
		return nil, c.leave(err)
	}
	c.run = string(names[0])
	return c, nil
}

// startMPI starts MPI below a launcher that knows nothing of it.
func (c *cluster) startMPI() (err error) {
	if c.pmi, err = c.session.ServePMI(); err != nil {
		return err
	}
	for name, value := range c.pmi.Environment() {
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	c.mpi, err = mpi.Start(os.Getenv)
	return err
}

// open makes a communicator of all processes. It fails if a process does.
func (c *cluster) open(dev device.Device, scratch memory.Bytes) (comm.Comm, error) {
	x, err := c.mpi.Open(dev, mpi.Options{Scratch: scratch, Note: c.session.Note})
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.comms = append(c.comms, x)
	return x, c.session.Err()
}

// mostEnding is how long a process may take to end after another one failed.
const mostEnding = time.Second

// watch ends this process if another one fails. Launchers end what is left within a second
// or so, so it prints first.
func (c *cluster) watch() {
	<-c.session.Failed()
	err := c.session.Err()
	var f *rendezvous.Failure
	lowest := 0
	if errors.As(err, &f) && f.Rank == 0 {
		lowest = 1
	}
	c.mu.Lock()
	if c.place.Rank == lowest {
		say(c.cmd.ErrOrStderr(), "stowage: "+readable(oneLine(describe(c.cmd, err)))+"\n")
	}
	comms := c.comms
	c.mu.Unlock()
	close(c.said)
	time.AfterFunc(mostEnding, func() { os.Exit(exitFailure) })
	for _, x := range comms {
		x.Abort(err)
	}
}

// leave ends the membership and returns the error of this process. Errors that another
// process prints are silent.
func (c *cluster) leave(err error) error {
	if c == nil {
		return err
	}
	var lost *comm.Failure
	if errors.As(err, &lost) { // the rendezvous knows more, a moment later at most
		select {
		case <-c.session.Failed():
		case <-time.After(mostEnding):
		}
	}
	if c.process == nil { // the others do not know
		c.session.Abort(err)
	}
	if c.session.Err() != nil {
		<-c.said
		return &silentError{cmp.Or(err, c.session.Err())}
	}
	if err != nil && c.place.Rank != 0 { // rank 0 has the same
		err = &silentError{err}
	}
	end := errors.Join(c.process.Control.Close(), c.host.Close(), c.mpi.Finalize())
	if c.pmi != nil {
		end = errors.Join(end, c.pmi.Close())
	}
	return cmp.Or(err, end, c.session.Close())
}

// choose makes a device choice that of this process: the GPU of its place on the machine,
// and its share of the processors.
func (c *cluster) choose(d *deviceChoice) error {
	if c == nil {
		return nil
	}
	if d.backend == "cuda" && d.ordinal == 0 {
		n, err := cuda.Count()
		if err != nil {
			return err
		}
		if d.ordinal, err = c.place.GPU(os.Getenv, n); err != nil {
			return err
		}
	}
	if os.Getenv("GOMAXPROCS") == "" && c.place.LocalSize > 1 {
		runtime.GOMAXPROCS(max(1, runtime.GOMAXPROCS(0)/c.place.LocalSize))
	}
	return nil
}

// signal makes all processes know the signal that interrupted one of them.
func (c *cluster) signal(s *stopper, err error) {
	var interrupted *run.InterruptedError
	if c == nil || !errors.As(err, &interrupted) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if n, err := c.process.Most(int(s.first)); err == nil {
		s.first = syscall.Signal(n)
	}
}
