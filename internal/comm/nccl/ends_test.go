// This file tests the ends of communicators that fail, and rules of single functions.

package nccl

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/letter"
	"github.com/stowage-dev/stowage/internal/comm/nccl/nccltest"
	"github.com/stowage-dev/stowage/internal/nccl"
	"github.com/stowage-dev/stowage/memory"
)

// A library that cannot end a communicator by itself is made to, and what it cannot do then is
// the error of the rank that closes it.
func TestEndsThatFail(t *testing.T) {
	broken := errors.New("nccl: it does not end")
	for _, x := range []struct {
		kinds string
		calls string // of the ends of the communicator
		fails bool
	}{{"", "finalize destroy", false}, {"destroy", "finalize destroy", true}, {"finalize", "finalize abort", false}, {"finalize abort", "finalize abort", true}} {
		libs := nccltest.Libraries(2, 0)
		for _, kind := range strings.Fields(x.kinds) {
			libs[1].Fail(kind, broken)
		}
		err := run(t, libs, func(p *place) error {
			p.c.Barrier(p.s)
			return p.s.Sync()
		})
		if errors.Is(err, broken) != x.fails || !x.fails && err != nil {
			t.Errorf("%q fails: %v", x.kinds, err)
		}
		ends := slices.DeleteFunc(libs[1].Calls(), func(call string) bool { return call != "finalize" && call != "destroy" && call != "abort" })
		if got := strings.Join(ends, " "); got != x.calls {
			t.Errorf("%q fails: it ends by %s, want %s", x.kinds, got, x.calls)
		}
	}
}

// busy is a library whose communicator has a call that is never over.
type busy struct {
	Library
	calls []string
}

func (b *busy) call(name string) error {
	b.calls = append(b.calls, name)
	return nil
}

func (b *busy) Poll(nccl.Comm) (bool, error) { return false, nil }
func (b *busy) Finalize(nccl.Comm) error     { return b.call("finalize") }
func (b *busy) Destroy(nccl.Comm) error      { return b.call("destroy") }
func (b *busy) Abort(nccl.Comm) error        { return b.call("abort") }

// A communicator that does not end by itself in time is aborted: to destroy it would wait for ever.
func TestEndThatDoesNotCome(t *testing.T) {
	lib := &busy{}
	g := &group{w: &world{lib: lib}, gone: make(chan struct{})}
	if err := g.end(false, 0); err != nil || strings.Join(lib.calls, " ") != "finalize abort" || !g.isDead() {
		t.Errorf("it ends by %q: %v", lib.calls, err)
	}
}

// closing is a communicator of hosts whose parts cannot be closed.
type closing struct {
	comm.Comm
	err error
}

func (c closing) Split(ranks []int) (comm.Comm, error) {
	sub, err := c.Comm.Split(ranks)
	return closing{sub, c.err}, err
}

func (c closing) Close() error { return errors.Join(c.Comm.Close(), c.err) }

// What cannot be closed of the hosts is the error of the rank that closes the world: what the audit used, that of a part
// of the ranks, and the host communicator itself.
func TestHostsThatCannotBeClosed(t *testing.T) {
	libs := nccltest.Libraries(3, 0)
	places, devs := openWorld(t, libs)
	hosts, _ := openWorld(t, libs)
	local, err := comm.NewLocal([]device.Device{hosts[0].Device, hosts[1].Device, hosts[2].Device}, comm.Options{})
	if err != nil {
		t.Fatal(err)
	}
	errs := make([]error, len(devs))
	var ranks sync.WaitGroup
	for r := range devs {
		ranks.Go(func() {
			root, audit, part := fmt.Errorf("host %d does not end", r), fmt.Errorf("audit %d does not end", r), fmt.Errorf("part %d does not end", r)
			h := &splitting{closing{local[r], root}, []error{audit, part, nil}}
			c, err := Open(libs[r], devs[r], Options{Host: h, HostDevice: hosts[r].Device})
			if err != nil {
				errs[r] = err
				return
			}
			want := []error{root, audit}
			if r != 1 {
				sub, err := c.Split([]int{0, 2})
				if err != nil {
					errs[r] = err
					return
				}
				sub.Barrier(places[r].s)
				errs[r] = errors.Join(places[r].s.Sync(), sub.Close())
				want = append(want, part)
			}
			c.Barrier(places[r].s)
			got := errors.Join(places[r].s.Sync(), c.Close())
			for _, w := range want {
				if !errors.Is(got, w) {
					t.Errorf("rank %d closes a world of which something cannot be closed: %v, want %v in it", r, got, w)
				}
			}
		})
	}
	ranks.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
}

// unsplit is a communicator of hosts whose parts fail on this rank alone.
type unsplit struct{ comm.Comm }

func (c unsplit) Split(ranks []int) (comm.Comm, error) {
	sub, err := c.Comm.Split(ranks)
	return nil, errors.Join(err, sub.Close(), errNoPart)
}

var errNoPart = errors.New("there is no part")

// openBesideOne opens two ranks, of which first the one and then the other has hosts that change makes of its own, and
// calls do with what each opens.
func openBesideOne(t *testing.T, change func(comm.Comm) comm.Comm, do func(what string, c comm.Comm, host comm.Comm, err error)) {
	for rank := range 2 {
		libs := nccltest.Libraries(2, 0)
		_, devs := openWorld(t, libs)
		hosts, _ := openWorld(t, libs)
		local, err := comm.NewLocal([]device.Device{hosts[0].Device, hosts[1].Device}, comm.Options{})
		if err != nil {
			t.Fatal(err)
		}
		var ranks sync.WaitGroup
		for r := range devs {
			host := local[r]
			if r == rank {
				host = change(host)
			}
			ranks.Go(func() {
				c, err := Open(libs[r], devs[r], Options{Host: host, HostDevice: hosts[r].Device})
				do(fmt.Sprintf("rank %d beside rank %d", r, rank), c, local[r], err)
			})
		}
		ranks.Wait()
	}
}

// A rank whose hosts cannot be divided says so to the others, which wait for it otherwise.
func TestOneRankCannotDivideItsHosts(t *testing.T) {
	openBesideOne(t, func(c comm.Comm) comm.Comm { return unsplit{c} }, func(what string, c comm.Comm, host comm.Comm, err error) {
		if c != nil || err == nil || !strings.Contains(err.Error(), errNoPart.Error()) {
			t.Errorf("%s opens %v: %v", what, c, err)
		}
		if err := host.Close(); err != nil {
			t.Error(err)
		}
	})
}

// once is a communicator of hosts that can be divided once, by NCCL's world.
type once struct {
	comm.Comm
	divided bool
}

func (c *once) Split(ranks []int) (comm.Comm, error) {
	if c.divided {
		return nil, errNoPart
	}
	c.divided = true
	return c.Comm.Split(ranks)
}

// So does a rank whose hosts cannot be divided for a part.
func TestOneRankCannotDivide(t *testing.T) {
	openBesideOne(t, func(c comm.Comm) comm.Comm { return &once{Comm: c} }, func(what string, c comm.Comm, _ comm.Comm, err error) {
		if err != nil {
			t.Error(err)
			return
		}
		if part, err := c.Split([]int{0, 1}); part != nil || err == nil || !strings.Contains(err.Error(), errNoPart.Error()) {
			t.Errorf("%s has %v: %v", what, part, err)
		}
		_ = c.Close() // the world is aborted
	})
}

// splitting is a communicator of hosts whose parts cannot be closed, each for a reason of its own.
type splitting struct {
	closing
	next []error
}

func (c *splitting) Split(ranks []int) (comm.Comm, error) {
	sub, err := c.Comm.Split(ranks)
	why := c.next[0]
	c.next = c.next[1:]
	return closing{sub, why}, err
}

// Small groups compare all pairs of ranks, and large ones neighbours: whoever sends expects as
// much as the other expects of it.
func TestPartsOfLetters(t *testing.T) {
	for n := 1; n <= mostCompared+2; n++ {
		type way struct{ from, to int }
		sent, expected := map[way]memory.Bytes{}, map[way]memory.Bytes{}
		for me := range n {
			g := &group{ranks: make([]int, n), me: me}
			of := func(p int) (send, recv memory.Bytes) {
				return memory.Bytes(1000*me + p), memory.Bytes(1000*p + me)
			}
			sends, recvs := g.parts(of)
			for _, x := range sends {
				sent[way{me, x.peer}] = x.len
			}
			for _, x := range recvs {
				expected[way{x.peer, me}] = x.len
			}
			if sends, recvs := g.parts(nil); len(sends) != len(recvs) || slices.ContainsFunc(append(sends, recvs...), func(p part) bool { return p.len != 0 || p.peer == me }) {
				t.Errorf("%d ranks: rank %d sends %v and expects %v", n, me, sends, recvs)
			}
		}
		want := n * (n - 1)
		if n > mostCompared {
			want = n
		}
		if len(sent) != want || fmt.Sprint(sent) != fmt.Sprint(expected) {
			t.Errorf("%d ranks: %d letters are sent and %d expected, want %d: %v, %v", n, len(sent), len(expected), want, sent, expected)
		}
		for w, n := range sent {
			if n != memory.Bytes(1000*w.from+w.to) {
				t.Errorf("rank %d sends %d bytes to %d", w.from, n, w.to)
			}
		}
	}
}

// gatherer is a communicator that gathers what it is given.
type gatherer struct {
	comm.Comm
	texts []string
	err   error
}

func (g gatherer) Gather(mine []byte) (all [][]byte, err error) {
	for _, text := range g.texts {
		if text == "mine" {
			text = string(mine)
		}
		all = append(all, []byte(text))
	}
	return all, g.err
}

// What ranks share is what the first one has, unless one has failed or cannot be understood.
func TestShared(t *testing.T) {
	broken, mine := errors.New("broken"), errors.New("mine")
	for _, x := range []struct {
		texts []string
		err   error
		own   error
		want  string
	}{
		{[]string{"mine", `{"Value":8}`}, nil, nil, "7, <nil>"},
		{[]string{`{"Value":8}`, "mine"}, nil, nil, "8, <nil>"},
		{[]string{"mine", `{"Err":"theirs"}`}, nil, nil, "7, theirs"},
		{[]string{"mine", `{"Err":"theirs"}`}, nil, mine, "7, mine"},
		{[]string{"mine"}, broken, nil, "7, broken"},
		{[]string{"mine"}, broken, mine, "7, mine\nbroken"},
		{[]string{"mine", "{"}, nil, nil, "7, comm: cannot read what rank 1 says: unexpected end of JSON input; run the same version of the program everywhere"},
	} {
		v, err := share(gatherer{texts: x.texts, err: x.err}, 7, x.own)
		if got := fmt.Sprintf("%d, %v", v, err); got != x.want {
			t.Errorf("%q: got %s, want %s", x.texts, got, x.want)
		}
	}
	if _, err := everyone(gatherer{}, func() {}); err == nil {
		t.Error("a function was sent")
	}
}

// Room for letters is made once, for 16 at least, and anew for more, and the old is given back.
func TestRoomForLetters(t *testing.T) {
	d, err := openCPU(0)
	if err != nil {
		t.Fatal(err)
	}
	g := &group{w: &world{o: Options{HostDevice: d}}}
	if g.hs, err = d.NewStream("letters"); err != nil {
		t.Fatal(err)
	}
	for _, x := range [][2]int{{1, 16}, {16, 16}, {17, 17}, {3, 17}, {40, 40}} {
		if err := g.room(x[0]); err != nil {
			t.Fatal(err)
		}
		want := memory.Bytes(x[1]) * letter.Size
		if err := g.hs.Sync(); err != nil {
			t.Fatal(err)
		}
		if u := d.Memory().Kind[memory.Host]; g.out.Size() != want || g.in.Size() != want || u.Current != 2*want {
			t.Errorf("room for %d letters: %d and %d bytes of %d in use, want %d", x[0], g.out.Size(), g.in.Size(), u.Current, want)
		}
	}
	g.freeLetters()
	if err := errors.Join(g.hs.Close(), d.Close()); err != nil {
		t.Error(err)
	}
}
