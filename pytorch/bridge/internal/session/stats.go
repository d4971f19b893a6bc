// This file owns statistics and the trace.

package session

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Stats are statistics of the steps so far; those of groups are of the last step.
type Stats struct {
	Steps    int              `json:"steps"`
	Memory   device.Usage     `json:"memory"` // that the runtime itself took
	Summary  memory.Summary   `json:"summary"`
	Limit    memory.Bytes     `json:"saved_limit,omitempty"`
	Decision *policy.Decision `json:"decision,omitempty"`
	Rows     []RowStats       `json:"rows,omitempty"` // by name; the summary does not have them
	Room     memory.Bytes     `json:"room"`           // of the berths
	// Overflows counts steps that had too little room. A rerun is one more in Steps.
	Overflows int `json:"overflows"`
}

// RowStats are the storages with rows of the groups of one name. Bytes are those of whole
// storages: only the device knows how many rows were live.
type RowStats struct {
	Name     string                `json:"name"`
	Storages int                   `json:"storages"`
	Bytes    memory.Bytes          `json:"bytes"`
	Units    map[memory.Choice]int `json:"units"` // the step that first counts rows keeps them
}

// Stats returns the statistics as JSON.
func (s *Session) Stats() (text []byte, err error) {
	err = s.guard(func() error {
		x := Stats{Steps: s.steps, Memory: s.dev.Memory(), Summary: s.rt.Summary(s.key), Limit: s.rt.SavedLimit(), Decision: s.rt.Decision(s.key), Rows: s.rowStats(), Overflows: s.overflows}
		if s.berths != nil {
			x.Room = s.berths.Size()
		}
		var err error
		text, err = json.Marshal(x)
		return err
	})
	return text, err
}

// rowStats returns the statistics of rows, sorted by name.
func (s *Session) rowStats() (all []RowStats) {
	for _, r := range s.order {
		i, known := slices.BinarySearchFunc(all, r.name, func(x RowStats, name string) int { return cmp.Compare(x.Name, name) })
		if !known {
			all = slices.Insert(all, i, RowStats{Name: r.name, Units: map[memory.Choice]int{}})
		}
		all[i].Storages++
		all[i].Bytes += memory.Bytes(r.bytes)
		all[i].Units[r.choice]++
	}
	return all
}

// switchedSink is a sink that can be switched on and off.
type switchedSink struct {
	mu   sync.Mutex
	file *os.File
	w    *trace.Writer
	sink trace.Sink // the writer, with times that count from the header's
}

// Emit passes an event on if the sink is on.
func (x *switchedSink) Emit(e trace.Event) {
	x.mu.Lock()
	to := x.sink
	x.mu.Unlock()
	if to != nil {
		to.Emit(e)
	}
}

// switchTo ends the current file, if there is one, and starts another, or none.
func (x *switchedSink) switchTo(f *os.File, h trace.Header) (first error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.sink != nil {
		first = cmp.Or(x.w.Close(), x.file.Close())
		x.sink, x.w, x.file = nil, nil, nil
	}
	if f != nil {
		h.Began = time.Now().UnixNano()
		x.file, x.w = f, trace.NewWriter(f, h, 0)
		x.sink = trace.Since(device.Now(), x.w)
	}
	return first
}

// Trace writes events of all later steps to a file. An empty path ends the current file.
func (s *Session) Trace(path string) error {
	return s.guard(func() error {
		var f *os.File
		if path != "" {
			var err error
			if f, err = os.Create(path); err != nil {
				return Wrong{fmt.Errorf("stowage: cannot write the trace %s: %w; give a path in a folder that exists", path, input.Cause(err))}
			}
		}
		if err := s.sink.switchTo(f, trace.Header{Rank: s.cfg.Rank, Compute: s.compute.Name(), Budget: int64(s.cfg.Limit)}); err != nil {
			return fmt.Errorf("stowage: the trace is incomplete: %w; free some space, or give another path", input.Cause(err))
		}
		return nil
	})
}
