// RMS norms and their backward pass. norm.go says what is computed.
// targets: sm_80

#include "norm.cuh"

#define THREADS 256
#define KEEP 4u      // vectors of a row that a thread keeps: normKeep
#define GRAD_KEEP 2u // in the backward pass, of each operand: normGradKeep

struct Norm {
    u32 rows, runs, n; // rows, norms of a row, columns of a norm
    float epsilon;
    // scale returns one over the root of the mean square.
    DEVICE float scale(float squares) const { return 1 / __builtin_sqrtf(squares / (float)n + epsilon); }
};

DEVICE Norm unpack(u64 size, u64 weight) { return {low(size), high(size) / low(weight), low(weight), number(high(weight))}; }

// run_at returns the row of a norm, and sets its first column.
DEVICE u64 run_at(const Norm &m, u64 i, u64 &first) {
    first = 0;
    if (m.runs == 1) return i;
    u64 row = i / m.runs;
    first = (i - row * m.runs) * m.n;
    return row;
}

// norm_kept computes a norm whose columns a team keeps in registers.
template <u32 vectors> DEVICE void norm_kept(const Norm &m, const Team &t, u64 y, u64 x, u64 w) {
    Vec v[vectors], g[vectors];
    hold(t, x, m.n, v);
    hold(t, w, m.n, g);
    float a[STEP], b[STEP], squares = 0;
#pragma unroll
    for (u32 k = 0; k < vectors; k++) {
        widen(v[k], a);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) squares += a[e] * a[e];
    }
    float r = m.scale(t.sum(squares));
#pragma unroll
    for (u32 k = 0; k < vectors; k++) {
        u32 c = (t.member + k * t.size) * STEP;
        if (c >= m.n) continue;
        widen(v[k], a);
        widen(g[k], b);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) a[e] = a[e] * r * b[e];
        write(y + 2ull * c, narrowed(a));
    }
}

// norm_again computes a norm of any format and reads it twice. It adds in the same order.
DEVICE void norm_again(const Norm &m, const Team &t, const Matrix &y, const Matrix &x, const Matrix &w, u64 row, u64 first) {
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

// norms calls f for each norm of this thread's team.
template <class F> DEVICE void norms(const Norm &m, const Team &t, F f) {
#pragma unroll 1
    for (u64 i = t.number; i < (u64)m.rows * m.runs; i += t.count) {
        u64 first, row = run_at(m, i, first);
        f(row, first);
    }
}

// Rows of bf16 whose vectors are aligned have kernels of their own, because code for all
// formats needs many registers.
KERNEL(THREADS)
stowage_nn_rmsnorm_wide(u64 dst, u64 src, u64 weight, u64 size, u64 pitches, u64 how, u64) {
    Norm m = unpack(size, how);
    Matrix y = {global(dst), low(pitches), BF16}, x = {global(src), high(pitches), BF16};
    u64 w = global(weight);
    Team t = line(m.n, KEEP);
    norms(m, t, [&](u64 row, u64 first) INLINE { norm_kept<KEEP>(m, t, y.at(row, first), x.at(row, first), w); });
}

KERNEL(THREADS)
stowage_nn_rmsnorm(u64 dst, u64 src, u64 weight, u64 size, u64 pitches, u64 how, u64 types) {
    Norm m = unpack(size, how);
    Matrix y = {global(dst), low(pitches), bit(types, 0)}, x = {global(src), high(pitches), bit(types, 1)}, w = {global(weight), 0, bit(types, 2)};
    Team t = line(m.n, KEEP);
    norms(m, t, [&](u64 row, u64 first) INLINE { norm_again(m, t, y, x, w, row, first); });
}

struct NormGrad {
    Norm m;
    Matrix dx, x, w, dy, plus;
};

// grad_kept computes one norm from what its team keeps in registers. The thread keeps the
// sums for the weight too, because it has the same columns of every norm.
DEVICE void grad_kept(const NormGrad &g, const Team &t, u64 row, u64 first, const Vec (&weight)[GRAD_KEEP], Weight<GRAD_KEEP> &dw) {
    Vec xs[GRAD_KEEP], dys[GRAD_KEEP], more[GRAD_KEEP];
    hold(t, g.x.at(row, first), g.m.n, xs);
    hold(t, g.dy.at(row, first), g.m.n, dys);
    if (g.plus.base != 0) hold(t, g.plus.at(row, first), g.m.n, more);
    float x[STEP], dy[STEP], w[STEP];
    Two s = {0, 0};
#pragma unroll
    for (u32 k = 0; k < GRAD_KEEP; k++) {
        widen(xs[k], x);
        widen(dys[k], dy);
        widen(weight[k], w);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) {
            s.a += x[e] * x[e];
            s.b += dy[e] * w[e] * x[e];
        }
    }
    s = t.sum(s);
    float r = g.m.scale(s.a), back = r * r * r * s.b / (float)g.m.n;
#pragma unroll
    for (u32 k = 0; k < GRAD_KEEP; k++) {
        u32 c = (t.member + k * t.size) * STEP;
        if (c >= g.m.n) continue;
        widen(xs[k], x);
        widen(dys[k], dy);
        widen(weight[k], w);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) {
            dw.v[k][e] += dy[e] * x[e] * r;
            x[e] = dy[e] * w[e] * r - x[e] * back;
        }
        if (g.plus.base != 0) {
            widen(more[k], dy);
#pragma unroll
            for (u32 e = 0; e < STEP; e++) x[e] += dy[e];
        }
        write(g.dx.at(row, first + c), narrowed(x));
    }
}

// grad_again computes one norm of any format and reads it twice. It adds in the same order.
DEVICE void grad_again(const NormGrad &g, const Team &t, u64 row, u64 first, Weight<STEPS> &dw) {
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

// grad_parts computes the parts of the rows that a block has, whose teams take turns. Then
// the teams' sums for the weight are added up in order. f computes a norm.
template <u32 steps, class F> DEVICE void grad_parts(const Norm &m, const Team &t, u64 scratch, u64 part, F f) {
    u32 in = threads() / t.size, own = thread() / t.size; // teams of a block, and this one
#pragma unroll 1
    for (u64 p = block(); p * part < m.rows; p += blocks()) {
        u64 from = p * part * m.runs, to = least((p + 1) * part, (u64)m.rows) * m.runs;
        Weight<steps> sums;
        sums.clear();
#pragma unroll 1
        for (u64 i = from + own; i < to; i += in) {
            u64 first, row = run_at(m, i, first);
            f(row, first, sums);
        }
        sums.finish(t, m.n, scratch + 4 * p * m.n);
    }
}

KERNEL(GRAD_THREADS)
stowage_nn_rmsnorm_grad_wide(u64 dx, u64 x, u64 w, u64 dy, u64 plus, u64 scratch, u64 size, u64 pitches, u64 more, u64 how, u64, u64 part) {
    NormGrad g = {
        unpack(size, how),
        {global(dx), low(pitches), BF16},
        {global(x), high(pitches), BF16},
        {},
        {global(dy), low(more), BF16},
        {plus == 0 ? 0 : global(plus), high(more), BF16},
    };
    Team t = line(g.m.n, GRAD_KEEP);
    Vec weight[GRAD_KEEP];
    hold(t, global(w), g.m.n, weight);
    grad_parts<GRAD_KEEP>(g.m, t, global(scratch), part, [&](u64 row, u64 first, Weight<GRAD_KEEP> &sums) INLINE { grad_kept(g, t, row, first, weight, sums); });
}

KERNEL(GRAD_THREADS)
stowage_nn_rmsnorm_grad(u64 dx, u64 x, u64 w, u64 dy, u64 plus, u64 scratch, u64 size, u64 pitches, u64 more, u64 how, u64 types, u64 part) {
    NormGrad g = {
        unpack(size, how),
        {global(dx), low(pitches), bit(types, 0)},
        {global(x), high(pitches), bit(types, 1)},
        {global(w), 0, bit(types, 2)},
        {global(dy), low(more), bit(types, 3)},
        {plus == 0 ? 0 : global(plus), high(more), bit(types, 4)},
    };
    Team t = line(g.m.n, STEPS);
    grad_parts<STEPS>(g.m, t, global(scratch), part, [&](u64 row, u64 first, Weight<STEPS> &sums) INLINE { grad_again(g, t, row, first, sums); });
}

KERNEL(THREADS)
stowage_nn_rmsnorm_grad_weight(u64 dw, u64 scratch, u64 size, u64 types) {
    add_parts(global(dw), global(scratch), low(size), high(size), bit(types, 0));
}
