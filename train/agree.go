// This file owns the agreement of ranks: on the outcome of a step, and, if they live in
// several processes, on the figures and the error of a call of the trainer.

package train

import (
	"bytes"
	"cmp"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// agree returns the worst outcome of all ranks to each. A rank with a final outcome does
// not wait: others may be waiting for it elsewhere, and return only after it has failed.
func (r *rank) agree(v stash.Outcome) (stash.Outcome, error) {
	if err := r.world.Err(); err != nil {
		return v, err
	}
	if v.Final {
		r.world.Abort(&stash.Overflow{Rank: v.Rank, Why: v.Why})
		return v, nil
	}
	mine, err := json.Marshal(v)
	if err != nil {
		return v, err
	}
	all, err := r.world.Gather(mine)
	if err != nil {
		return v, err
	}
	worst := stash.Outcome{}
	for _, text := range all {
		if bytes.Equal(text, mine) { // as usual
			worst = worst.Worse(v)
			continue
		}
		var one stash.Outcome
		if err := json.Unmarshal(text, &one); err != nil {
			return v, err
		}
		worst = worst.Worse(one)
	}
	return worst, nil
}

// status is what all processes know of a rank after a call.
type status struct {
	Figures  figures
	Usage    device.Usage
	Summary  memory.Summary
	Forecast *DeviceForecast
	Decision *decision
}

// decision is the part of a runtime's decision that is told to other processes.
type decision struct {
	Nothing bool
	Final   bool
	Step    time.Duration
	Reasons []policy.Reason
	Notes   []string
}

func (r *rank) status() status {
	s := status{Usage: r.dev.Memory(), Summary: r.rt.Summary(r.key()), Forecast: r.forecast()}
	if d := r.rt.Decision(r.key()); d != nil {
		s.Decision = &decision{d.Nothing, d.Final, d.Forecast.Step, d.Reasons, d.Notes}
	}
	return s
}

// decided returns the decision of a rank, or nil.
func (s *status) decided() *policy.Decision {
	d := s.Decision
	if d == nil {
		return nil
	}
	return &policy.Decision{Rank: s.Summary.Rank, Budget: s.Summary.Budget, Nothing: d.Nothing, Final: d.Final, Forecast: policy.Forecast{Step: d.Step}, Reasons: d.Reasons, Notes: d.Notes}
}

// statement is what a process tells the others after a call.
type statement struct {
	Ranks []int
	Links memory.Links
	State []status // of its ranks, unless it failed
	Err   *toldError
}

// toldError is an error of a rank in another process. It wraps what callers look for.
type toldError struct {
	Text    string
	Failure bool // it failed because another rank did
	Rank    int  // -1 if the error names none
	Budget  *memory.BudgetError
	Full    *residency.Full
	Over    *stash.Overflow
	OOM     *device.OutOfMemory
	Driver  *device.DriverError
	Lacks   *device.Unsupported
}

func (e *toldError) Error() string { return e.Text }

func (e *toldError) Unwrap() error {
	for _, err := range []error{orNil(e.Budget), orNil(e.Full), orNil(e.Over), orNil(e.OOM), orNil(e.Driver), orNil(e.Lacks)} {
		if err != nil && e.Rank >= 0 {
			return memory.OnRank(e.Rank, err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// orNil returns a nil error for a nil pointer.
func orNil[E any, P interface {
	*E
	error
}](p P) error {
	if p == nil {
		return nil
	}
	return p
}

// tellError returns what the other processes get of an error, or nil if it is nil.
func tellError(err error) *toldError {
	if err == nil {
		return nil
	}
	e := &toldError{Text: err.Error(), Rank: -1}
	var f *comm.Failure
	var at *memory.RankError
	e.Failure = errors.As(err, &f)
	if errors.As(err, &at) {
		e.Rank = at.Rank
	}
	errors.As(err, &e.Budget)
	errors.As(err, &e.Full)
	errors.As(err, &e.OOM)
	errors.As(err, &e.Driver)
	errors.As(err, &e.Lacks)
	if errors.As(err, &e.Over) {
		e.Over = &stash.Overflow{Rank: e.Over.Rank, Why: e.Over.Why}
	}
	return e
}

// together runs work on the ranks of this process and returns the figures of all ranks in
// their order. All processes return the same error if one of them fails.
func (t *Trainer) together(work func(i int) (figures, error)) ([]figures, error) {
	own := make([]figures, len(t.ranks))
	err := t.each(func(i int) (err error) {
		own[i], err = work(i)
		return err
	})
	if t.cfg.Process == nil {
		return own, err
	}
	mine := statement{Err: tellError(err)}
	if err == nil {
		for i, r := range t.ranks {
			s := r.status()
			s.Figures = own[i]
			mine.State = append(mine.State, s)
		}
	}
	all, err := t.tell(mine, err)
	if err != nil {
		return nil, err
	}
	t.all = make([]status, t.cfg.Layout.Ranks())
	figures := make([]figures, len(t.all))
	for _, s := range all {
		for i, rank := range s.Ranks {
			t.all[rank], figures[rank] = s.State[i], s.State[i].Figures
		}
	}
	return figures, nil
}

// tell passes a statement to all processes and returns theirs. If processes failed, it
// returns the error of the first that failed by itself.
func (t *Trainer) tell(mine statement, own error) ([]statement, error) {
	p := t.cfg.Process
	mine.Ranks = p.Ranks
	var text bytes.Buffer
	if err := gob.NewEncoder(&text).Encode(mine); err != nil {
		return nil, errors.Join(own, err)
	}
	texts, err := p.Control.Gather(text.Bytes())
	if err != nil {
		if mine.Err != nil && !mine.Err.Failure {
			return nil, own
		}
		return nil, err
	}
	all := make([]statement, len(texts))
	var first, other error
	for i, text := range texts {
		s := &all[i]
		if err := gob.NewDecoder(bytes.NewReader(text)).Decode(s); err != nil {
			return nil, fmt.Errorf("train: cannot read what process %d says: %w; run the same version of the program everywhere", i, err)
		}
		if s.Err == nil {
			continue
		}
		err := error(s.Err)
		if i == p.Control.Rank() {
			err = own
		}
		if s.Err.Failure {
			other = cmp.Or(other, err)
		} else {
			first = cmp.Or(first, err)
		}
	}
	return all, cmp.Or(first, other)
}

// alike makes all processes return an error if one of them has one, and use the links of
// the process with rank 0.
func (t *Trainer) alike(own error) error {
	if t.cfg.Process == nil {
		return own
	}
	all, err := t.tell(statement{Err: tellError(own), Links: t.cfg.Memory.Links}, own)
	if err == nil {
		t.cfg.Memory.Links = all[0].Links
	}
	return err
}

// known returns a figure of each rank of the run: of those in this process by live, or of
// all from what the processes told each other last.
func known[T any](t *Trainer, live func(r *rank) T, told func(s *status) T) (out []T) {
	if t.cfg.Process == nil {
		for _, r := range t.ranks {
			out = append(out, live(r))
		}
		return out
	}
	for i := range t.all {
		out = append(out, told(&t.all[i]))
	}
	return out
}

// pieceBytes is the most that one process tells the others at once of a parameter.
const pieceBytes = 16 << 20

// eachTensor calls visit for all parameters of the run in the order of their names, in
// parts. Those of this process are in own.
func (t *Trainer) eachTensor(own []tensor, visit func(name string, elements int, part []byte)) error {
	type title struct {
		Name     string
		Elements int
	}
	byName := func(a, b string) int { return cmp.Compare(a, b) }
	slices.SortFunc(own, func(a, b tensor) int { return byName(a.name, b.name) })
	if t.cfg.Process == nil {
		for _, e := range own {
			visit(e.name, len(e.data), bytesOf(e.data))
		}
		return nil
	}
	var mine []title
	for _, e := range own {
		mine = append(mine, title{e.name, len(e.data)})
	}
	text, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	c := t.cfg.Process.Control
	texts, err := c.Gather(text)
	if err != nil {
		return err
	}
	type place struct {
		title
		process int
	}
	var all []place
	for p, text := range texts {
		var theirs []title
		if err := json.Unmarshal(text, &theirs); err != nil {
			return err
		}
		for _, x := range theirs {
			all = append(all, place{x, p})
		}
	}
	slices.SortFunc(all, func(a, b place) int { return byName(a.Name, b.Name) })
	for _, x := range all {
		var rest []byte
		if x.process == c.Rank() {
			rest, own = bytesOf(own[0].data), own[1:]
		}
		for left := 4 * x.Elements; ; left -= pieceBytes {
			part := rest[:min(len(rest), pieceBytes)]
			rest = rest[len(part):]
			parts, err := c.Gather(part)
			if err != nil {
				return err
			}
			visit(x.Name, x.Elements, parts[x.process])
			if left <= pieceBytes {
				break
			}
		}
	}
	return nil
}
