// This file owns `stowage train` in several processes: it joins the others, says what
// happened if one of them fails, and leaves them.

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/mpi"
	ranks "github.com/stowage-dev/stowage/internal/comm/nccl"
	"github.com/stowage-dev/stowage/internal/launcher"
	"github.com/stowage-dev/stowage/internal/nccl"
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
	order   ranks.Order   // of all that NCCL does on this process's GPU
	process *comm.Process
	offset  time.Duration // to the clock of rank 0
	within  time.Duration // the most by which offset may be wrong
	run     string        // names what the processes do, the same in all
	cores   int           // how many processes of this machine run on the same cores
	wait    time.Duration // for a rank that hangs; zero is for ever
	said    chan struct{} // closed when a failure was printed
	saidMPI bool          // it was printed why NCCL is not used

	mu    sync.Mutex
	comms []comm.Comm // that must fail if a process does
	near  map[int]int // the numbers of the processes of this machine, by rank
}

// silentError is an error that was printed, or that another process prints.
type silentError struct{ err error }

func (e *silentError) Error() string { return e.err.Error() }
func (e *silentError) Unwrap() error { return e.err }

// findPlace returns the place of this process among others, or nil if it was started alone.
func findPlace() (*launcher.Place, error) {
	p, err := launcher.Find(os.Getenv)
	if err != nil {
		return nil, usagef("%w", err)
	}
	if p == nil || p.Size == 1 {
		if _, err := patience(os.Getenv); err != nil {
			return nil, err
		}
		return nil, checkEngine(os.Getenv(engineVariable)) // several processes compare it
	}
	if _, err := p.Address(); err != nil && !p.HasMPI { // over which ranks find each other
		return nil, usagef("%w", err)
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
	ranks := "ranks"
	if o.PP*o.DP == 1 {
		ranks = "rank"
	}
	return usagef("%s started %d processes, but the layout has %d %s (pp %d x dp %d); start as many, or give %s", c.place.Launcher.Who(), n, o.PP*o.DP, ranks, o.PP, o.DP, would)
}

// firstToSay reports whether this process is the first of those that one launcher started on this
// machine to say why they cannot start. It is known on Linux, where a socket without a file tells.
func firstToSay(p *launcher.Place) (first, known bool) {
	if runtime.GOOS != "linux" {
		return false, false
	}
	l, err := net.Listen("unix", fmt.Sprintf("@stowage/%d/%d/%s/%d", os.Getuid(), os.Getppid(), p.Job, p.Restart))
	if err == nil {
		spoken = append(spoken, l)
	}
	return err == nil, err == nil || errors.Is(err, syscall.EADDRINUSE)
}

// spoken holds the socket of firstToSay, which stays open until the process ends.
var spoken []net.Listener

// abortPMI tells MPICH's mpirun that this process gives up. It would let the others wait for it in
// the start of MPI.
func abortPMI(p *launcher.Place, getenv func(string) string) {
	fd, err := strconv.Atoi(getenv("PMI_FD"))
	if p.Launcher != launcher.PMI || err != nil || fd <= 2 {
		return
	}
	var stat syscall.Stat_t
	if syscall.Fstat(fd, &stat) != nil {
		return
	}
	if kind := stat.Mode & syscall.S_IFMT; kind != syscall.S_IFSOCK && kind != syscall.S_IFIFO {
		return // the variable is left from elsewhere, and the number may be any file's
	}
	_, _ = syscall.Write(fd, []byte("cmd=init pmi_version=1 pmi_subversion=1\ncmd=abort exitcode=1\n"))
}

// lateError is what a process says that waited too long for others.
type lateError struct{ text string }

func (e *lateError) Error() string { return e.text }

// bounded runs a call that MPI makes with all processes and that nothing can end, or gives up
// when a rank hangs.
func (c *cluster) bounded(what string, call func() error) error {
	if c.session != nil {
		c.session.Note(what, nil)
	}
	done := make(chan error, 1)
	go func() { done <- call() }()
	var limit <-chan time.Time
	if c.wait > 0 {
		limit = time.After(c.wait)
	}
	select {
	case err := <-done:
		return err
	case <-limit:
		return c.late(what)
	}
}

// late says which ranks have not come to a call, as far as this process can know.
func (c *cluster) late(what string) error {
	me, who := fmt.Sprintf("rank %d on %s ", c.place.Rank, c.place.Host), "the other processes"
	if c.session != nil {
		me = "" // the rendezvous says it
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		states, _ := c.session.States(ctx)
		var ranks []int
		host := ""
		for _, s := range states {
			if s.Collective != what {
				ranks, host = append(ranks, s.Rank), cmp.Or(host, s.Host)
			}
		}
		if len(ranks) > 0 {
			who = fmt.Sprintf("%s (rank %d runs on %s)", launcher.Ranks(ranks), ranks[0], host)
		}
	}
	return &lateError{fmt.Sprintf("%swaited %v in %s for %s; find out what delays them, or raise %s", me, c.wait, what, who, patienceVariable)}
}

// apart is how long processes wait for one another that say the same and cannot agree. The
// launcher ends the others when one has ended.
const apart = 2 * time.Second

// once silences an error from before the processes can agree, except on one process of a
// machine. That one may be the one that hangs, so others speak too if the launcher does not end
// them.
func (c *cluster) once(err error) error {
	var late *lateError
	if errors.As(err, &late) {
		time.Sleep(time.Duration(min(c.place.Rank, 8)) * apart)
		return err
	}
	if first, known := firstToSay(&c.place); known {
		if !first {
			time.Sleep(apart) // the launcher ends the others when this one has ended
			return &silentError{err}
		}
		say(c.cmd.ErrOrStderr(), "stowage: "+c.words(err)+"\n")
		time.Sleep(apart / 2) // until the others have found that it is said, and the launcher has read it
		abortPMI(&c.place, os.Getenv)
		return &silentError{err}
	}
	p := &c.place
	if p.LocalKnown && p.LocalRank > 0 || !p.LocalKnown && p.Rank > 0 {
		return &silentError{err}
	}
	return err
}

// patienceVariable sets how long ranks wait for one that hangs.
const patienceVariable = "STOWAGE_PATIENCE"

// mostMeeting is how long ranks wait for each other to start.
const mostMeeting = 5 * time.Minute

// usualPatience is longer than ranks can be apart in any run that is worth waiting for.
const usualPatience = 10 * time.Minute

// patience returns how long ranks wait for one that hangs, or zero for ever.
func patience(getenv func(string) string) (time.Duration, error) {
	text := getenv(patienceVariable)
	if text == "" {
		return usualPatience, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return 0, usagef("%s is %q; expected a duration such as 30m, or 0 to wait for ever", patienceVariable, text)
	}
	return d, nil
}

// join meets the other processes.
func join(cmd *cobra.Command, place *launcher.Place) (c *cluster, err error) {
	c = &cluster{cmd: cmd, place: *place, said: make(chan struct{})}
	if c.wait, err = patience(os.Getenv); err != nil {
		return nil, c.once(err)
	}
	if os.Getenv("UCX_LOG_LEVEL") == "" { // after a failure it would warn of messages that nobody took
		_ = os.Setenv("UCX_LOG_LEVEL", "error")
	}
	if os.Getenv("UCX_HANDLE_ERRORS") == "" { // it would print its stack
		_ = os.Setenv("UCX_HANDLE_ERRORS", "none")
	}
	if err = nccl.RegisterNoGraphs(); err != nil {
		return nil, c.once(err)
	}
	o := rendezvous.Options{Version: thisVersion().String(), Now: func() int64 { return time.Now().UnixNano() }}
	o.Waits = func(text string) { fmt.Fprintln(cmd.ErrOrStderr(), text) }
	if c.wait > 0 {
		o.Timeout = min(c.wait, mostMeeting)
	}
	if place.HasMPI {
		if err = c.bounded("the start of MPI", func() (err error) { c.mpi, err = mpi.Start(os.Getenv); return err }); err != nil {
			return nil, c.once(err)
		}
		o.Exchange = func(text string) (all string, err error) {
			err = c.bounded("the exchange of addresses", func() (err error) { all, err = c.mpi.Exchange(text); return err })
			return all, err
		}
	}
	if c.session, err = rendezvous.Join(context.Background(), place, o); err != nil {
		return nil, c.once(err)
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
			place.Launcher.Who(), place.Rank, place.Size, name, c.mpi.Rank(), c.mpi.Size()))
	}
	if c.host, err = openCPU(nil); err != nil {
		return nil, c.leave(err)
	}
	control, err := c.open(c.host, "all processes", 64*memory.KiB)
	if err != nil {
		return nil, c.leave(err)
	}
	c.process = &comm.Process{
		Ranks: []int{place.Rank}, Control: control,
		Join:     func(_ int, dev device.Device) (comm.Comm, error) { return c.open(dev, "", 0) },
		Describe: func(err error) (string, int) { return c.words(err), exitCode(err) },
	}
	return c, c.meet()
}

// meet names what the processes do, and finds those of this machine.
func (c *cluster) meet() error {
	mine := hello{Run: fmt.Sprintf("%x-%x", time.Now().UnixNano(), os.Getpid()), Host: c.place.Host, Cores: allowedCores(), ID: os.Getpid()}
	mine.Processes, _ = os.Readlink("/proc/self/ns/pid")
	text, err := json.Marshal(mine)
	if err != nil {
		return c.leave(err)
	}
	texts, err := c.process.Control.Gather(text)
	all := make([]hello, len(texts))
	for i, text := range texts {
		if err == nil {
			err = json.Unmarshal(text, &all[i])
		}
	}
	if err != nil {
		return c.leave(err)
	}
	c.run = all[0].Run
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cores, c.near = mine.beside(all)
	return nil
}

// wake lets the process of a rank that has failed go on if somebody stopped it on this machine, so
// that it learns of its failure and ends: not all launchers end a process that is stopped.
func wake(id int) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", id))
	if err != nil {
		return
	}
	ours, _ := os.Readlink("/proc/self/exe")
	theirs, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", id))
	if _, state, _ := strings.Cut(string(stat), ") "); strings.HasPrefix(state, "T") && ours == theirs {
		_ = syscall.Kill(id, syscall.SIGCONT)
	}
}

// allowedCores returns the cores that this process may run on, in words of the kernel, or
// "" if it does not say. Launchers may have bound each process to its own.
func allowedCores() string {
	text, _ := os.ReadFile("/proc/self/status")
	_, after, _ := strings.Cut(string(text), "\nCpus_allowed_list:")
	cores, _, _ := strings.Cut(after, "\n")
	return strings.TrimSpace(cores)
}

// words returns an error in one sentence.
func (c *cluster) words(err error) string {
	text := readable(oneLine(describe(c.cmd, err)))
	return strings.ReplaceAll(text, "or raise Patience", "or raise "+patienceVariable)
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
	return c.bounded("the start of MPI", func() (err error) { c.mpi, err = mpi.Start(os.Getenv); return err })
}

// beforeCall is told of every call of this process before it begins. Tests make processes
// fail there.
var beforeCall = func(call string) {}

// note says which call this rank is in, and which ranks it waits for there.
func (c *cluster) note(call string, absent []int) {
	c.session.Note(call, absent)
	if absent == nil {
		beforeCall(call)
	}
}

// open makes a communicator of all processes, over NCCL if they have GPUs and a library. It
// fails if a process does.
func (c *cluster) open(dev device.Device, name string, scratch memory.Bytes) (x comm.Comm, err error) {
	var lib *nccl.Library
	if c.process != nil {
		if lib, err = c.chooseEngine(dev); err != nil {
			return nil, err
		}
	}
	err = c.bounded("the opening of a communicator", func() (err error) {
		if lib != nil {
			x, err = c.openNCCL(lib, dev, name)
		} else {
			x, err = c.openMPI(dev, name, scratch, c.note)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return x, c.keep(x)
}

// keep notes a communicator for watch, or returns the failure that watch has seen by now.
func (c *cluster) keep(x comm.Comm) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.comms = append(c.comms, x)
	return c.session.Err()
}

func (c *cluster) openMPI(dev device.Device, name string, scratch memory.Bytes, note func(call string, absent []int)) (comm.Comm, error) {
	return c.mpi.Open(dev, mpi.Options{Name: name, Scratch: scratch, Patience: c.wait, Note: note})
}

// mostEnding is how long a process may take to end after another one failed.
const mostEnding = time.Second

// watch ends this process if another one fails. Launchers end what is left within a second
// or so, so it prints first.
func (c *cluster) watch() {
	<-c.session.Failed()
	err := c.session.Err()
	time.AfterFunc(mostEnding, func() { os.Exit(exitFailure) }) // even if nobody reads what it prints
	var f *rendezvous.Failure
	lowest := 0
	if errors.As(err, &f) && f.Rank == 0 {
		lowest = 1
	}
	c.mu.Lock()
	if c.place.Rank == lowest {
		say(c.cmd.ErrOrStderr(), "stowage: "+c.words(err)+"\n")
	}
	comms := c.comms
	if id := c.near[rankOf(f)]; id != 0 {
		wake(id)
	}
	c.mu.Unlock()
	close(c.said)
	if len(comms) > 0 {
		c.mpi.Unlink()
	}
	for _, x := range comms {
		x.Abort(err)
	}
}

// rankOf returns the rank of a failure, or -1.
func rankOf(f *rendezvous.Failure) int {
	if f == nil {
		return -1
	}
	return f.Rank
}

// mostApart is how long a process that has failed waits for the others to leave too. If
// they have the same error, they do.
const mostApart = 30 * time.Second

// mostApartFailed is the same if communicators have failed: nobody waits in a call then,
// but for a rank that hangs.
const mostApartFailed = 5 * time.Second

// leave ends the membership and returns the error of this process. Errors that another
// process prints are silent. An error that the others do not have ends them.
func (c *cluster) leave(err error) error {
	if c == nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	var lost *comm.Failure
	switch {
	case errors.As(err, &lost):
		ctx, cancel = context.WithTimeout(ctx, mostApartFailed)
	case err != nil:
		ctx, cancel = context.WithTimeout(ctx, mostApart)
	case c.wait > 0:
		ctx, cancel = context.WithTimeout(ctx, c.wait)
	}
	defer cancel()
	const end = "the end of the run"
	if err == nil {
		c.session.Note(end, nil)
	}
	if c.process == nil || c.session.Barrier(ctx, "leave") != nil {
		if err == nil && c.session.Err() == nil {
			err = c.late(end)
		}
		c.session.Abort(cmp.Or(err, c.session.Err()))
		<-c.said
		return &silentError{cmp.Or(err, c.session.Err())}
	}
	if err != nil { // all have the same
		if c.place.Rank == 0 { // now: launchers kill the others when the first one has ended
			complain(c.cmd.ErrOrStderr(), c.cmd, err, nil)
		}
		err = &silentError{err}
	}
	ended := errors.Join(c.process.Control.Close(), c.host.Close(), c.finalize(err))
	if c.pmi != nil {
		ended = errors.Join(ended, c.pmi.Close())
	}
	return cmp.Or(err, ended, c.session.Close())
}

// finalize ends MPI. After an error it waits for that only as long as for ranks to leave:
// messages of a communicator that failed may never pass.
func (c *cluster) finalize(err error) error {
	ended := make(chan error, 1)
	go func() { ended <- c.mpi.Finalize() }()
	var limit <-chan time.Time
	if err != nil {
		limit = time.After(mostApart)
	} else if c.wait > 0 {
		limit = time.After(c.wait)
	}
	select {
	case err := <-ended:
		return err
	case <-limit:
		return errors.New("MPI did not end in time")
	}
}

// choose makes a device choice that of this process: the GPU of its place on the machine,
// and its share of the processors. It also sets how often memory is collected.
func (c *cluster) choose(d *deviceChoice) error {
	if c == nil {
		return nil
	}
	d.shared = true
	if d.backend == "cuda" && d.ordinal == 0 {
		n, err := cuda.Count()
		if err != nil {
			return err
		}
		if d.ordinal, err = c.place.GPU(os.Getenv, n); err != nil {
			return err
		}
	}
	if os.Getenv("GOMAXPROCS") == "" && c.cores > 1 {
		runtime.GOMAXPROCS(processorsOf(runtime.GOMAXPROCS(0), c.cores))
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	return nil
}

// gcPercent lets the heap of a process grow to five times what it needs, which is some ten
// megabytes, before it is collected. All ranks wait for the one that collects, and a process with one
// processor collects in the place of its kernels.
const gcPercent = 400

// processorsOf returns the share of one of several processes on the same processors. A kernel
// that waited for a thread which another process keeps from running would be slower than one
// thread.
func processorsOf(processors, processes int) int { return max(1, processors/processes) }

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
