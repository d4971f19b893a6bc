// This file owns what is said when a rank fails.

package rendezvous

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"syscall"
)

// State is what a rank did last, as far as the service knows.
type State struct {
	Rank       int    `json:"rank"`
	Host       string `json:"host,omitempty"`
	Collective string `json:"collective,omitempty"` // "" before the first
	Number     uint64 `json:"number,omitempty"`
	Left       bool   `json:"left,omitempty"` // whether it has left without a failure
}

// Failure is the error that all ranks get if one fails.
type Failure struct {
	State        // the rank that failed
	Why   string `json:"why"` // "ended without a word"

	// States has all ranks in order, as they were when the failure was found.
	States []State `json:"states,omitempty"`
}

// Error says which rank failed, where it was, and where the others are.
func (f *Failure) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "rank %d", f.Rank)
	if f.Host != "" {
		fmt.Fprintf(&b, " on %s", f.Host)
	}
	fmt.Fprintf(&b, " %s", f.Why)
	if f.Collective != "" {
		fmt.Fprintf(&b, "; it was last in %s %d", f.Collective, f.Number)
	}
	b.WriteString(f.others())
	return b.String()
}

// howEnded says how a connection ended: as one of a process that ended, or otherwise.
func howEnded(err error, otherwise string) string {
	for _, end := range []error{io.EOF, syscall.ECONNRESET, syscall.EPIPE} {
		if errors.Is(err, end) {
			return "ended without a word"
		}
	}
	return otherwise
}

// manyPlaces is how many places of others are worth a sentence.
const manyPlaces = 3

// others says in which collective the other ranks are.
func (f *Failure) others() string {
	at := map[string][]int{}
	var places []string
	for _, s := range f.States {
		if s.Rank == f.Rank || s.Left || s.Collective == "" {
			continue
		}
		where := fmt.Sprintf("%s %d", s.Collective, s.Number)
		if at[where] == nil {
			places = append(places, where)
		}
		at[where] = append(at[where], s.Rank)
	}
	if len(places) > manyPlaces {
		return ""
	}
	var b strings.Builder
	for _, where := range places {
		verb := "are"
		if len(at[where]) == 1 {
			verb = "is"
		}
		fmt.Fprintf(&b, "; %s %s in %s", Ranks(at[where]), verb, where)
	}
	return b.String()
}

// Ranks returns "rank 3", "ranks 0 and 2" or "ranks 0 to 6 and 9".
func Ranks(ranks []int) string {
	ranks = slices.Sorted(slices.Values(ranks))
	var parts []string
	for i := 0; i < len(ranks); {
		last := i
		for last+1 < len(ranks) && ranks[last+1] == ranks[last]+1 {
			last++
		}
		if last-i < 2 {
			parts, i = append(parts, fmt.Sprint(ranks[i])), i+1
		} else {
			parts, i = append(parts, fmt.Sprintf("%d to %d", ranks[i], ranks[last])), last+1
		}
	}
	word := "ranks "
	if len(ranks) == 1 {
		word = "rank "
	}
	if len(parts) > 1 {
		end := len(parts) - 1
		parts = []string{strings.Join(parts[:end], ", ") + " and " + parts[end]}
	}
	return word + strings.Join(parts, "")
}
