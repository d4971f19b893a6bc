// This file owns the time of an offloaded step's copies alone: the same sizes in the same
// order, on two streams without other work.

package bench

import (
	"cmp"
	"slices"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// carried is one copy of a step, in the order of issue.
type carried struct {
	in    bool
	group memory.GroupID
	bytes int64
	// pass is the pass that the copy belongs to: the one after which it can be offloaded,
	// or the one before which it must be reloaded.
	pass int
}

// linkRig repeats the copies of a step. It keeps the order that every step has: a group is
// reloaded after it was offloaded, and a pass's groups are offloaded after everything is
// back that earlier passes need. No step with these copies can be shorter, however little
// it computes.
type linkRig struct {
	out, in device.Stream
	mem     [2][2]*device.Buffer // by direction: from and to
	events  []device.Event
	copies  []carried
}

func newLinkRig(dev device.Device, copies []carried) (r *linkRig, err error) {
	r = &linkRig{copies: copies}
	defer func() {
		if err != nil {
			_ = r.close() // the first error says more
			r = nil
		}
	}()
	if r.out, err = dev.NewStream("plain out"); err != nil {
		return r, err
	}
	if r.in, err = dev.NewStream("plain in"); err != nil {
		return r, err
	}
	var most int64
	for _, c := range copies {
		most = max(most, c.bytes)
		e, err := dev.NewEvent(0)
		if err != nil {
			return r, err
		}
		r.events = append(r.events, e)
	}
	for dir, kinds := range [2][2]memory.Kind{{memory.Device, memory.Host}, {memory.Host, memory.Device}} {
		for i, kind := range kinds {
			if r.mem[dir][i], err = dev.Alloc(kind, memory.Bytes(max(most, 1)), "plain copies"); err != nil {
				return r, err
			}
			r.out.Fill(r.mem[dir][i].All(), 1)
		}
	}
	return r, r.out.Sync()
}

// run issues all copies and waits for them.
func (r *linkRig) run() (time.Duration, error) {
	began := time.Now()
	left := map[memory.GroupID]device.Event{}
	pass := -1
	for i, c := range r.copies {
		s, from, to := r.out, r.mem[0][0], r.mem[0][1]
		switch {
		case c.in:
			s, from, to = r.in, r.mem[1][0], r.mem[1][1]
			if e := left[c.group]; e != nil {
				s.Wait(e)
			}
		case c.pass > pass:
			pass = c.pass
			if e := r.lastReload(i, pass); e != nil {
				s.Wait(e)
			}
		}
		s.Copy(to.Slice(0, memory.Bytes(c.bytes)), from.Slice(0, memory.Bytes(c.bytes)))
		s.Record(r.events[i])
		if !c.in {
			left[c.group] = r.events[i]
		}
	}
	err := cmp.Or(r.out.Sync(), r.in.Sync())
	return time.Since(began), err
}

// lastReload returns the end of the last reload before copy i that an earlier pass needs.
func (r *linkRig) lastReload(i, pass int) device.Event {
	for k, c := range slices.Backward(r.copies[:i]) {
		if c.in && c.pass < pass {
			return r.events[k]
		}
	}
	return nil
}

func (r *linkRig) close() (first error) {
	for _, bs := range r.mem {
		for _, b := range bs {
			if b != nil {
				r.out.Free(b)
			}
		}
	}
	for _, s := range []device.Stream{r.out, r.in} {
		if s != nil {
			first = cmp.Or(first, s.Sync(), s.Close())
		}
	}
	for _, e := range r.events {
		first = cmp.Or(first, e.Close())
	}
	return first
}
