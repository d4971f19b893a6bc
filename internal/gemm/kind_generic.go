//go:build !amd64 || purego

// This file owns the build without assembly.

package gemm

func (k kind) works() bool { return k == plain }
func (k kind) pays() bool  { return k == plain }

const noAssembly = "gemm: no assembly in this build"

func (kind) tile(a []float32, ars, aks int, b []float32, bks int, c []float32, ldc, rows, cols, depth int, add bool) {
	tilePlain(a, ars, aks, b, bks, c, ldc, rows, cols, depth, add)
}

func (kind) transpose8([]float32, int, *Matrix, int, int)    { panic(noAssembly) }
func (kind) copyRows([]float32, int, *Matrix, int, int, int) { panic(noAssembly) }
func (kind) round8([]uint16, []float32, int)                 { panic(noAssembly) }

func (kind) sumPairs(*pairRoom, []float32, int, int)                            { panic(noAssembly) }
func (kind) weave([]float32, int, []uint16, []uint16, int, int, int)            { panic(noAssembly) }
func (kind) mergeF32([]float32, int, []float32, int, int, bool)                 { panic(noAssembly) }
func (kind) mergeBF16([]uint16, int, []float32, int, []float32, int, int, bool) { panic(noAssembly) }
