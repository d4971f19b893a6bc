// This file owns the tests of the whole path of tokens through experts: they are routed,
// sorted, sent to the ranks of their experts, and sent back. The reference is a dense
// mixture in float64.

package nn

import (
	"math"
	"testing"
	"unsafe"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// site is a device with the memory of a test.
type site struct {
	dev device.Device
	device.Stream
	t    failing
	bufs []*device.Buffer
}

func siteRange[T any](x *site, v []T) device.Range {
	x.t.Helper()
	b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), len(v)*int(unsafe.Sizeof(v[0])))
	buf, err := x.dev.Alloc(memory.Device, memory.Bytes(len(b)), "test")
	if err != nil {
		x.t.Fatalf("%v", err)
	}
	x.bufs = append(x.bufs, buf)
	x.Upload(buf.All(), b)
	return buf.All()
}

func siteRead[T any](x *site, r device.Range) []T {
	x.t.Helper()
	var zero T
	v := make([]T, int(r.Len)/int(unsafe.Sizeof(zero)))
	if err := x.Download(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), r.Len), r); err != nil {
		x.t.Fatalf("%v", err)
	}
	return v
}

func (x *site) free() {
	for _, b := range x.bufs {
		x.Free(b)
	}
	x.bufs = nil
}

// words and floats return memory that does not hold zeros.
func (x *site) words(n int) device.Range {
	v := make([]uint32, n)
	for i := range v {
		v[i] = 0xa5a5a5a5
	}
	return siteRange(x, v)
}

func (x *site) floats(rows, cols int) Matrix {
	return NewMatrix(x.words(rows*cols), kernels.F32, rows, cols)
}

// mixture is a layer of experts spread over ranks, each with tokens of its own.
// Expert e multiplies column c of its rows by factor(e, c).
type mixture struct {
	ranks, experts, local, tokens, topK, cols int
	sigmoid                                   bool
	x, logits                                 [][]float32 // of each rank
}

func (m *mixture) factor(e, c int) float32 { return 1 + float32(e) + float32(c%3)/4 }

// dense returns the output of each token of a rank: the sum over all experts, most of
// which have no weight.
func (m *mixture) dense(rank int, index []uint32) (y []float64) {
	r := Routing{TopK: m.topK, Sigmoid: m.sigmoid, Normalise: true, Factor: 1}
	for t := range m.tokens {
		logits := make([]float64, m.experts)
		for e := range logits {
			logits[e] = float64(m.logits[rank][t*m.experts+e])
		}
		weights := make([]float64, m.experts)
		chosen := index[t*m.topK:][:m.topK]
		for k, w := range weights64(r, scores64(logits, m.sigmoid), chosen) {
			weights[chosen[k]] = w
		}
		for c := range m.cols {
			sum := 0.0
			for e, w := range weights {
				sum += w * float64(m.factor(e, c)) * float64(m.x[rank][t*m.cols+c])
			}
			y = append(y, sum)
		}
	}
	return y
}

// sender is what a rank keeps from dispatch for the return of its rows.
type sender struct {
	Routing
	Sorting
	rows Matrix // with a slot for each rank
}

// send routes a rank's tokens and sorts them by the rank of their experts.
func (m *mixture) send(x *site, rank, part int) sender {
	pairs, room := m.tokens*m.topK, m.ranks*part
	s := sender{Routing: Routing{TopK: m.topK, Sigmoid: m.sigmoid, Normalise: true, Factor: 1}}
	s.Logits = NewMatrix(siteRange(x, m.logits[rank]), kernels.F32, m.tokens, m.experts)
	s.Scores, s.Routing.Index, s.Weight = x.floats(m.tokens, m.experts), x.words(pairs), x.words(pairs)
	Route(x, s.Routing)
	s.Sorting = Sorting{
		Index: s.Routing.Index, Tokens: m.tokens, TopK: m.topK, Experts: m.experts, Group: m.local, Slot: part, Room: room,
		Seg: Segments{x.words(2 * m.experts), m.experts}, Source: x.words(room), Place: x.words(pairs),
		Count: siteRange(x, []uint64{99}), Counts: x.words(m.experts), Scratch: x.words(int(SortScratch(m.tokens, m.topK, m.experts) / 4)),
	}
	SortRows(x, s.Sorting)
	tokens := NewMatrix(siteRange(x, m.x[rank]), kernels.F32, m.tokens, m.cols)
	s.rows = x.floats(room, m.cols)
	TakeRows(x, Taking{Dst: s.rows, Src: tokens, Source: s.Source, Every: m.topK})
	return s
}

// exchange copies slot q of rank p to slot p of rank q.
func exchange(x *site, to, from []device.Range) {
	for q := range to {
		n := to[q].Len / memory.Bytes(len(from))
		for p := range from {
			x.Copy(to[q].Slice(memory.Bytes(p)*n, n), from[p].Slice(memory.Bytes(q)*n, n))
		}
	}
}

// work computes the experts of a rank on the rows that came.
func (m *mixture) work(x *site, rank, part, slot, room int, came Matrix, counts device.Range, back Matrix) {
	r := Regrouping{
		Counts: counts, Ranks: m.ranks, Experts: m.local, Part: part, Slot: slot, Room: room,
		Seg: Segments{x.words(2 * m.local), m.local}, Source: x.words(room), Place: x.words(m.ranks * part), Count: siteRange(x, []uint64{99}),
	}
	Regroup(x, r)
	rows := x.floats(room, m.cols)
	TakeRows(x, Taking{Dst: rows, Src: came, Source: r.Source, Every: 1, Zero: true})
	v := siteRead[float32](x, rows.Range)
	for e, s := range siteRead[[2]uint32](x, r.Seg.Range) {
		for row := s[0]; row < s[0]+s[1]; row++ {
			for c := range m.cols {
				v[int(row)*m.cols+c] *= m.factor(rank*m.local+e, c)
			}
		}
	}
	if n := siteRead[uint64](x, r.Count)[0]; n > uint64(room) {
		x.t.Fatalf("%d rows do not fit into %d", n, room)
	}
	done := NewMatrix(siteRange(x, v), kernels.F32, room, m.cols)
	TakeRows(x, Taking{Dst: back, Src: done, Source: r.Place, Every: 1})
}

// receive multiplies the rows that came back by their weights and returns the sum for
// each token.
func (m *mixture) receive(x *site, s sender, back Matrix) []float32 {
	pairs := NewMatrix(s.Weight, kernels.F32, m.tokens*m.topK, 1)
	weight := x.floats(back.Rows, 1)
	TakeRows(x, Taking{Dst: weight, Src: pairs, Source: s.Source, Every: 1, Zero: true})
	v, w := siteRead[float32](x, back.Range), siteRead[float32](x, weight.Range)
	for i := range v {
		v[i] *= w[i/m.cols]
	}
	y := x.floats(m.tokens, m.cols)
	CombineRows(x, Combining{Dst: y, Src: NewMatrix(siteRange(x, v), kernels.F32, back.Rows, m.cols), Place: s.Place, Every: m.topK})
	return siteRead[float32](x, y.Range)
}

// Tokens come back from any number of ranks as from a dense mixture, with every launch
// under the race checker. SPEC S1.1 S6.2
func TestRowsThroughExperts(t *testing.T) {
	d, s := checked(t)
	rapid.Check(t, func(t *rapid.T) {
		x := &site{dev: d, Stream: s, t: t}
		defer x.free()
		m := mixture{
			ranks: rapid.IntRange(1, 4).Draw(t, "ranks"), local: rapid.IntRange(1, 5).Draw(t, "local"), sigmoid: rapid.Bool().Draw(t, "sigmoid"),
			tokens: rapid.IntRange(1, 40).Draw(t, "tokens"), cols: rapid.IntRange(1, 20).Draw(t, "columns"),
		}
		m.experts = m.ranks * m.local
		m.topK = rapid.IntRange(1, min(m.experts, 4)).Draw(t, "top")
		number := rapid.Float32Range(-3, 3)
		for range m.ranks {
			m.x = append(m.x, rapid.SliceOfN(number, m.tokens*m.cols, m.tokens*m.cols).Draw(t, "x"))
			m.logits = append(m.logits, rapid.SliceOfN(number, m.tokens*m.experts, m.tokens*m.experts).Draw(t, "logits"))
		}
		// A token sends at most this number of rows to one rank.
		part := m.tokens * min(m.topK, m.local)
		slot := rapid.SampledFrom([]int{0, m.ranks * m.tokens}).Draw(t, "slot")
		room := m.ranks * part
		if slot > 0 {
			room = m.local * slot
		}
		var senders []sender
		var sent, counts, came, told, done, back []device.Range
		for p := range m.ranks {
			senders = append(senders, m.send(x, p, part))
			sent, counts = append(sent, senders[p].rows.Range), append(counts, senders[p].Counts)
			came, told = append(came, x.floats(m.ranks*part, m.cols).Range), append(told, x.words(m.experts))
			done, back = append(done, x.floats(m.ranks*part, m.cols).Range), append(back, x.floats(m.ranks*part, m.cols).Range)
		}
		exchange(x, came, sent)
		exchange(x, told, counts)
		for p := range m.ranks {
			m.work(x, p, part, slot, room, NewMatrix(came[p], kernels.F32, m.ranks*part, m.cols), told[p], NewMatrix(done[p], kernels.F32, m.ranks*part, m.cols))
		}
		exchange(x, back, done)
		for p := range m.ranks {
			y := m.receive(x, senders[p], NewMatrix(back[p], kernels.F32, m.ranks*part, m.cols))
			for i, want := range m.dense(p, siteRead[uint32](x, senders[p].Routing.Index)) {
				if got := float64(y[i]); !(math.Abs(got-want) <= 1e-5*(1+math.Abs(want))) {
					t.Fatalf("rank %d: token %d, column %d is %g, want %g", p, i/m.cols, i%m.cols, got, want)
				}
			}
		}
	})
}

// Every kernel of routing runs under the checker. SPEC S6.2
func TestRouteUnderCheck(t *testing.T) {
	d, s := checked(t)
	x := &site{dev: d, Stream: s, t: t}
	defer x.free()
	const tokens, experts, topK = 20, 8, 2
	r := Routing{TopK: topK, Normalise: true, Factor: 1, Logits: NewMatrix(siteRange(x, make([]float32, tokens*experts)), kernels.F32, tokens, experts)}
	r.Scores, r.Index, r.Weight, r.Load = x.floats(tokens, experts), x.words(tokens*topK), x.words(tokens*topK), siteRange(x, make([]uint32, experts))
	r.Bias = siteRange(x, make([]float32, experts))
	Route(s, r)
	loss := siteRange(x, []float32{0})
	RouteGrad(s, RoutingGrad{
		Routing: r, DWeight: r.Weight, DLogits: x.floats(tokens, experts), Balance: 0.5, Scale: 2, Loss: loss, Scratch: x.words(tokens + experts),
	})
	UpdateBias(s, Rebalance{Bias: r.Bias, Load: r.Load, Experts: experts, Rate: 0.5})
	// Equal logits: all tokens choose experts 0 and 1, and scores are 1/8.
	if got := siteRead[float32](x, loss)[0]; math.Abs(float64(got)-0.25) > 1e-6 {
		t.Errorf("loss is %g, want 0.25", got)
	}
	if got := siteRead[float32](x, r.Bias); got[0] != -0.5 || got[1] != -0.5 || got[2] != 0.5 {
		t.Errorf("bias is %v", got)
	}
}
