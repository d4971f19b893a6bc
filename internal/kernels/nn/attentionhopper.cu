// Causal attention of bf16 and its backward pass for Hopper, for heads of the sizes that
// models have: 64, 128, and 192 numbers of keys with 128 of values. attention.go describes
// the arguments, attendhopper.cuh and attendgradhopper.cuh the algorithm.
// targets: sm_90a

#include "attendgradhopper.cuh"

#define WIDE(name, F)                                                                                       \
    KERNEL(F::threads, 1) name(FORWARD, Map, Map, Map) {                                                    \
        attend_wide<F>(work(q, k, v, o, lse, tokens, heads, how, pitches, pitches2), map_of(name, 10),      \
                       map_of(name, 11), map_of(name, 12));                                                 \
    }

#define GRAD_WORK work(q, k, v, o, lse, tokens, heads, how, pitches, pitches2, pitches3, d_o, dq, dk, dv, delta_)

#define DEEP(size, G)                                                                                       \
    KERNEL(256) stowage_nn_attend_delta_hopper_##size(BACKWARD) { delta_wide<G>(GRAD_WORK); }               \
    KERNEL(384, 1) stowage_nn_attend_keys_hopper_##size(BACKWARD, Map, Map, Map, Map) {                     \
        grad_wide<G>(GRAD_WORK, map_of(stowage_nn_attend_keys_hopper_##size, 16),                           \
                     map_of(stowage_nn_attend_keys_hopper_##size, 17),                                      \
                     map_of(stowage_nn_attend_keys_hopper_##size, 18),                                      \
                     map_of(stowage_nn_attend_keys_hopper_##size, 19));                                     \
    }                                                                                                       \
    KERNEL(128) stowage_nn_attend_queries_hopper_##size(BACKWARD) { queries_wide<G>(GRAD_WORK); }

using Wide64 = Wide<64, 64, 3, 128, 2, true>;
using Wide128 = Wide<128, 128, 2, 128, 2, false>;
using Wide192 = Wide<192, 128, 2, 128, 2, false>;
using Deep64 = Deep<64, 64, 128, 2, 1, true, true>;
using Deep128 = Deep<128, 128, 64, 2, 2, true, false>;
using Deep192 = Deep<192, 128, 64, 1, 1, false, true>;

WIDE(stowage_nn_attend_hopper_64, Wide64)
WIDE(stowage_nn_attend_hopper_128, Wide128)
WIDE(stowage_nn_attend_hopper_192, Wide192)
DEEP(64, Deep64)
DEEP(128, Deep128)
DEEP(192, Deep192)
