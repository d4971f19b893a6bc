// This file owns the comparison of calls. NCCL does not notice that ranks call different
// things, or that a rank has left: it waits for ever. So each rank tells the others what it
// calls, through the communicator of the hosts, behind the calls themselves.

package nccl

import (
	"errors"
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/letter"
	"github.com/stowage-dev/stowage/memory"
)

// audited is a call that is being compared.
type audited struct {
	call         letter.Call
	turn         uint64 // among all calls of this rank
	sends, recvs []part
}

// part is what a letter to a rank says, or what one from a rank should say.
type part struct {
	peer int
	len  memory.Bytes // that are sent, or expected; only calls with parts of their own have it
}

// mostCompared is the number of ranks up to which each compares its collectives with all
// others. In larger groups each compares them with the rank before it.
const mostCompared = 16

// parts returns what a rank sends and expects in a collective. of returns the bytes that
// this rank sends to another and expects from it, and may be nil.
func (g *group) parts(of func(p int) (send, recv memory.Bytes)) (sends, recvs []part) {
	n := len(g.ranks)
	for k := 1; k < n; k++ {
		if n > mostCompared && k > 1 {
			break
		}
		to, from := (g.me+k)%n, (g.me+n-k)%n
		a, b := part{peer: to}, part{peer: from}
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
	list := func(b *device.Buffer, all []part) (out []comm.Message) {
		for i, l := range all {
			out = append(out, comm.Message{Peer: l.peer, Range: b.Slice(letter.Size*memory.Bytes(i), letter.Size)})
		}
		return out
	}
	b := make([]byte, letter.Size*most)
	for i, l := range a.sends {
		(&letter.Letter{Call: a.call, Sent: l.len, Turn: a.turn}).Write(b[letter.Size*i:])
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
		theirs := letter.Read(b[letter.Size*i:])
		wrong := a.call.Disagreement(g.ranks, g.me, l.peer, &theirs, l.len)
		if wrong == "" {
			wrong = g.crossing(a, l.peer, theirs.Turn)
		}
		if wrong != "" {
			g.w.o.Host.Abort(fmt.Errorf("ranks do not agree: %s", wrong))
			return failureOf(g.watched.Err())
		}
	}
	return nil
}

// meeting is a call that was compared with that of another rank.
type meeting struct {
	mine, theirs uint64 // its turns on both ranks
	g            *group
	call         letter.Call
}

// mostMet is how many meetings with a rank are kept. Calls that ranks wait for in different
// orders are in flight, and so among the last.
const mostMet = 4096

// crossing returns what is wrong if two ranks have made this call and one of another
// communicator in different orders: each then waits in one that the other rank comes to
// later. Calls that never meet count for nothing: their communicator has failed.
func (g *group) crossing(a *audited, peer int, theirs uint64) string {
	w, rank := g.w, g.ranks[peer]
	x := meeting{a.turn, theirs, g, a.call}
	w.mu.Lock()
	defer w.mu.Unlock()
	all := w.met[rank]
	i := len(all)
	for i > 0 && all[i-1].mine > x.mine {
		i--
	}
	sentence := func(first, then meeting) string {
		return fmt.Sprintf("comm: rank %d calls %s of %s before %s of %s, and rank %d after it; make the calls of all communicators in the same order on all ranks",
			g.ranks[g.me], first.call.Name(first.g.ranks), first.g.words, then.call.Name(then.g.ranks), then.g.words, rank)
	}
	if i > 0 && all[i-1].theirs > x.theirs {
		return sentence(all[i-1], x)
	}
	if i < len(all) && all[i].theirs < x.theirs {
		return sentence(x, all[i])
	}
	if all = slices.Insert(all, i, x); len(all) > mostMet {
		all = slices.Delete(all, 0, mostMet/2)
	}
	w.met[rank] = all
	return ""
}

// room makes room for so many letters each way.
func (g *group) room(n int) (err error) {
	size := letter.Size * memory.Bytes(n)
	if g.out != nil && g.out.Size() >= size {
		return nil
	}
	g.freeLetters()
	if g.out, err = g.w.o.HostDevice.Alloc(memory.Host, max(size, 16*letter.Size), "comm letters"); err != nil {
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

// closeAudit leaves the other ranks of the group, when this rank's calls have ended or the
// communicator has failed.
func (g *group) closeAudit() error {
	g.mu.Lock()
	for g.busy && g.lost == nil {
		g.wake.Wait()
	}
	g.mu.Unlock()
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
