// Rotary positions. rope.go says what is computed. A thread computes up to eight pairs of
// columns of a head.
// targets: sm_80

#include "nn.cuh"

#define THREADS 256

KERNEL(THREADS)
stowage_nn_rope(u64 src, u64 table, u64 size, u64 heads, u64 which, u64 seq, u64 how) {
    Matrix x = {global(src), high(size), bit(how, 0)}, turns = {global(table), high(which), F32};
    u32 half = high(which) / 2, steps = (half + STEP - 1) / STEP, per = low(heads) * steps;
    float sign = bit(how, 1) ? -1 : 1;
    u64 all = (u64)low(size) * per;
#pragma unroll 1
    for (u64 u = (u64)block() * threads() + thread(); u < all; u += (u64)blocks() * threads()) {
        u64 row = u / per;
        u32 in = (u32)(u - row * per), head = in / steps, i = (in - head * steps) * STEP, n = least(STEP, half - i);
        float a[STEP], b[STEP], turn[2 * STEP];
        u64 at = (u64)head * high(heads) + low(which) + i, pos = row % seq;
        load(x.type, x.at(row, at), n, a);
        load(x.type, x.at(row, at + half), n, b);
        load(F32, turns.at(pos, 2 * i), least(STEP, 2 * n), turn);
        load(F32, turns.at(pos, 2 * i + STEP), 2 * n < STEP ? 0 : 2 * n - STEP, turn + STEP);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) {
            float cos = turn[2 * e], sin = sign * turn[2 * e + 1], was = a[e];
            a[e] = was * cos - b[e] * sin;
            b[e] = b[e] * cos + was * sin;
        }
        store(x.type, x.at(row, at), n, a);
        store(x.type, x.at(row, at + half), n, b);
    }
}
