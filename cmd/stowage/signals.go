// This file owns what ends a run early: signals, and output that nobody reads any more.

package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/stowage-dev/stowage/internal/atomicfile"
	"github.com/stowage-dev/stowage/train/run"
)

// stops are the signals that end a run after its step, with a checkpoint:
//
//   - SIGINT is Ctrl-C, and SIGTERM what systems and schedulers send. The second one of
//     them ends the program at once.
//   - SIGHUP says that the terminal is gone, such as that of a dropped connection. A shell
//     and the system may both send it, so further ones change nothing. A program that
//     nohup started ignores it.
//   - SIGPIPE says that nobody reads the output, as in "stowage train 2>&1 | head". Every
//     further line would cause another one, so these change nothing either.
//   - SIGUSR1 and SIGUSR2 are what schedulers send ahead of a time limit, SIGXCPU, SIGALRM
//     and SIGVTALRM what the system sends at one, and SIGQUIT is Ctrl-\. Further ones
//     change nothing.
//
// Others that would end a program of another language, such as SIGPROF and SIGIO, do
// nothing to one in Go.
var stops = []os.Signal{
	syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGPIPE, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGXCPU,
	syscall.SIGALRM, syscall.SIGVTALRM,
}

// stopper cancels a context when a run should end.
type stopper struct {
	ctx      context.Context
	cancel   context.CancelFunc
	signals  chan os.Signal
	over     chan struct{}
	sockets  bool // SIGPIPE may also mean that a viewer left
	mu       sync.Mutex
	first    syscall.Signal // that cancelled the context, or zero
	asked    bool           // a SIGINT or SIGTERM came
	catching bool
}

// newStopper returns a stopper that catches nothing yet. sockets tells that the program
// serves viewers.
func newStopper(sockets bool) *stopper {
	s := &stopper{sockets: sockets, signals: make(chan os.Signal, 8), over: make(chan struct{})}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// catch begins to catch signals. The caller calls stop at the end.
func (s *stopper) catch() {
	s.mu.Lock()
	s.catching = true
	s.mu.Unlock()
	if !signal.Ignored(syscall.SIGQUIT) {
		signal.Reset(syscall.SIGQUIT) // of package startup
	}
	for _, sig := range stops {
		if !signal.Ignored(sig) {
			signal.Notify(s.signals, sig)
		}
	}
	go func() {
		for {
			select {
			case sig := <-s.signals:
				s.got(sig.(syscall.Signal))
			case <-s.over:
				return
			}
		}
	}()
}

// got handles a signal.
func (s *stopper) got(sig syscall.Signal) {
	if sig == syscall.SIGPIPE && s.sockets {
		return // Write sees if it was the output
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if sig == syscall.SIGINT || sig == syscall.SIGTERM {
		if s.asked {
			os.Exit(exitSignal(sig))
		}
		s.asked = true
	}
	if s.first == 0 {
		s.first = sig
		s.cancel()
	}
}

// stop ends the catching. Nobody reads the output after a SIGPIPE: the program goes on to
// ignore that, and ends with its own exit code.
func (s *stopper) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.first != syscall.SIGPIPE {
		signal.Stop(s.signals)
		if !signal.Ignored(syscall.SIGQUIT) {
			signal.Notify(s.signals, syscall.SIGQUIT) // changes nothing any more; Go would print its stacks
		}
	}
	close(s.over)
	s.cancel()
}

// watched returns a writer that ends the run if nobody reads what it writes.
func (s *stopper) watched(w io.Writer) io.Writer { return watchedOutput{w, s} }

type watchedOutput struct {
	w io.Writer
	s *stopper
}

// Write writes, and ends the run if the reader is gone.
func (o watchedOutput) Write(p []byte) (int, error) {
	n, err := o.w.Write(p)
	if errors.Is(err, syscall.EPIPE) {
		o.s.mu.Lock()
		if o.s.catching && o.s.first == 0 {
			o.s.first = syscall.SIGPIPE
			o.s.cancel()
		}
		o.s.mu.Unlock()
	}
	return n, err
}

// signalError says which signal interrupted a run.
type signalError struct {
	signal syscall.Signal
	err    error
}

func (e *signalError) Error() string { return e.err.Error() }
func (e *signalError) Unwrap() error { return e.err }

// because adds the signal to the error of a run that was interrupted.
func (s *stopper) because(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var interrupted *run.InterruptedError
	if s.first != 0 && errors.As(err, &interrupted) {
		return &signalError{s.first, err}
	}
	return err
}

// createUntilSignal begins to replace a file. If a signal comes before stop is called, it
// removes the temporary file and calls end, which ends the program.
func createUntilSignal(path string, end func(syscall.Signal)) (f *atomicfile.File, stop func(), err error) {
	signals, over := make(chan os.Signal, 1), make(chan struct{})
	for _, sig := range []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		if !signal.Ignored(sig) {
			signal.Notify(signals, sig)
		}
	}
	if f, err = atomicfile.Create(path); err != nil {
		signal.Stop(signals)
		return nil, nil, err
	}
	go func() {
		select {
		case sig := <-signals:
			if name := f.Temporary(); name != "" {
				_ = os.Remove(name) // nothing can be said any more
			}
			end(sig.(syscall.Signal))
		case <-over:
		}
	}()
	return f, func() {
		signal.Stop(signals)
		close(over)
	}, nil
}

// raise ends the program by a signal, as if it had not been caught.
func raise(sig syscall.Signal) {
	signal.Reset(sig)
	_ = syscall.Kill(os.Getpid(), sig)
}

// exitSignal returns the exit code for a signal, as shells have it.
func exitSignal(sig syscall.Signal) int { return 128 + int(sig) }
