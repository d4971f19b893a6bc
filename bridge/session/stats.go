// This file owns figures and the trace.

package session

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/stowage-dev/stowage"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/policy"
	"github.com/stowage-dev/stowage/trace"
)

// Stats are figures of the steps so far; those of groups are of the last step.
type Stats struct {
	Steps    int              `json:"steps"`
	Memory   device.Usage     `json:"memory"` // that the runtime itself has taken
	Summary  stowage.Summary  `json:"summary"`
	Decision *policy.Decision `json:"decision,omitempty"`
	Rows     []RowStats       `json:"rows,omitempty"` // by name; the summary has none of them
	Room     device.Bytes     `json:"room"`           // for live rows
	// Overflows is how often there was too little room. A step that is run again for it is one more in Steps.
	Overflows int `json:"overflows"`
}

// RowStats are storages with rows, of the groups of one name. How many rows were live only
// the device knows: bytes are those of the storages.
type RowStats struct {
	Name     string                `json:"name"`
	Storages int                   `json:"storages"`
	Bytes    device.Bytes          `json:"bytes"`
	Units    map[policy.Choice]int `json:"units"` // the step that counts its rows keeps them
}

// Stats are the figures as JSON.
func (s *Session) Stats() (text []byte, err error) {
	err = s.guard(func() error {
		x := Stats{Steps: s.steps, Memory: s.dev.Memory(), Summary: s.rt.Summary(s.key), Decision: s.rt.Decision(s.key), Rows: s.rowStats(), Overflows: s.ran}
		if h := s.shelf.shelf; h != nil {
			x.Room = h.Size()
		}
		var err error
		text, err = json.Marshal(x)
		return err
	})
	return text, err
}

// rowStats are sorted by name, as the groups of a summary are.
func (s *Session) rowStats() (all []RowStats) {
	for _, r := range s.order {
		i, known := slices.BinarySearchFunc(all, r.name, func(x RowStats, name string) int { return cmp.Compare(x.Name, name) })
		if !known {
			all = slices.Insert(all, i, RowStats{Name: r.name, Units: map[policy.Choice]int{}})
		}
		all[i].Storages++
		all[i].Bytes += device.Bytes(r.bytes)
		all[i].Units[r.choice]++
	}
	return all
}

// switched is a sink that can be switched on and off.
type switched struct {
	mu   sync.Mutex
	file *os.File
	w    *trace.Writer
	sink trace.Sink // the writer, with times that count from the header's
}

// Emit hands an event on.
func (x *switched) Emit(e trace.Event) {
	x.mu.Lock()
	to := x.sink
	x.mu.Unlock()
	if to != nil {
		to.Emit(e)
	}
}

// to ends the file under way, if there is one, and goes on with another, or none.
func (x *switched) to(f *os.File, h trace.Header) (first error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.sink != nil {
		first = cmp.Or(x.w.Close(), x.file.Close())
		x.sink, x.w, x.file = nil, nil, nil
	}
	if f != nil {
		h.Began = time.Now().UnixNano()
		x.file, x.w = f, trace.NewWriter(f, h, 0)
		x.sink = trace.From(device.Now(), x.w)
	}
	return first
}

// Trace writes events of all later steps to a file; an empty path ends it.
func (s *Session) Trace(path string) error {
	return s.guard(func() error {
		var f *os.File
		if path != "" {
			var err error
			if f, err = os.Create(path); err != nil {
				return Wrong{fmt.Errorf("stowage: the trace cannot be written: %w; give a path in a folder that exists", err)}
			}
		}
		return s.sink.to(f, trace.Header{Rank: s.cfg.Rank, Compute: s.compute.Name(), Budget: int64(s.cfg.Budget)})
	})
}
