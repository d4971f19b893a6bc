// This file owns the traces of a run: one for each rank, written during the training. A
// trace that cannot be written is a warning and never ends a run. Traces are synced when
// they are closed: a loss of power before may cost them their end, and readers take what
// there is.

package run

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stowage-dev/stowage"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/observe/trace"
	"github.com/stowage-dev/stowage/train"
	"github.com/stowage-dev/stowage/train/internal/disk"
)

// computeStream is the name that the trainer gives the stream it computes on.
const computeStream = "compute"

// traceBytes limits the traces of all ranks together, and leastTraced is the least that
// one rank may write. An event takes about 13 bytes on the disk and in memory while the
// report is made, and several times that for Perfetto: about 1.9 million events at the
// end of a run.
const (
	traceBytes  = 24 << 20
	leastTraced = 256 << 10
)

// tracing holds the traces of the ranks of a run. A nil tracing traces nothing.
type tracing struct {
	ranks []*rankTrace
	limit int64 // bytes of a rank
	step  atomic.Int64
	// thin is set during steps that are not traced in full. evaluating is set between
	// steps; events that are emitted then belong to no step.
	thin, evaluating atomic.Bool
	thinned          int // first step that was not traced in full
	begun            int // steps
	evaluations      pauses
}

// rankTrace is the sink of a rank's events.
type rankTrace struct {
	*tracing
	rank int
	to   trace.Sink
	w    *trace.Writer
	file lateFile
	meter
}

// trace makes the ranks of a run trace what they do.
func (j *Job) trace(cfg *train.Config) *tracing {
	n := cfg.Layout.Ranks()
	t := &tracing{limit: max(traceBytes/int64(n), leastTraced)}
	zero, began := device.Now(), time.Now().Add(j.machine.Offset).UnixNano()
	of := map[int]*rankTrace{}
	here := make([]int, n)
	for i := range here {
		here[i] = i
	}
	if j.machine.Process != nil {
		here = j.machine.Process.Ranks
	}
	head := trace.Header{Began: began, Compute: computeStream, Budget: int64(cfg.Memory.Budget)}
	if j.machine.Process != nil {
		j.place(&head, n)
	}
	for _, rank := range here {
		r := &rankTrace{tracing: t, rank: rank}
		of[rank] = r
		head.Rank = rank
		r.w = trace.NewWriter(&r.file, head, t.limit)
		r.to = trace.Since(zero, r.w)
		t.ranks = append(t.ranks, r)
	}
	cfg.Trace = func(rank int) trace.Sink { return of[rank] }
	cfg.Device = func(rank int) (device.Device, error) {
		return j.machine.Open(rank, stowage.Observe(of[rank], rank))
	}
	cfg.Measure = func() (device.Device, error) { return j.machine.Open(here[0], nil) }
	return t
}

// place says in the header of a trace where the rank lives, so that readers can put the
// traces of all processes together. A comparison has several runs, in the same order in all
// processes.
func (j *Job) place(h *trace.Header, ranks int) {
	j.traced++
	h.Run, h.Ranks, h.Process = fmt.Sprintf("%s run %d", j.machine.Run, j.traced), ranks, os.Getpid()
	h.Offset, h.Within = int64(j.machine.Offset), int64(j.machine.Within)
	h.Host, _ = os.Hostname() // a machine without a name has none
}

// Emit writes an event with the number of the trainer's step. A runtime does not know
// that number after a resumption or a rerun.
func (r *rankTrace) Emit(e trace.Event) {
	if e.Kind.Span() && !r.evaluations.has(e.Time) {
		r.note(e)
	}
	border := e.Kind == trace.Begin || e.Kind == trace.End
	owned := e.Storage == 0 && (e.Kind == trace.Alloc || e.Kind == trace.Free)
	switch {
	case r.evaluating.Load() && border:
		return
	case r.thin.Load() && !border && !owned && e.Kind != trace.Rerun && e.Kind != trace.Spill && e.Kind != trace.Decide:
		return
	}
	if !e.Kind.Span() {
		e.Step = int(r.step.Load())
	}
	r.to.Emit(e)
}

// fullInterval is the number of steps from one that is traced in full to the next, once
// the trace is half full. A long run thus also shows its last part.
const fullInterval = 50

// beginStep announces the next step, and whether it is the last.
func (t *tracing) beginStep(step int, last bool) {
	if t == nil {
		return
	}
	t.step.Store(int64(step))
	t.begun++
	t.evaluating.Store(false)
	full := true
	for _, r := range t.ranks {
		full = full && r.file.size.Load() < t.limit/2
	}
	thin := !full && !last && step%fullInterval != 0
	if t.thin.Store(thin); thin && t.thinned == 0 {
		t.thinned = step
	}
}

// endStep announces the end of the step.
func (t *tracing) endStep() {
	if t != nil {
		t.evaluating.Store(true)
	}
}

// evaluate announces an evaluation and returns what announces its end.
func (t *tracing) evaluate() (end func()) {
	if t == nil {
		return func() {}
	}
	return t.evaluations.begin(device.Now)
}

// gaps says which steps the traces leave out, or returns "" if they leave out none.
func (t *tracing) gaps() string {
	if t == nil || t.thinned == 0 {
		return ""
	}
	return fmt.Sprintf("from step %d on one step in %d", t.thinned, fullInterval)
}

// attach writes the traces to a run's folder. part counts the resumptions before. The
// first part replaces the traces of an earlier run, which it renames. stepped is set if the
// last run in the folder did a step. attach returns the files and folders that it created,
// and the new names of those that it renamed.
func (t *tracing) attach(d disk.FS, dir string, part int, stepped bool) (made, aside []string, err error) {
	folder := filepath.Join(dir, report.TraceFolder)
	if made, err = disk.MakeAll(d, folder); err != nil {
		return nil, nil, t.fail(fmt.Errorf("cannot create %s: %w", folder, input.Cause(err)))
	}
	names, err := d.List(folder)
	if err == nil && part == 0 && !stepped && slices.ContainsFunc(names, isAside) {
		if err := restoreTraces(d, folder, names); err != nil {
			return made, nil, t.fail(fmt.Errorf("cannot restore the traces in %s: %w", folder, input.Cause(err)))
		}
		names, err = d.List(folder)
	}
	if err != nil {
		return made, nil, t.fail(fmt.Errorf("cannot read %s: %w", folder, input.Cause(err)))
	}
	for _, name := range names {
		path := filepath.Join(folder, name)
		switch {
		case isAside(name): // of a run that a killed one replaced
			err = cmp.Or(err, replaced(path, d.Remove(path)))
		case part == 0 && tracePart(name) >= 0:
			to := filepath.Join(folder, setAside(name))
			if e := d.Rename(path, to); e != nil {
				err = cmp.Or(err, replaced(path, e))
				continue
			}
			aside = append(aside, to)
		}
	}
	opened, e := t.openAll(d, dir, part)
	if err = cmp.Or(err, e); err == nil {
		if err = d.SyncDir(folder); err != nil {
			err = fmt.Errorf("cannot write %s: %w", folder, input.Cause(err))
		}
	}
	return append(made, opened...), aside, t.fail(err)
}

// replaced words the error of a trace of an earlier run that was in the way.
func replaced(path string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("cannot replace %s: %w", path, input.Cause(err))
}

// openAll creates the files of the traces.
func (t *tracing) openAll(d disk.FS, dir string, part int) (made []string, err error) {
	for _, r := range t.ranks {
		path := filepath.Join(dir, report.TraceName(r.rank, part))
		if e := r.file.open(d, path); e != nil {
			err = cmp.Or(err, e)
			continue
		}
		made = append(made, path)
	}
	return made, err
}

// setAside returns the name that a trace has until the run that replaces it cannot be
// undone any more. No reader takes such a file for a trace.
func setAside(name string) string { return "." + name + ".before" }

// putBack returns the name of a trace before setAside.
func putBack(name string) string { return strings.TrimSuffix(strings.TrimPrefix(name, "."), ".before") }

// isAside reports whether setAside returned a name.
func isAside(name string) bool {
	aside, _ := filepath.Match(setAside("rank-*.trace"), name)
	return aside
}

// restoreTraces puts traces back that a run set aside which was killed in its first step.
// They take the place of what that run traced.
func restoreTraces(d disk.FS, folder string, names []string) (err error) {
	for _, name := range names {
		if tracePart(name) >= 0 {
			err = cmp.Or(err, d.Remove(filepath.Join(folder, name)))
		}
	}
	for _, name := range names {
		if isAside(name) {
			err = cmp.Or(err, d.Rename(filepath.Join(folder, name), filepath.Join(folder, putBack(name))))
		}
	}
	return err
}

// tracePart returns the part of a trace's name, or -1 if the name is not that of a trace.
func tracePart(name string) (part int) {
	var rank int
	if n, _ := fmt.Sscanf(name, "rank-%d.%d.trace", &rank, &part); n < 2 {
		part = 0
	}
	if filepath.Join(report.TraceFolder, name) != report.TraceName(rank, part) {
		return -1
	}
	return part
}

// fail gives up on all files if one cannot be written.
func (t *tracing) fail(err error) error {
	if err != nil {
		for _, r := range t.ranks {
			r.file.lose(err)
		}
	}
	return err
}

// close closes the traces. The devices that write to them must be closed before.
func (t *tracing) close() (err error) {
	if t == nil {
		return nil
	}
	for _, r := range t.ranks {
		err = cmp.Or(err, r.w.Close(), r.file.close())
	}
	return err
}

// nextPart returns the number of the trace's part that a resumed run writes.
func nextPart(d disk.FS, dir string) (part int) {
	names, _ := d.List(filepath.Join(dir, report.TraceFolder)) // without a folder there are none
	for _, name := range names {
		part = max(part, tracePart(name)+1)
	}
	return part
}

// lateFile is a file that can be written to before it is opened: devices report memory
// before a run has its folder.
type lateFile struct {
	mu     sync.Mutex
	before bytes.Buffer
	path   string // once it is open
	f      disk.Output
	err    error
	size   atomic.Int64
}

func (l *lateFile) Write(p []byte) (n int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.size.Add(int64(len(p)))
	switch {
	case l.err != nil:
		return 0, l.err
	case l.f == nil:
		return l.before.Write(p)
	}
	if n, err = l.f.Write(p); err != nil {
		l.err = l.failed(err)
	}
	return n, l.err
}

func (l *lateFile) open(d disk.FS, path string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.path = path
	f, err := d.Create(path)
	if err == nil {
		l.f = f
		_, err = l.before.WriteTo(l.f)
	}
	if l.err = nil; err != nil {
		l.err = l.failed(err)
	}
	return l.err
}

// failed adds the path to an error.
func (l *lateFile) failed(err error) error {
	return fmt.Errorf("cannot write %s: %w", l.path, input.Cause(err))
}

// lose drops what was written and refuses more.
func (l *lateFile) lose(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = cmp.Or(l.err, err)
	l.before = bytes.Buffer{}
}

// close syncs the file and closes it.
func (l *lateFile) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.f == nil {
		return nil
	}
	err := cmp.Or(l.f.Sync(), l.f.Close())
	if err != nil {
		err = l.failed(err)
	}
	l.f, l.err = nil, cmp.Or(l.err, errors.New("the trace is closed"))
	return err
}
