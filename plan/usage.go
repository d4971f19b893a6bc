// This file owns the memory of each group at every point of a rank's step.

package plan

import "github.com/stowage-dev/stowage/memory"

// sums are the bytes of a group, and the number of layers and microbatches that they belong
// to.
type sums struct {
	kept, away, dropped memory.Bytes
	count               int
}

// ledger has the memory of each group of a rank.
type ledger struct {
	names []string
	index map[string]int
	// upTo[c][j][g] is what the first j units of chunk c hold of group g for one
	// microbatch.
	upTo [][][]sums
	w    *walk
}

func newLedger(w *walk) *ledger {
	l := &ledger{index: map[string]int{}, w: w}
	for _, c := range w.chunks {
		for _, u := range c.units {
			for _, list := range [][]SavedTensor{u.groups, u.away, u.drop} {
				for _, g := range list {
					if _, ok := l.index[g.Group]; !ok {
						l.index[g.Group] = len(l.names)
						l.names = append(l.names, g.Group)
					}
				}
			}
		}
	}
	for _, c := range w.chunks {
		rows := [][]sums{make([]sums, len(l.names))}
		for _, u := range c.units {
			next := append([]sums(nil), rows[len(rows)-1]...)
			l.count(next, u)
			rows = append(rows, next)
		}
		l.upTo = append(l.upTo, rows)
	}
	return l
}

// count adds what one unit holds for one microbatch.
func (l *ledger) count(row []sums, u cost) {
	seen := map[int]bool{}
	at := func(g SavedTensor) *sums {
		i := l.index[g.Group]
		if !seen[i] {
			seen[i] = true
			row[i].count++
		}
		return &row[i]
	}
	for _, g := range u.groups {
		at(g).kept += g.Bytes
	}
	for _, g := range u.away {
		at(g).away += g.Bytes
	}
	for _, g := range u.drop {
		at(g).dropped += g.Bytes
	}
}

// groupsAt returns the memory of each group groupsAt a point: that of the whole microbatches of each
// chunk, and of the units of the current pass.
func (l *ledger) groupsAt(live []int, p point) []sums {
	total := make([]sums, len(l.names))
	add := func(row []sums, n int) {
		for g, s := range row {
			total[g].kept += memory.Bytes(n) * s.kept
			total[g].away += memory.Bytes(n) * s.away
			total[g].dropped += memory.Bytes(n) * s.dropped
			total[g].count += n * s.count
		}
	}
	pass := l.w.passes[p.pass]
	for c, n := range live {
		if pass.Backward && c == pass.Chunk {
			n-- // its own microbatch is counted unit by unit
		}
		add(l.upTo[c][len(l.upTo[c])-1], n)
	}
	units := p.unit
	if pass.Backward {
		units = min(units+1, len(l.upTo[pass.Chunk])-1) // a chunk may be empty
	}
	add(l.upTo[pass.Chunk][units], 1)
	return total
}

// timeline turns the points of a walk into those of a forecast.
func (l *ledger) timeline(points []point) (line []Point, top int, uses []GroupUse) {
	live := make([]int, len(l.w.chunks))
	line = make([]Point, len(points))
	var peak []sums
	for i, p := range points {
		pass := l.w.passes[i]
		all := l.groupsAt(live, p)
		q := Point{Pass: pass, What: l.w.what(p), Static: l.w.base, Live: p.live, Transient: p.top, Groups: make([]memory.Bytes, len(all))}
		for g, s := range all {
			q.Groups[g] = s.kept
		}
		line[i] = q
		if i == 0 || q.Bytes() > line[top].Bytes() {
			top, peak = i, all
		}
		if pass.Backward {
			live[pass.Chunk]--
		} else {
			live[pass.Chunk]++
		}
	}
	for g, s := range peak {
		use := GroupUse{Name: l.names[g], Live: s.count, Total: s.kept, Away: s.away, Dropped: s.dropped}
		if s.count > 0 {
			use.Bytes = (s.kept + s.away + s.dropped) / memory.Bytes(s.count)
		}
		uses = append(uses, use)
	}
	return line, top, uses
}
