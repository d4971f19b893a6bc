// Package trace is the one format in which the runtime says what it did. It is
// pure: mechanisms emit events, whoever wants pictures reads them.
package trace

import (
	"encoding/json"
	"fmt"
	"io"
	"sync"
)

// What is what happened.
type What uint8

const (
	Begin     What = iota // a step begins
	End                   // and ends
	Save                  // a group was saved
	Leave                 // a storage's copy to the host was issued
	Return                // its copy back was issued
	Load                  // a group is needed
	Release               // and no more
	Evict                 // a storage left because there was no room
	Late                  // a storage came back when it was needed already
	Recompute             // a group is computed again
	Capture               // a scope was captured
	Replay                // and replayed
	Rerun                 // a step is done again
	Decide                // a policy was chosen
	whats
)

var names = [whats]string{"begin", "end", "save", "leave", "return", "load", "release", "evict", "late", "recompute", "capture", "replay", "rerun", "decide"}

func (w What) String() string {
	if w < whats {
		return names[w]
	}
	return fmt.Sprintf("What(%d)", uint8(w))
}

// MarshalText gives the name.
func (w What) MarshalText() ([]byte, error) { return []byte(w.String()), nil }

// UnmarshalText reads a name.
func (w *What) UnmarshalText(text []byte) error {
	for i, n := range names {
		if n == string(text) {
			*w = What(i)
			return nil
		}
	}
	return fmt.Errorf("trace: %q is no kind of event", text)
}

// Event is one thing that happened, in the order of issue.
type Event struct {
	Step       int    `json:"step"`
	Rank       int    `json:"rank"`
	What       What   `json:"what"`
	Name       string `json:"name,omitempty"` // of the group, scope or policy
	Chunk      int    `json:"chunk,omitempty"`
	Layer      int    `json:"layer,omitempty"`
	Microbatch int    `json:"microbatch,omitempty"`
	Bytes      int64  `json:"bytes,omitempty"`
	// Device and Host are what is in use of both afterwards.
	Device int64 `json:"device"`
	Host   int64 `json:"host"`
}

// Sink takes events. Emit is called in the order of issue, by one goroutine a
// rank.
type Sink interface{ Emit(Event) }

// Lines writes events as JSON lines; the first error sticks.
type Lines struct {
	mu  sync.Mutex
	enc *json.Encoder
	err error
}

// NewLines writes to w, which the caller flushes and closes.
func NewLines(w io.Writer) *Lines { return &Lines{enc: json.NewEncoder(w)} }

// Emit writes an event.
func (l *Lines) Emit(e Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = l.enc.Encode(e)
	}
}

// Err is the first error of the writer.
func (l *Lines) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}
