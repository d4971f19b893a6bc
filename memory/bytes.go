// This file owns sizes: how they are written, read and printed.

package memory

import (
	"fmt"
	"strconv"
	"strings"
)

// Bytes is a size or an offset in bytes.
type Bytes int64

// Units of memory.
const (
	KiB Bytes = 1 << 10
	MiB Bytes = 1 << 20
	GiB Bytes = 1 << 30
	TiB Bytes = 1 << 40
)

// units lists the units of Exact, largest first.
var units = []struct {
	suffix string
	bytes  Bytes
}{{"TiB", TiB}, {"GiB", GiB}, {"MiB", MiB}, {"KiB", KiB}, {"B", 1}}

// mostBytes is the largest size that ParseBytes accepts. Sums of a few thousand
// such sizes still fit in 63 bits.
const mostBytes = 1024 * TiB

// String formats the size for people, with at least three significant digits. Sizes
// below one KiB are exact.
func (b Bytes) String() string {
	switch m := max(b, -b); {
	case m >= GiB:
		return fmt.Sprintf("%.2f GiB", float64(b)/float64(GiB))
	case m >= MiB:
		return fmt.Sprintf("%.2f MiB", float64(b)/float64(MiB))
	case m >= KiB:
		return fmt.Sprintf("%.2f KiB", float64(b)/float64(KiB))
	}
	return fmt.Sprintf("%d B", int64(b))
}

// Short formats the size for tables, with one decimal where String has two: "71.3 MiB".
// Sizes from one GiB have two.
func (b Bytes) Short() string {
	switch m := max(b, -b); {
	case m >= GiB:
		return fmt.Sprintf("%.2f GiB", float64(b)/float64(GiB))
	case m >= MiB:
		return fmt.Sprintf("%.1f MiB", float64(b)/float64(MiB))
	case m >= KiB:
		return fmt.Sprintf("%.1f KiB", float64(b)/float64(KiB))
	}
	return fmt.Sprintf("%d B", int64(b))
}

// Exact formats the size without rounding, as ParseBytes reads it: "64MiB".
func (b Bytes) Exact() string {
	for _, u := range units {
		if b%u.bytes == 0 {
			return fmt.Sprintf("%d%s", b/u.bytes, u.suffix)
		}
	}
	panic("memory: every size is a whole number of bytes")
}

// parsed are the units that ParseBytes reads, in lower case.
var parsed = map[string]Bytes{
	"b":   1,
	"kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB,
	"k": KiB, "m": MiB, "g": GiB, "t": TiB,
	"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
}

// ParseBytes reads a size as people write it: a number, which may have decimals, and a unit,
// such as "64MiB", "52.5 GiB", "52GB" or "52G". KiB, MiB, GiB and TiB are powers of 1024, and
// so are K, M, G and T. KB, MB, GB and TB are powers of 1000. Upper and lower case mean the
// same. A part of a byte is dropped. ParseBytes rejects numbers without a unit, sizes below
// one byte and sizes above 1024 TiB.
func ParseBytes(s string) (Bytes, error) {
	digits := len(s) - len(strings.TrimLeft(s, "0123456789."))
	number, unit := s[:digits], strings.TrimPrefix(s[digits:], " ")
	size, known := parsed[strings.ToLower(unit)]
	whole, fraction, decimal := strings.Cut(number, ".")
	if !known || whole == "" || decimal && fraction == "" || strings.Contains(fraction, ".") {
		return 0, fmt.Errorf("expected a size such as 52.5GiB, got %q; write a number and B, KiB, MiB, GiB or TiB, or KB, MB, GB or TB for powers of 1000", s)
	}
	n, err := strconv.ParseUint(whole, 10, 63)
	if err != nil || n > uint64(mostBytes/size) {
		return 0, fmt.Errorf("expected a size of at most 1024TiB, got %q", s)
	}
	part, err := strconv.ParseFloat("0."+fraction+"0", 64)
	if err != nil {
		panic("memory: digits are not a number: " + err.Error())
	}
	b := Bytes(n)*size + Bytes(part*float64(size))
	switch {
	case b == 0:
		return 0, fmt.Errorf("expected a size of at least 1B, got %q", s)
	case b > mostBytes:
		return 0, fmt.Errorf("expected a size of at most 1024TiB, got %q", s)
	}
	return b, nil
}
