// This file owns an MPI in memory: ranks are goroutines of one process, which pass messages as
// badly as MPI may.

package mpi

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/stowage-dev/stowage/internal/mpi"
)

// job is an MPI in memory. Messages with the same ranks, communicator and tag stay in order;
// all others arrive in any. A message is read when it is sent, or when it is received, as the
// job draws it.
type job struct {
	t    testing.TB
	size int

	mu     sync.Mutex
	rng    *rand.Rand
	rooms  map[string]*room
	comms  map[mpi.Comm]*end
	made   int             // communicators
	freed  map[int][]int   // by communicator: the ranks that have freed it
	posted map[int][]*mail // by receiver, in the order in which they were sent
	tidy   bool            // nothing may be left of a communicator that is freed
	libs   []*memoryLibrary
}

// end is a rank's handle of a communicator.
type end struct {
	id      int
	members []int // of the job
	freed   bool
}

// room is where the ranks of a collective meet.
type room struct {
	got  map[int][]byte
	full chan struct{}
}

// mail is a message that was not received yet.
type mail struct {
	comm, from, tag int
	send            *request
	bytes           []byte // unless it is read when it is received
	late            int    // looks of the receiver until it arrives
}

// request is a send or a receive of a rank.
type request struct {
	t         token
	send      bool
	comm      int
	peer, tag int // peer is a rank of the job, or anyone
	addr      uintptr
	n         int
	over      bool
	cancelled bool
	err       error
}

const anyone = -1

// memoryLibrary is the library of one rank, and the list of its requests.
type memoryLibrary struct {
	*job
	rank   int
	thread string // that started it
	inside sync.Mutex
	visits map[string]int // by what is called: how often each rank came to its room
	all    []*request
	fails  func(name string) error // what a call returns in place of being made
	note   func(message string)    // is told of every message of a call that begins, if it is set
	broken bool                    // a call has failed
	ended  bool
}

// startJob starts the processes of a job. They end with the test.
func startJob(t testing.TB, size int, seed uint64) (*job, []*Process) {
	t.Helper()
	j := &job{t: t, size: size, rng: rand.New(rand.NewPCG(seed, 1)), rooms: map[string]*room{}, comms: map[mpi.Comm]*end{}, freed: map[int][]int{}, posted: map[int][]*mail{}}
	all := make([]int, size)
	for r := range all {
		all[r] = r
	}
	var ps []*Process
	for r := range size {
		l := &memoryLibrary{job: j, rank: r, visits: map[string]int{}}
		j.libs = append(j.libs, l)
		p, err := start(func() (library, requests, mpi.Info, error) {
			l.thread = goroutine()
			return l, l, mpi.Info{Name: "memory", Version: "1", Rank: r, Size: size, World: j.handle(0, r, all)}, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		ps = append(ps, p)
	}
	t.Cleanup(func() {
		for _, p := range ps {
			if err := p.Finalize(); err != nil {
				t.Error(err)
			}
		}
		j.look()
	})
	return j, ps
}

// look finds what a job has left. Ranks free a communicator together, or, if one has failed, not at all.
func (j *job) look() {
	broken := slices.ContainsFunc(j.libs, func(l *memoryLibrary) bool { return l.broken })
	for id, ranks := range j.freed {
		for _, e := range j.comms {
			if !broken && e.id == id && len(ranks) != len(e.members) {
				j.t.Errorf("MPI: ranks %v of %v have freed communicator %d", ranks, e.members, id)
				break
			}
		}
	}
	for _, l := range j.libs {
		if len(l.all) > 0 {
			j.t.Errorf("MPI: rank %d has left %d requests", l.rank, len(l.all))
		}
		if !l.ended {
			j.t.Errorf("MPI: rank %d has not ended it", l.rank)
		}
	}
	for r, list := range j.posted {
		if j.tidy && len(list) > 0 {
			j.t.Errorf("MPI: rank %d has not received %d messages", r, len(list))
		}
	}
	for _, e := range j.comms {
		if j.tidy && e.id != 0 && !e.freed {
			j.t.Errorf("MPI: communicator %d is left", e.id)
		}
	}
}

// goroutine returns the name of the goroutine that calls it.
func goroutine() string {
	b := make([]byte, 64)
	name, _, _ := bytes.Cut(b[:runtime.Stack(b, false)], []byte(" ["))
	return string(name)
}

// enter begins a call. Only one may be made at a time.
func (l *memoryLibrary) enter(name string) (leave func(), err error) {
	if !l.inside.TryLock() {
		l.t.Errorf("MPI: rank %d calls %s while it makes another call", l.rank, name)
		l.inside.Lock()
	}
	if l.ended {
		l.t.Errorf("MPI: rank %d calls %s after Finalize", l.rank, name)
	}
	if err := l.fail(name); err != nil {
		l.inside.Unlock()
		return nil, err
	}
	return l.inside.Unlock, nil
}

func (l *memoryLibrary) fail(name string) error {
	if l.fails == nil {
		return nil
	}
	err := l.fails(name)
	l.broken = l.broken || err != nil
	return err
}

func (j *job) handle(id, rank int, members []int) mpi.Comm {
	j.mu.Lock()
	defer j.mu.Unlock()
	c := mpi.Comm(1000 + id*j.size + rank)
	j.comms[c] = &end{id: id, members: members}
	return c
}

// end returns what a handle of this rank stands for.
func (l *memoryLibrary) end(c mpi.Comm) *end {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.comms[c]
	if e == nil || e.freed || (int(c)-1000)%l.size != l.rank {
		panic(fmt.Sprintf("MPI: rank %d has no communicator %d, or has freed it", l.rank, c))
	}
	return e
}

// meet waits until all members have come, each with some bytes, and returns those of all.
func (l *memoryLibrary) meet(name string, members []int, b []byte) map[int][]byte {
	l.mu.Lock()
	l.visits[name]++
	key := fmt.Sprint(name, " ", l.visits[name])
	r := l.rooms[key]
	if r == nil {
		r = &room{got: map[int][]byte{}, full: make(chan struct{})}
		l.rooms[key] = r
	}
	r.got[l.rank] = bytes.Clone(b)
	if len(r.got) == len(members) {
		close(r.full)
	}
	l.mu.Unlock()
	<-r.full
	return r.got
}

// make returns a new communicator of some ranks, all of which have come.
func (l *memoryLibrary) make(name string, members []int) mpi.Comm {
	l.meet(name, members, nil)
	l.mu.Lock()
	r := l.rooms[fmt.Sprint(name, " ", l.visits[name])]
	if r.got[anyone] == nil { // the first one to go on numbers it
		l.made++
		r.got[anyone] = []byte{byte(l.made), byte(l.made >> 8)}
	}
	id := int(r.got[anyone][0]) | int(r.got[anyone][1])<<8
	l.mu.Unlock()
	return l.handle(id, l.rank, members)
}

func (l *memoryLibrary) Dup(c mpi.Comm) (mpi.Comm, error) {
	leave, err := l.enter("Dup")
	if err != nil {
		return 0, err
	}
	defer leave()
	e := l.end(c)
	return l.make(fmt.Sprint("dup ", e.id), e.members), nil
}

func (l *memoryLibrary) Group(c mpi.Comm, ranks []int, tag int) (mpi.Comm, error) {
	leave, err := l.enter("Group")
	if err != nil {
		return 0, err
	}
	defer leave()
	e := l.end(c)
	var members []int
	for _, r := range ranks {
		members = append(members, e.members[r])
	}
	if !slices.Contains(members, l.rank) {
		l.t.Errorf("MPI: rank %d makes a communicator of %v", l.rank, members)
	}
	return l.make(fmt.Sprint("group ", e.id, members, tag), members), nil
}

func (l *memoryLibrary) Free(c mpi.Comm) error {
	leave, err := l.enter("Free")
	if err != nil {
		return err
	}
	defer leave()
	e := l.end(c)
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, q := range l.all {
		if q.comm == e.id {
			l.t.Errorf("MPI: rank %d frees communicator %d with a request of %q", l.rank, e.id, q.t.hold)
		}
	}
	e.freed = true
	l.freed[e.id] = append(l.freed[e.id], l.rank)
	return nil
}

func (l *memoryLibrary) Gather(c mpi.Comm, mine []byte, size int) ([]byte, error) {
	leave, err := l.enter("Gather")
	if err != nil {
		return nil, err
	}
	defer leave()
	e := l.end(c)
	if size != len(e.members) {
		l.t.Errorf("MPI: a gather of %d ranks on a communicator of %d", size, len(e.members))
	}
	got := l.meet(fmt.Sprint("gather ", e.id), e.members, mine)
	var all []byte
	for _, r := range e.members {
		if len(got[r]) != len(mine) {
			l.t.Errorf("MPI: ranks %d and %d gather %d and %d bytes", l.rank, r, len(mine), len(got[r]))
		}
		all = append(all, got[r]...)
	}
	return all, nil
}

func (l *memoryLibrary) Unlink() {}

func (l *memoryLibrary) Finalize() error {
	leave, err := l.enter("Finalize")
	if err != nil {
		return err
	}
	defer leave()
	if goroutine() != l.thread {
		l.t.Errorf("MPI: rank %d ends it on a thread that did not start it", l.rank)
	}
	l.ended = true
	return nil
}
