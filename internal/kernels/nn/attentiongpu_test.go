package nn

import (
	"fmt"
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
	sums := c.batch * c.heads * c.seq
	scratch := int(AttendScratch(c.sizes()) / 4)
	lse, delta := m.matrix(kernels.F32, 1, sums, 0, even), m.matrix(kernels.F32, 1, scratch, 0, even)
	q, k, v, o := matrix(c.heads*c.keyDim), matrix(c.kvHeads*c.keyDim), matrix(c.kvHeads*c.valueDim), matrix(c.heads*c.valueDim)
	dq, dk, dv, do := matrix(c.heads*c.keyDim), matrix(c.kvHeads*c.keyDim), matrix(c.kvHeads*c.valueDim), matrix(c.heads*c.valueDim)
	m.fill(rand.New(rand.NewPCG(c.seed, 7)), q, k, v, do)
	// With bf16, weights and their gradients are rounded to one part in 512 before
	// products.
	tolerance := 2e-5
	if c.typ == kernels.BF16 {
		tolerance = 0.03
	}
	var spare []Matrix
	if scratch > sums {
		spare = append(spare, delta.Columns(sums, scratch-sums))
	}
	return &tensorCase{
		name: fmt.Sprint(c, even), memory: m, results: []Matrix{lse, delta.Columns(0, sums), o, dq, dk, dv}, scratch: spare, tolerance: tolerance,
		launches: func(b *device.Buffer) []device.Launch {
			a := AttentionGrad{
				Attention: c.sizes(),
				DO:        do.inBuffer(b), DQ: dq.inBuffer(b), DK: dk.inBuffer(b), DV: dv.inBuffer(b), Delta: delta.inBuffer(b).Range,
			}
			a.Q, a.K, a.V, a.O, a.LSE = q.inBuffer(b), k.inBuffer(b), v.inBuffer(b), o.inBuffer(b), lse.inBuffer(b).Range
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

// hopperCases have heads that Hopper has kernels for: one and several tiles of queries and
// keys with a remainder, groups of heads, and windows.
var hopperCases = []attentionCase{
	{batch: 1, seq: 64, heads: 1, kvHeads: 1, keyDim: 128, valueDim: 128, typ: kernels.BF16},
	{batch: 1, seq: 300, heads: 2, kvHeads: 1, keyDim: 128, valueDim: 128, window: 130, typ: kernels.BF16},
	{batch: 2, seq: 200, heads: 1, kvHeads: 1, keyDim: 64, valueDim: 64, typ: kernels.BF16},
	{batch: 1, seq: 390, heads: 2, kvHeads: 1, keyDim: 64, valueDim: 64, window: 5, typ: kernels.BF16},
	{batch: 2, seq: 140, heads: 1, kvHeads: 1, keyDim: 192, valueDim: 128, typ: kernels.BF16},
}

// The source for Hopper, compiled for the host, computes what the twin computes. SPEC S6.3
func TestAttentionForHopperOnTheHost(t *testing.T) {
	p := newTensorProgram(t, "attentionhopper.cu", attentionHopperPTX)
	for _, c := range hopperCases {
		if !attentionTensorCase(t, c, true, 16<<20).tunedOnHost(t, p) {
			t.Errorf("%v has no kernel for Hopper", c)
		}
	}
	if attentionTensorCase(t, hopperCases[0], false, 4<<20).tunedOnHost(t, p) {
		t.Error("rows that are not aligned have a kernel for Hopper")
	}
	// As if there were enough blocks: one of them walks over all heads that share keys.
	few := attentionTensorCase(t, hopperCases[1], true, 16<<20)
	launches := few.launches
	few.launches = func(b *device.Buffer) []device.Launch {
		all := launches(b)
		keys := &all[1+GradKeys].Tuned
		keys.Grid[0] /= uint32(hopperCases[1].heads / hopperCases[1].kvHeads)
		return all
	}
	few.tunedOnHost(t, p)
}

// Blocks of the backward pass on Hopper walk over as many heads as leaves enough blocks. SPEC S6.3
func TestAttentionGroups(t *testing.T) {
	for _, c := range []struct{ batch, seq, heads, kvHeads, want int }{
		{4, 4096, 32, 8, 1},
		{1, 4096, 16, 16, 1},
		{1, 2048, 32, 8, 2},
		{1, 1408, 48, 8, 3},
		{1, 100, 32, 1, 32},
	} {
		a := Attention{Batch: c.batch, Seq: c.seq, Heads: c.heads, KVHeads: c.kvHeads}
		if got := a.groups(); got != c.want {
			t.Errorf("%+v: %d blocks share the heads of a tile of keys", c, got)
		}
	}
}

func TestAttentionOnGPU(t *testing.T) {
	g := newTensorGPU(t)
	cases := append(slices.Clone(gpuCases),
		attentionCase{batch: 2, seq: 1000, heads: 8, kvHeads: 2, keyDim: 128, valueDim: 128, typ: kernels.BF16},
		attentionCase{batch: 2, seq: 520, heads: 32, kvHeads: 8, keyDim: 64, valueDim: 64, typ: kernels.BF16},
		attentionCase{batch: 9, seq: 130, heads: 32, kvHeads: 16, keyDim: 64, valueDim: 64, typ: kernels.BF16},
		attentionCase{batch: 1, seq: 777, heads: 4, kvHeads: 2, keyDim: 64, valueDim: 64, window: 200, typ: kernels.BF16},
		attentionCase{batch: 1, seq: 512, heads: 4, kvHeads: 4, keyDim: 192, valueDim: 128, typ: kernels.BF16},
		attentionCase{batch: 1, seq: 515, heads: 2, kvHeads: 1, keyDim: 256, valueDim: 256, typ: kernels.BF16},
		attentionCase{batch: 1, seq: 515, heads: 4, kvHeads: 1, keyDim: 128, valueDim: 128},
		attentionCase{batch: 1, seq: 300, heads: 2, kvHeads: 1, keyDim: 256, valueDim: 256, window: 100},
	)
	for _, c := range append(cases, hopperCases...) {
		t.Run(c.String(), func(t *testing.T) {
			attentionTensorCase(t, c, true, 64<<20).onGPU(t, g)
			attentionTensorCase(t, c, true, 64<<20).plain().onGPU(t, g)
			attentionTensorCase(t, c, false, 64<<20).onGPU(t, g)
		})
	}
}
