// Package policy decides what becomes of the saved tensors of a training step:
// keep, stash, offload or recompute, for every module of every layer. It is pure.
// It works on a recorded step and measured links, and asks the same machine that
// the runtime follows (package residency), so that what it says about memory is
// what will happen.
//
// This file owns the choices, byhand.go those that a user makes, profile.go what
// a recorded step is and what the choices make of it, plan.go what leaves when
// and comes back when, simulate.go and lanes.go what that costs, solve.go and
// improve.go the choices for a budget, balance.go those for all ranks of a pipeline, report.go
// the reasons, trace.go the picture of a simulated step.
package policy

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/stowage-dev/stowage/schedule"
)

// Choice is what becomes of the saved tensors of a unit.
type Choice uint8

const (
	Keep      Choice = iota // they stay on the device
	Stash                   // their live rows go to pages
	Offload                 // they go to the host and come back
	Recompute               // they are dropped and made again
	choices   = 4
)

var choiceWords = [choices]string{"keep", "stash", "offload", "recompute"}

func (c Choice) String() string { return choiceWords[c] }

// MarshalText writes the word for a choice.
func (c Choice) MarshalText() ([]byte, error) {
	if c >= choices {
		return nil, fmt.Errorf("policy: choice %d; there are %v", uint8(c), choiceWords)
	}
	return []byte(choiceWords[c]), nil
}

// UnmarshalText reads it.
func (c *Choice) UnmarshalText(text []byte) error {
	i := slices.Index(choiceWords[:], string(text))
	if i < 0 {
		return fmt.Errorf("policy: there is no choice %q; there are %v", text, choiceWords)
	}
	*c = Choice(i)
	return nil
}

// Unit is one module of one layer: what decisions are made for. Its groups of all
// microbatches have the same choice.
type Unit struct {
	Name  string `json:"name"`
	Chunk int    `json:"chunk"`
	Layer int    `json:"layer"`
}

// UnitOf is the unit of a group.
func UnitOf(g schedule.Group) Unit { return Unit{g.Name, g.Chunk, g.Layer} }

func (u Unit) String() string {
	return fmt.Sprintf("%s of layer %d, chunk %d", u.Name, u.Layer, u.Chunk)
}

// compareUnits orders units by chunk, layer and name.
func compareUnits(a, b Unit) int {
	return cmp.Or(cmp.Compare(a.Chunk, b.Chunk), cmp.Compare(a.Layer, b.Layer), cmp.Compare(a.Name, b.Name))
}

// Policy is the choice for every unit. Units that it does not name are kept, so a
// nil policy keeps everything.
type Policy map[Unit]Choice

// Units are those that are not kept, in order.
func (p Policy) Units() []Unit { return p.units(func(u Unit) bool { return p[u] != Keep }) }

// By are the units of a name that are not kept, in order.
func (p Policy) By(name string) []Unit {
	return p.units(func(u Unit) bool { return p[u] != Keep && u.Name == name })
}

func (p Policy) units(accept func(Unit) bool) []Unit {
	var us []Unit
	for u := range p {
		if accept(u) {
			us = append(us, u)
		}
	}
	slices.SortFunc(us, compareUnits)
	return us
}

// entry is a unit's line in JSON.
type entry struct {
	Unit
	Choice Choice `json:"choice"`
}

// MarshalJSON writes the units that are not kept, in order.
func (p Policy) MarshalJSON() ([]byte, error) {
	list := []entry{}
	for _, u := range p.Units() {
		list = append(list, entry{u, p[u]})
	}
	return json.Marshal(list)
}

// UnmarshalJSON reads them. A unit without a name, below zero or named twice is
// refused, and so is a word that is no field.
func (p *Policy) UnmarshalJSON(text []byte) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	var list []entry
	if err := d.Decode(&list); err != nil {
		return fmt.Errorf("policy: no list of choices: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("policy: there is more behind the list of choices; remove it")
	}
	q := Policy{}
	for _, e := range list {
		if _, twice := q[e.Unit]; twice || e.Name == "" || e.Chunk < 0 || e.Layer < 0 {
			return fmt.Errorf("policy: the choice for %q of layer %d, chunk %d has no name, a number below zero, or comes twice; give each unit one line", e.Name, e.Layer, e.Chunk)
		}
		q[e.Unit] = e.Choice
	}
	*p = q
	return nil
}
