// This file owns questions about one setting: the largest or the smallest value with which
// a job fits.

package planview

import (
	"errors"
	"fmt"
	"io"
	"math/bits"
	"slices"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/search"
)

// Question asks for the largest value of a setting with which a job fits, or for the
// smallest one.
type Question struct {
	Name     string // "largest microbatch"
	What     string // "microbatch"
	Smallest bool
	// Values lists what is tried, in ascending order; of these, any may fit. If it is nil,
	// multiples of Step up to Most are tried, first those around Start, and it is taken
	// that a job which fits also does with each smaller value, or with each larger one if
	// Smallest is set.
	Values            []int
	Step, Start, Most int
	// Tried says in words which values are tried, if these are not all.
	Tried string
	// End says why there is no value beyond the last one.
	End string
	// Setup returns the job with a value, and Flags what to write for it.
	Setup  func(value int) (*plan.Setup, error)
	Flags  func(value int) string
	Search SearchSpace
	// Progress, if it is not nil, is told how many of about all values have been planned.
	Progress func(done, all int)
}

// Answer is the value that a question asks for.
type Answer struct {
	Question string `json:"question"` // "largest microbatch"
	Value    int    `json:"value"`
	Flags    string `json:"flags"` // that ask for it
	// Method is "bisection" or "scan", Step what the values are multiples of, and Planned
	// how many were planned.
	Method  string `json:"method"`
	Tried   string `json:"tried,omitempty"` // which values a scan tries, if these are not all
	Step    int    `json:"step"`
	Planned int    `json:"planned"`
	// Next is the next value, which does not fit. It is null if there is none, and End
	// says why.
	Next *Trial `json:"next"`
	End  string `json:"end"`
}

// Trial is what came of one value. Need is the most device memory that a rank reserves,
// Rank is that rank, and Node is the host memory of a node. With a search, they are those of
// the policy that needs least, if none fits.
type Trial struct {
	Value  int          `json:"value"`
	Fits   bool         `json:"fits"`
	Need   memory.Bytes `json:"need_bytes"`
	Rank   int          `json:"rank"`
	Budget memory.Bytes `json:"budget_bytes"`
	Node   *Node        `json:"node"`
	Policy string       `json:"policy"`
	// Limit is what is too small: "device memory", "host memory" or both. It is empty if
	// the job cannot be set up with the value, and Problem says why.
	Limit   string `json:"limit"`
	Problem string `json:"problem"`
}

// NoneFits reports that a job fits with no value of what was asked for. Nearest is the value
// that is most likely to fit.
type NoneFits struct {
	What    string
	Tried   string // which values were tried, if these are not all
	Nearest Trial
}

func (e *NoneFits) Error() string {
	tried := ""
	if e.Tried != "" {
		tried = " of those that were tried, " + e.Tried
	}
	return fmt.Sprintf("no %s fits%s: %s", e.What, tried, e.Nearest.words())
}

// asking is a question while it is answered.
type asking struct {
	Question
	tried map[int]Trial
	left  int // about how many values are still to be tried
}

// Answer finds the value. It returns a *NoneFits if there is none.
func (q Question) Answer() (*Answer, error) {
	a := &asking{Question: q, tried: map[int]Trial{}}
	out := &Answer{Question: q.Name, Method: "scan", Step: q.Step, Tried: q.Tried, End: q.End}
	var best, next int // next is the value beyond the best one, or 0
	if q.Values != nil {
		best, next = a.scan()
	} else {
		out.Method = "bisection"
		best, next = a.bisect()
	}
	out.Planned = len(a.tried)
	if best == 0 {
		return nil, &NoneFits{What: q.What, Tried: q.Tried, Nearest: a.try(next)}
	}
	out.Value, out.Flags = best, q.Flags(best)
	if next != 0 {
		t := a.try(next)
		out.Next, out.End = &t, ""
	}
	return out, nil
}

// scan tries one value after the other, beginning with the best. It skips those that cannot
// be set up.
func (a *asking) scan() (best, next int) {
	list := slices.Clone(a.Values)
	if !a.Smallest {
		slices.Reverse(list)
	}
	possible := 0
	for i, v := range list {
		a.left = len(list) - i
		t := a.try(v)
		if t.Fits {
			return v, next
		}
		if t.Problem == "" || possible == 0 {
			next = v
		}
		if t.Problem == "" {
			possible++
		}
	}
	return 0, next
}

// bisect halves the values between one that fits and one that does not.
func (a *asking) bisect() (best, next int) {
	most := a.Most / a.Step
	// In units of steps, fits has good and not bad. Both are outside at first.
	good, bad, away := 0, most+1, 1
	if a.Smallest {
		good, bad, away = most+1, 0, -1
	}
	at := min(max(a.Start/a.Step, 1), most)
	for grow := 1; ; grow *= 2 {
		a.left = max(1, bits.Len(uint(max(good-bad, bad-good)))-1)
		if a.try(at * a.Step).Fits {
			good = at
		} else {
			bad = at
		}
		if good+away == bad {
			break
		}
		switch outside := most + 1; {
		case !a.Smallest && bad == outside, a.Smallest && good == outside:
			at = min(at+grow, most) // nothing above is known yet
		default:
			at = (good + bad) / 2
		}
	}
	best, next = good*a.Step, bad*a.Step
	if good < 1 || good > most {
		best = 0
	}
	if bad < 1 || bad > most {
		next = 0
	}
	return best, next
}

// try plans a value.
func (a *asking) try(v int) Trial {
	if t, known := a.tried[v]; known {
		return t
	}
	t := a.plan(v)
	t.Value = v
	a.tried[v] = t
	if a.Progress != nil {
		a.Progress(len(a.tried), len(a.tried)+a.left)
	}
	return t
}

func (a *asking) plan(v int) Trial {
	s, err := a.Setup(v)
	if err != nil {
		return Trial{Problem: err.Error()}
	}
	switch a.Search {
	case Policies:
		var r *search.Result
		if r, err = search.Policy(s, search.Options{}); err == nil {
			s = r.Setup
		}
	case Layouts:
		var r *search.LayoutResult
		if r, err = search.Layout(s, search.Options{Top: 1}); err == nil {
			s = r.Best[0].Policy.Setup
		}
	}
	var small *search.TooSmall
	if errors.As(err, &small) {
		t := Trial{Need: small.Least, Rank: small.Rank, Budget: small.Budget, Policy: small.Policy, Limit: deviceLimit}
		if n := small.Node; n != nil {
			t.Node, t.Limit = nodeReport(*n), hostLimit
		}
		return t
	}
	if err != nil {
		return Trial{Problem: err.Error()}
	}
	f, err := plan.Predict(s)
	if err != nil {
		return Trial{Problem: err.Error()}
	}
	return trialOf(f)
}

const deviceLimit, hostLimit = "device memory", "host memory"

func trialOf(f *plan.Forecast) Trial {
	t := Trial{Fits: f.Fits, Budget: f.Budget, Node: nodeReport(f.Node)}
	for i, k := range f.Ranks {
		if k.Reserved.High > t.Need {
			t.Need, t.Rank = k.Reserved.High, i
		}
	}
	switch device, host := t.Need > t.Budget, t.Node.lacks(); {
	case device && host:
		t.Limit = deviceLimit + " and " + hostLimit
	case device:
		t.Limit = deviceLimit
	case host:
		t.Limit = hostLimit
	}
	return t
}

// words says what a value that does not fit would need, and what stops it.
func (t Trial) words() string {
	switch {
	case t.Problem != "":
		return fmt.Sprintf("%d cannot be set up: %s", t.Value, t.Problem)
	case t.Limit == hostLimit:
		with := ""
		if t.Policy != "" {
			with = " with " + t.Policy
		}
		return fmt.Sprintf("%d would pin %s GiB of host memory on a node of %d GPUs%s, %s more than its %s; host memory stops it",
			t.Value, GiB(t.Node.Pinned), t.Node.GPUs, with, Size(t.Node.Missing), GiB(t.Node.Room))
	}
	text := fmt.Sprintf("%d would need up to %s GiB on rank %d", t.Value, GiB(t.Need), t.Rank)
	if t.Policy != "" {
		text += " even with what needs least, " + t.Policy
	}
	stops := "stops"
	if t.Limit != deviceLimit {
		stops = "stop" // both
	}
	return text + fmt.Sprintf(": %s more than the %s that it may hold; %s %s it", Size(t.Need-t.Budget), GiB(t.Budget), t.Limit, stops)
}

// words says what stops the next value, and how the answer was found, a sentence each.
func (a *Answer) words() []string {
	found := "found by bisection"
	switch {
	case a.Tried != "":
		found = "found by a scan of " + a.Tried
	case a.Method == "scan":
		found = "found by a scan of the possible values"
	case a.Step > 1:
		found += fmt.Sprintf(" over multiples of %d", a.Step)
	}
	if found += fmt.Sprintf("; %d values were planned", a.Planned); a.Planned == 1 {
		found = "only one value was planned"
	}
	if a.Next == nil {
		return []string{a.End, found}
	}
	return []string{a.Next.words(), found}
}

func writeAnswer(w io.Writer, a *Answer) {
	if a == nil {
		return
	}
	fmt.Fprintf(w, "%s with which the job fits: %d (%s)\n", a.Question, a.Value, a.Flags)
	for _, text := range a.words() {
		fmt.Fprint(w, Wrap(text, "  "))
	}
	fmt.Fprintln(w)
}
