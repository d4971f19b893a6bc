// This file owns the server: its life cycle, and which requests it answers.

package live

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/stowage-dev/stowage/internal/eta"
	"github.com/stowage-dev/stowage/internal/web"
	"github.com/stowage-dev/stowage/observe/report/page"
)

// Viewers that listen have the time farewell to fetch the last report, plus twice the
// time that the report takes to be made, which counts as mostMade at most. A page fetches
// it at once; on a busy machine that is seconds. Answers under way then have lastAnswers.
const farewell, mostMade, lastAnswers = 10 * time.Second, 9 * time.Second, 2 * time.Second

// Server serves a run over HTTP: a page at /, its data at /report.json and /events, and
// metrics for Prometheus at /metrics.
//
//  1. Listen opens the address and begins to serve.
//  2. Begin describes the run.
//  3. Step notes a step; call it after each one.
//  4. Close lets viewers fetch the last report and ends the server.
//
// There is no password. A server on a loopback address answers only requests for
// localhost or a loopback address. Another one answers requests for any address and for
// the names of this machine. Both hold so few connections that the run keeps the open
// files that it needs.
type Server struct {
	version  string
	listener net.Listener
	local    bool     // whether it listens on loopback
	names    []string // host names that a public server answers to
	web      *web.Server
	page     []byte
	metrics  *metrics
	farewell time.Duration

	mu      sync.Mutex
	source  Source // nil if reports come from memory alone
	history *history
	pace    *eta.Pace     // nil before Begin
	steps   int           // the number of steps so far: the version of the report
	changed chan struct{} // closed and replaced when steps or done change
	done    bool
	viewers int           // connected to /events
	owed    int           // viewers that have not fetched the last report
	paid    chan struct{} // closed when owed is zero

	making sync.Mutex // held while a report is made; taken before mu
	made   made
}

// Listen returns a server that listens on an address: a host and a port, or a port such
// as ":8080", which stands for loopback. Port 0 takes any free port. Version is the
// version of the program, for the page and the metrics.
func Listen(address, version string) (*Server, error) {
	host, port, err := parseAddress(address)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(int(port))))
	if err != nil {
		return nil, listenError(err, host, port)
	}
	var text bytes.Buffer
	if err := page.Live(&text); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	s := &Server{
		names: machineNames(host, os.Hostname, os.ReadFile), version: version, listener: l, local: loopback(hostOf(l.Addr().String())), page: text.Bytes(),
		farewell: farewell, metrics: newMetrics(), history: newHistory(), changed: make(chan struct{}), paid: make(chan struct{}),
	}
	s.web = web.Serve(l, connections(openFiles()), s.handle)
	return s, nil
}

// listenError says why nothing listens on a port of a host.
func listenError(err error, host string, port uint16) error {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("port %d of %s is in use; give another, or :0 for any free port", port, host)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("this user may not listen on port %d; give one above 1023", port)
	case errors.As(err, new(*net.DNSError)):
		return fmt.Errorf("the host %s is not known; give an address of this machine, or :%d for this machine alone", host, port)
	}
	return fmt.Errorf("cannot listen on %s: %w; give an address of this machine, or :%d for this machine alone", net.JoinHostPort(host, strconv.Itoa(int(port))), cause(err), port)
}

// cause returns an error of the network without its address, which the sentence around
// it has.
func cause(err error) error {
	var op *net.OpError
	if errors.As(err, &op) {
		err = op.Err
	}
	var call *os.SyscallError
	if errors.As(err, &call) {
		return call.Err
	}
	return err
}

// URL returns the address of the page.
func (s *Server) URL() string {
	addr := s.listener.Addr().(*net.TCPAddr)
	if addr.IP.IsUnspecified() {
		return fmt.Sprintf("http://localhost:%d/", addr.Port)
	}
	return "http://" + addr.String() + "/"
}

// Public reports whether other machines can reach the page.
func (s *Server) Public() bool { return !s.local }

// Begin describes the run. Call it once, before the first step.
func (s *Server) Begin(r Run) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.history.run = r
	s.pace = eta.NewPace(r.Policies, r.Steps, r.From)
	s.metrics.begin(r, s.version)
}

// SetSource makes the server take its reports from source, which knows more than the
// steps alone. If source fails, the server falls back to the steps.
func (s *Server) SetSource(source Source) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.source = source
}

// Step notes a step and tells viewers that there is a new report.
func (s *Server) Step(step Step) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.metrics.observe(step)
	s.history.add(step)
	s.pace.Step(step.Policy, step.Number, time.Now())
	s.steps++
	s.change()
}

// change wakes all viewers. The caller holds mu.
func (s *Server) change() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Close tells viewers that the run is over, gives them a moment to fetch the last
// report, and ends the server. It takes 30 seconds at most.
func (s *Server) Close() {
	s.mu.Lock()
	s.done, s.owed = true, s.viewers
	waits := s.owed > 0
	limit := s.farewell + 2*min(s.made.took, mostMade)
	s.change()
	s.mu.Unlock()
	if waits {
		select {
		case <-s.paid:
		case <-time.After(limit):
		}
	}
	s.web.Close(min(s.farewell, lastAnswers))
}

// handle answers GET and HEAD for four paths.
func (s *Server) handle(a *web.Answer, r *web.Request) {
	paths := map[string]web.Handler{
		"/": s.servePage, "/report.json": s.serveReport, "/events": s.serveEvents, "/metrics": s.serveMetrics,
	}
	// The page itself allows its scripts by their hashes. This adds the rules that only a
	// header can set.
	a.Set("Content-Security-Policy", "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
	a.Set("X-Content-Type-Options", "nosniff")
	a.Set("X-Frame-Options", "DENY")
	a.Set("Referrer-Policy", "no-referrer")
	a.Set("Cross-Origin-Resource-Policy", "same-origin")
	a.Set("Cross-Origin-Opener-Policy", "same-origin")
	a.Set("Cache-Control", "no-store")
	serve := paths[r.Path]
	switch {
	// The page of another site whose name resolves to this machine asks with that name.
	case s.local && !loopback(hostOf(r.Host)):
		a.Refuse(421, "this run is served to its own machine only; use the host name localhost")
	case !s.local && !answersTo(s.names, hostOf(r.Host)):
		a.Refuse(421, "this machine does not know that name for itself; use its address in place of a host name")
	case serve == nil:
		a.Refuse(404, "not found")
	case r.Method != "GET" && r.Method != "HEAD":
		a.Set("Allow", "GET, HEAD")
		a.Refuse(405, "only GET and HEAD are allowed")
	default:
		serve(a, r)
	}
}
