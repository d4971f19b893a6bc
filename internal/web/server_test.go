package web

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// ends are the two ends of connections in memory that arrive at a listener.
type ends struct {
	arriving     chan net.Conn
	net.Listener // nil: only the methods below are called
}

func (e ends) Accept() (net.Conn, error) {
	switch c, ok := <-e.arriving; {
	case !ok:
		return nil, net.ErrClosed
	case c == nil:
		return nil, syscall.EMFILE
	default:
		return c, nil
	}
}

func (e ends) Close() error {
	close(e.arriving)
	return nil
}

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

const ask = "GET / HTTP/1.1\r\nHost: x\r\n\r\n"

// reply sends a request and returns the status and the body of the answer.
func reply(t *testing.T, c net.Conn, request string) (int, string) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	go func() { _, _ = io.WriteString(c, request) }()
	r, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(body)
}

// The connection that waited longest makes room, and one that is being answered does not.
func TestLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := ends{arriving: make(chan net.Conn, 10)}
		answer := make(chan bool)
		s := Serve(e, 3, func(a *Answer, _ *Request) {
			<-answer
			a.Refuse(404, "no")
		})
		var here []net.Conn
		arrive := func() {
			here = append(here, e.dial())
			synctest.Wait()
		}
		request := func(i int) {
			_ = here[i].SetDeadline(time.Now().Add(time.Minute))
			if _, err := io.WriteString(here[i], ask); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		want := func(when string, gone ...int) {
			t.Helper()
			synctest.Wait()
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
		request(0)
		arrive()
		want("the first is answered", 1)
		answer <- true
		if status, _ := reply(t, here[0], ""); status != 404 {
			t.Errorf("the answer is %d", status)
		}
		arrive()
		want("the first waits again, behind others", 1, 2)
		for _, i := range []int{0, 3, 4} {
			request(i)
		}
		arrive()
		want("all are answered", 1, 2, 5)
		close(answer)
		for _, c := range here {
			_ = c.Close()
		}
		synctest.Wait()
		if len(s.waiting)+len(s.asking) != 0 {
			t.Errorf("%d and %d are left", len(s.waiting), len(s.asking))
		}
		s.Close(0)
	})
}

// A connection is closed if no request comes, or no other one. A viewer of a stream stays.
func TestReadLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := ends{arriving: make(chan net.Conn, 10)}
		left := make(chan struct{})
		s := Serve(e, 10, func(a *Answer, r *Request) {
			if r.Path == "/" {
				_ = a.Send(200, "text/plain", []byte("here"))
				return
			}
			if err := a.Stream("text/plain"); err != nil {
				t.Error(err)
			}
			<-a.Gone()
			close(left)
		})
		ends := func(name string, within time.Duration, c net.Conn) {
			t.Helper()
			began := time.Now()
			_ = c.SetReadDeadline(began.Add(time.Hour))
			if _, err := io.Copy(io.Discard, c); err != nil || time.Since(began) > within {
				t.Errorf("%s ended after %v: %v", name, time.Since(began), err)
			}
		}
		ends("a silent connection", ReadLimit, e.dial())
		half := e.dial()
		go func() { _, _ = io.WriteString(half, ask[:9]) }()
		ends("half a request", ReadLimit, half)
		idle := e.dial()
		if status, body := reply(t, idle, ask); status != 200 || body != "here" {
			t.Errorf("%d, %q", status, body)
		}
		ends("a connection without another request", IdleLimit, idle)
		listens := e.dial()
		go func() { _, _ = io.WriteString(listens, "GET /events HTTP/1.1\r\nHost: x\r\n\r\n") }()
		go func() { _, _ = io.Copy(io.Discard, listens) }()
		time.Sleep(time.Hour)
		select {
		case <-left:
			t.Error("the stream has ended")
		default:
		}
		_ = listens.Close()
		<-left
		synctest.Wait()
		if len(s.waiting)+len(s.asking) != 0 { // they would take the place of others
			t.Errorf("%d and %d are left", len(s.waiting), len(s.asking))
		}
		s.Close(0)
	})
}

// A viewer that does not read its answer is dropped, and so is what it asks for behind it.
func TestWriteLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := ends{arriving: make(chan net.Conn, 1)}
		answers := 0
		s := Serve(e, 1, func(a *Answer, _ *Request) {
			answers++
			if a.Send(200, "text/plain", nil) == nil {
				t.Error("an answer was sent to nobody")
			}
		})
		c := e.dial()
		began := time.Now()
		if _, err := io.WriteString(c, ask+ask); err != nil {
			t.Fatal(err)
		}
		time.Sleep(WriteLimit + time.Second)
		if !closed(c) || answers != 1 {
			t.Errorf("after %v there are %d answers", time.Since(began), answers)
		}
		s.Close(0)
	})
}

// Requests that follow one another are answered in order. HEAD has no body.
func TestAnswers(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := Serve(l, 4, func(a *Answer, r *Request) {
		a.Set("X-Path", r.Path)
		switch r.Path {
		case "/panic":
			panic("a fault")
		case "/nothing":
		case "/empty":
			_ = a.Send(200, "text/plain", nil)
		default:
			_ = a.Send(200, "text/plain", []byte(r.Method+" "+r.Path))
		}
	})
	defer s.Close(time.Second)
	dial := func() (net.Conn, *bufio.Reader) {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		return c, bufio.NewReader(c)
	}
	c, in := dial()
	defer c.Close()
	for _, path := range []string{"a", "b", "c"} {
		fmt.Fprintf(c, "GET /%s HTTP/1.1\r\nHost: x\r\n\r\nHEAD /%s HTTP/1.1\r\nHost: x\r\n\r\n", path, path)
	}
	for _, path := range []string{"/a", "/b", "/c"} {
		for _, method := range []string{"GET", "HEAD"} {
			r, err := http.ReadResponse(in, &http.Request{Method: method})
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(r.Body)
			want := map[string]string{"GET": "GET " + path}[method]
			if err != nil || string(body) != want || r.Header.Get("X-Path") != path || r.ContentLength != int64(len(method+" "+path)) || r.Header.Get("Date") == "" || r.Close {
				t.Errorf("%s %s: %q, %+v, %v", method, path, body, r.Header, err)
			}
		}
	}
	// An answer to HEAD without a body may be that of a stream, which has no length.
	fmt.Fprint(c, "HEAD /empty HTTP/1.1\r\nHost: x\r\n\r\nGET /empty HTTP/1.1\r\nHost: x\r\n\r\n")
	for _, method := range []string{"HEAD", "GET"} {
		r, err := http.ReadResponse(in, &http.Request{Method: method})
		if want := map[string]string{"GET": "0"}[method]; err != nil || r.Header.Get("Content-Length") != want {
			t.Errorf("%s without a body: %+v, %v", method, r, err)
		}
	}
	for _, path := range []string{"/panic", "/nothing"} {
		c, in := dial()
		fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path)
		if text, err := io.ReadAll(in); err != nil || len(text) > 0 {
			t.Errorf("%s: %q, %v", path, text, err)
		}
		c.Close()
	}
	// What a viewer sends and nobody reads does not take its answer away.
	for request, want := range map[string]int{
		"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + strings.Repeat("x", 100000):      200,
		"GET /x HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 4*mostHead) + "\r\n\r\n":                 431,
		"GET /x HTTP/1.1\r\nHost: x\r\nHost: y\r\nContent-Length: 9\r\n\r\n" + strings.Repeat("x", 100000): 400,
	} {
		c, in := dial()
		go func() { _, _ = io.WriteString(c, request) }()
		r, err := http.ReadResponse(in, nil)
		if err != nil || r.StatusCode != want || !r.Close {
			t.Errorf("%.40q: %v, %v, want %d", request, r, err, want)
		}
		c.Close()
	}
}

// A server that cannot accept for a while goes on. Its end waits for answers, but not for
// ever.
func TestEnd(t *testing.T) {
	for _, slow := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			e := ends{arriving: make(chan net.Conn, 10)}
			gate := make(chan bool)
			s := Serve(e, 10, func(a *Answer, _ *Request) {
				<-gate
				a.Refuse(404, "no")
			})
			for range 20 {
				e.arriving <- nil
			}
			idle, c := e.dial(), e.dial()
			_ = c.SetDeadline(time.Now().Add(time.Hour))
			if _, err := io.WriteString(c, ask); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if !slow {
				time.AfterFunc(time.Second, func() { close(gate) })
				go func() { _, _ = io.Copy(io.Discard, c) }()
			}
			began := time.Now()
			s.Close(time.Minute)
			if want := map[bool]time.Duration{false: time.Second, true: time.Minute}[slow]; time.Since(began) != want {
				t.Errorf("the end took %v, want %v", time.Since(began), want)
			}
			if synctest.Wait(); !closed(idle) {
				t.Error("a connection is open behind the end")
			}
			if slow {
				close(gate)
			}
		})
	}
}

// A server without a connection, or whose connections have no request, ends at once.
func TestEndOfAnIdleServer(t *testing.T) {
	for idle := range 2 {
		synctest.Test(t, func(t *testing.T) {
			e := ends{arriving: make(chan net.Conn, 1)}
			s := Serve(e, 1, func(*Answer, *Request) {})
			for range idle {
				c := e.dial()
				defer c.Close()
			}
			synctest.Wait()
			began := time.Now()
			if s.Close(time.Minute); time.Since(began) > 0 {
				t.Errorf("with %d connections the end took %v", idle, time.Since(began))
			}
		})
	}
}

// A stream reads what its viewer sends behind the request, so that the end of the stream
// must not read it as well.
func TestStreamReadsAlone(t *testing.T) {
	here, there := net.Pipe()
	defer here.Close()
	r, _ := read("GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
	a := &Answer{conn: there, in: there, request: r}
	go func() { _, _ = io.Copy(io.Discard, here) }()
	if err := a.Stream("text/plain"); err != nil || r.unread || r.keep {
		t.Errorf("%v, %+v", err, r)
	}
	_ = there.Close()
	<-a.Gone()
}

// A viewer that is slow gets the whole of a long answer.
func TestSlowViewers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		here, there := net.Pipe()
		body := bytes.Repeat([]byte("page"), pieceSize)
		go func() {
			a := &Answer{conn: there, request: &Request{Method: "GET"}}
			if err := a.Send(200, "text/html", body); err != nil {
				t.Error(err)
			}
			_ = there.Close()
		}()
		var got []byte
		buf := make([]byte, pieceSize)
		for {
			n, err := here.Read(buf)
			got = append(got, buf[:n]...)
			if err != nil {
				break
			}
			time.Sleep(WriteLimit - time.Second)
		}
		if !bytes.HasSuffix(got, body) {
			t.Errorf("%d bytes of %d came", len(got), len(body))
		}
	})
}

// A stream has nothing to hear, so it ends if its viewer sends without end.
func TestStreamEndsForTalkers(t *testing.T) {
	here, there := net.Pipe()
	defer there.Close()
	a := &Answer{conn: there, in: there, request: &Request{Method: "GET"}}
	go func() { _, _ = io.Copy(io.Discard, here) }()
	if err := a.Stream("text/plain"); err != nil {
		t.Fatal(err)
	}
	_ = here.SetWriteDeadline(time.Now().Add(time.Minute))
	if _, err := here.Write(make([]byte, mostUnread)); err != nil {
		t.Fatal(err)
	}
	select {
	case <-a.Gone():
	case <-time.After(time.Minute):
		t.Error("the stream goes on")
	}
	_ = here.Close()
}
