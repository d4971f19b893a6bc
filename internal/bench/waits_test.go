// This file tests that measured work is over when its time is taken, and holds a table of what
// replays find.

package bench

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/routing"
)

// unsynced is a device that counts what its streams were given since they were waited for.
type unsynced struct {
	device.Device
	streams []*unsyncedStream
}

type unsyncedStream struct {
	device.Stream
	issued, replays, copies int
}

func (u *unsynced) NewStream(name string) (device.Stream, error) {
	s, err := u.Device.NewStream(name)
	u.streams = append(u.streams, &unsyncedStream{Stream: s})
	return u.streams[len(u.streams)-1], err
}

func (s *unsyncedStream) Copy(dst, src device.Range) {
	s.issued++
	s.copies++
	s.Stream.Copy(dst, src)
}

func (s *unsyncedStream) Launch(l device.Launch) {
	s.issued++
	s.copies++
	s.Stream.Launch(l)
}

func (s *unsyncedStream) Replay(g device.Graph) {
	s.issued++
	s.replays++
	s.Stream.Replay(g)
}

func (s *unsyncedStream) Sync() error {
	s.issued = 0
	return s.Stream.Sync()
}

// counts returns what was issued in all and is not waited for, and resets the sums.
func (u *unsynced) counts() (replays, copies, waiting int) {
	for _, s := range u.streams {
		replays, copies, waiting = replays+s.replays, copies+s.copies, waiting+s.issued
		s.replays, s.copies = 0, 0
	}
	return replays, copies, waiting
}

// Every way does its work as often as it is asked to, and waits for the end on all streams.
func TestWaysWait(t *testing.T) {
	check := func(u *unsynced, name string, w way, replays, copies int) {
		u.counts()
		if err := w.do(3); err != nil {
			t.Fatal(err)
		}
		if r, c, waiting := u.counts(); r != replays || c != copies || waiting != 0 {
			t.Errorf("%s: %d replays and %d copies, want %d and %d; %d were not waited for", name, r, c, replays, copies, waiting)
		}
	}
	for _, host := range []bool{false, true} {
		u, o := &unsynced{Device: open(t, memory.GiB)}, tiny()
		o.Host = host
		r, err := newStashRig(u, o)
		if err != nil {
			t.Fatal(err)
		}
		ways, err := r.ways(o)
		if err != nil {
			t.Fatal(err)
		}
		if want := map[bool]int{false: 3, true: 2}[host]; len(ways) != want {
			t.Errorf("%d ways, want %d", len(ways), want)
		}
		for i, w := range ways {
			check(u, fmt.Sprint("stash ", i), w, 3, 0)
		}
		if err := r.close(); err != nil {
			t.Error(err)
		}
	}
	u := &unsynced{Device: open(t, memory.MiB)}
	r, err := newRig(u, memory.KiB)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range Directions() {
		check(u, string(d), way{"", 1, r.streamCopy(d)}, 0, map[bool]int{true: 6, false: 3}[d == Both])
	}
	more, end, err := r.otherCopies()
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range [][2]int{{3, 0}, {0, 3}, {3, 0}} {
		check(u, more[i].name, more[i], want[0], want[1])
	}
	end()
	if err := r.close(); err != nil {
		t.Error(err)
	}
}

// What replays find in routing counts, as a table. What the pools hold depends on the order in which
// blocks of kernels find their pages.
func TestTableOfReplays(t *testing.T) {
	tr := synth(t, routing.Config{Kind: routing.Burst, Skew: 1.2, Ranks: 2, Layers: 4, Microbatches: 4, Steps: 4, Tokens: 128, TopK: 4, Experts: 16, Seed: 7})
	var b strings.Builder
	for _, c := range []struct {
		name   string
		pp     int
		stage  int
		change func(*ReplayOptions)
	}{
		{"one stage", 1, 0, func(*ReplayOptions) {}},
		{"the last of two stages", 2, 1, func(*ReplayOptions) {}},
		{"small sets", 2, 0, func(o *ReplayOptions) { o.MaxRows = 40 }},
		{"five tensors", 2, 0, func(o *ReplayOptions) { o.Tensors = 5 }},
		{"two sets", 2, 0, func(o *ReplayOptions) { o.Sets = 2 }},
		{"large pages", 2, 0, func(o *ReplayOptions) { o.Page = 16 * memory.KiB }},
	} {
		o := small(tr, schedule.Pipeline{Ranks: c.pp, Chunks: 1}, c.stage)
		c.change(&o)
		res, err := replayed(t, o)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "%s: %d at least\n", c.name, o.Footprint())
		for _, r := range res.Ranks {
			fmt.Fprintf(&b, "  rank %d: imbalance %.4f, live %d, stored %d, bound %d, static %d, sets %d\n", r.Rank, r.Imbalance, r.Live, r.Stored, r.Bound, r.Static, r.Sets)
		}
	}
	golden.Check(t, "replays.txt", b.String())
}
