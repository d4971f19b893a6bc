// This file owns the launches of matrix products, dense ones and products over experts.
// gemmtwin.go has the twins.

package nn

import (
	"cmp"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// These are bits of the last argument of all products, behind those of typeBits for A, B, C
// and Plus.
const (
	gemmTransA = 1 << 4
	gemmTransB = 1 << 5
	gemmFirst  = 1 << 6
)

// Product is C = op(A) op(B), plus Plus if that has memory. op transposes or does nothing.
// Types may differ. Plus may be C. C must not overlap anything else that is read.
type Product struct {
	A, B, C        Matrix
	TransA, TransB bool
	Plus           Matrix
}

// Gemm issues a product.
func Gemm(s device.Stream, p Product) { s.Launch(GemmLaunch(p)) }

// GemmLaunch returns the launch of a product. With op(A) of m x k and op(B) of k x n its
// arguments are:
//
//	0..3  A, B, C, Plus or zero
//	4     m | n << 32
//	5     k
//	6     pitch of A | pitch of B << 32
//	7     pitch of C | pitch of Plus << 32
//	8     bits 0 to 3: A, B, C, Plus are bf16; bit 4: TransA; bit 5: TransB
func GemmLaunch(p Product) device.Launch {
	m, k := p.A.Rows, p.A.Cols
	how := typeBits(p.A, p.B, p.C, p.Plus)
	if p.TransA {
		m, k = k, m
		how |= gemmTransA
	}
	n := p.C.Cols
	if p.TransB {
		p.B.shape("a product's transposed B", n, k)
		how |= gemmTransB
	} else {
		p.B.shape("a product's B", k, n)
	}
	p.C.shape("a product's C", m, n)
	l := gemmKernels.launch(p.A, p.B, p.TransA, p.TransB, gemmTiles(m)*gemmTiles(n))
	if p.thin() {
		l = device.NewLaunch(&thinKernel, thinBlocks(m, n), thinThreads)
	}
	if p.flat() {
		l = device.NewLaunch(&flatKernel, flatBlocks(m, n), flatThreads)
	}
	l.Flops = productFlops(m, n, k)
	passMatrix(&l, "a product's A", p.A, device.Read)
	passMatrix(&l, "a product's B", p.B, device.Read)
	passMatrix(&l, "a product's C", p.C, device.Write)
	p.passPlus(&l)
	l.Arg(packPair(m, n))
	l.Arg(uint64(k))
	l.Arg(packPair(p.A.pitch(), p.B.pitch()))
	l.Arg(packPair(p.C.pitch(), p.Plus.pitch()))
	l.Arg(how)
	p.tuneRouter(&l, m, n)
	if p.C.even() && p.Plus.even() && (p.Plus.Buf == nil || p.Plus.Type == p.C.Type) {
		switch {
		case !p.TransA:
			f := hopperDenseForm(m, n, k, p.TransB)
			f.tune(&l, gemmHopper, p.TransB, p.A, p.B, f.tiles(m, n))
		case !p.TransB:
			f := hopperTurnedForm(m, n)
			f.tune(&l, gemmTurnedHopper, false, p.A, p.B, f.tiles(m, n))
		}
	}
	return l
}

// productFlops returns the operations of a product.
func productFlops(m, n, k int) float64 { return 2 * float64(m) * float64(n) * float64(k) }

// passPlus adds Plus. It needs no declaration of its own if it is C.
func (p Product) passPlus(l *device.Launch) {
	if p.Plus.Buf == nil {
		l.Arg(0)
		return
	}
	p.Plus.shape("what a product is added to", p.C.Rows, p.C.Cols)
	if p.Plus.Addr() != p.C.Addr() {
		passMatrix(l, "what a product is added to", p.Plus, device.Read)
		return
	}
	if p.Plus.Type != p.C.Type || p.Plus.pitch() != p.C.pitch() {
		panic(fmt.Sprintf("nn: C and Plus of a product lie at the same address, but have types %d and %d and pitches %d and %d; make them equal",
			p.C.Type, p.Plus.Type, p.C.pitch(), p.Plus.pitch()))
	}
	l.Arg(uint64(p.Plus.Addr()))
}

// Experts is a product over experts. Seg says which rows of A and C belong to which
// expert. B holds one matrix for each expert, one below the other. The rows of C of expert
// e become the rows of A of e times op(B_e). Rows that belong to no expert are unchanged.
type Experts struct {
	A, B, C Matrix
	TransB  bool // B_e is C.Cols x A.Cols, as weights are stored; else A.Cols x C.Cols
	Seg     Segments
	Expect  int // rows that all experts get together on average, for profiles and forms of tiles; zero is all of A
}

// GroupedGemm issues a product over experts.
func GroupedGemm(s device.Stream, p Experts) { s.Launch(GroupedGemmLaunch(p)) }

// GroupedGemmLaunch returns the launch of a product over experts. Its arguments:
//
//	0..3  A, B, C, Seg
//	4     C.Cols | A.Cols << 32
//	5     A.Rows | Seg.Experts << 32
//	6     pitch of A | pitch of B << 32
//	7     pitch of C
//	8     bits 0 to 2: A, B, C are bf16; bit 5: TransB
func GroupedGemmLaunch(p Experts) device.Launch {
	n, k, how := p.C.Cols, p.A.Cols, typeBits(p.A, p.B, p.C)
	p.C.shape("C of a product over experts", p.A.Rows, n)
	if p.TransB {
		p.B.shape("transposed B of a product over experts", p.Seg.Experts*n, k)
		how |= gemmTransB
	} else {
		p.B.shape("B of a product over experts", p.Seg.Experts*k, n)
	}
	// Each expert may have a tile that is not full.
	rows := gemmTiles(p.A.Rows) + p.Seg.Experts
	p.Seg.countable()
	l := groupedKernels.launch(p.A, p.B, false, p.TransB, min(rows*gemmTiles(n), groupedBlocks))
	l.Flops = productFlops(cmp.Or(p.Expect, p.A.Rows), n, k)
	passGrouped(&l, "a product over experts", p.A, p.B, p.C, p.Seg)
	l.Arg(packPair(n, k))
	l.Arg(packPair(p.A.Rows, p.Seg.Experts))
	l.Arg(packPair(p.A.pitch(), p.B.pitch()))
	l.Arg(uint64(p.C.pitch()))
	l.Arg(how)
	// If B is not transposed, the last rows of k that are copied at once may be those of
	// the next expert.
	if p.C.even() && (p.TransB || k%hopperBox == 0) {
		f := hopperGroupedForm(p.Seg.Experts, cmp.Or(p.Expect, p.A.Rows), n)
		f.tune(&l, groupedHopper, p.TransB, p.A, p.B, f.tiles(p.A.Rows+p.Seg.Experts*f.high, n))
	}
	return l
}

// passGrouped adds the arguments that products over experts share.
func passGrouped(l *device.Launch, what string, a, b, c Matrix, seg Segments) {
	passMatrix(l, "A of "+what, a, device.Read)
	passMatrix(l, "B of "+what, b, device.Read)
	passMatrix(l, "C of "+what, c, device.Write)
	passRun(l, "the segments of "+what, seg.Range, 2*seg.Experts, 4, device.Read, false)
}

// ExpertsGrad is the gradient of the experts' weights: C_e += A_eᵀ B_e. A and B have the
// rows of all experts. C has one matrix of A.Cols x B.Cols for each expert, one below the
// other.
type ExpertsGrad struct {
	A, B, C Matrix
	Seg     Segments
	First   bool // C is not read: the result is that of adding to zeros
	Expect  int  // rows that all experts get together on average, for profiles; zero is all of A
}

// GroupedGrad issues the gradient of the experts' weights. An expert without rows stays
// unchanged, or becomes zero if First is set.
func GroupedGrad(s device.Stream, p ExpertsGrad) { s.Launch(GroupedGradLaunch(p)) }

// GroupedGradLaunch returns the launch of the gradient. Its arguments:
//
//	0..3  A, B, C, Seg
//	4     A.Cols | B.Cols << 32
//	5     A.Rows | Seg.Experts << 32
//	6     pitch of A | pitch of B << 32
//	7     pitch of C
//	8     bits 0 to 2: A, B, C are bf16; bit 6: First
func GroupedGradLaunch(p ExpertsGrad) device.Launch {
	m, n, how := p.A.Cols, p.B.Cols, typeBits(p.A, p.B, p.C)
	if p.First {
		how |= gemmFirst
	}
	p.B.shape("B of the gradient of experts", p.A.Rows, n)
	p.C.shape("C of the gradient of experts", p.Seg.Experts*m, n)
	l := groupedGradKernels.launch(p.A, p.B, true, false, p.Seg.Experts*gemmTiles(m)*gemmTiles(n))
	l.Flops = productFlops(m, n, cmp.Or(p.Expect, p.A.Rows))
	if !p.First {
		l.InPlace = p.C.Type.Size() * memory.Bytes(p.C.Rows*p.C.Cols)
	}
	passGrouped(&l, "the gradient of experts", p.A, p.B, p.C, p.Seg)
	l.Arg(packPair(m, n))
	l.Arg(packPair(p.A.Rows, p.Seg.Experts))
	l.Arg(packPair(p.A.pitch(), p.B.pitch()))
	l.Arg(uint64(p.C.pitch()))
	l.Arg(how)
	if p.C.even() && p.Seg.Experts <= maxExperts {
		f := hopperGradForm(p)
		f.tune(&l, groupedGradHopper, false, p.A, p.B, p.Seg.Experts*f.tiles(m, n))
	}
	return l
}
