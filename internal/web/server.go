// Package web is a small HTTP/1.1 server for the pages of a program. It reads no bodies,
// and knows neither TLS nor HTTP/2: package net/http, which does, takes a sixth of the time
// that a machine needs to build this program for the first time.
//
// A server holds few connections, because it shares the process with a run, which needs file
// descriptors for checkpoints and traces: a flood of connections must not take them.
package web

import (
	"bufio"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"time"
)

const (
	// A viewer may take ReadLimit to send its first request and WriteLimit to read a piece
	// of an answer. A connection without another request is closed after IdleLimit.
	ReadLimit, WriteLimit, IdleLimit = 10 * time.Second, 10 * time.Second, 30 * time.Second
	// A viewer whose request is not read to its end has lingerLimit to read the answer, and
	// may send mostUnread more: closing the connection at once could take the answer away.
	lingerLimit, mostUnread = 500 * time.Millisecond, 256 << 10
	// After a failure, the server accepts no connection for mostPause at most.
	leastPause, mostPause = 5 * time.Millisecond, time.Second
)

// Handler answers a request.
type Handler func(*Answer, *Request)

// Server answers the requests that come to a listener, and holds at most a given number of
// connections at once. If there is one more, it closes the one that has waited longest for a
// request. If all are being answered, it closes the new one.
//
// Life cycle of a connection: 1. waiting, 2. asking (a request is answered), 1. waiting
// again, or 3. gone.
type Server struct {
	listener net.Listener
	most     int
	handle   Handler
	served   chan struct{} // closed when nothing is accepted any more

	mu      sync.Mutex
	waiting []net.Conn // the longest wait first
	asking  map[net.Conn]bool
	closing bool
	quiet   chan struct{} // closed when closing and no request is answered
}

// Serve begins to answer the requests that come to l.
func Serve(l net.Listener, most int, handle Handler) *Server {
	s := &Server{listener: l, most: most, handle: handle, served: make(chan struct{}), asking: map[net.Conn]bool{}, quiet: make(chan struct{})}
	go s.accept()
	return s
}

// Close ends the server. Answers under way have some time.
func (s *Server) Close(limit time.Duration) {
	s.mu.Lock()
	s.closing = true
	idle := s.waiting
	s.waiting = nil
	s.settle()
	s.mu.Unlock()
	_ = s.listener.Close() // it was open
	<-s.served
	for _, c := range idle {
		_ = c.Close() // nothing is lost: it has no request
	}
	select {
	case <-s.quiet:
	case <-time.After(limit):
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.asking {
		_ = c.Close() // its viewer does not read
	}
}

// settle notes that no request is answered any more. The caller holds mu.
func (s *Server) settle() {
	if s.closing && len(s.asking) == 0 {
		select {
		case <-s.quiet:
		default:
			close(s.quiet)
		}
	}
}

// accept serves connections until the listener is closed.
func (s *Server) accept() {
	defer close(s.served)
	for pause := leastPause; ; {
		c, err := s.listener.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // the process has no descriptor left
			time.Sleep(pause)
			pause = min(2*pause, mostPause)
		case s.admit(c):
			pause = leastPause
			go s.serve(c)
		default:
			_ = c.Close() // its viewer may come again
		}
	}
}

// admit makes room for a connection, and reports whether it could.
func (s *Server) admit(c net.Conn) bool {
	s.mu.Lock()
	var oldest net.Conn
	full := s.closing || len(s.waiting)+len(s.asking) >= s.most
	if full && len(s.waiting) > 0 {
		oldest = s.waiting[0]
		s.waiting = slices.Delete(s.waiting, 0, 1)
		full = false
	}
	if !full {
		s.waiting = append(s.waiting, c)
	}
	s.mu.Unlock()
	if oldest != nil {
		_ = oldest.Close() // nothing is lost: it has no request
	}
	return !full
}

// ask notes that a connection has a request. It returns false if the connection was closed
// to make room.
func (s *Server) ask(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.waiting, c)
	if i >= 0 {
		s.waiting = slices.Delete(s.waiting, i, i+1)
		s.asking[c] = true
	}
	return i >= 0
}

// wait notes that a connection waits for another request. It returns false if the server
// ends.
func (s *Server) wait(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closing {
		delete(s.asking, c)
		s.waiting = append(s.waiting, c)
	}
	return !s.closing
}

// leave closes a connection.
func (s *Server) leave(c net.Conn) {
	_ = c.Close() // it may be closed already
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.asking, c)
	s.waiting = slices.DeleteFunc(s.waiting, func(w net.Conn) bool { return w == c })
	s.settle()
}

// serve answers the requests of a connection.
func (s *Server) serve(c net.Conn) {
	defer s.leave(c)
	defer func() { _ = recover() }() // a run does not die of an answer
	in := bufio.NewReaderSize(c, mostHead)
	for limit := ReadLimit; ; limit = IdleLimit {
		_ = c.SetReadDeadline(time.Now().Add(limit)) // all our connections have deadlines
		r, err := readRequest(in)
		var refused statusError
		if err != nil && !errors.As(err, &refused) || !s.ask(c) {
			return // no request came, or the connection was closed to make room
		}
		if err != nil {
			r = &Request{unread: true}
		}
		a := &Answer{conn: c, in: in, request: r}
		if err != nil {
			a.Refuse(int(refused), err.Error())
		} else {
			s.handle(a, r)
		}
		if r.unread {
			linger(c, in)
		}
		if !a.sent || !r.keep || !s.wait(c) {
			return
		}
	}
}

// linger lets a viewer read its answer before its connection is closed.
func linger(c net.Conn, in io.Reader) {
	if half, ok := c.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		_ = c.SetReadDeadline(time.Now().Add(lingerLimit))
		_, _ = io.CopyN(io.Discard, in, mostUnread) // whatever comes
	}
}
