// This file owns how ranks capture together: which ranks share the work of a scope, how
// they agree on what to do, and who makes the graph.

package train

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/capture"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/memory"
)

// sharedScopes captures the scopes of a rank with the other ranks that take part in them.
type sharedScopes struct{ r *rank }

// ranks returns the ranks that share the work of a scope, or nil if this one has it alone.
func (t sharedScopes) ranks(scope memory.Scope) comm.Comm {
	switch scope {
	case memory.FullIteration:
		return t.r.world
	case memory.MoE:
		return t.r.env.Comm
	}
	return nil
}

// Shares reports whether other ranks take part in a scope.
func (t sharedScopes) Shares(scope memory.Scope) bool { return t.ranks(scope) != nil }

// Agree passes a byte between the hosts of all ranks that share a scope. It is ordered
// with no work, so the host waits for no device.
func (t sharedScopes) Agree(scope memory.Scope, next capture.Next) (capture.Next, error) {
	all, err := t.ranks(scope).Gather([]byte{byte(next)})
	for _, b := range all {
		next = min(next, capture.Next(b[0]))
	}
	return next, err
}

// Capture makes one graph of the work of all ranks that share a scope.
func (t sharedScopes) Capture(scope memory.Scope, s device.Stream, body func() error) (engine.Graph, error) {
	return t.ranks(scope).(comm.Capturer).Capture(s, body)
}
