// This file owns the tests of work that is not done: scratch memory that a few ranks do not
// need, launches that a reduction can do without, and messages without bytes.

package comm

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// eventful is a device that counts its open events, and makes so many external ones.
type eventful struct {
	device.Device
	open *int
	left int
}

type countedEvent struct {
	device.Event
	open *int
}

func (d *eventful) NewEvent(f device.EventFlags) (device.Event, error) {
	if f == device.External {
		if d.left--; d.left < 0 {
			return nil, &device.DriverError{Call: "NewEvent", Code: 2}
		}
	}
	e, err := d.Device.NewEvent(f)
	if err == nil {
		*d.open++
		e = &countedEvent{e, d.open}
	}
	return e, err
}

func (d *eventful) NewStream(name string) (device.Stream, error) {
	s, err := d.Device.NewStream(name)
	return plainStream{s}, err
}

func (e *countedEvent) Close() error {
	*e.open--
	return e.Event.Close()
}

// plainStream hands the events of the device below to its stream.
type plainStream struct{ device.Stream }

func (s plainStream) Record(e device.Event) { s.Stream.Record(e.(*countedEvent).Event) }
func (s plainStream) Wait(e device.Event)   { s.Stream.Wait(e.(*countedEvent).Event) }

// A communicator of more ranks than a launch takes sources has scratch memory, and one of
// fewer has none. If an event of it cannot be made, everything is given back.
func TestScratchOfManyRanks(t *testing.T) {
	for ranks, want := range map[int]int{kernels.MaxReduceSources: 0, kernels.MaxReduceSources + 1: kernels.MaxReduceSources + 1} {
		for left := 0; left <= want; left++ {
			open := 0
			var devs []device.Device
			for r := range ranks {
				d, err := openCPU(r)
				if err != nil {
					t.Fatal(err)
				}
				n := 0
				if r < left {
					n = 1
				}
				devs = append(devs, &eventful{d, &open, n})
			}
			cs, err := NewLocal(devs, Options{scratch: 64})
			if (err == nil) != (left == want) {
				t.Errorf("%d ranks, %d events: %v", ranks, left, err)
			}
			if err == nil {
				n := 0
				for _, x := range cs[0].(*Local).g.reducers {
					if x.room != nil {
						n++
					}
				}
				if n != want {
					t.Errorf("%d ranks have %d scratch buffers, want %d", ranks, n, want)
				}
				for _, c := range cs {
					if err := c.Close(); err != nil {
						t.Error(err)
					}
				}
			}
			if open != 0 {
				t.Errorf("%d ranks, %d events: %d events are left open", ranks, left, open)
			}
			for _, d := range devs {
				if err := d.Close(); err != nil {
					t.Error(err)
				}
			}
		}
	}
}

// A reduction of many ranks takes as few launches as the scratch memory allows: two for
// each part that fits.
func TestLaunchesOfManyRanks(t *testing.T) {
	const n = kernels.MaxReduceSources + 1
	for _, c := range []struct {
		t     Type
		bytes memory.Bytes
		want  uint64
	}{{F32, 64, 2}, {F32, 68, 4}, {BF16, 32, 2}, {BF16, 34, 4}} {
		x := ofTest(t, n, 1, Options{scratch: 64}) // 16 numbers
		err := Run(x.comms, func(r Comm) error {
			s, b := x.streamAndBuffer(r)
			r.ReduceScatter(s, b.Slice(half, c.bytes), b.Slice(0, n*c.bytes), c.t, Sum)
			return r.Err()
		})
		if err != nil {
			t.Fatal(err)
		}
		for r, at := range x.places {
			if got := at.Counters().Launches; got != c.want {
				t.Errorf("rank %d: %d bytes of %v took %d launches, want %d", r, c.bytes, c.t, got, c.want)
			}
		}
	}
}

// A message without bytes costs nothing, and does not stand for the order of the message
// that follows it.
func TestEmptyMessages(t *testing.T) {
	program := func(ck *check.Checker) error {
		x, err := newSetting(2, 1, false, under(ck), Options{}, 1)
		if err != nil {
			return err
		}
		err = Lockstep(x.comms, func(c Comm) error {
			s, b := x.streamAndBuffer(c)
			if c.Rank() == 0 {
				s.Fill(b.Slice(0, 8), 7)
				c.Exchange(s, []Message{{1, b.Slice(16, 0)}, {1, b.Slice(0, 8)}}, nil)
				s.Fill(b.Slice(0, 8), 9)
				return c.Err()
			}
			c.Exchange(s, nil, []Message{{0, b.Slice(half+16, 0)}, {0, b.Slice(half, 8)}})
			got := make([]byte, 8)
			if err := errors.Join(c.Err(), s.Download(got, b.Slice(half, 8))); err != nil {
				return err
			}
			if string(got) != strings.Repeat("\x07", 8) {
				return fmt.Errorf("got %v", got)
			}
			return nil
		})
		copies := uint64(0)
		for _, at := range x.places {
			copies += at.Counters().Copies
		}
		if copies != 1 {
			err = errors.Join(err, fmt.Errorf("%d copies for one message with bytes", copies))
		}
		return errors.Join(err, x.close())
	}
	if err := check.Explore(check.Options{}, 3, program); err != nil {
		t.Error(err)
	}
}
