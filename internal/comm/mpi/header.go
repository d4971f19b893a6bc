// This file owns the letters that pass before the bytes of a call.

package mpi

import (
	"github.com/stowage-dev/stowage/internal/comm/letter"
	"github.com/stowage-dev/stowage/memory"
)

// call is one call of this rank.
type call struct {
	letter.Call
	serial uint64 // among its collectives, or among its splits
}

// head is a letter to or from a peer.
type head struct {
	peer int
	tag  int
	send bool
	len  memory.Bytes // that are sent, or expected
	come bool         // it has arrived
	raw  [letter.Size]byte
}

func (h *head) encode(c *call) { (&letter.Letter{Call: c.Call, Sent: h.len}).Write(h.raw[:]) }

// disagreement compares a received letter with a call of this rank. It returns what is
// wrong, or nothing.
func (g *group) disagreement(c *call, h *head) string {
	theirs := letter.Read(h.raw[:])
	return c.Disagreement(g.ranks, g.me, h.peer, &theirs, h.len)
}
