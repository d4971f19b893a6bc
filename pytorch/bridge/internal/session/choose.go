// This file owns choices for steps that the caller describes.

package session

import (
	"encoding/json"
	"errors"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/pytorch/bridge/internal/choose"
)

// chosen is the last request that was answered. Callers ask for the size of an answer
// first, and a solver takes up to seconds.
type chosen struct {
	request string
	answer  []byte
}

// Choose returns the choices for a described step as JSON. It returns a *TooSmall if none
// keep to the limit of the request.
func (s *Session) Choose(request string) (answer []byte, err error) {
	err = s.guard(func() error {
		if s.chosen.answer == nil || s.chosen.request != request {
			got, err := s.solve(request)
			if err != nil {
				return err
			}
			s.chosen = chosen{request, got}
		}
		answer = s.chosen.answer
		return nil
	})
	return answer, err
}

func (s *Session) solve(request string) ([]byte, error) {
	r, err := choose.Parse([]byte(request))
	if err != nil {
		return nil, Wrong{err}
	}
	m := choose.Machine{Host: s.dev.Info().Capacity[memory.Host], Least: s.cfg.Least}
	if s.cfg.Host > 0 {
		m.Host = min(m.Host, s.cfg.Host)
	}
	if r.Host > 0 {
		m.Host = r.Host
	}
	if r.NeedsLinks() {
		if m.Links, err = s.rates(); err != nil {
			return nil, err
		}
	}
	got, err := r.Solve(m)
	var low *memory.BudgetError
	if errors.As(err, &low) {
		s.least = low.Need
		return nil, &TooSmall{Limit: low.Budget, Least: low.Need, HostFull: low.HostFull, Described: true}
	}
	if err != nil {
		return nil, err
	}
	return json.Marshal(got)
}
