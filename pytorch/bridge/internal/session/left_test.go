// This file owns the test that sessions leave nothing behind, whatever fails.

package session

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

// kept is a device that the test closes, not the session.
type kept struct{ device.Device }

func (kept) Close() error { return nil }

// Steps on several streams, with rows, limits and abandoned steps between, close every
// event and stream and free all memory, also if any of their calls fails.
func TestSessionsLeaveNothingOpen(t *testing.T) {
	const size, rowBytes = 4096, 64
	work := func(dev device.Device) (err error) {
		mine, err := dev.NewStream("caller")
		if err != nil {
			return err
		}
		mem, err := dev.Alloc(memory.Device, 64*size, "caller")
		if err != nil {
			return errors.Join(err, mine.Close())
		}
		defer func() {
			mine.Free(mem)
			err = errors.Join(err, mine.Close())
		}()
		mine.Upload(mem.Slice(0, 8), binary.LittleEndian.AppendUint64(nil, 5)) // the number of rows
		if err := mine.Sync(); err != nil {
			return err
		}
		next := memory.Bytes(1)
		take := func() uint64 {
			next = next%63 + 1
			return uint64(mem.Addr()) + uint64(next*size)
		}
		s, err := openOn(backend{
			Device:  kept{dev},
			stream:  func(handle uint64) (device.Stream, error) { return dev.NewStream(fmt.Sprint("compute ", handle)) },
			relaxed: func(call func()) { call() },
		}, Config{Device: "cpu", Limit: 2 * size, Links: memory.Links{Out: 1e9, In: 1e9}}, func(_, _ uint64) uint64 { return take() })
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.Close()) }()
		for i := range 5 {
			if err := s.Begin("key", uint64(i%3)); err != nil {
				return err
			}
			var groups []uint64
			for k := range 4 {
				x := Storage{ID: uint64(k + 1), Address: take(), Bytes: size}
				if k == 2 {
					x.Rows, x.RowBytes = uint64(mem.Addr()), rowBytes
				}
				n, _, err := s.Save(fmt.Sprint("g", k), []Storage{x})
				if err != nil {
					return err
				}
				groups = append(groups, n)
			}
			for k := 3; k >= 0 && i != 2; k-- { // the third step is abandoned
				if _, _, err := s.Load(groups[k]); err != nil {
					return err
				}
				if _, err := s.Release(groups[k]); err != nil {
					return err
				}
			}
			if _, err := s.End(i == 2); err != nil {
				return err
			}
			if err := s.Check(uint64((i + 1) % 3)); err != nil && !errors.As(err, new(*Overflow)) {
				return err
			}
		}
		return nil
	}
	open := func() (device.Device, error) { return cpu.Open(cpu.Options{CopyThreads: 1}) }
	for _, class := range []check.Class{check.Allocs, check.Grows, check.Copies, check.Launches, check.Makes} {
		f, err := check.FailEach(class, 1, open, work)
		// Where host memory cannot grow, what there is becomes the limit.
		f.Wrong = slices.DeleteFunc(f.Wrong, func(err error) bool { return class == check.Grows && errors.As(err, new(*TooSmall)) })
		if err != nil || len(f.Wrong) > 0 || f.Calls == 0 {
			t.Errorf("%v: %+v, %v", class, f, err)
		}
	}
}
