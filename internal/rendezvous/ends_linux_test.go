// This file tests addresses, and what ends early: a library, a store, a search for rank 0.

package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/internal/launcher"
)

// Rank 0 listens on loopback alone if the others come from there, and tells others of all
// its addresses.
func TestAddresses(t *testing.T) {
	for leader, loopback := range map[string]bool{"127.0.0.1": true, "127.0.0.2": true, "localhost": true, "somewhere.invalid": false} {
		p := &launcher.Place{Size: 2, Host: "h", Leader: leader, Job: "job", Restart: 3}
		if _, err := fmt.Sscan(freePort(t), &p.Port); err != nil {
			t.Fatal(err)
		}
		m, err := atLeader(p)
		if err != nil {
			t.Fatal(err)
		}
		if at := m.listener.Addr().(*net.TCPAddr); at.IP.IsLoopback() != loopback || at.Port != p.Port {
			t.Errorf("%s: rank 0 listens at %v", leader, at)
		}
		_ = m.listener.Close()
		in, err := m.invited(t.Context())
		if err != nil || in.Token != "job/3" || m.token != "job/3" || in.Port != fmt.Sprint(p.Port) || !slices.Equal(in.Addresses, []string{leader}) || !slices.Equal(in.from(p), in.Addresses) {
			t.Errorf("%+v, %v", in, err)
		}
		p.Rank = 1
		if m, err := atLeader(p); err != nil || m.listener != nil {
			t.Errorf("rank 1 listens, %v", err)
		}
	}
	want := []string{"h"}
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() {
			want = append(want, n.IP.String())
		}
	}
	want = want[:min(len(want), maxAddresses)]
	l, in, err := open(&launcher.Place{Host: "h"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if in.Host != "h" || in.Token == "" || in.Port != fmt.Sprint(l.Addr().(*net.TCPAddr).Port) || !slices.Equal(in.Addresses, want) {
		t.Errorf("%+v, want the addresses %v", in, want)
	}
	if got := in.from(&launcher.Place{Host: "h"}); !slices.Equal(got, append([]string{"127.0.0.1", "::1"}, want...)) {
		t.Errorf("from the same machine: %v", got)
	}
	if got := in.from(&launcher.Place{Host: "other"}); !slices.Equal(got, want) {
		t.Errorf("from another machine: %v", got)
	}
}

// A rank is told what it waits for also if rank 0 never says where it is, to torchrun's agent
// or by a broadcast. Rank 0 itself is not.
func TestSearchSaysThatRankZeroIsMissing(t *testing.T) {
	const want = "rank 1 on h waits for rank 0, which has not said yet where it is"
	for rank, want := range [][]string{nil, {want}} {
		for name, search := range map[string]func(ctx context.Context, p *launcher.Place, o Options){
			"agent": func(ctx context.Context, p *launcher.Place, o Options) {
				m := &meeting{invited: func(ctx context.Context) (*invitation, error) {
					<-ctx.Done()
					return nil, ctx.Err()
				}}
				_, _ = m.connect(ctx, p, o)
			},
			"broadcast": func(ctx context.Context, p *launcher.Place, o Options) {
				o.Exchange = func(string) (string, error) {
					<-ctx.Done()
					return "", ctx.Err()
				}
				_, _ = exchanged(p, o)
			},
		} {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				var said []string
				search(ctx, &launcher.Place{Rank: rank, Host: "h"}, Options{Patience: 5 * time.Second, Waits: func(text string) { said = append(said, text) }})
				if !slices.Equal(said, want) {
					t.Errorf("%s, rank %d: it says %q, want %q", name, rank, said, want)
				}
			})
		}
	}
}

// Rank 0 says once who has not come for as long as its patience, and nothing if all are there.
func TestLeaderSaysWhoIsMissing(t *testing.T) {
	for size, want := range map[int][]string{3: {"rank 0 on h waits for other ranks at (pipe) (missing: ranks 1 and 2)"}, 0: nil} {
		synctest.Test(t, func(t *testing.T) {
			var said []string
			opts := Options{Patience: 5 * time.Second, Timeout: time.Minute, Waits: func(text string) { said = append(said, text) }}
			service := &service{listener: nobody{}, leader: launcher.Place{Host: "h"}, opts: opts, members: make([]*member, size)}
			if size > 0 {
				service.members[0] = &member{}
			}
			s := &Session{service: service, opts: opts, complete: make(chan struct{}), failed: make(chan struct{}), place: launcher.Place{LocalKnown: true}}
			time.AfterFunc(time.Minute, func() { close(s.complete) })
			if err := s.awaitAll(t.Context()); err != nil || !slices.Equal(said, want) {
				t.Errorf("%v; it says %q, want %q", err, said, want)
			}
		})
	}
}

// nobody is a listener that nobody reaches.
type nobody struct{ net.Listener }

func (nobody) Addr() net.Addr { return &net.UnixAddr{Name: "(pipe)", Net: "unix"} }

// A rank that has not reached rank 0 for as long as its patience says once what it waits for.
func TestSearchSaysWhatItWaitsFor(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	port, calls, said := freePort(t), 0, []string(nil)
	m := &meeting{invited: func(context.Context) (*invitation, error) {
		if calls++; calls == 6 {
			cancel()
		}
		return &invitation{Port: port, Addresses: []string{"127.0.0.1"}}, nil
	}}
	opts := Options{Patience: 50 * time.Millisecond, Waits: func(text string) {
		if said = append(said, text); calls < 2 {
			t.Error("it is impatient")
		}
	}}
	if _, err := m.connect(ctx, &launcher.Place{Rank: 1, Host: "h"}, opts); err == nil {
		t.Error("somebody is there")
	}
	if want := "rank 1 on h waits for rank 0 at 127.0.0.1:" + port + ": connection refused"; len(said) != 1 || said[0] != want {
		t.Errorf("it says %q, want %q once", said, want)
	}
}

// A rank whose name for rank 0 nobody knows says so at once: it is more often mistyped than not known yet.
func TestSearchForANameThatNobodyKnows(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	calls, said := 0, []string(nil)
	m := &meeting{invited: func(context.Context) (*invitation, error) {
		if calls++; calls == 4 {
			cancel()
		}
		return &invitation{Port: "29500", Addresses: []string{"no..such..host"}}, nil // which needs no network to be wrong
	}}
	opts := Options{Patience: time.Hour, Waits: func(text string) { said = append(said, text) }}
	_, err := m.connect(ctx, &launcher.Place{Rank: 1, Host: "h"}, opts)
	if err == nil || !strings.Contains(err.Error(), "there is no such host") {
		t.Errorf("the error is %v", err)
	}
	if want := "rank 1 on h waits for rank 0 at no..such..host:29500: there is no such host"; len(said) != 1 || said[0] != want {
		t.Errorf("it says %q, want %q once", said, want)
	}
}

// A search that ends says what was wrong last, and not that it ended, unless that is all.
func TestSearchEnds(t *testing.T) {
	for _, early := range []bool{false, true} {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		port, calls := freePort(t), 0
		m := &meeting{invited: func(context.Context) (*invitation, error) {
			if calls++; calls == 2 || early {
				cancel()
			}
			if early {
				return nil, errors.New("no invitation")
			}
			return &invitation{Port: port, Addresses: []string{"127.0.0.1"}}, nil
		}}
		_, err := m.connect(ctx, &launcher.Place{Rank: 1, Host: "h"}, Options{Patience: defaultPatience})
		want := "rank 1 on h cannot reach rank 0 at 127.0.0.1:" + port + ": connection refused; see that rank 0 was started and that its port is open, or set STOWAGE_PORT to one that is"
		if early {
			want = "rank 1 on h cannot reach rank 0 at rank 0: context canceled; see that rank 0 was started and that its port is open, or set STOWAGE_PORT to one that is"
		}
		if err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	}
}

// The places of others: those of ranks that wait for nobody, and of several.
func TestPlacesInWords(t *testing.T) {
	f := &Failure{State: State{Rank: 3}, Why: "ended", States: []State{{Rank: 0, Collective: "barrier 1"}, {Rank: 1, Collective: "barrier 1"}, {Rank: 2, Collective: "x"}, {Rank: 4}}}
	if want := "rank 3 ended; ranks 0 and 1 are in barrier 1; rank 2 is in x"; f.Error() != want {
		t.Errorf("got  %v\nwant %s", f, want)
	}
}

// flags returns the flags of a file descriptor, or an error if it is closed.
func flags(fd int) (uintptr, syscall.Errno) {
	f, _, no := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_GETFD, 0)
	return f, no
}

// What a library is given is not for the children of this process, and is closed with the
// service unless the library did so. After a failure there are no answers.
func TestPMIEnds(t *testing.T) {
	for _, closed := range []bool{false, true} {
		sessions := joined(t, 2, nil)
		p, err := sessions[1].ServePMI()
		if err != nil {
			t.Fatal(err)
		}
		if env := p.Environment(); len(env) != 3 || env["PMI_FD"] != fmt.Sprint(p.theirs) || env["PMI_RANK"] != "1" || env["PMI_SIZE"] != "2" {
			t.Errorf("%v", env)
		}
		for _, fd := range []int{int(p.ours.Fd()), p.theirs} {
			if f, no := flags(fd); no != 0 || f != syscall.FD_CLOEXEC {
				t.Errorf("a child inherits it: flags %d, %v", f, no)
			}
		}
		if err := syscall.SetNonblock(int(p.ours.Fd()), true); err != nil {
			t.Error(err)
		}
		theirs := p.theirs
		var other *os.File
		if closed {
			if err := syscall.Close(theirs); err != nil {
				t.Fatal(err)
			}
			if other, err = os.Open(os.DevNull); err != nil {
				t.Fatal(err)
			}
			defer other.Close()
			if int(other.Fd()) != theirs {
				if err := syscall.Dup3(int(other.Fd()), theirs, syscall.O_CLOEXEC); err != nil {
					t.Fatal(err)
				}
				defer syscall.Close(theirs)
			}
		} else {
			sessions[0].Abort(errors.New("over"))
			<-sessions[1].Failed()
			if _, err := syscall.Write(theirs, []byte("cmd=put key=k value=v\ncmd=init\n")); err != nil {
				t.Error(err)
			}
			<-p.done
			b := make([]byte, 100)
			if n, _, err := syscall.Recvfrom(theirs, b, syscall.MSG_DONTWAIT); err == nil && n > 0 {
				t.Errorf("after a failure the library hears %q", b[:n])
			}
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if _, no := flags(theirs); (no == 0) != closed {
			t.Errorf("closed by the library: %t, after the end: %v", closed, no)
		}
		if closed {
			closeAll(t, sessions)
			continue
		}
		for _, s := range sessions {
			_ = s.Close()
		}
	}
}

// canned is a connection that reads what it was given, and then ends.
type canned struct {
	net.Conn
	*bytes.Reader
}

func (canned) Write(b []byte) (int, error)  { return len(b), nil }
func (c canned) Read(b []byte) (int, error) { return c.Reader.Read(b) }

// A store that hangs up after any number of bytes makes each question fail that it did not
// answer whole.
func TestStoreHangsUp(t *testing.T) {
	const value = "an address"
	whole := append([]byte{0}, appendText(nil, value)...)
	for said := range len(whole) + 1 {
		store := func() *torchStore { return &torchStore{canned{Reader: bytes.NewReader(whole[:said])}, validated} }
		if got, err := store().get(t.Context(), "k"); (err == nil) != (said == len(whole)) || err == nil && string(got) != value {
			t.Errorf("get after %d bytes: %q, %v", said, got, err)
		}
		if err := store().set(t.Context(), "k", nil); (err == nil) != (said > 0) {
			t.Errorf("set after %d bytes: %v", said, err)
		}
	}
	s := &torchStore{canned{Reader: bytes.NewReader([]byte{1})}, validated}
	if _, err := s.get(t.Context(), "k"); err == nil || err.Error() != "the store gave up waiting" {
		t.Error(err)
	}
}
