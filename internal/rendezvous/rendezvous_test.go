package rendezvous

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stowage-dev/stowage/internal/launcher"
)

// broadcast is an exchange between goroutines.
type broadcast struct {
	text  string
	ready chan struct{}
}

func newBroadcast() *broadcast { return &broadcast{ready: make(chan struct{})} }

func (b *broadcast) exchange(text string) (string, error) {
	if text != "" {
		b.text = text
		close(b.ready)
	}
	<-b.ready
	return b.text, nil
}

// joinAll joins ranks in goroutines. edit changes the options of a rank.
func joinAll(t *testing.T, size int, edit func(rank int, p *launcher.Place, o *Options)) ([]*Session, []error) {
	t.Helper()
	b := newBroadcast()
	sessions, errs := make([]*Session, size), make([]error, size)
	var wg sync.WaitGroup
	for rank := range size {
		place := &launcher.Place{Rank: rank, Size: size, Host: fmt.Sprintf("host%d", rank/2)}
		opts := Options{Version: "1.0", Digest: "d", Exchange: b.exchange, Timeout: 2 * time.Minute, Patience: time.Minute}
		if edit != nil {
			edit(rank, place, &opts)
		}
		wg.Go(func() { sessions[rank], errs[rank] = Join(t.Context(), place, opts) })
	}
	wg.Wait()
	return sessions, errs
}

// joined is joinAll for ranks that must all join.
func joined(t *testing.T, size int, edit func(rank int, p *launcher.Place, o *Options)) []*Session {
	t.Helper()
	sessions, errs := joinAll(t, size, edit)
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return sessions
}

// each runs a function for each rank at once.
func each(t *testing.T, sessions []*Session, f func(rank int, s *Session) error) {
	t.Helper()
	var wg sync.WaitGroup
	for rank, s := range sessions {
		wg.Go(func() {
			if err := f(rank, s); err != nil {
				t.Errorf("rank %d: %v", rank, err)
			}
		})
	}
	wg.Wait()
}

func closeAll(t *testing.T, sessions []*Session) {
	t.Helper()
	each(t, sessions, func(_ int, s *Session) error { return s.Close() })
}

func TestStoreAndBarrier(t *testing.T) {
	const size = 5
	sessions := joined(t, size, nil)
	each(t, sessions, func(rank int, s *Session) error {
		p := s.Place()
		if want := min(2, size-rank/2*2); p.LocalRank != rank%2 || p.LocalSize != want {
			return fmt.Errorf("place %+v", p)
		}
		if fmt.Sprint(s.Hosts()) != "[host0 host0 host1 host1 host2]" {
			return fmt.Errorf("hosts %v", s.Hosts())
		}
		// All wait for the next rank's key before they set their own, except for rank 0.
		for round := range 3 {
			if rank > 0 {
				got, err := s.Get(t.Context(), fmt.Sprintf("key %d of %d", round, rank-1))
				if err != nil || string(got) != fmt.Sprint(rank-1) {
					return fmt.Errorf("got %q, %v", got, err)
				}
			}
			if err := s.Set(t.Context(), fmt.Sprintf("key %d of %d", round, rank), fmt.Append(nil, rank)); err != nil {
				return err
			}
			if err := s.Barrier(t.Context(), "again"); err != nil {
				return err
			}
			// Behind the barrier all keys are there.
			if _, err := s.Get(t.Context(), fmt.Sprintf("key %d of %d", round, size-1)); err != nil {
				return err
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if _, err := s.Get(ctx, "never set"); !errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("a key that nobody set: %v", err)
		}
		return nil
	})
	closeAll(t, sessions)
}

// The clocks of ranks differ by an hour for each rank; the measured offset is right within
// the round trip.
func TestOffset(t *testing.T) {
	origin := time.Now()
	sessions := joined(t, 3, func(rank int, _ *launcher.Place, o *Options) {
		o.Now = func() int64 { return int64(time.Since(origin) + time.Duration(rank)*time.Hour) }
	})
	for rank, s := range sessions {
		got, trip := s.Offset()
		want := -time.Duration(rank) * time.Hour
		if got < want-trip || got > want+trip {
			t.Errorf("rank %d: offset %v ± %v, want %v", rank, got, trip, want)
		}
	}
	closeAll(t, sessions)
}

// Of all readings of the clock the one with the shortest round trip counts.
func TestShortestTrip(t *testing.T) {
	var now, calls int64
	trips := [clockReadings]int64{90, 40, 70, 6, 50, 30, 8, 80}
	sessions := joined(t, 2, func(rank int, _ *launcher.Place, o *Options) {
		if o.Now = func() int64 { return 1000 }; rank == 1 { // read before and after each question
			o.Now = func() int64 {
				if calls++; calls%2 == 0 {
					now += trips[calls/2-1] + 20
				}
				return now
			}
		}
	})
	for i := range trips {
		trips[i] += 20
	}
	if offset, trip := sessions[1].Offset(); trip != time.Duration(slices.Min(trips[:])) || calls != 2*clockReadings || offset >= 1000 {
		t.Errorf("an offset of %v with a trip of %v after %d readings", int64(offset), int64(trip), calls)
	}
	closeAll(t, sessions)
}

func TestRanksDiffer(t *testing.T) {
	for name, c := range map[string]struct {
		edit func(p *launcher.Place, o *Options) // of rank 2
		want string
	}{
		"version": {func(_ *launcher.Place, o *Options) { o.Version = "2.0" }, "rank 2 on host1 is version 2.0, but rank 0 on host0 is version 1.0; start the same binary everywhere"},
		"digest":  {func(_ *launcher.Place, o *Options) { o.Digest = "e" }, "rank 2 on host1 has other settings than rank 0 on host0; start all ranks with the same command line"},
	} {
		t.Run(name, func(t *testing.T) {
			_, errs := joinAll(t, 3, func(rank int, p *launcher.Place, o *Options) {
				if exchange := o.Exchange; rank == 1 { // it comes when the others know
					o.Exchange = func(text string) (string, error) {
						defer time.Sleep(50 * time.Millisecond)
						return exchange(text)
					}
				}
				if rank == 2 {
					c.edit(p, o)
				}
			})
			for rank, err := range errs {
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("rank %d: got %v, want %q", rank, err, c.want)
				}
			}
		})
	}
}

// dialService connects to the service of rank 0.
func dialService(t *testing.T, s *Session) net.Conn {
	t.Helper()
	_, port, _ := net.SplitHostPort(s.service.listener.Addr().String())
	conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", port))
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

// Strangers are dropped and disturb nobody.
func TestStrays(t *testing.T) {
	sessions := joined(t, 2, nil)
	token := sessions[0].service.token
	for name, say := range map[string]func(net.Conn){
		"a web browser": func(c net.Conn) { fmt.Fprint(c, "GET / HTTP/1.1\r\n\r\n") },
		"a wrong token": func(c net.Conn) {
			fmt.Fprint(c, magic)
			_ = writeMessage(c, &message{Kind: hello, Token: "no", Size: 2})
		},
		"a long message": func(c net.Conn) { fmt.Fprint(c, magic, "\x7f\xff\xff\xff") },
		"no hello":       func(c net.Conn) { fmt.Fprint(c, magic); _ = writeMessage(c, &message{Kind: abort, Token: token}) },
	} {
		conn := dialService(t, sessions[0])
		say(conn)
		if n, err := io.Copy(io.Discard, conn); n != 0 {
			t.Errorf("%s got %d bytes, %v", name, n, err)
		}
		_ = conn.Close()
	}
	for name, m := range map[string]*message{
		"two processes are rank 1, one on host0 and one on x":      {State: State{Rank: 1, Host: "x"}, Size: 2},
		"rank 1 on x is one of 3, but rank 0 on host0 is one of 2": {State: State{Rank: 1, Host: "x"}, Size: 3},
		"there is no rank 7 among 2":                               {State: State{Rank: 7, Host: "x"}, Size: 2},
	} {
		conn := dialService(t, sessions[0])
		m.Kind, m.Token = hello, token
		fmt.Fprint(conn, magic)
		_ = writeMessage(conn, m)
		if reply, err := readMessage(conn, maxHello); err != nil || reply.Kind != refused || !strings.Contains(reply.Text, name) {
			t.Errorf("got %+v, %v; want %q", reply, err, name)
		}
		_ = conn.Close()
	}
	quiet := dialService(t, sessions[0]) // says nothing, and is still there at the end
	defer quiet.Close()
	each(t, sessions, func(_ int, s *Session) error { return s.Barrier(t.Context(), "end") })
	closeAll(t, sessions)
}

// A rank whose connection ends is the failure, also if another complains of it first.
func TestEndedBeforeComplaint(t *testing.T) {
	sessions := joined(t, 4, nil)
	for rank, s := range sessions {
		s.Note(fmt.Sprintf("all-gather %d of all ranks", 30+rank/3), []int{3}[:1-rank/3])
	}
	// All have told what they do, because requests follow notes.
	each(t, sessions, func(_ int, s *Session) error {
		return s.send(&message{Kind: heartbeat, State: s.state()})
	})
	var wg sync.WaitGroup
	wg.Go(func() { sessions[1].Abort(errors.New("MPI lost rank 3")) })
	_ = sessions[3].conn.Close() // as the kernel does for a process that ended
	wg.Wait()
	const want = "rank 3 on host1 ended without a word; it was last in all-gather 31 of all ranks; ranks 0 to 2 are in all-gather 30 of all ranks, where rank 3 has not come"
	for rank, s := range sessions[:3] {
		<-s.Failed()
		if s.Err().Error() != want {
			t.Errorf("rank %d: got  %v\nwant %s", rank, s.Err(), want)
		}
		if _, err := s.Get(t.Context(), "x"); err == nil || err.Error() != want {
			t.Errorf("rank %d: a request after the failure: %v", rank, err)
		}
	}
	for _, s := range sessions {
		_ = s.Close()
	}
}

// A failure says first who waits for the rank, and does not list the places of thousands.
func TestFailureInWords(t *testing.T) {
	f := &Failure{State: State{Rank: 1, Host: "h"}, Why: "ended without a word"}
	for rank := range 8 {
		f.States = append(f.States, State{Rank: rank, Collective: fmt.Sprintf("all-to-all %d of all ranks", rank)})
	}
	f.States[5].Absent, f.States[5].Missing = []int{1}, 1
	f.States[6].Absent, f.States[6].Missing = []int{1, 2}, 2
	f.States[7].Absent, f.States[7].Missing = []int{1, 2}, 99
	for missing, want := range map[int]string{2: "y, where ranks 1 and 2 have not come", 3: "y, where 3 others have not come", 0: "y"} {
		if got := (&State{Collective: "y", Absent: []int{1, 2}, Missing: missing}).where(); got != want {
			t.Errorf("of %d missing two are told: %s, want %s", missing, got, want)
		}
	}
	f.States = append([]State{{Rank: 8, Collective: "what it left", Absent: []int{1}, Missing: 1, Left: true}}, f.States...)
	const want = "rank 1 on h ended without a word; rank 5 is in all-to-all 5 of all ranks, where rank 1 has not come; " +
		"rank 6 is in all-to-all 6 of all ranks, where ranks 1 and 2 have not come; " +
		"rank 7 is in all-to-all 7 of all ranks, where 99 others have not come; others are elsewhere"
	if f.Error() != want {
		t.Errorf("got  %v\nwant %s", f, want)
	}
}

func TestAbort(t *testing.T) {
	sessions := joined(t, 3, nil)
	sessions[2].Note("reduce-scatter 7 of ranks 0 and 2", nil)
	waits := make(chan error)
	go func() { waits <- sessions[1].Barrier(context.Background(), "never complete") }()
	sessions[2].Abort(errors.New("the disk is full"))
	const want = "rank 2 on host1 failed: the disk is full; it was last in reduce-scatter 7 of ranks 0 and 2"
	if err := <-waits; err == nil || err.Error() != want {
		t.Errorf("the barrier ended with %v, want %s", err, want)
	}
	for rank, s := range sessions {
		<-s.Failed()
		var f *Failure
		if err := s.Close(); !errors.As(err, &f) || f.Rank != 2 || err.Error() != want {
			t.Errorf("rank %d: got %v, want %s", rank, err, want)
		}
	}
}

// A reason of any length is heard, as much of it as fits a message, and whatever JSON makes of its characters.
func TestLongReasons(t *testing.T) {
	for _, fill := range []string{"\x01", "é"} {
		sessions := joined(t, 2, nil)
		sessions[1].Abort(errors.New("the disk is full!" + strings.Repeat(fill, 300_000)))
		for _, s := range sessions {
			<-s.Failed()
			if why := s.Err().Error(); !strings.Contains(why, "rank 1") || !strings.Contains(why, "failed: the disk is full") || !strings.HasSuffix(why, "…") || !utf8.ValidString(why) {
				t.Errorf("%q: rank %d hears %.80q", fill, s.Place().Rank, why)
			}
			_ = s.Close() // the failure again
		}
	}
}

// When Abort returns on rank 0, which serves the others, they know why, however slow they are:
// the process may end now.
func TestAbortOfLeader(t *testing.T) {
	sessions := joined(t, 3, nil)
	slow := sessions[2]
	slow.mu.Lock() // it cannot take what it is told
	time.AfterFunc(100*time.Millisecond, slow.mu.Unlock)
	sessions[0].Abort(errors.New("there is no MPI"))
	for rank, s := range sessions {
		select {
		case <-s.Failed():
		default:
			t.Errorf("rank %d does not know", rank)
		}
	}
	for _, s := range sessions {
		if err := s.Close(); err == nil || err.Error() != "rank 0 on host0 failed: there is no MPI" {
			t.Error(err)
		}
	}
}

// Leaving is no failure, unless others wait.
func TestLeave(t *testing.T) {
	sessions := joined(t, 3, nil)
	if err := sessions[2].Close(); err != nil {
		t.Fatal(err)
	}
	if err := sessions[1].Set(t.Context(), "k", nil); err != nil {
		t.Fatal(err)
	}
	states, err := sessions[1].States(t.Context())
	if err != nil || !states[2].Left || states[1].Left {
		t.Errorf("got %+v, %v", states, err)
	}
	err = sessions[1].Barrier(t.Context(), "b")
	if err == nil || !strings.Contains(err.Error(), `rank 2 on host1 has left, but others wait for it in barrier "b"`) {
		t.Errorf("got %v", err)
	}
	for _, s := range sessions[:2] {
		<-s.Failed()
		_ = s.Close()
	}
}

// A rank that says nothing is found, although its connection is open.
func TestSilentRank(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for heartbeats")
	}
	t.Parallel()
	b := newBroadcast()
	var wg sync.WaitGroup
	var err error
	wg.Go(func() {
		var s *Session
		s, err = Join(t.Context(), &launcher.Place{Size: 2, Host: "a"}, Options{Exchange: b.exchange, Timeout: 2 * time.Minute, Patience: 20 * time.Second})
		if err == nil {
			<-s.Failed()
			err = s.Close()
		}
	})
	m, _ := exchanged(&launcher.Place{Rank: 1, Size: 2, Host: "a"}, Options{Exchange: b.exchange})
	in, _ := m.invited(t.Context())
	conn, derr := net.Dial("tcp", net.JoinHostPort("127.0.0.1", in.Port))
	if derr != nil {
		t.Fatal(derr)
	}
	defer conn.Close()
	fmt.Fprint(conn, magic)
	_ = writeMessage(conn, &message{Kind: hello, Token: in.Token, Size: 2, State: State{Rank: 1, Host: "b"}})
	wg.Wait()
	if err == nil || !strings.Contains(err.Error(), "rank 1 on b has not answered for 20s") {
		t.Errorf("got %v", err)
	}
}

// Rank 0 names the ranks that did not come, and all that came learn it.
func TestRanksThatDoNotCome(t *testing.T) {
	opts := Options{Exchange: newBroadcast().exchange, Timeout: time.Hour, Patience: time.Minute}
	sessions := make([]*Session, 2)
	var service *service
	for rank := range sessions { // as in join
		place := &launcher.Place{Rank: rank, Size: 5, Host: "a"}
		m, err := exchanged(place, opts)
		if err != nil {
			t.Fatal(err)
		}
		if rank == 0 {
			service = serve(m.listener, m.token, place, opts)
		}
		if sessions[rank], err = m.connect(t.Context(), place, opts); err != nil {
			t.Fatal(err)
		}
	}
	sessions[0].service = service
	over, cancel := context.WithCancel(t.Context()) // the time is over once both have come
	cancel()
	each(t, sessions, func(_ int, s *Session) error {
		if err := s.awaitAll(over); err == nil || !strings.Contains(err.Error(), "rank 2 did not come within 1h0m0s (missing: ranks 2 to 4)") {
			return fmt.Errorf("got %v", err)
		}
		return nil
	})
}

// Rank 0 listens no more if the others cannot get its address.
func TestExchangeFails(t *testing.T) {
	for _, broken := range []error{errors.New("broken"), nil} {
		var in invitation
		_, err := Join(t.Context(), &launcher.Place{Rank: 0, Size: 2, Host: "a"}, Options{Exchange: func(text string) (string, error) {
			return "", errors.Join(broken, json.Unmarshal([]byte(text), &in))
		}})
		if err == nil || !strings.HasPrefix(err.Error(), "rank 0 on a did not get the address of rank 0: ") || broken != nil && !errors.Is(err, broken) {
			t.Errorf("got %v", err)
		}
		if c, err := net.Dial("tcp", "127.0.0.1:"+in.Port); err == nil {
			t.Errorf("it still listens on port %s, %v", in.Port, c.Close())
		}
	}
}

// Many ranks may come at once, before any has said who it is.
func TestManyCome(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := serve(l, "token", &launcher.Place{Size: 100}, Options{Patience: time.Minute})
	defer s.stop()
	for range 150 {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	come := 0
	for since := time.Now(); come < 150 && time.Since(since) < 20*time.Second; time.Sleep(time.Millisecond) {
		s.mu.Lock()
		come = len(s.strays)
		s.mu.Unlock()
	}
	if come != 150 {
		t.Errorf("%d of 150 connections are kept", come)
	}
}

// A note counts all ranks that are absent, and names some.
func TestNote(t *testing.T) {
	var s Session
	s.Note("all-gather 3", make([]int, mostAbsent+4))
	if at := s.state(); at.Collective != "all-gather 3" || len(at.Absent) != mostAbsent || at.Missing != mostAbsent+4 {
		t.Errorf("%+v", at)
	}
}

func TestNoLeader(t *testing.T) {
	place := &launcher.Place{Rank: 1, Size: 2, Host: "a", Leader: "127.0.0.1"}
	_, err := fmt.Sscan(freePort(t), &place.Port)
	if err != nil {
		t.Fatal(err)
	}
	_, err = Join(t.Context(), place, Options{Timeout: time.Second, Patience: time.Minute})
	if err == nil || !strings.Contains(err.Error(), "rank 1 on a waited 1s for the other ranks: ") || !strings.Contains(err.Error(), "rank 1 on a cannot reach rank 0 at 127.0.0.1:") || !strings.Contains(err.Error(), "STOWAGE_PORT") || strings.Contains(err.Error(), "dial tcp") {
		t.Errorf("got %v", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	place.Rank, place.Port = 0, l.Addr().(*net.TCPAddr).Port
	if _, err = Join(t.Context(), place, Options{}); err == nil || !strings.Contains(err.Error(), "set STOWAGE_PORT to a free port") {
		t.Errorf("got %v", err)
	}
}

// Any bytes are a message or an error, and none takes more memory than the limit.
func FuzzMessage(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x02{}"))
	f.Add([]byte("\x00\x00\x00\x1b{\"kind\":3,\"state\":{\"rank\":1}}"))
	f.Add([]byte("\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := readMessage(strings.NewReader(string(data)), maxHello)
		if err != nil {
			return
		}
		var b strings.Builder
		if err := writeMessage(&b, m); err != nil {
			t.Fatal(err)
		}
		if _, err := readMessage(strings.NewReader(b.String()), maxFrame); err != nil {
			t.Errorf("a message that was read and written cannot be read: %v", err)
		}
	})
}
