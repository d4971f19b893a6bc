// This file owns the tests of sessions on a device with several streams, as a GPU is: the
// caller issues work on them, the session waits for nothing, and the race checker watches.

package session

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

// streamer is a caller whose work is on streams.
type streamer struct {
	t    *testing.T
	s    *Session
	dev  device.Device
	next uint64            // number of a storage in this step
	mem  []*device.Buffer  // the caller's memory, which lives as long as the test
	data map[uint64][]byte // by number: what the storage holds
	at   map[uint64]*device.Buffer

	relaxed int // calls inside of the caller's capture
}

// newStreamer opens a session that has streams of all handles. The checker reports races
// when work is issued, so a missing wait is found whatever the machine's speed.
func newStreamer(t *testing.T, cfg Config) *streamer {
	t.Helper()
	inner, err := cpu.Open(cpu.Options{CopyThreads: 1})
	if err != nil {
		t.Fatal(err)
	}
	c := &streamer{t: t, dev: check.New(check.Options{Report: func(err error) { t.Fatal(err) }}).Wrap(inner)}
	cfg.Device, cfg.Links = "cpu", memory.Links{Out: 1e9, In: 1e9, Both: 1e9}
	c.s, err = openOn(backend{
		Device:  c.dev,
		stream:  func(handle uint64) (device.Stream, error) { return c.dev.NewStream(fmt.Sprintf("compute %d", handle)) },
		relaxed: func(call func()) { c.relaxed++; call() },
	}, cfg, func(id, n uint64) uint64 {
		c.at[id] = c.take(memory.Bytes(n))
		return uint64(c.at[id].Addr())
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *streamer) ok(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// take returns memory of the caller's as a handle that the checker watches together with
// the session's.
func (c *streamer) take(n memory.Bytes) *device.Buffer {
	c.t.Helper()
	b, err := c.dev.Alloc(memory.Device, n, "caller")
	c.ok(err)
	c.mem = append(c.mem, b)
	return c.dev.Borrow(memory.Device, b.Addr(), n, "caller's")
}

// begin begins a step on a stream.
func (c *streamer) begin(key string, stream uint64) device.Stream {
	c.t.Helper()
	c.ok(c.s.Begin(key, stream))
	c.next, c.data, c.at = 0, map[uint64][]byte{}, map[uint64]*device.Buffer{}
	return c.s.streams[stream]
}

// save computes a storage on a stream and saves it; one with rows has so many, or none.
func (c *streamer) save(on device.Stream, name string, value byte, rows int) (group uint64) {
	c.t.Helper()
	const rowBytes, most = 64, 8
	c.next++
	id := c.next
	x := Storage{ID: id, Bytes: rowBytes * most}
	c.at[id] = c.take(rowBytes * most)
	x.Address = uint64(c.at[id].Addr())
	on.Fill(c.at[id].All(), value)
	c.data[id] = bytes.Repeat([]byte{value}, rowBytes*most)
	if rows > 0 {
		count := c.take(8)
		x.Rows, x.RowBytes = uint64(count.Addr()), rowBytes
		if on.Capturing() { // whose count was uploaded before
			on.Fill(count.Slice(0, 1), byte(rows))
			on.Fill(count.Slice(1, 7), 0)
		} else {
			on.Upload(count.All(), binary.LittleEndian.AppendUint64(nil, uint64(rows)))
		}
		clear(c.data[id][rows*rowBytes:])
	}
	n, _, err := c.s.Save(name, []Storage{x})
	c.ok(err)
	return n
}

// load loads a group and returns where its storage is.
func (c *streamer) load(group uint64) *device.Buffer {
	c.t.Helper()
	_, _, err := c.s.Load(group)
	c.ok(err)
	if c.s.rowsOf[group] != nil {
		at, err := c.s.Rows(group)
		c.ok(err)
		if at != 0 {
			return c.dev.Borrow(memory.Device, uintptr(at), memory.Bytes(len(c.data[group])), "berth")
		}
	}
	return c.at[group]
}

func (c *streamer) end() {
	c.t.Helper()
	_, err := c.s.End(false)
	c.ok(err)
}

// close closes everything. The caller's memory is freed before, as a caller does that
// frees its memory in the order of its streams.
func (c *streamer) close() {
	c.t.Helper()
	c.ok(c.dev.Sync())
	for _, b := range c.mem {
		c.s.compute.Free(b)
	}
	c.ok(c.s.Close())
}

// step saves and loads four storages on a stream, in an order in which each is worth a
// berth, and compares their bytes if the caller looks.
func (c *streamer) step(key string, stream uint64, value byte, look bool) {
	c.t.Helper()
	on := c.begin(key, stream)
	c.save(on, "mlp", value, 0)
	c.save(on, "moe", value+1, 5)
	c.save(on, "moe", value+2, 8)
	c.save(on, "mlp", value+3, 0)
	for _, group := range []uint64{2, 3, 4, 1} {
		b := c.load(group)
		if look {
			got := make([]byte, b.Size())
			c.ok(on.Download(got, b.All()))
			if !bytes.Equal(got, c.data[group]) {
				c.t.Errorf("key %s, stream %d: group %d came back as %v; want %v", key, stream, group, got, c.data[group])
			}
		}
		_, err := c.s.Release(group)
		c.ok(err)
	}
	c.end()
}

// SPEC S6.4: a step on another stream waits for the work of the one before, because both
// use the same berths and host memory. Nobody else waits: the host does not, and the caller
// need not.
func TestSwitchOfStreams(t *testing.T) {
	for what, cfg := range map[string]Config{
		"rows":    {Live: 1},
		"offload": {Live: 1, Policy: map[string]memory.Choice{"mlp": memory.Offload}},
		"limit":   {Live: 1, Limit: 600},
	} {
		t.Run(what, func(t *testing.T) {
			c := newStreamer(t, cfg)
			for i := range 18 { // recorded, and measured eight times at most, for which the host waits
				c.step(fmt.Sprint("k", i%2), 0, byte(i), false)
			}
			syncs := c.dev.Counters().HostSyncs
			for i, stream := range []uint64{0, 1, 1, 2, 0, 2} {
				c.step(fmt.Sprint("k", i%2), stream, byte(10*i+1), false)
			}
			if n := c.dev.Counters().HostSyncs - syncs; n != 0 {
				t.Errorf("the host waited %d times", n)
			}
			c.step("k0", 1, 100, true)
			c.close()
		})
	}
}

// A check on another stream waits for the steps before it, too.
func TestCheckOnAnotherStream(t *testing.T) {
	c := newStreamer(t, Config{})
	for i, stream := range []uint64{0, 1, 2} {
		c.step("k", stream, byte(10*i+1), false)
		c.ok(c.s.Check((stream + 1) % 3))
	}
	c.step("k", 0, 100, true)
	c.close()
}

// A stream that is captured takes no part in waits for others: they would spoil the
// capture, or pull another stream into it. Whoever captures has waited for everything.
func TestSwitchToACapturedStream(t *testing.T) {
	c := newStreamer(t, Config{Live: 1}) // nothing is offloaded, so no other stream takes part
	for range 2 {
		c.step("k", 0, 1, false)
	}
	x, err := c.s.stream(1)
	c.ok(err)
	c.step("k", 1, 1, false)
	c.step("k", 0, 1, false)
	c.ok(c.dev.Sync())
	x.BeginCapture()
	c.step("k", 1, 50, false)
	c.step("k", 0, 60, false) // beside the capture, which goes on
	if c.s.streams[0].Capturing() {
		t.Error("a step beside the capture became part of it")
	}
	g, err := x.EndCapture()
	c.ok(err)
	c.ok(c.dev.Sync())
	x.Replay(g)
	c.ok(x.Sync())
	c.step("k", 1, 70, true)
	c.ok(g.Close())
	c.close()
}

// Calls are made for a capture inside of a captured step, and nowhere else: not after the
// step, nor after one that could not begin.
func TestCallsInACapture(t *testing.T) {
	c := newStreamer(t, Config{Live: 1, Limit: 10000})
	relaxed := func(what string, want bool, call func()) {
		t.Helper()
		before := c.relaxed
		if call(); (c.relaxed > before) != want {
			t.Errorf("%s: made for a capture: %v; want %v", what, c.relaxed > before, want)
		}
	}
	usage := func() {
		_, err := c.s.Usage()
		c.ok(err)
	}
	for range 2 {
		relaxed("a step", false, func() { c.step("k", 0, 1, false) })
	}
	x := c.s.streams[0]
	c.ok(c.dev.Sync())
	x.BeginCapture()
	if err := c.s.Begin("another", 0); !errors.As(err, new(Wrong)) || !strings.Contains(err.Error(), "before the capture") {
		t.Errorf("the first step under a key in a capture: %v", err)
	}
	relaxed("a call after a captured step that could not begin", false, usage)
	relaxed("a captured step", true, func() {
		relaxed("its beginning", true, func() { c.begin("k", 0) })
		relaxed("a call inside of it", true, usage)
		relaxed("its end", true, c.end)
	})
	relaxed("a call after a captured step", false, usage)
	g, err := x.EndCapture()
	c.ok(err)
	c.ok(g.Close())
	c.close()
}

// Close waits for replays on other streams: they use the berths that it frees.
func TestCloseDuringAReplay(t *testing.T) {
	c := newStreamer(t, Config{Live: 1})
	for range 2 {
		c.step("k", 1, 1, false)
	}
	x := c.s.streams[1]
	c.ok(c.dev.Sync())
	x.BeginCapture()
	c.step("k", 1, 50, false)
	g, err := x.EndCapture()
	c.ok(err)
	c.step("k", 0, 60, false)
	c.ok(c.dev.Sync())
	x.Replay(g)
	c.ok(g.Close())
	for _, b := range c.mem {
		x.Free(b)
	}
	c.ok(c.s.Close())
}

// A group that could not be saved is none: the next one has its number and its place among
// groups of its name, so that a step which goes on follows its plan.
func TestFailedSaveLeavesNothing(t *testing.T) {
	c := newStreamer(t, Config{Limit: 10000})
	storage := func(id uint64) Storage {
		return Storage{ID: id, Address: uint64(c.take(4096).Addr()), Bytes: 4096}
	}
	step := func(wrong bool) {
		t.Helper()
		c.begin("k", 0)
		for i := range 2 {
			if wrong {
				x := storage(uint64(10 + i))
				x.Rows, x.RowBytes = uint64(c.take(8).Addr()), 64
				if _, _, err := c.s.Save("g", []Storage{x}); !errors.As(err, new(Wrong)) {
					t.Errorf("rows that a capture is the first to save: %v", err)
				}
			}
			n, _, err := c.s.Save("g", []Storage{storage(uint64(1 + i))})
			c.ok(err)
			if id := c.s.groups[n].id; n != uint64(i+1) || id.Layer != i || len(c.s.groups) != i+1 {
				t.Errorf("group %d is number %d of %d and %v", i, n, len(c.s.groups), id)
			}
		}
		for n := uint64(2); n > 0; n-- {
			_, _, err := c.s.Load(n)
			c.ok(err)
			_, err = c.s.Release(n)
			c.ok(err)
		}
		c.end()
	}
	step(false)
	step(false)
	x := c.s.streams[0]
	c.ok(c.dev.Sync())
	x.BeginCapture()
	step(true)
	g, err := x.EndCapture()
	c.ok(err)
	c.ok(g.Close())
	c.close()
}
