// This file owns the tests of which viewers stay, and of when they hear something, on a clock of their own.

package live

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/internal/web"
)

// stage is a server in a bubble.
type stage struct {
	*Server
	t    *testing.T
	door pipes
}

// onStage runs f with a server in a bubble. F ends the server.
func onStage(t *testing.T, f func(x *stage)) {
	synctest.Test(t, func(t *testing.T) {
		x := &stage{t: t, door: make(pipes), Server: &Server{
			history: newHistory(), metrics: newMetrics(), changed: make(chan struct{}), paid: make(chan struct{}), local: true, farewell: time.Second,
		}}
		x.web = web.Serve(x.door, 2*mostViewers, x.handle)
		f(x)
	})
}

// ask connects a viewer that asks for something.
func (x *stage) ask(request string) net.Conn {
	here, there := net.Pipe()
	x.door <- there
	fmt.Fprintf(here, "%s HTTP/1.1\r\nHost: localhost\r\n\r\n", request)
	return here
}

// ear keeps what a viewer reads.
type ear struct {
	mu   sync.Mutex
	text []byte
}

func (e *ear) Write(b []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.text = append(e.text, b...)
	return len(b), nil
}

func (e *ear) String() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return string(e.text)
}

// stays wants so many viewers to be connected.
func (x *stage) stays(want int, when string) {
	x.t.Helper()
	synctest.Wait()
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.viewers != want {
		x.t.Errorf("%s: %d viewers are connected, want %d", when, x.viewers, want)
	}
}

// A viewer that stops reading loses its place when it has had web.WriteLimit to read a step, or a heartbeat if there are
// no steps. One that reads stays for as long as the run takes, and hears a heartbeat four times a minute.
func TestViewersThatStopReading(t *testing.T) {
	for _, steps := range []bool{false, true} {
		onStage(t, func(x *stage) {
			reads, stops := x.ask("GET /events"), x.ask("GET /events")
			var heard ear
			go func() { _, _ = io.Copy(&heard, reads) }()
			got := make([]byte, 4096)
			for text := ""; !strings.HasSuffix(text, "\"version\":0}\n\n"); {
				n, err := stops.Read(got)
				if err != nil {
					t.Fatal(err)
				}
				text += string(got[:n])
			}
			late := heartbeat
			if time.Sleep(leastPause); steps {
				late = leastPause
				x.Step(sample("none", 1))
			}
			time.Sleep(late - leastPause + web.WriteLimit - time.Millisecond)
			x.stays(2, "just before the limit")
			time.Sleep(2 * time.Millisecond)
			x.stays(1, "just after the limit")
			time.Sleep(time.Hour)
			x.stays(1, "an hour later")
			if n, want := strings.Count(heard.String(), "\n\n:"), int((time.Hour+late+web.WriteLimit)/heartbeat); n != want {
				t.Errorf("the viewer that reads has heard %d heartbeats, want %d", n, want)
			}
			stops.Close()
			reads.Close()
			x.stays(0, "at the end")
			x.Close()
		})
	}
}

// A viewer hears of steps a second after it has heard of others, all of them at once.
func TestViewersHearOnceASecond(t *testing.T) {
	onStage(t, func(x *stage) {
		viewer := x.ask("GET /events")
		var heard ear
		go func() { _, _ = io.Copy(&heard, viewer) }()
		events := func(want int) {
			t.Helper()
			synctest.Wait()
			if n := strings.Count(heard.String(), "event: report\n"); n != want {
				t.Errorf("%d events, want %d: %q", n, want, &heard)
			}
		}
		events(1)
		for i := range 3 {
			time.Sleep(leastPause / 4)
			x.Step(sample("none", i+1))
			events(1)
		}
		time.Sleep(leastPause/4 - time.Millisecond)
		events(1)
		time.Sleep(2 * time.Millisecond)
		events(2)
		if synctest.Wait(); !strings.Contains(heard.String(), `{"version":3`) || strings.Contains(heard.String(), `{"version":2`) {
			t.Errorf("the viewer heard %q", &heard)
		}
		viewer.Close()
		x.stays(0, "at the end")
		x.Close()
	})
}

// Who asks for the head of the events takes no place and hears none.
func TestHeadOfEvents(t *testing.T) {
	onStage(t, func(x *stage) {
		viewer := x.ask("HEAD /events")
		var heard ear
		go func() { _, _ = io.Copy(&heard, viewer) }()
		x.stays(0, "after the head")
		if text := heard.String(); !strings.HasPrefix(text, "HTTP/1.1 200 OK\r\n") || !strings.Contains(text, "Content-Type: text/event-stream\r\n") || !strings.HasSuffix(text, "\r\n\r\n") {
			t.Errorf("the head is %q", text)
		}
		x.Close()
		viewer.Close()
	})
}

// The end waits for as many viewers as there were. Another one that comes later changes nothing.
func TestLastReportIsFetchedByMore(t *testing.T) {
	s := &Server{owed: 2, paid: make(chan struct{})}
	for n := range 4 {
		s.fetched()
		select {
		case <-s.paid:
			if n == 0 {
				t.Error("the first of two viewers was enough")
			}
		default:
			if n > 0 {
				t.Errorf("%d viewers were not enough for two", n+1)
			}
		}
	}
}

// The end waits for a viewer that has asked for the last report and left before it has all of it: the page asks again.
func TestLastReportIsNotRead(t *testing.T) {
	onStage(t, func(x *stage) {
		viewer := x.ask("GET /events")
		go func() { _, _ = io.Copy(io.Discard, viewer) }()
		x.stays(1, "at first")
		took := make(chan time.Duration, 1)
		go func() {
			began := time.Now()
			x.Close()
			took <- time.Since(began)
		}()
		synctest.Wait()
		leaves := x.ask("GET /report.json")
		if _, err := leaves.Read(make([]byte, 16)); err != nil {
			t.Error(err)
		}
		leaves.Close()
		time.Sleep(x.farewell / 2)
		reads := x.ask("GET /report.json")
		go func() { _, _ = io.Copy(io.Discard, reads) }()
		synctest.Wait()
		if got := <-took; got != x.farewell/2 {
			t.Errorf("the end took %v, want %v: until the report was read", got, x.farewell/2)
		}
		reads.Close()
		viewer.Close()
	})
}
