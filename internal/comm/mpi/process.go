// Package mpi is the engine of collectives over MPI: each rank is a process of its own.
//
// MPI moves bytes. Sums are made by our own kernels in the order of ranks, so a run over
// processes has the bits of the same run in one process. Calls return at once. A host
// function on the stream hands the call to the one thread that talks to MPI and holds the
// stream back until its messages have passed. On the CPU device messages leave from and
// arrive in the memory of the caller. Memory that the host cannot read goes through pinned
// buffers, and calls then run in the order in which they were made, because the host
// functions of a GPU may share one thread.
//
// Every call begins with a header from each rank to each other that says what the rank
// calls. Ranks that disagree fail with a sentence. A rank sends to each other one directly,
// so a call takes as many messages as there are ranks.
//
// Calls of one stream can be captured, if all ranks capture and replay alike. Those of
// several streams cannot be in one capture: nothing would order them alike on all ranks.
//
// This file owns the thread that talks to MPI, sleep_linux.go how it sleeps; world.go what
// the communicators of a process share, group.go communicators, calls.go the calls,
// stage.go how a call becomes work on a stream, op.go messages in flight, header.go what
// ranks tell each other about a call, control.go news of ranks that give up or leave.
package mpi

import (
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/internal/mpi"
)

// Process is this process in MPI. MPI can be started once in a process and ended once.
type Process struct {
	lib   *mpi.Library
	ended chan struct{}

	mu    sync.Mutex
	queue []func()
	rest  *sleeper

	// Only the thread uses what follows.
	requests *mpi.Requests[token]
	worlds   map[*world]struct{}
	stop     bool
}

// Start finds the MPI library of the launcher that started this process and starts it.
func Start(getenv func(string) string) (*Process, error) {
	rest, err := newSleeper()
	if err != nil {
		return nil, err
	}
	p := &Process{rest: rest, ended: make(chan struct{}), worlds: map[*world]struct{}{}}
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		prepare()
		defer close(p.ended)
		var err error
		p.lib, err = mpi.Start(getenv)
		started <- err
		if err == nil {
			p.requests = mpi.NewRequests[token](p.lib)
			p.loop()
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// Rank returns the rank of this process.
func (p *Process) Rank() int { return p.lib.Rank }

// Size returns the number of processes.
func (p *Process) Size() int { return p.lib.Size }

// Library returns the name of the library and what it says of itself.
func (p *Process) Library() (name, version string) { return p.lib.Name, p.lib.Version }

// Exchange brings a text of rank 0 to all ranks. All of them must call it.
func (p *Process) Exchange(text string) (string, error) {
	const most = 4096
	if len(text) > most {
		return "", fmt.Errorf("comm: a text of %d bytes is too long to exchange; the most is %d", len(text), most)
	}
	mine := make([]byte, most)
	copy(mine, text)
	var all []byte
	err := p.do(func() (err error) {
		all, err = p.lib.Gather(p.lib.World, mine, p.lib.Size)
		return err
	})
	if err != nil {
		return "", err
	}
	return untilZero(all[:most]), nil
}

func untilZero(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

// Unlink removes the names of memory that this process shares with others. Call it after a failure,
// so that nothing is left.
func (p *Process) Unlink() { p.lib.Unlink() }

// Finalize ends MPI. All processes must call it, after they have closed their
// communicators. A process that has failed exits without it, so that the launcher ends the
// others.
func (p *Process) Finalize() error {
	err := p.do(func() error {
		p.stop = true
		return p.lib.Finalize()
	})
	<-p.ended
	return err
}

// post gives the thread something to do.
func (p *Process) post(f func()) {
	p.mu.Lock()
	p.queue = append(p.queue, f)
	p.mu.Unlock()
	p.rest.wake()
}

// waiting reports whether there is something to do.
func (p *Process) waiting() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.queue) > 0
}

// do runs f on the thread and waits for it.
func (p *Process) do(f func() error) error {
	done := make(chan error, 1)
	p.post(func() { done <- f() })
	return <-done
}

// loop is the thread: it does what it is given and makes progress. MPI makes progress only
// inside of its calls, so the thread polls while messages are in flight. It yields to other
// threads at first, then sleeps ever longer, and a new call wakes it.
func (p *Process) loop() {
	defer p.rest.close()
	for since := time.Now(); !p.stop; {
		p.mu.Lock()
		work := p.queue
		p.queue = nil
		p.mu.Unlock()
		for _, f := range work {
			f()
		}
		n, err := p.requests.Some(func(t token, err error) { t.ended(err) })
		for w := range p.worlds {
			if err != nil {
				w.fail(w.rank, err, true)
			}
			w.look()
		}
		if n > 0 || len(work) > 0 {
			since = time.Now()
			continue
		}
		if d := p.pause(time.Since(since)); d > 0 {
			p.rest.sleep(d, p.waiting)
		} else {
			yield()
		}
	}
}

// pause returns how long the thread sleeps after it has waited for some time. Zero means
// that it yields.
func (p *Process) pause(waited time.Duration) time.Duration {
	busy := false
	for w := range p.worlds {
		busy = busy || w.busy()
	}
	switch {
	case len(p.worlds) == 0:
		return time.Hour
	case !busy: // only news of other ranks can come
		return 10 * time.Millisecond
	case waited < shortPause:
		return 0
	}
	return min(max(waited/8, shortPause), longPause)
}

// A message between two threads that wait takes a few microseconds; a rank that computes
// may take seconds. A sleep adds at most an eighth to a wait, or a little more to a short
// one.
const (
	shortPause = 20 * time.Microsecond
	longPause  = 500 * time.Microsecond
)
