// This file owns what the communicators of a process share, from Open to the last Close.

package mpi

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/mpi"
	"github.com/stowage-dev/stowage/memory"
)

// Options configures a world.
type Options struct {
	// Scratch is the size of the host memory for parts that arrive before they are
	// added up, and of the pinned buffers of a device whose memory the host cannot read.
	// Larger calls go in pieces. It must be the same on all ranks. Zero means 4 MiB, and at
	// least 4 KiB are taken for each rank.
	Scratch memory.Bytes
	// Patience is how long a call waits for other ranks before the communicator fails and
	// names those that have not come. Zero means for ever.
	Patience time.Duration
	// Name says whose calls these are, in the words of notes. It is "all ranks" if empty.
	Name string
	// Note is told of every call when its turn on its stream comes: "all-to-all 12 of ranks 0
	// and 1". Ranks that make the same call have the same words, and messages between two
	// ranks the same number. If others keep a call waiting, Note is told again, with the
	// ranks that have not come. It must return at once.
	Note func(call string, absent []int)
	// Staged sends device memory through pinned buffers even if the host can read it.
	Staged bool

	largest memory.Bytes // of a message, or zero for what MPI allows
}

// world is the state that all communicators of this process share.
type world struct {
	p          *Process
	dev        device.Device
	o          Options
	rank, size int
	hosts      []string
	staged     bool
	failed     atomic.Pointer[comm.Failure]

	issue   sync.Mutex   // held while a call is put on its stream
	turn    device.Event // the last use of in and out
	in, out *device.Buffer
	reducer *comm.Reducer

	// The lock of MPI guards what follows.
	control mpi.Comm
	comms   []mpi.Comm // all that were made, in order
	active  map[*op]struct{}
	left    map[uint64]map[int]*news // by communicator and rank: those that have closed
	inbox   []byte
	looked  time.Time // when it was last looked how long calls wait
	noted   time.Time // when it was last looked whom calls wait for
	telling int       // control messages on their way
	closing func()    // looks whether Close can end, while it waits
	deaf    bool      // the receive of news is being cancelled
}

// Open makes a communicator of all processes. All of them must call it. This process works
// on the given device.
func (p *Process) Open(d device.Device, o Options) (comm.Comm, error) {
	if o.Scratch == 0 {
		o.Scratch = 4 * memory.MiB
	}
	if o.largest == 0 {
		o.largest = mpi.Largest
	}
	if o.Patience < 0 {
		return nil, fmt.Errorf("comm: expected a Patience of zero or more, got %v; zero waits for ever", o.Patience)
	}
	if o.Scratch < 64*memory.KiB {
		return nil, fmt.Errorf("comm: expected a Scratch of 64 KiB or more, got %d bytes", o.Scratch)
	}
	o.Scratch = max(o.Scratch, 4*memory.KiB*memory.Bytes(p.info.Size))
	w := &world{
		p: p, dev: d, o: o, rank: p.info.Rank, size: p.info.Size, staged: o.Staged || d.Info().Backend != "cpu",
		active: map[*op]struct{}{}, left: map[uint64]map[int]*news{}, inbox: make([]byte, newsSize), looked: time.Now(),
	}
	ranks := make([]int, w.size)
	for i := range ranks {
		ranks[i] = i
	}
	g := w.newGroup(1, ranks, w.rank, cmp.Or(o.Name, "all ranks"))
	failed := w.allocate()
	err := p.do(func() (err error) {
		if w.staged {
			p.rest.claim() // the loop polls for all calls
		}
		if err := w.meet(failed); err != nil {
			return err
		}
		if w.control, err = p.lib.Dup(p.info.World); err != nil {
			return err
		}
		if g.c, err = p.lib.Dup(p.info.World); err != nil {
			return err
		}
		w.comms = append(w.comms, w.control, g.c)
		p.worlds[w] = struct{}{}
		w.listen()
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, w.release())
	}
	return g, nil
}

// hello is what a rank tells all others when a world opens.
type hello struct {
	Host    string
	Scratch memory.Bytes
	Failed  string // why the rank cannot take part, or empty
}

// meet makes the ranks agree that the world can open, and tells them each other's hosts.
func (w *world) meet(failed error) error {
	const size = 1024
	mine := hello{Scratch: w.o.Scratch}
	mine.Host, _ = os.Hostname()
	if failed != nil {
		mine.Failed = failed.Error()
		mine.Failed = mine.Failed[:min(len(mine.Failed), size/8)] // JSON makes at most six bytes of one
	}
	text, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	all, err := w.p.lib.Gather(w.p.info.World, append(text, make([]byte, size-len(text))...), w.size)
	if err != nil || failed != nil {
		return errors.Join(failed, err)
	}
	for r := range w.size {
		var h hello
		if err := json.Unmarshal([]byte(untilZero(all[r*size:(r+1)*size])), &h); err != nil {
			return fmt.Errorf("comm: cannot read what rank %d says: %w; run the same version of the program everywhere", r, err)
		}
		switch {
		case h.Failed != "":
			return fmt.Errorf("comm: rank %d on %s cannot take part: %s", r, h.Host, h.Failed)
		case h.Scratch != w.o.Scratch:
			return fmt.Errorf("comm: rank %d has a Scratch of %d bytes and rank %d one of %d; give all ranks the same", w.rank, w.o.Scratch, r, h.Scratch)
		}
		w.hosts = append(w.hosts, h.Host)
	}
	return nil
}

func (w *world) allocate() (err error) {
	if w.size == 1 {
		return nil
	}
	if w.turn, err = w.dev.NewEvent(device.External); err != nil {
		return err
	}
	if w.in, err = w.dev.Alloc(memory.Host, w.o.Scratch, "comm scratch"); err != nil {
		return err
	}
	if w.staged {
		if w.out, err = w.dev.Alloc(memory.Host, w.o.Scratch, "comm scratch"); err != nil {
			return err
		}
	}
	w.reducer, err = comm.NewReducer(w.dev, w.size, 0)
	return err
}

// release frees the memory after its last use.
func (w *world) release() (err error) {
	if w.reducer != nil {
		err = w.reducer.Close()
	}
	if w.in != nil {
		s, e := w.dev.NewStream("comm scratch")
		if e != nil {
			return errors.Join(err, fmt.Errorf("comm: freeing scratch: %w", e))
		}
		s.Wait(w.turn)
		for _, b := range []*device.Buffer{w.in, w.out} {
			if b != nil {
				s.Free(b)
			}
		}
		err = errors.Join(err, s.Close())
	}
	if w.turn != nil {
		err = errors.Join(err, w.turn.Close())
	}
	return err
}

// A rank that has closed waits so long for the others to close, or for them to learn that it
// has failed.
const (
	patience       = 30 * time.Second
	patienceFailed = 2 * time.Second
)

// close ends the world after the calls in flight. A world that has not failed waits until
// all ranks have closed, so that no message is lost.
func (w *world) close(g *group) error {
	synced := w.dev.Sync() // calls in flight end, unless the device has failed
	over := make(chan struct{})
	w.p.post(func() {
		since := time.Now()
		g.leave()
		w.closing = func() {
			wait, all := patience, len(w.left[g.id]) == w.size-1
			if w.failed.Load() != nil || synced != nil {
				wait, all = patienceFailed, true
			}
			if all && w.telling == 0 || time.Since(since) > wait {
				w.end()
				close(over)
			}
		}
	})
	<-over
	return w.release()
}

// end ends what the world has in MPI. A world that has failed leaves its communicators as
// they are: other ranks may not come to free them.
func (w *world) end() {
	p := w.p
	w.deaf, w.closing = true, nil
	for i := range p.requests.Len() {
		if t := p.requests.Token(i); t.w == w && t.news {
			_ = p.requests.Cancel(i)
		}
	}
	for range 100 {
		if _, err := p.requests.Some(func(t token, err error) { t.ended(err) }); err != nil {
			break
		}
	}
	p.requests.Forget(func(t token) bool { return t.w == w })
	delete(p.worlds, w)
	if w.failed.Load() == nil {
		for _, c := range w.comms {
			_ = p.lib.Free(c)
		}
	}
}
