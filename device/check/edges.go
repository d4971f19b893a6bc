// This file owns the proof that every wait of a program is needed and checked: each is
// dropped in turn, and the checker or the program must notice.

package check

import (
	"fmt"
	"strings"
)

// Edges is the result of [DropEach].
type Edges struct {
	Total  int // calls of the class
	Caught int // calls whose absence was noticed
	// Uncaught describes the calls that were not missed. Another edge implies them,
	// or neither the declarations nor the results of the program depend on them.
	Uncaught []string
	// Reports holds, for each call that was caught, the first line of the report
	// without it.
	Reports []string
}

// String returns the figures and the calls that were not caught.
func (e Edges) String() string {
	s := fmt.Sprintf("caught %d of %d", e.Caught, e.Total)
	if len(e.Uncaught) > 0 {
		s += "; not caught:\n  " + strings.Join(e.Uncaught, "\n  ")
	}
	return s
}

// DropEach runs a program once to count its calls of a class (Waits, Records or Syncs),
// and then once without each of them. Use it to prove that every wait is needed and that
// the checker sees it. A call that is not missed is dropped again under seeds schedules,
// where the program may notice wrong results. The error is that of the complete program.
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
		e.Reports = append(e.Reports, line)
	}
	return e, nil
}
