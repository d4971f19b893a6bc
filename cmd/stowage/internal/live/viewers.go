// This file owns what viewers get: the page, its figures, and the events that say when
// to ask for figures again.
//
// A viewer has no queue: one that does not read finds, when it does, the newest figures.
// One that cannot be written to is let go after writeLimit.

package live

import (
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/stowage-dev/stowage/report"
)

const (
	mostViewers = 32               // pages that listen at once
	heartbeat   = 15 * time.Second // a comment, so that viewers that have gone are noticed
	leastPause  = time.Second      // between two reports
	pauseFactor = 20               // a report that takes 1 ms is followed by 20: reports take a twentieth of a core
)

// Source makes a report of what a run has written so far. It is called from other
// goroutines than the run's.
type Source func() (*report.Report, error)

// made is the report that was made last.
type made struct {
	text  []byte
	steps int
	last  bool // after the end
	at    time.Time
	took  time.Duration
}

// pause is the time from one report to the next.
func (m *made) pause() time.Duration { return max(leastPause, pauseFactor*m.took) }

func (s *Server) servePage(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = w.Write(s.page) // a viewer that has gone is no error of the run's
}

func (s *Server) serveReport(w http.ResponseWriter, r *http.Request) {
	m, err := s.report()
	if err != nil {
		http.Error(w, "the report cannot be made: "+err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	extend(w)
	if _, err = w.Write(m.text); err == nil && m.last && r.Method == http.MethodGet {
		_ = http.NewResponseController(w).Flush() // Close waits for no more than this
		s.fetched()
	}
}

// extend gives a viewer time from now on.
func extend(w http.ResponseWriter) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeLimit)) // connections have deadlines
}

// fetched notes that somebody has the last figures.
func (s *Server) fetched() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owed--; s.owed == 0 {
		close(s.paid)
	}
}

// report is the newest one that may be had: another is made if there were steps since
// and the last one is not too young, or if the run is over.
func (s *Server) report() (made, error) {
	s.making.Lock()
	defer s.making.Unlock()
	s.mu.Lock()
	m, steps, done, source := s.made, s.steps, s.done, s.source
	s.mu.Unlock()
	// A viewer that was told after a pause asks a little later: nine tenths let it through.
	young := time.Since(m.at) < m.pause()*9/10
	if m.text != nil && (m.steps == steps || young) && m.last == done {
		return m, nil
	}
	began := time.Now()
	r, err := s.make(source, done)
	if err != nil {
		return m, err
	}
	r.Live, r.Version, r.Made = !done, s.version, began.UTC().Format(time.RFC3339)
	text, err := json.Marshal(r)
	if err != nil {
		return m, err
	}
	m = made{text: text, steps: steps, last: done, at: time.Now(), took: time.Since(began)}
	s.mu.Lock()
	s.made = m
	s.mu.Unlock()
	return m, nil
}

// make makes a report from the source, or where that fails from memory.
func (s *Server) make(source Source, done bool) (r *report.Report, err error) {
	if source != nil {
		r, err = guarded(source)
	}
	if r != nil && err == nil {
		for i := range r.Runs {
			if !done { // what is not there is still to come
				r.Runs[i].Missing = []string{}
			}
		}
		return r, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r = s.history.report()
	if err != nil {
		r.Missing = append(r.Missing, "What the run has written cannot be read: "+err.Error()+".")
	}
	return r, nil
}

// guarded makes an error of a source's panic: a run must not die of its picture.
func guarded(source Source) (r *report.Report, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%v", p)
		}
	}()
	return source()
}

// serveEvents tells a viewer of changes until the run is over or the viewer has gone.
func (s *Server) serveEvents(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	if r.Method == http.MethodHead {
		return
	}
	s.mu.Lock()
	full := s.viewers >= mostViewers
	if !full {
		s.viewers++
	}
	s.mu.Unlock()
	if full {
		h.Set("Retry-After", "5")
		http.Error(w, fmt.Sprintf("%d viewers are watching already", mostViewers), http.StatusServiceUnavailable)
		return
	}
	defer func() {
		s.mu.Lock()
		s.viewers--
		s.mu.Unlock()
	}()
	s.listen(w, r)
}

// listen writes events to one viewer.
func (s *Server) listen(w http.ResponseWriter, r *http.Request) {
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	say := func(text string) bool {
		extend(w)
		if _, err := w.Write([]byte(text)); err != nil {
			return false
		}
		return http.NewResponseController(w).Flush() == nil
	}
	if !say("retry: 1000\n\n") { // milliseconds until a browser that lost us asks again
		return
	}
	var pause <-chan time.Time // running since the last event
	for told := -1; ; {
		s.mu.Lock()
		steps, done, changed, wait := s.steps, s.done, s.changed, s.made.pause()
		s.mu.Unlock()
		if done {
			say(fmt.Sprintf("event: done\ndata: {\"version\":%d}\n\n", steps))
			return
		}
		if told != steps && pause == nil {
			if !say(fmt.Sprintf("event: report\ndata: {\"version\":%d}\n\n", steps)) {
				return
			}
			told, pause = steps, time.After(wait)
		}
		select {
		case <-changed:
		case <-pause:
			pause = nil
		case <-beat.C:
			if !say(":\n\n") {
				return
			}
		case <-r.Context().Done():
			return
		}
	}
}
