// This file owns cuBLASLt's binary interface: constants and the one structure that
// is passed, as the library's documentation defines them.

package blas

// status is what every call returns (cublasStatus_t).
type status int32

const (
	success         status = 0
	errAllocFailed  status = 3
	errInvalidValue status = 7
	errNotSupported status = 15
)

const (
	typeF32    = 0  // CUDA_R_32F
	typeBF16   = 14 // CUDA_R_16BF
	computeF32 = 68 // CUBLAS_COMPUTE_32F: sums in fp32, and no fp32 becomes less

	opNone      = 0
	opTranspose = 1

	// Attributes of a product.
	descTransA = 3
	descTransB = 4

	// Attributes of a preference.
	prefWorkspace  = 1
	prefReductions = 3
	prefAlignA     = 5 // B, C and D follow
	prefNumerics   = 12

	// Attributes of an algorithm's configuration.
	configReduction = 3

	// Of the bits of prefNumerics, those of tensor cores and of inputs that are
	// rounded to TF32, fp16 or bf16 first: fp32 must use none of them.
	numericsNotF32 = 0xfe | 0x07<<16
)

// algorithm is cublasLtMatmulAlgo_t.
type algorithm [8]uint64

// candidate is cublasLtMatmulHeuristicResult_t, 96 bytes.
type candidate struct {
	algo      algorithm
	workspace uint64
	state     status
	_         float32 // how much of the GPU it fills
	_         [4]int32
}
