// This file owns the launches that move rows to experts and back: sorting, regrouping,
// taking and combining. rowssort.go and rowstwin.go have the twins.

package nn

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var (
	sortCountKernel  = device.Kernel{Name: "stowage_nn_sort_count", Image: rowsImage, Go: sortCountTwin}
	sortScanKernel   = device.Kernel{Name: "stowage_nn_sort_scan", Image: rowsImage, Go: sortScanTwin}
	sortRowsKernel   = device.Kernel{Name: "stowage_nn_sort_rows", Image: rowsImage, Go: sortRowsTwin}
	regroupKernel    = device.Kernel{Name: "stowage_nn_regroup", Image: rowsImage, Go: regroupTwin}
	takeKernel       = device.Kernel{Name: "stowage_nn_take_rows", Image: rowsImage, Go: takeTwin}
	spreadRowsKernel = device.Kernel{Name: "stowage_nn_spread_rows", Image: rowsImage, Go: spreadRowsTwin}
	combineKernels   = newWays("stowage_nn_combine_rows", rowsImage, combineTwin)
)

// Sorting sorts the choices of tokens by expert. A pair is a token and one of its
// TopK choices, numbered token*TopK + choice. The pairs whose expert is one of the
// Experts from First on become rows, those of an expert in the order of pairs, one
// expert behind the other; other pairs have no row, whatever number Index has for
// them. Experts come in groups of Group, the last perhaps smaller, each of which
// begins at a multiple of Slot rows and has at most Slot; with Slot zero all of
// them are one group.
//
// Capacity, if it is not zero, is the most rows of an expert: later pairs of it are
// dropped, and nobody counts them. What lies beyond Room, or with slots beyond the
// slot, is dropped too, but counted: Count is the Room that would have been needed,
// and so it exceeds Room exactly if rows were dropped for want of it. That is
//
//   - without slots the number of rows,
//   - with slots that suffice the end of the last row,
//   - with slots that do not, as many slots of the rows of the largest group.
//
// So all live rows lie before row Count, unless it exceeds Room.
type Sorting struct {
	Index          device.Range // uint32 [Tokens][TopK]
	Tokens, TopK   int
	First, Experts int
	Group, Slot    int
	Capacity       int
	Room           int          // rows; with slots at most one slot a group
	Seg            Segments     // the live rows, none beyond Room: set
	Source         device.Range // uint32 [Room]: the pair that a row comes from, or None: set
	Place          device.Range // uint32 [Tokens*TopK]: the row of a pair, or None: set
	Count          device.Range // uint64, as above: set; or no memory
	// Counts is uint32 [Experts]: the rows of each expert, those dropped for want of
	// room included: set; or no memory.
	Counts  device.Range
	Scratch device.Range // SortScratch bytes
}

// sortRun is how many pairs a block sorts.
const sortRun = 4096

// SortScratch returns the size of the scratch memory of sorting. It holds the number of
// rows of each expert for each run of pairs.
func SortScratch(tokens, topK, experts int) memory.Bytes {
	return 4 * memory.Bytes(runsOf(tokens*topK, sortRun)*experts)
}

// SortRows issues a sorting as three launches. In the first, blocks count the experts in
// their runs of pairs. In the second, one block computes where the rows of each expert and
// run begin. In the third, blocks write their pairs there.
//
// Arguments of stowage_nn_sort_count, one block a run of 4096 pairs: index, scratch
// (uint32 [runs][experts]: set), pairs, First and experts.
//
// Arguments of stowage_nn_sort_scan, which is one block: scratch (in: the counts;
// out: the rows of the expert in all runs before), seg, count or 0, counts or 0,
// runs and experts, Group and Slot, Capacity and Room.
//
// Arguments of stowage_nn_sort_rows, one block a run: index, scratch (as scan left
// it; may be overwritten), seg, source, place, pairs, First and experts, Room. A
// pair that is the n-th of its expert goes to the expert's row n if the segment has
// one. Rows of Source between and behind segments become None.
func SortRows(s device.Stream, o Sorting) {
	pairs := o.Tokens * o.TopK
	if o.Tokens < 1 || o.TopK < 1 || pairs >= None || o.First < 0 || o.Experts < 1 || o.Experts > MaxExperts || o.Capacity < 0 || o.Room < 1 || o.Room >= None {
		panic(fmt.Sprintf("nn: sorting %d x %d pairs to experts %d to %d, capacity %d, into %d rows", o.Tokens, o.TopK, o.First, o.First+o.Experts, o.Capacity, o.Room))
	}
	if o.Slot < 0 || o.Slot >= None || o.Slot > 0 && (o.Group < 1 || o.Room > runsOf(o.Experts, o.Group)*o.Slot) {
		panic(fmt.Sprintf("nn: sorting to %d experts in groups of %d with slots of %d rows; the room, %d rows, is more than all slots", o.Experts, o.Group, o.Slot, o.Room))
	}
	runs := runsOf(pairs, sortRun)
	index := needWords("the index of a sorting", o.Index, pairs)
	scratch := needWords("the scratch of a sorting", o.Scratch, runs*o.Experts)
	seg := o.Seg.memoryOf("the segments of a sorting", o.Experts)

	l := device.NewLaunch(&sortCountKernel, runs, routeThreads)
	l.Read(index)
	l.Write(scratch)
	l.Arg(uint64(pairs))
	l.Arg(packPair(o.First, o.Experts))
	s.Launch(l)

	l = device.NewLaunch(&sortScanKernel, 1, MaxExperts)
	l.Write(scratch)
	l.Write(seg)
	writeCount(&l, o.Count)
	writeWords(&l, "the counts of a sorting", o.Counts, o.Experts)
	l.Arg(packPair(runs, o.Experts))
	l.Arg(packPair(o.Group, o.Slot))
	l.Arg(packPair(min(o.Capacity, pairs), o.Room))
	s.Launch(l)

	l = device.NewLaunch(&sortRowsKernel, runs, routeThreads)
	l.Read(index)
	l.Write(scratch)
	l.Read(seg)
	l.Write(needWords("the sources of a sorting", o.Source, o.Room))
	l.Write(needWords("the places of a sorting", o.Place, pairs))
	l.Arg(uint64(pairs))
	l.Arg(packPair(o.First, o.Experts))
	l.Arg(uint64(o.Room))
	s.Launch(l)
}

// memoryOf returns the memory memoryOf the segments. It panics if they have another number memoryOf experts.
func (s Segments) memoryOf(what string, experts int) device.Range {
	if s.Experts != experts {
		panic(fmt.Sprintf("nn: %s: expected segments of %d experts, got %d", what, experts, s.Experts))
	}
	return needWords(what, s.Range, 2*experts)
}

// writeCount appends a uint64, or zero if there is no memory.
func writeCount(l *device.Launch, r device.Range) {
	if r.Buf == nil {
		l.Arg(0)
		return
	}
	if r.Len < 8 || r.Addr()%8 != 0 {
		panic(fmt.Sprintf("nn: a count of rows: expected a uint64, got %s", r))
	}
	l.Write(r.Slice(0, 8))
}

// Regrouping sorts rows that came from several ranks by expert. Rank p's rows begin at
// p*Part and are sorted by expert already, Counts[p][e] (uint32) of them. The
// result has the rows of expert 0 of all ranks in order, then those of expert 1, and so
// on; with Slot each expert begins at a multiple of Slot rows and has at most Slot.
//
// Counts may say more than Part: rows of a rank from Part on were dropped where they
// came from. They have no place here either, but are counted in Count, which is as
// in Sorting the Room that would have been needed for all of them, an expert being
// a group of its own. What lies beyond Room or the slot is dropped here and counted.
type Regrouping struct {
	Counts         device.Range // uint32 [Ranks][Experts]
	Ranks, Experts int          // at most MaxRanks and MaxExperts
	Part           int          // rows that a rank may send
	Slot           int
	Room           int          // rows; with slots at most one slot an expert
	Seg            Segments     // the live rows, none beyond Room: set
	Source         device.Range // uint32 [Room]: which received row, or None: set
	Place          device.Range // uint32 [Ranks*Part]: where a received row went, or None: set
	Count          device.Range // uint64: set; or no memory
}

// MaxRanks is the most ranks whose rows can be regrouped.
const MaxRanks = 1024

// Regroup issues a regrouping.
//
// Arguments of stowage_nn_regroup: counts, seg, source, place, count or 0, ranks and
// experts, Part and Slot, Room. All numbers follow from the table of counts, which
// every block can add up by itself; one block, the first, sets seg and count.
func Regroup(s device.Stream, r Regrouping) {
	if r.Ranks < 1 || r.Ranks > MaxRanks || r.Experts < 1 || r.Experts > MaxExperts || r.Part < 1 || r.Ranks*r.Part >= None || r.Room < 1 || r.Room >= None {
		panic(fmt.Sprintf("nn: regrouping %d rows of each of %d ranks to %d experts into %d rows", r.Part, r.Ranks, r.Experts, r.Room))
	}
	if r.Slot < 0 || r.Slot >= None || r.Slot > 0 && r.Room > r.Experts*r.Slot {
		panic(fmt.Sprintf("nn: regrouping to %d experts with slots of %d rows; the room, %d rows, is more than all slots", r.Experts, r.Slot, r.Room))
	}
	l := device.NewLaunch(&regroupKernel, min(runsOf(max(r.Room, r.Ranks*r.Part), sortRun), 256), routeThreads)
	l.Read(needWords("the counts of a regrouping", r.Counts, r.Ranks*r.Experts))
	l.Write(r.Seg.memoryOf("the segments of a regrouping", r.Experts))
	l.Write(needWords("the sources of a regrouping", r.Source, r.Room))
	l.Write(needWords("the places of a regrouping", r.Place, r.Ranks*r.Part))
	writeCount(&l, r.Count)
	l.Arg(packPair(r.Ranks, r.Experts))
	l.Arg(packPair(r.Part, r.Slot))
	l.Arg(uint64(r.Room))
	s.Launch(l)
}

// Taking copies rows: row i of Dst becomes row Source[i]/Every of Src. If Source[i] is
// None, the row becomes zero if Zero is set, and is unchanged otherwise. Dst and Src must
// have the same type and number of columns, and must not overlap.
type Taking struct {
	Dst, Src Matrix
	Source   device.Range // uint32 [Dst.Rows]
	Every    int          // TopK where Source has pairs and Src tokens; else 1
	Zero     bool
}

// A block copies about rowsChunk bytes.
const rowsChunk = 16 * memory.KiB

// rowsBlocks returns the blocks for the rows of a matrix. A thread copies a short row, such as
// a weight, and no more than one.
func rowsBlocks(m Matrix) int {
	return runsOf(m.Rows, min(routeThreads, int(max(1, rowsChunk/(m.Type.Size()*memory.Bytes(m.Cols))))))
}

// TakeRows issues a taking. Rows may have any number of columns, also one, such as the
// weights of rows.
//
// Arguments of stowage_nn_take_rows: dst, src, source, rows of dst and of src, bytes
// of a row and of a number, bytes from a row to the next in dst, the same in src,
// Every and whether Zero (1). A row that src does not have is a fault.
func TakeRows(s device.Stream, t Taking) {
	t.Src.shape("what rows are taken from", t.Src.Rows, t.Dst.Cols)
	if t.Src.Type != t.Dst.Type || t.Every < 1 {
		panic(fmt.Sprintf("nn: taking rows: expected one type and Every of at least 1, got types %d and %d and Every %d", t.Src.Type, t.Dst.Type, t.Every))
	}
	size := int(t.Dst.Type.Size())
	zero := 0
	if t.Zero {
		zero = 1
	}
	l := device.NewLaunch(&takeKernel, rowsBlocks(t.Dst), routeThreads)
	l.Write(t.Dst.used("where rows are taken to"))
	l.Read(t.Src.used("what rows are taken from"))
	l.Read(needWords("the sources of rows", t.Source, t.Dst.Rows))
	l.Arg(packPair(t.Dst.Rows, t.Src.Rows))
	l.Arg(packPair(t.Dst.Cols*size, size))
	l.Arg(uint64(t.Dst.pitch() * size))
	l.Arg(uint64(t.Src.pitch() * size))
	l.Arg(packPair(t.Every, zero))
	s.Launch(l)
}

// Spreading copies rows to several places: row i of Src to the rows Place[i*Every + k] of
// Dst, k < Every, except where Place is None. It reads a row once, where a Taking with the
// table of sources reads it Every times. Rows must divide into vectors of 16 bytes.
type Spreading struct {
	Dst, Src Matrix
	Place    device.Range // uint32 [Src.Rows*Every]; no row twice
	Every    int          // at most MaxTopK
}

// Fits reports whether the rows of a spreading divide into vectors.
func (t Spreading) Fits() bool {
	n := 16 / int(t.Dst.Type.Size())
	return t.Dst.aligned(n) && t.Src.aligned(n) && t.Every <= MaxTopK
}

// A warp spreads spreadPiece bytes of a row.
const spreadThreads, spreadPiece = 128, 2048

// SpreadRows issues a spreading.
//
// Arguments of stowage_nn_spread_rows: dst, src, place, rows of src and of dst, bytes of a
// row, bytes from a row to the next in dst, the same in src, Every. A row that dst does not
// have is a fault.
func SpreadRows(s device.Stream, t Spreading) {
	t.Src.shape("what rows are spread from", t.Src.Rows, t.Dst.Cols)
	if t.Src.Type != t.Dst.Type || t.Every < 1 || !t.Fits() {
		panic(fmt.Sprintf("nn: spreading rows: expected one type, Every of 1 to %d and rows of vectors, got types %d and %d, Every %d and %d columns", MaxTopK, t.Src.Type, t.Dst.Type, t.Every, t.Dst.Cols))
	}
	size := int(t.Dst.Type.Size())
	l := device.NewLaunch(&spreadRowsKernel, runsOf(t.Src.Rows*runsOf(t.Src.Cols*size, spreadPiece), spreadThreads/32), spreadThreads)
	l.Write(t.Dst.used("where rows are spread to"))
	l.Read(t.Src.used("what rows are spread from"))
	l.Read(needWords("the places of rows", t.Place, t.Src.Rows*t.Every))
	l.Arg(packPair(t.Src.Rows, t.Dst.Rows))
	l.Arg(uint64(t.Dst.Cols * size))
	l.Arg(uint64(t.Dst.pitch() * size))
	l.Arg(uint64(t.Src.pitch() * size))
	l.Arg(uint64(t.Every))
	s.Launch(l)
}

// Combining adds rows up. Row i of Dst becomes the sum of the rows Place[i*Every + k] of
// Src, k < Every, in that order, plus Plus if that has memory. Places that are None are
// left out, and an empty sum is zero. Plus may be Dst. Types may differ.
type Combining struct {
	Dst, Src Matrix
	Place    device.Range // uint32 [Dst.Rows*Every]
	Every    int
	Plus     Matrix
}

// A warp adds up combinePart columns of a row.
const combineThreads, combinePart = 128, 512

// CombineRows issues a combining.
//
// Arguments of stowage_nn_combine_rows: dst, src, place, plus or 0, rows of dst and of
// src, columns and Every, pitches of dst and src in numbers, pitch of plus, then the
// types of dst, src and plus (8 bits each). A row that src does not have is a fault.
func CombineRows(s device.Stream, c Combining) {
	c.Src.shape("what rows are combined from", c.Src.Rows, c.Dst.Cols)
	if c.Every < 1 {
		panic(fmt.Sprintf("nn: combining rows: expected Every of at least 1, got %d", c.Every))
	}
	blocks := runsOf(c.Dst.Rows*runsOf(c.Dst.Cols, combinePart), combineThreads/32)
	k := combineKernels.of(c.Dst, c.Src, c.Plus)
	if c.Every > 32 { // a lane for each place
		k = &combineKernels.any
	}
	l := device.NewLaunch(k, blocks, combineThreads)
	l.Write(c.Dst.used("where rows are combined"))
	l.Read(c.Src.used("what rows are combined from"))
	l.Read(needWords("the places of rows", c.Place, c.Dst.Rows*c.Every))
	if c.Plus.Buf == nil {
		l.Arg(0)
	} else {
		c.Plus.shape("what is added to rows", c.Dst.Rows, c.Dst.Cols)
		l.Read(c.Plus.used("what is added to rows"))
	}
	l.Arg(packPair(c.Dst.Rows, c.Src.Rows))
	l.Arg(packPair(c.Dst.Cols, c.Every))
	l.Arg(packPair(c.Dst.pitch(), c.Src.pitch()))
	l.Arg(uint64(c.Plus.pitch()))
	l.Arg(uint64(c.Dst.Type) | uint64(c.Src.Type)<<8 | uint64(c.Plus.Type)<<16)
	s.Launch(l)
}
