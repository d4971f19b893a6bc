// This file tests the page in a browser where it is hard: hostile names, large reports,
// browsers without decompression, reports with little in them, and a run under way.

package page

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/observe/report"
)

// SPEC S6.5: names are text, whatever they say, and a page needs little to show something.
func TestHardReportsInBrowser(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a browser")
	}
	b := startBrowser(t)
	b.Window(1440, "light")
	t.Run("hostile", func(t *testing.T) { testHostile(t, b) })
	t.Run("empty", func(t *testing.T) {
		for name, r := range map[string]*report.Report{
			"no runs":  {Title: "nothing", Missing: []string{"runs/x: metrics.jsonl is not there; nothing of it is shown"}},
			"bare run": {Title: "bare", Runs: []report.Run{{Name: "bare", Missing: []string{"trace/rank-0.trace ends early"}}}},
			"no trace": {Title: "steps", Runs: []report.Run{{Name: "a", Steps: report.Steps{Step: []int{1}, Loss: []float64{2}}, Ranks: []report.Rank{{}}}}},
		} {
			url := saved(t, r)
			b.open(url)
			for _, c := range b.Complaints(url) {
				t.Errorf("%s: %s", name, c)
			}
			if len(r.Missing) > 0 {
				b.wantText("#notes", r.Missing[0])
			} else if len(r.Runs[0].Missing) > 0 {
				b.wantText("#notes", r.Runs[0].Missing[0])
			}
		}
	})
	t.Run("just begun", func(t *testing.T) { testJustBegun(t, b) })
	t.Run("large", func(t *testing.T) { testLarge(t, b) })
	t.Run("old browser", func(t *testing.T) {
		r := sample([]string{"offload"}, 1, 2, 20)
		url := saved(t, r)
		b.Do(nil, "Page.addScriptToEvaluateOnNewDocument", map[string]any{"source": "delete window.DecompressionStream; delete Uint8Array.fromBase64"})
		b.open(url)
		b.wantText("#card-device", size(int64(r.Runs[0].Figures[0].Value)))
		b.wantText("#memory .readout .tier b", size(r.Runs[0].Ranks[0].Memory.Peak.Bytes))
		for _, c := range b.Complaints(url) {
			t.Error(c)
		}
	})
}

// testJustBegun shows a step of which one moment is known, as a live page may.
func testJustBegun(t *testing.T, b *browser) {
	r := sample([]string{"offload"}, 1, 2, 20)
	k := &r.Runs[0].Ranks[0]
	d := k.Details[0]
	d.End, d.Streams, k.Memory.Peak.Time = d.Begin, nil, d.Begin
	for i := range d.Storages {
		d.Storages[i].Stays = []report.Stay{{Where: "device", Begin: d.Begin, End: d.Begin}}
	}
	k.Details = []report.Detail{d}
	url := saved(t, r)
	b.open(url)
	b.Until(`(document.querySelector("#tensors").scrollIntoView(), document.querySelector("#tensors .life"))`)
	for _, c := range b.Complaints(url) {
		t.Error(c)
	}
}

func testHostile(t *testing.T, b *browser) {
	const evil = `</script><img src=x onerror="window.struck=1"><!--`
	r := sample([]string{"offload"}, 1, 2, 20)
	r.Title, r.Missing = evil, []string{evil}
	run := &r.Runs[0]
	run.Name, run.Command, run.Options, run.Environment = evil, evil, evil, map[string]string{evil: evil}
	for i := range run.Figures {
		run.Figures[i].Label = evil
	}
	k := &run.Ranks[0]
	for i := range k.Memory.Series {
		k.Memory.Series[i].Name += evil
	}
	for i := range k.Policy {
		k.Policy[i].Group, k.Policy[i].Reason, k.Policy[i].Units = evil, evil, map[string]int{evil: 1}
	}
	k.Pools[0].Name = evil
	for i := range k.Details {
		k.Details[i].Why = evil
		for j := range k.Details[i].Storages {
			k.Details[i].Storages[j].Group = evil
		}
		for j := range k.Details[i].Streams {
			s := &k.Details[i].Streams[j]
			s.Name = evil
			for n := range s.Names {
				s.Names[n] = evil
			}
		}
	}
	second := *run // with a second run all names are in more places
	r.Runs = append(r.Runs, second)
	url := saved(t, r)
	b.open(url)
	b.picture("hostile")
	eval[bool](b, `document.querySelectorAll("details").forEach((d) => { d.open = true; }), true`)
	for y := range 12 {
		eval[bool](b, fmt.Sprintf("scrollTo(0, %d), true", y*700))
		b.frame()
	}
	b.mouse("mouseMoved", `#streams .plot[aria-label^="Timelines"]`, 0.5, 0.17)
	if n := eval[int](b, `document.querySelectorAll("img").length + (window.struck || 0)`); n != 0 {
		t.Error("a name became a part of the page")
	}
	b.wantText("h1", evil)
	b.wantText("#policy tbody", evil)
	b.wantText("#tensors tbody", evil)
	b.wantText("#run pre", evil)
	for _, c := range b.Complaints(url) {
		t.Error(c)
	}
}

// testLarge wants the page of ten ranks and a hundred steps within two seconds, and
// pointing at it without a stutter.
func testLarge(t *testing.T, b *browser) {
	r := sample([]string{"offload"}, 1, 100, 40)
	for k := 1; k < 10; k++ {
		next := r.Runs[0].Ranks[0]
		next.Rank = k
		r.Runs[0].Ranks = append(r.Runs[0].Ranks, next)
	}
	url := saved(t, r)
	took := 0.0
	for range 10 { // other work delays some
		b.open(url)
		if took = eval[float64](b, "+document.documentElement.dataset.ready"); took <= 2000 {
			break
		}
	}
	t.Logf("interactive after %.0f ms", took)
	if took > 2000 {
		t.Errorf("interactive after %.0f ms, want 2000 at most", took)
	}
	eval[bool](b, `document.getElementById("memory").scrollIntoView(), true`)
	b.frame()
	// The work of a frame, without the waiting for it. Other work disturbs most frames of a
	// busy machine, so the fastest quarter counts.
	each := eval[float64](b, `(async () => {
		const el = document.querySelector("#memory .plot"), box = el.getBoundingClientRect();
		const work = [];
		for (let i = 0; i < 40; i++) {
			const began = performance.now();
			el.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 100 + i * 15, clientY: box.top + 50, pointerId: 1, pointerType: "mouse", bubbles: true }));
			await new Promise((go) => requestAnimationFrame((at) => { work.push(performance.now() - Math.max(at, began)); go(); }));
		}
		return work.sort((a, b) => a - b)[10];
	})()`)
	t.Logf("%.2f ms of work when pointing, in the tenth of 40 frames", each)
	if each > 30 {
		t.Errorf("pointing costs %.1f ms a frame", each)
	}
	for _, c := range b.Complaints(url) {
		t.Error(c)
	}
}

// server stands for a run under way.
type server struct {
	sync.Mutex
	r       *report.Report
	clients map[chan string]bool
	down    bool
}

func (s *server) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	s.Lock()
	down := s.down
	s.Unlock()
	switch {
	case down:
		http.Error(w, "gone", http.StatusServiceUnavailable)
	case q.URL.Path == "/":
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_ = Live(w)
	case q.URL.Path == "/report.json":
		s.Lock()
		defer s.Unlock()
		_ = json.NewEncoder(w).Encode(s.r)
	case q.URL.Path == "/events":
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "retry: 200\n\n")
		w.(http.Flusher).Flush()
		news := make(chan string, 8)
		s.Lock()
		s.clients[news] = true
		s.Unlock()
		defer func() { s.Lock(); delete(s.clients, news); s.Unlock() }()
		for {
			select {
			case <-q.Context().Done():
				return
			case text, ok := <-news:
				if !ok {
					return
				}
				fmt.Fprint(w, text)
				w.(http.Flusher).Flush()
			}
		}
	default:
		http.NotFound(w, q)
	}
}

func (s *server) tell(event string) {
	s.Lock()
	defer s.Unlock()
	for c := range s.clients {
		c <- "event: " + event + "\ndata: {\"version\":1}\n\n"
	}
}

// SPEC S6.5: the page of a run under way follows it, keeps what one looks at, finds its
// way back after a lost connection, and stops when the run has.
func TestLiveInBrowser(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a browser")
	}
	b := startBrowser(t)
	b.Window(1440, "light")
	s := &server{r: sample([]string{"offload"}, 2, 2, 20), clients: map[chan string]bool{}}
	s.r.Live = true
	web := httptest.NewServer(s)
	defer web.Close()
	b.open(web.URL + "/")
	b.Until(`document.querySelector(".live").textContent === "live"`)
	b.Press("r")
	b.Until(`document.getElementById("said").textContent === "offload, rank 0"`)
	eval[bool](b, `document.getElementById("memory").scrollIntoView(), true`)
	b.frame()
	b.Press("m", "+", "+")
	b.click("#memory .plot", 0.5, 0.5)
	b.frame()
	shown, pin := eval[string](b, `document.querySelector("#memory .plot").dataset.shown`), b.text("#tensors h2")

	longer := sample([]string{"offload"}, 2, 4, 20)
	longer.Live = true
	s.Lock()
	s.r = longer
	s.Unlock()
	s.tell("report")
	b.Until(`document.getElementById("about").textContent.includes("4 steps")`)
	b.frame()
	if got := eval[string](b, `document.querySelector("#memory .plot").dataset.shown`); got != shown {
		t.Errorf("after news the chart shows %q, was %q", got, shown)
	}
	if got := b.text("#tensors h2"); got != pin {
		t.Errorf("after news the tensors are %q, were %q", got, pin)
	}
	if got := eval[string](b, `document.getElementById("pick-rank").value`); got != "0" {
		t.Errorf("after news the rank is number %s", got)
	}
	// A reload keeps the place too.
	b.open(web.URL + "/")
	if got := b.text("#tensors h2"); got != pin {
		t.Errorf("after a reload the tensors are %q, were %q", got, pin)
	}
	b.Until(`document.querySelector(".live").textContent === "live"`)
	for _, c := range b.Complaints(web.URL+"/", web.URL+"/report.json", web.URL+"/events") {
		t.Error(c)
	}
	s.Lock()
	s.down = true
	for c := range s.clients {
		close(c)
		delete(s.clients, c)
	}
	s.Unlock()
	b.Until(`document.querySelector(".live").textContent.startsWith("no connection")`)
	s.Lock()
	s.down = false
	s.Unlock()
	b.Until(`document.querySelector(".live").textContent === "live"`)
	for n := 0; n == 0; time.Sleep(20 * time.Millisecond) { // until the page listens again
		s.Lock()
		n = len(s.clients)
		s.r.Live = false
		s.Unlock()
	}
	s.tell("done")
	b.Until(`document.querySelector(".live").textContent === "finished"`)
	if strings.Contains(b.text("#about"), "Waiting") {
		t.Error("the page still waits")
	}
}
