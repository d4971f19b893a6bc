// This file owns the limit of connections. Viewers share the process with a run, which
// needs file descriptors for checkpoints and traces: a flood of connections must not take
// them.

package live

import (
	"net"
	"net/http"
	"slices"
	"sync"
)

// A server holds mostConnections, but no more than a quarter of the descriptors that the
// process may open, and fewConnections at least.
const mostConnections, fewConnections = 128, 4

// connections returns the limit of connections for a process that may open some files; 0
// stands for no limit.
func connections(files uint64) int {
	if files == 0 || files/4 > mostConnections {
		return mostConnections
	}
	return max(int(files/4), fewConnections)
}

// limiter is a listener that holds most connections at once. If there is one more, it
// closes the one that has waited longest for a request. If all are being answered, it
// closes the new one.
//
// Life cycle of a connection: 1. waiting, 2. asking (a request is answered), 1. waiting
// again, or 3. gone. The server announces each change to the method state.
type limiter struct {
	net.Listener
	most int

	mu      sync.Mutex
	waiting []net.Conn // the longest wait first
	asking  map[net.Conn]bool
}

func newLimiter(l net.Listener, most int) *limiter {
	return &limiter{Listener: l, most: most, asking: map[net.Conn]bool{}}
}

// Accept waits for a connection within the limit.
func (l *limiter) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.admit(c) {
			return c, nil
		}
		_ = c.Close() // its viewer may come again
	}
}

// admit makes room for a connection, and reports whether it could.
func (l *limiter) admit(c net.Conn) bool {
	l.mu.Lock()
	var oldest net.Conn
	full := len(l.waiting)+len(l.asking) >= l.most
	if full && len(l.waiting) > 0 {
		oldest = l.waiting[0]
		l.waiting = slices.Delete(l.waiting, 0, 1)
		full = false
	}
	if !full {
		l.waiting = append(l.waiting, c)
	}
	l.mu.Unlock()
	if oldest != nil {
		_ = oldest.Close() // nothing is lost: it has no request
	}
	return !full
}

// state follows a connection. It is the ConnState of an http.Server.
func (l *limiter) state(c net.Conn, s http.ConnState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	known := l.asking[c]
	delete(l.asking, c)
	if i := slices.Index(l.waiting, c); i >= 0 {
		l.waiting, known = slices.Delete(l.waiting, i, i+1), true
	}
	switch {
	case !known: // it was closed to make room
	case s == http.StateActive:
		l.asking[c] = true
	case s == http.StateNew || s == http.StateIdle:
		l.waiting = append(l.waiting, c)
	}
}
