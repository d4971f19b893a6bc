// This file tests memory that is registered with NCCL.

package nccl

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/nccl/nccltest"
)

// pieces is memory that was mapped in two pieces.
type pieces struct{}

func (pieces) Chunks(r device.Range) []device.Range {
	return []device.Range{r.Slice(0, 1000), r.Slice(1000, r.Len-1000)}
}

// Memory is registered with a communicator piece by piece, and deregistered when its owner
// says so. What NCCL does not take, and what no link reaches, is used as any other. SPEC S7.2
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
			whole := comm.Register(p.b.Slice(0, 64), nil, sub, own)
			mem := p.b.Mem
			p.b.Mem = pieces{}
			parts := comm.Register(p.b.Slice(0, 3000), p.c)
			p.b.Mem = mem
			empty := comm.Register(p.b.Slice(0, 0), p.c)
			p.c.AllReduce(p.s, p.b.Slice(0, 64), p.b.Slice(0, 64), comm.F32, comm.Max)
			err = errors.Join(p.Sync(), p.c.Err())
			empty()
			parts()
			whole()
			return errors.Join(err, sub.Close(), own.Close())
		})
		if err != nil {
			t.Fatal(err)
		}
		want := []string{"init 1 of 2", "init 2 of 2", "register 64", "register 1000", "register 2000", "allReduce 16", "deregister 1000", "deregister 2000", "deregister 64", "finalize", "destroy", "finalize", "destroy"}
		if refused != nil {
			want = slices.DeleteFunc(want, func(s string) bool { return strings.Contains(s, "register") })
		}
		for r, l := range libs {
			if got := l.Calls(); !slices.Equal(got, want) {
				t.Errorf("rank %d calls %v", r, got)
			}
		}
	}
}

// Memory may be registered with a communicator that has failed: nothing happens.
func TestRegisterAfterFailure(t *testing.T) {
	libs := nccltest.Libraries(2, 0)
	_ = run(t, libs, func(p *place) error {
		before := comm.Register(p.b.Slice(0, 64), p.c)
		if p.c.Rank() == 1 {
			p.c.Abort(errTest)
		}
		_ = wait(p)
		comm.Register(p.b.Slice(0, 128), p.c)()
		before()
		return nil
	})
	for r, l := range libs {
		if got, want := l.Calls()[1:], "register 64"; got[0] != want || slices.Contains(got, "register 128") || slices.Contains(got, "deregister 64") {
			t.Errorf("rank %d calls %v", r, got)
		}
	}
}
