// RMS norms and their backward pass. norm.go says what is computed.
// targets: sm_80

#include "norm.cuh"

#define THREADS 256
#define KEEP 4u      // vectors of a row that a thread keeps: normKeep
#define GRAD_KEEP 2u // in the backward pass, of each operand: normGradKeep
#define GROUP 4u     // rows that parts of the rows consist of: normGroup

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

// norm_sum is row_sum for teams of any size. All lanes of a warp call it.
DEVICE float across_all(float v, u32 d) { return v + number(across(bits(v), d)); }
DEVICE Two across_all(Two v, u32 d) { return {across_all(v.a, d), across_all(v.b, d)}; }
template <class T> DEVICE T norm_sum(const Team &t, T v, u32 turn) {
    if (t.size >= 32) return row_sum(t, v, turn);
#pragma unroll 1
    for (u32 d = t.size / 2; d > 0; d /= 2) v = across_all(v, d);
    return v;
}

// each_norm calls f for every norm from the first of this team to the end, some apart, with
// which turn that is and how many columns: none where other teams of the warp have one more.
template <class F> DEVICE void each_norm(const Norm &m, const Team &t, u64 i, u64 end, u64 apart, F f) {
    u32 mates = t.size < 32 ? lane() / t.size : 0; // teams before this one in the warp
#pragma unroll 1
    for (u32 turn = 0; i - mates < end; i += apart, turn++) f(i, turn, i < end ? m.n : 0);
}

// norm_kept computes a norm whose columns a team keeps in registers. Caches have the weight.
template <u32 vectors> DEVICE void norm_kept(const Norm &m, const Team &t, u32 turn, u32 n, u64 y, u64 x, u64 w) {
    Vec v[vectors];
    hold(t, x, n, v);
    float a[STEP], b[STEP], squares = 0;
#pragma unroll
    for (u32 k = 0; k < vectors; k++) {
        widen(v[k], a);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) squares += a[e] * a[e];
    }
    float r = m.scale(norm_sum(t, squares, turn));
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
DEVICE void norm_again(const Norm &m, const Team &t, u32 turn, u32 cols, const Matrix &y, const Matrix &x, const Matrix &w, u64 row,
                       u64 first) {
    float a[STEP], b[STEP], squares = 0;
    t.each(cols, [&](u32 c, u32 n) {
        load(x.type, x.at(row, first + c), n, a);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) squares += a[e] * a[e];
    });
    float r = m.scale(norm_sum(t, squares, turn));
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
    each_norm(m, t, t.number, (u64)m.rows * m.runs, t.count, [&](u64 i, u32 turn, u32 n) INLINE {
        u64 first, row = run_at(m, i, first);
        f(turn, n, row, first);
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
    norms(m, t, [&](u32 turn, u32 n, u64 row, u64 first) INLINE { norm_kept<KEEP>(m, t, turn, n, y.at(row, first), x.at(row, first), w); });
}

KERNEL(THREADS)
stowage_nn_rmsnorm(u64 dst, u64 src, u64 weight, u64 size, u64 pitches, u64 how, u64 types) {
    Norm m = unpack(size, how);
    Matrix y = {global(dst), low(pitches), bit(types, 0)}, x = {global(src), high(pitches), bit(types, 1)}, w = {global(weight), 0, bit(types, 2)};
    Team t = row_team(m.n, KEEP);
    norms(m, t, [&](u32 turn, u32 n, u64 row, u64 first) INLINE { norm_again(m, t, turn, n, y, x, w, row, first); });
}

struct NormGrad {
    Norm m;
    Matrix dx, x, w, dy, plus;
};

// Part is some of the rows: of every parts groups of GROUP rows that of its number. Blocks that
// walk over their parts side by side keep their accesses close together.
struct Part {
    const Norm &m;
    u32 number, parts;
    DEVICE u64 norms() const {
        u32 round = GROUP * parts, rest = m.rows % round, first = GROUP * number; // of the last, incomplete round
        return (u64)(m.rows / round * GROUP + (rest > first ? least(rest - first, GROUP) : 0)) * m.runs;
    }
    // at returns the row of norm i of the part, and sets its first column.
    DEVICE u32 at(u64 i, u64 &first) const {
        u32 row = (u32)run_at(m, i, first);
        return (row / GROUP * parts + number) * GROUP + row % GROUP;
    }
};

// Ahead has the vectors of norms that belong to this thread in shared memory, where they are
// copied while norms before are computed. No other thread reads them. There are two norms on
// their way, or one if the gradient of the residual comes along.
template <bool plus> struct Ahead {
    static constexpr u32 operands = plus ? 3 : 2, stages = plus ? 1 : 2;
    const NormGrad &g;
    const Team &t;
    const Part &p;
    u64 end; // of the norms of the part
    DEVICE u32 column(u32 k) const { return (t.member + k * t.size) * STEP; }
    DEVICE Vec *place(u32 stage, u32 operand, u32 k) const {
        return reinterpret_cast<Vec *>(pool) + ((stage * operands + operand) * GRAD_KEEP + k) * threads() + thread();
    }
    // begin begins to copy norm i, if it is one before the end.
    DEVICE void begin(u64 i, u32 stage) const {
        u64 first, row = p.at(i, first);
#pragma unroll
        for (u32 k = 0; k < GRAD_KEEP; k++) {
            if (i >= end || column(k) >= g.m.n) continue;
            bring(spot(place(stage, 0, k)), g.x.at(row, first + column(k)), 16);
            bring(spot(place(stage, 1, k)), g.dy.at(row, first + column(k)), 16);
            if (plus) bring(spot(place(stage, 2, k)), g.plus.at(row, first + column(k)), 16);
        }
        seal();
    }
    DEVICE void get(u32 stage, u32 operand, u32 n, Vec (&v)[GRAD_KEEP]) const {
#pragma unroll
        for (u32 k = 0; k < GRAD_KEEP; k++) v[k] = column(k) < n ? *place(stage, operand, k) : Vec{0, 0, 0, 0};
        forget(v);
    }
};

// grad_kept computes n columns of a norm from what its team keeps in registers, and begins to
// copy the norm that takes its place. The thread keeps the sums for the weight too, because it has
// the same columns of every norm.
template <bool plus> DEVICE void grad_kept(const Ahead<plus> &a, u32 turn, u32 n, u64 i, u64 next, Vec (&weight)[GRAD_KEEP], Weight<GRAD_KEEP> &dw) {
    const NormGrad &g = a.g;
    Vec xs[GRAD_KEEP], dys[GRAD_KEEP], more[GRAD_KEEP];
    constexpr u32 stages = Ahead<plus>::stages;
    u32 stage = turn % stages;
    arrived<stages - 1>();
    a.get(stage, 0, n, xs);
    a.get(stage, 1, n, dys);
    if (plus) a.get(stage, 2, n, more);
    a.begin(next, stage);
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
    s = norm_sum(a.t, s, turn);
    float r = g.m.scale(s.a), back = r * r * r * s.b / (float)g.m.n;
    forget(xs);
    forget(dys);
    forget(weight);
    u64 first, row = a.p.at(i, first);
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
        if (plus) {
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

// grad_parts computes parts of the rows, whose norms teams of the block share. Then the teams'
// sums for the weight are added up in order. f computes the norms of a part.
template <u32 steps, class F> DEVICE void grad_parts(const Norm &m, const Team &t, u64 scratch, u32 parts, F f) {
#pragma unroll 1
    for (u32 p = block(); p < parts; p += blocks()) {
        Weight<steps> sums;
        sums.clear();
        f(Part{m, p, parts}, sums);
        sums.finish(t, m.n, scratch + 4ull * p * m.n);
    }
}

// grad_wide computes rows of bf16 whose vectors are aligned.
template <bool plus> DEVICE void grad_wide(const NormGrad &g, u64 w, u64 scratch, u32 parts) {
    constexpr u32 stages = Ahead<plus>::stages;
    Team t = row_team(g.m.n, GRAD_KEEP);
    u32 in = threads() / t.size, own = thread() / t.size; // teams of the block, and this one
    Vec weight[GRAD_KEEP];
    hold(t, w, g.m.n, weight);
    need(stages * Ahead<plus>::operands * GRAD_KEEP * 16 * threads());
    grad_parts<GRAD_KEEP>(g.m, t, scratch, parts, [&](const Part &p, Weight<GRAD_KEEP> &sums) INLINE {
        Ahead<plus> a = {g, t, p, p.norms()};
#pragma unroll
        for (u32 s = 0; s < stages; s++) a.begin(own + s * in, s);
        each_norm(g.m, t, own, a.end, in, [&](u64 i, u32 turn, u32 n) INLINE { grad_kept(a, turn, n, i, i + stages * in, weight, sums); });
    });
}

KERNEL(GRAD_THREADS)
stowage_nn_rmsnorm_grad_wide(u64 dx, u64 x, u64 w, u64 dy, u64 plus, u64 scratch, u64 size, u64 pitches, u64 more, u64 how, u64, u64 parts) {
    NormGrad g = {
        unpack(size, how),
        {global(dx), low(pitches), BF16},
        {global(x), high(pitches), BF16},
        {},
        {global(dy), low(more), BF16},
        {plus == 0 ? 0 : global(plus), high(more), BF16},
    };
    if (plus == 0) {
        grad_wide<false>(g, global(w), global(scratch), (u32)parts);
    } else {
        grad_wide<true>(g, global(w), global(scratch), (u32)parts);
    }
}

KERNEL(GRAD_THREADS)
stowage_nn_rmsnorm_grad(u64 dx, u64 x, u64 w, u64 dy, u64 plus, u64 scratch, u64 size, u64 pitches, u64 more, u64 how, u64 types, u64 parts) {
    NormGrad g = {
        unpack(size, how),
        {global(dx), low(pitches), bit(types, 0)},
        {global(x), high(pitches), bit(types, 1)},
        {global(w), 0, bit(types, 2)},
        {global(dy), low(more), bit(types, 3)},
        {plus == 0 ? 0 : global(plus), high(more), bit(types, 4)},
    };
    Team t = line(g.m.n, STEPS);
    u32 in = threads() / t.size, own = thread() / t.size;
    grad_parts<STEPS>(g.m, t, global(scratch), (u32)parts, [&](const Part &p, Weight<STEPS> &sums) INLINE {
        u64 end = p.norms();
#pragma unroll 1
        for (u64 i = own; i < end; i += in) {
            u64 first, row = p.at(i, first);
            grad_again(g, t, row, first, sums);
        }
    });
}

#define SUM_THREADS 512 // normSumThreads

KERNEL(SUM_THREADS)
stowage_nn_rmsnorm_grad_weight(u64 dw, u64 scratch, u64 size, u64 types) {
    add_norm_parts<SUM_THREADS>(global(dw), global(scratch), low(size), high(size), bit(types, 0),
                                [](u64 p, u32 n, u64 apart) INLINE { return sum_apart(0, p, n, apart); });
}
