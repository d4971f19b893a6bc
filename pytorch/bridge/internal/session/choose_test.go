// This file owns the tests of choices for steps that the caller describes.

package session

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/pytorch/bridge/internal/choose"
)

// describedStep is a step of four blocks of 100 bytes that can be offloaded.
func describedStep(limit int, links string) string {
	var units, ops []string
	for i := range 4 {
		units = append(units, fmt.Sprintf(`{"name": "block", "layer": %d, "offload": true, "recompute_ns": 0}`, i))
		ops = append(ops, fmt.Sprintf(`{"op": "save", "unit": %d, "storages": [%d], "at": %d}`, i, i, 1000*i))
	}
	for i := 3; i >= 0; i-- {
		ops = append(ops, fmt.Sprintf(`{"op": "load", "unit": %d, "at": %d}, {"op": "release", "unit": %d, "at": %d}`, i, 10000-1000*i, i, 10000-1000*i))
	}
	return fmt.Sprintf(`{"limit": %d, "storages": [100, 100, 100, 100], "units": [%s], "ops": [%s], "span": 11000, "offload": true, "recompute": true%s}`,
		limit, strings.Join(units, ","), strings.Join(ops, ","), links)
}

const givenLinks = `, "links": {"out": 1e9, "in": 1e9}`

// SPEC S6.4: choices keep to the limit of the request, inside of a step and outside; one
// that is too small says what would do, and asking twice solves once.
func TestChoose(t *testing.T) {
	s := opened(t, `{"device": "cpu", "host": 350}`, nil)
	ask := func(limit int) (a choose.Answer) {
		t.Helper()
		text, err := s.Choose(describedStep(limit, givenLinks))
		if err == nil {
			err = json.Unmarshal(text, &a)
		}
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	if a := ask(400); !a.Nothing || a.Peak != 400 || a.Step != 11000 {
		t.Errorf("everything fits: %+v", a)
	}
	if err := s.Begin("k", 0); err != nil {
		t.Fatal(err)
	}
	if a := ask(250); a.Nothing || a.Peak > 250 || a.BeforePeak != 400 || a.Moved < 200 || a.Choices[0] != memory.Offload || a.Choices[3] != memory.Keep {
		t.Errorf("%+v", a)
	}
	if _, err := s.End(false); err != nil {
		t.Fatal(err)
	}
	first, _ := s.Choose(describedStep(250, givenLinks))
	again, _ := s.Choose(describedStep(250, givenLinks))
	if &first[0] != &again[0] {
		t.Error("the same request was solved twice")
	}
	_, err := s.Choose(describedStep(99, givenLinks))
	var small *TooSmall
	if u, _ := s.Usage(); !errors.As(err, &small) || small.Least < 100 || u.Least != small.Least || !strings.Contains(err.Error(), "the described step needs") {
		t.Errorf("%v, and the least is %d", err, u.Least)
	}
	if a := ask(int(small.Least)); a.Peak > small.Least {
		t.Errorf("at the least: %+v", a)
	}
	// A request may be about another machine.
	if _, err := s.Choose(describedStep(110, givenLinks)); err != nil {
		t.Error(err)
	}
	if _, err := s.Choose(describedStep(110, givenLinks+`, "host": 50`)); !errors.As(err, &small) || !small.HostFull {
		t.Errorf("with a host memory of 50 bytes: %v", err)
	}
	if _, err := s.Choose(`{"limits": 1}`); !errors.As(err, new(Wrong)) || !strings.Contains(err.Error(), `"limits"`) {
		t.Error(err)
	}
	if again, err := s.Choose(describedStep(250, givenLinks)); err != nil || len(again) == 0 {
		t.Errorf("after a failure: %v", err)
	}
}

// Host memory is what the session may have of the machine's, unless the request says how much
// there is. What is too small names the limit that was asked for.
func TestChooseWithinHostMemory(t *testing.T) {
	for _, x := range []struct {
		config, request string
		full            bool
	}{
		{"", "", false},
		{`, "host": 50`, "", true},
		{`, "host": 350`, "", false},
		{fmt.Sprintf(`, "host": %d`, int64(1)<<60), "", false}, // more than there is
		{`, "host": 50`, `, "host": 350`, false},
		{`, "host": 350`, `, "host": 50`, true},
	} {
		s := opened(t, `{"device": "cpu"`+x.config+`}`, nil)
		_, err := s.Choose(describedStep(110, givenLinks+x.request))
		var small *TooSmall
		if errors.As(err, &small) != x.full || !x.full && err != nil || x.full && (!small.HostFull || small.Limit != 110 || small.Least <= 110 || !small.Described) {
			t.Errorf("%+v: %+v", x, err)
		}
	}
	s := opened(t, fmt.Sprintf(`{"device": "cpu", "host": %d}`, int64(1)<<60), nil)
	const size = 100_000_000_000_000 // more than any machine has
	request := strings.ReplaceAll(describedStep(11*size/10, `, "links": {"out": 1e12, "in": 1e12}`), "100,", fmt.Sprintf("%d,", size))
	var small *TooSmall
	if _, err := s.Choose(strings.Replace(request, "100]", fmt.Sprintf("%d]", size), 1)); !errors.As(err, &small) || !small.HostFull {
		t.Errorf("storages that are larger than the machine's host memory: %v", err)
	}
}

// A session that moves nothing measures its links when a request needs them, once in a
// process; one that moves has them.
func TestChooseMeasuresLinks(t *testing.T) {
	var links Links
	open := func(cfg Config) *Session {
		s, err := links.Open(cfg, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		return s
	}
	ask := func(s *Session, request string) {
		t.Helper()
		if _, err := s.Choose(request); err != nil {
			t.Error(err)
		}
	}
	s := open(Config{Device: "cpu"})
	ask(s, describedStep(250, givenLinks))
	ask(s, strings.Replace(describedStep(400, ""), `"offload": true, "recompute": true}`, `"offload": false}`, 1))
	if len(links.known) != 0 {
		t.Error("links were measured in vain")
	}
	s.captured = true
	if _, err := s.Choose(describedStep(250, "")); !errors.As(err, new(Wrong)) || !strings.Contains(err.Error(), "before the capture") {
		t.Errorf("inside of a capture: %v", err)
	}
	s.captured = false
	ask(s, describedStep(250, ""))
	if len(links.known) != 1 {
		t.Fatalf("%d devices are measured", len(links.known))
	}
	for at := range links.known {
		links.known[at] = memory.Links{Out: 1e9, In: 1e9}
	}
	ask(s, describedStep(240, ""))
	ask(open(Config{Device: "cpu"}), describedStep(250, ""))
	for _, got := range links.known {
		if got != (memory.Links{Out: 1e9, In: 1e9}) {
			t.Errorf("links were measured again: %v", got)
		}
	}
	s = open(Config{Device: "cpu", Limit: 1000, Links: memory.Links{Out: 5e8, In: 5e8}})
	if got, err := s.rates(); err != nil || got.Out != 5e8 {
		t.Errorf("%v, %v", got, err)
	}
	s = opened(t, `{"device": "cpu"}`, nil)
	ask(s, describedStep(250, ""))
}
