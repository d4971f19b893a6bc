// The gated norm behind a scan, and its backward pass. gatednorm.go says what is computed.
// targets: sm_80

#include "norm.cuh"
#include "pieces.cuh"
#include "tensor.cuh"

#define THREADS 256
#define ROWS 32u // rows of a piece of work: gatedRows
#define KEEP 4u  // vectors of a group that a thread keeps of each operand: gatedKeep
#define GRAD_KEEP 2u // in the backward pass: gatedGradKeep

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

// each_group calls f for the groups of rows of this thread's team.
template <class F> DEVICE void each_group(const Gated &g, const Team &t, F f) {
#pragma unroll 1
    for (u64 i = t.number; i < (u64)g.rows * g.groups; i += t.count) {
        u64 row = g.groups == 1 ? i : i / g.groups;
        f(row, (i - row * g.groups) * g.n);
    }
}

// Rows of bf16 whose vectors are aligned have kernels of their own. A team keeps a group in
// registers and reads it once.
KERNEL(THREADS, 4)
stowage_nn_gated_norm_wide(u64 dst, u64 x, u64 z, u64 w, u64 size, u64 groups, u64 pitches, u64, u64 pitch_y) {
    Gated g = unpack(x, z, w, size, groups, pitches, (u64)BF16 << 32 | BF16);
    Matrix y = {global(dst), pitch_y, BF16};
    Team t = line(g.n, KEEP);
    each_group(g, t, [&](u64 row, u64 first) INLINE {
        Vec xs[KEEP], zs[KEEP];
        hold(t, g.x.at(row, first), g.n, xs);
        hold(t, g.z.at(row, first), g.n, zs);
        float v[KEEP][STEP], b[STEP], squares = 0;
#pragma unroll
        for (u32 k = 0; k < KEEP; k++) {
            widen(xs[k], v[k]);
            widen(zs[k], b);
#pragma unroll
            for (u32 e = 0; e < STEP; e++) {
                v[k][e] *= b[e] * sigmoid(b[e]);
                squares += v[k][e] * v[k][e];
            }
        }
        float r = g.scale(t.sum(squares));
#pragma unroll
        for (u32 k = 0; k < KEEP; k++) {
            u32 c = (t.member + k * t.size) * STEP;
            if (c >= g.n) continue;
            widen(read<Vec>(g.w.at(0, first + c)), b);
#pragma unroll
            for (u32 e = 0; e < STEP; e++) v[k][e] *= r * b[e];
            write(y.at(row, first + c), narrowed(v[k]));
        }
    });
}

KERNEL(THREADS)
stowage_nn_gated_norm(u64 dst, u64 x, u64 z, u64 w, u64 size, u64 groups, u64 pitches, u64 types, u64 pitch_y) {
    Gated g = unpack(x, z, w, size, groups, pitches, types);
    Matrix y = {global(dst), pitch_y, g.x.type};
    Team t = team(g.n);
    each_group(g, t, [&](u64 row, u64 first) INLINE {
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
    });
}

struct GatedGrad {
    Gated g;
    Matrix dy, dx, dz;
};

SHARED float row_part[2][2][32];

// team_sum returns the sum over all members of a team, in every one of them. Calls take turns
// with two places, so that nobody writes what others still read.
DEVICE Two team_sum(const Team &t, Two v, u32 turn) {
    v = {warp_sum(v.a), warp_sum(v.b)};
    if (t.size == 32) return v;
    u32 first = warp() - t.member / 32, count = t.size / 32;
    float(*part)[32] = row_part[turn % 2];
    if (lane() == 0) part[0][warp()] = v.a, part[1][warp()] = v.b;
    barrier(1 + first / count, t.size); // barrier 0 is the block's
    bool has = lane() < count;
    return {warp_sum(has ? part[0][first + lane()] : 0), warp_sum(has ? part[1][first + lane()] : 0)};
}

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

DEVICE GatedGrad unpack_grad(u64 x, u64 z, u64 w, u64 size, u64 groups, u64 pitches, u64 types, u64 dy, u64 dx, u64 dz, u64 pitch_dy, u64 more) {
    u32 type = low(types);
    return {unpack(x, z, w, size, groups, pitches, types), {global(dy), pitch_dy, type}, {global(dx), low(more), type}, {global(dz), high(more), type}};
}

// A block computes a piece of the rows of a group. A thread has GRAD_KEEP vectors of a row in
// shared memory, and those of the next row of its team are on their way there. The sums of
// teams are added up in order.
DEVICE void grad_pieces(const GatedGrad &d, u64 scratch) {
    const Gated &g = d.g;
    Team t = line(g.n, GRAD_KEEP);
    const u32 all = 3 * GRAD_KEEP * threads(); // vectors of a row
    need(2 * all * sizeof(Vec));
    u32 in = threads() / t.size, own = thread() / t.size, pieces = (g.rows + ROWS - 1) / ROWS;
    // each calls f for the vectors of this thread: their columns, and where they are kept.
    auto each = [&](auto f) INLINE {
#pragma unroll
        for (u32 k = 0; k < GRAD_KEEP; k++) {
            u32 c = (t.member + k * t.size) * STEP;
            if (c < g.n) f(k, c, (Vec *)pool + k * threads() + thread());
        }
    };
#pragma unroll 1
    for (u64 u = block(); u < (u64)pieces * g.groups; u += blocks()) {
        u64 piece = u / g.groups, first = u % g.groups * g.n, row = piece * ROWS + own, end = least((piece + 1) * ROWS, (u64)g.rows);
        auto bring_row = [&](u64 row, u32 turn) INLINE {
            each([&](u32, u32 c, Vec *to) INLINE {
                to += turn % 2 * all;
                if (row >= end) return;
                bring(spot(to), g.x.at(row, first + c), sizeof(Vec));
                bring(spot(to + GRAD_KEEP * threads()), g.z.at(row, first + c), sizeof(Vec));
                bring(spot(to + 2 * GRAD_KEEP * threads()), d.dy.at(row, first + c), sizeof(Vec));
            });
            seal();
        };
        bring_row(row, 0);
        float dw[GRAD_KEEP][STEP] = {};
#pragma unroll 1
        for (u32 turn = 0; row < end; row += in, turn++) {
            arrived<0>();
            bring_row(row + in, turn + 1);
            float x[STEP], z[STEP], dy[STEP], w[STEP];
            auto load_all = [&](u32 c, const Vec *from) INLINE {
                from += turn % 2 * all;
                widen(from[0], x);
                widen(from[GRAD_KEEP * threads()], z);
                widen(from[2 * GRAD_KEEP * threads()], dy);
                widen(read<Vec>(g.w.at(0, first + c)), w);
            };
            Two s = {0, 0};
            each([&](u32, u32 c, Vec *from) INLINE {
                load_all(c, from);
#pragma unroll
                for (u32 e = 0; e < STEP; e++) {
                    float v = x[e] * (z[e] * sigmoid(z[e]));
                    s.a += v * v;
                    s.b += dy[e] * w[e] * v;
                }
            });
            s = team_sum(t, s, turn);
            float r = g.scale(s.a), back = r * r * r * s.b / (float)g.n;
            each([&](u32 k, u32 c, Vec *from) INLINE {
                load_all(c, from);
#pragma unroll
                for (u32 e = 0; e < STEP; e++) {
                    float open = sigmoid(z[e]), silu = z[e] * open, v = x[e] * silu, by = dy[e] * r;
                    dw[k][e] += by * v;
                    float dv = by * w[e] - v * back;
                    z[e] = dv * x[e] * (open + silu - silu * open);
                    x[e] = dv * silu;
                }
                write(d.dx.at(row, first + c), narrowed(x));
                write(d.dz.at(row, first + c), narrowed(z));
            });
        }
        arrived<0>();
        u64 to = scratch + 4 * (piece * g.groups * g.n + first);
        float *sums = (float *)pool;
        barrier(); // all rows have been read
        if (in > 1) each([&](u32 k, u32 c, Vec *) INLINE {
#pragma unroll
            for (u32 e = 0; e < STEP; e++) sums[own * g.n + c + e] = dw[k][e];
        });
        barrier();
        if (own == 0) each([&](u32 k, u32 c, Vec *) INLINE {
#pragma unroll 1
            for (u32 i = 1; i < in; i++) {
#pragma unroll
                for (u32 e = 0; e < STEP; e++) dw[k][e] += sums[i * g.n + c + e];
            }
            store(F32, to + 4 * c, STEP, dw[k]);
        });
        barrier(); // the sums have been read
    }
}

KERNEL(THREADS, 4)
stowage_nn_gated_norm_grad_wide(u64 scratch, u64 x, u64 z, u64 w, u64 size, u64 groups, u64 pitches, u64, u64 dy, u64 dx, u64 dz, u64 pitch_dy,
                                u64 more) {
    grad_pieces(unpack_grad(x, z, w, size, groups, pitches, (u64)BF16 << 32 | BF16, dy, dx, dz, pitch_dy, more), global(scratch));
}

// Groups with more vectors than THREADS threads keep need more threads.
KERNEL(GRAD_THREADS, 2)
stowage_nn_gated_norm_grad_widest(u64 scratch, u64 x, u64 z, u64 w, u64 size, u64 groups, u64 pitches, u64, u64 dy, u64 dx, u64 dz, u64 pitch_dy,
                                  u64 more) {
    grad_pieces(unpack_grad(x, z, w, size, groups, pitches, (u64)BF16 << 32 | BF16, dy, dx, dz, pitch_dy, more), global(scratch));
}

// A block computes a part of the rows, group by group.
KERNEL(GRAD_THREADS)
stowage_nn_gated_norm_grad(u64 scratch, u64 x, u64 z, u64 w, u64 size, u64 groups, u64 pitches, u64 types, u64 dy, u64 dx, u64 dz, u64 pitch_dy,
                           u64 more) {
    GatedGrad d = unpack_grad(x, z, w, size, groups, pitches, types, dy, dx, dz, pitch_dy, more);
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
    u32 kind = (u32)type;
    add_pieces((u32)cols, global(scratch), (u32)runs, kind, [&](u32 c) { return global(dw) + (u64)c * size_of(kind); });
}
