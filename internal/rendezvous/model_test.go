// This file tests the service and a session without a network, by the clock of a bubble.

package rendezvous

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/internal/launcher"
)

// asked is a request that waits in the model.
type asked struct {
	rank int
	id   uint64
}

// reply is an answer as a member gets it.
type reply struct {
	rank  int
	id    uint64
	value string
	set   bool
}

// Whatever members ask in whatever order, each request is answered once, with what an obvious
// model answers, and the job fails if and only if a member has left that others wait for.
// SPEC S7.2.
func TestAnswersOfTheService(t *testing.T) {
	const size = 3
	failures := 0
	for seed := range uint64(200) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 9))
			s := &service{
				opts: Options{Patience: time.Minute}, stopped: make(chan struct{}),
				store: map[string][]byte{}, waiting: map[string][]request{}, barriers: map[string][]request{},
			}
			for rank := range size {
				s.members = append(s.members, &member{out: make(chan *message, 256), state: State{Rank: rank}})
			}
			store, getting, arrived, left := map[string]string{}, map[string][]asked{}, map[string][]asked{}, [size]bool{}
			doomed := false
			for id := uint64(1); id <= 40 && !doomed; id++ {
				rank := rng.IntN(size)
				if left[rank] {
					continue
				}
				msg := &message{ID: id, Key: fmt.Sprint("key ", rng.IntN(3)), Value: fmt.Append(nil, id)}
				var want []reply
				switch msg.Kind = []kind{setKey, getKey, getKey, peekKey, barrier, barrier, goodbye}[rng.IntN(7)]; msg.Kind {
				case setKey:
					store[msg.Key] = string(msg.Value)
					for _, g := range getting[msg.Key] {
						want = append(want, reply{g.rank, g.id, store[msg.Key], false})
					}
					delete(getting, msg.Key)
					want = append(want, reply{rank, id, "", false})
				case getKey:
					if v, set := store[msg.Key]; set {
						want = append(want, reply{rank, id, v, false})
					} else {
						getting[msg.Key] = append(getting[msg.Key], asked{rank, id})
					}
				case peekKey:
					v, set := store[msg.Key]
					want = append(want, reply{rank, id, v, set})
				case barrier:
					// A rank is in a barrier once.
					if slices.ContainsFunc(arrived[msg.Key], func(a asked) bool { return a.rank == rank }) {
						continue
					}
					if arrived[msg.Key] = append(arrived[msg.Key], asked{rank, id}); len(arrived[msg.Key]) == size {
						for _, a := range arrived[msg.Key] {
							want = append(want, reply{a.rank, a.id, "", false})
						}
						delete(arrived, msg.Key)
					}
				case goodbye:
					left[rank] = true
					want = append(want, reply{rank, id, "", false})
				}
				doomed = slices.Contains(left[:], true) && len(arrived) > 0
				s.handle(s.members[rank], msg)
				var got []reply
				for rank, m := range s.members {
					for len(m.out) > 0 {
						a := <-m.out
						got = append(got, reply{rank, a.ID, string(a.Value), a.Set})
					}
				}
				slices.SortFunc(want, func(a, b reply) int { return 1000*(a.rank-b.rank) + int(a.id) - int(b.id) })
				slices.SortFunc(got, func(a, b reply) int { return 1000*(a.rank-b.rank) + int(a.id) - int(b.id) })
				if !slices.Equal(got, want) || len(s.waiting) != len(getting) || len(s.barriers) != len(arrived) {
					t.Fatalf("seed %d, request %d of rank %d, kind %v: got %v, want %v; %d keys and %d barriers are waited for, want %d and %d",
						seed, id, rank, msg.Kind, got, want, len(s.waiting), len(s.barriers), len(getting), len(arrived))
				}
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			if f := s.failure; (f != nil) != doomed || doomed && !strings.Contains(f.Why, "has left, but others wait for it in barrier") {
				t.Fatalf("seed %d: ranks %v have left, others wait: %t; the failure is %v", seed, left, doomed, f)
			}
			if doomed {
				failures++
			}
			close(s.stopped)
			s.tasks.Wait()
		})
	}
	if failures < 50 || failures > 190 {
		t.Errorf("%d of 200 jobs fail", failures)
	}
}

// A rank that stood still has heard nobody meanwhile, and blames rank 0 only after as much
// patience as always.
func TestStoodStill(t *testing.T) { // SPEC S7.2
	synctest.Test(t, func(t *testing.T) {
		const patience = time.Minute
		near, far := net.Pipe()
		s := newSession(near, "host 0", &launcher.Place{Rank: 1, Size: 2, Host: "host 1"}, Options{Patience: patience})
		time.Sleep(patience * 9 / 10) // nobody reads, so the first heartbeat does not return
		go func() { _, _ = io.Copy(io.Discard, far) }()
		time.Sleep(patience * 6 / 10)
		if err := s.Err(); err != nil {
			t.Errorf("it blames rank 0 after having listened for 0.6 of its patience: %v", err)
		}
		time.Sleep(patience)
		if err := s.Err(); err == nil || !strings.Contains(err.Error(), "rank 0 on host 0 has not answered for 1m0s") {
			t.Errorf("after having listened for 1.6 of its patience: %v", err)
		}
		_, _ = s.Close(), far.Close()
		synctest.Wait()
	})
}
