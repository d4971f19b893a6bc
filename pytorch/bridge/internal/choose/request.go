// This file owns the description of a step: how it is read, and what it may say.

package choose

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/memory"
)

// Request is the JSON of stowage_choose; stowage.h documents the keys.
type Request struct {
	Limit     memory.Bytes   `json:"limit"`
	Storages  []memory.Bytes `json:"storages"`
	Units     []Unit         `json:"units"`
	Ops       []Op           `json:"ops"`
	Span      time.Duration  `json:"span"`
	Offload   bool           `json:"offload"`
	Recompute bool           `json:"recompute"`
	Links     *Links         `json:"links"`
	Drag      float64        `json:"drag"`   // part of the time of copies by which compute takes longer beside them
	Host      memory.Bytes   `json:"host"`   // 0 means what the machine has
	Effort    float64        `json:"effort"` // part of the usual search; 0 means all of it
}

// Unit is a part of a model with one choice.
type Unit struct {
	Name      string        `json:"name"`
	Layer     int           `json:"layer"`
	Offload   bool          `json:"offload"`
	Recompute time.Duration `json:"recompute_ns"` // of one microbatch; 0 means never
}

// Op is an event of the step: save, load or release a unit's group of a microbatch, or take
// or give a storage.
type Op struct {
	Kind       string        `json:"op"`
	Unit       *int          `json:"unit"`
	Microbatch int           `json:"microbatch"`
	Storage    *int          `json:"storage"`
	Storages   []int         `json:"storages"`
	Stay       []bool        `json:"stay"`
	At         time.Duration `json:"at"` // compute's own work before it
}

// Links holds rates in bytes per second.
type Links struct {
	Out     float64       `json:"out"`
	In      float64       `json:"in"`
	Both    float64       `json:"both"`
	Latency time.Duration `json:"latency_ns"`
}

func (l *Links) rates() memory.Links {
	return memory.Links{Out: l.Out, In: l.In, Both: l.Both, Latency: l.Latency}
}

// The most that a request may hold. The solver runs all events some hundred times, and sums
// of sizes and times must not overflow.
const (
	mostText       = 64 << 20
	mostStorages   = 1 << 18
	mostUnits      = 1 << 13
	mostOps        = 1 << 18
	mostItems      = 1 << 20 // storages of all saves
	mostBytes      = memory.Bytes(1) << 50
	mostLayer      = 1 << 30
	mostName       = 256
	longestStep    = 24 * time.Hour
	longestForward = time.Hour // of one unit and microbatch
	mostRate       = 1e15
	mostLatency    = time.Second
)

// Parse reads a request. It returns an error if a key is unknown, a value is out of range,
// or the events contradict each other.
func Parse(text []byte) (*Request, error) {
	if len(text) > mostText {
		return nil, fmt.Errorf("stowage: the request has %d bytes; give at most %d", len(text), mostText)
	}
	r := &Request{}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(r); err != nil {
		return nil, fmt.Errorf("stowage: cannot read the request: %s; stowage.h lists its keys", input.Plain(err))
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, fmt.Errorf("stowage: there is text after the request; give one JSON object")
	}
	if err := r.check(); err != nil {
		return nil, fmt.Errorf("stowage: %w", err)
	}
	return r, nil
}

func (r *Request) check() error {
	switch {
	case len(r.Storages) > mostStorages || len(r.Units) > mostUnits || len(r.Ops) > mostOps:
		return fmt.Errorf("the request has %d storages, %d units and %d ops; give at most %d, %d and %d, for example with fewer microbatches",
			len(r.Storages), len(r.Units), len(r.Ops), mostStorages, mostUnits, mostOps)
	case r.Limit < 1 || r.Limit > mostBytes:
		return fmt.Errorf("expected a limit from 1 to %d bytes, got %d", mostBytes, r.Limit)
	case r.Host < 0 || r.Host > mostBytes:
		return fmt.Errorf("expected a host from 0 (what the runtime has) to %d bytes, got %d", mostBytes, r.Host)
	case r.Span < 0 || r.Span > longestStep:
		return fmt.Errorf("expected a span from 0 to %d ns, got %d", longestStep, r.Span)
	}
	total := memory.Bytes(0)
	for i, n := range r.Storages {
		if n < 0 || n > mostBytes {
			return fmt.Errorf("expected storage %d to have 0 to %d bytes, got %d", i, mostBytes, n)
		}
		if total += n; total > mostBytes {
			return fmt.Errorf("the storages have more than %d bytes in all; give the sizes of one device's storages in bytes", mostBytes)
		}
	}
	if err := r.checkUnits(); err != nil {
		return err
	}
	if l := r.Links; l != nil && !(l.Out > 0 && l.In > 0 && l.Both >= 0 && l.Out <= mostRate && l.In <= mostRate && l.Both <= 2*mostRate && l.Latency >= 0 && l.Latency <= mostLatency) {
		return fmt.Errorf("expected links with rates out and in above 0 and up to %g bytes/s, and a latency_ns from 0 to %d, got out %g, in %g, both %g and latency_ns %d; leave links out to use those of the device", mostRate, mostLatency, l.Out, l.In, l.Both, l.Latency)
	}
	if !(r.Drag >= 0 && r.Drag <= 1) {
		return fmt.Errorf("expected a drag from 0 (copies cost nothing) to 1, got %g", r.Drag)
	}
	if !(r.Effort >= 0 && r.Effort <= 1) {
		return fmt.Errorf("expected an effort from 0 (all of the usual search) to 1, got %g", r.Effort)
	}
	c := newChecker(r)
	for i := range r.Ops {
		if err := c.op(&r.Ops[i]); err != nil {
			return fmt.Errorf("op %d (%q): %w", i, r.Ops[i].Kind, err)
		}
	}
	return nil
}

func (r *Request) checkUnits() error {
	same := make(map[memory.Unit]int, len(r.Units))
	for i, u := range r.Units {
		switch {
		case u.Layer < 0 || u.Layer > mostLayer:
			return fmt.Errorf("expected unit %d to have a layer from 0 to %d, got %d", i, mostLayer, u.Layer)
		case len(u.Name) > mostName:
			return fmt.Errorf("the name of unit %d has %d bytes; give at most %d", i, len(u.Name), mostName)
		case u.Recompute < 0 || u.Recompute > longestForward:
			return fmt.Errorf("expected unit %d to have a recompute_ns from 0 (never) to %d, got %d", i, longestForward, u.Recompute)
		}
		if first, known := same[r.unit(i)]; known {
			return fmt.Errorf("units %d and %d are both %q of layer %d; give them different names or layers", first, i, u.Name, u.Layer)
		}
		same[r.unit(i)] = i
	}
	return nil
}
