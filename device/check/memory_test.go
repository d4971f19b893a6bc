// This file owns the tests of uses after a free, double frees and leaks, and of
// the places that reports name.

package check_test

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/memory"
)

// report runs a call that panics with a report.
func report(t *testing.T, fn func()) (err error) {
	t.Helper()
	defer func() {
		err, _ = recover().(error)
	}()
	fn()
	t.Error("the call did not panic")
	return nil
}

// A dead handle panics with the places of the use, the free and the
// allocation, and the program can go on.
func TestUseAfterFree(t *testing.T) {
	for _, s := range schedules {
		heard := 0
		_, err := run(t, check.Options{Schedule: s, Report: func(error) { heard++ }}, inWorld(func(w *world) {
			r := w.host.All()
			w.b.Fill(w.x.All(), 1)
			w.b.Free(w.host)
			for name, use := range map[string]func(){
				"copy":          func() { w.a.Copy(w.x.All(), r) },
				"fill":          func() { w.a.Fill(r, 1) },
				"view":          func() { w.dev.View(r, device.Read) },
				"host callback": func() { w.a.Host(func() {}, device.Reads(r)) },
				"download":      func() { _ = w.a.Download(make([]byte, size), r) },
				"grow":          func() { _ = w.dev.Grow(r.Buf, size) },
			} {
				var u *check.UseAfterFree
				if !errors.As(report(t, use), &u) {
					t.Errorf("%s: no report", name)
					continue
				}
				if u.Use.Name != name || u.Free.String() != `free #2 on stream "b"` || !strings.HasSuffix(u.Use.Site.File, "memory_test.go") ||
					!strings.HasSuffix(u.Free.Site.File, "memory_test.go") || !strings.HasSuffix(u.Alloc.File, "world_test.go") {
					t.Errorf("%s: %v", name, u)
				}
			}
			var d *check.UseAfterFree
			err := report(t, func() { w.a.Free(w.host) })
			if !errors.As(err, &d) || d.Free.Stream != "b" || d.Use.Stream != "a" || d.Use.Name != "free" || d.Free.Site.Line == d.Use.Site.Line ||
				!strings.HasPrefix(err.Error(), "double free of host buffer") {
				t.Errorf("double free: %v", err)
			}
			w.b.Fill(w.y.All(), 2)
		}))
		if err != nil || heard != 7 {
			t.Errorf("under %+v: %v; %d reports", s, err, heard)
		}
	}
}

// A graph can hold the address of a buffer that was freed; its replay is
// reported, whether an event orders it or not.
func TestUseAfterFreeInReplay(t *testing.T) {
	for _, s := range schedules {
		_, err := run(t, check.Options{Schedule: s}, inWorld(func(w *world) {
			g := w.capture(func() { w.a.Copy(w.x.All(), w.y.All()) })
			w.a.Replay(g)
			w.a.Free(w.y)
			w.a.Replay(g)
		}))
		var u *check.UseAfterFree
		if !errors.As(err, &u) || u.Use.Replay != 2 || u.Free.Name != "free" {
			t.Errorf("ordered: %v", err)
		}
		_, err = run(t, check.Options{Schedule: s}, inWorld(func(w *world) {
			g := w.capture(func() { w.a.Copy(w.x.All(), w.y.All()) })
			w.b.Free(w.y)
			w.a.Replay(g)
		}))
		var r *check.Race
		if !errors.As(err, &r) || r.First.Name != "free" || r.Second.Replay != 1 {
			t.Errorf("not ordered: %v", err)
		}
	}
}

// Memory that was never freed is reported with the place of its allocation.
func TestLeakNamesThePlace(t *testing.T) {
	inner, err := openCPU()
	must(err)
	d := check.New(check.Options{}).Wrap(inner)
	_, err = d.Alloc(memory.Device, 100, "lost")
	must(err)
	if err := d.Close(); err == nil || !strings.Contains(err.Error(), `"lost"`) || !strings.Contains(err.Error(), "was allocated at check/memory_test.go:") {
		t.Errorf("Close: %v", err)
	}
}

// After a report frees wait, because they may be part of the race. The end of their stream or of the device makes them.
func TestFreesAfterAReport(t *testing.T) {
	inner, err := openCPU()
	must(err)
	d := check.New(check.Options{Report: func(error) {}}).Wrap(inner)
	var streams [3]device.Stream
	var bufs [3]*device.Buffer
	for i := range streams {
		streams[i], err = d.NewStream(fmt.Sprint(i))
		must(err)
		bufs[i], err = d.Alloc(memory.Device, size, fmt.Sprint("buffer ", i))
		must(err)
	}
	held := func() int { return int(inner.Memory().Kind[memory.Device].Current) / size }
	for _, s := range streams[:2] {
		s.Fill(bufs[0].All(), 1) // a race
	}
	for i, s := range streams {
		s.Free(bufs[i])
	}
	must(inner.Sync())
	before := held()
	_ = streams[1].Close() // the race
	if now := held(); before != 3 || now != 2 {
		t.Errorf("%d buffers were held after their frees, and %d after the end of one stream; want 3 and 2", before, now)
	}
	var race *check.Race
	if err := d.Close(); !errors.As(err, &race) || strings.Contains(err.Error(), "never freed") || held() != 0 {
		t.Errorf("%d buffers are held: %v", held(), err)
	}
}

// helper issues for its caller, as a mechanism does for a model.
func helper(s device.Stream, r device.Range) { s.Fill(r, 1) }

// The place is the innermost caller outside of the device packages, with its
// own caller beside it.
func TestSites(t *testing.T) {
	_, file, line, _ := runtime.Caller(0)
	_, err := run(t, check.Options{}, inWorld(func(w *world) {
		helper(w.a, w.x.All()) // line + 2
		helper(w.b, w.x.All()) // line + 3
	}))
	var r *check.Race
	if !errors.As(err, &r) {
		t.Fatal(err)
	}
	for i, s := range []check.Site{r.First.Site, r.Second.Site} {
		if s.File != file || !strings.HasSuffix(s.Func, ".helper") || s.From != fmt.Sprintf("check/memory_test.go:%d", line+2+i) {
			t.Errorf("%+v", s)
		}
	}
}

// Report may end the goroutine, as t.Fatal does; the checker stays usable.
func TestReportMayEndTheGoroutine(t *testing.T) {
	var got error
	c := check.New(check.Options{Report: func(err error) { got = err; runtime.Goexit() }})
	w := newWorld(c, 0)
	var done sync.WaitGroup
	done.Go(func() {
		w.a.Fill(w.x.All(), 1)
		w.b.Fill(w.x.All(), 2)
		t.Error("the goroutine went on")
	})
	done.Wait()
	if err := w.close(); err == nil || !errors.Is(err, got) || !errors.Is(c.Err(), got) {
		t.Errorf("Close gives %v, Report got %v", err, got)
	}
}

// Devices and streams may be used from many goroutines.
func TestManyGoroutines(t *testing.T) {
	for _, s := range schedules {
		c := check.New(check.Options{Schedule: s})
		ws := []*world{newWorld(c, 0), newWorld(c, 1)}
		var all sync.WaitGroup
		for i := range 4 {
			w := ws[i%2]
			all.Go(func() {
				st := w.stream(fmt.Sprint("worker ", i))
				b, err := w.dev.Alloc(memory.Host, size, "worker")
				must(err)
				e := w.event(0)
				for j := range 50 {
					st.Fill(b.All(), byte(j))
					st.Record(e)
					if j%10 == 9 {
						must(e.Sync())
						if got := w.dev.View(b.All(), device.Read)[7]; got != byte(j) {
							t.Errorf("worker %d read %d, want %d", i, got, j)
						}
					}
				}
				st.Free(b)
				must(st.Close())
			})
		}
		all.Wait()
		for _, w := range ws {
			if err := w.close(); err != nil {
				t.Errorf("under %+v: %v", s, err)
			}
		}
	}
}
