// This file owns the tests of what a wait of the host orders: the work issued before the
// wait began, and nothing that other goroutines issue meanwhile.

package check_test

import (
	"errors"
	"runtime"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
)

// Work that is issued while another goroutine waits is not ordered by that wait, also if it
// happens to be done when the wait ends.
func TestWaitsOrderOnlyWhatWasIssued(t *testing.T) {
	var e device.Event
	for name, wait := range map[string]func(w *world) error{
		"stream":               func(w *world) error { return w.a.Sync() },
		"device":               func(w *world) error { return w.dev.Sync() },
		"event":                func(*world) error { return e.Sync() },
		"event recorded again": func(*world) error { return e.Sync() },
	} {
		for _, late := range []bool{false, true} {
			_, err := run(t, check.Options{}, inWorld(func(w *world) {
				gate := make(chan struct{})
				w.a.Host(func() { <-gate })
				if !late {
					w.a.Fill(w.host.All(), 1)
				}
				e = w.event(0)
				w.a.Record(e)
				syncs := w.dev.Counters().HostSyncs
				waited := make(chan error)
				go func() { waited <- wait(w) }()
				for w.dev.Counters().HostSyncs == syncs { // the wait has begun when it is counted
					runtime.Gosched()
				}
				if late {
					w.a.Fill(w.host.All(), 1)
				}
				if name == "event recorded again" {
					w.a.Record(e)
				}
				close(gate)
				must(<-waited)
				w.dev.View(w.host.All(), device.Read)
			}))
			if race := (*check.Race)(nil); errors.As(err, &race) != late {
				t.Errorf("%s: a fill issued during the wait: %v; the report is %v", name, late, err)
			}
		}
	}
}
