// This file tests single functions of the service and of a session beside tables.

package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/internal/launcher"
)

// A rank that has no place is refused, and one that was started differently fails the job once.
func TestRefusedAndCompared(t *testing.T) {
	fresh := func() *service {
		s := &service{leader: launcher.Place{Host: "a", Size: 3}, opts: Options{Version: "1", Digest: "d"}, members: make([]*member, 3)}
		for rank := range 2 {
			s.members[rank] = &member{out: make(chan *message, 4), state: State{Rank: rank, Host: []string{"a", "b"}[rank]}}
		}
		return s
	}
	for _, x := range []struct {
		rank, size int
		want       string
	}{
		{2, 3, ""}, {2, 4, "rank 2 on c is one of 4, but rank 0 on a is one of 3; start all with the same number of ranks"}, {3, 3, "there is no rank 3 among 3"}, {-1, 3, "there is no rank -1 among 3"},
		{1, 3, "two processes are rank 1, one on b and one on c; give each process a rank of its own"},
	} {
		if got := fresh().refuse(&message{Size: x.size, State: State{Rank: x.rank, Host: "c"}}); got != x.want {
			t.Errorf("rank %d of %d: %q, want %q", x.rank, x.size, got, x.want)
		}
	}
	told := func(m *member) (kinds []*message) {
		for len(m.out) > 0 {
			kinds = append(kinds, <-m.out)
		}
		return kinds
	}
	come := func(s *service, version, digest string) *member {
		m := &member{out: make(chan *message, 4), state: State{Rank: 2, Host: "c"}}
		s.members[2] = m
		s.compare(m, &message{Version: version, Digest: digest})
		return m
	}
	s := fresh()
	come(s, "1", "d")
	for rank, m := range s.members {
		if got := told(m); len(got) != 1 || got[0].Kind != complete || strings.Join(got[0].Hosts, "") != "abc" {
			t.Errorf("rank %d is told %+v", rank, got)
		}
	}
	s = fresh()
	s.members[1] = nil
	if got := told(come(s, "1", "d")); len(got) != 0 {
		t.Errorf("before all have come a rank is told %+v", got)
	}
	for _, x := range [][3]string{{"2", "d", "is version 2, but rank 0 on a is version 1; start the same binary everywhere"}, {"1", "e", "has other settings than rank 0 on a; start all ranks with the same command line and files"}} {
		s := fresh()
		come(s, x[0], x[1])
		s.conclude(&Failure{Why: "a second verdict"})
		for rank, m := range s.members {
			if got := told(m); len(got) != 1 || got[0].Kind != failureOf || got[0].Failure.Why != x[2] || got[0].Failure.Rank != 2 || len(got[0].Failure.States) != 3 {
				t.Errorf("rank %d is told %+v", rank, got)
			}
		}
		late := &member{out: make(chan *message, 4)}
		s.compare(late, &message{Version: "1", Digest: "d"})
		if got := told(late); len(got) != 1 || got[0].Failure.Why != x[2] {
			t.Errorf("a late rank is told %+v", got)
		}
	}
}

// Ranks are heard five times within the patience, and no more often than they must be.
func TestBeats(t *testing.T) {
	for _, x := range []struct {
		size           int
		patience, want time.Duration
	}{{2, 5 * time.Second, 200 * time.Millisecond}, {600, 5 * time.Second, 600 * time.Millisecond}, {4000, 5 * time.Second, time.Second}, {2, 500 * time.Millisecond, 100 * time.Millisecond}} {
		if got := beatEvery(x.size, x.patience); got != x.want {
			t.Errorf("%d ranks with a patience of %v: every %v, want %v", x.size, x.patience, got, x.want)
		}
	}
}

// A rank that is refused and does not read that holds nobody up.
func TestRefusedWhoDoesNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &service{token: "t", opts: Options{Patience: time.Second}, members: make([]*member, 3), strays: map[net.Conn]bool{}}
		there, here := net.Pipe()
		go func() {
			s.greet(there)
			_ = there.Close()
		}()
		if _, err := here.Write([]byte(magic)); err != nil {
			t.Fatal(err)
		}
		if err := writeMessage(here, &message{Kind: hello, Token: "t", Size: 4}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // until it writes
		if !s.mu.TryLock() {
			t.Error("the service holds its lock while it writes")
		} else {
			s.mu.Unlock()
		}
		if m, err := readMessage(here, maxHello); err != nil || m.Kind != refused {
			t.Errorf("%+v, %v", m, err)
		}
		synctest.Wait()
	})
}

// A connection that does not say who it is within Patience is dropped, however much of its greeting has come. A rank
// that has come may be silent for longer: heartbeats are watched elsewhere.
func TestGreetingTakesTooLong(t *testing.T) {
	var whole bytes.Buffer
	whole.WriteString(magic)
	if err := writeMessage(&whole, &message{Kind: hello, Token: "t", Size: 3, State: State{Rank: 1}}); err != nil {
		t.Fatal(err)
	}
	for _, said := range []int{0, 3, len(magic), len(magic) + 2, whole.Len() - 1, whole.Len()} {
		synctest.Test(t, func(t *testing.T) {
			const patience = time.Second
			s := &service{token: "t", opts: Options{Patience: patience}, members: make([]*member, 3), strays: map[net.Conn]bool{}}
			there, here := net.Pipe()
			ended := make(chan struct{})
			go func() {
				s.attend(there)
				close(ended)
			}()
			over := func() bool {
				synctest.Wait()
				select {
				case <-ended:
					return true
				default:
					return false
				}
			}
			if _, err := here.Write(whole.Bytes()[:said]); err != nil {
				t.Fatal(err)
			}
			come := said == whole.Len()
			if come {
				if m, err := readMessage(here, maxHello); err != nil || m.Kind != hello {
					t.Errorf("%+v, %v", m, err)
				}
			}
			time.Sleep(patience - time.Millisecond)
			if over() {
				t.Errorf("%d bytes said: the connection ended before its time", said)
			}
			time.Sleep(2 * time.Millisecond)
			if over() == come {
				t.Errorf("%d of %d bytes said: after %v the connection has ended: %v", said, whole.Len(), patience, come)
			}
			time.Sleep(time.Hour)
			if over() == come {
				t.Errorf("%d of %d bytes said: after an hour the connection has ended: %v", said, whole.Len(), come)
			}
			if err := here.Close(); err != nil {
				t.Error(err)
			}
			<-ended
			s.tasks.Wait()
		})
	}
}

// A rank that meets a stranger tries again, and one that is refused does not.
func TestGreetings(t *testing.T) {
	for want, reply := range map[string]*message{
		"what listens there does not know this job: ": nil, "go away": {Kind: refused, Text: "go away"}, "what listens there does not know this job": {Kind: heartbeat}, "": {Kind: hello, State: State{Host: "there"}},
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		said := make(chan *message, 1)
		go func() {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if _, err := c.Read(make([]byte, len(magic))); err != nil {
				t.Error(err)
			}
			m, _ := readMessage(c, maxHello)
			said <- m
			if reply != nil {
				_ = writeMessage(c, reply)
			}
			if want != "" {
				_ = c.Close()
			}
		}()
		_, port, _ := net.SplitHostPort(l.Addr().String())
		calls := 0
		m := &meeting{invited: func(context.Context) (*invitation, error) {
			if calls++; calls > 1 {
				return nil, errors.New("asked again")
			}
			return &invitation{Token: "token", Host: "elsewhere", Port: port, Addresses: []string{"127.0.0.1"}}, nil
		}}
		place := &launcher.Place{Rank: 1, Size: 3, Host: "here"}
		s, err := m.connect(t.Context(), place, Options{Version: "1", Digest: "d", Patience: 5 * time.Second})
		_ = l.Close()
		if got := <-said; got == nil || got.Kind != hello || got.Token != "token" || got.Version != "1" || got.Digest != "d" || got.Size != 3 || got.State.Rank != 1 || got.State.Host != "here" {
			t.Errorf("the rank said %+v", got)
		}
		switch {
		case want == "":
			if err != nil || s.leader != "there" {
				t.Errorf("%+v, %v", s, err)
				break
			}
			s.lead = State{Rank: 7, Collective: "somewhere"}
			if f := s.leaderFailure("why"); f.Rank != 0 || f.Host != "there" || f.Why != "why" || f.Collective != "somewhere" || len(f.States) != 1 {
				t.Errorf("the failure of rank 0 is %+v", f)
			}
			_ = s.conn.Close()
			<-s.failed
		case want == "go away":
			if err == nil || err.Error() != want {
				t.Errorf("%v", err)
			}
		default:
			if err == nil || err.Error() != "asked again" {
				t.Errorf("%v, %d calls; a stranger ends the search", err, calls)
			}
		}
	}
}
