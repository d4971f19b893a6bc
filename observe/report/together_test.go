// This file owns the tests of runs whose ranks live in several processes.

package report

import (
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// skewed returns the trace of a rank in a process of its own, which began so many
// milliseconds after that of rank 0, on the clock of rank 0. The clock of its machine is
// an hour off for each rank.
func skewed(rank, ranks int, run string, later float64) *trace.Trace {
	s := newScribe(rank)
	s.own(memory.Device, "parameters", mib)
	s.step(1, kib)
	s.step(2, kib)
	for i := range s.t.Events {
		s.t.Events[i].Rank = rank
	}
	hour := int64(3600e9)
	s.t.Header = trace.Header{
		Rank: rank, Began: 1_700_000_000_000_000_000 + int64(later*1e6), Compute: "compute",
		Run: run, Ranks: ranks, Host: fmt.Sprint("node", rank/2), Process: 100 + rank, Offset: -hour * int64(rank), Within: 1000 * int64(rank),
	}
	return &s.t
}

// near compares milliseconds that were rounded to microseconds.
func near(a, b float64) bool { return math.Abs(a-b) < 0.0021 }

// Ranks of all machines are on one clock, whichever began first.
func TestOneClock(t *testing.T) { // SPEC S7.7
	dir := t.TempDir()
	later := []float64{2.5, 0, 40, 3}
	for rank, l := range later {
		put(t, encode(t, skewed(rank, 4, "a", l)), dir, TraceName(rank, 0))
	}
	r, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	run := r.Runs[0]
	if len(run.Ranks) != 4 {
		t.Fatalf("%d ranks; missing are %q", len(run.Ranks), run.Missing)
	}
	first := run.Ranks[1]
	for i, k := range run.Ranks {
		for n, s := range k.Steps {
			if was := first.Steps[n]; !near(s.Begin-was.Begin, later[i]) || !near(s.End-was.End, later[i]) {
				t.Errorf("rank %d, step %d is %+v; on rank 1, which began %g ms before, it is %+v", i, s.Step, s, later[i], was)
			}
		}
		if k.Host != fmt.Sprint("node", i/2) || k.Process != 100+i || k.Memory.Peak.Bytes != first.Memory.Peak.Bytes {
			t.Errorf("rank %d is on %s in process %d with a peak of %+v", i, k.Host, k.Process, k.Memory.Peak)
		}
	}
	if e := run.Environment; e["hosts"] != "node0 (ranks 0 and 1), node1 (ranks 2 and 3)" || e["clock"] != "that of rank 0, within 3µs at the start" {
		t.Errorf("the environment is %q", e)
	}
}

// A trace that is missing, damaged or of another run is said so, and the rest is shown.
func TestRanksThatAreMissing(t *testing.T) {
	dir := t.TempDir()
	for _, rank := range []int{0, 1, 2, 3, 4} {
		x := skewed(rank, 7, "a", 0)
		switch rank {
		case 2:
			x.Header.Run = "b"
		case 3:
			x.Header.Ranks = 2
		}
		data := encode(t, x)
		if rank == 4 {
			data = data[:30] // inside of the header
		}
		put(t, data, dir, TraceName(rank, 0))
	}
	r, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	run := r.Runs[0]
	said := strings.Join(run.Missing, "\n")
	for _, want := range []string{
		"rank-2.trace is left out: it is of another run than that of rank 0",
		"rank-3.trace is left out: it is of a run of 2 ranks, and that of rank 0 of 7",
		"rank-4.trace is left out: cannot read the header",
		"there is no trace of ranks 2 to 6 of 7; what it would show is left out",
	} {
		if !strings.Contains(said, want) {
			t.Errorf("missing are\n%s\nwant %q", said, want)
		}
	}
	if len(run.Ranks) != 2 {
		t.Errorf("%d ranks", len(run.Ranks))
	}
	if all, err := ReadTraces(dir, 0); err != nil || len(all) != 2 {
		t.Errorf("%d traces, %v", len(all), err)
	}
}

// Folders and files of several machines are one run if their traces say so.
func TestRunInSeveralPlaces(t *testing.T) {
	dir := t.TempDir()
	at := func(parts ...string) string { return filepath.Join(append([]string{dir}, parts...)...) }
	put(t, []byte("steps: 2\n"), at("one"), ConfigFile)
	put(t, []byte(`{"steps": 2, "by_rank": [{"rank": 0, "policy": []}, {"rank": 1, "policy": [{"group": "moe_act"}]}, {"rank": 2, "policy": []}]}`), at("one"), SummaryFile)
	for rank, l := range []float64{7, 0, 1} {
		place := []string{"one", "two", "three"}[rank]
		put(t, encode(t, skewed(rank, 3, "a", l)), at(place), TraceName(rank, 0))
	}
	other := skewed(1, 3, "b", 0)
	put(t, encode(t, other), at("four"), TraceName(1, 0))
	file := at("three", TraceName(2, 0))
	r, err := Read(at("two"), at("one"), at("four"), file)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Runs) != 2 || len(r.Runs[0].Ranks) != 3 || len(r.Runs[1].Ranks) != 1 || r.Runs[0].Options == "" {
		t.Fatalf("%d runs: %+v", len(r.Runs), r.Runs)
	}
	ranks := r.Runs[0].Ranks
	for i, l := range []float64{7, 0, 1} {
		if got := ranks[i].Steps[0].Begin - ranks[1].Steps[0].Begin; !near(got, l) || ranks[i].Rank != i {
			t.Errorf("rank %d began %g ms after rank 1, want %g", ranks[i].Rank, got, l)
		}
	}
	if !slices.ContainsFunc(ranks[1].Policy, func(p PolicyRow) bool { return p.Group == "moe_act" }) {
		t.Error("rank 1 lacks what the summary says of it")
	}
	for _, m := range r.Runs[0].Missing {
		if strings.HasPrefix(m, noTrace) {
			t.Errorf("%q, and there are all", m)
		}
	}
	if m := strings.Join(r.Runs[1].Missing, "\n"); !strings.Contains(m, "there is no trace of ranks 0 and 2 of 3") {
		t.Errorf("of the other run: %s", m)
	}
}

// Places that have traces of the same rank are not one run. What is put together has the largest
// uncertainty and number of ranks.
func TestMergedRuns(t *testing.T) {
	run := func(within int64, world int, ranks ...int) Run {
		r := Run{id: "x", within: within, world: world, hosts: map[string][]int{"h": ranks}}
		for _, k := range ranks {
			r.Ranks = append(r.Ranks, Rank{Rank: k})
		}
		return r
	}
	if out := merge([]Run{run(5, 4, 0, 1), run(3, 4, 1, 2)}); len(out) != 2 {
		t.Errorf("%d runs of overlapping ranks", len(out))
	}
	for _, order := range [][]Run{{run(5, 3, 0, 1), run(3, 4, 2)}, {run(3, 4, 2), run(5, 3, 0, 1)}} {
		out := merge(order)
		if len(out) != 1 || out[0].within != 5 || out[0].world != 4 || len(out[0].Ranks) != 3 || out[0].Ranks[2].Rank != 2 {
			t.Errorf("%+v", out)
		}
	}
}
