// This file owns policies: a choice for every unit.

package memory

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
)

// Policy holds the choice for every unit. It keeps the units that it does not name,
// so a nil policy keeps everything.
type Policy map[Unit]Choice

// Units returns the units that the policy does not keep, in order.
func (p Policy) Units() []Unit {
	var us []Unit
	for u, c := range p {
		if c != Keep {
			us = append(us, u)
		}
	}
	slices.SortFunc(us, Unit.Compare)
	return us
}

// entry is a unit's line in JSON.
type entry struct {
	Unit
	Choice Choice `json:"choice"`
}

// MarshalJSON writes the units that the policy does not keep, in order.
func (p Policy) MarshalJSON() ([]byte, error) {
	list := []entry{}
	for _, u := range p.Units() {
		list = append(list, entry{u, p[u]})
	}
	return json.Marshal(list)
}

// UnmarshalJSON reads what MarshalJSON writes. It returns an error if a unit has no
// name, a negative number or two lines, or if a field is unknown.
func (p *Policy) UnmarshalJSON(text []byte) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	var list []entry
	if err := d.Decode(&list); err != nil {
		return fmt.Errorf("memory: expected a list of choices: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("memory: unexpected text after the list of choices; remove it")
	}
	q := Policy{}
	for _, e := range list {
		if _, twice := q[e.Unit]; twice || e.Name == "" || e.Chunk < 0 || e.Layer < 0 {
			return fmt.Errorf("memory: the choice for %q of layer %d, chunk %d has no name, a negative number or a second line; give each unit one line", e.Name, e.Layer, e.Chunk)
		}
		q[e.Unit] = e.Choice
	}
	*p = q
	return nil
}
