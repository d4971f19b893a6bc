// The gated norm behind a scan, and its backward pass. gatednorm.go says what is computed.
// targets: sm_80

#include "norm.cuh"
#include "pieces.cuh"

#define THREADS 256
#define KEEP 4u  // vectors of a group that a thread keeps of each operand: gatedKeep
#define GRAD_KEEP 2u // in the backward pass: gatedGradKeep
#define AHEAD 1u // rows of a team that are on their way there: gatedAhead

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

// A block computes a piece of the rows of a group; blocks take turns with rows, so that they keep their
// accesses close together. A thread has GRAD_KEEP vectors of a row in shared memory, and those of the next
// rows of its team are on their way there. What it has beyond the columns or rows is zero. It keeps the
// sigmoids, so that it computes them once.
template <u32 every> DEVICE void grad_pieces(const GatedGrad &d, u64 scratch, u32 rows) {
    const Gated &g = d.g;
    constexpr u32 stage = 3 * GRAD_KEEP * every; // vectors of a row of all threads
    if (threads() != every) trap();
    need((AHEAD + 1) * stage * sizeof(Vec));
    Team t = line(g.n, GRAD_KEEP);
    u32 in = every / t.size, own = thread() / t.size, pieces = (g.rows + rows - 1) / rows, apart = in * pieces, far = t.size * sizeof(Vec);
    bool has[GRAD_KEEP];
#pragma unroll
    for (u32 k = 0; k < GRAD_KEEP; k++) has[k] = (t.member + k * t.size) * STEP < g.n;
    Vec *mine = reinterpret_cast<Vec *>(pool) + thread();
#pragma unroll 1
    for (u64 u = block(); u < (u64)pieces * g.groups; u += blocks()) {
        u64 piece = u / g.groups, first = u % g.groups * g.n, col = first + t.member * STEP;
        u32 row = (u32)piece * in + own;
        Walk from[3] = {{g.x, row, col, apart}, {g.z, row, col, apart}, {d.dy, row, col, apart}}, dx(d.dx, row, col, apart), dz(d.dz, row, col, apart);
        auto bring_row = [&](u32 row, u32 at) INLINE {
#pragma unroll
            for (u32 i = 0; i < 3; i++) {
#pragma unroll
                for (u32 k = 0; k < GRAD_KEEP; k++) bring(spot(mine + at + (i * GRAD_KEEP + k) * every), from[i].at + k * far, row < g.rows && has[k] ? 16 : 0);
                from[i].next();
            }
            seal();
        };
#pragma unroll
        for (u32 s = 0; s < AHEAD; s++) bring_row(row + s * apart, s * stage);
        Weight<GRAD_KEEP> dw;
        dw.clear();
        Vec weight[GRAD_KEEP];
#pragma unroll
        for (u32 k = 0; k < GRAD_KEEP; k++) weight[k] = has[k] ? read<Vec>(g.w.at(0, col) + k * far) : Vec{0, 0, 0, 0};
        u32 at = 0; // the place of the row whose turn it is
#pragma unroll 1
        for (u32 turn = 0; row < g.rows; row += apart, turn++) {
            arrived<AHEAD - 1>();
            bring_row(row + AHEAD * apart, at == 0 ? AHEAD * stage : at - stage);
            float vx[STEP], vz[STEP], vdy[STEP], w[STEP], open[GRAD_KEEP][STEP];
            auto load_all = [&](u32 k) INLINE {
                const Vec *from = mine + at + k * every;
                widen(from[0], vx);
                widen(from[GRAD_KEEP * every], vz);
                widen(from[2 * GRAD_KEEP * every], vdy);
                forget(weight[k]);
                widen(weight[k], w);
            };
            Two s = {0, 0};
#pragma unroll
            for (u32 k = 0; k < GRAD_KEEP; k++) {
                load_all(k);
#pragma unroll
                for (u32 e = 0; e < STEP; e++) {
                    open[k][e] = sigmoid(vz[e]);
                    float v = vx[e] * (vz[e] * open[k][e]);
                    s.a += v * v;
                    s.b += vdy[e] * w[e] * v;
                }
            }
            s = row_sum(t, s, turn);
            float r = g.scale(s.a), back = r * r * r * s.b / (float)g.n;
#pragma unroll
            for (u32 k = 0; k < GRAD_KEEP; k++) {
                load_all(k);
#pragma unroll
                for (u32 e = 0; e < STEP; e++) {
                    float silu = vz[e] * open[k][e], v = vx[e] * silu, by = vdy[e] * r;
                    dw.v[k][e] += by * v;
                    float dv = by * w[e] - v * back;
                    vz[e] = dv * vx[e] * (open[k][e] + silu - silu * open[k][e]);
                    vx[e] = dv * silu;
                }
                if (!has[k]) continue;
                write(dx.at + k * far, narrowed(vx));
                write(dz.at + k * far, narrowed(vz));
            }
            dx.next(), dz.next();
            at = at == AHEAD * stage ? 0 : at + stage;
        }
        arrived<0>(); // nothing is on its way to what finish uses
        dw.finish(t, g.n, scratch + 4 * (piece * g.groups * g.n + first));
    }
}

KERNEL(THREADS, 2)
stowage_nn_gated_norm_grad_wide(u64 scratch, u64 x, u64 z, u64 w, u64 size, u64 groups, u64 pitches, u64, u64 dy, u64 dx, u64 dz, u64 pitch_dy,
                                u64 more, u64 rows) {
    grad_pieces<THREADS>(unpack_grad(x, z, w, size, groups, pitches, (u64)BF16 << 32 | BF16, dy, dx, dz, pitch_dy, more), global(scratch), (u32)rows);
}

// Groups with more vectors than THREADS threads keep need more threads.
KERNEL(GRAD_THREADS)
stowage_nn_gated_norm_grad_widest(u64 scratch, u64 x, u64 z, u64 w, u64 size, u64 groups, u64 pitches, u64, u64 dy, u64 dx, u64 dz, u64 pitch_dy,
                                  u64 more, u64 rows) {
    grad_pieces<GRAD_THREADS>(unpack_grad(x, z, w, size, groups, pitches, (u64)BF16 << 32 | BF16, dy, dx, dz, pitch_dy, more), global(scratch), (u32)rows);
}

// A block computes a part of the rows, group by group.
KERNEL(GRAD_THREADS)
stowage_nn_gated_norm_grad(u64 scratch, u64 x, u64 z, u64 w, u64 size, u64 groups, u64 pitches, u64 types, u64 dy, u64 dx, u64 dz, u64 pitch_dy,
                           u64 more, u64 rows) {
    GatedGrad d = unpack_grad(x, z, w, size, groups, pitches, types, dy, dx, dz, pitch_dy, more);
    Team t = team(d.g.n);
    u32 in = threads() / t.size, own = thread() / t.size, pieces = (u32)((d.g.rows + rows - 1) / rows);
#pragma unroll 1
    for (u64 u = block(); u < (u64)pieces * d.g.groups; u += blocks()) {
        u64 piece = u / d.g.groups, first = u % d.g.groups * d.g.n;
        Weight<STEPS> sums;
        sums.clear();
#pragma unroll 1
        for (u64 row = piece * rows + own; row < least((piece + 1) * rows, (u64)d.g.rows); row += in) grad_run(d, t, row, first, sums);
        sums.finish(t, d.g.n, global(scratch) + 4 * (piece * d.g.groups * d.g.n + first));
    }
}

KERNEL(GRAD_THREADS)
stowage_nn_gated_norm_grad_sum(u64 dw, u64 scratch, u64 cols, u64 runs, u64 type) {
    u32 kind = (u32)type;
    add_pieces((u32)cols, global(scratch), (u32)runs, kind, [&](u32 c) { return global(dw) + (u64)c * size_of(kind); });
}
