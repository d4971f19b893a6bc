// This file owns how routing counts are written.

package routing

import (
	"bufio"
	"io"
	"strconv"
)

// Write writes routing counts as Read reads them, steps in order.
func Write(w io.Writer, t *Counts) error {
	out := bufio.NewWriter(w)
	values := []int64{version, int64(t.Ranks), t.Tokens, int64(t.TopK), int64(t.Layers), int64(t.Microbatches), int64(t.Experts)}
	keys := headerKeys
	if t.Experts == 0 {
		keys = keys[:len(keys)-1]
	}
	line := appendObject(nil, keys, values)
	_, _ = out.Write(line) // the first error sticks, Flush returns it
	for i, n := range t.rows {
		place := i
		rank := place % t.Ranks
		place /= t.Ranks
		microbatch := place % t.Microbatches
		place /= t.Microbatches
		line = appendObject(line[:0], entryKeys, []int64{int64(place / t.Layers), int64(place % t.Layers), int64(microbatch), int64(rank), int64(n)})
		_, _ = out.Write(line)
	}
	return out.Flush()
}

// appendObject appends one line.
func appendObject(line []byte, keys []string, values []int64) []byte {
	open := byte('{')
	for i, key := range keys {
		line = append(line, open, '"')
		line = append(line, key...)
		line = append(line, '"', ':')
		line = strconv.AppendInt(line, values[i], 10)
		open = ','
	}
	return append(line, '}', '\n')
}
