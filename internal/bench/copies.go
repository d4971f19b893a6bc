// This file owns the measurement of copies.

package bench

import (
	"sync"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/memcopy"
	"github.com/stowage-dev/stowage/memory"
)

// Direction says from where to where bytes go.
type Direction string

const (
	Out    Direction = "out"    // device memory to host memory
	In     Direction = "in"     // host memory to device memory
	Both   Direction = "both"   // out and in at the same time, each of the size
	Device Direction = "device" // inside device memory
	Host   Direction = "host"   // inside host memory
)

// Directions returns all directions in the order of the table.
func Directions() []Direction { return []Direction{Out, In, Both, Device, Host} }

// pair is one copy.
type pair struct{ dst, src *device.Buffer }

// pairs returns the copies that one piece of work of a direction consists of; they
// run at the same time.
func (r *rig) pairs(d Direction) []pair {
	switch d {
	case Out:
		return []pair{{r.host[0], r.accel[0]}}
	case In:
		return []pair{{r.accel[0], r.host[0]}}
	case Both:
		return []pair{{r.host[0], r.accel[0]}, {r.accel[1], r.host[1]}}
	case Device:
		return []pair{{r.accel[1], r.accel[0]}}
	case Host:
		return []pair{{r.host[1], r.host[0]}}
	}
	panic("bench: unknown direction " + string(d))
}

// moved returns how many bytes one piece of work counts. A link counts the bytes that it
// carries, in both directions if both are used. Memory counts the bytes that it reads and
// writes.
func moved(d Direction, size memory.Bytes) memory.Bytes {
	if d == Out || d == In {
		return size
	}
	return 2 * size
}

// Copy is one line of the table.
type Copy struct {
	Direction Direction    `json:"direction"`
	Via       string       `json:"via"` // "stream", or what graphs.go adds
	Size      memory.Bytes `json:"size"`
	GBps      float64      `json:"gbps"`
	// Plain is the fastest plain copy of the same bytes. It is empty if the host cannot
	// copy them.
	Plain     string  `json:"plain,omitempty"`
	PlainGBps float64 `json:"plain_gbps,omitempty"`
	Ratio     float64 `json:"ratio,omitempty"` // GBps / PlainGBps
}

// lineOf returns the line of a copy that took so long.
func lineOf(d Direction, via string, size memory.Bytes, took time.Duration) Copy {
	return Copy{Direction: d, Via: via, Size: size, GBps: gbps(moved(d, size), took)}
}

// beside returns the line with the best plain copy, which took so long.
func (c Copy) beside(plain string, took time.Duration) Copy {
	c.Plain, c.PlainGBps = plain, gbps(moved(c.Direction, c.Size), took)
	c.Ratio = c.GBps / c.PlainGBps
	return c
}

// Copies measures one size in the given directions and calls done with each
// line as it is ready.
func Copies(dev device.Device, o Options, size memory.Bytes, ds []Direction, done func(Copy) error) error {
	r, err := newRig(dev, size)
	if err != nil {
		return err
	}
	for _, d := range ds {
		if err = r.copyLines(o, d, done); err != nil {
			break
		}
	}
	if cerr := r.close(); err == nil {
		err = cerr
	}
	return err
}

// copyLines measures one direction. The first line is the copy by a stream, which is
// compared with the plain copies.
func (r *rig) copyLines(o Options, d Direction, done func(Copy) error) (err error) {
	ways := []way{{"stream", 1, r.streamCopy(d)}}
	if d == Device && o.Graphs {
		more, end, err := r.otherCopies()
		if err != nil {
			return err
		}
		defer end()
		ways = append(ways, more...)
	}
	devices := len(ways)
	if o.Plain && r.dev.Info().Backend == "cpu" {
		ways = append(ways, r.plainCopies(d)...)
	}
	times, err := o.compare(ways)
	if err != nil {
		return err
	}
	for i, w := range ways[:devices] {
		c := lineOf(d, w.name, r.size, times[i])
		if i == 0 && devices < len(ways) {
			best, two, err := o.compareFastest(w, ways[devices:], times[devices:])
			if err != nil {
				return err
			}
			c = lineOf(d, w.name, r.size, two[0]).beside(best, two[1])
		}
		if err := done(c); err != nil {
			return err
		}
	}
	return nil
}

// streamCopy returns the copy to judge. It is issued to streams, one for each copy that
// runs at the same time.
func (r *rig) streamCopy(d Direction) func(int) error {
	streams := []device.Stream{r.out, r.in}
	pairs := r.pairs(d)
	return func(n int) error {
		for range n {
			for i, p := range pairs {
				streams[i].Copy(p.dst.All(), p.src.All())
			}
		}
		return r.settle()
	}
}

// plainCopies returns what a program without a device would do with the same bytes:
// one thread with each kind of instruction, and all threads together.
func (r *rig) plainCopies(d Direction) (ways []way) {
	for _, v := range memcopy.Variants() {
		if v.Supported {
			ways = append(ways, way{v.Name, 1, r.plainCopy(d, v.Func)})
		}
	}
	return append(ways, way{"parallel", 1, r.plainCopy(d, func(dst, src []byte) { memcopy.Parallel(dst, src, 0) })})
}

func (r *rig) plainCopy(d Direction, cp func(dst, src []byte)) func(int) error {
	type slices struct{ dst, src []byte }
	var all []slices
	for _, p := range r.pairs(d) {
		all = append(all, slices{r.bytes(p.dst), r.bytes(p.src)})
	}
	return func(n int) error {
		var side sync.WaitGroup
		for _, s := range all[1:] {
			side.Go(func() {
				for range n {
					cp(s.dst, s.src)
				}
			})
		}
		for range n {
			cp(all[0].dst, all[0].src)
		}
		side.Wait()
		return nil
	}
}

// bytes returns a buffer's bytes on the CPU device. The benchmark reads them as a kernel
// would, while no stream has work.
func (r *rig) bytes(b *device.Buffer) []byte {
	return device.Slice[byte](uint64(b.Addr()), int(r.size))
}
