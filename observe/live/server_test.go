package live

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/internal/eta"
	"github.com/stowage-dev/stowage/internal/web"
	"github.com/stowage-dev/stowage/observe/report"
)

// The sentence about an unknown host does not name the servers that were asked.
func TestUnknownHost(t *testing.T) {
	err := listenError(&net.OpError{Op: "listen", Err: &net.DNSError{Err: "no such host", Name: "host.invalid", Server: "10.0.0.1:53"}}, "host.invalid", 8080)
	if want := "the host host.invalid is not known; give an address of this machine, or :8080 for this machine alone"; err.Error() != want {
		t.Errorf("it says %q, want %q", err, want)
	}
}

func TestParseAddress(t *testing.T) {
	for text, want := range map[string]string{
		"8080": "127.0.0.1 8080", ":8080": "127.0.0.1 8080", ":0": "127.0.0.1 0", "localhost:80": "localhost 80", "0.0.0.0:8080": "0.0.0.0 8080", "[::]:1": ":: 1",
		"": "", ":": "", "host": "", "host:": "", ":65536": "", ":-1": "", "1:2:3": "", "::1": "", ":http": "", "http://localhost:80": "",
	} {
		host, port, err := parseAddress(text)
		if got := fmt.Sprint(host, " ", port); err == nil && got != want || (err != nil) != (want == "") {
			t.Errorf("%q: %s, %v, want %q", text, got, err, want)
		}
	}
}

func FuzzParseAddress(f *testing.F) {
	for _, seed := range []string{":8080", "8080", "[::1]:0", "0.0.0.0:1", "a:b:c"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		host, port, err := parseAddress(text)
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %q is not one sentence", text, err)
		}
		if err == nil && host == "" {
			t.Errorf("%q: port %d of every address", text, port)
		}
	})
}

func TestLoopback(t *testing.T) {
	for host, want := range map[string]bool{
		"localhost": true, "LOCALHOST": true, "127.0.0.1": true, "127.1.2.3": true, "::1": true, "[::1]": true, "::ffff:127.0.0.1": true,
		"": false, "0.0.0.0": false, "10.0.0.1": false, "localhost.example.org": false, "127.0.0.1.example.org": false, "example.org": false,
	} {
		if loopback(host) != want {
			t.Errorf("%q: %v", host, !want)
		}
	}
}

// served returns a server of a run with two policies, and a client.
func served(t *testing.T) (*Server, *http.Client) {
	t.Helper()
	s, err := Listen(":0", "v1.2.3")
	if err != nil {
		t.Fatal(err)
	}
	s.Begin(Run{Model: "tiny", Layout: "one rank", Policies: []string{"none", "stash"}, Steps: 100})
	c := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(c.CloseIdleConnections)
	return s, c
}

func get(t *testing.T, c *http.Client, url string) (status int, body string, h http.Header) {
	t.Helper()
	r, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(text), r.Header
}

// SPEC S6.5
func TestServerServesItsOwnAlone(t *testing.T) {
	s, c := served(t)
	defer s.Close()
	if s.Public() || !strings.HasPrefix(s.URL(), "http://127.0.0.1:") {
		t.Errorf("without an address it is at %s", s.URL())
	}
	for path, want := range map[string]string{"": "text/html", "report.json": "application/json", "metrics": "text/plain"} {
		status, body, h := get(t, c, s.URL()+path)
		if status != http.StatusOK || body == "" || !strings.HasPrefix(h.Get("Content-Type"), want) {
			t.Errorf("/%s: %d, %s", path, status, h.Get("Content-Type"))
		}
		for name, want := range map[string]string{
			"Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
			"X-Content-Type-Options":  "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin", "Cache-Control": "no-store",
		} {
			if got := h.Get(name); got != want {
				t.Errorf("/%s has the %s %q, want %q", path, name, got, want)
			}
		}
		if h.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("/%s may be read by other pages", path)
		}
	}
	for _, path := range []string{"index.html", "report.html", "../server.go", "..%2f..%2fetc/passwd", "metrics/", "debug/pprof/", "favicon.ico", "events/x"} {
		if status, _, _ := get(t, c, s.URL()+path); status != http.StatusNotFound {
			t.Errorf("/%s: %d", path, status)
		}
	}
	for method, want := range map[string]int{"HEAD": 200, "POST": 405, "PUT": 405, "DELETE": 405, "OPTIONS": 405} {
		for _, path := range []string{"", "report.json", "metrics", "events"} {
			r, _ := http.NewRequest(method, s.URL()+path, nil)
			answer, err := c.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			answer.Body.Close()
			if answer.StatusCode != want {
				t.Errorf("%s /%s: %d", method, path, answer.StatusCode)
			}
		}
	}
	for host, want := range map[string]int{"evil.example:80": 421, "evil.example": 421, "localhost": 200, "localhost:9": 200, "[::1]:9": 200} {
		r, _ := http.NewRequest("GET", s.URL()+"report.json", nil)
		r.Host = host
		answer, err := c.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if answer.StatusCode != want {
			t.Errorf("host %s: %d", host, answer.StatusCode)
		}
	}
}

// A public server answers to addresses and to the names of its machine alone.
func TestPublicHosts(t *testing.T) {
	s, err := Listen("0.0.0.0:0", "")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c := &http.Client{Transport: &http.Transport{}}
	defer c.CloseIdleConnections()
	for host, want := range map[string]int{"evil.example:80": 421, "evil.example": 421, "localhost.evil.example": 421, "localhost:9": 200, "10.1.2.3": 200, "[fe80::1]:9": 200} {
		r, _ := http.NewRequest("GET", s.URL()+"report.json", nil)
		r.Host = host
		answer, err := c.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if answer.StatusCode != want {
			t.Errorf("host %s: %d", host, answer.StatusCode)
		}
	}
}

func TestMachineNames(t *testing.T) {
	files := map[string]string{
		"/etc/resolv.conf": "nameserver 10.0.0.1\nsearch rack.example corp.example # ours\n",
		"/etc/hosts":       "127.0.0.1 localhost\n10.0.0.7 node7.fabric.example node7\n0.0.0.0 ads.example node77.ads.example\n",
	}
	read := func(name string) ([]byte, error) { return []byte(files[name]), nil }
	names := machineNames("train.example", func() (string, error) { return "node7.site", nil }, read)
	for host, want := range map[string]bool{
		"localhost": true, "train.example": true, "node7": true, "NODE7.": true, "node7.site": true, "node7.local": true, "node7.rack.example": true, "node7.corp.example": true,
		"node7.fabric.example": true, "10.9.8.7": true, "::1": true,
		"": false, "ads.example": false, "node77.ads.example": false, "node7.evil.example": false, "rack.example": false, "nameserver": false, "ours": false,
	} {
		if answersTo(names, host) != want {
			t.Errorf("%q: %v", host, !want)
		}
	}
	none := machineNames("0.0.0.0", func() (string, error) { return "", errors.New("unknown") }, read)
	if answersTo(none, "node7.rack.example") || !answersTo(none, "localhost") || answersTo([]string{""}, "") {
		t.Errorf("%q", none)
	}
}

func TestListenErrors(t *testing.T) {
	s, _ := served(t)
	defer s.Close()
	_, port, _ := net.SplitHostPort(s.listener.Addr().String())
	for address, want := range map[string]string{":" + port: "is in use", "nowhere": "no port", "192.0.2.1:0": "cannot listen on 192.0.2.1:0: cannot assign requested address; give"} {
		if other, err := Listen(address, ""); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", address, err)
			if other != nil {
				other.Close()
			}
		}
	}
	public, err := Listen("0.0.0.0:0", "")
	if err != nil {
		t.Fatal(err)
	}
	defer public.Close()
	if !public.Public() || !strings.HasPrefix(public.URL(), "http://localhost:") {
		t.Errorf("%s is for everybody", public.URL())
	}
}

// event is an event that a viewer receives.
type event struct{ name, data string }

// listenTo reads events until the stream ends.
func listenTo(t *testing.T, c *http.Client, s *Server) <-chan event {
	t.Helper()
	r, err := c.Get(s.URL() + "events")
	if err != nil {
		t.Fatal(err)
	}
	if r.StatusCode != http.StatusOK || r.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("%d, %s", r.StatusCode, r.Header.Get("Content-Type"))
	}
	events := make(chan event, 100)
	go func() {
		defer close(events)
		defer r.Body.Close()
		var e event
		for in := bufio.NewScanner(r.Body); in.Scan(); {
			switch key, value, _ := strings.Cut(in.Text(), ": "); key {
			case "event":
				e.name = value
			case "data":
				e.data = value
			case "":
				if e.name != "" {
					events <- e
				}
				e = event{}
			}
		}
	}()
	return events
}

func next(t *testing.T, events <-chan event) event {
	t.Helper()
	e, ok := <-events
	if !ok {
		t.Fatal("the stream has ended")
	}
	return e
}

func reported(t *testing.T, c *http.Client, s *Server) (r report.Report) {
	t.Helper()
	status, body, _ := get(t, c, s.URL()+"report.json")
	if status != http.StatusOK {
		t.Fatalf("%d: %s", status, body)
	}
	if err := json.Unmarshal([]byte(body), &r); err != nil {
		t.Fatal(err)
	}
	return r
}

// Two viewers, and one that reconnects, see the run go on and end. The last report is
// complete, and the server ends as soon as all viewers have it.
func TestViewers(t *testing.T) {
	s, c := served(t)
	s.farewell = time.Hour // which nobody needs
	if r := reported(t, c, s); !r.Live || len(r.Runs) != 0 || len(r.Missing) == 0 || r.Version != "v1.2.3" {
		t.Errorf("before the first step: %+v", r)
	}
	a, b := listenTo(t, c, s), listenTo(t, c, s)
	for _, v := range []<-chan event{a, b} {
		if e := next(t, v); e != (event{"report", `{"version":0}`}) {
			t.Errorf("at first: %v", e)
		}
	}
	s.Step(sample("none", 1))
	s.Step(sample("none", 2))
	for _, v := range []<-chan event{a, b} {
		if e := next(t, v); e.name != "report" || !strings.HasPrefix(e.data, `{"version":2,"percent":`) {
			t.Errorf("after two steps: %v", e)
		}
	}
	if r := reported(t, c, s); !r.Live || len(r.Runs) != 1 || len(r.Runs[0].Steps.Step) != 2 {
		t.Errorf("after two steps: %+v", r)
	}
	again := listenTo(t, c, s)
	if e := next(t, again); e.name != "report" {
		t.Errorf("after coming back: %v", e)
	}
	s.Step(sample("stash", 1))
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		s.Close()
	}()
	for _, v := range []<-chan event{a, b, again} {
		e := next(t, v)
		for e.name == "report" {
			e = next(t, v)
		}
		if e != (event{"done", `{"version":3}`}) {
			t.Errorf("at the end: %v", e)
		}
		if _, more := <-v; more {
			t.Error("there is more behind the end")
		}
		for range 4 { // who asks for the head alone does not have the report
			if r, err := c.Head(s.URL() + "report.json"); err != nil || r.StatusCode != 200 {
				t.Fatal(r, err)
			}
		}
		if r := reported(t, c, s); r.Live || len(r.Runs) != 2 {
			t.Fatalf("at the end: %+v", r) // Close waits for the last report
		}
	}
	<-closed
	if _, err := c.Get(s.URL()); err == nil {
		t.Error("it still answers")
	}
}

// A viewer that does not read, and one that never fetches the report, delay neither steps
// nor the end for long.
func TestSlowViewers(t *testing.T) {
	s, c := served(t)
	s.farewell = 100 * time.Millisecond
	huge := &report.Report{Title: strings.Repeat("x", 32<<20)} // more than sockets hold
	s.SetSource(func() (*report.Report, error) { return huge, nil })
	for _, path := range []string{"report.json", "events"} {
		conn, err := net.Dial("tcp", s.listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n", path)
	}
	stays := listenTo(t, c, s)
	next(t, stays)
	began := time.Now()
	for i := range 1000 {
		s.Step(sample("none", i+1))
	}
	s.Close()
	if took := time.Since(began); took > 5*time.Minute { // a viewer that is waited for takes for ever
		t.Errorf("1000 steps and the end took %v", took)
	}
}

// The number of viewers is limited.
func TestTooManyViewers(t *testing.T) {
	s, c := served(t)
	defer s.Close()
	count := func(n int) {
		s.mu.Lock()
		s.viewers = n
		s.mu.Unlock()
	}
	count(mostViewers)
	if status, _, h := get(t, c, s.URL()+"events"); status != http.StatusServiceUnavailable || h.Get("Retry-After") != "5" {
		t.Errorf("one more: %d, to come again after %q seconds", status, h.Get("Retry-After"))
	}
	count(mostViewers - 1)
	next(t, listenTo(t, c, s))
	count(0) // they have gone
}

// A viewer that has gone makes room for another, however many come in the end.
func TestViewersThatLeave(t *testing.T) {
	s, _ := served(t)
	defer s.Close()
	for i := range 3 * mostViewers {
		conn, err := net.Dial("tcp", s.listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(conn, "GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
		in := bufio.NewScanner(conn)
		for in.Scan() && in.Text() != "event: report" {
			if in.Text() == "HTTP/1.1 503 Service Unavailable" {
				t.Fatalf("viewer %d found no place", i+1)
			}
		}
		conn.Close()
		for counted := 1; counted > 0; time.Sleep(time.Millisecond) { // it is missed at once, and not at the next heartbeat
			s.mu.Lock()
			counted = s.viewers
			s.mu.Unlock()
		}
	}
}

// pipes is a listener whose connections are pipes.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	if c, ok := <-p; ok {
		return c, nil
	}
	return nil, net.ErrClosed
}
func (p pipes) Close() error   { close(p); return nil }
func (p pipes) Addr() net.Addr { return &net.TCPAddr{} }

// A step and the end of the run wake a viewer at once, and Close waits for one that does not fetch the
// last report for as long as it says.
func TestViewersAreWoken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Server{history: newHistory(), metrics: newMetrics(), changed: make(chan struct{}), paid: make(chan struct{}), local: true, farewell: time.Second}
		l := make(pipes)
		s.web = web.Serve(l, mostViewers, s.handle)
		here, there := net.Pipe()
		l <- there
		var heard strings.Builder
		go func() { _, _ = io.Copy(&heard, here) }()
		fmt.Fprint(here, "GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
		said := func(want string) {
			t.Helper()
			synctest.Wait()
			if !strings.HasSuffix(heard.String(), "\n\n"+want+"\n\n") {
				t.Errorf("a viewer has %q, want %q at the end", &heard, want)
			}
		}
		said("event: report\ndata: {\"version\":0}")
		time.Sleep(heartbeat - time.Second)
		s.Step(sample("none", 1))
		said("event: report\ndata: {\"version\":1}")
		time.Sleep(leastPause / 2)
		began, took := time.Now(), make(chan time.Duration, 1)
		s.made.took = 3 * time.Second
		go func() {
			s.Close()
			took <- time.Since(began)
		}()
		said("event: done\ndata: {\"version\":1}")
		if got, want := <-took, s.farewell+2*s.made.took; got != want {
			t.Errorf("the end took %v, want %v", got, want)
		}
		here.Close()
	})
}

// One report serves all viewers. Reports are not made more often than their cost allows, and
// once more at the end.
func TestReportsAreFew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var made atomic.Int32
		s := &Server{history: newHistory(), metrics: newMetrics(), changed: make(chan struct{})}
		s.SetSource(func() (*report.Report, error) {
			made.Add(1)
			time.Sleep(100 * time.Millisecond)
			return &report.Report{}, nil
		})
		ask := func() {
			for range 5 {
				if _, err := s.report(); err != nil {
					t.Error(err)
				}
			}
		}
		for range 100 { // 10 s in which there is a step and a question each 100 ms
			s.Step(sample("none", 1))
			ask()
			time.Sleep(100 * time.Millisecond)
		}
		// A report takes 100 ms, so the next may come 20 * 0.9 * 100 ms later.
		if n := made.Load(); n < 4 || n > 7 {
			t.Errorf("%d reports in ten seconds", n)
		}
		before := made.Load()
		time.Sleep(time.Minute)
		ask()
		time.Sleep(time.Minute)
		ask()
		if n := made.Load() - before; n != 1 {
			t.Errorf("%d reports without a step", n)
		}
		s.done = true
		ask()
		if n := made.Load() - before; n != 2 {
			t.Errorf("%d reports after the end", n)
		}
	})
}

// If the source fails, the report says so and shows the steps.
func TestSourcesThatFail(t *testing.T) {
	for name, source := range map[string]Source{
		"an error": func() (*report.Report, error) { return nil, errors.New("broken") },
		"a panic":  func() (*report.Report, error) { panic("broken") },
	} {
		s, c := served(t)
		s.SetSource(source)
		s.Step(sample("none", 1))
		if r := reported(t, c, s); len(r.Runs) != 1 || !strings.Contains(strings.Join(r.Missing, " "), "broken") {
			t.Errorf("%s: %+v", name, r)
		}
		s.Close()
	}
}

// What a run has not written yet is missing only once the run is over.
func TestMissingOfARunInProgress(t *testing.T) {
	s := &Server{history: newHistory()}
	source := func() (*report.Report, error) {
		return &report.Report{Runs: []report.Run{{Missing: []string{"a file"}}}}, nil
	}
	for _, done := range []bool{false, true} {
		if r, err := s.makeReport(source, done); err != nil || (len(r.Runs[0].Missing) == 1) != done {
			t.Errorf("over %v: %q is missing, %v", done, r.Runs[0].Missing, err)
		}
	}
}

// An event says how much of the run is done and when it ends, once two steps tell.
func TestNews(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Server{}
		say := func(want string) {
			t.Helper()
			if got := s.news(); got != want {
				t.Errorf("%s, want %s", got, want)
			}
		}
		say(`{"version":0}`)
		s.pace = eta.NewPace([]string{"none", "stash"}, 50, 0)
		for i := range 3 {
			s.steps++
			s.pace.Step("none", i+1, time.Now())
			if i == 0 {
				say(`{"version":1}`)
			}
			time.Sleep(2 * time.Second)
		}
		say(`{"version":3,"percent":3,"left":"3m12s"}`)
		time.Sleep(time.Hour)
		say(`{"version":3,"percent":3,"left":"0s"}`)
	})
}
