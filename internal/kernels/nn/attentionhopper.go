// This file owns attention on Hopper: for which heads its kernels compute attention, with
// which grid, shared memory, tensor maps and scratch. attentionhopper.cu is compiled for
// the same shapes.

package nn

import (
	_ "embed"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

//go:embed attentionhopper_sm90a.ptx
var attentionHopperPTX string

var attentionHopperImage = hopperImage("nn/attentionhopper.cu", attentionHopperPTX)

// attendHopper has the kernels for heads of exactly a size.
type attendHopper struct {
	keys, values int
	// A block of the forward pass has teams groups of four warps with 64 queries each, and
	// step keys at a time, in stages.
	teams, step, stages int
	// A block of the backward pass has hopperKeys keys, gradStep queries at a time in two
	// stages, scores places for gradients of scores, and places for those of queries.
	gradStep, scores, places             int
	attend, delta, gradKeys, gradQueries *device.Kernel
}

const (
	hopperKeys       = 128
	hopperGradStages = 2
	// hopperBlocks are enough for all multiprocessors, which run one at a time, if the
	// longest come first.
	hopperBlocks = 256
	// hopperAlign is what aligns tiles in shared memory.
	hopperAlign        = 1024
	hopperGradThreads  = 3 * 128
	hopperGradBars     = 20
	hopperDeltaThreads = 256
	hopperRoundThreads = 128
)

var attendHoppers = [...]attendHopper{
	newAttendHopper("64", 64, 64, 3, 128, 2, 128, 2, 1),
	newAttendHopper("128", 128, 128, 2, 128, 2, 64, 2, 2),
	newAttendHopper("192", 192, 128, 2, 128, 2, 64, 1, 1),
}

func newAttendHopper(name string, keys, values, teams, step, stages, gradStep, scores, places int) attendHopper {
	kernel := func(step string) *device.Kernel {
		return &device.Kernel{Name: "stowage_nn_attend_" + step + "hopper_" + name, Image: attentionHopperImage}
	}
	return attendHopper{
		keys: keys, values: values, teams: teams, step: step, stages: stages, gradStep: gradStep, scores: scores, places: places,
		attend: kernel(""), delta: kernel("delta_"), gradKeys: kernel("keys_"), gradQueries: kernel("queries_"),
	}
}

// hopper returns the kernels for Hopper, or nil if it has none for these heads.
func (a *Attention) hopper() *attendHopper {
	for i := range attendHoppers {
		if h := &attendHoppers[i]; a.Q.Type == kernels.BF16 && h.keys == a.KeyDim && h.values == a.ValueDim {
			return h
		}
	}
	return nil
}

// groups returns how many blocks of the backward pass share the heads of queries of a tile
// of keys: one if there are enough blocks then.
func (a *Attention) groups() int {
	each, blocks := a.Heads/a.KVHeads, a.Batch*a.KVHeads*divUp(a.Seq, hopperKeys)
	for n := 1; n < each; n++ {
		if each%n == 0 && n*blocks >= hopperBlocks {
			return n
		}
	}
	return each
}

// AttendScratch returns the size of AttentionGrad.Delta: the sums, and for heads that
// Hopper has kernels for the gradients that its blocks add up. That are those of queries,
// counts of who has added, and those of keys and values that several blocks share.
// It depends on the sizes and on the type of Q alone.
func AttendScratch(a Attention) memory.Bytes {
	h := a.hopper()
	if h == nil {
		return a.sums()
	}
	steps, tiles := divUp(a.Seq, h.gradStep), divUp(a.Seq, hopperKeys)
	words := a.Batch*a.Heads*steps*h.gradStep*h.keys + divUp(a.Batch*(a.Heads*steps+a.KVHeads*tiles), 32)*32
	if a.groups() > 1 {
		words += a.Batch * a.KVHeads * tiles * hopperKeys * (h.keys + h.values)
	}
	return (a.sums()+127)/128*128 + memory.Bytes(4*words)
}

func divUp(n, by int) int { return (n + by - 1) / by }

func allBoxable(ms ...Matrix) bool {
	for _, m := range ms {
		if !m.boxable() {
			return false
		}
	}
	return true
}

// tune adds the kernel for Hopper to the launch of the forward pass.
func (a *Attention) tune(l *device.Launch) {
	h := a.hopper()
	if h == nil || !allBoxable(a.Q, a.K, a.V, a.O) {
		return
	}
	rows := 64 * h.teams
	pairs := (divUp(a.Seq, rows) + 1) / 2 * a.Batch * a.Heads
	room := 2*(rows*h.keys+h.stages*h.step*(h.keys+h.values)) + 8*(2+4*h.stages) + hopperAlign
	l.Tuned = device.Tuned{
		Kernel: h.attend, Grid: [3]uint32{uint32(pairs), 1, 1}, Block: [3]uint32{uint32(128 * (h.teams + 1)), 1, 1},
		Shared: uint32(room), Resident: true,
	}
	l.Tuned.Map(a.Q.boxes(rows))
	l.Tuned.Map(a.K.boxes(h.step))
	l.Tuned.Map(a.V.boxes(h.step))
}

// tune adds the kernel for Hopper to the launch of a step of the backward pass.
func (a *AttentionGrad) tune(l *device.Launch, step GradStep) {
	h := a.hopper()
	if h == nil || !allBoxable(a.Q, a.K, a.V, a.O, a.DO, a.DQ, a.DK, a.DV) || a.Delta.Addr()%16 != 0 {
		return
	}
	shape := func(k *device.Kernel, blocks, threads, room int) {
		l.Tuned = device.Tuned{Kernel: k, Grid: [3]uint32{uint32(blocks), 1, 1}, Block: [3]uint32{uint32(threads), 1, 1}, Shared: uint32(room)}
	}
	part := h.gradStep * h.keys / 256 // numbers of a thread's gradients of queries
	switch step {
	case GradDelta:
		shape(h.delta, divUp(a.Batch*a.Seq*a.Heads*h.values/8, hopperDeltaThreads), hopperDeltaThreads, 0)
	case GradKeys:
		room := 2*(hopperKeys+hopperGradStages*h.gradStep)*(h.keys+h.values) + h.gradStep*(2*h.scores*hopperKeys+4*h.places*h.keys) +
			8*hopperGradStages*h.gradStep + 8*hopperGradBars + hopperAlign
		shape(h.gradKeys, a.Batch*a.KVHeads*a.groups()*divUp(a.Seq, hopperKeys), hopperGradThreads, room)
		l.Tuned.Map(a.Q.boxes(h.gradStep))
		l.Tuned.Map(a.K.boxes(hopperKeys))
		l.Tuned.Map(a.V.boxes(hopperKeys))
		l.Tuned.Map(a.DO.boxes(h.gradStep))
	case GradQueries:
		shape(h.gradQueries, 2*a.Batch*a.Heads*divUp(a.Seq, h.gradStep), hopperRoundThreads, 4*divUp(64*part, 2048)*2048)
	}
}
