// This file owns what the measurements run on: two pairs of buffers, because copies out and
// in run at the same time, and a stream for each direction.

package bench

import (
	"cmp"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// rig holds the buffers and streams for copies of one size.
type rig struct {
	dev         device.Device
	size        memory.Bytes
	out, in     device.Stream
	accel, host [2]*device.Buffer
}

// Footprint returns the memory of both kinds that copies of one size take together.
func Footprint(size memory.Bytes) memory.Bytes { return 4 * size }

func newRig(dev device.Device, size memory.Bytes) (r *rig, err error) {
	r = &rig{dev: dev, size: size}
	defer func() {
		if err != nil {
			_ = r.close() // the first error says more
			r = nil
		}
	}()
	if r.out, err = dev.NewStream("bench out"); err != nil {
		return r, err
	}
	if r.in, err = dev.NewStream("bench in"); err != nil {
		return r, err
	}
	for i := range 2 {
		if r.accel[i], err = dev.Alloc(memory.Device, size, "bench"); err != nil {
			return r, err
		}
		if r.host[i], err = dev.Alloc(memory.Host, size, "bench"); err != nil {
			return r, err
		}
		// The first touch maps the pages of memory. It must not be measured.
		r.out.Fill(r.accel[i].All(), 1)
		r.out.Fill(r.host[i].All(), 2)
	}
	return r, r.out.Sync()
}

// close frees everything and returns the first error. It ends the streams last, because
// buffers are freed in the order of a stream.
func (r *rig) close() (first error) {
	for i := range 2 {
		for _, b := range []*device.Buffer{r.accel[i], r.host[i]} {
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
	return first
}

// settle waits for both streams.
func (r *rig) settle() error { return cmp.Or(r.out.Sync(), r.in.Sync()) }
