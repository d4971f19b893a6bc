// This file owns the tests of sorting and regrouping against obvious models.

package nn

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

// rowsModel is where rows belong: one list for each expert, in order.
type rowsModel struct {
	lists             [][]uint32 // what an expert is given
	group, slot, room int        // group zero: all experts
	seg               [][2]uint32
	source            []uint32
	place             map[uint32]uint32
	count             uint64
	lost              bool // for lack of room
}

// assignRows assigns a row to each entry, or none.
func (m *rowsModel) assignRows() {
	if m.slot == 0 {
		m.group = len(m.lists)
	}
	m.place = map[uint32]uint32{}
	m.source = slices.Repeat([]uint32{None}, m.room)
	largest, groups := 0, (len(m.lists)+m.group-1)/m.group
	for g := range groups {
		end := m.room
		if m.slot > 0 {
			end = min(end, (g+1)*m.slot)
		}
		row, rows := g*m.slot, 0
		for e := g * m.group; e < min((g+1)*m.group, len(m.lists)); e++ {
			seg := [2]uint32{uint32(min(row, m.room)), 0}
			for _, from := range m.lists[e] {
				rows++
				if row >= end {
					m.lost = true
					continue
				}
				m.source[row], m.place[from] = from, uint32(row)
				seg[1]++
				row++
			}
			m.seg = append(m.seg, seg)
		}
		if rows > 0 {
			m.count = max(m.count, uint64(g*m.slot+rows))
		}
		largest = max(largest, rows)
	}
	if m.slot > 0 && largest > m.slot {
		m.count = uint64(groups * largest)
	}
}

// placed returns the rows of entries 0 to n.
func (m *rowsModel) placed(n int) (rows []uint32) {
	for i := range uint32(n) {
		row, ok := m.place[i]
		if !ok {
			row = None
		}
		rows = append(rows, row)
	}
	return rows
}

// compare fails unless a kernel agrees with the model.
func (m *rowsModel) compare(t failing, seg, source, place, count device.Range) {
	t.Helper()
	if got := numbersAt[[2]uint32](seg); !slices.Equal(got, m.seg) {
		t.Fatalf("segments are %v, want %v", got, m.seg)
	}
	if got := numbersAt[uint32](source); !slices.Equal(got, m.source) {
		t.Fatalf("sources are %v, want %v", got, m.source)
	}
	if got, want := numbersAt[uint32](place), m.placed(int(place.Len)/4); !slices.Equal(got, want) {
		t.Fatalf("places are %v, want %v", got, want)
	}
	if got := numbersAt[uint64](count)[0]; got != m.count || m.lost != (got > uint64(m.room)) {
		t.Fatalf("count is %d, want %d; lost in %d rows: %v", got, m.count, m.room, m.lost)
	}
	for row, from := range numbersAt[uint32](source) {
		if from != None && numbersAt[uint32](place)[from] != uint32(row) {
			t.Fatalf("row %d comes from %d, which went to %d", row, from, numbersAt[uint32](place)[from])
		}
	}
	for _, s := range numbersAt[[2]uint32](seg) {
		if int(s[0])+int(s[1]) > m.room {
			t.Fatalf("segment %v ends beyond %d rows", s, m.room)
		}
	}
}

// Segments, sources and places are right for every layout, with rows dropped for capacity
// and for lack of room. SPEC S1.1 S1.6
func TestSortRows(t *testing.T) {
	y := newYard(t, 1<<18)
	rapid.Check(t, func(t *rapid.T) {
		y.reset(t)
		o := Sorting{
			Tokens:  rapid.SampledFrom([]int{1, 2, 5, 30, 300, 1024, 1100}).Draw(t, "tokens"),
			TopK:    rapid.IntRange(1, 4).Draw(t, "top"),
			First:   rapid.IntRange(0, 5).Draw(t, "first"),
			Experts: rapid.IntRange(1, 9).Draw(t, "experts"),
		}
		pairs := o.Tokens * o.TopK
		all := o.First + o.Experts + rapid.IntRange(0, 3).Draw(t, "others")
		index := make([]uint32, pairs)
		for i := range index {
			// Taking the smaller of two draws makes the first experts the most common.
			index[i] = uint32(min(y.rng.IntN(all), y.rng.IntN(all)))
			if y.rng.IntN(50) == 0 {
				index[i] = None
			}
		}
		if rapid.Bool().Draw(t, "capacity") {
			o.Capacity = rapid.IntRange(1, pairs).Draw(t, "capacity")
		}
		o.Room = rapid.IntRange(1, pairs+5).Draw(t, "room")
		if rapid.Bool().Draw(t, "slots") {
			o.Group = rapid.IntRange(1, o.Experts+1).Draw(t, "group")
			o.Slot = rapid.IntRange(1, pairs).Draw(t, "slot")
			slots := runsOf(o.Experts, o.Group) * o.Slot
			if o.Room = min(slots, 5000); rapid.Bool().Draw(t, "less") {
				o.Room = rapid.IntRange(1, o.Room).Draw(t, "room")
			}
		}
		m := rowsModel{lists: make([][]uint32, o.Experts), group: o.Group, slot: o.Slot, room: o.Room}
		for i, e := range index {
			if e -= uint32(o.First); e < uint32(o.Experts) && (o.Capacity == 0 || len(m.lists[e]) < o.Capacity) {
				m.lists[e] = append(m.lists[e], uint32(i))
			}
		}
		m.assignRows()
		o.Index = put(y, index)
		o.Seg = Segments{place[uint32](y, 2*o.Experts), o.Experts}
		o.Source, o.Place = place[uint32](y, o.Room), place[uint32](y, pairs)
		o.Count, o.Counts = place[uint64](y, 1), place[uint32](y, o.Experts)
		o.Scratch = place[uint32](y, int(SortScratch(o.Tokens, o.TopK, o.Experts)/4))
		SortRows(y, o)
		m.compare(t, o.Seg.Range, o.Source, o.Place, o.Count)
		for e, n := range numbersAt[uint32](o.Counts) {
			if int(n) != len(m.lists[e]) {
				t.Fatalf("expert %d has %d rows, want %d", e, n, len(m.lists[e]))
			}
		}
	})
}

// Sorting works without counts, and the rows of a run follow those of the runs before.
func TestSortRowsThreads(t *testing.T) {
	threads(t, func() []byte {
		y := newYard(t, 4<<20)
		y.strict = false
		const tokens, topK, experts = 20_000, 8, 64
		o := Sorting{Tokens: tokens, TopK: topK, Experts: experts, Room: tokens * topK}
		index := make([]uint32, tokens*topK)
		for i := range index {
			index[i] = uint32(y.rng.IntN(experts))
		}
		o.Index, o.Seg = put(y, index), Segments{place[uint32](y, 2*experts), experts}
		o.Source, o.Place = place[uint32](y, o.Room), place[uint32](y, o.Room)
		o.Scratch = place[uint32](y, int(SortScratch(tokens, topK, experts)/4))
		SortRows(y, o)
		last := uint32(0)
		for _, pair := range numbersAt[uint32](o.Source) {
			if key := index[pair]; key < last {
				t.Fatalf("a row of expert %d behind one of %d", key, last)
			} else {
				last = key
			}
		}
		return bytes.Clone(y.memory)
	})
}

// Regroup brings the rows of all ranks together by expert, and counts the rows that were
// dropped before. SPEC S1.6
func TestRegroup(t *testing.T) {
	y := newYard(t, 1<<15)
	rapid.Check(t, func(t *rapid.T) {
		y.reset(t)
		r := Regrouping{
			Ranks:   rapid.IntRange(1, 5).Draw(t, "ranks"),
			Experts: rapid.IntRange(1, 6).Draw(t, "experts"),
			Part:    rapid.IntRange(1, 40).Draw(t, "part"),
		}
		counts := rapid.SliceOfN(rapid.Uint32Range(0, uint32(2*r.Part/r.Experts)), r.Ranks*r.Experts, r.Ranks*r.Experts).Draw(t, "counts")
		r.Room = rapid.IntRange(1, r.Ranks*r.Part+3).Draw(t, "room")
		if rapid.Bool().Draw(t, "slots") {
			r.Slot = rapid.IntRange(1, r.Ranks*r.Part).Draw(t, "slot")
			r.Room = rapid.IntRange(1, min(500, r.Experts*r.Slot)).Draw(t, "room")
		}
		// The rows that came, and those that would have come.
		came := rowsModel{lists: make([][]uint32, r.Experts), group: 1, slot: r.Slot, room: r.Room}
		sent := rowsModel{lists: make([][]uint32, r.Experts), group: 1, slot: r.Slot, room: r.Room}
		for p := range r.Ranks {
			row := 0
			for e, n := range counts[p*r.Experts:][:r.Experts] {
				for range n {
					sent.lists[e] = append(sent.lists[e], 0)
					if row < r.Part {
						came.lists[e] = append(came.lists[e], uint32(p*r.Part+row))
					}
					row++
				}
			}
		}
		sent.assignRows()
		came.assignRows()
		came.count, came.lost = sent.count, sent.lost
		r.Counts, r.Seg = put(y, counts), Segments{place[uint32](y, 2*r.Experts), r.Experts}
		r.Source, r.Place, r.Count = place[uint32](y, r.Room), place[uint32](y, r.Ranks*r.Part), place[uint64](y, 1)
		Regroup(y, r)
		came.compare(t, r.Seg.Range, r.Source, r.Place, r.Count)
	})
}

// A rank that fails leaves words that are no counts. Whatever they are, rows and their
// sources stay within the tables, and each row has the place that it came from.
func TestRegroupAnything(t *testing.T) {
	y := newYard(t, 1<<15)
	rapid.Check(t, func(t *rapid.T) {
		y.reset(t)
		r := Regrouping{Ranks: rapid.IntRange(1, 5).Draw(t, "ranks"), Experts: rapid.IntRange(1, 6).Draw(t, "experts"), Part: rapid.IntRange(1, 40).Draw(t, "part")}
		r.Room = rapid.IntRange(1, r.Ranks*r.Part+3).Draw(t, "room")
		r.Counts = put(y, rapid.SliceOfN(rapid.Uint32(), r.Ranks*r.Experts, r.Ranks*r.Experts).Draw(t, "words"))
		r.Seg = Segments{place[uint32](y, 2*r.Experts), r.Experts}
		r.Source, r.Place, r.Count = place[uint32](y, r.Room), place[uint32](y, r.Ranks*r.Part), place[uint64](y, 1)
		Regroup(y, r)
		place, live := numbersAt[uint32](r.Place), 0
		for i, from := range numbersAt[uint32](r.Source) {
			if from != None && (int(from) >= len(place) || place[from] != uint32(i)) {
				t.Fatalf("row %d comes from %d", i, from)
			} else if from != None {
				live++
			}
		}
		for _, s := range numbersAt[[2]uint32](r.Seg.Range) {
			if live -= int(s[1]); int(s[0])+int(s[1]) > r.Room {
				t.Fatalf("segment %v ends beyond %d rows", s, r.Room)
			}
		}
		if live != 0 {
			t.Fatalf("segments have %d rows less than there are", live)
		}
	})
}

// A programmer's error panics with one sentence.
func TestRowsRefuse(t *testing.T) {
	y := newYard(t, 1<<14)
	word := func(n int) device.Range { return place[uint32](y, n) }
	fp := func(rows, cols int) Matrix { return NewMatrix(place[float32](y, rows*cols), kernels.F32, rows, cols) }
	sorting := Sorting{Index: word(8), Tokens: 4, TopK: 2, Experts: 3, Room: 9, Seg: Segments{word(6), 3}, Source: word(9), Place: word(8), Scratch: word(3)}
	routing := Routing{Logits: fp(4, 3), Scores: fp(4, 3), TopK: 2, Index: word(8), Weight: word(8)}
	grad := RoutingGrad{Routing: routing, DWeight: word(8), DLogits: fp(4, 3), Balance: 1, Loss: word(1), Scratch: word(7)}
	regrouping := Regrouping{Counts: word(6), Ranks: 2, Experts: 3, Part: 4, Room: 9, Seg: Segments{word(6), 3}, Source: word(9), Place: word(8)}
	taking := Taking{Dst: fp(4, 3), Src: fp(2, 3), Source: put(y, []uint32{0, 1, None, 0}), Every: 1}
	combining := Combining{Dst: fp(4, 3), Src: fp(2, 3), Place: put(y, make([]uint32, 8)), Every: 2}
	SortRows(y, sorting)
	Route(y, routing)
	TakeRows(y, taking)
	CombineRows(y, combining)
	for name, call := range map[string]func(){
		"got 4 of 3":                                        func() { r := routing; r.TopK = 4; Route(y, r) },
		"index of a routing":                                func() { r := routing; r.Index = word(7); Route(y, r) },
		"expected fp32 logits for routing":                  func() { r := routing; r.Logits.Type = kernels.BF16; Route(y, r) },
		"needs Scale":                                       func() { RouteGrad(y, grad) },
		"scratch of a routing's":                            func() { g := grad; g.Scratch = word(6); RouteGrad(y, g) },
		"expected the bias of 1 to 1024 experts, got 0":     func() { UpdateBias(y, Rebalance{}) },
		"room, 9 rows, is more than all":                    func() { o := sorting; o.Group, o.Slot = 1, 2; SortRows(y, o) },
		"scratch of a sorting":                              func() { o := sorting; o.Scratch = word(2); SortRows(y, o) },
		"segments of a sorting":                             func() { o := sorting; o.Seg.Experts = 2; SortRows(y, o) },
		"a count of rows":                                   func() { o := sorting; o.Count = word(1); SortRows(y, o) },
		"sources of a sorting":                              func() { o := sorting; o.Source = word(8); SortRows(y, o) },
		"places of a regrouping":                            func() { r := regrouping; r.Place = word(7); Regroup(y, r) },
		"into 0 rows":                                       func() { r := regrouping; r.Room = 0; Regroup(y, r) },
		"got types 0 and 0 and Every 0":                     func() { k := taking; k.Every = 0; TakeRows(y, k) },
		"2 x 4":                                             func() { k := taking; k.Src = fp(2, 4); TakeRows(y, k) },
		"expected Every of at least 1, got 0":               func() { c := combining; c.Every = 0; CombineRows(y, c) },
		"the places of rows":                                func() { c := combining; c.Every = 3; CombineRows(y, c) },
		"what is added to rows: expected a matrix of 4 x 3": func() { c := combining; c.Plus = fp(2, 3); CombineRows(y, c) },
	} {
		func() {
			defer func() {
				if text, _ := recover().(string); !strings.HasPrefix(text, "nn: ") || !strings.Contains(text, name) {
					t.Errorf("%q is the panic where %q was expected", text, name)
				}
			}()
			call()
		}()
	}
}
