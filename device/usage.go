// This file owns the readings of a device's ledger.

package device

import "github.com/stowage-dev/stowage/memory"

// Usage is a reading of a device's ledger, as [Device.Memory] returns it. For each
// kind of memory, Current is the sum over its owners.
type Usage struct {
	Kind   [memory.Kinds]KindUsage `json:"kind"`
	Owners []OwnerUsage            `json:"owners"` // by kind, then largest peak first
}

// KindUsage is the account of one kind of memory. Capacity - Current bytes are free.
type KindUsage struct {
	Current  memory.Bytes `json:"current"`  // in use, pending bytes included
	Pending  memory.Bytes `json:"pending"`  // freed, but earlier work may still use them
	Peak     memory.Bytes `json:"peak"`     // the most that Current has been
	Capacity memory.Bytes `json:"capacity"` // the most that Current may be
}

// OwnerUsage is the memory of one kind that one owner holds.
type OwnerUsage struct {
	Owner   string       `json:"owner"` // as Alloc and Reserve were given it
	Kind    memory.Kind  `json:"kind"`
	Current memory.Bytes `json:"current"` // pending bytes included
	Peak    memory.Bytes `json:"peak"`
}
