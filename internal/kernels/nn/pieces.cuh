// This file has the sums over pieces of work for gradients of parameters.

#pragma once

#include "nn.cuh"

SHARED float piece_sums[32][32];

// add_pieces adds, for each of n numbers, what the pieces have for it to its gradient, which
// lies at(i). A block computes 32 numbers. Each of its warps sums up a run of the pieces in
// order, and the sums of the warps are added in order.
template <class F> DEVICE void add_pieces(u32 n, u64 scratch, u32 pieces, u32 type, F at) {
    u32 per = (pieces + warps() - 1) / warps(), from = least(warp() * per, pieces), count = least(per, pieces - from);
#pragma unroll 1
    for (u32 first = block() * 32; first < n; first += blocks() * 32) {
        u32 i = first + lane();
        bool adds = warp() == 0 && i < n;
        float sum = adds ? get(type, at(i)) : 0;
        barrier(); // the sums before have been read
        piece_sums[warp()][lane()] = i < n ? sum_apart(0, scratch + 4 * ((u64)from * n + i), count, 4ull * n) : 0;
        barrier();
        if (!adds) continue;
#pragma unroll 1
        for (u32 w = 0; w < warps(); w++) sum += piece_sums[w][lane()];
        set(type, at(i), sum);
    }
}
