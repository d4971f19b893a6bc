// This file owns steps in full: every storage and where it was, every span of every
// stream.

package report

import (
	"cmp"
	"slices"

	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/trace"
)

// The most that a step in full shows; of storages the largest, of spans the longest.
const (
	mostSpans    = 20_000
	mostStorages = 20_000
)

// Where a storage is.
const (
	onDevice = "device"
	leaving  = "out"
	onHost   = "host"
	coming   = "in"
)

// details are the first step, the one with the peak and the last, each once.
func details(l *timeline, peak int64) (out []Detail) {
	out = []Detail{}
	n := len(l.steps)
	if n == 0 {
		return out
	}
	top := l.stepAt(peak)
	for i, why := range map[int]string{0: "first", n - 1: "last", top: "peak"} {
		if i == top {
			why = "peak"
		}
		b := l.steps[i]
		d := Detail{Step: b.step, Why: why, Begin: millis(b.begin), End: millis(b.end)}
		d.Storages, d.CutStorages = storages(l.decided[b.first:b.last], b.end)
		d.Streams, d.Cut = streams(l.spans, b)
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b Detail) int { return cmp.Compare(a.Begin, b.Begin) })
	return out
}

// life is a storage under way.
type life struct {
	Storage
	where string // or nowhere
	since int64
}

// move ends a stay and begins another.
func (x *life) move(where string, at int64) {
	if x.where == where {
		return
	}
	if x.where != "" && (at > x.since || where == "" && len(x.Stays) == 0) {
		x.Stays = append(x.Stays, Stay{x.where, millis(x.since), millis(at)})
	}
	x.where, x.since = where, at
}

// storages follows those of a step. Copies go on beside compute; a storage counts as on
// its way until compute may use the place that it leaves, or needs it back.
func storages(decided []moment, end int64) (out []Storage, cut int) {
	all := map[int]*life{}
	var order []*life
	saved := map[schedule.Group][]*life{}
	for _, m := range decided {
		m.at = min(m.at, end)
		if m.What == trace.Load && m.Storage == 0 {
			for _, x := range saved[groupOf(m.Event)] {
				if x.where == coming {
					x.move(onDevice, m.at)
				}
			}
		}
		if m.Storage <= 0 {
			continue
		}
		x := all[m.Storage]
		if x == nil {
			x = &life{Storage: Storage{Offset: -1, Stays: []Stay{}}}
			all[m.Storage], order = x, append(order, x)
		}
		if g := groupOf(m.Event); g.Name != "" && x.Group == "" {
			x.Group, x.Chunk, x.Layer, x.Micro = g.Name, g.Chunk, g.Layer, g.Microbatch
			saved[g] = append(saved[g], x)
		}
		x.follow(m)
	}
	out = []Storage{}
	for _, x := range order {
		if x.move("", max(end, x.since)); x.Bytes > 0 {
			out = append(out, x.Storage)
		}
	}
	if cut = len(out) - mostStorages; cut <= 0 {
		return out, 0
	}
	slices.SortStableFunc(out, func(a, b Storage) int { return cmp.Compare(b.Bytes, a.Bytes) })
	return out[:mostStorages], cut
}

func groupOf(e *trace.Event) schedule.Group {
	return schedule.Group{Name: e.Name, Chunk: e.Chunk, Layer: e.Layer, Microbatch: e.Microbatch}
}

// follow is one event of a storage.
func (x *life) follow(m moment) {
	onTheHost := m.Tier == trace.Host
	switch m.What {
	case trace.Alloc:
		switch {
		case onTheHost && x.where == onDevice:
			x.move(leaving, m.at)
		case !onTheHost && x.where == onHost:
			x.move(coming, m.at)
		case !onTheHost && x.where == "":
			x.move(onDevice, m.at)
		}
		if !onTheHost {
			x.Bytes, x.Offset = max(x.Bytes, m.Bytes), m.Offset
		}
	case trace.Leave:
		if x.where == onDevice {
			x.move(leaving, m.at)
		}
	case trace.Return:
		x.move(coming, m.at)
	case trace.Free:
		switch {
		case !onTheHost && x.where == leaving:
			x.move(onHost, m.at)
		case !onTheHost && x.where == onDevice, onTheHost && x.where == onHost:
			x.move("", m.at)
		case onTheHost && x.where == leaving: // it did not have to go
			x.move(onDevice, m.at)
		}
	}
}
