// This file owns how a call reaches the library: as the launch of a kernel that the
// device's assistant does. So it is ordered, declared, captured and traced as any other
// work. The CPU device, which runs a library of tests, calls it when its turn comes.

package nccl

import (
	"errors"
	"runtime"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/nccl"
)

// Library is what the engine needs of NCCL; see [nccl.Library].
type Library interface {
	NewID() (nccl.ID, error)
	Init(size int, id nccl.ID, rank int) (nccl.Comm, error)
	Poll(c nccl.Comm) (done bool, err error)
	Finalize(c nccl.Comm) error
	Destroy(c nccl.Comm) error
	Abort(c nccl.Comm) error
	Register(c nccl.Comm, addr uintptr, n int) (handle uintptr, err error)
	Deregister(c nccl.Comm, handle uintptr) error
	GroupStart() error
	GroupEnd() error
	Send(c nccl.Comm, addr uintptr, n, to int, stream uintptr) error
	Recv(c nccl.Comm, addr uintptr, n, from int, stream uintptr) error
	AllGather(c nccl.Comm, dst, src uintptr, n int, stream uintptr) error
	ReduceScatter(c nccl.Comm, dst, src uintptr, n int, t nccl.Type, op nccl.Op, stream uintptr) error
	AllReduce(c nccl.Comm, dst, src uintptr, n int, t nccl.Type, op nccl.Op, stream uintptr) error
	Broadcast(c nccl.Comm, addr uintptr, n, root int, stream uintptr) error
}

var _ Library = (*nccl.Library)(nil)

// pending are the launches that are being issued, by their kernel.
var pending sync.Map // of func(stream uintptr)

// launch issues work of the library on a stream.
func launch(s device.Stream, name string, access []device.Access, run func(stream uintptr)) {
	k := &device.Kernel{Name: "nccl " + name, Go: func(*device.Launch) { run(0) }}
	l := device.NewLaunch(k, 1, 1)
	l.DeclareAll(access)
	pending.Store(k, run)
	defer pending.Delete(k)
	s.Launch(l)
}

// Assist returns what opens the assistant of a GPU whose ranks use NCCL, beside another
// one, which may be nil.
func Assist(other func() (cuda.Assist, error)) func() (cuda.Assist, error) {
	return func() (cuda.Assist, error) {
		a := assist{}
		if other == nil {
			return a, nil
		}
		var err error
		var none *device.Unsupported
		if a.other, err = other(); err != nil && !errors.As(err, &none) {
			return nil, err
		} else if err != nil {
			a.other = nil
		}
		return a, nil
	}
}

type assist struct{ other cuda.Assist }

func (a assist) Takes(k *device.Kernel) bool {
	if _, ours := pending.Load(k); ours {
		return true
	}
	return a.other != nil && a.other.Takes(k)
}

func (a assist) Launch(k *device.Kernel, args []uint64, stream uintptr) (bool, error) {
	if run, ours := pending.Load(k); ours {
		run.(func(uintptr))(stream)
		return true, nil
	}
	return a.other.Launch(k, args, stream)
}

func (a assist) Close() {
	if a.other != nil {
		a.other.Close()
	}
}

// run makes the calls of a group at once and waits until the library has taken them. It
// gives up if the communicator fails meanwhile.
func (g *group) run(f func(c nccl.Comm) error) {
	lib := g.w.lib
	err := g.guard(func() error {
		if err := lib.GroupStart(); err != nil {
			return err
		}
		return errors.Join(f(g.c), lib.GroupEnd())
	})
	if err == nil {
		err = g.settle(func() bool { return false })
	}
	if err != nil {
		g.blame(err)
	}
}

// grace is how long an error of NCCL waits for news of its cause.
const grace = time.Second

// blame makes all communicators fail because of an error of NCCL, unless hosts know better:
// the error may follow from a rank that closed the communicator, gave up or died.
func (g *group) blame(err error) {
	for until := time.Now().Add(grace); time.Now().Before(until); time.Sleep(lookEvery) {
		if g.failed() != nil {
			return
		}
		if why := g.trouble(); why != nil {
			g.lose(failureOf(why))
			return
		}
	}
	g.w.o.Host.Abort(err)
}

// guard runs f unless the communicator is dead. Only one thread uses it at a time.
func (g *group) guard(f func() error) error {
	g.calls.Lock()
	defer g.calls.Unlock()
	if g.dead {
		return nil
	}
	return f()
}

// settle polls until the last call is over, the communicator is dead or stop says so. The
// library takes most calls within microseconds. It waits for other ranks where it connects
// them.
func (g *group) settle(stop func() bool) error {
	for began := time.Now(); ; {
		var done bool
		err := g.guard(func() (err error) {
			done, err = g.w.lib.Poll(g.c)
			return err
		})
		if done || err != nil || stop() || g.isDead() {
			return err
		}
		if time.Since(began) < time.Millisecond {
			runtime.Gosched()
		} else {
			time.Sleep(50 * time.Microsecond)
		}
	}
}

func (g *group) isDead() bool {
	g.calls.Lock()
	defer g.calls.Unlock()
	return g.dead
}

// kill ends the communicator at once, with the calls that the device waits in.
func (g *group) kill() error {
	return g.guard(func() error {
		g.dead = true
		defer close(g.gone)
		return g.w.lib.Abort(g.c)
	})
}

// mostEnding is how long a communicator may take to end by itself.
const mostEnding = 10 * time.Second

// end ends the communicator after its calls, or at once if it has failed or does not end by
// itself within some time: another rank may have aborted it, which made a call more than this one.
func (g *group) end(failed bool, within time.Duration) error {
	if failed {
		return g.kill()
	}
	limit := time.Now().Add(within)
	err := g.guard(func() error { return g.w.lib.Finalize(g.c) })
	if err == nil {
		err = g.settle(func() bool { return time.Now().After(limit) })
	}
	if err != nil || time.Now().After(limit) {
		return g.kill()
	}
	return g.guard(func() error {
		g.dead = true
		defer close(g.gone)
		return g.w.lib.Destroy(g.c)
	})
}

// aside calls the library with the device's context current, unless the communicator is dead.
func (g *group) aside(what string, f func()) {
	g.w.order.mu.Lock()
	defer g.w.order.mu.Unlock()
	launch(g.w.side, what, nil, func(uintptr) {
		_ = g.guard(func() error { f(); return nil })
	})
	_ = g.w.side.Sync() // the device's error is reported elsewhere
}
