// This file owns the service of rank 0.

package rendezvous

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/internal/launcher"
)

// A member goes through these states, in this order: it connects and says who it is
// (members[rank] is set); it sends requests and heartbeats; it says goodbye (state.Left) or
// gives up (aborted); its connection ends (gone). Ending before a goodbye is a failure.
type member struct {
	conn    net.Conn
	out     chan *message // to its writer
	state   State
	heard   time.Time
	aborted bool
	gone    bool
}

// request is a member that waits for an answer.
type request struct {
	m  *member
	id uint64
}

// service is what rank 0 serves. Everything below mu is guarded by it.
type service struct {
	listener net.Listener
	token    string
	leader   launcher.Place
	opts     Options
	stopped  chan struct{}
	tasks    sync.WaitGroup

	mu       sync.Mutex
	members  []*member // by rank
	strays   map[net.Conn]bool
	store    map[string][]byte
	waiting  map[string][]request
	barriers map[string][]request
	suspect  *Failure // the verdict comes when others had time to say where they are
	failure  *Failure
	gaveUp   bool // waiting for ranks that have not come
	stopping bool
}

// serve starts the service.
func serve(listener net.Listener, token string, leader *launcher.Place, opts Options) *service {
	s := &service{
		listener: listener, token: token, leader: *leader, opts: opts,
		stopped: make(chan struct{}),
		members: make([]*member, leader.Size), strays: map[net.Conn]bool{},
		store: map[string][]byte{}, waiting: map[string][]request{}, barriers: map[string][]request{},
	}
	s.tasks.Go(s.accept)
	s.tasks.Go(s.watch)
	return s
}

// stop ends the service at once.
func (s *service) stop() {
	s.mu.Lock()
	if s.stopping {
		s.mu.Unlock()
		return
	}
	s.stopping = true
	close(s.stopped)
	_ = s.listener.Close()
	for conn := range s.strays {
		_ = conn.Close()
	}
	for _, m := range s.members {
		if m != nil {
			_ = m.conn.Close()
		}
	}
	s.mu.Unlock()
	s.tasks.Wait()
}

// drain waits until all members have gone, and stops.
func (s *service) drain() {
	s.wait()
	s.stop()
}

// wait waits until all members have gone. A member goes when it knows of a failure, also one
// that is still to come. One that has failed may never go, so wait takes no longer than it
// takes to tell them.
func (s *service) wait() {
	gone := func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return !slices.ContainsFunc(s.members, func(m *member) bool { return m == nil && !s.gaveUp || m != nil && !m.gone })
	}
	for since := time.Now(); !gone() && time.Since(since) < s.opts.Patience/2; {
		time.Sleep(5 * time.Millisecond)
	}
}

// accept takes connections.
func (s *service) accept() {
	for {
		conn, err := s.listener.Accept()
		if err != nil {
			select {
			case <-s.stopped:
				return
			case <-time.After(10 * time.Millisecond): // out of descriptors, or a connection that was reset
			}
			if errors.Is(err, net.ErrClosed) {
				return
			}
			continue
		}
		s.mu.Lock()
		if s.stopping || len(s.strays) > 2*len(s.members)+64 {
			s.mu.Unlock()
			_ = conn.Close()
			continue
		}
		s.strays[conn] = true
		s.tasks.Go(func() { s.attend(conn) })
		s.mu.Unlock()
	}
}

// attend serves a connection until it ends.
func (s *service) attend(conn net.Conn) {
	defer conn.Close()
	_ = conn.SetReadDeadline(time.Now().Add(s.opts.Patience))
	m := s.greet(conn)
	if m == nil {
		return
	}
	_ = conn.SetReadDeadline(time.Time{})
	for {
		msg, err := readMessage(conn, 2*MaxValue+maxHello)
		if err != nil {
			s.ended(m, err)
			return
		}
		s.handle(m, msg)
	}
}

// greet finds out who is calling. It returns nil for strangers.
func (s *service) greet(conn net.Conn) *member {
	said := make([]byte, len(magic))
	var msg *message
	_, err := io.ReadFull(conn, said)
	if err == nil && string(said) == magic {
		msg, err = readMessage(conn, maxHello)
	}
	m, why := s.admit(conn, msg, err)
	if why != "" { // a rank that does not read it holds up nobody else
		_ = conn.SetWriteDeadline(time.Now().Add(s.opts.Patience))
		_ = writeMessage(conn, &message{Kind: refused, Text: why})
	}
	return m
}

// admit makes a member of a rank that said msg, or says why it cannot come. Strangers get
// neither.
func (s *service) admit(conn net.Conn, msg *message, err error) (m *member, why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.strays, conn)
	if err != nil || msg == nil || msg.Kind != hello || msg.Token != s.token || s.stopping {
		return nil, ""
	}
	if why = s.refuse(msg); why != "" {
		return nil, why
	}
	m = &member{conn: conn, out: make(chan *message, 256), state: msg.State, heard: time.Now()}
	s.members[m.state.Rank] = m
	s.tasks.Go(func() { m.write(s.opts.Patience) })
	m.send(&message{Kind: hello, State: State{Host: s.leader.Host}})
	s.compare(m, msg)
	return m, ""
}

// refuse says why a rank cannot come, or "".
func (s *service) refuse(msg *message) string {
	rank, size := msg.State.Rank, len(s.members)
	switch {
	case msg.Size != size:
		return fmt.Sprintf("rank %d on %s is one of %d, but rank 0 on %s is one of %d; start all with the same number of ranks", rank, msg.State.Host, msg.Size, s.leader.Host, size)
	case rank < 0 || rank >= size:
		return fmt.Sprintf("there is no rank %d among %d", rank, size)
	case s.members[rank] != nil:
		return fmt.Sprintf("two processes are rank %d, one on %s and one on %s; give each process a rank of its own", rank, s.members[rank].state.Host, msg.State.Host)
	}
	return ""
}

// compare fails the job if a rank was started differently, and completes it with the last.
func (s *service) compare(m *member, msg *message) {
	switch {
	case s.failure != nil:
		m.send(&message{Kind: failureOf, Failure: s.failure})
		return
	case msg.Version != s.opts.Version:
		s.conclude(&Failure{State: m.state, Why: fmt.Sprintf("is version %s, but rank 0 on %s is version %s; start the same binary everywhere", msg.Version, s.leader.Host, s.opts.Version)})
		return
	case msg.Digest != s.opts.Digest:
		s.conclude(&Failure{State: m.state, Why: fmt.Sprintf("has other settings than rank 0 on %s; start all ranks with the same command line and files", s.leader.Host)})
		return
	}
	hosts := make([]string, len(s.members))
	for rank, other := range s.members {
		if other == nil {
			return
		}
		hosts[rank] = other.state.Host
	}
	s.tell(&message{Kind: complete, Hosts: hosts})
}

// write sends what a member is told, until the channel is closed.
func (m *member) write(patience time.Duration) {
	broken := false
	for msg := range m.out {
		if broken {
			continue
		}
		_ = m.conn.SetWriteDeadline(time.Now().Add(patience))
		if writeMessage(m.conn, msg) != nil {
			broken = true
			_ = m.conn.Close() // the reader finds it
		}
	}
}

// send tells a member something. One that reads nothing loses its connection.
func (m *member) send(msg *message) {
	if m.gone {
		return
	}
	select {
	case m.out <- msg:
	default:
		_ = m.conn.Close()
	}
}

// tell tells all members something.
func (s *service) tell(msg *message) {
	for _, m := range s.members {
		if m != nil {
			m.send(msg)
		}
	}
}

// handle does what a member asks for.
func (s *service) handle(m *member, msg *message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m.heard = time.Now()
	reply := &message{Kind: answer, ID: msg.ID}
	switch msg.Kind {
	case heartbeat:
		m.state.follow(msg.State)
		return
	case setKey:
		s.store[msg.Key] = msg.Value
		for _, w := range s.waiting[msg.Key] {
			w.m.send(&message{Kind: answer, ID: w.id, Value: msg.Value})
		}
		delete(s.waiting, msg.Key)
	case getKey:
		value, set := s.store[msg.Key]
		if !set {
			s.waiting[msg.Key] = append(s.waiting[msg.Key], request{m, msg.ID})
			return
		}
		reply.Value = value
	case barrier:
		s.barriers[msg.Key] = append(s.barriers[msg.Key], request{m, msg.ID})
		s.checkBarrier(msg.Key)
		return
	case peekKey:
		value, set := s.store[msg.Key]
		reply.Value, reply.Set = value, set
	case askClock:
		reply.Time = s.opts.Now()
	case askStates:
		reply.States = s.states()
	case abort:
		m.aborted = true
		m.state.follow(msg.State)
		f := msg.Failure // of rank 0, which was silent and has come back
		if f == nil {
			f = &Failure{State: m.state, Why: msg.Text}
		}
		s.accuse(f, false)
		return
	case goodbye:
		m.state.Left = true
		for key := range s.barriers {
			s.checkBarrier(key)
		}
	default:
		s.accuse(&Failure{State: m.state, Why: "sent a message that rank 0 does not understand; start the same binary everywhere"}, true)
		return
	}
	m.send(reply)
}

// checkBarrier lets a barrier go when all have come, and fails if one cannot come any more.
func (s *service) checkBarrier(key string) {
	come := s.barriers[key]
	if len(come) == len(s.members) {
		delete(s.barriers, key)
		for _, w := range come {
			w.m.send(&message{Kind: answer, ID: w.id})
		}
		return
	}
	for _, m := range s.members {
		if m != nil && m.state.Left && len(come) > 0 {
			s.accuse(&Failure{State: m.state, Why: fmt.Sprintf("has left, but others wait for it in barrier %q", key)}, true)
			return
		}
	}
}

// ended is called when a connection has ended.
func (s *service) ended(m *member, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !m.state.Left && !m.aborted {
		s.accuse(&Failure{State: m.state, Why: howEnded(err, "lost its connection to rank 0")}, true)
	}
	m.gone = true
	close(m.out)
}

// accuse notes a failure. The verdict comes two heartbeats later: until then the others say
// in which collective they are, and a rank that ended counts before one that complains,
// because others complain of its end.
func (s *service) accuse(f *Failure, certain bool) {
	if s.failure != nil || s.stopping {
		return
	}
	first := s.suspect == nil
	if first || certain && s.members[s.suspect.Rank].aborted {
		s.suspect = f
	}
	if first {
		s.tasks.Go(func() {
			select {
			case <-s.stopped:
			case <-time.After(2 * beatEvery(len(s.members), s.opts.Patience)):
				s.mu.Lock()
				defer s.mu.Unlock()
				s.conclude(s.suspect)
			}
		})
	}
}

// conclude tells all members which rank has failed. The first verdict counts.
func (s *service) conclude(f *Failure) {
	if s.failure != nil {
		return
	}
	f.States = s.states()
	s.failure = f
	s.tell(&message{Kind: failureOf, Failure: f})
}

// missing returns the ranks that have not come. The caller has the lock.
func (s *service) missing() (ranks []int) {
	for rank, m := range s.members {
		if m == nil {
			ranks = append(ranks, rank)
		}
	}
	return ranks
}

// late tells who has not come within Patience.
func (s *service) late(opts Options) {
	s.mu.Lock()
	missing := s.missing()
	s.mu.Unlock()
	if len(missing) > 0 && opts.Waits != nil {
		opts.Waits(fmt.Sprintf("rank 0 on %s waits for other ranks at %s (missing: %s)", s.leader.Host, s.listener.Addr(), launcher.Ranks(missing)))
	}
}

// giveUp fails the job because ranks have not come.
func (s *service) giveUp(after time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gaveUp = true
	missing := s.missing()
	if len(missing) == 0 {
		return
	}
	s.conclude(&Failure{
		State: State{Rank: missing[0]},
		Why: fmt.Sprintf("did not come within %v (missing: %s); see why it did not start, and whether its machine reaches %s",
			after, launcher.Ranks(missing), s.listener.Addr()),
	})
}

// states returns what all members that have come do.
func (s *service) states() (states []State) {
	for _, m := range s.members {
		if m != nil {
			states = append(states, m.state)
		}
	}
	return states
}

// watch sends heartbeats and looks for members that are silent.
func (s *service) watch() {
	tick := beatEvery(len(s.members), s.opts.Patience)
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	last := time.Now()
	for {
		select {
		case <-s.stopped:
			return
		case <-ticker.C:
		}
		gap := time.Since(last)
		last = time.Now()
		s.mu.Lock()
		var leader State
		if m := s.members[0]; m != nil {
			leader = m.state
		}
		s.tell(&message{Kind: heartbeat, State: leader})
		for _, m := range s.members {
			if m == nil || m.gone || m.state.Left {
				continue
			}
			if gap > s.opts.Patience/2 {
				m.heard = m.heard.Add(gap) // this process stood still, so it heard nobody
			}
			if time.Since(m.heard) > s.opts.Patience {
				s.accuse(&Failure{State: m.state, Why: fmt.Sprintf("has not answered for %v; it hangs, was stopped, or its machine cannot be reached", s.opts.Patience)}, true)
			}
		}
		s.mu.Unlock()
	}
}
