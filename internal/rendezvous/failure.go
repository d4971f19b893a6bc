// This file owns what is said when a rank fails.

package rendezvous

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"syscall"

	"github.com/stowage-dev/stowage/internal/launcher"
)

// State is what a rank did last, as far as the service knows.
type State struct {
	Rank       int    `json:"rank"`
	Host       string `json:"host,omitempty"`
	Collective string `json:"collective,omitempty"` // "all-to-all 12 of ranks 0 and 1", or "" before the first
	Absent     []int  `json:"absent,omitempty"`     // the ranks that it waits for there, the first of them
	Missing    int    `json:"missing,omitempty"`    // how many these are
	Left       bool   `json:"left,omitempty"`       // whether it has left without a failure
}

// follow takes over where a rank is.
func (s *State) follow(now State) {
	s.Collective, s.Absent, s.Missing = now.Collective, now.Absent, now.Missing
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
		fmt.Fprintf(&b, "; it was last in %s", f.Collective)
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

// mostPlaces is how many places of others are worth a sentence, and mostAbsent how many of the
// ranks that one waits for.
const (
	mostPlaces = 3
	mostAbsent = 16
)

// others says in which collective the other ranks are, those first that wait for the rank that
// failed.
func (f *Failure) others() string {
	at := map[string][]int{}
	var waiting, rest []string
	for _, s := range f.States {
		if s.Rank == f.Rank || s.Left || s.Collective == "" {
			continue
		}
		where := s.where()
		if at[where] == nil && slices.Contains(s.Absent, f.Rank) {
			waiting = append(waiting, where)
		} else if at[where] == nil {
			rest = append(rest, where)
		}
		at[where] = append(at[where], s.Rank)
	}
	var b strings.Builder
	for i, where := range append(waiting, rest...) {
		if i == mostPlaces {
			b.WriteString("; others are elsewhere")
			break
		}
		verb := "are"
		if len(at[where]) == 1 {
			verb = "is"
		}
		fmt.Fprintf(&b, "; %s %s in %s", launcher.Ranks(at[where]), verb, where)
	}
	return b.String()
}

// where says in which collective a rank is, and who has not come there.
func (s *State) where() string {
	switch {
	case s.Missing == 0:
		return s.Collective
	case s.Missing > len(s.Absent):
		return fmt.Sprintf("%s, where %d others have not come", s.Collective, s.Missing)
	case s.Missing == 1:
		return fmt.Sprintf("%s, where rank %d has not come", s.Collective, s.Absent[0])
	}
	return fmt.Sprintf("%s, where %s have not come", s.Collective, launcher.Ranks(s.Absent))
}
