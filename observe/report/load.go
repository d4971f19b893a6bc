// This file owns reading the folders of runs. A run may have been stopped or a disk
// full: each thing that is missing or damaged becomes a sentence, and the rest is shown.

package report

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// mostText is how many bytes are read of a file that is neither a trace nor metrics.
const mostText = 16 << 20

// Read returns the report of one or more runs, given their folders. A folder of a
// comparison stands for all runs of it, and the file of a single trace for a run. Read
// leaves out a folder without a run and says so in Missing. It returns the error of the
// first folder, a [*NoRunError], if none of them has a run.
func Read(dirs ...string) (*Report, error) { return ReadRecent(0, dirs...) }

// ReadRecent returns what Read does, but of a run that was resumed it reads only the
// latest traces, of most bytes together, and says in Missing what it leaves out. The
// traces since the last resumption are always read. Zero stands for no limit. A training
// process reads its own report this way: traces grow with each resumption.
func ReadRecent(most int64, dirs ...string) (*Report, error) {
	r := &Report{Title: "Stowage", Runs: []Run{}, Missing: []string{}}
	var titles []string
	var first error
	seen, began := map[string]bool{}, beginnings{}
	for _, dir := range dirs {
		began.look(dir)
	}
	for _, dir := range dirs {
		runs, err := read(dir, most, began)
		if err != nil {
			if first == nil {
				first = err
			}
			r.Missing = append(r.Missing, fmt.Sprintf("%v; it is left out", err))
			continue
		}
		n := len(runs)
		runs = slices.DeleteFunc(runs, func(x Run) bool {
			was := seen[canonical(x.path)]
			seen[canonical(x.path)] = true
			return was
		})
		if n > 0 && len(runs) == 0 {
			r.Missing = append(r.Missing, fmt.Sprintf("%s is named twice; it is shown once", dir))
			continue
		}
		titles = append(titles, base(dir))
		r.Runs = append(r.Runs, runs...)
	}
	if first != nil && len(r.Runs) == 0 {
		return nil, first
	}
	r.Runs = merge(r.Runs)
	for i := range r.Runs {
		r.Runs[i].finish()
	}
	if len(titles) > 0 {
		r.Title = strings.Join(titles, ", ")
	}
	if len(titles) > 1 {
		combine(r.Runs)
	}
	return r, nil
}

func base(dir string) string {
	if full, err := filepath.Abs(dir); err == nil {
		dir = full
	}
	return filepath.Base(dir)
}

// read returns the run of a folder, or all runs of a comparison.
func read(dir string, most int64, began beginnings) ([]Run, error) {
	compared := dir
	if full, err := filepath.Abs(dir); err == nil {
		if _, ok := ofComparison(dir); ok {
			compared = filepath.Dir(full)
		}
	}
	replacing := watchReplacing(compared)
	run, err := loadRun(dir, most, began)
	if err == nil {
		if s := replacing(); s != "" {
			run.miss("%s", s)
		}
		run.path, run.folder = dir, base(dir)
		return []Run{run}, nil
	}
	var nothing *NoRunError
	if !errors.As(err, &nothing) || !nothing.Folder {
		return nil, err
	}
	noEnvironment := func(s string) bool { return strings.HasPrefix(s, EnvironmentFile+" is not there") }
	var all []Run
	env, missing := environment(dir)
	for _, name := range members(dir, env.Runs) {
		run, cannot := loadRun(filepath.Join(dir, name), most, began)
		if cannot != nil {
			if slices.Contains(env.Runs, name) {
				missing = append(missing, fmt.Sprintf("the folder %s of the comparison has no run in it; it is left out", name))
			}
			continue
		}
		run.Name, run.path, run.folder = name, filepath.Join(dir, name), base(dir)+"/"+name
		if run.Command == "" {
			run.Command = env.Command
		}
		if len(run.Environment) == 0 {
			run.Environment = machine(env)
		}
		run.Missing = slices.DeleteFunc(run.Missing, noEnvironment)
		all = append(all, run)
	}
	if len(all) == 0 {
		return nil, err
	}
	if !slices.ContainsFunc(all, func(r Run) bool { return r.Command == "" }) {
		missing = slices.DeleteFunc(missing, noEnvironment) // the folder holds runs, each with its own
	}
	if s := replacing(); s != "" {
		missing = append(missing, s)
	}
	all[0].Missing = append(all[0].Missing, missing...)
	return all, nil
}

// members returns the folders in dir: first the known ones, in their order.
func members(dir string, known []string) []string {
	out := slices.DeleteFunc(slices.Clone(known), func(name string) bool { return !filepath.IsLocal(name) })
	list, _ := os.ReadDir(dir) // a folder that cannot be listed has no members
	for _, f := range list {
		if f.IsDir() && !slices.Contains(out, f.Name()) {
			out = append(out, f.Name())
		}
	}
	return out
}

// NoRunError reports a path that has no run.
type NoRunError struct {
	Path, Why string
	Folder    bool // whether the path is a readable folder
}

// Error returns the path and what is wrong with it.
func (e *NoRunError) Error() string { return fmt.Sprintf("%s %s", e.Path, e.Why) }

const expectRun = "expected the folder of a run, or a trace"

// loadRun reads a run's folder or a single trace. It returns a *NoRunError if nothing
// can be shown. All other problems are in the run's Missing. Of its traces it reads the
// latest, of most bytes.
func loadRun(dir string, most int64, began beginnings) (Run, error) {
	run := Run{
		Name: base(dir), Environment: map[string]string{}, Figures: []Figure{}, Ranks: []Rank{}, Missing: []string{}, Steps: newSteps(),
	}
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return run, &NoRunError{Path: dir, Why: "is not there; " + expectRun}
	case err != nil:
		return run, &NoRunError{Path: dir, Why: fmt.Sprintf("cannot be read: %v", input.Cause(err))}
	case !info.IsDir():
		return run, run.readSingleTrace(dir, began)
	}
	if _, err := os.ReadDir(dir); err != nil {
		return run, &NoRunError{Path: dir, Why: fmt.Sprintf("cannot be read: %v", input.Cause(err))}
	}
	found := run.readOptions(dir)
	found = run.readMetrics(dir) || found
	sum, ok := run.readSummary(dir)
	sum = run.upToDate(sum)
	found = ok || found
	found = run.readTraces(dir, most, began) || found
	run.compareFiles(dir, sum)
	if !found {
		return run, &NoRunError{Path: dir, Why: "holds no run; " + expectRun, Folder: true}
	}
	env, missing := environment(dir)
	if up, ok := ofComparison(dir); ok && !exists(filepath.Join(dir, EnvironmentFile)) {
		env, missing = up, nil
	}
	run.Missing = append(run.Missing, missing...)
	run.Command, run.Environment = env.Command, machine(env)
	run.apply(sum)
	return run, nil
}

// readSingleTrace reads a trace outside of a run's folder.
func (r *Run) readSingleTrace(path string, began beginnings) error {
	t, err := readPacked(path)
	var wrong *fs.PathError
	switch {
	case errors.As(err, &wrong):
		return &NoRunError{Path: path, Why: fmt.Sprintf("cannot be read: %v", wrong.Err)}
	case err != nil:
		return &NoRunError{Path: path, Why: "is a file but not a trace; " + expectRun}
	}
	r.Name = strings.TrimSuffix(r.Name, ".trace")
	r.miss("this is a single trace; it comes without the other files of a run")
	var early, full lacks
	early.cut(filepath.Base(path), t)
	full.dropped(filepath.Base(path), t)
	r.lacking(lacks{}, early, full)
	r.placed(t.Header)
	r.Ranks = append(r.Ranks, newRank([]int64{began.of(t.Header, partOf(path))}, []*trace.Trace{t}))
	r.apply(summary{})
	return nil
}

// miss adds a sentence to Missing.
func (r *Run) miss(format string, args ...any) {
	r.Missing = append(r.Missing, fmt.Sprintf(format, args...))
}

// text reads a small file. If it cannot, wrong says why.
func text(dir, name string) (data []byte, wrong string) {
	data, err := input.ReadFile(filepath.Join(dir, name), mostText)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, name + " is not there"
	case err != nil:
		return nil, fmt.Sprintf("%s cannot be read: %v", name, input.Cause(err))
	case len(data) == 0:
		return nil, name + " is empty"
	}
	return data, ""
}

func (r *Run) readOptions(dir string) bool {
	data, wrong := text(dir, ConfigFile)
	if wrong != "" {
		// The runs of a comparison have no options of their own.
		if !strings.HasSuffix(wrong, "not there") {
			r.miss("%s; the options are not shown", wrong)
		}
		return false
	}
	if r.Options = string(data); !utf8.ValidString(r.Options) {
		r.Options = ""
		r.miss("%s is damaged; the options are not shown", ConfigFile)
	}
	return true
}

// ReadEnvironment returns the environment.json of a run's folder. It is empty if the
// file cannot be read.
func ReadEnvironment(dir string) Environment {
	env, _ := environment(dir)
	return env
}

func environment(dir string) (env Environment, missing []string) {
	data, wrong := text(dir, EnvironmentFile)
	if wrong == "" {
		if err := json.Unmarshal(data, &env); err != nil {
			wrong = fmt.Sprintf("%s is damaged (%v)", EnvironmentFile, input.Plain(err))
		}
	}
	if wrong != "" {
		missing = append(missing, wrong+"; the command and the machine are not known")
	}
	return env, missing
}

// ofComparison returns the environment of the comparison that a folder belongs to, if
// it belongs to one. A comparison has one environment for all of its runs.
func ofComparison(dir string) (env Environment, ok bool) {
	full, err := filepath.Abs(dir)
	if err != nil {
		return env, false
	}
	env = ReadEnvironment(filepath.Dir(full))
	return env, slices.Contains(env.Runs, filepath.Base(full))
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// machine returns the environment as the page shows it.
func machine(env Environment) map[string]string {
	out := map[string]string{}
	for k, v := range env.Machine {
		out[k] = v
	}
	if env.Began != "" {
		out["began"] = env.Began
	}
	return out
}

// readTraces reads the traces of all ranks, one rank at a time: a trace takes a few times
// the memory of its file.
func (r *Run) readTraces(dir string, most int64, began beginnings) (found bool) {
	began.look(dir)
	fellows := fellows{}
	files, old, bytes := recent(TraceFiles(dir), most)
	if len(files) == 0 {
		r.miss("there are no traces; memory over time, streams and copies are not shown")
		return false
	}
	if old > 0 {
		r.miss("to be made quickly, this page leaves out %s of earlier parts of the run (%s); a report that is made after the run shows all",
			plural(old, "trace", "traces"), memory.Bytes(bytes).Short())
	}
	var left, early, full lacks
	for len(files) > 0 {
		n := 1
		for n < len(files) && files[n].Rank == files[0].Rank {
			n++
		}
		var parts []*trace.Trace
		var later []int64
		for _, f := range files[:n] {
			name := filepath.Join(TraceFolder, filepath.Base(f.Path))
			t, err := readPacked(f.Path)
			if err != nil {
				left.add(name, f.Rank)
				left.why = cmp.Or(left.why, input.Cause(err))
				continue
			}
			t.Header.Rank = f.Rank
			if why := fellows.strange(t.Header, f.Part); why != "" {
				r.miss("%s is left out: %s", name, why)
				continue
			}
			early.cut(name, t)
			full.dropped(name, t)
			r.placed(t.Header)
			parts, later = append(parts, t), append(later, began.of(t.Header, f.Part))
		}
		if len(parts) > 0 {
			found = true
			r.Ranks = append(r.Ranks, newRank(later, parts))
		}
		files = files[n:]
	}
	r.lacking(left, early, full)
	return found
}

// compareFiles adds what the summary has and other files lack.
func (r *Run) compareFiles(dir string, sum summary) {
	var without []int
	files := TraceFiles(dir)
	for _, x := range sum.ranks {
		if len(files) > 0 && !slices.ContainsFunc(files, func(f TraceFile) bool { return f.Rank == x.Rank }) {
			without = append(without, x.Rank)
		}
	}
	if len(without) > 0 {
		slices.Sort(without)
		r.miss(noTrace+"%s; what it would show is left out", ranksText(without))
	}
	i := slices.IndexFunc(sum.figures, func(f Figure) bool { return f.Name == "steps" })
	if n := len(r.Steps.Step); i >= 0 && n > 0 && sum.figures[i].Value > float64(r.Steps.Step[n-1]) {
		r.miss("%s ends after step %d of the %.0f that the summary has", MetricsFile, r.Steps.Step[n-1], sum.figures[i].Value)
	}
}

// lacks collects the traces that have the same defect.
type lacks struct {
	names  []string
	ranks  []int // each once
	why    error // of the first trace
	events int64 // that all traces lack
}

func (l *lacks) add(name string, rank int) {
	if l.names = append(l.names, name); !slices.Contains(l.ranks, rank) {
		l.ranks = append(l.ranks, rank)
	}
}

func (l *lacks) cut(name string, t *trace.Trace) {
	if t.Cut != nil {
		l.add(name, t.Header.Rank)
		l.why = cmp.Or(l.why, t.Cut)
	}
}

func (l *lacks) dropped(name string, t *trace.Trace) {
	if t.Dropped > 0 {
		l.add(name, t.Header.Rank)
		l.events += t.Dropped
	}
}

// lacking describes the defects of traces. The ranks of a run usually have the same, so
// there is one sentence for all.
func (r *Run) lacking(left, early, full lacks) {
	switch len(left.names) {
	case 0:
	case 1:
		r.miss("%s is left out: %s", left.names[0], inFewWords{left.why})
	default:
		r.miss("%d traces of %s are left out (the first: %s)", len(left.names), ranksText(left.ranks), inFewWords{left.why})
	}
	switch len(early.names) {
	case 0:
	case 1:
		r.miss("%s ends early (%v); what it has is shown", early.names[0], early.why)
	default:
		r.miss("%d traces of %s end early (the first: %v); what they have is shown", len(early.names), ranksText(early.ranks), early.why)
	}
	switch len(full.names) {
	case 0:
	case 1:
		r.miss("%s was full and lacks the last %d events", full.names[0], full.events)
	default:
		r.miss("%d traces of %s were full and lack the last %d events", len(full.names), ranksText(full.ranks), full.events)
	}
}

// ranksText names ranks, which must be sorted.
func ranksText(ranks []int) string {
	n := len(ranks)
	switch {
	case n == 1:
		return fmt.Sprintf("rank %d", ranks[0])
	case n > 2 && ranks[n-1]-ranks[0] == n-1:
		return fmt.Sprintf("ranks %d to %d", ranks[0], ranks[n-1])
	}
	words := make([]string, n)
	for i, k := range ranks {
		words[i] = fmt.Sprint(k)
	}
	return "ranks " + strings.Join(words[:n-1], ", ") + " and " + words[n-1]
}

// mostTrace is the most bytes of a trace that is read: four times what a run writes.
const mostTrace = 256 << 20

// ReadTrace reads the file of a trace.
func ReadTrace(path string) (*trace.Trace, error) { return readTrace(path, trace.Read) }

// readPacked reads the file of a trace without unpacking its events.
func readPacked(path string) (*trace.Trace, error) { return readTrace(path, trace.ReadPacked) }

func readTrace(path string, read func(io.Reader) (*trace.Trace, error)) (*trace.Trace, error) {
	f, err := input.Open(path, mostTrace)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return read(bufio.NewReaderSize(f, 1<<20))
}
