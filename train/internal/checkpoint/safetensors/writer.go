// This file owns writing: a file is laid out from what is declared, and data are
// taken in order.

package safetensors

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"unicode/utf8"
)

// Layout is a file before it has data: what it will hold, and where.
type Layout struct {
	text    []byte // the length and the header
	entries []entry
	size    int64
}

// NewLayout places the tensors in the order given. A name that is empty, reserved,
// not UTF-8 or comes twice panics, and so does a shape that has no length.
func NewLayout(meta map[string]string, tensors []Tensor) *Layout {
	l := &Layout{entries: make([]entry, len(tensors))}
	seen := map[string]bool{"": true, metadata: true}
	end := int64(0)
	for i, t := range tensors {
		if seen[t.Name] || !utf8.ValidString(t.Name) {
			panic(fmt.Sprintf("safetensors: %q is empty, reserved, not UTF-8 or the name of another tensor too", t.Name))
		}
		seen[t.Name] = true
		l.entries[i] = entry{Tensor: t, begin: end, end: end + t.Bytes()}
		end = l.entries[i].end
	}
	l.text = encodeHeader(meta, l.entries)
	if len(l.text)-prefix > maxHeader {
		panic(fmt.Sprintf("safetensors: %d tensors make a header of %d bytes, more than %d", len(tensors), len(l.text)-prefix, maxHeader))
	}
	l.size = int64(len(l.text)) + end
	return l
}

// Size is the length of the file in bytes.
func (l *Layout) Size() int64 { return l.size }

// Writer writes one file:
//
//  1. NewWriter writes the header.
//  2. Write takes the data of each tensor, in the order of the layout, in pieces of
//     any size.
//  3. Close checks that nothing is missing. It does not close what is below.
type Writer struct {
	w    io.Writer
	rest []entry // begin moves with what is written
}

// NewWriter writes the header of a file.
func NewWriter(w io.Writer, l *Layout) (*Writer, error) {
	if _, err := w.Write(l.text); err != nil {
		return nil, err
	}
	return &Writer{w, append([]entry(nil), l.entries...)}, nil
}

// Write writes the next bytes of a tensor. Data of another tensor than the next
// one, or more of them than it has, panic.
func (w *Writer) Write(tensor string, data []byte) error {
	for len(w.rest) > 0 && w.rest[0].begin == w.rest[0].end && w.rest[0].Name != tensor {
		w.rest = w.rest[1:]
	}
	if len(w.rest) == 0 || w.rest[0].Name != tensor {
		panic(fmt.Sprintf("safetensors: tensor %q is not the next one to write", tensor))
	}
	e := &w.rest[0]
	if int64(len(data)) > e.end-e.begin {
		panic(fmt.Sprintf("safetensors: %d bytes for tensor %q, which lacks %d", len(data), tensor, e.end-e.begin))
	}
	n, err := w.w.Write(data)
	e.begin += int64(n)
	return err
}

// Close panics if bytes of a tensor are missing.
func (w *Writer) Close() {
	for _, e := range w.rest {
		if e.begin != e.end {
			panic(fmt.Sprintf("safetensors: tensor %q lacks %d bytes at the end", e.Name, e.end-e.begin))
		}
	}
}

func putLength(b []byte, n int) { binary.LittleEndian.PutUint64(b, uint64(n)) }

// quote is a JSON string; what is not UTF-8 in it becomes U+FFFD.
func quote(s string) []byte {
	b, err := json.Marshal(s)
	if err != nil {
		panic(fmt.Sprintf("safetensors: %q has no JSON: %v", s, err))
	}
	return b
}
