// This file owns news that ranks tell each other beside their calls: a rank gives up, or
// closes a communicator.

package mpi

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/stowage-dev/stowage/internal/comm"
)

// news is a control message.
type news struct {
	By   int    // a rank of the world
	Why  string // why it gave up, or empty if it closed a communicator
	ID   uint64 // of that communicator
	From int    // its rank there
	// Serial counts its collectives there. Sent and Got count its messages with the
	// receiver of the news, and Met its splits with it. Everything up to there has passed or
	// will pass.
	Serial, Sent, Got, Met uint64
}

const (
	newsSize = 4096
	newsTag  = 1
)

// listen begins to receive the next news.
func (w *world) listen() {
	clear(w.inbox)
	if err := w.p.requests.ReceiveAny(w.control, uintptr(unsafe.Pointer(&w.inbox[0])), newsSize, newsTag, token{w: w, news: true}); err != nil {
		w.fail(w.rank, err, false)
	}
}

// hear takes news.
func (w *world) hear(err error) {
	if w.deaf {
		return
	}
	var n news
	if err == nil {
		err = json.Unmarshal([]byte(untilZero(w.inbox)), &n)
	}
	if err != nil {
		w.fail(w.rank, err, false)
		return
	}
	if n.Why != "" {
		w.fail(n.By, errors.New(n.Why), false)
	} else {
		if w.left[n.ID] == nil {
			w.left[n.ID] = map[int]*news{}
		}
		w.left[n.ID][n.From] = &n
	}
	w.listen()
}

// tell sends news to a rank of the world. The world fails if it cannot.
func (w *world) tell(rank int, n news) {
	if len(n.Why) > newsSize/8 { // JSON makes at most six bytes of one
		n.Why = n.Why[:newsSize/8]
	}
	b, err := json.Marshal(n)
	if err == nil {
		err = w.p.requests.Send(w.control, uintptr(unsafe.Pointer(&b[0])), len(b), rank, newsTag, token{w: w, hold: b})
	}
	if err != nil {
		w.fail(w.rank, err, true) // if it is the first
		return
	}
	w.telling++
}

// fail makes all communicators fail. The first failure counts. It is told to all other
// ranks if it was found here.
func (w *world) fail(by int, err error, tell bool) {
	f := &comm.Failure{By: by, Err: err}
	if w.failed.CompareAndSwap(nil, f) && tell {
		w.spread(f)
	}
}

// spread tells all other ranks of a failure.
func (w *world) spread(f *comm.Failure) {
	for r := range w.size {
		if r != w.rank {
			w.tell(r, news{By: f.By, Why: f.Err.Error()})
		}
	}
}

func (w *world) disagree(g *group, wrong string) {
	w.fail(g.ranks[0], fmt.Errorf("ranks do not agree: %s", wrong), true)
}

func closedBy(rank int) *comm.Failure {
	return &comm.Failure{By: rank, Err: fmt.Errorf("rank %d has closed the communicator", rank)}
}

// look abandons the operations that can never pass, and ends the world if its time has
// come.
func (w *world) look() {
	w.losePatience()
	w.noteAbsent()
	if w.failed.Load() != nil || len(w.left) > 0 {
		for o := range w.active {
			if f := o.hopeless(); f != nil {
				o.abandon(f)
			}
		}
	}
	if w.closing != nil {
		w.closing()
	}
}

// losePatience fails if a call has waited too long for ranks that have not come.
func (w *world) losePatience() {
	if w.o.Patience == 0 {
		return
	}
	gap := time.Since(w.looked)
	w.looked = time.Now()
	for o := range w.active {
		if gap > w.o.Patience/2 { // this process stood still, and so may have the others
			o.since = o.since.Add(gap)
		}
		if time.Since(o.since) < w.o.Patience {
			continue
		}
		if ranks := o.absent(); len(ranks) > 0 {
			a := &comm.Absent{Rank: w.rank, Call: o.call.Name(o.g.ranks), Ranks: ranks, Waited: w.o.Patience}
			w.fail(w.rank, fmt.Errorf("%w (rank %d runs on %s)", a, ranks[0], w.hosts[ranks[0]]), true)
			return
		}
	}
}

// noteEvery is how often it is looked whom calls wait for.
const noteEvery = 50 * time.Millisecond

// noteAbsent notes the call that waits longest for ranks that have not come.
func (w *world) noteAbsent() {
	now := time.Now()
	if w.o.Note == nil || len(w.active) == 0 || now.Sub(w.noted) < noteEvery {
		return
	}
	w.noted = now
	var oldest *op
	for o := range w.active {
		if now.Sub(o.since) >= noteEvery && (oldest == nil || o.since.Before(oldest.since)) && len(o.absent()) > 0 {
			oldest = o
		}
	}
	if oldest != nil {
		w.o.Note(oldest.where, oldest.absent())
	}
}

// busy reports whether there is something that the loop polls for.
func (w *world) busy() bool {
	return w.staged && len(w.active) > 0 || w.telling > 0 || w.closing != nil
}
