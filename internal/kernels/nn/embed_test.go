package nn

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/kernels"
)

// idsOf draws rows of a table. Some of them are common.
func idsOf(t *rapid.T, y *yard, n, vocab int) []uint32 {
	ids, common := make([]uint32, n), uint32(rapid.IntRange(0, vocab-1).Draw(t, "common"))
	for i := range ids {
		ids[i] = uint32(y.rng.IntN(vocab))
		if y.rng.IntN(3) == 0 {
			ids[i] = common
		}
	}
	return ids
}

func TestEmbed(t *testing.T) {
	y := newYard(t, 1<<19)
	rapid.Check(t, func(t *rapid.T) {
		begin(t, y)
		rows, cols, vocab := rapid.IntRange(1, 40).Draw(t, "rows"), rapid.IntRange(1, 70).Draw(t, "columns"), rapid.IntRange(1, 60).Draw(t, "vocabulary")
		kind := drawType(t, "table")
		table, ids := drawn(y, kind, vocab*cols), idsOf(t, y, rows, vocab)
		l := Lookup{Y: y.matrix(drawType(t, "y"), rows, cols), Table: placeMatrix(y, kind, cols, table), IDs: put(y, ids)}
		Embed(y, l)
		for i, id := range ids {
			for j := range cols {
				if got, want := l.Y.get(i, j), stored(l.Y.Type, l.Table.get(int(id), j)); got != want {
					t.Fatalf("row %d of y is not row %d of the table", i, id)
				}
			}
		}
	})
}

// Sums over rows start from the old values, follow the order of rows, and are rounded
// once, so they equal the definition to the bit.
func TestEmbedGrad(t *testing.T) {
	y := newYard(t, 1<<19)
	rapid.Check(t, func(t *rapid.T) {
		begin(t, y)
		rows, cols, vocab := rapid.IntRange(1, 60).Draw(t, "rows"), rapid.OneOf(rapid.IntRange(1, 40), rapid.IntRange(250, 300)).Draw(t, "columns"), rapid.IntRange(1, 150).Draw(t, "vocabulary")
		tt, ty := drawType(t, "table"), drawType(t, "dy")
		l := LookupGrad{DTable: placeMatrix(y, tt, cols, drawn(y, tt, vocab*cols)), DY: placeMatrix(y, ty, cols, drawn(y, ty, rows*cols))}
		ids := idsOf(t, y, rows, vocab)
		l.IDs, l.Scratch = put(y, ids), place[uint32](y, int(EmbedScratch(rows, vocab)/4))
		want := make([]float32, vocab*cols)
		for i := range want {
			want[i] = l.DTable.get(i/cols, i%cols)
		}
		for i, id := range ids {
			for j := range cols {
				want[int(id)*cols+j] += l.DY.get(i, j)
			}
		}
		EmbedGrad(y, l)
		for i := range want {
			if got, want := l.DTable.get(i/cols, i%cols), stored(tt, want[i]); got != want {
				t.Fatalf("dtable[%d][%d] is %v, want %v", i/cols, i%cols, got, want)
			}
		}
	})
}

func TestEmbedRefuses(t *testing.T) {
	y := newYard(t, 1<<14)
	m := func(rows, cols int) Matrix { return y.matrix(kernels.F32, rows, cols) }
	ids := put(y, []uint32{0, 5})
	for name, f := range map[string]func(){
		"a table of other width":   func() { Embed(y, Lookup{Y: m(2, 8), Table: m(9, 7), IDs: ids}) },
		"a row that is not there":  func() { Embed(y, Lookup{Y: m(2, 8), Table: m(5, 8), IDs: ids}) },
		"too few numbers":          func() { Embed(y, Lookup{Y: m(3, 8), Table: m(9, 8), IDs: ids}) },
		"a gradient without place": func() { EmbedGrad(y, LookupGrad{DTable: m(9, 8), DY: m(2, 8), IDs: ids}) },
	} {
		wantPanic(t, name, f)
	}
}
