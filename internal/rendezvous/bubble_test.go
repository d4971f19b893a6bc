// This file compares what the service and a session say, word for word and by the clock of a
// bubble, with a golden file.

package rendezvous

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/launcher"
)

// pipes is a listener without a network.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), closed: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}
func (p *pipes) Close() error   { p.once.Do(func() { close(p.closed) }); return nil }
func (p *pipes) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 29500} }

// script runs one story in a bubble and writes down what each end hears, and when.
type script struct {
	t     *testing.T
	since time.Time
	wg    sync.WaitGroup
	ends  []*end
}

// end is one end of a connection.
type end struct {
	*script
	name         string
	conn         net.Conn
	mu           sync.Mutex
	lines, beats []line
}

func (s *script) now() string { return time.Since(s.since).String() }

// till sleeps until so many milliseconds have passed since the story began.
func (s *script) till(ms int) {
	time.Sleep(time.Until(s.since.Add(time.Duration(ms) * time.Millisecond)))
	synctest.Wait()
}

func (s *script) end(name string, conn net.Conn) *end {
	e := &end{script: s, name: name, conn: conn}
	s.ends = append(s.ends, e)
	return e
}

// listen writes down what comes until the connection ends, and heartbeats by themselves:
// one may come at the same time as something else.
func (e *end) listen() {
	e.wg.Go(func() {
		for {
			m, err := readMessage(e.conn, maxFrame)
			if err != nil {
				e.note(&e.lines, "end")
				return
			}
			said, _ := json.Marshal(m)
			if m.Kind == heartbeat {
				e.note(&e.beats, string(said))
			} else {
				e.note(&e.lines, string(said))
			}
		}
	})
}

// note writes a line down, and a line that is as the last one in its place.
func (e *end) note(lines *[]line, what string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if n := len(*lines); n > 0 && (*lines)[n-1].what == what {
		(*lines)[n-1].count++
		(*lines)[n-1].last = e.now()
		return
	}
	*lines = append(*lines, line{e.now(), e.now(), what, 1})
}

// line is something that was heard as often as it says.
type line struct {
	first, last, what string
	count             int
}

// say says something and lets everybody hear it.
func (e *end) say(m *message) {
	e.write(m)
	synctest.Wait()
}

func (e *end) write(m *message) {
	if err := writeMessage(e.conn, m); err != nil {
		e.note(&e.lines, fmt.Sprintf("nobody hears: %v", err))
	}
}

// dial connects to a service and says hello, unless rank is negative.
func (s *script) dial(p *pipes, name string, hi *message, deaf bool) *end {
	near, far := net.Pipe()
	p.conns <- far
	e := s.end(name, near)
	if hi != nil {
		_, _ = near.Write([]byte(magic))
		e.say(hi)
	}
	if !deaf {
		e.listen()
	}
	synctest.Wait()
	return e
}

// come is a rank that comes.
func come(rank int) *message {
	return &message{Kind: hello, Token: "tok", Version: "1", Digest: "d", Size: 3, State: State{Rank: rank, Host: string(rune('a' + rank))}}
}

// storyOptions are those of all stories.
var storyOptions = Options{Version: "1", Digest: "d", Patience: time.Second, Timeout: 7 * time.Second, Now: func() int64 { return 4711 }}

// all lets all ranks come.
func all(s *script, p *pipes) (ranks [3]*end) {
	for rank := range ranks {
		ranks[rank] = s.dial(p, fmt.Sprint("rank ", rank), come(rank), false)
	}
	return ranks
}

// beat lets ranks say each 200 ms where they are, from a time on.
func beat(s *script, from, to int, at string, ends ...*end) {
	for ms := from; ms < to; ms += 200 {
		s.till(ms)
		for _, e := range ends {
			e.say(&message{Kind: heartbeat, State: State{Collective: at + " of " + e.name, Absent: []int{2}, Missing: 1}})
		}
	}
}

// serviceStories are told by ranks to a service.
var serviceStories = []struct {
	name string
	tell func(s *script, v *service, p *pipes)
}{
	{"all come, meet and leave", func(s *script, v *service, p *pipes) {
		r0 := s.dial(p, "rank 0", come(0), false)
		s.till(50)
		r2 := s.dial(p, "rank 2", come(2), false)
		s.till(130)
		r1 := s.dial(p, "rank 1", come(1), false)
		beat(s, 250, 300, "all-reduce 1", r0, r1)
		s.till(450)
		r0.say(&message{Kind: getKey, ID: 1, Key: "k"})
		r1.say(&message{Kind: peekKey, ID: 2, Key: "k"})
		r2.say(&message{Kind: setKey, ID: 3, Key: "k", Value: []byte("v")})
		synctest.Wait()
		r1.say(&message{Kind: peekKey, ID: 4, Key: "k"})
		r1.say(&message{Kind: askClock, ID: 5})
		r2.say(&message{Kind: askStates, ID: 6})
		for i, r := range []*end{r0, r1, r2} {
			r.say(&message{Kind: barrier, ID: uint64(7 + i), Key: "b"})
		}
		synctest.Wait()
		for i, r := range []*end{r0, r1, r2} {
			r.say(&message{Kind: goodbye, ID: uint64(10 + i)})
		}
		s.till(700)
		for _, r := range []*end{r1, r2, r0} {
			_ = r.conn.Close()
		}
	}},
	{"a rank is silent", func(s *script, v *service, p *pipes) {
		r := all(s, p)
		beat(s, 100, 1800, "all-gather 2", r[0], r[1])
	}},
	{"a rank leaves and is silent", func(s *script, v *service, p *pipes) {
		r := all(s, p)
		r[2].say(&message{Kind: goodbye, ID: 1})
		beat(s, 100, 1800, "all-gather 2", r[0], r[1])
		r[1].say(&message{Kind: barrier, ID: 2, Key: "too late"})
		beat(s, 1900, 2700, "all-gather 2", r[0], r[1])
	}},
	{"a complaint, and then an end", func(s *script, v *service, p *pipes) {
		r := all(s, p)
		s.till(100)
		r[1].say(&message{Kind: abort, Text: "failed: lost rank 2", State: State{Collective: "barrier 1"}})
		s.till(200)
		_ = r[2].conn.Close()
		s.till(300)
		_ = r[0].conn.Close()
		s.till(900)
		s.dial(p, "rank 0 again", come(0), false)
	}},
	{"a complaint, and then its own end", func(s *script, v *service, p *pipes) {
		r := all(s, p)
		s.till(100)
		r[1].say(&message{Kind: abort, Text: "failed: no room", State: State{Collective: "barrier 1"}})
		s.till(120) // it dies before anybody is told
		_ = r[1].conn.Close()
		s.till(900)
	}},
	{"an end, and then complaints", func(s *script, v *service, p *pipes) {
		r := all(s, p)
		s.till(100)
		_ = r[2].conn.Close()
		s.till(200)
		r[1].say(&message{Kind: abort, Text: "failed: lost rank 2"})
		r[0].say(&message{Kind: 99})
		s.till(900)
	}},
	{"a rank that reads nothing", func(s *script, v *service, p *pipes) {
		r0 := s.dial(p, "rank 0", come(0), false)
		r1 := s.dial(p, "rank 1", come(1), true)
		r2 := s.dial(p, "rank 2", come(2), false)
		beat(s, 100, 1700, "all-to-all 4", r0, r2)
		r1.listen()
	}},
	{"a rank that is not understood", func(s *script, v *service, p *pipes) {
		r := all(s, p)
		r[1].say(&message{Kind: 99})
		s.till(500)
	}},
	{"rank 0 is accused by another", func(s *script, v *service, p *pipes) {
		r := all(s, p)
		r[2].say(&message{Kind: abort, Failure: &Failure{State: State{Host: "a"}, Why: "has not answered"}, State: State{Collective: "x"}})
		s.till(500)
	}},
	{"ranks do not come", func(s *script, v *service, p *pipes) {
		s.dial(p, "rank 1", come(1), false)
		s.till(300)
		v.giveUp(9 * time.Second)
		s.dial(p, "rank 0", come(0), false)
		s.till(500)
	}},
	{"strangers", func(s *script, v *service, p *pipes) {
		for i := range 73 { // one more than ranks and 64 others is not waited for
			s.dial(p, fmt.Sprint("stranger ", i), nil, false)
		}
		s.till(1100)
		wrong := come(1)
		wrong.Size = 2
		s.dial(p, "refused", wrong, false)
		wrong.Size, wrong.Token = 3, "no"
		s.dial(p, "wrong token", wrong, false)
		s.dial(p, "rank 1", come(1), false)
		s.dial(p, "rank 1 again", come(1), false)
		s.till(1500)
		if len(v.strays) != 0 {
			s.t.Errorf("%d strangers are remembered", len(v.strays))
		}
	}},
}

// sessionStories are told by a service to a session.
var sessionStories = []struct {
	name string
	rank int
	tell func(s *script, e *end, j *Session, say func(string, ...any))
}{
	{"a session asks and leaves", 1, func(s *script, e *end, j *Session, say func(string, ...any)) {
		e.say(&message{Kind: answer, ID: 77}) // nobody asked
		e.say(&message{Kind: complete, Hosts: []string{"a", "b", "b"}})
		s.till(300)
		j.Note("all-reduce 5", []int{2, 3})
		s.wg.Go(func() {
			v, set, err := j.Lookup(s.t.Context(), "k")
			say("looked up %q, %t, %v", v, set, err)
		})
		s.till(500)
		e.say(&message{Kind: answer, ID: 1, Value: []byte("v"), Set: true})
		short, cancel := context.WithTimeout(s.t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err := j.Get(short, "never")
		say("got %v; %d requests are pending", err, len(j.pending))
		s.wg.Go(func() { say("barrier: %v", j.Barrier(s.t.Context(), "b")) })
		s.till(700)
		e.say(&message{Kind: heartbeat, State: State{Collective: "all-reduce 6"}})
		say("closed: %v", j.Close())
		say("closed again: %v; %v", j.Close(), j.Hosts())
	}},
	{"rank 0 ends", 1, func(s *script, e *end, j *Session, say func(string, ...any)) {
		e.say(&message{Kind: heartbeat, State: State{Rank: 0, Host: "x", Collective: "all-reduce 6"}})
		s.wg.Go(func() { say("barrier: %v", j.Barrier(s.t.Context(), "b")) })
		s.till(300)
		j.Note("barrier 1", []int{0})
		_ = e.conn.Close()
		s.till(350)
		say("set: %v", j.Set(s.t.Context(), "k", nil))
		say("closed: %v", j.Close())
	}},
	{"rank 0 is silent", 2, func(s *script, e *end, j *Session, say func(string, ...any)) {
		s.till(500)
		e.say(&message{Kind: heartbeat, State: State{Collective: "all-reduce 6"}})
		<-j.Failed()
		say("failed: %v", j.Err())
		say("closed: %v", j.Close())
	}},
	{"a session that nobody hears gives up", 1, func(s *script, e *end, j *Session, say func(string, ...any)) {
		s.till(50)
		j.Note("scatter 1", nil)
		s.wg.Go(func() {
			for range 6 { // rank 0 lives and says nothing of it
				time.Sleep(300 * time.Millisecond)
				if j.Err() == nil {
					e.write(&message{Kind: heartbeat})
				}
			}
		})
		j.Abort(errors.New("no room"))
		say("failed: %v", j.Err())
		say("closed: %v", j.Close())
	}},
	{"a session is told of a failure", 1, func(s *script, e *end, j *Session, say func(string, ...any)) {
		s.wg.Go(func() { say("states: %v", fmt.Sprint(j.States(s.t.Context()))) })
		s.till(100)
		e.say(&message{Kind: failureOf, Failure: &Failure{State: State{Rank: 2, Host: "c"}, Why: "ended"}})
		say("aborts")
		j.Abort(errors.New("late"))
		say("closed: %v", j.Close())
	}},
}

func TestStories(t *testing.T) {
	var book strings.Builder
	for _, x := range serviceStories {
		synctest.Test(t, func(t *testing.T) {
			s, p := &script{t: t, since: time.Now()}, newPipes()
			v := serve(p, "tok", &launcher.Place{Host: "a", Size: 3}, storyOptions)
			x.tell(s, v, p)
			s.till(int(time.Since(s.since).Milliseconds())/200*200 + 230) // between two heartbeats
			waited := time.Now()
			v.drain()
			fmt.Fprintf(&book, "%s\n\tdrained after %v\n", x.name, time.Since(waited))
			v.stop()
			s.finish(&book)
		})
	}
	for _, x := range sessionStories {
		synctest.Test(t, func(t *testing.T) {
			near, far := net.Pipe()
			s := &script{t: t, since: time.Now()}
			e := s.end("rank 0", far)
			e.listen()
			j := newSession(near, "a", &launcher.Place{Rank: x.rank, Size: 3, Host: "b"}, storyOptions)
			var mu sync.Mutex
			var said []string
			say := func(format string, args ...any) {
				mu.Lock()
				defer mu.Unlock()
				said = append(said, fmt.Sprintf("\t%s %s\n", s.now(), fmt.Sprintf(format, args...)))
			}
			x.tell(s, e, j, say)
			s.wg.Wait()
			slices.Sort(said)
			fmt.Fprintf(&book, "%s\n%s", x.name, strings.Join(said, ""))
			s.finish(&book)
		})
	}
	golden.Check(t, "stories.txt", book.String())
}

// finish waits for all ends and writes down what they heard.
func (s *script) finish(book *strings.Builder) {
	s.wg.Wait()
	for _, e := range s.ends {
		_ = e.conn.Close()
		fmt.Fprintf(book, "\t%s\n", e.name)
		for _, l := range append(e.lines, e.beats...) {
			fmt.Fprintf(book, "\t\t%s", l.first)
			if l.count > 1 {
				fmt.Fprintf(book, " to %s, %d times", l.last, l.count)
			}
			fmt.Fprintf(book, " %s\n", l.what)
		}
	}
}

// Rank 0 stays until the others have left, and as long as it takes to tell them of a failure.
func TestLastToLeave(t *testing.T) {
	for _, broken := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			opts, p := Options{Patience: time.Second}, newPipes()
			v := serve(p, "", &launcher.Place{Host: "a", Size: 2}, opts)
			var sessions [2]*Session
			for rank := range sessions {
				near, far := net.Pipe()
				p.conns <- far
				_, _ = near.Write([]byte(magic))
				_ = writeMessage(near, &message{Kind: hello, Size: 2, State: State{Rank: rank, Host: "a"}})
				if _, err := readMessage(near, maxFrame); err != nil {
					t.Fatal(err)
				}
				sessions[rank] = newSession(near, "a", &launcher.Place{Rank: rank, Size: 2, Host: "a"}, opts)
			}
			sessions[0].service = v
			since := time.Now()
			var wg sync.WaitGroup
			wg.Go(func() {
				time.Sleep(5 * time.Second)
				if broken {
					sessions[1].Abort(errors.New("broken"))
				}
				if err := sessions[1].Close(); (err != nil) != broken {
					t.Error(err)
				}
			})
			err := sessions[0].Close()
			if took := time.Since(since); (err != nil) != broken || took < 5*time.Second || took > 7*time.Second {
				t.Errorf("rank 0 left after %v: %v", took, err)
			}
			wg.Wait()
		})
	}
}
