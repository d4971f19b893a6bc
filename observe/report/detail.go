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
	type reading struct {
		*lives
		*work
	}
	readings := map[int]reading{}
	for _, i := range []int{0, n - 1, top} {
		b := l.steps[i]
		readings[i] = reading{newLives(b.end), &work{border: b, all: map[string]*Stream{}}}
	}
	count := 0
	for i := range l.parts {
		l.parts[i].each(func(m moment) {
			for _, r := range readings {
				if count >= r.first && count < r.last {
					r.follow(m)
				}
			}
			count++
		}, func(m moment) {
			for _, r := range readings {
				r.work.add(m)
			}
		}, nil)
	}
	for i, why := range map[int]string{0: "first", n - 1: "last", top: "peak"} {
		if i == top {
			why = "peak"
		}
		b := l.steps[i]
		d := Detail{Step: b.step, Why: why, Begin: millis(b.begin), End: millis(b.end)}
		d.Storages, d.CutStorages = readings[i].storages()
		d.Streams, d.Cut = readings[i].streams()
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

// lives follows the storages of a step that ends at some time.
type lives struct {
	end   int64
	all   map[int]*life
	order []*life
	saved map[memory.GroupID][]*life
	more  map[int]bool // storages beyond the number that is followed
}

// mostLives is how many storages of a step are followed; the largest of them are shown.
const mostLives = 8 * mostStorages

func newLives(end int64) *lives {
	return &lives{end: end, all: map[int]*life{}, saved: map[memory.GroupID][]*life{}, more: map[int]bool{}}
}

// follow applies a decision of the step.
func (l *lives) follow(m moment) {
	m.at = min(m.at, l.end)
	if m.Kind == trace.Load && m.Storage == 0 {
		for _, x := range l.saved[groupOf(m.Event)] {
			if x.where == reloading {
				x.move(onDevice, m.at)
			}
		}
	}
	if m.Storage <= 0 {
		return
	}
	x := l.all[m.Storage]
	if x == nil {
		if len(l.order) == mostLives {
			l.more[m.Storage] = true
			return
		}
		x = &life{Storage: Storage{Offset: -1, Stays: []Stay{}}}
		l.all[m.Storage], l.order = x, append(l.order, x)
	}
	if g := groupOf(m.Event); g.Name != "" && x.Group == "" {
		x.Group, x.Chunk, x.Layer, x.Micro = g.Name, g.Chunk, g.Layer, g.Microbatch
		l.saved[g] = append(l.saved[g], x)
	}
	x.follow(m)
}

// storages returns the storages of the step, and how many it left out. A storage counts
// as offloading until its device memory is free, and as reloading until compute needs it.
func (l *lives) storages() (out []Storage, cut int) {
	out = []Storage{}
	for _, x := range l.order {
		if x.move("", max(l.end, x.since)); x.Bytes > 0 {
			out = append(out, x.Storage)
		}
	}
	if cut = len(out) - mostStorages; cut <= 0 {
		return out, 0
	}
	slices.SortStableFunc(out, func(a, b Storage) int { return cmp.Compare(b.Bytes, a.Bytes) })
	return out[:mostStorages], cut + len(l.more)
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
