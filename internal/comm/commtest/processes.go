// This file owns processes for tests: goroutines that know no more of each other than
// processes do.

package commtest

import (
	"sync"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
)

// foreign is a communicator that no driver of this process knows, as that of another
// engine is.
type foreign struct{ comm.Comm }

// lobby makes worlds of ranks in several processes.
type lobby struct {
	mu    sync.Mutex
	rooms []*room
	next  []int // by rank: the room that it joins next
}

// room is a world that some ranks have joined.
type room struct {
	devs  []device.Device
	left  int
	ready chan struct{}
	comms []comm.Comm
	err   error
}

func (l *lobby) join(rank int, dev device.Device) (comm.Comm, error) {
	l.mu.Lock()
	n := len(l.next)
	if l.next[rank] == len(l.rooms) {
		l.rooms = append(l.rooms, &room{devs: make([]device.Device, n), left: n, ready: make(chan struct{})})
	}
	r := l.rooms[l.next[rank]]
	l.next[rank]++
	r.devs[rank] = dev
	if r.left--; r.left == 0 {
		r.comms, r.err = comm.NewLocal(r.devs, comm.Options{})
		close(r.ready)
	}
	l.mu.Unlock()
	<-r.ready
	if r.err != nil {
		return nil, r.err
	}
	return foreign{r.comms[rank]}, nil
}

// Processes returns processes that hold the given ranks. Each belongs to a goroutine of the
// caller. open opens a device that does no work. The test closes everything at its end.
func Processes(t testing.TB, open func() (device.Device, error), ranks ...[]int) (ps []*comm.Process) {
	t.Helper()
	l, devs := &lobby{}, make([]device.Device, len(ranks))
	for i, rs := range ranks {
		l.next = append(l.next, make([]int, len(rs))...)
		var err error
		if devs[i], err = open(); err != nil {
			t.Fatal(err)
		}
	}
	control, err := comm.NewLocal(devs, comm.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for i, rs := range ranks {
		ps = append(ps, &comm.Process{Ranks: rs, Join: l.join, Control: foreign{control[i]}})
	}
	t.Cleanup(func() {
		for _, c := range control {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
		for _, d := range devs {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return ps
}
