// This file owns what a process knows of a world whose ranks live in several processes.

package comm

import "github.com/stowage-dev/stowage/device"

// Process says which ranks of a world live in this process, and how they reach the others.
// All processes use it in the same order.
type Process struct {
	// Ranks are the ranks of this process, in rising order.
	Ranks []int
	// Join returns a rank's end of a new communicator of all ranks of all processes. The
	// rank works on dev. It may wait for the other ranks. A communicator that fails leaves those of other calls alone.
	Join func(rank int, dev device.Device) (Comm, error)
	// Control is this process's end of a communicator of all processes, for messages
	// between hosts. The process with rank 0 is the first. It outlives what Join returns.
	Control Comm
}
