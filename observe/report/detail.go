// This file owns the details of a step: where each storage was, and what each stream
// did.

package report

import (
	"cmp"
	"slices"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// The most spans and storages of a step that are shown: the longest and the largest.
const (
	mostSpans    = 20_000
	mostStorages = 20_000
)

// The places of a storage, as the page knows them.
const (
	onDevice   = "device"
	offloading = "out"
	onHost     = "host"
	reloading  = "in"
)

// details returns the first step, the one with the peak and the last, each once.
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

// life is a storage whose step is being read.
type life struct {
	Storage
	where string // its place, or empty
	since int64
}

// move ends the current stay and begins another.
func (x *life) move(where string, at int64) {
	if x.where == where {
		return
	}
	if x.where != "" && (at > x.since || where == "" && len(x.Stays) == 0) {
		x.Stays = append(x.Stays, Stay{x.where, millis(x.since), millis(at)})
	}
	x.where, x.since = where, at
}

// storages returns the storages of a step, and how many it left out. A storage counts
// as offloading until its device memory is free, and as reloading until compute needs
// it.
func storages(decided []moment, end int64) (out []Storage, cut int) {
	all := map[int]*life{}
	var order []*life
	saved := map[memory.GroupID][]*life{}
	for _, m := range decided {
		m.at = min(m.at, end)
		if m.Kind == trace.Load && m.Storage == 0 {
			for _, x := range saved[groupOf(m.Event)] {
				if x.where == reloading {
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

// groupOf returns the group of an event.
func groupOf(e *trace.Event) memory.GroupID {
	return memory.GroupID{Name: e.Name, Chunk: e.Chunk, Layer: e.Layer, Microbatch: e.Microbatch}
}

// follow applies an event of the storage.
func (x *life) follow(m moment) {
	onTheHost := m.Tier == memory.Host
	switch m.Kind {
	case trace.Alloc:
		switch {
		case onTheHost && x.where == onDevice:
			x.move(offloading, m.at)
		case !onTheHost && x.where == onHost:
			x.move(reloading, m.at)
		case !onTheHost && x.where == "":
			x.move(onDevice, m.at)
		}
		if !onTheHost {
			x.Bytes, x.Offset = max(x.Bytes, m.Bytes), m.Offset
		}
	case trace.Offload:
		if x.where == onDevice {
			x.move(offloading, m.at)
		}
	case trace.Reload:
		x.move(reloading, m.at)
	case trace.Free:
		switch {
		case !onTheHost && x.where == offloading:
			x.move(onHost, m.at)
		case !onTheHost && x.where == onDevice, onTheHost && x.where == onHost:
			x.move("", m.at)
		case onTheHost && x.where == offloading: // it was needed before its device memory was
			x.move(onDevice, m.at)
		}
	}
}
