// This file owns the launches of attention. attentiontwin.go and attentiongradtwin.go have
// the twins.

package nn

import (
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// Attention is causal attention over Batch sequences of Seq tokens. Rows are tokens,
// sequence by sequence; columns are heads: Heads x KeyDim of Q, KVHeads x KeyDim of
// K, KVHeads x ValueDim of V, Heads x ValueDim of O. Consecutive Heads/KVHeads heads
// of Q share one of K and V. All matrices have one type. Scores are never stored.
type Attention struct {
	Q, K, V, O       Matrix
	LSE              device.Range // fp32 [Batch][Heads][Seq]: log of the sum of exponentials
	Batch, Seq       int
	Heads, KVHeads   int
	KeyDim, ValueDim int
	Scale            float32 // of scores, usually 1/sqrt(KeyDim)
	Window           int     // tokens a query sees, itself included; zero is all before it
}

// AttentionGrad is the backward pass of Attention. It writes DQ, DK and DV, which must not
// overlap anything that is read.
type AttentionGrad struct {
	Attention
	DO, DQ, DK, DV Matrix
	Delta          device.Range // scratch of AttendScratch bytes, first fp32 [Batch][Heads][Seq]
}

// AttendLaunch returns the launch of attention. Its arguments:
//
//	0..4  Q, K, V, O, LSE
//	5     Batch | Seq << 32
//	6     Heads | KVHeads << 16 | KeyDim << 32 | ValueDim << 48
//	7     Window | bits of Scale << 32
//	8     pitches of Q, K and V, 21 bits each from bit 0 on
//	9     pitch of O; bit 63 is set for bf16
func AttendLaunch(a Attention) device.Launch {
	a.check()
	l := a.gpuLaunch()
	l.Flops = a.flops(1, 1)
	a.begin(&l, device.Write)
	l.Arg(pitches(a.O) | uint64(a.Q.Type)<<63)
	a.tune(&l)
	return l
}

// Attend issues attention. It writes O and LSE.
func Attend(s device.Stream, a Attention) { s.Launch(AttendLaunch(a)) }

// AttendGradLaunch returns the launch of a step of the backward pass, which is gradSteps
// of them in order. Their arguments are the same: those of attention, then
//
//	9      pitches of O, DO and DQ; bit 63 is set for bf16
//	10     pitches of DK and DV
//	11..15 DO, DQ, DK, DV, Delta
func AttendGradLaunch(a AttentionGrad, step GradStep) device.Launch {
	a.check()
	tokens := a.Batch * a.Seq
	a.DO.shape("the gradient of attention's output", tokens, a.Heads*a.ValueDim)
	a.DQ.shape("the gradient of attention's queries", tokens, a.Heads*a.KeyDim)
	a.DK.shape("the gradient of attention's keys", tokens, a.KVHeads*a.KeyDim)
	a.DV.shape("the gradient of attention's values", tokens, a.KVHeads*a.ValueDim)
	a.mustShareType(a.DO, a.DQ, a.DK, a.DV)
	a.perRow("Delta", a.Delta, AttendScratch(a.Attention))
	l := a.gpuLaunch(step)
	a.begin(&l, device.Read)
	l.Arg(pitches(a.O, a.DO, a.DQ) | uint64(a.Q.Type)<<63)
	l.Arg(pitches(a.DK, a.DV))
	passMatrix(&l, "the gradient of attention's output", a.DO, device.Read)
	passMatrix(&l, "the gradient of attention's queries", a.DQ, device.Write)
	passMatrix(&l, "the gradient of attention's keys", a.DK, device.Write)
	passMatrix(&l, "the gradient of attention's values", a.DV, device.Write)
	l.Write(a.Delta.Slice(0, AttendScratch(a.Attention)))
	a.tune(&l, step)
	l.Flops = a.gradFlops(step, l.Tuned.Kernel != nil)
	return l
}

// AttendGrad issues the backward pass.
func AttendGrad(s device.Stream, a AttentionGrad) {
	for step := range gradSteps {
		s.Launch(AttendGradLaunch(a, step))
	}
}

// flops returns the operations of some products of the scores that the mask leaves, with
// matrices of key width and with those of value width.
func (a *Attention) flops(keys, values int) float64 {
	seen := float64(a.Seq) / 2 // of a row, on average
	if w := float64(a.Window); w > 0 && a.Window < a.Seq {
		seen = w * (1 - w/float64(2*a.Seq))
	}
	return 2 * float64(a.Batch*a.Heads) * float64(a.Seq) * seen * float64(keys*a.KeyDim+values*a.ValueDim)
}

// gradFlops returns the operations of a step of the backward pass. Scores and their
// gradients are needed once, so a step that computes them again does not count them. If
// there is a kernel for Hopper, the step of the keys does all products there.
func (a *AttentionGrad) gradFlops(step GradStep, tuned bool) float64 {
	switch {
	case step == GradKeys && tuned:
		return a.flops(3, 2)
	case step == GradKeys:
		return a.flops(2, 2)
	case step == GradQueries && !tuned:
		return a.flops(1, 0)
	}
	return 0
}

// begin adds the arguments that both launches have.
func (a *Attention) begin(l *device.Launch, out device.Mode) {
	passMatrix(l, "attention's queries", a.Q, device.Read)
	passMatrix(l, "attention's keys", a.K, device.Read)
	passMatrix(l, "attention's values", a.V, device.Read)
	passMatrix(l, "attention's output", a.O, out)
	lse := device.Reads(a.LSE.Slice(0, a.sums()))
	lse.Mode = out
	l.Arg(uint64(lse.Addr()))
	l.Declare(lse)
	l.Arg(uint64(a.Batch) | uint64(a.Seq)<<32)
	l.Arg(uint64(a.Heads) | uint64(a.KVHeads)<<16 | uint64(a.KeyDim)<<32 | uint64(a.ValueDim)<<48)
	l.Arg(uint64(a.Window) | bits(a.Scale)<<32)
	l.Arg(pitches(a.Q, a.K, a.V))
}

// These are the widest fields of an argument.
const (
	pitchBits = 21
	maxHeads  = 1<<16 - 1 // also of the numbers of a head
	maxTokens = 1<<31 - 1
)

// pitches packs up to three pitches.
func pitches(ms ...Matrix) (packed uint64) {
	for i, m := range ms {
		if m.pitch() >= 1<<pitchBits {
			panic(fmt.Sprintf("nn: attention: expected rows at most %d numbers apart, got %d", 1<<pitchBits-1, m.pitch()))
		}
		packed |= uint64(m.pitch()) << (pitchBits * i)
	}
	return packed
}

// sums returns the size of LSE and of Delta.
func (a *Attention) sums() memory.Bytes { return memory.Bytes(4 * a.Batch * a.Heads * a.Seq) }

func (a *Attention) check() {
	if a.Batch <= 0 || a.Seq <= 0 || a.Heads <= 0 || a.KVHeads <= 0 || a.Heads%a.KVHeads != 0 || a.KeyDim <= 0 || a.ValueDim <= 0 || a.Window < 0 ||
		max(a.Heads, a.KeyDim, a.ValueDim) > maxHeads || a.Batch > maxTokens/a.Seq || a.Window > maxTokens {
		panic(fmt.Sprintf("nn: attention over %d sequences of %d tokens with %d query heads, %d key heads, key size %d, value size %d and window %d is invalid; expected positive sizes, and query heads that are a multiple of key heads",
			a.Batch, a.Seq, a.Heads, a.KVHeads, a.KeyDim, a.ValueDim, a.Window))
	}
	tokens := a.Batch * a.Seq
	a.Q.shape("attention's queries", tokens, a.Heads*a.KeyDim)
	a.K.shape("attention's keys", tokens, a.KVHeads*a.KeyDim)
	a.V.shape("attention's values", tokens, a.KVHeads*a.ValueDim)
	a.O.shape("attention's output", tokens, a.Heads*a.ValueDim)
	a.mustShareType(a.K, a.V, a.O)
	a.perRow("LSE", a.LSE, a.sums())
}

func (a *Attention) mustShareType(ms ...Matrix) {
	for _, m := range ms {
		if m.Type != a.Q.Type {
			panic("nn: attention: expected matrices of one type")
		}
	}
}

func (a *Attention) perRow(name string, r device.Range, size memory.Bytes) {
	if r.Len < size || r.Addr()%4 != 0 {
		panic(fmt.Sprintf("nn: %s of attention: expected %d aligned fp32 numbers, got %s", name, size/4, r))
	}
}

// attendWork is a launch as the twins see it.
type attendWork struct {
	q, k, v, o       view
	do, dq, dk, dv   view
	lse, delta       []float32
	batch, seq       int
	heads, kvHeads   int
	keyDim, valueDim int
	window           int // keys that a query sees at most
	scale            float32
}

// view is a matrix as a kernel sees it.
type view struct {
	addr  uint64
	pitch int
	typ   kernels.Number
}

func newAttendWork(args []uint64) *attendWork {
	typ := kernels.Number(args[9] >> 63)
	at := func(i, word, place int) view {
		return view{args[i], int(args[word] >> (pitchBits * place) & (1<<pitchBits - 1)), typ}
	}
	w := &attendWork{
		q: at(0, 8, 0), k: at(1, 8, 1), v: at(2, 8, 2), o: at(3, 9, 0),
		batch: int(uint32(args[5])), seq: int(args[5] >> 32),
		heads: int(uint16(args[6])), kvHeads: int(uint16(args[6] >> 16)),
		keyDim: int(uint16(args[6] >> 32)), valueDim: int(uint16(args[6] >> 48)),
		window: int(uint32(args[7])), scale: math.Float32frombits(uint32(args[7] >> 32)),
	}
	if w.window == 0 {
		w.window = w.seq
	}
	n := w.batch * w.heads * w.seq
	w.lse = device.Slice[float32](args[4], n)
	if len(args) > 10 {
		w.do, w.dq, w.dk, w.dv = at(11, 9, 1), at(12, 9, 2), at(13, 10, 0), at(14, 10, 1)
		w.delta = device.Slice[float32](args[15], n)
	}
	return w
}
