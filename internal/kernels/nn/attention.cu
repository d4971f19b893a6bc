// Causal attention of bf16 and its backward pass, by tensor cores. attention.go describes
// the arguments, and attend.cuh the algorithm.
//
// The constants keep accumulators within 160 registers and shared memory below 99 KiB,
// which every GPU of this kind offers a block. At head widths of 64 and 128 a warp has 32
// queries in the forward pass: each matrix that it loads from shared memory serves two
// products.
// targets: sm_80

#include "attend.cuh"

using Attend64 = Shape<BF16, 64, 64, 4, 2, 64, 2>;
using Attend128 = Shape<BF16, 128, 128, 4, 2, 64, 2>;
using Attend192 = Shape<BF16, 192, 128, 4, 2, 32, 2>;
using Attend256 = Shape<BF16, 256, 256, 4, 1, 32, 2>;
using Grad64 = Shape<BF16, 64, 64, 4, 1, 64, 2>;
using Grad128 = Shape<BF16, 128, 128, 4, 1, 64, 2>;
using Grad192 = Shape<BF16, 192, 128, 4, 1, 32, 2>;
using Grad256 = Shape<BF16, 256, 256, 4, 1, 32, 1>;

ATTEND(stowage_nn_attend_64, Attend64)
ATTEND(stowage_nn_attend_128, Attend128)
ATTEND(stowage_nn_attend_192, Attend192)
ATTEND(stowage_nn_attend_256, Attend256)
DELTA(stowage_nn_attend_delta)
GRAD(stowage_nn_attend_keys_64, Grad64, false, false)
GRAD(stowage_nn_attend_keys_128, Grad128, false, false)
GRAD(stowage_nn_attend_keys_192, Grad192, false, false)
GRAD(stowage_nn_attend_keys_256, Grad256, false, true)
GRAD(stowage_nn_attend_queries_64, Grad64, true, false)
GRAD(stowage_nn_attend_queries_128, Grad128, true, false)
GRAD(stowage_nn_attend_queries_192, Grad192, true, false)
GRAD(stowage_nn_attend_queries_256, Grad256, true, false)
