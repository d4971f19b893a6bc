// This file compares the waits that are issued with those that are needed.

package order

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
)

// listed is a stream that lists the marks that it waits for.
type listed struct {
	device.Stream
	waits []device.Event
}

func (s *listed) Wait(e device.Event) { s.waits = append(s.waits, e) }
func (s *listed) Record(device.Event) {}

type numbered struct {
	device.Event
	n int
}

// A lane waits for what its next work must come after, and does not for what it comes after
// anyway or what another of the waits implies. Waits says whether there are any.
func TestWaitsAreNeeded(t *testing.T) {
	rng := rand.New(rand.NewPCG(72, 126))
	for range 200 {
		set := NewSet(nil)
		lanes, streams := make([]*Lane, 3), make([]*listed, 3)
		for i := range lanes {
			streams[i] = &listed{}
			lanes[i] = set.Lane(streams[i])
		}
		// known has, for each lane, the recordings that its next work comes after; holds, for each
		// mark, those that it comes after itself.
		type recording struct{ mark, time int }
		known := make([]map[recording]bool, len(lanes))
		for i := range known {
			known[i] = map[recording]bool{}
		}
		var marks []*Mark
		var last []recording
		var holds []map[recording]bool
		for i := range 5 {
			marks, last, holds = append(marks, External(&numbered{n: i})), append(last, recording{i, -1}), append(holds, nil)
		}
		for time := range 60 {
			i := rng.IntN(len(lanes))
			l := lanes[i]
			if k := rng.IntN(len(marks)); rng.IntN(2) == 0 {
				l.Record(marks[k])
				last[k] = recording{k, time}
				known[i][last[k]] = true
				holds[k] = map[recording]bool{}
				for r := range known[i] {
					holds[k][r] = true
				}
				continue
			}
			var asked []int
			for range rng.IntN(4) {
				if k := rng.IntN(len(marks)); holds[k] != nil && !slices.Contains(asked, k) {
					asked = append(asked, k)
					l.After(marks[k])
				}
			}
			l.After(nil)
			var want []int
			for at, k := range asked {
				needed := !known[i][last[k]]
				for _, o := range asked[at+1:] {
					needed = needed && !holds[o][last[k]]
				}
				if !needed {
					continue
				}
				want = append(want, k)
				for r := range holds[k] {
					known[i][r] = true
				}
			}
			streams[i].waits = nil
			if got := l.Waits(); got != (len(want) > 0) {
				t.Fatalf("there are waits: %v; want %v of %v", got, want, asked)
			}
			l.Flush()
			var got []int
			for _, e := range streams[i].waits {
				got = append(got, e.(*numbered).n)
			}
			if !slices.Equal(got, want) {
				t.Fatalf("lane %d waits for %v, want %v of %v", i, got, want, asked)
			}
		}
	}
}
