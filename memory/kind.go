// This file owns the two kinds of memory.

package memory

import "strconv"

// Kind says where memory lies.
type Kind uint8

const (
	// Device is the accelerator's own memory. The host cannot read it, not even on
	// the CPU device.
	Device Kind = iota
	// Host is pinned host memory, which the accelerator reaches over its link.
	Host
	// Kinds is the number of kinds.
	Kinds = 2
)

// String returns "device" or "host".
func (k Kind) String() string {
	switch k {
	case Device:
		return "device"
	case Host:
		return "host"
	}
	return "Kind(" + strconv.Itoa(int(k)) + ")"
}
