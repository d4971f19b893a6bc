// This file owns the tests of the speed of links.

package session

import (
	"sync"
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

// A process measures a device once, however many sessions it opens and from however many
// goroutines; what is given is not measured, and what moves nothing needs no measuring.
func TestLinksAreMeasuredOnce(t *testing.T) {
	var links Links
	open := func(cfg Config) memory.Links {
		s, err := links.Open(cfg, nil)
		if err != nil {
			t.Error(err)
			return memory.Links{}
		}
		defer func() {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}()
		return s.rt.Links()
	}
	if got := open(Config{Device: "cpu"}); got != (memory.Links{}) || len(links.known) != 0 {
		t.Errorf("a session that moves nothing measured %v", got)
	}
	given := memory.Links{Out: 1, In: 2, Both: 3}
	if got := open(Config{Device: "cpu", Limit: 1000, Links: given}); got != given || len(links.known) != 0 {
		t.Errorf("a session that was given %v has %v", given, got)
	}
	var seen [8]memory.Links
	var wg sync.WaitGroup
	for i := range seen {
		wg.Go(func() {
			cfg := Config{Device: "cpu", Limit: 1000}
			if i%2 == 0 {
				cfg = Config{Device: "cpu", Policy: map[string]memory.Choice{"mlp": memory.Offload}}
			}
			seen[i] = open(cfg)
		})
	}
	wg.Wait()
	for _, got := range seen {
		if got != seen[0] || got.Out == 0 {
			t.Errorf("sessions of one device measured %v", seen)
			break
		}
	}
	if len(links.known) != 1 {
		t.Errorf("%d devices were measured", len(links.known))
	}
	if open(Config{Device: "cpu", Ordinal: 1, Limit: 1000}); len(links.known) != 2 {
		t.Error("another device has the speed of the first one")
	}
	bad := Config{Device: "cpu", Ordinal: -1, Limit: 1000}
	if _, err := links.Open(bad, nil); err == nil || len(links.known) != 2 {
		t.Errorf("a device that cannot be opened: %v", err)
	}
	open(Config{Device: "cpu", Limit: 1000}) // the lock is free
}

// Each device and each context has links of its own.
func TestPlaces(t *testing.T) {
	seen := map[place]bool{}
	for _, c := range []Config{{Device: "cpu"}, {Device: "cuda"}, {Device: "cuda", Ordinal: 1}, {Device: "cuda", Context: 1}, {Device: "cuda", Context: 2}} {
		seen[placeOf(&c)] = true
	}
	if len(seen) != 5 {
		t.Errorf("%v", seen)
	}
}
