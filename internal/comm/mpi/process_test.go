// This file owns the tests of processes: what the launcher and the library do to them, and
// what is left when one fails.

package mpi

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ebitengine/purego"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// each runs a test with both launchers and two processes.
func each(t *testing.T, does string, env []string, look func(t *testing.T, out string, err error)) {
	for _, l := range launchers {
		t.Run(l.name, func(t *testing.T) {
			out, err := l.start(t, 2, does, env)
			look(t, out, err)
		})
	}
}

// A world comes and goes without a word of the library. A nil pointer and signals are Go's to find, Note
// is told of every call, and texts of rank 0 reach all.
func TestQuiet(t *testing.T) {
	each(t, "quiet", nil, func(t *testing.T, out string, err error) {
		if err != nil || out != "" {
			t.Errorf("%v\n%s", err, out)
		}
	})
}

func init() {
	roles["quiet"], roles["large send"], roles["kill"], roles["late"] = quiet, largeSend, killed, late
	roles["poor"], roles["replay"], roles["notes"], roles["abort"] = poor, replayed, notes, aborted
	roles["direct"], roles["hearsay"] = direct, hearsay
}

// rank opens a device with a stream, a buffer and a communicator.
func rank(p *Process, o Options) (c comm.Comm, d device.Device, s device.Stream, b *device.Buffer, err error) {
	if d, err = cpu.Open(cpu.Options{}); err != nil {
		return
	}
	if s, err = d.NewStream("test"); err != nil {
		return
	}
	if b, err = d.Alloc(memory.Device, 32*memory.MiB, "test"); err != nil {
		return
	}
	c, err = p.Open(d, o)
	return
}

func quiet(p *Process) error {
	text, err := p.Exchange(fmt.Sprintf("of rank %d", p.Rank()))
	if err != nil || text != "of rank 0" {
		return fmt.Errorf("rank %d got %q, %v", p.Rank(), text, err)
	}
	if caught := func() (caught any) {
		defer func() { caught = recover() }()
		var nothing *int
		*nothing = 1
		return nil
	}(); caught == nil {
		return errors.New("a nil pointer was written to")
	}
	if err := takeSignals(); err != nil {
		return err
	}
	return comeAndGo(p)
}

// comeAndGo opens a world, uses it and closes it. Note is told of every call.
func comeAndGo(p *Process) error {
	var noted []string
	c, d, s, b, err := rank(p, Options{Note: func(call string, absent []int) { noted = append(noted, call) }})
	if err != nil {
		return err
	}
	for range 3 {
		sub, err := c.Split([]int{1, 0})
		if err != nil {
			return err
		}
		sub.AllReduce(s, b.Slice(0, memory.MiB), b.Slice(0, memory.MiB), comm.F32, comm.Sum)
		if p.Rank() == 0 { // which is 1 there
			sub.Send(s, b.Slice(0, 8), 0)
		} else {
			sub.Recv(s, b.Slice(8, 8), 1)
		}
		if err := sub.Close(); err != nil {
			return err
		}
	}
	c.Barrier(s)
	c.AllGather(s, b.Slice(0, 128), b.Slice(256, 64))
	s.Free(b)
	if err := errors.Join(s.Close(), c.Err(), c.Close()); err != nil {
		return err
	}
	want := []string{
		"the split into ranks 0 and 1", "all-reduce 1 of ranks 0 and 1", "the split into ranks 0 and 1 (communicator 2)",
		"barrier 1 of all ranks", "all-gather 2 of all ranks", []string{"send 1 to rank 1", "receive 1 from rank 0"}[p.Rank()],
	}
	for _, w := range want {
		if !slices.Contains(noted, w) {
			return fmt.Errorf("Note was told %q, want %q among it", noted, w)
		}
	}
	return d.Close()
}

// takeSignals gets signals on threads that run Go code.
func takeSignals() error {
	signals, stop := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(signals, syscall.SIGUSR1)
	for range runtime.GOMAXPROCS(0) {
		go func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
			}
		}()
	}
	defer close(stop)
	for range 50 {
		if err := syscall.Kill(os.Getpid(), syscall.SIGUSR1); err != nil {
			return err
		}
		<-signals
	}
	return nil
}

// No two lists of ranks have one key.
func TestKeys(t *testing.T) {
	seen := map[uint64][]int{}
	for _, ranks := range [][]int{{0, 1}, {1, 0}, {2, 1}, {0, 2}, {1}, {0}, {0, 1, 2}, {1, 2}, {256, 1}} {
		key := (&group{}).key(ranks)
		if other, there := seen[key]; there {
			t.Errorf("%v and %v have one key", ranks, other)
		}
		seen[key] = ranks
	}
}

// Ranks give a call the same number, whatever else they called, and a rank that waits knows
// for whom.
func TestNotes(t *testing.T) {
	each(t, "notes", nil, func(t *testing.T, out string, err error) {
		if err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
}

// A library that aborts leaves the process time to say what happened.
func TestLibraryAborts(t *testing.T) {
	each(t, "abort", nil, func(t *testing.T, out string, err error) {
		if err == nil || strings.Count(out, "goes on") != 2 || strings.Contains(out, "goroutine ") {
			t.Errorf("%v\n%s", err, out)
		}
	})
}

func aborted(p *Process) error {
	abort, err := purego.Dlsym(purego.RTLD_DEFAULT, "abort")
	if err != nil {
		return err
	}
	go func() { _, _, _ = purego.SyscallN(abort) }()
	time.Sleep(300 * time.Millisecond)
	fmt.Println("goes on")
	if _, err := p.Exchange(""); err != nil { // both have said it
		return err
	}
	os.Exit(3)
	return nil
}

func notes(p *Process) error {
	var noted []string
	waits := make(chan string, 100)
	c, d, s, b, err := rank(p, Options{Note: func(call string, absent []int) {
		noted = append(noted, call)
		if len(absent) > 0 {
			waits <- fmt.Sprint(call, absent)
		}
	}})
	if err != nil {
		return err
	}
	other, err := p.Open(d, Options{Name: "all processes"})
	if err != nil {
		return err
	}
	r := b.Slice(0, 64)
	if p.Rank() == 0 { // calls that rank 1 does not make
		c.Send(s, r, 1)
		c.Exchange(s, []comm.Message{{Peer: 1, Range: r}}, []comm.Message{{Peer: 1, Range: b.Slice(64, 64)}})
	} else {
		c.Recv(s, r, 0)
		c.Recv(s, r, 0)
		c.Send(s, r, 0)
		if _, err := other.Gather(nil); err != nil { // when rank 0 knows for whom it waits
			return err
		}
	}
	c.Barrier(s)
	want := []string{"receive 1 from rank 0", "receive 2 from rank 0", "send 1 to rank 0", "barrier 1 of all ranks"}
	if p.Rank() == 0 {
		for w := ""; w != "barrier 1 of all ranks[1]"; {
			w = <-waits
		}
		if _, err := other.Gather(nil); err != nil {
			return err
		}
		want = []string{"send 1 to rank 1", "exchange 2 with rank 1", "barrier 1 of all ranks"}
	}
	s.Free(b)
	if err := errors.Join(s.Close(), c.Err(), c.Close(), other.Close()); err != nil {
		return err
	}
	if noted = slices.Compact(noted); !slices.Equal(noted, want) {
		return fmt.Errorf("Note was told %q, want %q", noted, want)
	}
	return d.Close()
}

// A rank hears why another gave up from one that knows, whichever tells it first.
func TestHearsay(t *testing.T) {
	for _, l := range launchers {
		t.Run(l.name, func(t *testing.T) {
			if out, err := l.start(t, 3, "hearsay", nil); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// hearsay has rank 2 give up and tell rank 0 alone, which closes.
func hearsay(p *Process) error {
	c, _, s, b, err := rank(p, Options{})
	if err != nil {
		return err
	}
	g := c.(*group)
	if g.me == 2 {
		f := &comm.Failure{By: 2, Err: errors.New("rank 2 gave up: the disk is full")}
		g.w.failed.Store(f)
		g.w.p.post(func() { g.w.tell(0, news{By: f.By, Why: f.Err.Error()}) })
	} else {
		c.AllGather(s, b.Slice(1024, 48), b.Slice(0, 16))
		_ = s.Sync()
		var f *comm.Failure
		if !errors.As(c.Err(), &f) || f.By != 2 || f.Err.Error() != "rank 2 gave up: the disk is full" {
			err = fmt.Errorf("rank %d hears %v", g.me, c.Err())
		}
	}
	if g.me != 2 {
		return errors.Join(err, c.Close())
	}
	time.Sleep(100 * time.Millisecond) // rank 1 hears of it from rank 0 before
	return c.Close()
}

// A rank whose large message nobody takes is told when the other gives up.
func TestAbortWithMessagesInFlight(t *testing.T) {
	each(t, "large send", nil, func(t *testing.T, out string, err error) {
		if err == nil || !strings.Contains(out, "rank 0 says: comm: send #1 of 33554432 bytes to rank 1 of rank 0 was not made: rank 1 gave up: no more data") {
			t.Errorf("%v\n%s", err, out)
		}
	})
}

func largeSend(p *Process) error {
	c, _, s, b, err := rank(p, Options{})
	if err != nil {
		return err
	}
	if p.Rank() == 1 {
		c.Abort(errors.New("no more data"))
	} else {
		c.Send(s, b.All(), 1)
	}
	_ = s.Sync()
	err = errors.Join(c.Err(), c.Close())
	fmt.Printf("rank %d says: %v\n", p.Rank(), err)
	if p.Rank() == 1 {
		select {} // the launcher ends it
	}
	return err
}

// A process that is killed ends the job.
func TestKilled(t *testing.T) {
	each(t, "kill", nil, func(t *testing.T, out string, err error) {
		if err == nil || strings.Contains(out, "went on: <nil>") {
			t.Errorf("%v\n%s", err, out)
		}
	})
}

func killed(p *Process) error {
	c, _, s, _, err := rank(p, Options{})
	if err != nil {
		return err
	}
	c.Barrier(s)
	if err := s.Sync(); err != nil {
		return err
	}
	if p.Rank() == 1 {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	c.Barrier(s)
	err = errors.Join(s.Sync(), c.Err())
	fmt.Println("went on:", err)
	return err
}

// A rank that does not come is named, with its host and the call that waits for it.
func TestAbsent(t *testing.T) {
	each(t, "late", nil, func(t *testing.T, out string, err error) {
		host, _ := os.Hostname()
		want := "comm: barrier #1 of rank 0 was not made: rank 0 waited 100ms in barrier #1 for rank 1; find out what delays them, or raise Patience (rank 1 runs on " + host + ")"
		if err != nil || !strings.HasPrefix(out, want) { // UCX may speak of messages that nobody took
			t.Errorf("%v\n%s", err, out)
		}
	})
}

func late(p *Process) error {
	c, _, s, _, err := rank(p, Options{Patience: 100 * time.Millisecond})
	if err != nil {
		return err
	}
	if p.Rank() == 1 { // until the other one has failed
		for c.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		return c.Close()
	}
	c.Barrier(s)
	err = errors.Join(s.Sync(), c.Err())
	fmt.Println(err)
	return c.Close()
}

// A rank without memory for its buffers keeps all ranks from opening a world, and all are
// told. They can open another one.
func TestRankWithoutMemory(t *testing.T) {
	each(t, "poor", nil, func(t *testing.T, out string, err error) {
		if err != nil || out != "" {
			t.Errorf("%v\n%s", err, out)
		}
	})
}

func poor(p *Process) error {
	for _, host := range []memory.Bytes{memory.MiB, 16 * memory.MiB} {
		if p.Rank() == 0 {
			host = 16 * memory.MiB
		}
		d, err := cpu.Open(cpu.Options{Capacity: [memory.Kinds]memory.Bytes{memory.MiB, host}})
		if err != nil {
			return err
		}
		c, err := p.Open(d, Options{})
		if c == nil {
			var full *device.OutOfMemory
			if (p.Rank() == 1) != errors.As(err, &full) || p.Rank() == 0 && !strings.Contains(err.Error(), "comm: rank 1 on ") {
				return fmt.Errorf("rank %d is told %w", p.Rank(), err)
			}
		} else if err = c.Close(); err != nil || host == memory.MiB {
			return fmt.Errorf("rank %d opened a world, %v", p.Rank(), err)
		}
		if err := d.Close(); err != nil {
			return err
		}
	}
	return nil
}

// The host function of a stream calls MPI itself: to wake a thread and to be woken by it would
// take longer than most calls. It never does so if the stream may be that of a GPU. SPEC S7.2
func TestWhoCallsMPI(t *testing.T) {
	each(t, "direct", nil, func(t *testing.T, out string, err error) {
		if err != nil || out != "" {
			t.Errorf("%v\n%s", err, out)
		}
	})
}

func direct(p *Process) error {
	for _, staged := range []bool{false, true} {
		var calls, byStream int
		note := func(call string, absent []int) {
			if absent != nil {
				return
			}
			calls++
			if bytes.Contains(debug.Stack(), []byte(".(*op).pass(")) {
				byStream++
			}
		}
		c, d, s, b, err := rank(p, Options{Staged: staged, Note: note})
		if err != nil {
			return err
		}
		for range 5 {
			c.AllReduce(s, b.Slice(0, 64), b.Slice(0, 64), comm.F32, comm.Sum)
			c.Barrier(s)
		}
		s.Free(b)
		if err := errors.Join(s.Close(), c.Err(), c.Close(), d.Close()); err != nil {
			return err
		}
		want := 10
		if staged {
			want = 0
		}
		if calls != 10 || byStream != want {
			return fmt.Errorf("staged %v: streams began %d of %d calls themselves; want %d of 10", staged, byStream, calls, want)
		}
	}
	return nil
}

// Calls can be captured, if all ranks replay alike.
func TestReplay(t *testing.T) {
	each(t, "replay", nil, func(t *testing.T, out string, err error) {
		if err != nil || out != "" {
			t.Errorf("%v\n%s", err, out)
		}
	})
}

func replayed(p *Process) error {
	for _, staged := range []bool{false, true} {
		c, d, s, b, err := rank(p, Options{Staged: staged})
		if err != nil {
			return err
		}
		const n = memory.MiB
		s.Upload(b.Slice(0, 4), []byte{0, 0, 0x80, 0x3f}) // 1.0
		s.BeginCapture()
		c.AllReduce(s, b.Slice(0, n), b.Slice(0, n), comm.F32, comm.Sum)
		c.AllReduce(s, b.Slice(0, 64), b.Slice(0, 64), comm.F32, comm.Sum)
		g, err := s.EndCapture()
		if err != nil {
			return err
		}
		for range 3 {
			s.Replay(g)
			c.Barrier(s)
		}
		got := make([]byte, 4)
		err = errors.Join(s.Download(got, b.Slice(0, 4)), g.Close(), c.Err())
		if want := []byte{0, 0, 0x80, 0x42}; err != nil || !slices.Equal(got, want) { // 64.0
			return fmt.Errorf("rank %d has %x, want %x: %w", p.Rank(), got, want, err)
		}
		s.Free(b)
		if err := errors.Join(s.Close(), c.Close(), d.Close()); err != nil {
			return err
		}
	}
	return nil
}

// A library that does not know the launcher takes each process for a world of its own.
func TestTwoMPIs(t *testing.T) {
	for i, other := range []string{"libmpich.so.12", "libmpi.so.40"} {
		l := launchers[i]
		t.Run(l.name, func(t *testing.T) {
			out, err := l.start(t, 2, "quiet", []string{"STOWAGE_MPI=" + other})
			if strings.Contains(out, "no MPI library was found") {
				t.Skipf("%s is not installed", other)
			}
			if want := "the launcher started 2 processes, but " + other + " finds 1: it is the library of another MPI"; err == nil || !strings.Contains(out, want) {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// What MPI says when it ends is what Finalize returns.
func TestFinalizeReturnsTheError(t *testing.T) {
	for _, wrong := range []error{nil, errors.New("MPI does not end")} {
		rest, err := newSleeper()
		if err != nil {
			t.Fatal(err)
		}
		nap, err := newSleeper()
		if err != nil {
			t.Fatal(err)
		}
		p := &Process{rest: rest, nap: nap, ending: make(chan struct{}), ended: make(chan error)}
		go p.end(func() error { return wrong })
		got := make(chan error)
		go func() { got <- p.Finalize() }()
		for !p.posted() { // so that the loop does nothing else
			runtime.Gosched()
		}
		p.loop()
		if err := <-got; err != wrong {
			t.Errorf("%v, want %v", err, wrong)
		}
	}
}
