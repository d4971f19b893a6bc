// This file owns the planted bugs: each is found, and the same program without
// the bug reports nothing.

package check_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/memory"
)

// planted is a program that is wrong unless told to be right, and the report
// it must cause: the two operations, and words of the explanation.
type planted struct {
	name          string
	work          func(w *world, right bool)
	first, second string
	words         []string
}

var plantedBugs = []planted{
	{
		name: "missing wait after a copy out",
		work: func(w *world, right bool) {
			w.out.Copy(w.host.All(), w.x.All())
			if right {
				w.order(w.out, w.a)
			}
			w.a.Copy(w.y.All(), w.host.All())
		},
		first: `copy #1 on stream "copy-out"`, second: `copy #1 on stream "a"`,
		words: []string{`stream "a" must wait, before copy #1, for an event recorded on stream "copy-out" after copy #1`, `host buffer "host"`, "bytes [0,4096)"},
	},
	{
		name: "reuse before the event",
		work: func(w *world, right bool) {
			w.a.Fill(w.x.All(), 1)
			w.order(w.a, w.out)
			w.out.Copy(w.host.All(), w.x.All())
			done := w.event(0)
			w.out.Record(done)
			if right {
				w.a.Wait(done)
			}
			w.a.Fill(w.x.All(), 2)
		},
		first: `copy #1 on stream "copy-out"`, second: `fill #2 on stream "a"`,
		words: []string{"(read)", "(write)", `device buffer "x"`},
	},
	{
		name: "wrong stream",
		work: func(w *world, right bool) {
			w.out.Copy(w.host.All(), w.x.All())
			done := w.event(0)
			if right {
				w.out.Record(done)
			} else {
				w.b.Fill(w.y.All(), 1)
				w.b.Record(done)
			}
			w.a.Wait(done)
			w.a.Fill(w.x.All(), 2)
		},
		first: `copy #1 on stream "copy-out"`, second: `fill #1 on stream "a"`,
		words: []string{`is for an event recorded on stream "b"`, "not ordered after copy #1"},
	},
	{
		name: "wait on a stale recording",
		work: func(w *world, right bool) {
			done := w.event(0)
			w.out.Copy(w.host.All(), w.x.All())
			w.out.Record(done)
			w.out.Copy(w.host.All(), w.y.All())
			if right {
				w.out.Record(done)
			}
			w.a.Wait(done)
			w.a.Fill(w.y.All(), 2)
		},
		first: `copy #2 on stream "copy-out"`, second: `fill #1 on stream "a"`,
		words: []string{"stale recording", "before copy #2 was issued", "record the event after it"},
	},
	{
		name: "wait before the record",
		work: func(w *world, right bool) {
			done := w.event(0)
			w.out.Copy(w.host.All(), w.x.All())
			if !right {
				w.a.Wait(done)
			}
			w.out.Record(done)
			if right {
				w.a.Wait(done)
			}
			w.a.Fill(w.x.All(), 2)
		},
		first: `copy #1 on stream "copy-out"`, second: `fill #1 on stream "a"`,
		words: []string{"held nothing back", "call Wait after Record"},
	},
	{
		name: "wait before the second record",
		work: func(w *world, right bool) {
			done := w.event(0)
			w.out.Copy(w.host.All(), w.y.All())
			w.out.Record(done)
			w.out.Copy(w.host.All(), w.x.All())
			if !right {
				w.a.Wait(done)
			}
			w.out.Record(done)
			if right {
				w.a.Wait(done)
			}
			w.a.Fill(w.x.All(), 2)
		},
		first: `copy #2 on stream "copy-out"`, second: `fill #1 on stream "a"`,
		words: []string{"took an earlier recording", "later than the wait"},
	},
	{
		name: "overlapping sub-ranges",
		work: func(w *world, right bool) {
			end := memory.Bytes(1025)
			if right {
				end = 1024
			}
			w.a.Fill(w.x.Slice(0, end), 1)
			w.b.Fill(w.x.Slice(1024, 1024), 2)
		},
		first: `fill #1 on stream "a"`, second: `fill #1 on stream "b"`,
		words: []string{"bytes [1024,1025)"},
	},
	{
		name: "overlapping columns",
		work: func(w *world, right bool) {
			column := func(off, n memory.Bytes) device.Rect {
				return device.Rect{Range: w.x.Slice(off, n), Pitch: 64, Rows: 60}
			}
			from := device.Rect{Range: w.y.Slice(0, 16), Pitch: 32, Rows: 60}
			off := memory.Bytes(31)
			if right {
				off = 32
			}
			w.a.Copy2D(column(16, 16), from)
			w.b.Copy2D(column(off, 16), from)
		},
		first: `2-D copy #1 on stream "a"`, second: `2-D copy #1 on stream "b"`,
		words: []string{"bytes [31,32)"},
	},
	{
		name: "host looks before it waits",
		work: func(w *world, right bool) {
			w.out.Copy(w.host.All(), w.x.All())
			if right {
				must(w.out.Sync())
			}
			w.dev.View(w.host.Slice(100, 8), device.Read)
		},
		first: `copy #1 on stream "copy-out"`, second: "the host's view",
		words: []string{`the host must synchronise with stream "copy-out" after copy #1`, "bytes [100,108)"},
	},
	{
		name: "host writes while a copy reads",
		work: func(w *world, right bool) {
			w.a.Copy(w.x.All(), w.host.All())
			done := w.event(0)
			w.a.Record(done)
			for right && !done.Done() {
			}
			w.dev.View(w.host.All(), device.Write)[0] = 1
		},
		first: `copy #1 on stream "a"`, second: "the host's view",
	},
	{
		name: "free while another stream reads",
		work: func(w *world, right bool) {
			w.out.Copy(w.host.All(), w.x.All())
			if right {
				w.order(w.out, w.a)
			}
			w.a.Free(w.x)
		},
		first: `copy #1 on stream "copy-out"`, second: `free #1 on stream "a"`,
		words: []string{`must wait, before free #1`},
	},
	{
		name: "upload while a kernel reads",
		work: func(w *world, right bool) {
			w.a.Launch(mix(w.y.All(), w.x.All()))
			if right {
				w.order(w.a, w.b)
			}
			w.b.Upload(w.x.Slice(8, 4), []byte{1, 2, 3, 4})
		},
		first: `kernel mix #1 on stream "a"`, second: `upload #1 on stream "b"`,
	},
	{
		name: "download beside the writer",
		work: func(w *world, right bool) {
			w.a.Fill(w.x.All(), 1)
			if right {
				w.order(w.a, w.b)
			}
			_ = w.b.Download(make([]byte, 8), w.x.Slice(0, 8))
		},
		first: `fill #1 on stream "a"`, second: `download #1 on stream "b"`,
	},
	{
		name: "callback beside a copy",
		work: func(w *world, right bool) {
			w.a.Copy(w.host.All(), w.x.All())
			s := w.b
			if right {
				s = w.a
			}
			s.Host(func() {}, device.Reads(w.host.Slice(0, 1)))
		},
		first: `copy #1 on stream "a"`, second: `host callback #1 on stream "b"`,
	},
	{
		name: "plain read of atomic memory",
		work: func(w *world, right bool) {
			add := func(s device.Stream) {
				l := device.NewLaunch(addKernel, 1, 1)
				l.Atomic(w.x.Slice(0, 64))
				l.Arg(64)
				l.Arg(3)
				s.Launch(l)
			}
			add(w.a)
			add(w.b) // atomics need no order among themselves
			w.order(w.a, w.out)
			if right {
				w.order(w.b, w.out)
			}
			w.out.Copy(w.host.All(), w.x.All())
		},
		first: `kernel add #1 on stream "b"`, second: `copy #1 on stream "copy-out"`,
		words: []string{"(atomic access)"},
	},
}

// SPEC S6.2: every planted bug is found when it is issued, whatever the
// schedule, and its corrected twin reports nothing.
func TestPlantedBugs(t *testing.T) {
	for _, b := range append(plantedBugs, plantedInGraphs...) {
		t.Run(b.name, func(t *testing.T) {
			for _, s := range []*check.Schedule{nil, {Seed: 0}, {Seed: 1}, {Seed: 2}, {Seed: 3}, {Seed: 4}} {
				heard := 0
				o := check.Options{Schedule: s, Report: func(error) { heard++ }}
				_, err := run(t, o, inWorld(func(w *world) { b.work(w, false) }))
				b.judge(t, err)
				if heard != 1 {
					t.Errorf("Report was called %d times", heard)
				}
				if _, err := run(t, o, inWorld(func(w *world) { b.work(w, true) })); err != nil {
					t.Errorf("the corrected twin under %+v: %v", s, err)
				}
			}
		})
	}
}

func (b planted) judge(t *testing.T, err error) {
	t.Helper()
	var r *check.Race
	if !errors.As(err, &r) {
		t.Fatalf("the bug was not found: %v", err)
	}
	if got := r.First.String(); got != b.first {
		t.Errorf("the first is %s, want %s", got, b.first)
	}
	if got := r.Second.String(); got != b.second {
		t.Errorf("the second is %s, want %s", got, b.second)
	}
	for _, s := range []check.Site{r.First.Site, r.Second.Site} {
		if !strings.Contains(s.File, "planted_") || s.Line == 0 {
			t.Errorf("the site is %+v", s)
		}
	}
	if !strings.HasSuffix(r.Alloc.File, "world_test.go") {
		t.Errorf("allocated at %+v", r.Alloc)
	}
	for _, w := range b.words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q is missing in:\n%v", w, err)
		}
	}
}
