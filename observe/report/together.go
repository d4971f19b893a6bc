// This file owns runs whose ranks live in several processes, maybe on several machines:
// which traces belong together, and the one clock that they are shown on. Every process
// writes the traces of its ranks; their headers name the run and the machine, and give
// their beginning on the clock of rank 0.

package report

import (
	"fmt"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stowage-dev/stowage/observe/trace"
)

// beginnings are the times at which the parts of runs began on their first rank, by the
// name of the run and the part.
type beginnings map[beginning]int64

type beginning struct {
	run  string
	part int
}

// add notes the beginning of a trace.
func (b beginnings) add(h trace.Header, part int) {
	k := beginning{h.Run, part}
	if first, ok := b[k]; h.Run != "" && (!ok || h.Began < first) {
		b[k] = h.Began
	}
}

// of returns how much later than the first rank of its run a trace began. It returns zero
// for ranks that live in one process, which begin together.
func (b beginnings) of(h trace.Header, part int) int64 {
	first, ok := b[beginning{h.Run, part}]
	if !ok || h.Began < first {
		return 0
	}
	return int64(min(uint64(h.Began)-uint64(first), latest))
}

// headBytes is enough for the header of a trace.
const headBytes = 2 << 10

// readHeader reads the header of a trace.
func readHeader(path string) (trace.Header, error) {
	t, err := readTrace(path, func(r io.Reader) (*trace.Trace, error) { return trace.ReadPacked(io.LimitReader(r, headBytes)) })
	if err != nil {
		return trace.Header{}, err
	}
	return t.Header, nil
}

// look notes the beginnings of all traces of a folder, or of the file of one.
func (b beginnings) look(path string) {
	files := TraceFiles(path)
	if len(files) == 0 {
		files = []TraceFile{{Path: path, Part: partOf(path)}}
	}
	for _, f := range files {
		if h, err := readHeader(f.Path); err == nil {
			b.add(h, f.Part)
		}
	}
}

// partOf returns the part that the name of a trace says.
func partOf(path string) int {
	m := traceName.FindStringSubmatch(filepath.Base(path))
	if m == nil {
		return 0
	}
	part, _ := strconv.Atoi(m[2]) // the first part has no number
	return part
}

// fellows decides which traces of a folder belong together. All parts of a run are in one
// folder, and each part has a name of its own.
type fellows map[int]trace.Header // by part: of the first rank

// strange says why a trace does not belong to those before it, or returns "".
func (f fellows) strange(h trace.Header, part int) string {
	first, ok := f[part]
	switch {
	case !ok:
		f[part] = h
	case h.Run != first.Run:
		return fmt.Sprintf("it is of another run than that of rank %d", first.Rank)
	case h.Ranks != first.Ranks:
		return fmt.Sprintf("it is of a run of %d ranks, and that of rank %d of %d", h.Ranks, first.Rank, first.Ranks)
	}
	return ""
}

// placed notes where the ranks of a run live.
func (r *Run) placed(h trace.Header) {
	if h.Run == "" {
		return
	}
	r.id, r.world, r.within = h.Run, max(r.world, min(h.Ranks, mostRanks)), max(r.within, h.Within)
	if r.hosts == nil {
		r.hosts = map[string][]int{}
	}
	if !slices.Contains(r.hosts[h.Host], h.Rank) {
		r.hosts[h.Host] = append(r.hosts[h.Host], h.Rank)
	}
}

// mostRanks is the most ranks of a run that are looked for.
const mostRanks = 1 << 16

const noTrace = "there is no trace of "

// finish says what a run of several processes lacks, and where its ranks live.
func (r *Run) finish() {
	if r.id == "" {
		return
	}
	r.Missing = slices.DeleteFunc(r.Missing, func(s string) bool { return strings.HasPrefix(s, noTrace) })
	var without []int
	for rank := range r.world {
		if !r.traced(rank) {
			without = append(without, rank)
		}
	}
	if len(without) > 0 {
		r.miss(noTrace+"%s of %d; what it would show is left out", ranksText(without), r.world)
	}
	var hosts []string
	for h, ranks := range r.hosts {
		slices.Sort(ranks)
		hosts = append(hosts, fmt.Sprintf("%s (%s)", h, ranksText(ranks)))
	}
	slices.Sort(hosts)
	r.Environment["hosts"] = strings.Join(hosts, ", ")
	r.Environment["clock"] = "that of rank 0"
	if r.within > 0 {
		r.Environment["clock"] += fmt.Sprintf(", within %v at the start", time.Duration(min(r.within, math.MaxInt64-1)).Round(time.Microsecond/10))
	}
}

// traced reports whether a trace of the rank was read. Other ranks of a run have what its
// summary says of them.
func (r *Run) traced(rank int) bool {
	for _, ranks := range r.hosts {
		if slices.Contains(ranks, rank) {
			return true
		}
	}
	return false
}

// merge puts the ranks of one run together that were found in several places.
func merge(runs []Run) (out []Run) {
	for _, x := range runs {
		i := slices.IndexFunc(out, func(o Run) bool { return x.id != "" && o.id == x.id && o.disjoint(&x) })
		if i < 0 {
			out = append(out, x)
			continue
		}
		o := &out[i]
		if o.Options == "" && x.Options != "" { // the place of rank 0 has the other files
			*o, x = x, *o
		}
		o.take(&x)
	}
	return out
}

// disjoint reports whether no rank has a trace in both runs.
func (r *Run) disjoint(x *Run) bool {
	return !slices.ContainsFunc(r.Ranks, func(k Rank) bool { return r.traced(k.Rank) && x.traced(k.Rank) })
}

// take adds the ranks that another place has traces of.
func (r *Run) take(x *Run) {
	for _, k := range x.Ranks {
		if !x.traced(k.Rank) {
			continue
		}
		i := slices.IndexFunc(r.Ranks, func(o Rank) bool { return o.Rank == k.Rank })
		if i < 0 {
			r.Ranks = append(r.Ranks, k)
			continue
		}
		said := r.Ranks[i]
		k.Policy, k.Counts, k.Pools = append(k.Policy, said.Policy...), append(k.Counts, said.Counts...), append(k.Pools, said.Pools...)
		r.Ranks[i] = k
	}
	slices.SortFunc(r.Ranks, func(a, b Rank) int { return a.Rank - b.Rank })
	for h, ranks := range x.hosts {
		r.hosts[h] = append(r.hosts[h], ranks...)
	}
	r.within, r.world = max(r.within, x.within), max(r.world, x.world)
	for i := range r.Figures { // without a summary they are those of the traces
		for _, f := range x.Figures {
			if r.Options == "" && f.Unit == Bytes && f.Name == r.Figures[i].Name {
				r.Figures[i].Value = max(r.Figures[i].Value, f.Value)
			}
		}
	}
	for _, s := range x.Missing {
		if !slices.Contains(r.Missing, s) && !strings.HasPrefix(s, EnvironmentFile) {
			r.Missing = append(r.Missing, s)
		}
	}
}
