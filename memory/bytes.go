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

// units lists the suffixes that ParseBytes reads, largest first, so that "MiB" is
// not taken for "B".
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

// ParseBytes reads a size such as "64MiB". The number is whole, and the unit is B,
// KiB, MiB, GiB or TiB. ParseBytes rejects "MB", because half of its readers mean
// 2^20 bytes by it. It also rejects zero and sizes above 1024 TiB.
func ParseBytes(s string) (Bytes, error) {
	for _, u := range units {
		number, ok := strings.CutSuffix(s, u.suffix)
		if !ok {
			continue
		}
		n, err := strconv.ParseUint(number, 10, 63)
		if err != nil {
			break
		}
		if n == 0 {
			return 0, fmt.Errorf("expected a size of at least 1B, got %q", s)
		}
		if n > uint64(mostBytes/u.bytes) {
			return 0, fmt.Errorf("expected a size of at most 1024TiB, got %q", s)
		}
		return Bytes(n) * u.bytes, nil
	}
	return 0, fmt.Errorf("expected a size such as 64MiB, got %q; write a whole number and B, KiB, MiB, GiB or TiB", s)
}
