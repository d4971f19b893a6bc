// Causal attention of fp32 and its backward pass, in full fp32. It is compiled separately
// from that of bf16, because a run needs only one of them.
// targets: sm_80

#include "attend.cuh"

using Attend128 = Shape<F32, 128, 128, 4, 1, 32, 2>;
using Attend256 = Shape<F32, 256, 256, 2, 1, 16, 2>;
using Grad128 = Shape<F32, 128, 128, 4, 1, 32, 1>;
using Grad256 = Shape<F32, 256, 256, 2, 1, 16, 1>;

ATTEND(stowage_nn_attend_plain_128, Attend128)
ATTEND(stowage_nn_attend_plain_256, Attend256)
DELTA(stowage_nn_attend_plain_delta)
GRAD(stowage_nn_attend_keys_plain_128, Grad128, false, false)
GRAD(stowage_nn_attend_keys_plain_256, Grad256, false, true)
GRAD(stowage_nn_attend_queries_plain_128, Grad128, true, false)
GRAD(stowage_nn_attend_queries_plain_256, Grad256, true, false)
