// This file owns what the copies of an offloaded step take by themselves: the same
// sizes in the same order, on two streams that do nothing else.

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
	// pass is the one whose compute the copy belongs to: that after which it can
	// leave, or that before which it must be back.
	pass int
}

// linkRig makes the copies of a step once more. What orders them in any step is
// kept: a group comes back after it has left; and as compute does one pass after
// the other, what a pass makes leaves after all is back that earlier passes need.
// So its time is one that no step with these copies can go below, however little
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

// run makes all copies and waits for them.
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
			if e := r.back(i, pass); e != nil {
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

// back returns the end of the last copy in before the i-th copy that is for an earlier
// pass.
func (r *linkRig) back(i, pass int) device.Event {
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
