// Command gen writes the assembly of package gemm. It is a module of its own, so
// that the generator is no dependency of the program:
//
//	cd internal/gemm/gen && go run . -out ../tile_amd64.s -stubs ../tile_amd64.go -pkg gemm
//
// This file owns the list of functions; tile.go and pack.go have one kind of
// them each.
package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/reg"
)

func main() {
	ConstraintExpr("amd64,!purego")
	avx512().generate("tileAVX512")
	avx2().generate("tileAVX2")
	transpose("transposeF32", false)
	transpose("transposeBF16", true)
	copyRows("copyF32", false)
	copyRows("copyBF16", true)
	round()
	Generate()
}

// param loads an argument, which counts bytes afterwards if it counted numbers.
func param(name string, size int) GPVirtual {
	r := Load(Param(name), GP64()).(GPVirtual)
	if shift := map[int]uint64{2: 1, 4: 2}[size]; shift > 0 {
		shl(shift, r)
	}
	return r
}
