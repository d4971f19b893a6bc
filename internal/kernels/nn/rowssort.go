// This file owns the sorting and the regrouping of rows in Go.

package nn

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/parallel"
)

// A goroutine sorts sortGrain pairs, a few runs, at a time. The rows of an expert from two
// neighbouring runs may share a cache line, and threads should not share it.
const sortGrain = 4 * sortRun

// eachRun calls f for all runs of pairs.
func eachRun(pairs int, f func(run, from, to int)) {
	parallel.For(pairs, sortGrain, func(from, to int) {
		for ; from < to; from += sortRun {
			f(from/sortRun, from, min(from+sortRun, to))
		}
	})
}

func sortCountTwin(l *device.Launch) {
	a := l.Args()
	pairs, first, experts := int(a[2]), uint32(a[3]), int(a[3]>>32)
	index, scratch := device.Slice[uint32](a[0], pairs), device.Slice[uint32](a[1], runsOf(pairs, sortRun)*experts)
	eachRun(pairs, func(run, from, to int) {
		counts := scratch[run*experts:][:experts]
		clear(counts)
		for _, e := range index[from:to] {
			// A number below first wraps around to one that is too large.
			if e -= first; e < uint32(len(counts)) {
				counts[e]++
			}
		}
	})
}

func sortScanTwin(l *device.Launch) {
	a := l.Args()
	runs, experts := int(uint32(a[4])), int(a[4]>>32)
	scratch := device.Slice[uint32](a[0], runs*experts)
	var all [MaxExperts]uint32
	counts := all[:experts]
	for at := 0; at < len(scratch); at += experts {
		run := scratch[at:][:experts]
		for e, n := range run {
			run[e] = counts[e]
			counts[e] += n
		}
	}
	if capacity := uint32(a[6]); capacity != 0 {
		for e := range counts {
			counts[e] = min(counts[e], capacity)
		}
	}
	y := layout{group: int(uint32(a[5])), slot: int(a[5] >> 32), room: int(a[6] >> 32)}
	y.place(device.Slice[[2]uint32](a[1], experts), counts)
	if a[2] != 0 {
		device.Slice[uint64](a[2], 1)[0] = y.roomFor(counts)
	}
	if a[3] != 0 {
		copy(device.Slice[uint32](a[3], experts), counts)
	}
}

// layout says where the rows of experts lie: in groups that begin at multiples of a slot,
// or one behind the other without slots.
type layout struct{ group, slot, room int }

// place gives each expert its segment, which ends at the end of its slot or of the room at
// the latest.
func (y layout) place(seg [][2]uint32, counts []uint32) {
	at, end := 0, y.room
	for e, n := range counts {
		if y.slot > 0 && e%y.group == 0 {
			at = min(e/y.group*y.slot, y.room)
			end = min(at+y.slot, y.room)
		}
		live := min(int(n), end-at)
		seg[e] = [2]uint32{uint32(at), uint32(live)}
		at += live
	}
}

// roomFor returns the room that all rows would roomFor.
func (y layout) roomFor(counts []uint32) uint64 {
	group := len(counts)
	if y.slot > 0 {
		group = y.group
	}
	end, largest, groups := 0, 0, 0
	for from := 0; from < len(counts); from += group {
		rows := 0
		for _, n := range counts[from:min(from+group, len(counts))] {
			rows += int(n)
		}
		if rows > 0 {
			end = groups*y.slot + rows
		}
		largest = max(largest, rows)
		groups++
	}
	if y.slot > 0 && largest > y.slot {
		end = groups * largest
	}
	return uint64(end)
}

func sortRowsTwin(l *device.Launch) {
	a := l.Args()
	pairs, first, experts, room := int(a[5]), uint32(a[6]), int(a[6]>>32), int(a[7])
	index, scratch := device.Slice[uint32](a[0], pairs), device.Slice[uint32](a[1], runsOf(pairs, sortRun)*experts)
	seg, source, place := device.Slice[[2]uint32](a[2], experts), device.Slice[uint32](a[3], room), device.Slice[uint32](a[4], pairs)
	eachRun(pairs, func(run, from, to int) {
		next, rows := scratch[run*experts:][:experts], place[from:to]
		for i, e := range index[from:to] {
			row := uint32(None)
			if e -= first; e < uint32(len(next)) {
				n := next[e]
				next[e] = n + 1
				if s := seg[e]; n < s[1] {
					row = s[0] + n
					source[row] = uint32(from + i)
				}
			}
			rows[i] = row
		}
	})
	clearGaps(source, seg)
}

// clearGaps sets the entries between and behind segments to None.
func clearGaps(source []uint32, seg [][2]uint32) {
	at := 0
	for _, s := range seg {
		setNone(source[at:s[0]])
		at = int(s[0] + s[1])
	}
	setNone(source[at:])
}

func setNone(x []uint32) {
	for i := range x {
		x[i] = None
	}
}

func regroupTwin(l *device.Launch) {
	a := l.Args()
	ranks, experts, part, room := int(uint32(a[5])), int(a[5]>>32), int(uint32(a[6])), int(a[7])
	y := layout{group: 1, slot: int(a[6] >> 32), room: room}
	sent := device.Slice[uint32](a[0], ranks*experts)
	seg, source, place := device.Slice[[2]uint32](a[1], experts), device.Slice[uint32](a[2], room), device.Slice[uint32](a[3], ranks*part)
	// asked counts the rows that the ranks have of an expert, and came those that arrived.
	var asked, came [MaxExperts]uint32
	for p := range ranks {
		left := uint32(part)
		for e, n := range sent[p*experts:][:experts] {
			asked[e] += n
			came[e] += min(n, left)
			left -= min(n, left)
		}
	}
	y.place(seg, came[:experts])
	if a[4] != 0 {
		device.Slice[uint64](a[4], 1)[0] = y.roomFor(asked[:experts])
	}
	var next [MaxExperts]uint32 // rows of an expert that earlier ranks have filled
	for p := range ranks {
		at := p * part
		end := at + part
		for e, n := range sent[p*experts:][:experts] {
			rows := min(int(n), end-at)
			fits := min(rows, int(seg[e][1]-next[e]))
			row := int(seg[e][0] + next[e])
			for i := range fits {
				source[row+i] = uint32(at + i)
				place[at+i] = uint32(row + i)
			}
			setNone(place[at+fits : at+rows])
			next[e] += uint32(fits)
			at += rows
		}
		setNone(place[at:end])
	}
	clearGaps(source, seg)
}
