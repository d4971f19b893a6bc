// This file owns the traces of a run: one a rank, written beside the training. Nothing
// that happens to them ends a run; what cannot be written is a warning.

package trainrun

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stowage-dev/stowage"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/report"
	"github.com/stowage-dev/stowage/trace"
	"github.com/stowage-dev/stowage/train"
)

// computeStream is the name that the trainer gives the stream it computes on.
const computeStream = "compute"

// traceBytes is what the traces of all ranks may take together, and leastTraced what one
// has at least. An event takes about 14 bytes, 150 while it is read, some 60 for Perfetto,
// and its part of the pictures two microseconds: 1.7 million events, 260 MB, four seconds
// at the end.
const (
	traceBytes  = 24 << 20
	leastTraced = 256 << 10
)

// tracing is the traces of a run's ranks.
type tracing struct {
	ranks []*rankTrace
	limit int64 // bytes of a rank
	step  atomic.Int64
	// thin is set in steps that are not traced in full, evaluating while no step is
	// under way: what is emitted then belongs to none.
	thin, evaluating atomic.Bool
	thinned          int // the first step that was not traced in full
}

// rankTrace is the sink of a rank.
type rankTrace struct {
	*tracing
	to   trace.Sink
	w    *trace.Writer
	file late
}

// trace has the ranks of a run traced.
func (j *Job) trace(cfg *train.Config) *tracing {
	n := cfg.Layout.Ranks()
	t := &tracing{limit: max(traceBytes/int64(n), leastTraced)}
	zero, began := device.Now(), time.Now().UnixNano()
	for rank := range n {
		r := &rankTrace{tracing: t}
		r.w = trace.NewWriter(&r.file, trace.Header{Rank: rank, Began: began, Compute: computeStream, Budget: int64(cfg.Memory.Budget)}, t.limit)
		r.to = trace.From(zero, r.w)
		t.ranks = append(t.ranks, r)
	}
	cfg.Trace = func(rank int) trace.Sink { return t.ranks[rank] }
	cfg.Device = func(rank int) (device.Device, error) {
		return j.machine.Open(rank, stowage.Observe(t.ranks[rank], rank))
	}
	cfg.Measure = func() (device.Device, error) { return j.machine.Open(0, nil) }
	return t
}

// Emit gives an event the number of the trainer's step, which a runtime that was resumed,
// or that did a step again, does not know.
func (r *rankTrace) Emit(e trace.Event) {
	border := e.What == trace.Begin || e.What == trace.End
	owned := e.Storage == 0 && (e.What == trace.Alloc || e.What == trace.Free)
	switch {
	case r.evaluating.Load() && border:
		return
	case r.thin.Load() && !border && !owned && e.What != trace.Rerun && e.What != trace.Spill && e.What != trace.Decide:
		return
	}
	if !e.What.Span() {
		e.Step = int(r.step.Load())
	}
	r.to.Emit(e)
}

// everyFull is how often a step is traced in full when a trace is half full: a long run
// has something to show of its end as well.
const everyFull = 50

// begin says which step is to come, and whether it is the last.
func (t *tracing) begin(step int, last bool) {
	if t == nil {
		return
	}
	t.step.Store(int64(step))
	t.evaluating.Store(false)
	full := true
	for _, r := range t.ranks {
		full = full && r.file.size.Load() < t.limit/2
	}
	thin := !full && !last && step%everyFull != 0
	if t.thin.Store(thin); thin && t.thinned == 0 {
		t.thinned = step
	}
}

// over says that the step is done.
func (t *tracing) over() {
	if t != nil {
		t.evaluating.Store(true)
	}
}

// note says what the traces leave out.
func (t *tracing) note() string {
	if t == nil || t.thinned == 0 {
		return ""
	}
	return fmt.Sprintf("from step %d on one step in %d", t.thinned, everyFull)
}

// attach writes the traces into a run's folder, as the part after so many resumptions,
// and names what it made.
func (t *tracing) attach(dir string, part int) (made []string, err error) {
	folder := filepath.Join(dir, report.TraceFolder)
	if !exists(folder) {
		made = append(made, folder)
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, t.fail(fmt.Errorf("%s cannot be made: %w", folder, pathless(err)))
	}
	if part == 0 { // of a run that is no more
		for _, f := range report.TraceFiles(dir) {
			if f.Part > 0 || f.Rank >= len(t.ranks) {
				err = cmp.Or(err, os.Remove(f.Path))
			}
		}
	}
	for rank, r := range t.ranks {
		path := filepath.Join(dir, report.TraceName(rank, part))
		if !exists(path) {
			made = append(made, path)
		}
		err = cmp.Or(err, r.file.open(path))
	}
	return made, t.fail(err)
}

// fail gives up on files that cannot be written.
func (t *tracing) fail(err error) error {
	if err != nil {
		for _, r := range t.ranks {
			r.file.lose(err)
		}
	}
	return err
}

// close ends the traces, after the devices that tell them.
func (t *tracing) close() (err error) {
	if t == nil {
		return nil
	}
	for _, r := range t.ranks {
		err = cmp.Or(err, r.w.Close(), r.file.close())
	}
	return err
}

// nextPart is the number of the part that a run which goes on writes.
func nextPart(dir string) (part int) {
	for _, f := range report.TraceFiles(dir) {
		part = max(part, f.Part+1)
	}
	return part
}

// late is a file that is opened when some of it was written: devices tell of memory
// before a run has a folder.
type late struct {
	mu     sync.Mutex
	before bytes.Buffer
	f      *os.File
	err    error
	size   atomic.Int64
}

func (l *late) Write(p []byte) (n int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.size.Add(int64(len(p)))
	switch {
	case l.err != nil:
		return 0, l.err
	case l.f == nil:
		return l.before.Write(p)
	}
	n, l.err = l.f.Write(p)
	return n, l.err
}

func (l *late) open(path string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.f, l.err = os.Create(path); l.err == nil {
		_, l.err = l.before.WriteTo(l.f)
	}
	if l.err != nil {
		l.err = fmt.Errorf("%s cannot be written: %w", path, pathless(l.err))
	}
	return l.err
}

// lose forgets what was written and refuses more.
func (l *late) lose(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = cmp.Or(l.err, err)
	l.before = bytes.Buffer{}
}

func (l *late) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.f == nil {
		return nil
	}
	err := l.f.Close()
	l.f, l.err = nil, cmp.Or(l.err, errors.New("the trace is closed"))
	return err
}
