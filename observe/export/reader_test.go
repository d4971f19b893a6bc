// This file owns a reader of Perfetto's format that is as strict as Perfetto's
// trace_processor. Its errors are events on undescribed tracks, ends without beginnings,
// unknown names, and times that decrease.

package export

import (
	"errors"
	"fmt"
	"math"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// picture holds what trace_processor reads from a trace.
type picture struct {
	tracks    map[uint64]*seen
	processes []string
	flows     [][2]string // names of what an arrow leads from and to
}

// seen is a track.
type seen struct {
	name, process string
	counter       bool
	slices        []shown // finished, and instants
	open          []shown
	samples       []sample
	last          int64
}

type shown struct {
	name, category string
	begin, end     int64
	notes          map[string]float64
}

type sample struct{ at, value int64 }

// find returns the tracks of a name in all processes.
func (p *picture) find(name string) (all []*seen) {
	for id := uint64(1); id <= uint64(len(p.tracks)); id++ {
		if t := p.tracks[id]; t.name == name {
			all = append(all, t)
		}
	}
	return all
}

type field struct {
	number protowire.Number
	value  uint64
	bytes  []byte
}

// fields splits a message into its fields.
func fields(b []byte) (all []field, err error) {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		f := field{number: number}
		b = b[n:]
		switch kind {
		case protowire.VarintType:
			f.value, n = protowire.ConsumeVarint(b)
		case protowire.Fixed64Type:
			f.value, n = protowire.ConsumeFixed64(b)
		case protowire.BytesType:
			f.bytes, n = protowire.ConsumeBytes(b)
		default:
			return nil, fmt.Errorf("field %d is of type %d", number, kind)
		}
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		all, b = append(all, f), b[n:]
	}
	return all, nil
}

// table holds the interned names of a sequence.
type table struct {
	valid                    bool
	last                     uint64
	categories, names, notes map[uint64]string
}

type reader struct {
	picture
	sequences map[uint64]*table
	flowing   map[uint64]string
}

// read reads a trace and returns the first error in it.
func read(data []byte) (*picture, error) {
	r := &reader{picture: picture{tracks: map[uint64]*seen{}}, sequences: map[uint64]*table{}, flowing: map[uint64]string{}}
	all, err := fields(data)
	if err != nil {
		return nil, err
	}
	for i, f := range all {
		if f.number != 1 {
			return nil, fmt.Errorf("field %d is no packet", f.number)
		}
		if err := r.packet(f.bytes); err != nil {
			return nil, fmt.Errorf("packet %d: %w", i, err)
		}
	}
	for id, t := range r.tracks {
		if len(t.open) > 0 {
			return nil, fmt.Errorf("track %d %q ends with %d open slices", id, t.name, len(t.open))
		}
	}
	return &r.picture, nil
}

func (r *reader) packet(b []byte) error {
	all, err := fields(b)
	if err != nil {
		return err
	}
	one := map[protowire.Number]*field{}
	for i := range all {
		one[all[i].number] = &all[i]
	}
	at, sequence, flags := one[8], one[10], one[13]
	if sequence == nil || sequence.value == 0 || sequence.value > math.MaxUint32 {
		return errors.New("it is of no sequence")
	}
	t := r.sequences[sequence.value]
	if t == nil {
		t = &table{}
		r.sequences[sequence.value] = t
	}
	if flags != nil && flags.value&1 != 0 {
		*t = table{valid: true, categories: map[uint64]string{}, names: map[uint64]string{}, notes: map[uint64]string{}}
	}
	if flags != nil && flags.value&2 != 0 && !t.valid {
		return errors.New("it needs state that was not cleared")
	}
	if in := one[12]; in != nil {
		if err := t.intern(in.bytes); err != nil {
			return err
		}
	}
	if at != nil {
		if at.value > math.MaxInt64 || at.value < t.last {
			return fmt.Errorf("time %d follows %d", at.value, t.last)
		}
		t.last = at.value
	}
	if d := one[60]; d != nil {
		return r.describe(d.bytes)
	}
	if e := one[11]; e != nil {
		if at == nil || flags == nil || flags.value&2 == 0 {
			return errors.New("an event without a time, or that does not say what it needs")
		}
		return r.event(t, int64(at.value), e.bytes)
	}
	return nil
}

func (t *table) intern(b []byte) error {
	all, err := fields(b)
	if err != nil {
		return err
	}
	for _, f := range all {
		entry, err := fields(f.bytes)
		if err != nil || len(entry) != 2 || entry[0].number != 1 || entry[1].number != 2 || !utf8.Valid(entry[1].bytes) {
			return fmt.Errorf("a bad entry (%v)", err)
		}
		to := map[protowire.Number]map[uint64]string{1: t.categories, 2: t.names, 3: t.notes}[f.number]
		if to == nil || to[entry[0].value] != "" {
			return fmt.Errorf("entry %d is told in no table, or twice", entry[0].value)
		}
		to[entry[0].value] = string(entry[1].bytes)
	}
	return nil
}

func (r *reader) describe(b []byte) error {
	all, err := fields(b)
	if err != nil {
		return err
	}
	t, id := &seen{}, uint64(0)
	for _, f := range all {
		switch f.number {
		case 1:
			id = f.value
		case 2:
			t.name = string(f.bytes)
		case 3:
			in, err := fields(f.bytes)
			if err != nil || len(in) != 2 || in[0].number != 1 || in[0].value == 0 || in[1].number != 6 {
				return fmt.Errorf("a bad process (%v)", err)
			}
			t.process = string(in[1].bytes)
			r.processes = append(r.processes, t.process)
		case 5:
			parent := r.tracks[f.value]
			if parent == nil {
				return errors.New("its parent was not described")
			}
			t.process = parent.process
		case 8:
			t.counter = true
		}
	}
	if id == 0 || r.tracks[id] != nil || t.process == "" || !utf8.ValidString(t.name) {
		return fmt.Errorf("track %d has no number, was described before, or is of no process", id)
	}
	r.tracks[id] = t
	return nil
}

func (r *reader) event(in *table, at int64, b []byte) error {
	all, err := fields(b)
	if err != nil {
		return err
	}
	e := shown{begin: at, end: at, notes: map[string]float64{}}
	var kind uint64
	var on *seen
	var value *int64
	var begins, ends []uint64
	for _, f := range all {
		switch f.number {
		case 3:
			e.category = in.categories[f.value]
		case 4:
			if err := in.note(f.bytes, e.notes); err != nil {
				return err
			}
		case 9:
			kind = f.value
		case 10:
			if e.name = in.names[f.value]; e.name == "" {
				return fmt.Errorf("name %d was not told", f.value)
			}
		case 11:
			on = r.tracks[f.value]
		case 23:
			e.name = string(f.bytes)
		case 30:
			v := int64(f.value)
			value = &v
		case 47:
			begins = append(begins, f.value)
		case 48:
			ends = append(ends, f.value)
		}
	}
	if on == nil {
		return errors.New("an event of a track that was not described")
	}
	if err := r.flow(e.name, begins, ends); err != nil {
		return err
	}
	return on.take(kind, e, value)
}

// note reads a note.
func (t *table) note(b []byte, to map[string]float64) error {
	all, err := fields(b)
	if err != nil || len(all) != 2 || t.notes[all[0].value] == "" {
		return fmt.Errorf("a bad note (%v)", err)
	}
	v := float64(int64(all[1].value))
	if all[1].number == 5 {
		v = math.Float64frombits(all[1].value)
	}
	to[t.notes[all[0].value]] = v
	return nil
}

// flow follows arrows.
func (r *reader) flow(name string, begins, ends []uint64) error {
	for _, id := range begins {
		if r.flowing[id] != "" {
			return errors.New("an arrow begins twice")
		}
		r.flowing[id] = name
	}
	for _, id := range ends {
		if r.flowing[id] == "" {
			return errors.New("an arrow ends that did not begin")
		}
		r.flows = append(r.flows, [2]string{r.flowing[id], name})
		delete(r.flowing, id)
	}
	return nil
}

// take adds an event to its track.
func (t *seen) take(kind uint64, e shown, value *int64) error {
	if (kind == 4) != t.counter || (kind == 4) != (value != nil) {
		return fmt.Errorf("an event of type %d on track %q, counter %v", kind, t.name, t.counter)
	}
	if e.begin < t.last {
		return fmt.Errorf("time %d follows %d on track %q", e.begin, t.last, t.name)
	}
	t.last = e.begin
	if (kind == 1 || kind == 3) && (e.name == "" || e.category == "") {
		return errors.New("an event without a name or category")
	}
	switch kind {
	case 1:
		if t.open = append(t.open, e); len(t.open) >= 512 {
			return errors.New("slices are nested too deeply")
		}
	case 2:
		n := len(t.open)
		if n == 0 {
			return errors.New("an end without a beginning")
		}
		done := t.open[n-1]
		done.end = e.begin
		t.slices, t.open = append(t.slices, done), t.open[:n-1]
	case 3:
		t.slices = append(t.slices, e)
	case 4:
		t.samples = append(t.samples, sample{e.begin, *value})
	default:
		return fmt.Errorf("an event of type %d", kind)
	}
	return nil
}
