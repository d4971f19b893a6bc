// This file owns reading.

package safetensors

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
)

// Reader gives the tensors of one file. Any number of goroutines may use it at
// once.
type Reader struct {
	r      io.ReaderAt
	start  int64 // of the data in the file
	header *header
	at     map[string]int // in header.entries
}

// NewReader checks the whole header against the length of the file.
func NewReader(r io.ReaderAt, size int64) (*Reader, error) {
	var length [prefix]byte
	if size < prefix {
		return nil, fmt.Errorf("expected a safetensors file, got only %d bytes", size)
	}
	if err := readAt(r, length[:], 0); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint64(length[:])
	if n > maxHeader || n > uint64(size-prefix) {
		return nil, fmt.Errorf("a header of %d bytes does not fit into a file of %d bytes or is longer than the %d bytes allowed", n, size, maxHeader)
	}
	text := make([]byte, n)
	if err := readAt(r, text, prefix); err != nil {
		return nil, err
	}
	start := prefix + int64(n)
	h, err := parseHeader(text, size-start)
	if err != nil {
		return nil, err
	}
	at := make(map[string]int, len(h.entries))
	for i, e := range h.entries {
		at[e.Name] = i
	}
	return &Reader{r, start, h, at}, nil
}

// Metadata is the text that the file has beside its tensors.
func (r *Reader) Metadata() map[string]string { return maps.Clone(r.header.metadata) }

// Tensors lists what the file holds, in the order of the data.
func (r *Reader) Tensors() []Tensor {
	list := make([]Tensor, len(r.header.entries))
	for i, e := range r.header.entries {
		list[i] = e.Tensor
	}
	return list
}

// Tensor looks a tensor up by name.
func (r *Reader) Tensor(name string) (Tensor, bool) {
	i, ok := r.at[name]
	if !ok {
		return Tensor{}, false
	}
	return r.header.entries[i].Tensor, true
}

// ReadAt fills p with data of a tensor, from the byte at offset on. A tensor that
// the file does not have, or bytes beyond its end, panic: look it up first.
func (r *Reader) ReadAt(tensor string, p []byte, offset int64) error {
	i, ok := r.at[tensor]
	if !ok {
		panic(fmt.Sprintf("safetensors: the file has no tensor %q", tensor))
	}
	e := &r.header.entries[i]
	if offset < 0 || int64(len(p)) > e.end-e.begin-offset {
		panic(fmt.Sprintf("safetensors: %d bytes from %d on are not in tensor %q of %d bytes", len(p), offset, tensor, e.end-e.begin))
	}
	return readAt(r.r, p, r.start+e.begin+offset)
}

// readAt fills p or fails.
func readAt(r io.ReaderAt, p []byte, at int64) error {
	n, err := r.ReadAt(p, at)
	switch {
	case n == len(p):
		return nil
	case err == nil || errors.Is(err, io.EOF):
		return io.ErrUnexpectedEOF
	}
	return err
}
