// This file has what backward passes of norms share: sums for weights that threads keep.

#pragma once

#include "nn.cuh"

#define GRAD_THREADS 512
#define STEPS (SHARE / STEP)

SHARED float weight_sums[256 * SHARE];

// Weight has the sums for a thread's columns of a weight, over the runs of its team: a
// number of steps.
template <u32 steps> struct Weight {
    float v[steps][STEP];
    DEVICE void clear() {
#pragma unroll
        for (u32 k = 0; k < steps; k++)
#pragma unroll
            for (u32 e = 0; e < STEP; e++) v[k][e] = 0;
    }
    // each calls f for every step of n columns that belongs to this thread, with its sums.
    template <class F> DEVICE void each(const Team &t, u32 n, F f) {
        if (n > t.size * steps * STEP) trap();
#pragma unroll
        for (u32 k = 0; k < steps; k++) {
            u32 c = (t.member + k * t.size) * STEP;
            if (c < n) f(c, least(STEP, n - c), v[k]);
        }
    }
    // finish writes the sums over all teams of the block, in the order of teams. Those of a
    // warp are added up first.
    DEVICE void finish(const Team &t, u32 n, u64 to) {
#pragma unroll 1
        for (u32 d = t.size; d < 32; d *= 2)
#pragma unroll
            for (u32 k = 0; k < steps; k++)
#pragma unroll
                for (u32 e = 0; e < STEP; e++) v[k][e] += number(across(bits(v[k][e]), d));
        u32 size = t.size < 32 ? 32 : t.size, in = threads() / size, own = thread() / size;
#pragma unroll 1
        for (u32 turn = 0; turn < in; turn++) {
            barrier();
            if (turn != own || (t.size < 32 && lane() >= t.size)) continue;
            each(t, n, [&](u32 c, u32 m, float *sum) {
#pragma unroll
                for (u32 e = 0; e < STEP; e++) {
                    if (e >= m) continue;
                    if (turn > 0) sum[e] += weight_sums[c + e];
                    if (turn + 1 < in) weight_sums[c + e] = sum[e];
                }
                if (turn + 1 == in) store(F32, to + 4ull * c, m, sum);
            });
        }
    }
};

// add_parts adds what the blocks have written to the gradient of a weight, with a thread
// for each column.
DEVICE void add_parts(u64 dw, u64 parts, u32 count, u32 cols, u32 type) {
#pragma unroll 1
    for (u32 c = block() * threads() + thread(); c < cols; c += blocks() * threads()) {
        u64 to = dw + (u64)c * size_of(type);
        set(type, to, sum_apart(get(type, to), parts + 4ull * c, count, 4ull * cols));
    }
}
