// This file owns communicators: the numbers of their calls, their errors, Split and Close.

package mpi

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"sync"

	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/letter"
	"github.com/stowage-dev/stowage/internal/launcher"
	"github.com/stowage-dev/stowage/internal/mpi"
	"github.com/stowage-dev/stowage/memory"
)

// Tags keep the messages of different calls apart. The lower bits count; MPI promises
// tags below 32768.
const (
	tagCollective = iota << 13
	tagPair
	tagSplit
	tagCount = 1 << 13
)

// group is this rank's end of a communicator.
type group struct {
	w       *world
	id      uint64 // the same on all ranks
	ranks   []int  // numbered as in the world
	me      int
	members string // "ranks 0 and 1"
	c       mpi.Comm

	mu          sync.Mutex
	made        uint64   // calls of this rank
	collectives uint64   // those of all ranks
	sent, got   []uint64 // messages to and from each rank
	splits      map[uint64]uint64
	met         []uint64      // splits with each rank
	lost        *comm.Failure // the first call that was not made
	quit        bool
}

var _ comm.Comm = (*group)(nil)

func (w *world) newGroup(id uint64, ranks []int, me int, members string) *group {
	return &group{w: w, id: id, ranks: ranks, me: me, members: members, sent: make([]uint64, len(ranks)), got: make([]uint64, len(ranks)), splits: map[uint64]uint64{}, met: make([]uint64, len(ranks))}
}

func (g *group) Rank() int { return g.me }
func (g *group) Size() int { return len(g.ranks) }

func (g *group) caller() comm.Caller {
	return comm.Caller{Rank: g.me, Size: len(g.ranks), World: g.ranks[g.me]}
}

// enter numbers a call. It returns nil if the communicator has failed: the call does
// nothing then. It panics if the rank has closed the communicator.
func (g *group) enter(s letter.Signature, peer int) *call {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.quit {
		panic(fmt.Sprintf("comm: %v is called on rank %d after it closed the communicator", s.Kind, g.ranks[g.me]))
	}
	g.made++
	c := &call{Call: letter.Call{Signature: s, Number: g.made, Peer: peer}}
	if !s.Kind.Pair() {
		g.collectives++
		c.serial = g.collectives
	}
	f := g.w.failed.Load()
	if f == nil && g.lost != nil {
		return nil
	}
	if f != nil {
		g.loseLocked(c, f)
		return nil
	}
	return c
}

// lose keeps the first call that was not made.
func (g *group) lose(c *call, f *comm.Failure) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.loseLocked(c, f)
}

func (g *group) loseLocked(c *call, f *comm.Failure) {
	if g.lost == nil {
		g.lost = &comm.Failure{Rank: g.ranks[g.me], Call: c.Name(g.ranks), By: f.By, Err: f.Err}
	}
}

func (g *group) Err() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.lost != nil {
		return g.lost
	}
	if f := g.w.failed.Load(); f != nil {
		return &comm.Failure{Rank: g.ranks[g.me], By: f.By, Err: f.Err}
	}
	return nil
}

// Abort makes all communicators of this world fail, in all processes.
func (g *group) Abort(err error) {
	w := g.w
	f := &comm.Failure{By: w.rank, Err: fmt.Errorf("rank %d gave up: %w", w.rank, err)}
	if w.failed.CompareAndSwap(nil, f) {
		w.p.post(func() { w.spread(f) })
	}
}

// Split waits for the other ranks of the list, so ranks must make their splits in an order
// that they share.
func (g *group) Split(ranks []int) (comm.Comm, error) {
	mine := g.caller().Split(ranks)
	key := g.key(ranks)
	g.mu.Lock()
	g.splits[key]++
	serial := g.splits[key]
	g.mu.Unlock()
	world := make([]int, len(ranks))
	for i, r := range ranks {
		world[i] = g.ranks[r]
	}
	name := launcher.Ranks(world)
	if serial > 1 {
		name += fmt.Sprintf(" (communicator %d)", serial)
	}
	sub := g.w.newGroup(hash(g.id, key, serial), world, mine, name)
	if len(ranks) == 1 {
		return sub, nil
	}
	// The ranks meet in messages first, which a failure can end. Then all of them make
	// MPI's communicator, which waits without end.
	tag := tagSplit + int(key%tagCount)
	o := &op{g: g, call: &call{Call: letter.Call{Signature: letter.Signature{Kind: letter.Split, Bytes: memory.Bytes(key >> 1)}, Number: serial}, serial: serial}, where: "the split into " + name, done: make(chan struct{}, 1)}
	if err := g.Err(); err != nil {
		return nil, err
	}
	g.mu.Lock()
	for _, r := range ranks {
		if r != g.me {
			g.met[r]++
			o.heads = append(o.heads, &head{peer: r, tag: tag, send: true}, &head{peer: r, tag: tag, len: letter.AnyBytes})
			o.seqs = append(o.seqs, sequence{peer: r, n: g.met[r]})
		}
	}
	g.mu.Unlock()
	o.pass()
	if err := g.Err(); err != nil {
		return nil, err
	}
	err := g.w.p.do(func() (err error) {
		if sub.c, err = g.w.p.lib.Group(g.c, ranks, tag); err == nil {
			g.w.comms = append(g.w.comms, sub.c)
		}
		return err
	})
	return sub, err
}

// key identifies a list of ranks.
func (g *group) key(ranks []int) uint64 {
	var all []uint64
	for _, r := range ranks {
		all = append(all, uint64(r))
	}
	return hash(all...)
}

func hash(values ...uint64) uint64 {
	h := fnv.New64a()
	for _, v := range values {
		_, _ = h.Write(binary.LittleEndian.AppendUint64(nil, v))
	}
	return h.Sum64()
}

// gone returns the ranks that have closed the communicator.
func (g *group) gone() map[int]*news { return g.w.left[g.id] }

// leave tells the other ranks that this one has closed, or why it has failed: news of that may
// take longer on their way to them. The caller holds the lock of MPI.
func (g *group) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if f := g.w.failed.Load(); f != nil {
		g.w.spread(f)
		return
	}
	for r, rank := range g.ranks {
		if r != g.me {
			g.w.tell(rank, news{By: g.w.rank, ID: g.id, From: g.me, Serial: g.collectives, Sent: g.sent[r], Got: g.got[r], Met: g.met[r]})
		}
	}
}

// Close ends the communicator. That of all ranks waits for the calls in flight and for the
// other ranks to close theirs.
func (g *group) Close() error {
	g.mu.Lock()
	if g.quit {
		g.mu.Unlock()
		panic(fmt.Sprintf("comm: rank %d closes its communicator twice; close it once", g.ranks[g.me]))
	}
	g.quit = true
	g.mu.Unlock()
	if g.id == 1 {
		return g.w.close(g)
	}
	g.w.p.post(g.leave)
	return nil
}

// Gather passes the lengths in letters and then the bytes.
func (g *group) Gather(b []byte) ([][]byte, error) {
	c := g.enter(letter.Signature{Kind: letter.Gather}, 0)
	if c == nil {
		return nil, g.Err()
	}
	b = slices.Clone(b)
	all := make([][]byte, len(g.ranks))
	all[g.me] = b
	tag := g.tag(c)
	o := &op{g: g, call: c, done: make(chan struct{}, 1)}
	for r := range g.ranks {
		if r != g.me {
			o.heads = append(o.heads, &head{peer: r, tag: tag, send: true, len: memory.Bytes(len(b))}, &head{peer: r, tag: tag, len: letter.AnyBytes})
		}
	}
	o.pass()
	if err := g.Err(); err != nil {
		return nil, err
	}
	second := &op{g: g, call: c, done: make(chan struct{}, 1)}
	for _, h := range o.heads {
		if h.send {
			second.parts = append(second.parts, bytesMessage(h.peer, tag, true, b))
			continue
		}
		n := letter.Read(h.raw[:]).Sent
		if n < 0 || n > mostGathered {
			return nil, errors.New("comm: a rank gathers more than 1 GiB")
		}
		all[h.peer] = make([]byte, n)
		second.parts = append(second.parts, bytesMessage(h.peer, tag, false, all[h.peer]))
	}
	second.pass()
	if err := g.Err(); err != nil {
		return nil, err
	}
	return all, nil
}

const mostGathered = memory.GiB

// tag returns the tag of a collective.
func (g *group) tag(c *call) int { return tagCollective + int(c.serial%tagCount) }
