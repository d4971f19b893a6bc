// This file owns how a product is set up: which products are accepted, their descriptors
// and their algorithms.

package blas

import (
	"errors"
	"sync/atomic"
	"unsafe"
)

const (
	// aligned is the alignment of addresses and pitches in bytes. Algorithms are chosen
	// for this alignment and no better one, so that the choice does not depend on where
	// matrices lie.
	aligned = 16
	// leastWork is the least number of multiplications that is accepted: one tile of
	// our own kernel. At 350 TFLOP/s on 132 multiprocessors, one of them takes 1.6 µs
	// for it, less than a launch.
	leastWork = 128 * 128 * 128
	// asked is how many algorithms the library is asked for.
	asked = 16
)

// product is what all launches of a product have in common: op(A) of m x k times op(B) of
// k x n, the pitches, the types and what is transposed.
type product struct {
	m, n, k                        uint32
	pitchA, pitchB, pitchC, pitchP uint32
	how                            how
	plus                           plus
}

// plus is what is added to a product.
type plus uint8

const (
	nothing plus = iota
	itself       // C
	another
)

// how is the last argument of a product's launch, as nn.GemmLaunch documents it.
type how uint64

func (h how) bf16(operand int) bool { return h>>operand&1 != 0 }
func (h how) transA() bool          { return h>>4&1 != 0 }
func (h how) transB() bool          { return h>>5&1 != 0 }

func (h how) dataType(operand int) uintptr {
	if h.bf16(operand) {
		return typeBF16
	}
	return typeF32
}

func (h how) elementSize(operand int) uint64 {
	if h.bf16(operand) {
		return 2
	}
	return 4
}

// productOf reads the arguments of nn.GemmLaunch.
func productOf(args []uint64) product {
	x := product{
		m: uint32(args[4]), n: uint32(args[4] >> 32), k: uint32(args[5]),
		pitchA: uint32(args[6]), pitchB: uint32(args[6] >> 32),
		pitchC: uint32(args[7]), pitchP: uint32(args[7] >> 32),
		how: how(args[8]),
	}
	switch args[3] {
	case 0: // as if it were C
		x.pitchP = x.pitchC
		x.how = x.how&^(1<<3) | x.how&(1<<2)<<1
	case args[2]:
		x.plus = itself
	default:
		x.plus = another
	}
	return x
}

// suits reports whether the library should do a product: it is not small, the library has
// an algorithm for its types, and every row begins at a multiple of 16 bytes.
func (x *product) suits(args []uint64) bool {
	if uint64(x.m)*uint64(x.n)*uint64(x.k) < leastWork {
		return false
	}
	if h := x.how; h.bf16(0) != h.bf16(1) || h.bf16(2) && !h.bf16(0) || h.bf16(3) != h.bf16(2) {
		return false
	}
	odd := uint64(0)
	for i, pitch := range [4]uint32{x.pitchA, x.pitchB, x.pitchC, x.pitchP} {
		odd |= args[i] | uint64(pitch)*x.how.elementSize(i)
	}
	return odd%aligned == 0
}

// withoutGaps returns the product of the same shape that adds nothing, without gaps between
// rows. An algorithm is chosen for it, so that neither the pitch of a buffer nor what is
// added changes the order of sums.
func (x product) withoutGaps() product {
	gapless := func(cols uint32, operand int) uint32 {
		to := uint32(aligned / x.how.elementSize(operand))
		return (cols + to - 1) / to * to
	}
	x.pitchA, x.pitchB, x.pitchC = gapless(x.k, 0), gapless(x.n, 1), gapless(x.n, 2)
	if x.how.transA() {
		x.pitchA = gapless(x.m, 0)
	}
	if x.how.transB() {
		x.pitchB = gapless(x.k, 1)
	}
	x.pitchP, x.plus = x.pitchC, nothing
	return x
}

// plan is a product's descriptors and the algorithm that was chosen for it. It changes
// only if the library refuses a call.
type plan struct {
	desc          uintptr
	a, b, c, plus uintptr // layouts; plus may be c
	one, beta     float32
	algo          algorithm   // all zeros if the library has none
	refused       atomic.Bool // there is no algorithm, or the library does not run it
}

// planOf returns a product's plan, and makes it if there is none.
func (p *Products) planOf(x product) (*plan, error) {
	p.mu.RLock()
	pl := p.plans[x]
	p.mu.RUnlock()
	if pl != nil {
		return pl, nil
	}
	bare, err := (*plan)(nil), error(nil)
	if b := x.withoutGaps(); b != x {
		if bare, err = p.planOf(b); err != nil {
			return nil, err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if pl = p.plans[x]; pl != nil {
		return pl, nil
	}
	pl = &plan{one: 1}
	if err = p.describe(pl, &x); err == nil && bare == nil {
		err = p.choose(pl, &x)
	}
	if err != nil {
		p.destroyPlan(pl)
		return nil, err
	}
	if bare != nil {
		pl.algo = bare.algo
	}
	pl.refused.Store(pl.algo == algorithm{})
	p.plans[x] = pl
	return pl, nil
}

// describe makes the descriptors. A matrix that is stored by rows is its own transpose
// stored by columns, so rows and columns of layouts are exchanged, and so are operands.
func (p *Products) describe(pl *plan, x *product) error {
	m, n, k := uintptr(x.m), uintptr(x.n), uintptr(x.k)
	if x.plus != nothing {
		pl.beta = 1
	}
	aRows, aCols, opA := k, m, int32(opNone)
	if x.how.transA() {
		aRows, aCols, opA = m, k, opTranspose
	}
	bRows, bCols, opB := n, k, int32(opNone)
	if x.how.transB() {
		bRows, bCols, opB = k, n, opTranspose
	}
	l := p.lib
	objects := []struct {
		at   *uintptr
		make *proc
		args [4]uintptr
	}{
		{&pl.desc, &l.descCreate, [4]uintptr{computeF32, typeF32}},
		{&pl.a, &l.layoutCreate, [4]uintptr{x.how.dataType(0), aRows, aCols, uintptr(x.pitchA)}},
		{&pl.b, &l.layoutCreate, [4]uintptr{x.how.dataType(1), bRows, bCols, uintptr(x.pitchB)}},
		{&pl.c, &l.layoutCreate, [4]uintptr{x.how.dataType(2), n, m, uintptr(x.pitchC)}},
		{&pl.plus, &l.layoutCreate, [4]uintptr{x.how.dataType(3), n, m, uintptr(x.pitchP)}},
	}
	if x.plus != another {
		objects = objects[:4]
	}
	for _, o := range objects {
		var err error
		if *o.at, err = l.object(o.make, o.args); err != nil {
			return err
		}
	}
	if x.plus != another {
		pl.plus = pl.c
	}
	return errors.Join(
		set(l, &l.descSet, pl.desc, descTransA, opB),
		set(l, &l.descSet, pl.desc, descTransB, opA),
	)
}

// choose asks the library for algorithms and uses the first that keeps the rules.
func (p *Products) choose(pl *plan, x *product) error {
	l := p.lib
	pref, err := l.object(&l.preferenceCreate, [4]uintptr{})
	if err != nil {
		return err
	}
	defer l.preferenceDestroy.call(pref)
	if err := p.prefer(pref, x); err != nil {
		return err
	}
	var found [asked]candidate
	var n int32
	s := l.algoGetHeuristic.call(p.handle, pl.desc, pl.b, pl.a, pl.plus, pl.c, pref,
		asked, uintptr(pointer(&found)), uintptr(pointer(&n)))
	switch s {
	case success, errNotSupported, errInvalidValue: // the last two find nothing
	default:
		return l.failed(&l.algoGetHeuristic, s)
	}
	for i := range found[:n] {
		if c := &found[i]; c.state == success && p.keeps(c) {
			pl.algo = c.algo
			return nil
		}
	}
	return nil
}

// prefer sets which algorithms are acceptable.
func (p *Products) prefer(pref uintptr, x *product) error {
	l := p.lib
	numerics := ^uint64(0)
	if !x.how.bf16(0) {
		numerics &^= numericsNotF32
	}
	err := errors.Join(
		set(l, &l.preferenceSet, pref, prefWorkspace, uint64(p.room.size)),
		set(l, &l.preferenceSet, pref, prefReductions, p.room.reductions),
		set(l, &l.preferenceSet, pref, prefNumerics, numerics),
	)
	for i := range uintptr(4) {
		err = errors.Join(err, set(l, &l.preferenceSet, pref, prefAlignA+i, uint32(aligned)))
	}
	return err
}

// keeps reports whether an algorithm keeps the preference. If the library took the
// preference for a hint, results could differ from run to run.
func (p *Products) keeps(c *candidate) bool {
	l := p.lib
	var scheme uint32
	var written uint64
	s := l.algoConfigGet.call(uintptr(pointer(&c.algo)), configReduction,
		uintptr(pointer(&scheme)), unsafe.Sizeof(scheme), uintptr(pointer(&written)))
	return s == success && scheme&^p.room.reductions == 0 && c.workspace <= uint64(p.room.size)
}

// destroyPlan destroys the descriptors of a plan.
func (p *Products) destroyPlan(pl *plan) {
	l := p.lib
	if pl.plus == pl.c {
		pl.plus = 0
	}
	for _, layout := range []uintptr{pl.a, pl.b, pl.c, pl.plus} {
		if layout != 0 {
			l.layoutDestroy.call(layout)
		}
	}
	if pl.desc != 0 {
		l.descDestroy.call(pl.desc)
	}
}
