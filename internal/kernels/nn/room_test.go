// This file tests the room that sorted rows ask for.

package nn

import (
	"testing"

	"pgregory.net/rapid"
)

// Rows ask for as much room as they take, to the row, if every group fits its slot. If one
// does not, they ask for slots as large as the largest.
func TestRoomForRows(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		y := layout{group: rapid.IntRange(1, 3).Draw(r, "group"), slot: rapid.SampledFrom([]int{0, 4, 6}).Draw(r, "slot"), room: 1 << 20}
		groups := rapid.IntRange(1, 4).Draw(r, "groups")
		counts := rapid.SliceOfN(rapid.Uint32Range(0, 4), y.group*groups, y.group*groups).Draw(r, "counts")
		seg := make([][2]uint32, len(counts))
		y.place(seg, counts)
		largest, end := 0, uint64(0)
		for e, s := range seg {
			if s[1] > 0 {
				end = uint64(s[0] + s[1])
			}
			if e%y.group == 0 {
				rows := 0
				for _, n := range counts[e : e+y.group] {
					rows += int(n)
				}
				largest = max(largest, rows)
			}
		}
		if y.slot > 0 && largest > y.slot {
			end = uint64(groups * largest)
		}
		if got := y.roomFor(counts); got != end {
			r.Fatalf("%+v asks for %d rows for %v, which take %d", y, got, counts, end)
		}
	})
}
