// This file owns the bars of memory in a frame: a row for each rank, a bar for each
// tier.

package live

import (
	"fmt"
	"strings"

	"github.com/stowage-dev/stowage/memory"
)

// memoryBars draws as many ranks as there is room for.
func memoryBars(s Step, width, room int, l letters) (lines []line) {
	if room < 1 {
		return nil
	}
	shown := s.Ranks
	if len(shown) > room {
		shown = shown[:room-1]
	}
	device, host := scale(s.Ranks, func(r Rank) Memory { return r.Device }), scale(s.Ranks, func(r Rank) Memory { return r.Host })
	// A row is "rank 12  device BAR 123.4 MiB of 123.4 MiB  host BAR 123.4 MiB".
	fixed := len("rank 12  device ") + len(" 123.4 MiB") + len("  host ") + len(" 123.4 MiB")
	if device.budget > 0 {
		fixed += len(" of 123.4 MiB")
	}
	bar := min((width-fixed)/2, 32)
	if bar < 4 { // room for one bar only
		bar, host.most = min(width-fixed+len("  host ")+len(" 123.4 MiB"), 32), 0
	}
	for i, r := range shown {
		row := line{text(fmt.Sprintf("rank %-3d device ", i))}
		row = append(row, device.bar(r.Device, bar, blueInk, l)...)
		row = append(row, text(fmt.Sprintf(" %9s", memory.Bytes(r.Device.Peak).Short())))
		if r.Device.Budget > 0 {
			row = append(row, span{faintInk, " of " + memory.Bytes(r.Device.Budget).Short()})
		}
		if host.most > 0 {
			row = append(append(append(row, text("  host ")), host.bar(r.Host, bar, pinkInk, l)...), text(fmt.Sprintf(" %9s", memory.Bytes(r.Host.Peak).Short())))
		}
		lines = append(lines, row)
	}
	if rest := s.Ranks[len(shown):]; len(rest) > 0 {
		fullest := len(shown)
		for i, r := range rest {
			if r.Device.Peak > s.Ranks[fullest].Device.Peak {
				fullest = len(shown) + i
			}
		}
		lines = append(lines, line{{faintInk, fmt.Sprintf("%s and %d more ranks; rank %d has the highest peak, %s", l.cut, len(rest), fullest, memory.Bytes(s.Ranks[fullest].Device.Peak).Short())}})
	}
	return lines
}

// axis is the scale that all bars of a tier share, so that ranks can be compared.
type axis struct{ most, budget int64 }

// scale returns the axis of a tier.
func scale(ranks []Rank, tier func(Rank) Memory) (a axis) {
	for _, r := range ranks {
		m := tier(r)
		a.most, a.budget = max(a.most, m.Peak, m.Budget), max(a.budget, m.Budget)
	}
	return a
}

// bar draws the bytes in use, then those up to the peak, and marks the budget.
func (a axis) bar(m Memory, width int, look ink, l letters) (out line) {
	if width < 4 || a.most == 0 {
		return nil
	}
	cells := func(bytes int64) int { // rounded up, so that small values can be seen
		return min(width, int((float64(bytes)*float64(width)+float64(a.most)-1)/float64(a.most)))
	}
	if m.Budget > 0 && m.Peak > m.Budget {
		look = redInk
	}
	use, peak := cells(m.InUse), cells(m.Peak)
	out = line{{look, strings.Repeat(l.full, use)}, {look, strings.Repeat(l.shade, max(0, peak-use))}, {faintInk, strings.Repeat(l.empty, width-max(use, peak))}}
	if m.Budget > 0 {
		at := max(1, cells(m.Budget)) - 1
		rest := line{}
		skipped := at + 1
		for _, s := range out {
			r := []rune(s.text)
			n := min(skipped, len(r))
			skipped -= n
			rest = append(rest, span{s.ink, string(r[n:])})
		}
		out = append(append(out.cut(at), span{boldInk, l.mark}), rest...)
	}
	return out
}
