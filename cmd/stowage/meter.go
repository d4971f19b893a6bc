// This file owns the progress of commands other than `stowage train`: a line on the
// terminal that says how far the work is and when it ends.

package main

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/eta"
	"github.com/stowage-dev/stowage/internal/plaintext"
	"github.com/stowage-dev/stowage/observe/live"
)

// Work that is shorter than meterDelay shows nothing. Then the line is drawn anew every
// meterTick.
const meterDelay, meterTick = 2 * time.Second, 500 * time.Millisecond

// meter shows the progress of long work in one line, which it wipes at the end:
//
//  1. newMeter returns a meter that draws nothing yet.
//  2. at notes how much is done; call it after each piece of work.
//  3. end wipes the line. Nothing is drawn after it.
//
// A nil meter does nothing, so that commands need not ask whether there is a terminal.
type meter struct {
	w     io.Writer
	what  string
	began time.Time

	mu        sync.Mutex
	done, all int
	shown     bool

	stop, stopped chan struct{}
}

// measure returns a meter for a command, or nil if standard error is no terminal. What is
// printed to standard output goes above its line.
func measure(cmd *cobra.Command, what string) *meter {
	said, ok := cmd.ErrOrStderr().(*plaintext.Writer)
	if !ok {
		return nil
	}
	file, ok := said.Unwrap().(*os.File)
	if !ok || live.NewScreen(file, os.Getenv) == nil { // no terminal, or one that cannot move its cursor
		return nil
	}
	m := newMeter(file, what)
	if out, ok := cmd.OutOrStdout().(*output); ok {
		out.meter = m
	}
	return m
}

func newMeter(w io.Writer, what string) *meter {
	m := &meter{w: w, what: what, began: time.Now(), stop: make(chan struct{}), stopped: make(chan struct{})}
	go m.run()
	return m
}

// run draws the line from meterDelay on until end is called.
func (m *meter) run() {
	defer close(m.stopped)
	wait := time.NewTimer(meterDelay)
	defer wait.Stop()
	for {
		select {
		case <-wait.C:
			m.draw(time.Now())
			wait.Reset(meterTick)
		case <-m.stop:
			m.wipe()
			return
		}
	}
}

// at notes that done pieces of all are done.
func (m *meter) at(done, all int) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.done, m.all = done, all
}

// draw replaces the line.
func (m *meter) draw(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.shown = true
	fmt.Fprintf(m.w, "\r%s\x1b[K", m.line(now)) // a command does not fail because its terminal is gone
}

// line returns what is done, and how long the rest takes if it goes on as before.
func (m *meter) line(now time.Time) string {
	spent := now.Sub(m.began)
	if m.done < 1 || m.all < 1 {
		return fmt.Sprintf("%s, %s so far", m.what, eta.Clock(spent))
	}
	left := time.Duration(float64(spent) * float64(max(0, m.all-m.done)) / float64(m.done))
	return fmt.Sprintf("%s, %d %% done, about %s left", m.what, min(100, 100*m.done/m.all), eta.Clock(left))
}

// wipe removes the line, so that something else can be printed in its place.
func (m *meter) wipe() {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.shown {
		io.WriteString(m.w, "\r\x1b[K")
	}
	m.shown = false
}

// end wipes the line for good. It can be called twice.
func (m *meter) end() {
	if m == nil {
		return
	}
	select {
	case <-m.stopped:
		return
	default:
	}
	close(m.stop)
	<-m.stopped
}
