// This file tests the service beside an obvious model, and with connections that break at
// any byte.

package rendezvous

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/internal/launcher"
)

// The store and the barriers do what a map and counters do, in seeded orders of calls from
// all ranks.
func TestServiceModel(t *testing.T) {
	const size, keys, calls = 3, 4, 400
	type result struct {
		value string
		err   error
	}
	for seed := range uint64(3) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			sessions := joined(t, size, nil)
			store := map[string]string{}          // the model: keys that are set
			getting := map[string][]chan result{} // gets that wait for a key
			var arrived []chan result             // at the barrier, in any order
			at := map[int]bool{}                  // ranks that are there
			finished := func(c chan result, want string) {
				t.Helper()
				select {
				case r := <-c:
					if r.err != nil || r.value != want {
						t.Fatalf("got %q, %v; want %q", r.value, r.err, want)
					}
				case <-time.After(2 * time.Minute):
					t.Fatalf("no answer; want %q", want)
				}
			}
			set := func(rank int, key, value string) {
				if err := sessions[rank].Set(t.Context(), key, []byte(value)); err != nil {
					t.Fatal(err)
				}
				if _, was := store[key]; !was {
					for _, c := range getting[key] {
						finished(c, value)
					}
					delete(getting, key)
				}
				store[key] = value
			}
			for call := range calls {
				rank, key := rng.IntN(size), fmt.Sprintf("round %d key %d", call/40, rng.IntN(keys))
				s := sessions[rank]
				switch rng.IntN(4) {
				case 0:
					set(rank, key, fmt.Sprint(call))
				case 1:
					value, is, err := s.Lookup(t.Context(), key)
					if want, was := store[key]; err != nil || is != was || string(value) != want {
						t.Fatalf("%s: got %q, %t, %v; want %q, %t", key, value, is, err, want, was)
					}
				case 2:
					c := make(chan result, 1)
					if want, was := store[key]; was {
						value, err := s.Get(t.Context(), key)
						c <- result{string(value), err}
						finished(c, want)
						break
					}
					go func() {
						value, err := s.Get(t.Context(), key)
						c <- result{string(value), err}
					}()
					getting[key] = append(getting[key], c)
				case 3:
					if at[rank] {
						break
					}
					at[rank] = true
					c := make(chan result, 1)
					go func() { c <- result{"", s.Barrier(t.Context(), "model")} }()
					if arrived = append(arrived, c); len(arrived) == size {
						for _, c := range arrived {
							finished(c, "")
						}
						arrived, at = nil, map[int]bool{}
					}
				}
				for _, c := range arrived {
					if len(c) > 0 {
						t.Fatalf("a barrier let a rank go, but only %d of %d are there", len(arrived), size)
					}
				}
			}
			for key := range getting {
				set(0, key, "at last")
			}
			for rank, s := range sessions {
				if len(arrived) > 0 && !at[rank] {
					c := make(chan result, 1)
					go func() { c <- result{"", s.Barrier(t.Context(), "model")} }()
					arrived = append(arrived, c)
				}
			}
			for _, c := range arrived {
				finished(c, "")
			}
			closeAll(t, sessions)
		})
	}
}

// cutter passes bytes on between a rank and the service, and breaks the connection after so
// many of the rank's.
type cutter struct {
	listener net.Listener
	tasks    sync.WaitGroup
}

func newCutter(t *testing.T, target string, after int64) *cutter {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &cutter{listener: l}
	c.tasks.Go(func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", target)
			if err != nil {
				_ = near.Close()
				continue
			}
			c.tasks.Go(func() {
				_, _ = io.CopyN(far, near, after)
				_, _ = far.Close(), near.Close()
			})
			c.tasks.Go(func() {
				_, _ = io.Copy(near, far)
				_, _ = far.Close(), near.Close()
			})
		}
	})
	return c
}

// Wherever the connection of a rank breaks, all ranks end with an error, and none waits for
// ever.
func TestConnectionBreaks(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for ranks that do not come")
	}
	t.Parallel()
	for _, after := range []int64{0, 11, 120, 160, 200, 300, 500, 800, 1300} {
		t.Run(fmt.Sprint(after, " bytes"), func(t *testing.T) {
			t.Parallel()
			b := newBroadcast()
			errs := make([]error, 3)
			var cut *cutter
			var wg sync.WaitGroup
			for rank := range errs {
				o := Options{Exchange: b.exchange, Timeout: 20 * time.Second, Patience: time.Minute}
				if rank == 1 {
					o.Exchange = func(string) (string, error) {
						text, err := b.exchange("")
						var in invitation
						if err == nil {
							err = json.Unmarshal([]byte(text), &in)
						}
						if err != nil {
							return "", err
						}
						cut = newCutter(t, net.JoinHostPort("127.0.0.1", in.Port), after)
						_, in.Port, _ = net.SplitHostPort(cut.listener.Addr().String())
						changed, err := json.Marshal(in)
						return string(changed), err
					}
				}
				wg.Go(func() {
					s, err := Join(t.Context(), &launcher.Place{Rank: rank, Size: 3, Host: "h"}, o)
					if err == nil {
						<-s.Failed()
						err = s.Close()
					}
					errs[rank] = err
				})
			}
			wg.Wait()
			_ = cut.listener.Close()
			cut.tasks.Wait()
			for rank, err := range errs {
				if err == nil || rank != 1 && !strings.Contains(err.Error(), "rank 1") {
					t.Errorf("rank %d: got %v, want an error that names rank 1", rank, err)
				}
			}
		})
	}
}
