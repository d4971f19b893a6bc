// This file owns the proof that a program's waits are all needed and all
// watched: each is dropped in turn, and something must notice.

package check

import (
	"fmt"
	"strings"
)

// Edges is the outcome of EveryEdge.
type Edges struct {
	Total  int
	Caught int
	// Uncaught describes the calls that nobody missed: another edge implies
	// them, or the program's declarations and results do not depend on them.
	Uncaught []string
	// How holds, for each call that was caught, the first line of what was
	// reported without it.
	How []string
}

func (e Edges) String() string {
	s := fmt.Sprintf("caught %d of %d", e.Caught, e.Total)
	if len(e.Uncaught) > 0 {
		s += "; not caught:\n  " + strings.Join(e.Uncaught, "\n  ")
	}
	return s
}

// EveryEdge runs a program once to count its waits, then once without each of
// them, with the race checker on; a dropped wait that passes unnoticed is run
// under seeds schedules as well, where the program's own comparison of its
// results may notice. The error is that of the complete program.
func EveryEdge(seeds int, p Program) (Edges, error) { return DropEach(Waits, seeds, p) }

// DropEach is EveryEdge for any class that can be dropped: Waits, Records or
// Syncs.
func DropEach(class Class, seeds int, p Program) (Edges, error) {
	Fault{Class: class, Do: Drop}.check()
	c, err := attempt(Options{}, p, false)
	if err != nil {
		return Edges{}, fmt.Errorf("the program fails with all its calls in place: %w", err)
	}
	e := Edges{Total: c.Count(class)}
	for n := range e.Total {
		o := Options{Faults: []Fault{{Class: class, N: n, Do: Drop}}}
		c, err := attempt(o, p, false)
		for seed := 1; err == nil && seed <= seeds; seed++ {
			o.Schedule = &Schedule{Seed: uint64(seed)}
			c, err = attempt(o, p, false)
		}
		if err == nil {
			e.Uncaught = append(e.Uncaught, strings.Join(c.drops, ", "))
			continue
		}
		e.Caught++
		line, _, _ := strings.Cut(err.Error(), "\n")
		e.How = append(e.How, line)
	}
	return e, nil
}
