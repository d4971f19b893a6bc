// This file owns what ranks over the MPI in memory do.

package mpi

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

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
		for since := time.Now(); sub.(*group).hasLeft() < 2 && err == nil; time.Sleep(time.Millisecond) {
			if time.Since(since) > time.Minute {
				err = errors.New("it knows of one rank that has closed, and there are two")
			}
		}
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

// alone takes no memory, and calls of one rank copy at most.
func alone(p *Process) error {
	c, d, s, b, err := rank(p, Options{Staged: true})
	if err != nil {
		return err
	}
	if n := d.Memory().Kind[memory.Host].Current; n != 0 || d.Memory().Kind[memory.Device].Current != b.Size() {
		return fmt.Errorf("it takes %v", d.Memory())
	}
	s.Fill(b.Slice(0, 400), 7)
	c.AllReduce(s, b.Slice(100, 40), b.Slice(0, 40), comm.F32, comm.Mean)
	c.ReduceScatter(s, b.Slice(140, 40), b.Slice(0, 40), comm.F32, comm.Sum)
	s.Fill(b.Slice(0, 20), 8)
	c.AllGather(s, b.Slice(180, 20), b.Slice(0, 20))
	c.AllToAll(s, b.Slice(200, 20), b.Slice(0, 20))
	c.AllToAllV(s, b.Slice(220, 100), b.Slice(0, 20), []comm.Part{{Off: 1, Len: 4}}, []comm.Part{{Off: 2, Len: 4}})
	c.Broadcast(s, b.Slice(0, 20), 0)
	c.Barrier(s)
	sub, err := c.Split([]int{0})
	if err != nil {
		return err
	}
	sub.Barrier(s)
	got := make([]byte, 230)
	err = errors.Join(s.Download(got, b.Slice(0, 230)), sub.Err(), sub.Close(), c.Err())
	for i, want := range map[int]byte{100: 7, 139: 7, 179: 7, 180: 8, 199: 8, 200: 8, 219: 8, 221: 7, 222: 8, 225: 8, 226: 7} {
		if got[i] != want {
			err = errors.Join(err, fmt.Errorf("byte %d is %d, want %d", i, got[i], want))
		}
	}
	s.Free(b)
	return errors.Join(err, s.Close(), c.Close(), d.Close())
}

// inFlight closes its world behind calls that nobody has waited for. They are made all the same.
func inFlight(p *Process) error {
	for _, staged := range []bool{false, true} {
		c, d, s, b, err := rank(p, Options{Staged: staged, Scratch: 64 * memory.KiB})
		if err != nil {
			return err
		}
		sub, err := c.Split([]int{1, 0})
		if err != nil {
			return err
		}
		const n = 100_000
		s.Fill(b.Slice(0, n), byte(p.Rank()+1))
		for range 5 {
			c.AllGather(s, b.Slice(2*n, 2*n), b.Slice(0, n))
			sub.AllReduce(s, b.Slice(n, n), b.Slice(0, n), comm.F32, comm.Max)
		}
		if err := errors.Join(sub.Close(), c.Close()); err != nil {
			return err
		}
		got := make([]byte, 4*n)
		if err := s.Download(got, b.Slice(0, 4*n)); err != nil {
			return err
		}
		for i, v := range got[n:] {
			if want := []byte{2, 1, 2}[i/n]; v != want {
				return fmt.Errorf("staged %t: byte %d is %d, want %d", staged, i, v, want)
			}
		}
		s.Free(b)
		if err := errors.Join(c.Err(), sub.Err(), s.Close(), d.Close()); err != nil {
			return err
		}
	}
	return nil
}

// badEnd is a device whose streams and events end with an error.
type badEnd struct{ device.Device }

type badStream struct{ device.Stream }

type badEvent struct{ device.Event }

func (d badEnd) NewStream(name string) (device.Stream, error) {
	s, err := d.Device.NewStream(name)
	return &badStream{s}, err
}

func (d badEnd) NewEvent(flags device.EventFlags) (device.Event, error) {
	e, err := d.Device.NewEvent(flags)
	return &badEvent{e}, err
}

func (s *badStream) Wait(e device.Event)   { s.Stream.Wait(e.(*badEvent).Event) }
func (s *badStream) Record(e device.Event) { s.Stream.Record(e.(*badEvent).Event) }
func (s *badStream) Close() error {
	return errors.Join(s.Stream.Close(), errors.New("a stream ends badly"))
}
func (e *badEvent) Close() error {
	return errors.Join(e.Event.Close(), errors.New("an event ends badly"))
}

// endsBadly hears of everything that goes wrong when a world closes.
func endsBadly(p *Process) error {
	d, err := cpu.Open(cpu.Options{})
	if err != nil {
		return err
	}
	c, err := p.Open(badEnd{d}, Options{Staged: true})
	if err != nil {
		return err
	}
	if said := fmt.Sprint(c.Close()); !strings.Contains(said, "a stream ends badly") || !strings.Contains(said, "an event ends badly") {
		return errors.New(said)
	}
	return d.Close()
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

// splitAndGone has ranks split a communicator that another rank closes. A split that it has made ends well, also
// if the news comes before its letter, and one that it can no longer make is an error on those that wait.
func splitAndGone(p *Process) error {
	c, d, s, b, err := rank(p, Options{})
	if err != nil {
		return err
	}
	for range 20 {
		sub, e := c.Split([]int{2, 0, 1})
		if e != nil {
			return e
		}
		if p.Rank() < 2 { // 1 and 2 in the communicator
			pair, e := sub.Split([]int{2, 1})
			if err = errors.Join(err, e); e == nil {
				err = errors.Join(err, pair.Close())
			}
		}
		if p.Rank() != 1 {
			_, e = sub.Split([]int{2, 1, 0})
			text, known := strings.CutPrefix(fmt.Sprint(e), fmt.Sprintf("comm: split #1 of rank %d was not made: rank ", p.Rank()))
			if !known || text != "1 has closed the communicator" && (p.Rank() == 0 || text != "0 has closed the communicator") { // 0 closes next
				err = errors.Join(err, fmt.Errorf("it says %v", e))
			}
		}
		err = errors.Join(err, sub.Close())
	}
	s.Free(b)
	return errors.Join(err, c.Err(), s.Close(), c.Close(), d.Close())
}
