package nn

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

// gpuCases cover each shape of tiles, several tiles of queries and keys with a remainder,
// groups of heads, windows that begin and end within tiles, and heads that fill a tile or
// do not.
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

// attentionTensorCase returns a case with both passes. If even is set, rows begin at
// multiples of 16 bytes.
func attentionTensorCase(t testing.TB, c attentionCase, even bool, room int) *tensorCase {
	m := newTensorMemory(t, room)
	tokens := c.batch * c.seq
	matrix := func(cols int) Matrix { return m.matrix(c.typ, tokens, cols, 8, even) }
	row := func() Matrix { return m.matrix(kernels.F32, 1, c.batch*c.heads*c.seq, 0, even) }
	lse, delta := row(), row()
	q, k, v, o := matrix(c.heads*c.keyDim), matrix(c.kvHeads*c.keyDim), matrix(c.kvHeads*c.valueDim), matrix(c.heads*c.valueDim)
	dq, dk, dv, do := matrix(c.heads*c.keyDim), matrix(c.kvHeads*c.keyDim), matrix(c.kvHeads*c.valueDim), matrix(c.heads*c.valueDim)
	m.fill(rand.New(rand.NewPCG(c.seed, 7)), q, k, v, do)
	// With bf16, weights and their gradients are rounded to one part in 512 before
	// products.
	tolerance := 2e-5
	if c.typ == kernels.BF16 {
		tolerance = 0.03
	}
	return &tensorCase{
		name: fmt.Sprint(c, even), memory: m, results: []Matrix{lse, delta, o, dq, dk, dv}, tolerance: tolerance,
		launches: func(b *device.Buffer) []device.Launch {
			a := AttentionGrad{
				Attention: Attention{
					Q: q.inBuffer(b), K: k.inBuffer(b), V: v.inBuffer(b), O: o.inBuffer(b), LSE: lse.inBuffer(b).Range,
					Batch: c.batch, Seq: c.seq, Heads: c.heads, KVHeads: c.kvHeads, KeyDim: c.keyDim, ValueDim: c.valueDim,
					Window: c.window, Scale: float32(1 / math.Sqrt(float64(c.keyDim))),
				},
				DO: do.inBuffer(b), DQ: dq.inBuffer(b), DK: dk.inBuffer(b), DV: dv.inBuffer(b), Delta: delta.inBuffer(b).Range,
			}
			launches := []device.Launch{AttendLaunch(a.Attention)}
			for step := range gradSteps {
				launches = append(launches, AttendGradLaunch(a, step))
			}
			return launches
		},
	}
}

// The GPU source, compiled for the host, computes what the twin computes.
func TestAttentionSourceOnTheHost(t *testing.T) {
	programs := map[kernels.Number]*tensorProgram{
		kernels.F32:  newTensorProgram(t, "attentionplain.cu", attentionPlainPTX),
		kernels.BF16: newTensorProgram(t, "attention.cu", attentionPTX),
	}
	for i, c := range gpuCases {
		attentionTensorCase(t, c, i%2 == 0, 4<<20).onHost(t, programs[c.typ])
	}
}

func TestAttentionOnGPU(t *testing.T) {
	g := newTensorGPU(t)
	cases := append(slices.Clone(gpuCases),
		attentionCase{batch: 2, seq: 1000, heads: 8, kvHeads: 2, keyDim: 128, valueDim: 128, typ: kernels.BF16},
		attentionCase{batch: 1, seq: 777, heads: 4, kvHeads: 2, keyDim: 64, valueDim: 64, window: 200, typ: kernels.BF16},
		attentionCase{batch: 1, seq: 512, heads: 4, kvHeads: 4, keyDim: 192, valueDim: 128, typ: kernels.BF16},
		attentionCase{batch: 1, seq: 515, heads: 2, kvHeads: 1, keyDim: 256, valueDim: 256, typ: kernels.BF16},
		attentionCase{batch: 1, seq: 515, heads: 4, kvHeads: 1, keyDim: 128, valueDim: 128},
		attentionCase{batch: 1, seq: 300, heads: 2, kvHeads: 1, keyDim: 256, valueDim: 256, window: 100},
	)
	for _, c := range cases {
		attentionTensorCase(t, c, true, 64<<20).onGPU(t, g)
		attentionTensorCase(t, c, false, 64<<20).onGPU(t, g)
	}
}
