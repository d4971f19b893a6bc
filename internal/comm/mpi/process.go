// Package mpi is the engine of collectives over MPI: each rank is a process of its own.
//
// MPI moves bytes. Sums are made by our own kernels in the order of ranks, so a run over
// processes has the bits of the same run in one process. Calls return at once. A host
// function on the stream holds the stream back until the messages of the call have passed.
// On the CPU device messages leave from and arrive in the memory of the caller, and the host
// function itself talks to MPI. Memory that the host cannot read goes through pinned
// buffers. Then a thread of its own talks to MPI, because the library may ask the driver of a
// GPU, which host functions must not; and calls run in the order in which they were made,
// because host functions may share one thread.
//
// Every call begins with a letter from each rank to each other that says what the rank
// calls. Ranks that disagree fail with a sentence. A rank sends to each other one directly,
// so a call takes as many messages as there are ranks.
//
// Calls of one stream can be captured, if all ranks capture and replay alike. Those of
// several streams cannot be in one capture: nothing would order them alike on all ranks.
//
// This file owns who talks to MPI, sleep_linux.go how they sleep; world.go what
// the communicators of a process share, group.go communicators, calls.go the calls,
// stage.go how a call becomes work on a stream, op.go messages in flight, header.go what
// ranks tell each other about a call, control.go news of ranks that give up or leave.
package mpi

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stowage-dev/stowage/internal/mpi"
)

// library is what this package asks of MPI beside messages.
type library interface {
	Dup(c mpi.Comm) (mpi.Comm, error)
	Group(c mpi.Comm, ranks []int, tag int) (mpi.Comm, error)
	Free(c mpi.Comm) error
	Gather(c mpi.Comm, mine []byte, size int) ([]byte, error)
	Unlink()
	Finalize() error
}

// requests are pending messages.
type requests interface {
	Send(c mpi.Comm, addr uintptr, n, to, tag int, t token) error
	Receive(c mpi.Comm, addr uintptr, n, from, tag int, t token) error
	ReceiveAny(c mpi.Comm, addr uintptr, n, tag int, t token) error
	Len() int
	Token(i int) token
	Cancel(i int) error
	Some(done func(t token, err error)) (int, error)
	Forget(which func(t token) bool)
}

// Process is this process in MPI. MPI can be started once in a process and ended once.
type Process struct {
	lib    library
	info   mpi.Info
	ending chan struct{} // MPI is to end
	ended  chan error
	poller chan struct{} // full while a goroutine that waits for a call polls for all of them
	nap    *sleeper      // on which it sleeps
	begun  atomic.Uint64 // calls of streams, which end its sleep

	posts sync.Mutex
	queue []func()
	rest  *sleeper // of the loop

	mu sync.Mutex // of who calls MPI; it also guards what follows, and what worlds say it does

	requests requests
	worlds   map[*world]struct{}
	stop     bool
}

// Start finds the MPI library of the launcher that started this process and starts it.
func Start(getenv func(string) string) (*Process, error) {
	return start(func() (library, requests, mpi.Info, error) {
		l, err := mpi.Start(getenv)
		if err != nil {
			return nil, nil, mpi.Info{}, err
		}
		return l, mpi.NewRequests[token](l), l.Info, nil
	})
}

// start starts a process with the library that begin starts.
func start(begin func() (library, requests, mpi.Info, error)) (*Process, error) {
	rest, err := newSleeper()
	if err != nil {
		return nil, err
	}
	nap, err := newSleeper()
	if err != nil {
		rest.close()
		return nil, err
	}
	p := &Process{rest: rest, nap: nap, ending: make(chan struct{}), ended: make(chan error), poller: make(chan struct{}, 1), worlds: map[*world]struct{}{}}
	started := make(chan error)
	go func() { // MPI ends on the thread that started it
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		var err error
		p.lib, p.requests, p.info, err = begin()
		started <- err
		if err == nil {
			p.end(p.lib.Finalize)
		}
	}()
	if err := <-started; err != nil {
		rest.close()
		nap.close()
		return nil, err
	}
	go p.loop()
	return p, nil
}

// end ends MPI when Finalize asks for it, which gets the error.
func (p *Process) end(finalize func() error) {
	<-p.ending
	p.ended <- finalize()
}

// Rank returns the rank of this process.
func (p *Process) Rank() int { return p.info.Rank }

// Size returns the number of processes.
func (p *Process) Size() int { return p.info.Size }

// Library returns the name of the library and what it says of itself.
func (p *Process) Library() (name, version string) { return p.info.Name, p.info.Version }

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
		all, err = p.lib.Gather(p.info.World, mine, p.info.Size)
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
	return p.do(func() error {
		p.stop = true
		close(p.ending)
		return <-p.ended
	})
}

// post gives the loop something to do.
func (p *Process) post(f func()) {
	p.posts.Lock()
	p.queue = append(p.queue, f)
	p.posts.Unlock()
	p.rest.wake()
}

// posted reports whether the loop has something to do.
func (p *Process) posted() bool {
	p.posts.Lock()
	defer p.posts.Unlock()
	return len(p.queue) > 0
}

// do runs f, which calls MPI, on the loop and waits for it.
func (p *Process) do(f func() error) error {
	done := make(chan error, 1)
	p.post(func() { done <- f() })
	return <-done
}

// progress lets MPI make progress, which it does only inside of its calls, and ends what has
// come to an end. It returns how many messages have. The caller holds the lock.
func (p *Process) progress() int {
	n, err := p.requests.Some(func(t token, err error) { t.ended(err) })
	for w := range p.worlds {
		if err != nil {
			w.fail(w.rank, err, true)
		}
		w.look()
	}
	return n
}

// await waits until an operation is done. One of the goroutines that wait polls for all. So
// a message need not wake a thread that then wakes the goroutine: on a virtual machine that
// takes longer than most messages.
func (p *Process) await(done <-chan struct{}) {
	select {
	case <-done:
		return
	case p.poller <- struct{}{}:
	}
	defer func() { <-p.poller }()
	since, begun := time.Now(), p.begun.Load()
	for {
		p.mu.Lock()
		n := p.progress()
		p.mu.Unlock()
		select {
		case <-done:
			return
		default:
		}
		if now := p.begun.Load(); n > 0 || now != begun { // messages of other streams come soon
			since, begun = time.Now(), now
		}
		runtime.Gosched() // other goroutines first: the model may have but one processor
		if d := pause(time.Since(since), streamPolls); d > 0 {
			p.nap.sleep(d, func() bool { return p.begun.Load() != begun })
		} else {
			yield()
		}
	}
}

// loop does what it is given, polls for calls that go through pinned buffers, and hears
// news of other ranks.
func (p *Process) loop() {
	defer p.rest.close()
	defer p.nap.close()
	for since := time.Now(); ; {
		p.posts.Lock()
		work := p.queue
		p.queue = nil
		p.posts.Unlock()
		p.mu.Lock()
		for _, f := range work {
			f()
		}
		if p.stop {
			p.mu.Unlock()
			return
		}
		n := p.progress()
		d := p.pause(time.Since(since))
		p.mu.Unlock()
		switch {
		case n > 0 || len(work) > 0:
			since = time.Now()
		case d > 0:
			p.rest.sleep(d, p.posted)
		default:
			yield()
		}
	}
}

// pause returns how long the loop sleeps after it has waited for some time. Zero means
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
	}
	return pause(waited, loopPolls)
}

// pause returns how long to sleep after some time of polling, which goes on without sleep for
// as long as polls. A sleep adds at most an eighth to a wait.
func pause(waited, polls time.Duration) time.Duration {
	if waited < polls {
		return 0
	}
	return min(waited/8, longPause)
}

// A message between two ranks that wait takes a few microseconds; a rank that computes may
// take seconds. A stream that waits has nothing else to do, and a processor that halts takes
// long to wake: two processes on two virtual cores took 1.2 times as long if streams slept after
// 20 microseconds as if they slept after a millisecond, and their fastest steps 1.03 times as long
// after a millisecond as after 20. The loop polls beside streams that compute.
const (
	streamPolls = 20 * time.Millisecond
	loopPolls   = 20 * time.Microsecond
	longPause   = 500 * time.Microsecond
)
