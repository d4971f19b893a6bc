// This file owns how routing counts are read. Every error names the line.

package routing

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/internal/input"
)

// These are the keys of the two kinds of lines. The last key of the header is optional.
var (
	headerKeys = []string{"version", "ranks", "tokens", "top_k", "layers", "microbatches", "experts"}
	entryKeys  = []string{"step", "layer", "microbatch", "rank", "rows"}
)

// maxLine is many times as long as any line that makes sense.
const maxLine = 4096

// entry is one line. Entries are kept as they come and sorted at the end, so memory depends
// on the file's size and not on its numbers.
type entry struct {
	step  int64
	place int // in the step
	rows  Rows
	line  int
}

// Read reads routing counts. Its errors name the line that is wrong.
func Read(r io.Reader) (*Counts, error) {
	in := bufio.NewReaderSize(r, maxLine)
	var t *Counts
	var entries []entry
	for line := 1; ; line++ {
		text, err := in.ReadSlice('\n')
		end := errors.Is(err, io.EOF)
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			return nil, fmt.Errorf("line %d is longer than %d bytes", line, maxLine)
		case err != nil && !end:
			return nil, fmt.Errorf("cannot read line %d: %w", line, input.Cause(err))
		}
		if line == 1 {
			text = input.WithoutMark(text)
		}
		if len(bytes.TrimSpace(text)) > 0 {
			if t == nil {
				t, err = parseHeader(text)
			} else {
				var e entry
				e, err = t.parseEntry(text)
				e.line = line
				entries = append(entries, e)
			}
			if errors.Is(err, errCut) && !end {
				err = errors.New("ends in the middle of an object")
			}
			if err != nil {
				return nil, fmt.Errorf("line %d: %w", line, err)
			}
		}
		if end {
			break
		}
	}
	if t == nil {
		return nil, errors.New("the file of routing counts is empty; expected a header in its first line")
	}
	return t, t.fill(entries)
}

func parseHeader(text []byte) (*Counts, error) {
	v, err := object(text, headerKeys, len(headerKeys)-1)
	if err != nil {
		return nil, fmt.Errorf("header: %w", err)
	}
	if v[0] != version {
		return nil, fmt.Errorf("header: version is %d; this program reads version %d", v[0], version)
	}
	for i, n := range v {
		if n > maxTokens { // so that nothing below is cut short
			return nil, fmt.Errorf("header: %s is %d, which is too large", headerKeys[i], n)
		}
	}
	t := &Counts{Header: Header{
		Ranks: int(v[1]), Tokens: v[2], TopK: int(v[3]), Layers: int(v[4]), Microbatches: int(v[5]), Experts: int(v[6]),
	}}
	if err := t.check(); err != nil {
		return nil, fmt.Errorf("header: %w", err)
	}
	return t, nil
}

func (t *Counts) parseEntry(text []byte) (entry, error) {
	v, err := object(text, entryKeys, len(entryKeys))
	if err != nil {
		return entry{}, err
	}
	for i, most := range []int{-1, t.Layers, t.Microbatches, t.Ranks} {
		if most >= 0 && v[i] >= int64(most) {
			return entry{}, fmt.Errorf("%s is %d; the header says there are %d, counted from 0", entryKeys[i], v[i], most)
		}
	}
	if v[4] > int64(t.Worst()) {
		return entry{}, fmt.Errorf("rows is %d; with %d tokens a rank receives at most %d", v[4], t.Tokens, t.Worst())
	}
	return entry{step: v[0], place: t.place(0, int(v[1]), int(v[2])) + int(v[3]), rows: Rows(v[4])}, nil
}

// errCut reports a line that ends too early.
var errCut = errors.New("is cut off; was the file written to its end?")

// object reads one JSON object whose values are whole numbers of at least zero. The first
// need keys must be present.
func object(text []byte, keys []string, need int) ([]int64, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, syntax(text, err)
	}
	values, seen := make([]int64, len(keys)), make([]bool, len(keys))
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return nil, syntax(text, err)
		}
		i := slices.Index(keys, name.(string)) // Token gives nothing else in this place
		if i < 0 {
			return nil, fmt.Errorf("unknown key %q; there are %s", name, strings.Join(keys, ", "))
		}
		if seen[i] {
			return nil, fmt.Errorf("%s comes twice", keys[i])
		}
		seen[i] = true
		value, err := d.Token()
		if err != nil {
			return nil, syntax(text, err)
		}
		number, _ := value.(json.Number)
		if values[i], err = strconv.ParseInt(number.String(), 10, 64); err != nil || values[i] < 0 {
			return nil, fmt.Errorf("%s is %s; want a whole number of at least 0", keys[i], describe(value))
		}
	}
	if _, err := d.Token(); err != nil {
		return nil, syntax(text, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("something follows the object; write one on each line")
	}
	for i, ok := range seen[:need] {
		if !ok {
			return nil, fmt.Errorf("%s is missing", keys[i])
		}
	}
	return values, nil
}

// syntax returns the decoder's error about a line in words of the format.
func syntax(text []byte, err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errCut
	}
	if err == nil {
		return errors.New("expected a JSON object, got another value")
	}
	if e := json.Unmarshal(text, new(any)); e != nil {
		err = e // it counts characters from the line's first
	}
	return fmt.Errorf("expected a JSON object; %w", input.Plain(err))
}

// describe returns a value in words of the format.
func describe(value json.Token) string {
	switch v := value.(type) {
	case nil:
		return "null"
	case string:
		return strconv.Quote(v)
	case json.Delim:
		if v == '[' {
			return "a list"
		}
		return "an object"
	}
	return fmt.Sprint(value)
}

// fill puts the entries in their places and checks that every step is whole.
func (t *Counts) fill(entries []entry) error {
	slices.SortFunc(entries, func(a, b entry) int {
		return cmp.Or(cmp.Compare(a.step, b.step), cmp.Compare(a.place, b.place), cmp.Compare(a.line, b.line))
	})
	n := t.perStep()
	t.rows = make([]Rows, 0, len(entries))
	for i, e := range entries {
		want := len(t.rows) % n
		step := int64(len(t.rows) / n)
		if i > 0 && e.step == entries[i-1].step && e.place == entries[i-1].place {
			return fmt.Errorf("line %d: %s was given in line %d already", e.line, t.name(e.step, e.place), entries[i-1].line)
		}
		if e.step != step || e.place != want {
			return fmt.Errorf("%s is missing; line %d is about a later one", t.name(step, want), e.line)
		}
		t.rows = append(t.rows, e.rows)
	}
	if len(entries) == 0 {
		return errors.New("the routing counts have a header and no step")
	}
	if rest := len(t.rows) % n; rest > 0 {
		return fmt.Errorf("%s is missing, and all after it; was the file written to its end?", t.name(int64(len(t.rows)/n), rest))
	}
	for i := 0; i < len(t.rows); i += t.Ranks {
		var sum Rows
		for _, n := range t.rows[i : i+t.Ranks] {
			sum += n
		}
		if sum != t.Total() {
			return fmt.Errorf("line %d: the rows of all ranks together, from %s on, are %d; %d tokens times %d are %d",
				entries[i].line, t.name(entries[i].step, entries[i].place), sum, t.Tokens, t.TopK, t.Total())
		}
	}
	return nil
}

// name says in words what an entry is about.
func (t *Counts) name(step int64, place int) string {
	rank := place % t.Ranks
	place /= t.Ranks
	return fmt.Sprintf("rank %d of microbatch %d of layer %d of step %d", rank, place%t.Microbatches, place/t.Microbatches, step)
}
