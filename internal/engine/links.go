// This file owns the measurement of the links between device and host memory.

package engine

import (
	"errors"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// probe is the size of a measured copy: long enough that latency hardly counts on any
// link, short enough that Open takes a moment. It is halved, down to least, if there is no
// memory for it. A copy of small bytes shows the latency.
const (
	probe = 32 * memory.MiB
	least = memory.MiB
	small = 4 * memory.KiB
)

// MeasureLinks copies between device and host memory, in each direction alone and in both
// at once, and returns the rates. It needs 64 MiB of both kinds of memory meanwhile, or
// less if there is less.
func MeasureLinks(dev device.Device) (links memory.Links, err error) {
	for n := probe; ; n /= 2 {
		l := &linkBench{dev: dev}
		if err = l.open(n); err == nil {
			links, err = l.measure(n)
		}
		err = errors.Join(err, l.close())
		var full *device.OutOfMemory
		if !errors.As(err, &full) || n <= least {
			return links, err
		}
	}
}

func (l *linkBench) measure(n memory.Bytes) (memory.Links, error) {
	// The first copies warm up, and a busy machine disturbs others. That only makes them
	// longer, so the shortest of five counts.
	var best [4]time.Duration
	for round := range 5 {
		for i, x := range []struct {
			out, in bool
			n       memory.Bytes
		}{{true, false, small}, {true, false, n}, {false, true, n}, {true, true, n}} {
			t, err := l.time(x.out, x.in, x.n)
			if err != nil {
				return memory.Links{}, err
			}
			if round == 0 || t < best[i] {
				best[i] = t
			}
		}
	}
	return linksOf(best, n), nil
}

// linksOf returns the rates of links on which a small copy and copies of n bytes out, in and
// both ways at once take so long.
func linksOf(took [4]time.Duration, n memory.Bytes) memory.Links {
	late := min(took[0], took[1]/2, took[2]/2)
	rate := func(n memory.Bytes, t time.Duration) float64 {
		return float64(n) / max(t-late, time.Nanosecond).Seconds()
	}
	return memory.Links{Out: rate(n, took[1]), In: rate(n, took[2]), Both: rate(2*n, took[3]), Latency: late}
}

type linkBench struct {
	dev     device.Device
	streams [2]device.Stream
	marks   [3]device.Event
	bufs    []*device.Buffer // device and host for copies out, then for copies in
}

func (l *linkBench) open(n memory.Bytes) (err error) {
	for i, name := range []string{"measure out", "measure in"} {
		if l.streams[i], err = l.dev.NewStream(name); err != nil {
			return err
		}
	}
	for i := range l.marks {
		if l.marks[i], err = l.dev.NewEvent(device.Timing); err != nil {
			return err
		}
	}
	for _, k := range []memory.Kind{memory.Device, memory.Host, memory.Device, memory.Host} {
		b, err := l.dev.Alloc(k, n, "measuring the links")
		if err != nil {
			return err
		}
		l.bufs = append(l.bufs, b)
	}
	return nil
}

// time returns how long copies take that begin together.
func (l *linkBench) time(out, in bool, n memory.Bytes) (time.Duration, error) {
	a, b := l.streams[0], l.streams[1]
	a.Record(l.marks[0])
	b.Wait(l.marks[0])
	if out {
		a.Copy(l.bufs[1].Slice(0, n), l.bufs[0].Slice(0, n))
	}
	if in {
		b.Copy(l.bufs[2].Slice(0, n), l.bufs[3].Slice(0, n))
	}
	a.Record(l.marks[1])
	b.Record(l.marks[2])
	if err := errors.Join(a.Sync(), b.Sync()); err != nil {
		return 0, err
	}
	var longest time.Duration
	for _, end := range l.marks[1:] {
		d, err := end.Since(l.marks[0])
		if err != nil {
			return 0, err
		}
		longest = max(longest, d)
	}
	return longest, nil
}

func (l *linkBench) close() (err error) {
	for _, b := range l.bufs {
		l.streams[0].Free(b)
	}
	for _, s := range l.streams {
		if s != nil {
			err = errors.Join(err, s.Close())
		}
	}
	for _, e := range l.marks {
		if e != nil {
			err = errors.Join(err, e.Close())
		}
	}
	return err
}
