// This file owns the answers to viewers: the page, its report, and the events that say
// when to fetch the report again.
//
// There is no queue for a viewer: one that reads slowly gets the newest report when it
// reads again. The server drops a viewer that does not read for web.WriteLimit.

package live

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/stowage-dev/stowage/internal/eta"
	"github.com/stowage-dev/stowage/internal/web"
	"github.com/stowage-dev/stowage/observe/report"
)

const (
	mostViewers = 32               // viewers that listen for events at once
	heartbeat   = 15 * time.Second // time between comments, which reveal that a viewer is gone
	leastPause  = time.Second      // least time between two reports
	pauseFactor = 20               // pause after a report, over the time to make it: reports use 1/20 of a core
)

// Source returns a report of what a run has written so far. The server calls it from
// its own goroutines.
type Source func() (*report.Report, error)

// made is the latest report.
type made struct {
	text  []byte
	steps int
	last  bool // made after the end of the run
	at    time.Time
	took  time.Duration
}

// pause returns the time until the next report may be made.
func (m *made) pause() time.Duration { return max(leastPause, pauseFactor*m.took) }

func (s *Server) servePage(a *web.Answer, _ *web.Request) {
	_ = a.Send(200, "text/html; charset=utf-8", s.page) // a run does not fail because a viewer is gone
}

func (s *Server) serveMetrics(a *web.Answer, _ *web.Request) {
	_ = a.Send(200, "text/plain; version=0.0.4; charset=utf-8", []byte(s.metrics.text())) // Prometheus asks again
}

func (s *Server) serveReport(a *web.Answer, r *web.Request) {
	m, err := s.report()
	if err != nil {
		a.Refuse(500, "cannot make the report: "+err.Error())
		return
	}
	if a.Send(200, "application/json", m.text) == nil && m.last && r.Method == "GET" {
		s.fetched()
	}
}

// fetched notes that a viewer has the last report.
func (s *Server) fetched() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owed--; s.owed == 0 {
		close(s.paid)
	}
}

// report returns the latest report. It makes a new one if there were steps since and
// the pause is over, or if the run has ended.
func (s *Server) report() (made, error) {
	s.making.Lock()
	defer s.making.Unlock()
	s.mu.Lock()
	m, steps, done, source := s.made, s.steps, s.done, s.source
	s.mu.Unlock()
	// A viewer that hears of new steps after a pause asks just then: nine tenths of the
	// pause let it through.
	young := time.Since(m.at) < m.pause()*9/10
	if m.text != nil && (m.steps == steps || young) && m.last == done {
		return m, nil
	}
	began := time.Now()
	r, err := s.makeReport(source, done)
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

// makeReport makes a report from the source, or from memory if that fails.
func (s *Server) makeReport(source Source, done bool) (r *report.Report, err error) {
	if source != nil {
		r, err = recovered(source)
	}
	if r != nil && err == nil {
		for i := range r.Runs {
			if !done { // what is missing will still be written
				r.Runs[i].Missing = []string{}
			}
		}
		return r, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r = s.history.report()
	if err != nil {
		r.Missing = append(r.Missing, "The files of the run cannot be read: "+err.Error()+".")
	}
	return r, nil
}

// recovered turns a panic of the source into an error, so that a run does not die of its
// report.
func recovered(source Source) (r *report.Report, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%v", p)
		}
	}()
	return source()
}

// news returns the data of an event: the version of the report, and if it is known, the
// percentage of the run that is done and the time until its end. The caller holds mu.
func (s *Server) news() string {
	done, all := s.pace.Progress()
	left, known := s.pace.Left(time.Now())
	if !known || all == 0 {
		return fmt.Sprintf(`{"version":%d}`, s.steps)
	}
	return fmt.Sprintf(`{"version":%d,"percent":%d,"left":%q}`, s.steps, 100*done/all, eta.Clock(left))
}

// serveEvents sends events to a viewer until the run ends or the viewer is gone.
func (s *Server) serveEvents(a *web.Answer, r *web.Request) {
	const kind = "text/event-stream"
	if r.Method == "HEAD" {
		_ = a.Send(200, kind, nil) // a viewer that is gone does not miss it
		return
	}
	s.mu.Lock()
	full := s.viewers >= mostViewers
	if !full {
		s.viewers++
	}
	s.mu.Unlock()
	if full {
		a.Set("Retry-After", "5")
		a.Refuse(503, fmt.Sprintf("%d viewers are connected already; close one of them", mostViewers))
		return
	}
	defer func() {
		s.mu.Lock()
		s.viewers--
		s.mu.Unlock()
	}()
	if a.Stream(kind) == nil {
		s.sendEvents(a)
	}
}

// sendEvents writes events to one viewer.
func (s *Server) sendEvents(a *web.Answer) {
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	say := func(text string) bool { return a.Say(text) == nil }
	if !say("retry: 1000\n\n") { // milliseconds until a browser reconnects
		return
	}
	var pause <-chan time.Time // runs from the last event on
	for told := -1; ; {
		s.mu.Lock()
		steps, done, changed, wait, news := s.steps, s.done, s.changed, s.made.pause(), s.news()
		s.mu.Unlock()
		if done {
			say(fmt.Sprintf("event: done\ndata: {\"version\":%d}\n\n", steps))
			return
		}
		if told != steps && pause == nil {
			if !say("event: report\ndata: " + news + "\n\n") {
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
		case <-a.Gone():
			return
		}
	}
}
