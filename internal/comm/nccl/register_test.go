// This file tests memory that is registered with NCCL.

package nccl

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/nccl/nccltest"
	"github.com/stowage-dev/stowage/memory"
)

var page = memory.Bytes(os.Getpagesize())

// cut is memory that was mapped in two chunks. It is the offset of the second one.
type cut memory.Bytes

func (c cut) Chunks(r device.Range) []device.Range {
	n := memory.Bytes(c) - r.Off
	return []device.Range{r.Slice(0, n), r.Slice(n, r.Len-n)}
}

// withMemory runs f with memory of several pages, which seems to be mapped in two chunks if
// second is not zero.
func withMemory(p *place, second memory.Bytes, f func(b *device.Buffer) error) error {
	b, err := p.Alloc(memory.Device, 8*page, "registered")
	if err != nil {
		return err
	}
	p.s.Fill(b.All(), 0x40)
	mem := b.Mem
	if second != 0 {
		b.Mem = cut(second)
	}
	err = f(b)
	b.Mem = mem
	p.s.Free(b)
	return errors.Join(err, p.s.Sync())
}

// Memory is registered with a communicator chunk by chunk, in whole pages, and deregistered
// when its owner says so. What NCCL does not take, and what no link reaches, is used as any
// other. SPEC S7.2
func TestRegister(t *testing.T) {
	for _, refused := range []error{nil, errTest} {
		libs := nccltest.Libraries(2, 0)
		err := run(t, libs, func(p *place) error {
			sub, err := p.c.Split([]int{0, 1})
			if err != nil {
				return err
			}
			own, err := p.c.Split([]int{p.c.Rank()})
			if err != nil {
				return err
			}
			libs[p.c.Rank()].Fail("register", refused)
			err = withMemory(p, 3*page, func(b *device.Buffer) error {
				whole := comm.Register(b.Slice(8, 4*page), nil, sub, own)
				parts := comm.Register(b.All(), p.c)
				empty := comm.Register(b.Slice(0, 0), p.c)
				short := comm.Register(p.b.Slice(8, 64), p.c)
				p.c.AllReduce(p.s, b.Slice(0, 64), b.Slice(0, 64), comm.F32, comm.Max)
				err := errors.Join(p.Sync(), p.c.Err())
				short()
				empty()
				parts()
				whole()
				return err
			})
			return errors.Join(err, sub.Close(), own.Close())
		})
		if err != nil {
			t.Fatal(err)
		}
		sizes := func(word string, pages ...memory.Bytes) (lines []string) {
			for _, n := range pages {
				lines = append(lines, fmt.Sprintf("%s %d", word, n*page))
			}
			return lines
		}
		want := slices.Concat([]string{"init 1 of 2", "init 2 of 2"}, sizes("register", 2, 1, 3, 5), []string{"allReduce 16"}, sizes("deregister", 3, 5, 2, 1), []string{"finalize", "destroy", "finalize", "destroy"})
		if refused != nil {
			want = slices.DeleteFunc(want, func(s string) bool { return strings.Contains(s, "register") })
		}
		for r, l := range libs {
			if got := l.Calls(); !slices.Equal(got, want) || l.Reached("allReduce") != (refused == nil) {
				t.Errorf("rank %d calls %v", r, got)
			}
		}
	}
}

// Ranks register the same pieces, or none: NCCL does not define what happens if they pass
// memory that is registered on some of them only, or at another distance from its head. SPEC S7.2
func TestRegisterAgreed(t *testing.T) {
	for name, of := range map[string]func(rank memory.Bytes) (second memory.Bytes, off, n memory.Bytes){
		"refused by one": nil,
		"other chunks": func(rank memory.Bytes) (memory.Bytes, memory.Bytes, memory.Bytes) {
			return (2 + rank) * page, 0, 8 * page
		},
		"other heads": func(rank memory.Bytes) (memory.Bytes, memory.Bytes, memory.Bytes) {
			return 0, 64 * (1 + rank), 7 * page
		},
		"other places":  func(rank memory.Bytes) (memory.Bytes, memory.Bytes, memory.Bytes) { return 0, 64 * rank, 7 * page },
		"other lengths": func(rank memory.Bytes) (memory.Bytes, memory.Bytes, memory.Bytes) { return 0, 0, (7 + rank) * page },
		"empty on one":  func(rank memory.Bytes) (memory.Bytes, memory.Bytes, memory.Bytes) { return 0, 0, 8 * rank * page },
	} {
		t.Run(name, func(t *testing.T) {
			libs := nccltest.Libraries(2, 0)
			err := run(t, libs, func(p *place) error {
				second, off, n := memory.Bytes(0), memory.Bytes(0), 8*page
				if of != nil {
					second, off, n = of(memory.Bytes(p.c.Rank()))
				} else if p.c.Rank() == 1 {
					libs[1].Fail("register", errTest)
				}
				return withMemory(p, second, func(b *device.Buffer) error {
					r := b.Slice(off, n)
					release := comm.Register(r, p.c)
					for _, at := range []memory.Bytes{0, page, 2 * page, 5 * page} {
						x := b.Slice(off+at, page)
						p.c.AllReduce(p.s, x, x, comm.F32, comm.Max)
					}
					err := errors.Join(p.Sync(), p.c.Err())
					release()
					return err
				})
			})
			if err != nil {
				t.Error(err)
			}
			for r, l := range libs {
				if l.Reached("allReduce") {
					t.Errorf("rank %d passes registered memory", r)
				}
			}
		})
	}
}

// The pages that lie in a range and in one chunk as a whole are registered, and no other page, wherever the range
// lies in its buffer. Ranks whose ranges have the same pages at other places of their buffers agree.
func TestRegisterWholePages(t *testing.T) {
	for _, c := range []struct{ second, off, n memory.Bytes }{
		{0, 0, 7 * page}, {0, page, 6 * page}, {0, 8, 4 * page}, {0, page - 8, 4*page + 8}, {0, 0, 3*page - 1}, {0, 2 * page, 3*page + 1},
		{0, 8, 2*page - 8}, {0, 8, 2*page - 9}, {0, 8, page}, {0, 0, page - 1}, {3 * page, 0, 7 * page}, {2*page + 8, 8, 6 * page}, {4*page - 8, page, 5*page + 8},
	} {
		libs := nccltest.Libraries(2, 0)
		err := run(t, libs, func(p *place) error {
			moved, second := c.off+memory.Bytes(p.c.Rank())*page, c.second
			if second != 0 {
				second += moved - c.off
			}
			return withMemory(p, second, func(b *device.Buffer) error {
				r := b.Slice(moved, c.n)
				release := comm.Register(r, p.c)
				held := func(i memory.Bytes) bool { return libs[p.c.Rank()].Holds(b.Addr() + uintptr(i*page)) }
				for i := range memory.Bytes(8) {
					from, to := i*page, (i+1)*page
					whole := from >= moved && to <= moved+c.n && (second <= from || second >= to)
					if held(i) != whole {
						t.Errorf("%+v: page %d of rank %d is registered: %v, want %v", c, i, p.c.Rank(), held(i), whole)
					}
				}
				release()
				for i := range memory.Bytes(8) {
					if held(i) {
						t.Errorf("%+v: page %d of rank %d is registered after the end", c, i, p.c.Rank())
					}
				}
				return nil
			})
		})
		if err != nil {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// Memory must be released before it is freed: NCCL finds it by its address.
func TestRegisteredMemoryFreed(t *testing.T) {
	libs := nccltest.Libraries(2, 0)
	err := run(t, libs, func(p *place) error {
		var release func()
		err := withMemory(p, 0, func(b *device.Buffer) error {
			release = comm.Register(b.All(), p.c)
			return nil
		})
		defer func() {
			if r := recover(); r == nil || !strings.Contains(fmt.Sprint(r), "is freed before communicators forget it") {
				t.Errorf("release after free: %v", r)
			}
			p.c.Abort(errTest) // which forgets what is registered
		}()
		release()
		return err
	})
	if err != nil && !strings.Contains(err.Error(), errTest.Error()) {
		t.Error(err)
	}
}

// Memory may be registered with a communicator that has failed, or whose other ranks give up
// meanwhile: nothing happens.
func TestRegisterAfterFailure(t *testing.T) {
	libs := nccltest.Libraries(2, 0)
	_ = run(t, libs, func(p *place) error {
		return withMemory(p, 0, func(b *device.Buffer) error {
			before := comm.Register(b.Slice(0, page), p.c)
			if p.c.Rank() == 1 {
				p.c.Abort(errTest)
			} else {
				comm.Register(b.Slice(0, 3*page), p.c)()
			}
			_ = wait(p)
			comm.Register(b.Slice(0, 2*page), p.c)()
			before()
			return nil
		})
	})
	for r, l := range libs {
		got := l.Calls()[1:]
		if got[0] != fmt.Sprint("register ", int64(page)) || slices.Contains(got, fmt.Sprint("register ", int64(2*page))) || slices.Contains(got, fmt.Sprint("deregister ", int64(page))) {
			t.Errorf("rank %d calls %v", r, got)
		}
	}
}
