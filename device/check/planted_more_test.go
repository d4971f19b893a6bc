// This file owns the planted bugs that need more than one device or handle.

package check_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/memory"
)

// Streams of two devices exchange data over events of both.
func TestPlantedAcrossDevices(t *testing.T) {
	for _, s := range []*check.Schedule{nil, {Seed: 0}, {Seed: 1}, {Seed: 3}, {Seed: 4}} {
		for _, right := range []bool{false, true} {
			c := check.New(check.Options{Schedule: s})
			v, w := newWorld(c, 0), newWorld(c, 1)
			v.a.Fill(v.host.All(), 5)
			if right {
				v.order(v.a, w.b)
			}
			w.b.Copy(w.x.All(), v.host.All())
			if right {
				got := make([]byte, 1)
				must(w.b.Download(got, w.x.Slice(9, 1)))
				if got[0] != 5 {
					t.Errorf("under %+v the second device read %d", s, got[0])
				}
			}
			err := errors.Join(v.close(), w.close())
			var r *check.Race
			if right && err != nil || !right && !errors.As(err, &r) {
				t.Errorf("right %v, under %+v: %v", right, s, err)
			}
		}
	}
}

// Handles to memory of others share it: views of one storage overlap.
func TestPlantedImport(t *testing.T) {
	for _, right := range []bool{false, true} {
		_, err := run(t, check.Options{}, inWorld(func(w *world) {
			// The memory is a buffer of a device that nobody checks.
			other, err := openCPU()
			must(err)
			mem, err := other.Alloc(memory.Device, size, "theirs")
			must(err)
			defer func() {
				s, _ := other.NewStream("s")
				s.Free(mem)
				must(other.Close())
			}()
			all := w.dev.Borrow(memory.Device, mem.Addr(), size, "storage")
			view := w.dev.Borrow(memory.Device, mem.Addr()+100, 50, "view")
			w.a.Fill(view.All(), 1)
			if right {
				w.order(w.a, w.b)
			}
			w.b.Copy(w.x.All(), all.All())
			_ = w.dev.Sync()
			w.a.Free(view)
			w.b.Free(all)
			_ = w.dev.Sync()
		}))
		if err == nil {
			if !right {
				t.Error("a race through two handles was not found")
			}
		} else if s := fmt.Sprint(err); right || !strings.Contains(s, `bytes [100,150) of device buffer "storage"`) {
			t.Errorf("right %v: %v", right, err)
		}
	}
}

// Memory with a backdrop must not be in use while it grows, wherever it is used; other
// memory may.
func TestPlantedGrowthUnderBackdrop(t *testing.T) {
	for _, s := range schedules {
		for name, right := range map[string]bool{"in use": false, "waited for": true, "without backdrop": true} {
			_, err := run(t, check.Options{Schedule: s}, inWorld(func(w *world) {
				b, err := w.dev.Reserve(memory.Device, 2*size, "pool")
				must(err)
				w.bufs = append(w.bufs, b)
				must(w.dev.Grow(b, 100))
				if name == "without backdrop" {
					w.a.Copy(w.x.Slice(0, 100), b.All())
					must(w.dev.Grow(b, 200))
					return
				}
				must(w.dev.Backdrop(b))
				rest := w.dev.Borrow(memory.Device, b.Addr()+size, size, "rest")
				w.a.Copy(w.x.All(), rest.All())
				if name == "waited for" {
					must(w.a.Sync())
				}
				err = w.dev.Grow(b, 200)
				w.a.Free(rest)
				must(err)
			}))
			var r *check.Race
			if right && err != nil || !right && (!errors.As(err, &r) || !strings.Contains(err.Error(), "grow")) {
				t.Errorf("%s, under %+v: %v", name, s, err)
			}
		}
	}
}

// A stream that is opened after another one was closed is checked like the first.
func TestPlantedOnAStreamAfterAClosedOne(t *testing.T) {
	for _, s := range schedules {
		for _, right := range []bool{false, true} {
			_, err := run(t, check.Options{Schedule: s}, inWorld(func(w *world) {
				early := w.stream("early")
				for range 3 {
					early.Fill(w.y.All(), 1)
				}
				must(early.Close())
				late := w.stream("late")
				late.Fill(w.x.All(), 2)
				if right {
					w.order(late, w.b)
				}
				w.b.Copy(w.y.All(), w.x.All())
				_ = w.dev.Sync()
				must(late.Close())
			}))
			var r *check.Race
			if right && err != nil || !right && !errors.As(err, &r) {
				t.Errorf("right %v, under %+v: %v", right, s, err)
			}
		}
	}
}

// Who frees a handle to memory of others has done with the memory: what its owner makes of
// it is not checked against that, unless another handle has it still.
func TestFreedHandleIsForgotten(t *testing.T) {
	for _, s := range schedules {
		for _, shared := range []bool{false, true} {
			other, err := openCPU()
			must(err)
			mem, err := other.Alloc(memory.Device, size, "theirs")
			must(err)
			_, err = run(t, check.Options{Schedule: s}, inWorld(func(w *world) {
				handles := []*device.Buffer{w.dev.Borrow(memory.Device, mem.Addr(), size, "first")}
				if shared {
					handles = append(handles, w.dev.Borrow(memory.Device, mem.Addr()+100, 50, "view"))
				}
				w.a.Fill(handles[0].Slice(0, 100), 1)
				w.a.Fill(handles[0].Slice(100, 100), 2)
				w.a.Free(handles[0])
				handles[0] = w.dev.Borrow(memory.Device, mem.Addr(), size, "second")
				w.b.Fill(handles[0].Slice(0, 200), 3)
				_ = w.dev.Sync()
				for _, h := range handles {
					w.a.Free(h)
				}
				_ = w.dev.Sync()
			}))
			var r *check.Race
			if shared != errors.As(err, &r) {
				t.Errorf("shared %v, under %+v: %v", shared, s, err)
			}
			free, err := other.NewStream("s")
			must(err)
			free.Free(mem)
			must(other.Close())
		}
	}
}
