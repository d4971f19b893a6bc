// This file owns the header: reading it with every check, and writing it.

package safetensors

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"unicode/utf8"
)

const (
	// maxHeader is the format's bound on the header's bytes: a length beyond it is
	// damage, and must not become an allocation.
	maxHeader = 100_000_000
	prefix    = 8 // the bytes of the header's length
	metadata  = "__metadata__"
)

// entry is a tensor and its place in the data.
type entry struct {
	Tensor
	begin, end int64
}

// header is what the JSON says; entries are in the order of their data.
type header struct {
	metadata map[string]string
	entries  []entry
}

// parseHeader reads the JSON of a file with so many bytes of data. The data of
// the tensors must follow one another from the first byte to the last: with that
// none overlap, and there is no room for anything that no tensor owns.
func parseHeader(text []byte, data int64) (*header, error) {
	if !utf8.Valid(text) {
		return nil, errors.New("the header is not UTF-8")
	}
	if len(text) == 0 || text[0] != '{' {
		return nil, errors.New("expected the header to begin with {")
	}
	h := &header{}
	p := parser{json.NewDecoder(bytes.NewReader(text))}
	p.UseNumber()
	err := p.object("the header", func(name string) error {
		if name == metadata {
			h.metadata = map[string]string{}
			return p.object(metadata, func(key string) error {
				value, err := p.text(metadata + " " + strconv.Quote(key))
				h.metadata[key] = value
				return err
			})
		}
		e, err := p.entry(name)
		h.entries = append(h.entries, e)
		return err
	})
	if err != nil {
		return nil, err
	}
	if rest := bytes.TrimRight(text[p.InputOffset():], " \t\r\n"); len(rest) > 0 {
		return nil, fmt.Errorf("expected the end of the header, got %d more bytes", len(rest))
	}
	slices.SortStableFunc(h.entries, func(a, b entry) int {
		return cmp.Or(cmp.Compare(a.begin, b.begin), cmp.Compare(a.end, b.end))
	})
	end := int64(0)
	for _, e := range h.entries {
		if e.begin != end {
			return nil, fmt.Errorf("tensor %q begins at byte %d of the data, but the one before it ends at %d", e.Name, e.begin, end)
		}
		end = e.end
	}
	if end != data {
		return nil, fmt.Errorf("the tensors take %d bytes, but the file has %d bytes of data", end, data)
	}
	return h, nil
}

// parser takes the JSON token by token, since decoding into a struct would let
// names that come twice and names in another case pass.
type parser struct{ *json.Decoder }

func (p parser) next(what string) (json.Token, error) {
	token, err := p.Token()
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, fmt.Errorf("%s is not JSON: %w", what, err)
	}
	return token, nil
}

func (p parser) delim(what string, want json.Delim) error {
	token, err := p.next(what)
	if err == nil && token != want {
		err = fmt.Errorf("%s: expected %v, got %v", what, want, token)
	}
	return err
}

// object calls member for every name; member takes the value.
func (p parser) object(what string, member func(name string) error) error {
	if err := p.delim(what, '{'); err != nil {
		return err
	}
	seen := map[string]bool{}
	for p.More() {
		name, err := p.text(what)
		if err != nil {
			return err
		}
		if seen[name] {
			return fmt.Errorf("%s has %q twice", what, name)
		}
		seen[name] = true
		if err := member(name); err != nil {
			return err
		}
	}
	return p.delim(what, '}')
}

func (p parser) text(what string) (string, error) {
	token, err := p.next(what)
	if err != nil {
		return "", err
	}
	s, ok := token.(string)
	if !ok {
		return "", fmt.Errorf("%s: expected text, got %v", what, token)
	}
	return s, nil
}

// numbers takes an array of whole numbers from zero.
func (p parser) numbers(what string) (list []int64, err error) {
	if err := p.delim(what, '['); err != nil {
		return nil, err
	}
	for p.More() {
		token, err := p.next(what)
		if err != nil {
			return nil, err
		}
		number, _ := token.(json.Number)
		n, err := strconv.ParseUint(string(number), 10, 63)
		if err != nil {
			return nil, fmt.Errorf("%s: expected a whole number, got %v", what, token)
		}
		list = append(list, int64(n))
	}
	return list, p.delim(what, ']')
}

// entry takes the value of a tensor's name.
func (p parser) entry(name string) (entry, error) {
	e := entry{Tensor: Tensor{Name: name, Shape: []int{}}}
	what := fmt.Sprintf("tensor %q", name)
	fields := 0
	err := p.object(what, func(field string) error {
		fields++
		switch field {
		case "dtype":
			s, err := p.text(what)
			if err != nil {
				return err
			}
			d, ok := parseDType(s)
			if !ok {
				return fmt.Errorf("%s has the unknown dtype %q", what, s)
			}
			e.DType = d
		case "shape":
			dims, err := p.numbers(what)
			for _, d := range dims {
				if d > math.MaxInt {
					return fmt.Errorf("%s has a dimension that is too large: %d", what, d)
				}
				e.Shape = append(e.Shape, int(d))
			}
			return err
		case "data_offsets":
			at, err := p.numbers(what)
			if err == nil && len(at) != 2 {
				err = fmt.Errorf("%s: expected 2 data_offsets, got %d", what, len(at))
			}
			if err != nil {
				return err
			}
			e.begin, e.end = at[0], at[1]
		default:
			return fmt.Errorf("%s has the unknown field %q", what, field)
		}
		return nil
	})
	if err != nil {
		return e, err
	}
	if fields != 3 { // none is unknown and none comes twice
		return e, fmt.Errorf("%s lacks dtype, shape or data_offsets", what)
	}
	if n, ok := e.bytes(); !ok || e.begin > e.end || e.end-e.begin != n {
		return e, fmt.Errorf("%s: type %v and shape %v do not match the bytes %d to %d", what, e.DType, e.Shape, e.begin, e.end)
	}
	return e, nil
}

// encodeHeader gives the length and the header, with spaces at the end so that the
// data begin at a multiple of eight bytes. The same tensors give the same bytes.
func encodeHeader(meta map[string]string, entries []entry) []byte {
	b := bytes.NewBuffer(make([]byte, prefix))
	b.WriteByte('{')
	field := func(name string) {
		if b.Len() > prefix+1 {
			b.WriteByte(',')
		}
		b.Write(quote(name))
		b.WriteByte(':')
	}
	if len(meta) > 0 {
		field(metadata)
		for i, key := range slices.Sorted(maps.Keys(meta)) {
			b.WriteByte("{,"[min(i, 1)])
			b.Write(quote(key))
			b.WriteByte(':')
			b.Write(quote(meta[key]))
		}
		b.WriteByte('}')
	}
	for _, e := range entries {
		field(e.Name)
		fmt.Fprintf(b, `{"dtype":"%v","shape":[`, e.DType)
		for i, d := range e.Shape {
			if i > 0 {
				b.WriteByte(',')
			}
			fmt.Fprint(b, d)
		}
		fmt.Fprintf(b, `],"data_offsets":[%d,%d]}`, e.begin, e.end)
	}
	b.WriteByte('}')
	for b.Len()%8 != 0 {
		b.WriteByte(' ')
	}
	text := b.Bytes()
	putLength(text, len(text)-prefix)
	return text
}
