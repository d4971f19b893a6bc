// This file owns the tests of ranks over the MPI in memory.

package mpi

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/commtest"
	"github.com/stowage-dev/stowage/internal/mpi"
	"github.com/stowage-dev/stowage/memory"
)

// together runs f for every rank at once and returns the errors.
func together(ps []*Process, f func(p *Process) error) error {
	errs := make([]error, len(ps))
	var all sync.WaitGroup
	for r, p := range ps {
		all.Go(func() {
			if err := f(p); err != nil {
				errs[r] = fmt.Errorf("rank %d: %w", r, err)
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// Ranks over any MPI pass the suite, directly and through pinned buffers, whenever messages arrive.
func TestConformanceInMemory(t *testing.T) { // SPEC S7.2
	for _, c := range []struct {
		size   int
		staged bool
	}{{2, true}, {3, false}, {3, true}} {
		t.Run(fmt.Sprintf("%d ranks, staged %v", c.size, c.staged), func(t *testing.T) {
			_, ps := startJob(t, c.size, uint64(c.size))
			held := make([]int, c.size)
			for r := range held {
				held[r] = r
			}
			commtest.Run(t, commtest.World{
				Size: c.size,
				Held: held,
				Device: func(rank int) (device.Device, error) {
					d, err := cpu.Open(cpu.Options{Ordinal: rank, Capacity: [memory.Kinds]memory.Bytes{256 * memory.MiB, 64 * memory.MiB}})
					if err == nil {
						d = check.New(check.Options{Report: func(err error) { t.Error(err) }}).Wrap(d)
					}
					return d, err
				},
				Open: func(devs []device.Device) ([]comm.Comm, error) {
					comms := make([]comm.Comm, c.size)
					return comms, together(ps, func(p *Process) (err error) {
						comms[p.Rank()], err = p.Open(devs[p.Rank()], Options{Scratch: 256 * memory.KiB, Staged: c.staged, largest: 10_000})
						return err
					})
				},
				Large: memory.MiB,
			})
		})
	}
}

// What processes find under a launcher, ranks over the MPI in memory find as well.
func TestRanks(t *testing.T) {
	for _, c := range []struct {
		name string
		size int
		tidy bool
		do   func(p *Process) error
	}{
		{"come and go", 2, true, comeAndGo}, {"notes", 2, true, notes}, {"hearsay", 3, false, hearsay}, {"poor", 2, true, poor},
		{"direct", 2, true, direct}, {"replay", 2, true, replayed}, {"absent", 3, false, absent}, {"gone", 3, true, gone},
		{"scratch", 2, true, scratch}, {"many", 2, true, many}, {"text", 3, true, text},
		{"many ranks", 18, true, manyRanks}, {"far memory", 2, true, farMemory}, {"long words", 2, true, longWords},
	} {
		t.Run(c.name, func(t *testing.T) {
			j, ps := startJob(t, c.size, 3)
			j.tidy = c.tidy
			if err := together(ps, c.do); err != nil {
				t.Error(err)
			}
		})
	}
}

// absent has rank 2 miss a call of ranks 2 and 0, numbered the other way round, who are told its
// number in the world and the machine that it runs on.
func absent(p *Process) error {
	c, d, s, b, err := rank(p, Options{Patience: 200 * time.Millisecond})
	if err != nil {
		return err
	}
	c.(*group).w.hosts = []string{"zero", "one", "two"}
	if p.Rank() != 1 {
		sub, err := c.Split([]int{2, 0})
		if err != nil {
			return err
		}
		if p.Rank() == 2 {
			for c.Err() == nil {
				time.Sleep(time.Millisecond)
			}
			var f *comm.Failure
			if !errors.As(sub.Err(), &f) || f.Rank != 2 || f.By != 0 || f.Call != "" { // before it makes a call
				return fmt.Errorf("the error is %+v", sub.Err())
			}
			if _, err := c.Split([]int{2, 1}); err != f && !errors.As(err, &f) {
				return fmt.Errorf("a split after a failure: %v", err)
			}
		}
		sub.Barrier(s)
		_ = s.Sync()
		sub.AllGather(s, b.Slice(0, 20), b.Slice(100, 10)) // the first call that was not made counts
		_ = s.Sync()
		said := fmt.Sprint(sub.Err())
		want := fmt.Sprintf("comm: barrier #1 of rank %d was not made: rank 0 waited 200ms in barrier #1 for rank 2; find out what delays them, or raise Patience (rank 2 runs on two)", p.Rank())
		if said != want {
			return fmt.Errorf("it says %q, want %q", said, want)
		}
	}
	for c.Err() == nil { // rank 1 is told as well
		time.Sleep(time.Millisecond)
	}
	var f *comm.Failure
	if !errors.As(c.Err(), &f) || f.By != 0 || f.Rank != p.Rank() {
		return fmt.Errorf("the error is %v", c.Err())
	}
	s.Free(b)
	return errors.Join(s.Close(), c.Close(), d.Close())
}

// gone has rank 2 close a communicator of ranks 2, 0 and 1 after some messages. What was sent
// before passes, what would need it after that does not, and the others' messages do.
func gone(p *Process) error {
	c, d, s, b, err := rank(p, Options{})
	if err != nil {
		return err
	}
	sub, err := c.Split([]int{2, 0, 1})
	if err != nil {
		return err
	}
	at := func(i int) device.Range { return b.Slice(memory.Bytes(100*i), 100) }
	s.Fill(at(0), byte(10+p.Rank()))
	s.Fill(at(1), 0)
	var said string
	switch p.Rank() {
	case 2: // 0 in the communicator
		sub.Send(s, at(0), 1)
		sub.Send(s, at(0), 1)
		sub.Recv(s, at(1), 2)
		err = errors.Join(sub.Close(), s.Sync(), sub.Err()) // while they are in flight
	case 0:
		for sub.(*group).hasLeft() == 0 {
			time.Sleep(time.Millisecond)
		}
		sub.Recv(s, at(1), 0)
		sub.Recv(s, at(2), 0)
		sub.Send(s, at(0), 2)
		err = errors.Join(s.Sync(), sub.Err())
		sub.Recv(s, at(3), 0)
		_ = s.Sync()
		sub.Send(s, at(0), 2) // rank 1 would receive it, but no call follows one that was not made
		_ = s.Sync()
		said = fmt.Sprint(sub.Err())
		err = errors.Join(err, sub.Close())
	case 1:
		sub.Send(s, at(0), 0)
		for sub.(*group).hasLeft() == 0 {
			time.Sleep(time.Millisecond)
		}
		sub.Recv(s, at(1), 1)
		err = errors.Join(s.Sync(), sub.Err())
		sub.Send(s, at(0), 0)
		_ = s.Sync()
		said = fmt.Sprint(sub.Err())
		err = errors.Join(err, sub.Close())
	}
	want := []string{
		"comm: receive #4 of 100 bytes from rank 2 of rank 0 was not made: rank 2 has closed the communicator",
		"comm: send #3 of 100 bytes to rank 2 of rank 1 was not made: rank 2 has closed the communicator", "",
	}[p.Rank()]
	got := make([]byte, 300)
	err = errors.Join(err, s.Download(got, b.Slice(0, 300)), c.Err())
	if from := []byte{12, 10, 11}[p.Rank()]; said != want || got[100] != from || p.Rank() == 0 && got[200] != from {
		err = errors.Join(err, fmt.Errorf("got %d and %d, and %q", got[100], got[200], said))
	}
	s.Free(b)
	return errors.Join(err, s.Close(), c.Close(), d.Close())
}

// hasLeft returns how many ranks are known to have closed the communicator.
func (g *group) hasLeft() int {
	g.w.p.mu.Lock()
	defer g.w.p.mu.Unlock()
	return len(g.gone())
}

// scratch has ranks ask for memory of other sizes, or too little of it. All are told, and can open
// a world afterwards.
func scratch(p *Process) error {
	d, err := cpu.Open(cpu.Options{})
	if err != nil {
		return err
	}
	for _, o := range []Options{{Scratch: 64*memory.KiB - 1}, {Patience: -1}} {
		if _, err := p.Open(d, o); err == nil || !strings.HasPrefix(err.Error(), "comm: expected a ") {
			return fmt.Errorf("%+v: %v", o, err)
		}
	}
	_, err = p.Open(d, Options{Scratch: 64*memory.KiB + memory.Bytes(p.Rank())})
	want := fmt.Sprintf("comm: rank %d has a Scratch of %d bytes and rank %d one of %d; give all ranks the same", p.Rank(), 65536+p.Rank(), 1-p.Rank(), 65537-p.Rank())
	if err == nil || err.Error() != want {
		return fmt.Errorf("got %v, want %s", err, want)
	}
	c, err := p.Open(d, Options{Scratch: 64 * memory.KiB})
	if err != nil {
		return err
	}
	if got := d.Info().Backend; got != "cpu" || c.(*group).w.staged {
		return fmt.Errorf("%s goes through buffers", got)
	}
	return errors.Join(c.Close(), d.Close())
}

// many passes messages while tags begin anew, and as many at once as pinned buffers have room for.
func many(p *Process) error {
	for _, staged := range []bool{false, true} {
		c, d, s, b, err := rank(p, Options{Staged: staged, Scratch: 64 * memory.KiB})
		if err != nil {
			return err
		}
		g := c.(*group) // as if there had been many calls: tags begin anew
		g.mu.Lock()
		g.collectives = tagCount - 2
		for r := range g.sent {
			g.sent[r], g.got[r] = tagCount-30, tagCount-30
		}
		g.mu.Unlock()
		for range 4 {
			c.Barrier(s)
		}
		for _, serial := range []uint64{1, tagCount - 1, tagCount, 3 * tagCount} {
			if tag := g.tag(&call{serial: serial}); tag < tagCollective || tag >= tagPair {
				return fmt.Errorf("collective %d has the tag %d", serial, tag)
			}
		}
		exchange := func(n int) (panicked any) {
			defer func() { panicked = recover() }()
			var sends, recvs []comm.Message
			for i := range memory.Bytes(n) {
				sends = append(sends, comm.Message{Peer: 1 - p.Rank(), Range: b.Slice(3000*i, 3000)})
				recvs = append(recvs, comm.Message{Peer: 1 - p.Rank(), Range: b.Slice(memory.MiB+3000*i, 3000)})
			}
			c.Exchange(s, sends, recvs)
			return nil
		}
		for i := range memory.Bytes(mostMessages) {
			s.Fill(b.Slice(3000*i, 3000), byte(i)+byte(p.Rank())*100)
		}
		if got := exchange(mostMessages); got != nil {
			return fmt.Errorf("%d messages: %v", mostMessages, got)
		}
		got := make([]byte, 3000*mostMessages)
		if err := s.Download(got, b.Slice(memory.MiB, 3000*mostMessages)); err != nil {
			return err
		}
		for i, v := range got {
			if v != byte(i/3000)+byte(1-p.Rank())*100 {
				return fmt.Errorf("byte %d of message %d is %d", i%3000, i/3000, v)
			}
		}
		if p.Rank() == 0 {
			f := func() (panicked any) {
				defer func() { panicked = recover() }()
				var recvs []comm.Message
				for i := range memory.Bytes(mostMessages + 1) {
					recvs = append(recvs, comm.Message{Peer: 1, Range: b.Slice(8*i, 8)})
				}
				c.Exchange(s, nil, recvs)
				return nil
			}
			if staged {
				if got := fmt.Sprint(f()); got != "comm: exchange on rank 0: expected at most 64 messages in each direction, got 0 and 65; pass them in several calls" {
					return errors.New(got)
				}
			}
		}
		s.Free(b)
		if err := errors.Join(s.Close(), c.Err(), c.Close(), d.Close()); err != nil {
			return err
		}
	}
	return nil
}

// manyRanks have room for a part of each of them, however little was asked for.
func manyRanks(p *Process) error {
	c, d, s, b, err := rank(p, Options{Scratch: 64 * memory.KiB})
	if err != nil {
		return err
	}
	if n := c.(*group).w.in.Size(); n != 18*4*memory.KiB {
		return fmt.Errorf("the room is %v", n)
	}
	s.Fill(b.Slice(0, 40_000), byte(p.Rank()+1))
	c.AllReduce(s, b.Slice(0, 40_000), b.Slice(0, 40_000), comm.F32, comm.Max)
	got := make([]byte, 40_000)
	err = errors.Join(s.Download(got, b.Slice(0, 40_000)), c.Err())
	if got[0] != 18 || got[39_999] != 18 {
		err = errors.Join(err, fmt.Errorf("got %d and %d", got[0], got[39_999]))
	}
	s.Free(b)
	return errors.Join(err, s.Close(), c.Close(), d.Close())
}

// far is a device whose memory the host cannot read.
type far struct{ device.Device }

func (f far) Info() device.Info {
	i := f.Device.Info()
	i.Backend = "far"
	return i
}

// farMemory goes through pinned buffers without being asked to, and host memory does not.
func farMemory(p *Process) error {
	d, err := cpu.Open(cpu.Options{})
	if err != nil {
		return err
	}
	c, err := p.Open(far{d}, Options{})
	if err != nil {
		return err
	}
	w := c.(*group).w
	if !w.staged || w.out == nil || w.out.Kind() != memory.Host || w.in.Kind() != memory.Host || w.readable(device.Range{Buf: w.in, Len: 1}) != true {
		return fmt.Errorf("staged %t", w.staged)
	}
	b, err := d.Alloc(memory.Device, 100, "test")
	if err != nil {
		return err
	}
	s, err := d.NewStream("test")
	if err != nil {
		return err
	}
	if w.readable(b.All()) {
		return errors.New("device memory is read where it lies")
	}
	s.Free(b)
	return errors.Join(s.Close(), c.Close(), d.Close())
}

// wordy is a device with long errors in characters that JSON makes longer.
type wordy struct{ device.Device }

func (wordy) Alloc(memory.Kind, memory.Bytes, string) (*device.Buffer, error) {
	return nil, errors.New("no room" + strings.Repeat("\x01<é>", 900))
}

// longWords of a rank that cannot take part reach the others, as much of them as a letter holds.
func longWords(p *Process) error {
	bare, err := cpu.Open(cpu.Options{})
	if err != nil {
		return err
	}
	d := device.Device(bare)
	if p.Rank() == 1 {
		d = wordy{bare}
	}
	if _, err = p.Open(d, Options{}); err == nil || !strings.Contains(err.Error(), "no room\x01<") {
		return fmt.Errorf("rank %d is told %v", p.Rank(), err)
	}
	if told := fmt.Sprint(err); p.Rank() == 0 && !strings.HasPrefix(told, "comm: rank 1 on ") {
		return errors.New(told)
	}
	return bare.Close()
}

// text brings texts of rank 0 to all, up to the longest.
func text(p *Process) error {
	for _, n := range []int{0, 5, 4096} {
		want := strings.Repeat("0", n)
		if got, err := p.Exchange(strings.Repeat(fmt.Sprint(p.Rank()), n)); got != want || err != nil {
			return fmt.Errorf("got %q, %v", got, err)
		}
	}
	if _, err := p.Exchange(strings.Repeat("0", 4097)); err == nil {
		return errors.New("a text of 4097 bytes is exchanged")
	}
	name, version := p.Library()
	if name != "memory" || version != "1" {
		return fmt.Errorf("the library is %q of %q", name, version)
	}
	return nil
}

// MPI that does not start leaves nothing open, and its error is that of Start.
func TestDoesNotStart(t *testing.T) {
	open := func() (n int) {
		const dir = "/proc/self/fd"
		list, _ := os.ReadDir(dir)
		for _, f := range list {
			if name, err := os.Readlink(filepath.Join(dir, f.Name())); err == nil && strings.Contains(name, "eventfd") {
				n++
			}
		}
		return n
	}
	before := open()
	wrong := errors.New("there is no network")
	const often = 20 // more than earlier processes may close meanwhile
	for range often {
		if _, err := start(func() (library, requests, mpi.Info, error) { return nil, nil, mpi.Info{}, wrong }); err != wrong {
			t.Error(err)
		}
	}
	if after := open(); after >= before+often {
		t.Errorf("%d files are left open", after-before)
	}
}

// The loop rests if there is nothing to poll for, wakes in time for news, and polls while calls wait, less and
// less often.
func TestPauses(t *testing.T) {
	idle, waits := &world{}, &world{staged: true, active: map[*op]struct{}{{}: {}}}
	for _, c := range []struct {
		worlds      []*world
		waited      time.Duration
		least, most time.Duration
	}{
		{nil, 0, time.Minute, 24 * time.Hour},
		{[]*world{idle}, 0, time.Millisecond, 100 * time.Millisecond}, {[]*world{idle}, time.Hour, time.Millisecond, 100 * time.Millisecond},
		{[]*world{idle, waits}, 0, 0, 0}, {[]*world{waits, idle}, loopPolls - 1, 0, 0},
		{[]*world{waits}, loopPolls, 1, loopPolls / 8}, {[]*world{waits, idle}, time.Hour, longPause, longPause},
		{[]*world{{telling: 1}}, 0, 0, 0}, {[]*world{{closing: func() {}}}, 0, 0, 0}, {[]*world{{staged: true}}, 0, time.Millisecond, time.Second},
		{[]*world{{active: waits.active}}, 0, time.Millisecond, time.Second},
	} {
		p := &Process{worlds: map[*world]struct{}{}}
		for _, w := range c.worlds {
			p.worlds[w] = struct{}{}
		}
		if got := p.pause(c.waited); got < c.least || got > c.most {
			t.Errorf("%d worlds, waited %v: it rests for %v, want %v to %v", len(c.worlds), c.waited, got, c.least, c.most)
		}
	}
}
