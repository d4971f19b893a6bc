//go:build amd64 && !purego

// This file declares the assembly of products of bf16. A pair of bf16 takes the place of a
// float32: the first one is its lower half. Numbers are counted as pairs.

package gemm

// sumAMX is the product of blocks of 32 rows of A with a panel of B that is 32 columns
// wide, over steps of 16 pairs. Rows of A are pitch apart. Rows of the sums are 32 apart.
//
//go:noescape
func sumAMX(blocks, steps int, a *float32, pitch int, b, sums *float32)

// sumBF16 is the same with VDPBF16PS, for blocks of 12 rows.
//
//go:noescape
func sumBF16(blocks, steps int, a *float32, pitch int, b, sums *float32)

// weave makes pairs of two rows of bf16, again and again. Each row of dst has 32 pairs; those
// from cols on are zero. Rows of dst are ldd pairs apart, even rows and odd rows lds numbers.
//
//go:noescape
func weave(dst *float32, ldd int, even, odd *uint16, lds, pairs, cols int)

// mergeF32 is C = sums, or C += sums with add. Rows of the sums are 32 apart; cols is 1 to 32.
//
//go:noescape
func mergeF32(c *float32, ldc int, sums *float32, rows, cols int, add bool)

// mergeBF16 is C = sums, or C = from + sums with add, rounded to nearest even.
//
//go:noescape
func mergeBF16(c *uint16, ldc int, from *float32, ldf int, sums *float32, rows, cols int, add bool)
