// This file owns what a rank holds: its connection to the service.

package rendezvous

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/internal/launcher"
)

// Session is the membership of a rank in its job. Its methods may be called from any
// goroutine.
type Session struct {
	place    launcher.Place
	opts     Options
	conn     net.Conn
	service  *service // of rank 0
	leader   string   // host of rank 0
	hosts    []string // by rank
	offset   time.Duration
	trip     time.Duration
	complete chan struct{} // closed when all ranks have come
	failed   chan struct{} // closed when err is set
	stop     chan struct{} // closed by Close
	tasks    sync.WaitGroup
	closing  sync.Once

	writing sync.Mutex // guards writes to conn

	mu      sync.Mutex // guards what follows
	at      State      // what this rank does
	lead    State      // what rank 0 did last
	heard   time.Time
	last    uint64 // ID of the last request
	pending map[uint64]chan *message
	left    bool
	err     error
}

// newSession starts a session on a connection that was greeted.
func newSession(conn net.Conn, leader string, place *launcher.Place, opts Options) *Session {
	s := &Session{
		place: *place, opts: opts, conn: conn, leader: leader, heard: time.Now(), at: State{Rank: place.Rank, Host: place.Host},
		complete: make(chan struct{}), failed: make(chan struct{}), stop: make(chan struct{}),
		pending: map[uint64]chan *message{},
	}
	s.tasks.Go(s.read)
	s.tasks.Go(s.beat)
	return s
}

// Place returns the place of this rank. Its place on the machine is always known.
func (s *Session) Place() launcher.Place { return s.place }

// Hosts returns the hosts of all ranks.
func (s *Session) Hosts() []string { return s.hosts }

// Offset returns what must be added to this rank's clock to get that of rank 0. It is wrong
// by at most half of the round trip.
func (s *Session) Offset() (offset, roundTrip time.Duration) { return s.offset, s.trip }

// Note says which collective this rank is in, and which ranks it waits for there. It costs no
// message: heartbeats carry it.
func (s *Session) Note(collective string, absent []int) {
	s.mu.Lock()
	s.at.follow(State{Collective: collective, Absent: absent[:min(len(absent), mostAbsent)], Missing: len(absent)})
	s.mu.Unlock()
}

// Failed returns a channel that is closed when a rank has failed. Err then says which.
func (s *Session) Failed() <-chan struct{} { return s.failed }

// Err returns nil as long as no rank has failed. After that it returns a [*Failure].
func (s *Session) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Set sets a key to at most MaxValue bytes and returns when all ranks can get it.
func (s *Session) Set(ctx context.Context, key string, value []byte) error {
	if len(key) > maxHello/2 || len(value) > MaxValue {
		panic(fmt.Sprintf("rendezvous: %d bytes for a key of %d are more than control messages may have", len(value), len(key)))
	}
	_, err := s.request(ctx, &message{Kind: setKey, Key: key, Value: value})
	return err
}

// Get returns the value of a key. It waits until a rank has set it.
func (s *Session) Get(ctx context.Context, key string) ([]byte, error) {
	reply, err := s.request(ctx, &message{Kind: getKey, Key: key})
	if err != nil {
		return nil, err
	}
	return reply.Value, nil
}

// Lookup returns the value of a key, and whether it is set. It does not wait.
func (s *Session) Lookup(ctx context.Context, key string) ([]byte, bool, error) {
	reply, err := s.request(ctx, &message{Kind: peekKey, Key: key})
	if err != nil {
		return nil, false, err
	}
	return reply.Value, reply.Set, nil
}

// Barrier returns when all ranks have called it with the same name. A name can be used
// again after that.
func (s *Session) Barrier(ctx context.Context, name string) error {
	_, err := s.request(ctx, &message{Kind: barrier, Key: name})
	return err
}

// States returns what all ranks do, a heartbeat ago at most.
func (s *Session) States(ctx context.Context) ([]State, error) {
	reply, err := s.request(ctx, &message{Kind: askStates})
	if err != nil {
		return nil, err
	}
	return reply.States, nil
}

// Abort makes all ranks fail because of an error on this one, and returns when they know. If
// another rank ended before, that is the failure, because such errors follow from it.
func (s *Session) Abort(err error) {
	state, why := s.state(), fmt.Sprintf("failed: %v", err)
	if len(why) > mostReason {
		why = strings.ToValidUTF8(why[:mostReason], "") + "…"
	}
	_ = s.send(&message{Kind: abort, Text: why, State: state})
	select {
	case <-s.failed:
	case <-time.After(s.opts.Patience):
		s.fail(&Failure{State: state, Why: why})
	}
	if s.service != nil {
		s.service.wait() // who ends now would end it for others that have not been told
	}
}

// Close leaves the job. That is no failure, unless others wait for this rank. Rank 0 waits
// until all others have left. Close returns the failure, if there was one.
func (s *Session) Close() error {
	s.closing.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), s.opts.Patience)
		_, _ = s.request(ctx, &message{Kind: goodbye})
		cancel()
		if s.service != nil {
			s.watchOthers()
		}
		s.mu.Lock()
		s.left = true
		s.mu.Unlock()
		close(s.stop)
		_ = s.conn.Close()
		if s.service != nil {
			s.service.drain()
		}
		s.tasks.Wait()
	})
	return s.Err()
}

// watchOthers waits until all other ranks have left or one has failed.
func (s *Session) watchOthers() {
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	for range ticker.C {
		states, err := s.States(context.Background())
		left := 0
		for _, other := range states {
			if other.Left {
				left++
			}
		}
		if err != nil || left == s.place.Size {
			return
		}
	}
}

func (s *Session) state() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.at
}

// send writes a message.
func (s *Session) send(m *message) error { return s.sendWithin(s.opts.Patience, m) }

func (s *Session) sendWithin(limit time.Duration, m *message) error {
	s.writing.Lock()
	defer s.writing.Unlock()
	_ = s.conn.SetWriteDeadline(time.Now().Add(limit))
	return writeMessage(s.conn, m)
}

// request sends a message and waits for its answer.
func (s *Session) request(ctx context.Context, m *message) (*message, error) {
	reply := make(chan *message, 1)
	s.mu.Lock()
	s.last++
	m.ID = s.last
	s.pending[m.ID] = reply
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.pending, m.ID)
		s.mu.Unlock()
	}()
	if err := s.Err(); err != nil {
		return nil, err
	}
	if err := s.send(m); err != nil {
		s.lost(err)
		return nil, s.Err()
	}
	select {
	case r := <-reply:
		return r, nil
	case <-s.failed:
		return nil, s.Err()
	case <-s.stop:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// fail ends the session with an error. The first one counts.
func (s *Session) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil && !s.left {
		s.err = err
		close(s.failed)
	}
}

// lost is called when the connection to rank 0 has ended. The verdict comes two heartbeats later,
// as that of the service does: until then this rank has come to where it waits.
func (s *Session) lost(err error) {
	select {
	case <-s.stop:
	case <-s.failed:
	case <-time.After(2 * beatEvery(s.place.Size, s.opts.Patience)):
	}
	s.fail(s.leaderFailure(howEnded(err, "can no longer be reached")))
}

// leaderFailure returns the failure of rank 0.
func (s *Session) leaderFailure(why string) *Failure {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := &Failure{State: s.lead, Why: why, States: []State{s.at}} // only rank 0 knew where the others are
	f.Rank, f.Host = 0, s.leader
	return f
}

// read takes what the service says.
func (s *Session) read() {
	for {
		m, err := readMessage(s.conn, maxFrame)
		if err != nil {
			s.lost(err)
			return
		}
		s.mu.Lock()
		s.heard = time.Now()
		switch m.Kind {
		case heartbeat:
			s.lead = m.State
		case answer:
			if reply := s.pending[m.ID]; reply != nil {
				reply <- m
			}
		}
		s.mu.Unlock()
		switch m.Kind {
		case complete:
			s.hosts = m.Hosts
			close(s.complete)
		case failureOf:
			s.fail(m.Failure)
			_ = s.conn.Close() // the service learns that this rank knows
			return
		}
	}
}

// beat says that this rank is alive, and looks whether rank 0 is.
func (s *Session) beat() {
	ticker := time.NewTicker(beatEvery(s.place.Size, s.opts.Patience))
	defer ticker.Stop()
	last := time.Now()
	for {
		select {
		case <-s.stop:
			return
		case <-s.failed:
			return
		case <-ticker.C:
		}
		gap := time.Since(last)
		last = time.Now()
		s.mu.Lock()
		if gap > s.opts.Patience/2 {
			s.heard = s.heard.Add(gap) // this process stood still, so it heard nobody
		}
		silent := time.Since(s.heard) > s.opts.Patience
		s.mu.Unlock()
		if silent {
			f := s.leaderFailure(fmt.Sprintf("has not answered for %v; it hangs, was stopped, or its machine cannot be reached", s.opts.Patience))
			// Rank 0 reads this if it wakes up. It must be sent before the failure is known,
			// because the connection ends after that.
			_ = s.sendWithin(time.Second, &message{Kind: abort, Failure: f, State: s.state()})
			s.fail(f)
			_ = s.conn.Close()
			return
		}
		// A broken connection is found by read.
		_ = s.send(&message{Kind: heartbeat, State: s.state()})
	}
}
