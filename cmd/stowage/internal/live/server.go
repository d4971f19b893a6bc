// This file owns the server: its life, who may ask, and for what.

package live

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/stowage-dev/stowage/report/page"
)

const (
	// writeLimit is how long an answer may take to be read.
	writeLimit = 10 * time.Second
	// farewell is how long pages have to fetch the last figures after the end, beyond
	// twice the time that these take to be made; mostFarewell is the most of both.
	farewell, mostFarewell = 2 * time.Second, 20 * time.Second
)

// Server serves a run. Its life: Listen, Begin, Step as often as there are steps, Close.
type Server struct {
	version  string
	listener net.Listener
	local    bool // loopback
	http     *http.Server
	served   chan struct{} // closed when http has returned
	page     []byte
	metrics  *metrics
	farewell time.Duration

	mu      sync.Mutex
	source  Source // nil is memory alone
	history *history
	steps   int           // that were told: the version of the figures
	changed chan struct{} // closed and replaced when steps or done change
	done    bool
	viewers int           // pages that listen
	owed    int           // pages that have not fetched the last figures
	paid    chan struct{} // closed when owed is zero

	making sync.Mutex // held while a report is made; taken before mu
	made   made
}

// Listen begins to serve. Version is the program's.
func Listen(address, version string) (*Server, error) {
	host, port, err := parseAddress(address)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(int(port))))
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("port %d of %s is in use; give another, or :0 for any that is free", port, host)
	case errors.Is(err, syscall.EACCES):
		return nil, fmt.Errorf("port %d may not be used by this user; give one above 1023", port)
	case err != nil:
		return nil, fmt.Errorf("%s cannot be listened on: %w", net.JoinHostPort(host, strconv.Itoa(int(port))), cause(err))
	}
	var text bytes.Buffer
	if err := page.Live(&text); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	s := &Server{
		version: version, listener: l, local: loopback(hostOf(l.Addr().String())), served: make(chan struct{}), page: text.Bytes(),
		farewell: farewell, metrics: newMetrics(), history: newHistory(), changed: make(chan struct{}), paid: make(chan struct{}),
	}
	s.http = &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: writeLimit, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
		ErrorLog: log.New(io.Discard, "", 0), // a viewer's trouble is none of the run's
	}
	go func() {
		defer close(s.served)
		_ = s.http.Serve(l) // it ends with Close, or a fault of the network that no run should die of
	}()
	return s, nil
}

// cause is an error of the network without the address, which the sentence has already.
func cause(err error) error {
	var op *net.OpError
	if errors.As(err, &op) {
		return op.Err
	}
	return err
}

// URL is where the page is.
func (s *Server) URL() string {
	addr := s.listener.Addr().(*net.TCPAddr)
	if addr.IP.IsUnspecified() {
		return fmt.Sprintf("http://localhost:%d/", addr.Port)
	}
	return "http://" + addr.String() + "/"
}

// Public tells whether others than this machine can reach the page.
func (s *Server) Public() bool { return !s.local }

// Begin says what will be trained.
func (s *Server) Begin(r Run) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.history.run = r
	s.metrics.begin(r, s.version)
}

// From has reports made by a source instead of from memory alone.
func (s *Server) From(source Source) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.source = source
}

// Step tells viewers of a step.
func (s *Server) Step(step Step) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.metrics.observe(step)
	s.history.add(step)
	s.steps++
	s.change()
}

// change wakes all viewers; the lock is held.
func (s *Server) change() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Close tells viewers that the run is over, gives them a moment to fetch the last
// figures, and ends the server.
func (s *Server) Close() {
	s.mu.Lock()
	s.done, s.owed = true, s.viewers
	waits := s.owed > 0
	limit := min(s.farewell+2*s.made.took, mostFarewell)
	s.change()
	s.mu.Unlock()
	if waits {
		select {
		case <-s.paid:
		case <-time.After(limit):
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.farewell)
	defer cancel()
	if s.http.Shutdown(ctx) != nil {
		_ = s.http.Close() // somebody does not read
	}
	<-s.served
}

// handler answers GET and HEAD for four paths.
func (s *Server) handler() http.Handler {
	paths := map[string]http.HandlerFunc{
		"/": s.servePage, "/report.json": s.serveReport, "/events": s.serveEvents,
		"/metrics": promhttp.HandlerFor(s.metrics.registry, promhttp.HandlerOpts{DisableCompression: true}).ServeHTTP,
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		// The page allows its own scripts by their sums; this adds what only a header can.
		h.Set("Content-Security-Policy", "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		extend(w)
		serve := paths[r.URL.Path]
		switch {
		case s.local && !loopback(hostOf(r.Host)):
			// A page of somebody else's whose name was made to lead here.
			http.Error(w, "this run is served to its own machine; ask for it as localhost", http.StatusMisdirectedRequest)
		case serve == nil:
			http.Error(w, "there is nothing here", http.StatusNotFound)
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			h.Set("Allow", "GET, HEAD")
			http.Error(w, "this can only be read", http.StatusMethodNotAllowed)
		default:
			serve(w, r)
		}
	})
}
