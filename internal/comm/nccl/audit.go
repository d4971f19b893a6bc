// This file owns the comparison of calls. NCCL does not notice that ranks call different
// things, or that a rank has left: it waits for ever. So each rank tells the others what it
// calls, through the communicator of the hosts, behind the calls themselves.

package nccl

import (
	"errors"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// audited is a call that is being compared.
type audited struct {
	call         call
	sends, recvs []letter
}

// mostCompared is the number of ranks up to which each compares its collectives with all
// others. In larger groups each compares them with the rank before it.
const mostCompared = 16

// letters returns what a rank sends and expects in a collective. of returns the bytes that
// this rank sends to another and expects from it, and may be nil.
func (g *group) letters(of func(p int) (send, recv memory.Bytes)) (sends, recvs []letter) {
	n := len(g.ranks)
	for k := 1; k < n; k++ {
		if n > mostCompared && k > 1 {
			break
		}
		to, from := (g.me+k)%n, (g.me+n-k)%n
		a, b := letter{peer: to}, letter{peer: from}
		if of != nil {
			a.len, _ = of(to)
			_, b.len = of(from)
		}
		sends, recvs = append(sends, a), append(recvs, b)
	}
	return sends, recvs
}

// audit compares the calls of the group, one after the other, until it is closed. Then it
// leaves the other ranks.
func (g *group) audit() {
	defer close(g.audited)
	for {
		g.mu.Lock()
		for len(g.queue) == 0 && !g.quit {
			g.wake.Wait()
		}
		if len(g.queue) == 0 {
			g.mu.Unlock()
			break
		}
		a := g.queue[0]
		g.mu.Unlock()
		g.note(&a.call)
		f := g.compare(a)
		g.mu.Lock()
		if f != nil {
			g.loseLocked(f)
		}
		if g.lost == nil {
			g.queue = g.queue[1:]
		} else {
			g.queue = nil
		}
		g.wake.Broadcast()
		g.mu.Unlock()
	}
	g.auditErr = g.closeAudit()
}

// compare passes the letters of a call and returns why the communicator fails, or nil.
func (g *group) compare(a *audited) *comm.Failure {
	most := max(len(a.sends), len(a.recvs))
	if err := g.room(most); err != nil {
		g.w.o.Host.Abort(err)
		return failureOf(g.watched.Err())
	}
	list := func(b *device.Buffer, all []letter) (out []comm.Message) {
		for i, l := range all {
			out = append(out, comm.Message{Peer: l.peer, Range: b.Slice(letterSize*memory.Bytes(i), letterSize)})
		}
		return out
	}
	b := make([]byte, letterSize*most)
	for i, l := range a.sends {
		encode(b[letterSize*i:], &a.call, l.len)
	}
	if len(b) > 0 {
		g.hs.Upload(g.out.Slice(0, memory.Bytes(len(b))), b)
		g.watched.Exchange(g.hs, list(g.out, a.sends), list(g.in, a.recvs))
		if err := g.hs.Download(b, g.in.Slice(0, memory.Bytes(len(b)))); err != nil {
			g.w.o.Host.Abort(err)
		}
	}
	if err := g.watched.Err(); err != nil {
		return failureOf(err)
	}
	for i, l := range a.recvs {
		if wrong := g.disagreement(&a.call, l, b[letterSize*i:]); wrong != "" {
			g.w.o.Host.Abort(fmt.Errorf("ranks do not agree: %s", wrong))
			return failureOf(g.watched.Err())
		}
	}
	return nil
}

// room makes room for so many letters each way.
func (g *group) room(n int) (err error) {
	size := letterSize * memory.Bytes(n)
	if g.out != nil && g.out.Size() >= size {
		return nil
	}
	g.freeLetters()
	if g.out, err = g.w.o.HostDevice.Alloc(memory.Host, max(size, 16*letterSize), "comm letters"); err != nil {
		return err
	}
	g.in, err = g.w.o.HostDevice.Alloc(memory.Host, g.out.Size(), "comm letters")
	return err
}

func (g *group) freeLetters() {
	for _, b := range []**device.Buffer{&g.out, &g.in} {
		if *b != nil {
			g.hs.Free(*b)
			*b = nil
		}
	}
}

// closeAudit leaves the other ranks of the group.
func (g *group) closeAudit() error {
	g.freeLetters()
	err := errors.Join(g.watched.Close(), g.hs.Close())
	if g.host != g.w.o.Host { // that of the world is closed last
		err = errors.Join(err, g.host.Close())
	}
	return err
}

// failureOf returns the failure in an error of a communicator of hosts.
func failureOf(err error) *comm.Failure {
	var f *comm.Failure
	if errors.As(err, &f) {
		return f
	}
	return &comm.Failure{Err: err}
}
