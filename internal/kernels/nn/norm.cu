// RMS norms and their backward pass. norm.go says what is computed.
// targets: sm_80

#include "norm.cuh"

#define THREADS 256

struct Norm {
    u32 rows, runs, n; // rows, norms of a row, columns of a norm
    float epsilon;
    // scale returns one over the root of the mean square.
    DEVICE float scale(float squares) const { return 1 / __builtin_sqrtf(squares / (float)n + epsilon); }
};

DEVICE Norm unpack(u64 size, u64 weight) { return {low(size), high(size) / low(weight), low(weight), number(high(weight))}; }

KERNEL(THREADS)
stowage_nn_rmsnorm(u64 dst, u64 src, u64 weight, u64 size, u64 pitches, u64 how, u64 types) {
    Norm m = unpack(size, how);
    Matrix y = {global(dst), low(pitches), bit(types, 0)}, x = {global(src), high(pitches), bit(types, 1)}, w = {global(weight), 0, bit(types, 2)};
    Team t = team(m.n);
#pragma unroll 1
    for (u64 i = t.number; i < (u64)m.rows * m.runs; i += t.count) {
        u64 row = i / m.runs, first = i % m.runs * m.n;
        float a[STEP], b[STEP], squares = 0;
        t.each(m.n, [&](u32 c, u32 n) {
            load(x.type, x.at(row, first + c), n, a);
#pragma unroll
            for (u32 e = 0; e < STEP; e++) squares += a[e] * a[e];
        });
        float r = m.scale(t.sum(squares));
        t.each(m.n, [&](u32 c, u32 n) {
            load(x.type, x.at(row, first + c), n, a);
            load(w.type, w.at(0, c), n, b);
#pragma unroll
            for (u32 e = 0; e < STEP; e++) a[e] = a[e] * r * b[e];
            store(y.type, y.at(row, first + c), n, a);
        });
    }
}

struct NormGrad {
    Norm m;
    Matrix dx, x, w, dy, plus;
};

// grad_run computes one norm, the run of columns from first on. The thread keeps the sums
// for the weight, because it has the same columns of every run.
DEVICE void grad_run(const NormGrad &g, const Team &t, u64 row, u64 first, Weight &dw) {
    float x[STEP], dy[STEP], w[STEP];
    Two s = {0, 0};
    t.each(g.m.n, [&](u32 c, u32 n) {
        load(g.x.type, g.x.at(row, first + c), n, x);
        load(g.dy.type, g.dy.at(row, first + c), n, dy);
        load(g.w.type, g.w.at(0, c), n, w);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) {
            s.a += x[e] * x[e];
            s.b += dy[e] * w[e] * x[e];
        }
    });
    s = t.sum(s);
    float r = g.m.scale(s.a), back = r * r * r * s.b / (float)g.m.n;
    dw.each(t, g.m.n, [&](u32 c, u32 n, float *sum) INLINE {
        load(g.x.type, g.x.at(row, first + c), n, x);
        load(g.dy.type, g.dy.at(row, first + c), n, dy);
        load(g.w.type, g.w.at(0, c), n, w);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) {
            sum[e] += dy[e] * x[e] * r;
            x[e] = dy[e] * w[e] * r - x[e] * back;
        }
        if (g.plus.base != 0) {
            load(g.plus.type, g.plus.at(row, first + c), n, dy);
#pragma unroll
            for (u32 e = 0; e < STEP; e++) x[e] += dy[e];
        }
        store(g.dx.type, g.dx.at(row, first + c), n, x);
    });
}

// A block computes a part of the rows, and its teams take turns. Then the teams' sums for
// the weight are added up in order.
KERNEL(GRAD_THREADS)
stowage_nn_rmsnorm_grad(u64 dx, u64 x, u64 w, u64 dy, u64 plus, u64 scratch, u64 size, u64 pitches, u64 more, u64 weight, u64 types, u64 part) {
    NormGrad g = {
        unpack(size, weight),
        {global(dx), low(pitches), bit(types, 0)},
        {global(x), high(pitches), bit(types, 1)},
        {global(w), 0, bit(types, 2)},
        {global(dy), low(more), bit(types, 3)},
        {plus == 0 ? 0 : global(plus), high(more), bit(types, 4)},
    };
    Team t = team(g.m.n);
    u32 in = threads() / t.size, own = thread() / t.size; // teams of a block, and this one
#pragma unroll 1
    for (u64 p = block(); p * part < g.m.rows; p += blocks()) {
        u64 from = p * part * g.m.runs, to = least((p + 1) * part, (u64)g.m.rows) * g.m.runs;
        Weight sums;
        sums.clear();
#pragma unroll 1
        for (u64 i = from + own; i < to; i += in) grad_run(g, t, i / g.m.runs, i % g.m.runs * g.m.n, sums);
        sums.finish(t, g.m.n, global(scratch) + 4 * p * g.m.n);
    }
}

KERNEL(THREADS)
stowage_nn_rmsnorm_grad_weight(u64 dw, u64 scratch, u64 size, u64 types) {
    add_parts(global(dw), global(scratch), low(size), high(size), bit(types, 0));
}
