// Package devicekit holds what the devices of this module have in common, so that
// each of them contains only what is its own. A device, or a wrapper of one, uses
//
//   - [Ledger] to account for its memory,
//   - [HeldBuffers] to refuse the replay of a graph whose memory was freed,
//   - [CheckCopy] and [CheckCopy2D] to refuse a copy that cannot be issued,
//   - [Labels] to tell streams of the same name apart.
//
// The contract that users see is package device.
//
// This file owns labels; ledger.go the accounting, held.go the memory of graphs and
// copy.go the checks of copies.
package devicekit

import "strconv"

// Labels counts the streams of a device by name.
type Labels map[string]int

// Next returns the label of a new stream: its name, followed by a number if an
// earlier stream of the device has the same name: "copy", then "copy 2".
func (l Labels) Next(name string) string {
	l[name]++
	if n := l[name]; n > 1 {
		return name + " " + strconv.Itoa(n)
	}
	return name
}
