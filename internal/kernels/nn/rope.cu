// Rotary positions. rope.go says what is computed. A thread computes up to eight pairs of
// columns of some heads, which have the same angles.
// targets: sm_80

#include "nn.cuh"

#define THREADS 256

#define HEADS 4u // of a thread

DEVICE void rotate(float *a, float *b, const float *turn, float sign) {
#pragma unroll
    for (u32 e = 0; e < STEP; e++) {
        float cos = turn[2 * e], sin = sign * turn[2 * e + 1], was = a[e];
        a[e] = was * cos - b[e] * sin;
        b[e] = b[e] * cos + was * sin;
    }
}

// Angles is where a thread's columns are.
struct Angles {
    u64 at, apart, other; // of the first head, from a head to the next, from a to b
    u64 turns;
    u32 group, groups, heads, n;
};

// each calls f for the columns of a thread.
template <class F> DEVICE void each(u64 src, u64 table, u64 size, u64 heads, u64 which, u64 seq, u32 type, F f) {
    Matrix x = {global(src), high(size), type}, turns = {global(table), high(which), F32};
    u32 half = high(which) / 2, steps = (half + STEP - 1) / STEP, groups = (low(heads) + HEADS - 1) / HEADS, per = groups * steps;
    u64 all = (u64)low(size) * per;
#pragma unroll 1
    for (u64 u = (u64)block() * threads() + thread(); u < all; u += (u64)blocks() * threads()) {
        u64 row = all >> 32 == 0 ? (u32)u / per : u / per;
        u32 in = (u32)(u - row * per), group = in / steps, i = (in - group * steps) * STEP;
        u64 pos = (row | seq) >> 32 == 0 ? (u32)row % (u32)seq : row % seq;
        f(Angles{x.at(row, low(which) + i), (u64)high(heads) * size_of(type), (u64)half * size_of(type), turns.at(pos, 2 * i), group, groups,
                 low(heads), least(STEP, half - i)});
    }
}

// Rows of bf16 whose vectors are aligned have a kernel of their own, because code for all
// formats needs many registers.
KERNEL(THREADS)
stowage_nn_rope_wide(u64 src, u64 table, u64 size, u64 heads, u64 which, u64 seq, u64 how) {
    float sign = bit(how, 1) ? -1 : 1;
    each(src, table, size, heads, which, seq, BF16, [&](const Angles &g) INLINE {
        Vec as[HEADS], bs[HEADS], turns[4];
#pragma unroll
        for (u32 k = 0; k < HEADS; k++) {
            u32 head = g.group + k * g.groups;
            if (head >= g.heads) continue;
            as[k] = read<Vec>(g.at + head * g.apart);
            bs[k] = read<Vec>(g.at + head * g.apart + g.other);
        }
        float a[STEP], b[STEP], turn[2 * STEP];
#pragma unroll
        for (u32 k = 0; k < 4; k++) turns[k] = look<Vec>(g.turns + 16 * k);
#pragma unroll
        for (u32 k = 0; k < 4; k++) numbers(turns[k], turn + 4 * k);
#pragma unroll
        for (u32 k = 0; k < HEADS; k++) {
            u32 head = g.group + k * g.groups;
            if (head >= g.heads) continue;
            widen(as[k], a);
            widen(bs[k], b);
            rotate(a, b, turn, sign);
            write(g.at + head * g.apart, narrowed(a));
            write(g.at + head * g.apart + g.other, narrowed(b));
        }
    });
}

KERNEL(THREADS)
stowage_nn_rope(u64 src, u64 table, u64 size, u64 heads, u64 which, u64 seq, u64 how) {
    float sign = bit(how, 1) ? -1 : 1;
    u32 type = bit(how, 0);
    each(src, table, size, heads, which, seq, type, [&](const Angles &g) INLINE {
        float a[STEP], b[STEP], turn[2 * STEP];
        load(F32, g.turns, least(STEP, 2 * g.n), turn);
        load(F32, g.turns + 4 * STEP, 2 * g.n < STEP ? 0 : 2 * g.n - STEP, turn + STEP);
#pragma unroll 1
        for (u32 head = g.group; head < g.heads; head += g.groups) {
            load(type, g.at + head * g.apart, g.n, a);
            load(type, g.at + head * g.apart + g.other, g.n, b);
            rotate(a, b, turn, sign);
            store(type, g.at + head * g.apart, g.n, a);
            store(type, g.at + head * g.apart + g.other, g.n, b);
        }
    });
}
