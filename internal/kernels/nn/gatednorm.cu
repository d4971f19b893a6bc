// The gated norm behind a scan, and its backward pass. gatednorm.go says what is computed.
// targets: sm_80

#include "norm.cuh"

#define THREADS 256
#define ROWS 32u // rows of a piece of work: gatedRows

struct Gated {
    u32 rows, groups, n; // n columns of a group
    float epsilon;
    Matrix x, z, w;
    DEVICE float scale(float squares) const { return 1 / __builtin_sqrtf(squares / (float)n + epsilon); }
};

DEVICE Gated unpack(u64 x, u64 z, u64 w, u64 size, u64 groups, u64 pitches, u64 types) {
    return {low(size),
            low(groups),
            high(size) / low(groups),
            number(high(groups)),
            {global(x), low(pitches), low(types)},
            {global(z), high(pitches), low(types)},
            {global(w), 0, high(types)}};
}

KERNEL(THREADS)
stowage_nn_gated_norm(u64 dst, u64 x, u64 z, u64 w, u64 size, u64 groups, u64 pitches, u64 types, u64 pitch_y) {
    Gated g = unpack(x, z, w, size, groups, pitches, types);
    Matrix y = {global(dst), pitch_y, g.x.type};
    Team t = team(g.n);
#pragma unroll 1
    for (u64 i = t.number; i < (u64)g.rows * g.groups; i += t.count) {
        u64 row = i / g.groups, first = i % g.groups * g.n;
        float a[STEP], b[STEP], squares = 0;
        t.each(g.n, [&](u32 c, u32 n) {
            load(g.x.type, g.x.at(row, first + c), n, a);
            load(g.z.type, g.z.at(row, first + c), n, b);
#pragma unroll
            for (u32 e = 0; e < STEP; e++) {
                float v = a[e] * (b[e] * sigmoid(b[e]));
                squares += v * v;
            }
        });
        float r = g.scale(t.sum(squares));
        t.each(g.n, [&](u32 c, u32 n) {
            float weight[STEP];
            load(g.x.type, g.x.at(row, first + c), n, a);
            load(g.z.type, g.z.at(row, first + c), n, b);
            load(g.w.type, g.w.at(0, first + c), n, weight);
#pragma unroll
            for (u32 e = 0; e < STEP; e++) a[e] = a[e] * (b[e] * sigmoid(b[e])) * r * weight[e];
            store(y.type, y.at(row, first + c), n, a);
        });
    }
}

struct GatedGrad {
    Gated g;
    Matrix dy, dx, dz;
};

// grad_run computes one group of a row.
DEVICE void grad_run(const GatedGrad &d, const Team &t, u64 row, u64 first, Weight<STEPS> &dw) {
    const Gated &g = d.g;
    float x[STEP], z[STEP], dy[STEP], w[STEP];
    Two s = {0, 0};
    t.each(g.n, [&](u32 c, u32 n) {
        load(g.x.type, g.x.at(row, first + c), n, x);
        load(g.z.type, g.z.at(row, first + c), n, z);
        load(d.dy.type, d.dy.at(row, first + c), n, dy);
        load(g.w.type, g.w.at(0, first + c), n, w);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) {
            float v = x[e] * (z[e] * sigmoid(z[e]));
            s.a += v * v;
            s.b += dy[e] * w[e] * v;
        }
    });
    s = t.sum(s);
    float r = g.scale(s.a), back = r * r * r * s.b / (float)g.n;
    dw.each(t, g.n, [&](u32 c, u32 n, float *sum) INLINE {
        load(g.x.type, g.x.at(row, first + c), n, x);
        load(g.z.type, g.z.at(row, first + c), n, z);
        load(d.dy.type, d.dy.at(row, first + c), n, dy);
        load(g.w.type, g.w.at(0, first + c), n, w);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) {
            float open = sigmoid(z[e]), silu = z[e] * open, v = x[e] * silu;
            sum[e] += dy[e] * v * r;
            float dv = dy[e] * w[e] * r - v * back;
            z[e] = dv * x[e] * (open * (z[e] * (1 - open) + 1));
            x[e] = dv * silu;
        }
        store(d.dx.type, d.dx.at(row, first + c), n, x);
        store(d.dz.type, d.dz.at(row, first + c), n, z);
    });
}

// A block computes a part of the rows, group by group.
KERNEL(GRAD_THREADS)
stowage_nn_gated_norm_grad(u64 scratch, u64 x, u64 z, u64 w, u64 size, u64 groups, u64 pitches, u64 types, u64 dy, u64 dx, u64 dz, u64 pitch_dy,
                           u64 more) {
    GatedGrad d = {unpack(x, z, w, size, groups, pitches, types), {}, {}, {}};
    d.dy = {global(dy), pitch_dy, d.g.x.type};
    d.dx = {global(dx), low(more), d.g.x.type};
    d.dz = {global(dz), high(more), d.g.x.type};
    Team t = team(d.g.n);
    u32 in = threads() / t.size, own = thread() / t.size, pieces = (d.g.rows + ROWS - 1) / ROWS;
#pragma unroll 1
    for (u64 u = block(); u < (u64)pieces * d.g.groups; u += blocks()) {
        u64 piece = u / d.g.groups, first = u % d.g.groups * d.g.n;
        Weight<STEPS> sums;
        sums.clear();
#pragma unroll 1
        for (u64 row = piece * ROWS + own; row < least((piece + 1) * ROWS, (u64)d.g.rows); row += in) grad_run(d, t, row, first, sums);
        sums.finish(t, d.g.n, global(scratch) + 4 * (piece * d.g.groups * d.g.n + first));
    }
}

KERNEL(THREADS)
stowage_nn_gated_norm_grad_sum(u64 dw, u64 scratch, u64 cols, u64 runs, u64 type) {
    add_parts(global(dw), global(scratch), (u32)runs, (u32)cols, (u32)type);
}
