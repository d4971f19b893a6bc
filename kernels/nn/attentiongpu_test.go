package nn

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/kernels"
)

// gpuCases have each shape of tiles, several tiles of queries and of keys with rest,
// groups of heads, windows that begin and end within tiles, and heads that fill a
// shape or do not.
var gpuCases = []attentionCase{
	{batch: 2, seq: 70, heads: 4, kvHeads: 2, keyDim: 16, valueDim: 24, typ: kernels.BF16},
	{batch: 1, seq: 201, heads: 2, kvHeads: 1, keyDim: 64, valueDim: 40, window: 67, typ: kernels.BF16},
	{batch: 1, seq: 260, heads: 1, kvHeads: 1, keyDim: 64, valueDim: 64, window: 3, typ: kernels.BF16},
	{batch: 1, seq: 140, heads: 2, kvHeads: 1, keyDim: 72, valueDim: 128, typ: kernels.BF16},
	{batch: 1, seq: 129, heads: 1, kvHeads: 1, keyDim: 192, valueDim: 128, typ: kernels.BF16},
	{batch: 1, seq: 97, heads: 2, kvHeads: 1, keyDim: 256, valueDim: 200, window: 40, typ: kernels.BF16},
	{batch: 2, seq: 70, heads: 4, kvHeads: 2, keyDim: 16, valueDim: 24},
	{batch: 1, seq: 131, heads: 2, kvHeads: 1, keyDim: 128, valueDim: 100, window: 33},
	{batch: 1, seq: 67, heads: 2, kvHeads: 1, keyDim: 130, valueDim: 256},
	{batch: 1, seq: 1, heads: 1, kvHeads: 1, keyDim: 8, valueDim: 8, typ: kernels.BF16},
}

// The source for GPUs, run on the host, does what the twin does.
func TestAttentionSourceOnTheHost(t *testing.T) {
	programs := map[kernels.Number]*tensorProgram{
		kernels.F32:  newTensorProgram(t, "attentionplain.cu", attentionPlainPTX),
		kernels.BF16: newTensorProgram(t, "attention.cu", attentionPTX),
	}
	for i, c := range gpuCases {
		even := i%2 == 0
		t.Run(fmt.Sprint(c, even), func(t *testing.T) {
			t.Parallel()
			m := newTensorMemory(t, 4<<20)
			tokens := c.batch * c.seq
			matrix := func(cols int) Matrix { return m.matrix(c.typ, tokens, cols, 8, even) }
			row := func() Matrix { return m.matrix(kernels.F32, 1, c.batch*c.heads*c.seq, 0, even) }
			lse, delta := row(), row()
			a := AttentionGrad{
				Attention: Attention{
					Q: matrix(c.heads * c.keyDim), K: matrix(c.kvHeads * c.keyDim), V: matrix(c.kvHeads * c.valueDim), O: matrix(c.heads * c.valueDim),
					LSE: lse.Range, Batch: c.batch, Seq: c.seq, Heads: c.heads, KVHeads: c.kvHeads,
					KeyDim: c.keyDim, ValueDim: c.valueDim, Window: c.window, Scale: float32(1 / math.Sqrt(float64(c.keyDim))),
				},
				DO: matrix(c.heads * c.valueDim), Delta: delta.Range,
				DQ: matrix(c.heads * c.keyDim), DK: matrix(c.kvHeads * c.keyDim), DV: matrix(c.kvHeads * c.valueDim),
			}
			m.fill(rand.New(rand.NewPCG(uint64(i), 7)), a.Q, a.K, a.V, a.DO)
			launches := []device.Launch{AttendLaunch(a.Attention)}
			for step := range gradSteps {
				launches = append(launches, AttendGradLaunch(a, step))
			}
			got := programs[c.typ].run(t, m.bytes, m.from(), launches...)
			for _, l := range launches {
				l.Kernel.Go(&l)
			}
			// With bf16 weights and their gradients are rounded before products, to
			// one part in 512.
			tolerance := 2e-5
			if c.typ == kernels.BF16 {
				tolerance = 0.03
			}
			m.compare(t, "attention", got, tolerance, lse, delta, a.O, a.DQ, a.DK, a.DV)
		})
	}
}
