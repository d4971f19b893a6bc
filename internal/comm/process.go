// This file owns what a process knows of a world whose ranks live in several processes,
// and how processes agree.

package comm

import (
	"encoding/json"
	"fmt"

	"github.com/stowage-dev/stowage/device"
)

// Process says which ranks of a world live in this process, and how they reach the others.
// All processes use it in the same order. A nil Process has all ranks.
type Process struct {
	// Ranks are the ranks of this process, in rising order.
	Ranks []int
	// Join returns a rank's end of a new communicator of all ranks of all processes. The
	// rank works on dev. It may wait for the other ranks. A communicator that fails leaves
	// those of other calls alone.
	Join func(rank int, dev device.Device) (Comm, error)
	// Control is this process's end of a communicator of all processes, for messages
	// between hosts. The process with rank 0 is the first. It outlives what Join returns.
	Control Comm
	// Describe returns the words and the exit code of an error. Nil takes its text and 1.
	Describe func(err error) (text string, code int)
}

// Speaks reports whether this process has rank 0, which writes and prints for all.
func (p *Process) Speaks() bool { return p == nil || p.Control.Rank() == 0 }

// Told is the error of another process, in its words and with its exit code.
type Told struct {
	Process int
	Text    string
	Code    int
}

func (e *Told) Error() string { return e.Text }

// share is what a process passes to the others in Share.
type share struct {
	Err   *Told           `json:"err,omitempty"`
	Value json.RawMessage `json:"value,omitempty"`
}

// Share makes processes agree. If some of them pass an error, all return that of the
// first, and else all have in v, a pointer, what the first one has there. v may be nil.
func (p *Process) Share(v any, own error) error {
	if p == nil {
		return own
	}
	mine := share{}
	if own != nil {
		mine.Err = &Told{Process: p.Control.Rank(), Text: own.Error(), Code: 1}
		if p.Describe != nil {
			mine.Err.Text, mine.Err.Code = p.Describe(own)
		}
	}
	var err error
	if v != nil && p.Speaks() {
		if mine.Value, err = json.Marshal(v); err != nil {
			return err
		}
	}
	text, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	texts, err := p.Control.Gather(text)
	if err != nil {
		if own != nil {
			return own
		}
		return err
	}
	all := make([]share, len(texts))
	for i, text := range texts {
		if err := json.Unmarshal(text, &all[i]); err != nil {
			return fmt.Errorf("comm: cannot read what process %d says: %w; run the same version of the program everywhere", i, err)
		}
		switch e := all[i].Err; {
		case e != nil && i == p.Control.Rank():
			return own
		case e != nil:
			return e
		}
	}
	if v == nil || p.Speaks() {
		return nil
	}
	return json.Unmarshal(all[0].Value, v)
}

// Most returns the largest of the numbers that the processes pass.
func (p *Process) Most(n int) (int, error) {
	if p == nil {
		return n, nil
	}
	texts, err := p.Control.Gather(fmt.Append(nil, n))
	for _, text := range texts {
		var theirs int
		if _, err := fmt.Sscan(string(text), &theirs); err != nil {
			return n, err
		}
		n = max(n, theirs)
	}
	return n, err
}
