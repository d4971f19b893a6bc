// This file owns the reading of run folders. Runs are stopped and disks are full: what
// is missing or damaged becomes a sentence, and the rest is shown.

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

	"github.com/stowage-dev/stowage/trace"
)

// mostText is what is read of a file that is not a trace or metrics.
const mostText = 16 << 20

// Read makes a report of run folders; one that holds a comparison stands for all of its
// runs. A folder with nothing to show is left out, with a sentence in Missing; where all
// are such there is an error, that of the first.
func Read(dirs ...string) (*Report, error) {
	r := &Report{Title: "Stowage", Runs: []Run{}, Missing: []string{}}
	var titles []string
	var first error
	seen := map[string]bool{}
	for _, dir := range dirs {
		runs, err := read(dir)
		if err != nil {
			if first == nil {
				first = err
			}
			r.Missing = append(r.Missing, fmt.Sprintf("%v; it is left out", err))
			continue
		}
		n := len(runs)
		runs = slices.DeleteFunc(runs, func(x Run) bool {
			was := seen[onePath(x.path)]
			seen[onePath(x.path)] = true
			return was
		})
		if n > 0 && len(runs) == 0 {
			r.Missing = append(r.Missing, fmt.Sprintf("%s is named twice, and shown once", dir))
			continue
		}
		titles = append(titles, base(dir))
		r.Runs = append(r.Runs, runs...)
	}
	if first != nil && len(r.Runs) == 0 {
		return nil, first
	}
	if len(titles) > 0 {
		r.Title = strings.Join(titles, ", ")
	}
	if len(titles) > 1 {
		mixed(r.Runs)
	}
	return r, nil
}

func base(dir string) string {
	if full, err := filepath.Abs(dir); err == nil {
		dir = full
	}
	return filepath.Base(dir)
}

// read is a folder's run, or those of a comparison.
func read(dir string) ([]Run, error) {
	run, err := Load(dir)
	if err == nil {
		run.path, run.folder = dir, base(dir)
		return []Run{run}, nil
	}
	var nothing *Nothing
	if !errors.As(err, &nothing) || !nothing.Folder {
		return nil, err
	}
	var all []Run
	env, missing := environment(dir)
	for _, name := range members(dir, env.Runs) {
		run, cannot := Load(filepath.Join(dir, name))
		if cannot != nil {
			if slices.Contains(env.Runs, name) {
				missing = append(missing, fmt.Sprintf("the folder %s of the comparison has no run in it, and is left out", name))
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
		run.Missing = slices.DeleteFunc(run.Missing, func(s string) bool { return strings.HasPrefix(s, EnvironmentFile+" is not there") })
		all = append(all, run)
	}
	if len(all) == 0 {
		return nil, err
	}
	all[0].Missing = append(all[0].Missing, missing...)
	return all, nil
}

// members are the folders in a folder: those that are known first, in their order.
func members(dir string, known []string) []string {
	out := slices.DeleteFunc(slices.Clone(known), func(name string) bool { return !filepath.IsLocal(name) })
	list, _ := os.ReadDir(dir) // what cannot be listed has none
	for _, f := range list {
		if f.IsDir() && !slices.Contains(out, f.Name()) {
			out = append(out, f.Name())
		}
	}
	return out
}

// Nothing is a path without a run.
type Nothing struct {
	Path, Why string
	Folder    bool // it is a folder that can be looked into
}

func (e *Nothing) Error() string { return fmt.Sprintf("%s %s", e.Path, e.Why) }

const giveRun = "give the folder that `stowage train --out` wrote, or a file of traces"

// Load reads a run's folder, or a single trace. There is an error, a *Nothing, only if
// nothing is there; everything else that is wrong is in the run's Missing.
func Load(dir string) (Run, error) {
	run := Run{
		Name: base(dir), Environment: map[string]string{}, Figures: []Figure{}, Ranks: []Rank{}, Missing: []string{}, Steps: newSteps(),
	}
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return run, &Nothing{Path: dir, Why: "is not there; " + giveRun}
	case err != nil:
		return run, &Nothing{Path: dir, Why: fmt.Sprintf("cannot be read: %v", pathless(err))}
	case !info.IsDir():
		return run, run.lone(dir)
	}
	if _, err := os.ReadDir(dir); err != nil {
		return run, &Nothing{Path: dir, Why: fmt.Sprintf("cannot be read: %v", pathless(err))}
	}
	found := run.readOptions(dir)
	found = run.readMetrics(dir) || found
	sum, ok := run.readSummary(dir)
	found = ok || found
	found = run.readTraces(dir) || found
	if !found {
		return run, &Nothing{Path: dir, Why: "holds no run; " + giveRun, Folder: true}
	}
	env, missing := environment(dir)
	if up, ok := above(dir); ok && !exists(filepath.Join(dir, EnvironmentFile)) {
		env, missing = up, nil
	}
	run.Missing = append(run.Missing, missing...)
	run.Command, run.Environment = env.Command, machine(env)
	run.apply(sum)
	return run, nil
}

// lone reads one trace without a run around it.
func (r *Run) lone(path string) error {
	t, err := ReadTrace(path)
	if err != nil {
		return &Nothing{Path: path, Why: "is a file, and no trace; " + giveRun}
	}
	r.Name = strings.TrimSuffix(r.Name, ".trace")
	r.Missing = append(r.Missing, "this is a single trace: what else a run's folder has is not there")
	var early, full lacks
	early.cut(filepath.Base(path), t)
	full.dropped(filepath.Base(path), t)
	r.lacking(lacks{}, early, full)
	r.Ranks = append(r.Ranks, FromTrace(t))
	r.apply(summary{})
	return nil
}

func (r *Run) miss(format string, args ...any) {
	r.Missing = append(r.Missing, fmt.Sprintf(format, args...))
}

// pathless is an error without the path, which the sentence around it has.
func pathless(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

// text reads a small file; what is wrong with it is a sentence, or nothing.
func text(dir, name string) (data []byte, wrong string) {
	f, err := os.Open(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, name + " is not there"
	}
	if err == nil {
		defer f.Close()
		data, err = io.ReadAll(io.LimitReader(f, mostText))
	}
	switch {
	case err != nil:
		return nil, fmt.Sprintf("%s cannot be read: %v", name, pathless(err))
	case len(data) == 0:
		return nil, name + " is empty"
	}
	return data, ""
}

func (r *Run) readOptions(dir string) bool {
	data, wrong := text(dir, ConfigFile)
	if wrong != "" {
		// The runs of a comparison have none; others that lack it lack more.
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

// ReadEnvironment reads environment.json in a run's folder; what cannot be read is empty.
func ReadEnvironment(dir string) Environment {
	env, _ := environment(dir)
	return env
}

func environment(dir string) (env Environment, missing []string) {
	data, wrong := text(dir, EnvironmentFile)
	if wrong == "" {
		if err := json.Unmarshal(data, &env); err != nil {
			wrong = fmt.Sprintf("%s is damaged (%v)", EnvironmentFile, err)
		}
	}
	if wrong != "" {
		missing = append(missing, wrong+"; the command and the machine are not known")
	}
	return env, missing
}

// above is the environment of the comparison that a folder is of, if it is of one: the
// comparison has it once for all of its runs.
func above(dir string) (env Environment, ok bool) {
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

// machine is the environment as the page shows it.
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

// readTraces reads the traces of all ranks, one rank after the other: of a million
// events each, one takes 150 MB.
func (r *Run) readTraces(dir string) (found bool) {
	files := TraceFiles(dir)
	if len(files) == 0 {
		r.miss("there are no traces: memory over time, streams and copies are not shown")
		return false
	}
	var left, early, full lacks
	for len(files) > 0 {
		n := 1
		for n < len(files) && files[n].Rank == files[0].Rank {
			n++
		}
		var parts []*trace.Trace
		for _, f := range files[:n] {
			name := filepath.Join(TraceFolder, filepath.Base(f.Path))
			t, err := ReadTrace(f.Path)
			if err != nil {
				left.add(name, f.Rank)
				left.why = cmp.Or(left.why, pathless(err))
				continue
			}
			t.Header.Rank = f.Rank
			early.cut(name, t)
			full.dropped(name, t)
			parts = append(parts, t)
		}
		if len(parts) > 0 {
			found = true
			r.Ranks = append(r.Ranks, FromTrace(parts...))
		}
		files = files[n:]
	}
	r.lacking(left, early, full)
	return found
}

// lacks are the traces that lack the same.
type lacks struct {
	names  []string
	ranks  []int // without repetition
	why    error // of the first
	events int64 // of all
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

// lacking says what traces lack, once for all of them: ranks of one run share a fate.
func (r *Run) lacking(left, early, full lacks) {
	switch len(left.names) {
	case 0:
	case 1:
		r.miss("%s is left out: %s", left.names[0], strings.TrimPrefix(left.why.Error(), "trace: "))
	default:
		r.miss("%d traces of %s are left out (the first: %s)", len(left.names), ranksText(left.ranks), strings.TrimPrefix(left.why.Error(), "trace: "))
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
		r.miss("%s was full: it lacks %d events, those after the last that are shown", full.names[0], full.events)
	default:
		r.miss("%d traces of %s were full: they lack %d events, those after the last that are shown", len(full.names), ranksText(full.ranks), full.events)
	}
}

// ranksText names ranks, which are in order.
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

// ReadTrace reads a trace's file.
func ReadTrace(path string) (*trace.Trace, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return trace.Read(bufio.NewReaderSize(f, 1<<20))
}
