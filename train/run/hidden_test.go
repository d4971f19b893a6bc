package run

import (
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/observe/trace"
)

// span is work of a stream from one moment to another.
func span(stream string, from, to int64) trace.Event {
	return trace.Event{Kind: trace.Copy, Stream: stream, Time: from, Took: to - from}
}

// The share is that of the time in which compute worked; waits are no work.
func TestHiddenShare(t *testing.T) {
	var m meter
	wait := span("compute", 40, 100)
	wait.Kind = trace.Wait
	for _, e := range []trace.Event{
		span("exchange", 10, 30),  // behind compute
		span("exchange", 35, 55),  // a quarter of it behind compute
		span("reduce", 100, 130),  // behind two pieces of compute with a gap of 10
		span("gather", 300, 400),  // alone
		span("offload", 100, 130), // no collective
		span("exchange", 60, 70), wait, span("compute", 0, 40), span("compute", 90, 110), span("compute", 120, 200),
	} {
		m.note(e)
	}
	want := shares{exchanges: {50, 25}, gathers: {100, 0}, sums: {30, 20}}
	for range 2 { // asking twice counts nothing twice
		if got := m.shares(); got != want {
			t.Errorf("%v, want %v", got, want)
		}
	}
	var b strings.Builder
	s := shares{exchanges: {50e6, 25e6}, sums: {30e6, 20e6}}
	hiddenOf(s, 5, 2).write(&b)
	if got, want := b.String(), "in a step, a rank spent on exchanges of experts 5 ms (50 % hidden behind compute), sums of gradients 3 ms (67 % hidden behind compute)\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if h := hiddenOf(s, 0, 2); h != (hidden{}) {
		t.Errorf("without steps: %+v", h)
	}
}

// What a rank does in an evaluation counts for no step, whenever its device reports it.
func TestHiddenWithoutEvaluations(t *testing.T) {
	tr := new(tracing)
	r := &rankTrace{tracing: tr, to: trace.NewWriter(io.Discard, trace.Header{}, 1<<20)}
	tr.ranks = []*rankTrace{r}
	clock := int64(0)
	now := func() int64 { return clock }
	r.Emit(span("compute", 0, 10))
	for clock = 100; clock < 400; clock += 100 {
		end := tr.evaluations.begin(now)
		r.Emit(span("exchange", clock, clock+10))
		clock += 50
		end()
		r.Emit(span("compute", clock-20, clock-1)) // reported late
		r.Emit(span("exchange", clock-20, clock-10))
		r.Emit(span("exchange", clock+10, clock+17))
		r.Emit(span("compute", clock+10, clock+12))
	}
	r.Emit(span("exchange", 90, 91))
	if got, want := tr.shares(), (shares{exchanges: {15, 4}}); got != want {
		t.Errorf("%v, want %v", got, want)
	}
}

// A long run counts on the way and comes to what one count at the end would. Streams report
// their work in order, and late.
func TestHiddenOfLongRuns(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var m meter
	var want shares
	var late []trace.Event
	for step := range int64(3 * mostMetered) {
		at := 1000 * step
		busy := 100 + r.Int64N(800)
		m.note(span("compute", at, at+busy))
		kind, from := r.IntN(collectives), r.Int64N(900)
		to := from + 1 + r.Int64N(99)
		want[kind].Took += to - from
		want[kind].Hidden += max(0, min(to, busy)-from)
		late = append(late, span(collectiveStreams[kind], at+from, at+to))
		if len(late) > r.IntN(500) {
			for _, e := range late {
				m.note(e)
			}
			late = late[:0]
		}
		if n := len(m.compute) + len(m.others); n > 2*mostMetered {
			t.Fatalf("the meter holds %d pieces", n)
		}
	}
	for _, e := range late {
		m.note(e)
	}
	if got := m.shares(); got != want {
		t.Errorf("%v, want %v", got, want)
	}
}

// others is a communicator of processes that have all measured the same.
type others struct {
	comm.Comm
	processes int
}

// alone is a control that fails, or that hears what is no figure.
type alone struct {
	comm.Comm
	says []byte
	err  error
}

func (a alone) Gather([]byte) ([][]byte, error) { return [][]byte{a.says}, a.err }

// Processes that cannot be heard have no figures, and the run learns why.
func TestHiddenOfNobody(t *testing.T) {
	broken := errors.New("broken")
	if h, err := new(tracing).hiddenOfAll(&comm.Process{Control: alone{err: broken}}); !errors.Is(err, broken) || h != (hidden{}) {
		t.Errorf("%+v, %v", h, err)
	}
	if _, err := new(tracing).hiddenOfAll(&comm.Process{Control: alone{says: []byte("no figures")}}); err == nil {
		t.Error("words are taken for figures")
	}
}

func (o others) Gather(text []byte) (all [][]byte, err error) {
	for range o.processes {
		all = append(all, text)
	}
	return all, nil
}

// The figures are those of a rank in a step. So more ranks and processes that measure the same
// change nothing, and more steps in the same time take less each.
func TestHiddenOfAllRanks(t *testing.T) {
	for _, steps := range []int{1, 5} {
		for _, ranks := range []int{1, 3} {
			for _, processes := range []int{0, 1, 4} { // 0 is a run of one process
				tr := &tracing{begun: steps}
				for range ranks {
					r := &rankTrace{tracing: tr}
					r.note(span("compute", 0, 40e6))
					r.note(span("exchange", 20e6, 70e6))
					r.note(span("reduce", 10e6, 20e6))
					tr.ranks = append(tr.ranks, r)
				}
				var p *comm.Process
				if processes > 0 {
					p = &comm.Process{Control: others{nil, processes}}
				}
				h, err := tr.hiddenOfAll(p)
				if err != nil || h.Gather != nil || h.Exchange == nil || h.Reduction == nil {
					t.Fatal(h, err)
				}
				if got, want := [4]float64{*h.Exchange, *h.ExchangeHid, *h.Reduction, *h.ReductionHid}, [4]float64{50 / float64(steps), 40, 10 / float64(steps), 100}; got != want {
					t.Errorf("%d steps, %d ranks in each of %d processes: %v, want %v", steps, ranks, processes, got, want)
				}
			}
		}
	}
}
