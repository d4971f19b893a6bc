// Package rendezvous lets the ranks of a job find each other and learn when one of them
// fails. Rank 0 opens a small service and all ranks connect to it. It keeps keys and values,
// barriers and heartbeats; tensors never pass through it.
//
// If a rank ends, loses its connection, stops answering or calls [Session.Abort], every other
// rank learns within seconds which rank it was, on which host, and in which collective it
// was seen last. A rank that calls [Session.Close] leaves without a failure.
//
// This file owns joining. session.go is what a rank holds, service.go what rank 0 serves,
// address.go how ranks find the service, torchstore.go the store of torchrun's agent,
// failure.go what is said when a rank fails, wire.go the messages, pmi.go what MPICH asks.
package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stowage-dev/stowage/internal/launcher"
)

// Options says what the ranks must agree on, and how they meet.
type Options struct {
	// Version and Digest must be alike on all ranks: the program's version, and a digest
	// of the run's settings.
	Version, Digest string

	// Exchange brings a text of rank 0 to all ranks: rank 0 calls it with the text, all
	// others with "", and all get the text. MPI's broadcast is one. Without it the ranks
	// meet through torchrun's agent or at the leader's address.
	Exchange func(fromLeader string) (string, error)

	// Timeout bounds how long ranks wait for each other in Join. It is 5 minutes if zero.
	Timeout time.Duration

	// Patience is how long a rank may be silent before it counts as failed. It is 5 seconds if zero.
	Patience time.Duration

	// Waits, unless it is nil, is told once what this rank waits for if it has not reached rank
	// 0 within Patience, or at once if nobody knows the name of its host; and by rank 0 who has not come
	// within Patience.
	Waits func(text string)

	// Now reads the clock of this rank's traces, in nanoseconds. Without it, the clock
	// begins with Join.
	Now func() int64
}

const (
	defaultTimeout  = 5 * time.Minute
	defaultPatience = 5 * time.Second
	clockReadings   = 16 // round trips that measure the offset of a clock
)

// Join connects this rank with all others and returns once all are there. The error of a
// rank that cannot take part is that of all ranks.
func Join(ctx context.Context, place *launcher.Place, opts Options) (*Session, error) {
	if opts.Timeout == 0 {
		opts.Timeout = defaultTimeout
	}
	if opts.Patience == 0 {
		opts.Patience = defaultPatience
	}
	if opts.Now == nil {
		origin := time.Now()
		opts.Now = func() int64 { return int64(time.Since(origin)) }
	}
	ctx, cancel := context.WithTimeout(ctx, opts.Timeout)
	defer cancel()
	s, err := join(ctx, place, opts)
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return nil, fmt.Errorf("rank %d on %s waited %v for the other ranks: %w", place.Rank, place.Host, opts.Timeout, err)
	}
	return s, err
}

func join(ctx context.Context, place *launcher.Place, opts Options) (*Session, error) {
	m, err := newMeeting(ctx, place, opts)
	if err != nil {
		return nil, err
	}
	defer m.close()
	var service *service
	if place.Rank == 0 {
		service = serve(m.listener, m.token, place, opts)
	}
	s, err := m.connect(ctx, place, opts)
	if err != nil {
		if service != nil {
			service.stop()
		}
		return nil, err
	}
	s.service = service
	if err := s.awaitAll(ctx); err != nil {
		return nil, err
	}
	if err := s.measureClock(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// awaitAll waits until all ranks have come.
func (s *Session) awaitAll(ctx context.Context) error {
	if s.service != nil { // others say what they wait for until they have reached it
		select {
		case <-s.complete:
		case <-s.failed:
		case <-ctx.Done():
		case <-time.After(s.opts.Patience):
			s.service.late(s.opts)
		}
	}
	select {
	case <-s.complete:
		s.findLocal()
		return nil
	case <-s.failed:
	case <-ctx.Done():
		if s.service != nil {
			s.service.giveUp(s.opts.Timeout)
		}
		select { // the leader says who is missing
		case <-s.failed:
		case <-time.After(s.opts.Patience):
			s.fail(context.Cause(ctx))
		}
	}
	err := s.Err()
	_ = s.Close()
	return err
}

// findLocal counts the ranks of this machine, if the launcher did not say.
func (s *Session) findLocal() {
	if s.place.LocalKnown {
		return
	}
	for rank, host := range s.hosts {
		if host != s.place.Host {
			continue
		}
		if rank < s.place.Rank {
			s.place.LocalRank++
		}
		s.place.LocalSize++
	}
	s.place.LocalKnown = true
}

// measureClock finds the offset to the clock of rank 0. Half of a round trip is the most by
// which a reading can be wrong, so the quickest counts.
func (s *Session) measureClock(ctx context.Context) error {
	if s.place.Rank == 0 {
		return nil
	}
	for i := range clockReadings {
		before := s.opts.Now()
		reply, err := s.request(ctx, &message{Kind: askClock})
		if err != nil {
			return err
		}
		after := s.opts.Now()
		if trip := time.Duration(after - before); i == 0 || trip < s.trip {
			s.trip, s.offset = trip, time.Duration(reply.Time-before-(after-before)/2)
		}
	}
	return nil
}
