// This file owns how ranks capture together: which ranks share the work of a scope, how
// they agree on what to do, and who makes the graph.

package train

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/capture"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// together captures the scopes of a rank with the other ranks that take part in them.
type together struct{ r *rank }

// ranks returns the ranks that share the work of a scope, or nil if this one has it alone.
func (t together) ranks(scope memory.Scope) comm.Comm {
	if scope == memory.FullIteration {
		return t.r.world
	}
	return nil
}

// Agree passes a byte between the hosts of all ranks that share a scope. It is ordered
// with no work, so the host waits for no device.
func (t together) Agree(scope memory.Scope, next capture.Next) (capture.Next, error) {
	c := t.ranks(scope)
	if c == nil {
		return next, nil
	}
	all, err := c.Gather([]byte{byte(next)})
	for _, b := range all {
		next = min(next, capture.Next(b[0]))
	}
	return next, err
}

// Capture makes one graph of the work of all ranks that share a scope.
func (t together) Capture(scope memory.Scope, s device.Stream, body func() error) (capture.Captured, error) {
	return t.ranks(scope).(comm.Capturer).Capture(s, body)
}
