package live

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

func TestConnections(t *testing.T) {
	for files, want := range map[uint64]int{0: 128, 8: 4, 64: 16, 256: 64, 512: 128, 1 << 20: 128, 1<<64 - 1: 128} {
		if got := connections(files); got != want {
			t.Errorf("%d files: %d connections", files, got)
		}
	}
}

// few is what the process in TestFlood may open, and what its run needs.
const few, needed = 256, 150

// flooded serves a run in a process with few files. It opens what its run needs whenever
// it is told to, and says whether it could.
func flooded() error {
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: few, Max: few}); err != nil {
		return err
	}
	s, err := Listen(":0", "")
	if err != nil {
		return err
	}
	s.farewell = 0
	defer s.Close()
	fmt.Println(s.URL())
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		for i := range needed {
			f, err := os.Create(filepath.Join(in.Text(), fmt.Sprint(i)))
			if err != nil {
				return err
			}
			defer f.Close()
		}
		fmt.Println("saved")
	}
	return nil
}

// 400 connections that ask for nothing do not take the files of a run that may open 256,
// and other viewers still get an answer.
func TestFlood(t *testing.T) {
	if os.Getenv("STOWAGE_FLOODED") != "" {
		if err := flooded(); err != nil {
			fmt.Println(err)
		}
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestFlood$")
	cmd.Env = append(os.Environ(), "STOWAGE_FLOODED=1")
	cmd.Stderr = os.Stderr
	to, err1 := cmd.StdinPipe()
	from, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	defer to.Close()
	said := bufio.NewScanner(from)
	said.Scan()
	url := said.Text()
	host := strings.TrimSuffix(strings.TrimPrefix(url, "http://"), "/")
	for range 400 {
		c, err := net.Dial("tcp", host)
		if err != nil {
			t.Fatalf("%s: %v", host, err)
		}
		defer c.Close()
	}
	if status, _, _ := get(t, &http.Client{}, url+"metrics"); status != http.StatusOK {
		t.Errorf("a viewer got %d", status)
	}
	if _, err := fmt.Fprintln(to, t.TempDir()); err != nil {
		t.Fatal(err)
	}
	if said.Scan(); said.Text() != "saved" {
		t.Errorf("the run said %q", said.Text())
	}
}

// ends are the two ends of connections in memory that arrive at a listener.
type ends struct {
	arriving     chan net.Conn
	net.Listener // nil: only the methods below are called
}

func (e ends) Accept() (net.Conn, error) {
	if c, ok := <-e.arriving; ok {
		return c, nil
	}
	return nil, net.ErrClosed
}

func (e ends) Close() error { return nil }

func (e ends) dial() net.Conn {
	here, there := net.Pipe()
	e.arriving <- there
	return here
}

// closed reports whether the other end of a connection was closed.
func closed(c net.Conn) bool {
	_ = c.SetReadDeadline(time.Now().Add(time.Nanosecond))
	_, err := c.Read(make([]byte, 1))
	return errors.Is(err, io.EOF)
}

// The connection that waited longest makes room, and one that is being answered does not.
func TestLimiter(t *testing.T) {
	e := ends{arriving: make(chan net.Conn, 10)}
	l := newLimiter(e, 3)
	var here, there []net.Conn
	arrive := func() {
		here = append(here, e.dial())
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		l.state(c, http.StateNew)
		there = append(there, c)
	}
	want := func(when string, gone ...int) {
		t.Helper()
		for i, c := range here {
			if is := closed(c); is != strings.Contains(fmt.Sprint(gone), fmt.Sprint(i)) {
				t.Errorf("%s: connection %d is closed: %v", when, i, is)
			}
		}
	}
	arrive()
	arrive()
	arrive()
	want("three of three")
	l.state(there[0], http.StateActive)
	arrive()
	want("the first is answered", 1)
	l.state(there[1], http.StateClosed)
	l.state(there[0], http.StateIdle)
	arrive()
	want("the first waits again, behind others", 1, 2)
	for _, i := range []int{0, 3, 4} {
		l.state(there[i], http.StateActive)
	}
	late := e.dial()
	close(e.arriving)
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) || !closed(late) {
		t.Errorf("one more than can be answered: %v", err)
	}
	want("all are answered", 1, 2)
	for _, i := range []int{0, 3, 4} {
		l.state(there[i], http.StateClosed)
	}
	if len(l.waiting)+len(l.asking) != 0 {
		t.Errorf("%d and %d are left", len(l.waiting), len(l.asking))
	}
}

// A connection is closed if no request comes, or half of one. A viewer that listens for
// events stays.
func TestReadLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Server{history: newHistory(), metrics: newMetrics(), changed: make(chan struct{}), local: true}
		e := ends{arriving: make(chan net.Conn, 10)}
		l := newLimiter(e, 10)
		s.configure(l)
		go func() { _ = s.http.Serve(l) }()
		silent, half, listens := e.dial(), e.dial(), e.dial()
		go func() { fmt.Fprint(half, "GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx") }()
		go func() { fmt.Fprint(listens, "GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n") }()
		heard := make(chan int, 1)
		go func() {
			n, _ := io.Copy(io.Discard, listens)
			heard <- int(n)
		}()
		answered := make(chan bool)
		go func() {
			_, _ = io.Copy(io.Discard, half)
			answered <- true
		}()
		began := time.Now()
		_ = silent.SetReadDeadline(began.Add(time.Hour))
		_ = half.SetReadDeadline(began.Add(time.Hour))
		if _, err := silent.Read(make([]byte, 1)); err != io.EOF || time.Since(began) > readLimit {
			t.Errorf("a silent connection ended after %v: %v", time.Since(began), err)
		}
		if <-answered; time.Since(began) > readLimit+writeLimit+idleLimit {
			t.Errorf("half a request ended after %v", time.Since(began))
		}
		time.Sleep(time.Hour)
		select {
		case n := <-heard:
			t.Errorf("the stream ended after %d bytes", n)
		default:
		}
		_ = listens.Close()
		close(e.arriving)
		_ = s.http.Close()
		synctest.Wait()
	})
}
