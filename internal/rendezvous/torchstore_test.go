package rendezvous

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os/exec"
	"runtime/debug"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/internal/launcher"
)

// fakeStore serves the store of torchrun's agent as a version of PyTorch does. It hangs up
// if it does not understand, as those do; the one of 2.1 skips four bytes instead.
type fakeStore struct {
	listener net.Listener
	dialect  dialect
	mu       sync.Mutex
	set      *sync.Cond
	values   map[string][]byte
	tasks    sync.WaitGroup
}

func newFakeStore(t *testing.T, d dialect) *fakeStore {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &fakeStore{listener: l, dialect: d, values: map[string][]byte{}}
	f.set = sync.NewCond(&f.mu)
	f.tasks.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			f.tasks.Go(func() {
				defer conn.Close()
				f.serve(bufio.NewReader(conn), conn)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		f.tasks.Wait()
	})
	return f
}

func (f *fakeStore) serve(r io.Reader, w io.Writer) {
	number := func(size int) uint64 {
		b := make([]byte, 8)
		if _, err := io.ReadFull(r, b[:size]); err != nil {
			return 1 << 62
		}
		return binary.LittleEndian.Uint64(b)
	}
	text := func() []byte {
		n := number(8)
		if n > 1<<20 {
			return nil
		}
		b := make([]byte, n)
		_, _ = io.ReadFull(r, b)
		return b
	}
	if f.dialect == validated && (number(1) != torchValidate || number(4) != torchMagic) {
		return
	}
	for {
		if f.dialect == everyQuery {
			switch number(4) {
			case torchMagic:
			case 1 << 62:
				return
			default:
				continue
			}
		}
		query := number(1)
		if f.dialect != validated {
			query++
		}
		if query == torchWait && number(8) != 1 {
			return
		}
		if query > torchDelete {
			return
		}
		var key []byte
		if query != torchNumKeys {
			if key = text(); key == nil {
				return
			}
		}
		f.mu.Lock()
		switch query {
		case torchSet:
			f.values[string(key)] = text()
			f.set.Broadcast()
		case torchWait:
			for f.values[string(key)] == nil {
				f.set.Wait()
			}
			_, _ = w.Write([]byte{0})
		case torchGet:
			_, _ = w.Write(appendText(nil, string(f.values[string(key)])))
		case torchNumKeys, torchDelete:
			_, _ = w.Write(make([]byte, 8))
		default:
			f.mu.Unlock()
			return
		}
		f.mu.Unlock()
	}
}

// agentPlaces returns ranks below an agent whose store listens at an address.
func agentPlaces(t *testing.T, address string, size int) (places []*launcher.Place) {
	t.Helper()
	host, port, _ := net.SplitHostPort(address)
	for rank := range size {
		p := &launcher.Place{Launcher: launcher.Torchrun, Rank: rank, Size: size, Host: "h", Leader: host, Job: "j", AgentStore: true}
		if _, err := fmt.Sscan(port, &p.Port); err != nil {
			t.Fatal(err)
		}
		places = append(places, p)
	}
	return places
}

// Ranks find each other through the agent's store, whatever its version.
func TestThroughAgent(t *testing.T) {
	for name, d := range map[string]dialect{"PyTorch 2.2": validated, "PyTorch 2.1": everyQuery, "PyTorch 2.0": bare} {
		t.Run(name, func(t *testing.T) {
			f := newFakeStore(t, d)
			places := agentPlaces(t, f.listener.Addr().String(), 3)
			// An earlier start has left an address where nobody listens.
			f.values["stowage/j/0"] = fmt.Appendf(nil, `{"token":"old","host":"h","port":%q}`, freePort(t))
			sessions := make([]*Session, len(places))
			var wg sync.WaitGroup
			for rank, p := range places {
				wg.Go(func() {
					var err error
					if sessions[rank], err = Join(t.Context(), p, Options{Timeout: 2 * time.Minute, Patience: time.Minute}); err != nil {
						t.Errorf("rank %d: %v", rank, err)
					}
				})
			}
			wg.Wait()
			if !t.Failed() {
				closeAll(t, sessions)
			}
		})
	}
}

// Values have as many bytes as a value may have, and no more.
func TestLargestValue(t *testing.T) {
	f := newFakeStore(t, validated)
	s, err := dialTorchStore(t.Context(), f.listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	f.values["most"], f.values["more"] = make([]byte, MaxValue), make([]byte, MaxValue+1)
	if b, err := s.get(t.Context(), "most"); err != nil || len(b) != MaxValue {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	if _, err := s.get(t.Context(), "more"); err == nil || !strings.Contains(err.Error(), "a value of 65537 bytes, more than 65536") {
		t.Error(err)
	}
}

// The client closes the connection of each dialect that the store does not speak. Nothing collects
// garbage meanwhile, which would close connections that are forgotten.
func TestOtherDialectsAreHungUp(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := make(chan error)
	var tasks sync.WaitGroup
	tasks.Go(func() {
		for range dialects {
			conn, err := l.Accept()
			if err != nil {
				closed <- err
				continue
			}
			tasks.Go(func() {
				defer conn.Close()
				_ = conn.(*net.TCPConn).CloseWrite() // the next dialect is tried
				_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
				_, err := io.Copy(io.Discard, conn)
				closed <- err
			})
		}
	})
	if _, err := dialTorchStore(t.Context(), l.Addr().String()); err == nil || !strings.Contains(err.Error(), "it speaks no protocol of PyTorch") {
		t.Error(err)
	}
	_ = l.Close() // whom it did not call does not come any more
	for range dialects {
		if err := <-closed; err != nil {
			t.Errorf("the client keeps a connection: %v", err)
		}
	}
	tasks.Wait()
}

// What is no store gets a sentence.
func TestNoStore(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.Close()
		}
	})
	_, err = Join(t.Context(), agentPlaces(t, l.Addr().String(), 2)[0], Options{})
	if err == nil || !strings.Contains(err.Error(), "set STOWAGE_PORT") {
		t.Errorf("got %v", err)
	}
	_ = l.Close()
	wg.Wait()
}

// The store of the PyTorch that is installed understands the client, and the other way
// round.
func TestRealStore(t *testing.T) {
	python := "python3"
	if exec.Command(python, "-c", "import torch").Run() != nil {
		python = "/usr/bin/python3" // where packages of the system are found
	}
	cmd := exec.Command(python, "-c", `
import datetime, sys, torch.distributed as d
s = d.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=datetime.timedelta(seconds=120))
print(s.port, flush=True)
print(s.get("from go").decode(), flush=True)
s.set("from python", "there")
sys.stdin.read()
`)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Skip("there is no python3")
	}
	out := bufio.NewScanner(pipe)
	defer func() {
		_ = in.Close()
		_ = cmd.Wait()
	}()
	if !out.Scan() {
		_ = cmd.Wait()
		t.Skip("there is no PyTorch: ", stderr.String())
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	store, err := dialTorchStore(ctx, "127.0.0.1:"+out.Text())
	if err != nil {
		t.Fatal(err)
	}
	defer store.close()
	t.Logf("dialect %d", store.dialect)
	// PyTorch's clients put a slash before each key.
	if err := store.set(ctx, "/from go", []byte("here")); err != nil {
		t.Fatal(err)
	}
	if !out.Scan() || out.Text() != "here" {
		t.Errorf("PyTorch got %q", out.Text())
	}
	if got, err := store.get(ctx, "/from python"); err != nil || string(got) != "there" {
		t.Errorf("got %q, %v", got, err)
	}
}
