// This file owns the tests of what ranks do when a call of MPI fails.

package mpi

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// counted counts the calls of a rank by name, and lets one of them fail.
type counted struct {
	calls map[string]int
	name  string
	at    int
	split bool // all ranks have made their communicators
}

var errBroken = errors.New("the network is broken")

// collectives are calls in which ranks would wait for one that is not there.
var collectives = []string{"Dup", "Group", "Gather"}

func (f *counted) fail(name string) error {
	if f.split || slices.Contains(collectives, name) {
		f.calls[name]++
	}
	if name == f.name && f.calls[name] == f.at {
		return errBroken
	}
	return nil
}

// useAll makes two ranks use everything once. It returns whether the last bytes are right.
func useAll(p *Process, staged bool, split func()) (right bool, err error) {
	d, err := cpu.Open(cpu.Options{Ordinal: p.Rank()})
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	s, err := d.NewStream("test")
	if err != nil {
		return false, err
	}
	const n = 300_000
	b, err := d.Alloc(memory.Device, 3*n, "test")
	if err != nil {
		return false, errors.Join(err, s.Close())
	}
	defer func() {
		s.Free(b)
		err = errors.Join(err, s.Close())
	}()
	c, err := p.Open(d, Options{Scratch: 64 * memory.KiB, Staged: staged})
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	me, other := p.Rank(), 1-p.Rank()
	s.Fill(b.All(), byte(me+1))
	sub, err := c.Split([]int{1, 0})
	if err != nil {
		return false, errors.Join(err, s.Sync())
	}
	p.mu.Lock()
	split()
	p.mu.Unlock()
	sub.Exchange(s, []comm.Message{{Peer: me, Range: b.Slice(0, 100)}}, []comm.Message{{Peer: me, Range: b.Slice(100, 100)}})
	all, err := sub.Gather(slices.Repeat([]byte{byte(me)}, me))
	err = errors.Join(err, s.Sync(), sub.Err(), sub.Close())
	if err == nil && (len(all[0]) != 1 || len(all[1]) != 0 || all[0][0] != 1) {
		return false, fmt.Errorf("gathered %v", all)
	}
	c.AllGather(s, b.Slice(0, 2*n), b.Slice(memory.Bytes(me)*n, n))
	const reduced = 2*(64<<10-16) + 4 // the second piece is of one rank alone
	c.AllReduce(s, b.Slice(2*n, reduced), b.Slice(memory.Bytes(me)*n+200, reduced), comm.F32, comm.Max)
	got := make([]byte, 3*n)
	err = errors.Join(err, s.Download(got, b.All()), c.Err())
	right = got[150] == 2 && got[me*n] == byte(me+1) && got[other*n+n-1] == byte(other+1)
	for _, v := range got[2*n : 2*n+reduced] {
		right = right && v == 2
	}
	return right && got[2*n+reduced] == byte(me+1), err
}

// Whatever call of MPI fails at one rank, all ranks come to an end. A rank whose bytes are
// wrong has an error, a rank whose call has failed says what MPI said, and nothing is left.
func TestEveryCallFailsOnce(t *testing.T) {
	for _, staged := range []bool{false, true} {
		use := func(name string, at int) (calls map[string]int) {
			t.Run(fmt.Sprintf("%s %d, staged %v", name, at, staged), func(t *testing.T) {
				j, ps := startJob(t, 2, uint64(at))
				var counts []*counted
				for r, l := range j.libs {
					f := &counted{calls: map[string]int{}}
					if r == 1 || slices.Contains(collectives, name) {
						f.name, f.at = name, at
					}
					counts = append(counts, f)
					ps[r].mu.Lock()
					l.fails = f.fail
					ps[r].mu.Unlock()
				}
				errs := make([]error, len(ps))
				_ = together(ps, func(p *Process) (err error) {
					right, err := useAll(p, staged, func() { counts[p.Rank()].split = true })
					if !right && err == nil {
						t.Errorf("rank %d has wrong bytes and no error", p.Rank())
					}
					errs[p.Rank()] = err
					return err
				})
				for _, p := range ps {
					p.mu.Lock()
					defer p.mu.Unlock()
				}
				if name == "" {
					if err := errors.Join(errs...); err != nil {
						t.Error(err)
					}
					calls = maps.Clone(counts[1].calls)
				} else if told := errs[1] != nil && strings.Contains(errs[1].Error(), errBroken.Error()); !told && errs[1] != nil {
					t.Errorf("rank 1 says %v", errs[1])
				}
				for r, f := range counts {
					if name != "" && name == f.name && f.calls[name] >= at && slices.Contains(append([]string{"Send", "Send news", "Receive", "message"}, collectives...), name) && errs[r] == nil {
						t.Errorf("rank %d has no error", r)
					}
				}
			})
			return calls
		}
		calls := use("", 0)
		delete(calls, "Finalize")
		delete(calls, "Some") // how often it is called depends on time
		delete(calls, "Send news")
		use("Send news", 1) // a rank that is not told of the last close waits half a minute
		for _, name := range slices.Sorted(maps.Keys(calls)) {
			for at := range calls[name] {
				use(name, at+1)
			}
		}
		for _, at := range []int{1, 3, 20} {
			use("Some", at)
		}
	}
}
