// RMS norms and their backward pass. norm.go says what is computed.
// targets: sm_80

#include "norm.cuh"
#include "tensor.cuh"

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

// row_team returns a team whose members keep a norm, a number of vectors each. It may be some
// lanes of a warp.
DEVICE Team row_team(u32 cols, u32 vectors) {
    u32 size = 4;
#pragma unroll 1
    while (size < threads() && size * vectors * STEP < cols) size *= 2;
    return teams(size);
}

// row_sum returns the sum over a team. All lanes of a warp call it.
DEVICE Two row_sum(const Team &t, Two v) {
    if (t.size >= 32) return t.sum(v);
#pragma unroll 1
    for (u32 d = t.size / 2; d > 0; d /= 2) v = {v.a + number(across(bits(v.a), d)), v.b + number(across(bits(v.b), d))};
    return v;
}

// each_norm calls f for every norm from the first of this team to the end, some apart, and
// with how many columns: none where other teams of the warp have one more.
template <class F> DEVICE void each_norm(const Norm &m, const Team &t, u64 i, u64 end, u64 apart, F f) {
    u32 mates = t.size < 32 ? lane() / t.size : 0; // teams before this one in the warp
#pragma unroll 1
    for (; i - mates < end; i += apart) f(i, i < end ? m.n : 0);
}

// forget keeps the compiler from using again what it has computed from vectors. Their numbers
// take twice the registers.
template <u32 vectors> DEVICE void forget(Vec (&v)[vectors]) {
#pragma unroll
    for (u32 k = 0; k < vectors; k++) asm volatile("" : "+r"(v[k].x), "+r"(v[k].y), "+r"(v[k].z), "+r"(v[k].w));
}

// norm_kept computes a norm whose columns a team keeps in registers. Caches have the weight.
template <u32 vectors> DEVICE void norm_kept(const Norm &m, const Team &t, u32 n, u64 y, u64 x, u64 w) {
    Vec v[vectors];
    hold(t, x, n, v);
    float a[STEP], b[STEP], squares = 0;
#pragma unroll
    for (u32 k = 0; k < vectors; k++) {
        widen(v[k], a);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) squares += a[e] * a[e];
    }
    float r = m.scale(row_sum(t, {squares, 0}).a);
    forget(v);
#pragma unroll
    for (u32 k = 0; k < vectors; k++) {
        u32 c = (t.member + k * t.size) * STEP;
        if (c >= n) continue;
        widen(v[k], a);
        widen(look<Vec>(w + 2ull * c), b);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) a[e] = a[e] * r * b[e];
        write(y + 2ull * c, narrowed(a));
    }
}

// norm_again computes a norm of any format and reads it twice. It adds in the same order.
DEVICE void norm_again(const Norm &m, const Team &t, u32 cols, const Matrix &y, const Matrix &x, const Matrix &w, u64 row, u64 first) {
    float a[STEP], b[STEP], squares = 0;
    t.each(cols, [&](u32 c, u32 n) {
        load(x.type, x.at(row, first + c), n, a);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) squares += a[e] * a[e];
    });
    float r = m.scale(row_sum(t, {squares, 0}).a);
    t.each(cols, [&](u32 c, u32 n) {
        load(x.type, x.at(row, first + c), n, a);
        load(w.type, w.at(0, c), n, b);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) a[e] = a[e] * r * b[e];
        store(y.type, y.at(row, first + c), n, a);
    });
}

// norms calls f for each norm of this thread's team.
template <class F> DEVICE void norms(const Norm &m, const Team &t, F f) {
    each_norm(m, t, t.number, (u64)m.rows * m.runs, t.count, [&](u64 i, u32 n) INLINE {
        u64 first, row = run_at(m, i, first);
        f(n, row, first);
    });
}

// Rows of bf16 whose vectors are aligned have kernels of their own, because code for all
// formats needs many registers.
KERNEL(THREADS)
stowage_nn_rmsnorm_wide(u64 dst, u64 src, u64 weight, u64 size, u64 pitches, u64 how, u64) {
    Norm m = unpack(size, how);
    Matrix y = {global(dst), low(pitches), BF16}, x = {global(src), high(pitches), BF16};
    u64 w = global(weight);
    Team t = row_team(m.n, KEEP);
    norms(m, t, [&](u32 n, u64 row, u64 first) INLINE { norm_kept<KEEP>(m, t, n, y.at(row, first), x.at(row, first), w); });
}

KERNEL(THREADS)
stowage_nn_rmsnorm(u64 dst, u64 src, u64 weight, u64 size, u64 pitches, u64 how, u64 types) {
    Norm m = unpack(size, how);
    Matrix y = {global(dst), low(pitches), bit(types, 0)}, x = {global(src), high(pitches), bit(types, 1)}, w = {global(weight), 0, bit(types, 2)};
    Team t = row_team(m.n, KEEP);
    norms(m, t, [&](u32 n, u64 row, u64 first) INLINE { norm_again(m, t, n, y, x, w, row, first); });
}

struct NormGrad {
    Norm m;
    Matrix dx, x, w, dy, plus;
};

// Ahead has the vectors of a norm that belong to this thread in shared memory, where they are
// copied while the norm before is computed. No other thread reads them.
struct Ahead {
    const NormGrad &g;
    const Team &t;
    DEVICE u32 column(u32 k) const { return (t.member + k * t.size) * STEP; }
    DEVICE Vec *place(u32 operand, u32 k) const { return reinterpret_cast<Vec *>(pool) + (operand * GRAD_KEEP + k) * threads() + thread(); }
    // begin begins to copy norm i, if it is one before the end.
    DEVICE void begin(u64 i, u64 end) const {
        u64 first, row = run_at(g.m, i, first);
#pragma unroll
        for (u32 k = 0; k < GRAD_KEEP; k++) {
            if (i >= end || column(k) >= g.m.n) continue;
            bring(spot(place(0, k)), g.x.at(row, first + column(k)), 16);
            bring(spot(place(1, k)), g.dy.at(row, first + column(k)), 16);
            if (g.plus.base != 0) bring(spot(place(2, k)), g.plus.at(row, first + column(k)), 16);
        }
        seal();
    }
    DEVICE void get(u32 operand, u32 n, Vec (&v)[GRAD_KEEP]) const {
#pragma unroll
        for (u32 k = 0; k < GRAD_KEEP; k++) v[k] = column(k) < n ? *place(operand, k) : Vec{0, 0, 0, 0};
        forget(v);
    }
};

// grad_kept computes n columns of a norm from what its team keeps in registers, and begins to
// copy the next norm. The thread keeps the sums for the weight too, because it has the same columns
// of every norm.
DEVICE void grad_kept(const Ahead &a, u32 n, u64 i, u64 next, u64 end, Vec (&weight)[GRAD_KEEP], Weight<GRAD_KEEP> &dw) {
    const NormGrad &g = a.g;
    Vec xs[GRAD_KEEP], dys[GRAD_KEEP], more[GRAD_KEEP];
    arrived<0>();
    a.get(0, n, xs);
    a.get(1, n, dys);
    if (g.plus.base != 0) a.get(2, n, more);
    a.begin(next, end);
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
    s = row_sum(a.t, s);
    float r = g.m.scale(s.a), back = r * r * r * s.b / (float)g.m.n;
    forget(xs);
    forget(dys);
    forget(weight);
    u64 first, row = run_at(g.m, i, first);
#pragma unroll
    for (u32 k = 0; k < GRAD_KEEP; k++) {
        if (a.column(k) >= n) continue;
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
        write(g.dx.at(row, first + a.column(k)), narrowed(x));
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
// the teams' sums for the weight are added up in order. f computes the norms of a team from
// the first on, each apart from the one before.
template <u32 steps, class F> DEVICE void grad_parts(const Norm &m, const Team &t, u64 scratch, u64 part, F f) {
    u32 in = threads() / t.size, own = thread() / t.size; // teams of a block, and this one
#pragma unroll 1
    for (u64 p = block(); p * part < m.rows; p += blocks()) {
        u64 from = p * part * m.runs, to = least((p + 1) * part, (u64)m.rows) * m.runs;
        Weight<steps> sums;
        sums.clear();
        f(from + own, to, in, sums);
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
    Team t = row_team(g.m.n, GRAD_KEEP);
    Vec weight[GRAD_KEEP];
    hold(t, global(w), g.m.n, weight);
    need(3 * GRAD_KEEP * 16 * threads());
    grad_parts<GRAD_KEEP>(g.m, t, global(scratch), part, [&](u64 from, u64 end, u32 apart, Weight<GRAD_KEEP> &sums) INLINE {
        Ahead a = {g, t};
        a.begin(from, end);
        each_norm(g.m, t, from, end, apart, [&](u64 i, u32 n) INLINE { grad_kept(a, n, i, i + apart, end, weight, sums); });
    });
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
    grad_parts<STEPS>(g.m, t, global(scratch), part, [&](u64 i, u64 end, u32 apart, Weight<STEPS> &sums) INLINE {
#pragma unroll 1
        for (; i < end; i += apart) {
            u64 first, row = run_at(g.m, i, first);
            grad_again(g, t, row, first, sums);
        }
    });
}

#define SUM_THREADS 512 // normSumThreads

// A block adds up the parts of 32 columns. Each warp adds some of the parts, in order, and
// the first warp adds up the sums, in order.
KERNEL(SUM_THREADS)
stowage_nn_rmsnorm_grad_weight(u64 dw, u64 scratch, u64 size, u64 types) {
    SHARED float sums[SUM_THREADS / 32][32];
    u32 parts = low(size), cols = high(size), type = bit(types, 0), each = (parts + SUM_THREADS / 32 - 1) / (SUM_THREADS / 32);
    u32 from = least(warp() * each, parts), n = least(each, parts - from);
#pragma unroll 1
    for (u32 c = block() * 32 + lane(); c - lane() < cols; c += blocks() * 32) {
        if (c < cols) sums[warp()][lane()] = sum_apart(0, global(scratch) + 4ull * from * cols + 4ull * c, n, 4ull * cols);
        barrier();
        if (warp() == 0 && c < cols) {
            u64 to = global(dw) + (u64)c * size_of(type);
            float sum = get(type, to);
#pragma unroll
            for (u32 w = 0; w < SUM_THREADS / 32; w++) sum += sums[w][lane()];
            set(type, to, sum);
        }
        barrier();
    }
}
