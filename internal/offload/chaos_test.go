// This file owns random steps beside the obvious model: a storage holds the byte it
// was filled with, wherever it has been.

package offload

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// chaos is a program of random calls, some of them in scopes, under random plans
// that need not fit, with budgets that are often too small.
type chaos struct {
	rng     *rand.Rand
	dev     device.Device
	compute device.Stream
	m       *Manager
	seen    *device.Buffer // what loads saw
	want    []byte
	owned   []*Storage
	value   map[*Storage]byte
	of      map[memory.GroupID][]*Storage
	saved   []memory.GroupID
	loaded  []memory.GroupID
	groups  int
	full    int // steps that ended without room
}

const looks = 400

func (c *chaos) pick(n int) (int, bool) {
	if n == 0 {
		return 0, false
	}
	return c.rng.IntN(n), true
}

// call makes one random call.
func (c *chaos) call(borrowed bool) error {
	switch c.rng.IntN(8) {
	case 0, 1:
		s, err := c.storage(borrowed && c.rng.IntN(3) == 0)
		if err != nil {
			return err
		}
		c.value[s] = byte(1 + c.rng.IntN(250))
		c.compute.Fill(s.Range(), c.value[s])
		c.owned = append(c.owned, s)
	case 2, 3:
		return c.save()
	case 4:
		if i, ok := c.pick(len(c.owned)); ok {
			c.owned[i].Free()
			c.owned = slices.Delete(c.owned, i, i+1)
		}
	case 5, 6:
		if i, ok := c.pick(len(c.saved)); ok {
			g := c.saved[i]
			if err := c.m.Load(g); err != nil {
				return err
			}
			c.saved, c.loaded = slices.Delete(c.saved, i, i+1), append(c.loaded, g)
			c.look(g)
		}
	case 7:
		if i, ok := c.pick(len(c.loaded)); ok {
			c.look(c.loaded[i])
			c.m.Release(c.loaded[i])
			c.loaded = slices.Delete(c.loaded, i, i+1)
		}
	}
	return nil
}

func (c *chaos) storage(borrowed bool) (*Storage, error) {
	n := memory.Bytes(1 + c.rng.IntN(3000))
	if !borrowed {
		return c.m.Alloc(n)
	}
	b, err := c.dev.Alloc(memory.Device, n, "borrowed")
	if err != nil {
		return nil, err
	}
	return c.m.Borrow(b.All(), func() { c.compute.Free(b) })
}

func (c *chaos) save() error {
	var ts []Tensor
	var of []*Storage
	for range 1 + c.rng.IntN(3) {
		if i, ok := c.pick(len(c.owned)); ok {
			t := flat(c.owned[i])
			t.Stay = c.rng.IntN(10) == 0
			if c.rng.IntN(4) == 0 { // every third byte
				t.Shape, t.Strides = []int{(t.Shape[0] + 2) / 3}, []int{3}
			}
			ts, of = append(ts, t), append(of, c.owned[i])
		}
	}
	g := memory.GroupID{Name: "chaos", Layer: c.groups}
	c.groups++
	if _, err := c.m.Save(g, ts...); err != nil {
		return err
	}
	c.saved, c.of[g] = append(c.saved, g), of
	return nil
}

// look copies the ends of a group's tensors to where the test compares them.
func (c *chaos) look(g memory.GroupID) {
	for i, s := range c.m.Saved(g) {
		r := s.Tensor().Range()
		for _, at := range []memory.Bytes{0, r.Len - 1} {
			if len(c.want) < looks {
				c.compute.Copy(c.seen.Slice(memory.Bytes(len(c.want)), 1), r.Slice(at, 1))
				c.want = append(c.want, c.value[c.of[g][i]])
			}
		}
	}
}

// step runs one step and compares.
func (c *chaos) step() (err error) {
	c.want, c.owned, c.saved, c.loaded, c.groups = nil, nil, nil, nil, 0
	c.value, c.of = map[*Storage]byte{}, map[memory.GroupID][]*Storage{}
	plan := leaves()
	order := &schedule.Schedule{}
	for i := range 20 {
		g := memory.GroupID{Name: "chaos", Layer: i}
		plan.Offload[g] = c.rng.IntN(4) > 0
		order.Save(g)
		plan.Prefetch = append(plan.Prefetch, []memory.GroupID{{Name: "chaos", Layer: c.rng.IntN(i + 1)}})
	}
	if c.rng.IntN(2) == 0 {
		plan.Schedule = order
	}
	var graphs []*Scope
	c.m.Begin(plan)
	for i := 0; i < 40 && err == nil; i++ {
		if c.rng.IntN(8) > 0 {
			err = c.call(true)
			continue
		}
		var s *Scope
		s, err = c.m.Capture(func() error {
			for range c.rng.IntN(6) {
				if err := c.call(false); err != nil {
					return err
				}
			}
			return nil
		})
		if s != nil {
			graphs = append(graphs, s)
		}
	}
	c.m.machine.Check()
	ended := c.m.End()
	var full *residency.Full
	if errors.As(err, &full) {
		c.full++
		err, ended, c.want = nil, nil, nil // what a failed scope was to look at was not seen
	}
	got := make([]byte, looks)
	err = errors.Join(err, ended, c.compute.Download(got, c.seen.All()))
	if err == nil && !slices.Equal(got[:len(c.want)], c.want) {
		err = fmt.Errorf("loads saw %v, want %v", got[:len(c.want)], c.want)
	}
	for _, s := range graphs {
		err = errors.Join(err, s.Close())
	}
	return err
}

// SPEC S4.1, S6.2: whatever a step does, a tensor holds what was saved, under any
// schedule of the streams.
func TestAnyStep(t *testing.T) {
	seeds := uint64(60)
	if testing.Short() {
		seeds = 6
	}
	full, moved := 0, 0
	for seed := range seeds {
		p := check.On(cpuDevice, func(dev device.Device) error {
			c := &chaos{rng: rand.New(rand.NewPCG(seed, 2)), dev: dev}
			var err error
			if c.compute, err = dev.NewStream("compute"); err != nil {
				return err
			}
			if c.seen, err = dev.Alloc(memory.Device, looks, "seen"); err != nil {
				return err
			}
			cfg := Config{Device: memory.Bytes(6+c.rng.IntN(60)) * memory.KiB, Host: memory.Bytes(1+c.rng.IntN(40)) * memory.KiB,
				Window: c.rng.IntN(4), Cap: c.rng.IntN(4), Least: memory.Bytes(c.rng.IntN(2) * 500)}
			if c.m, err = New(dev, c.compute, cfg); err != nil {
				return err
			}
			for range 3 {
				err = errors.Join(err, c.step())
			}
			full += c.full
			moved += c.m.Stats().Out
			c.compute.Free(c.seen)
			return errors.Join(err, c.m.Close(), c.compute.Close())
		})
		if err := check.Explore(check.Options{}, 2, p); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	t.Logf("%d copies out, %d steps without room", moved, full)
	if moved == 0 || full == 0 {
		t.Error("the random steps move nothing, or always have room")
	}
}
