// Activations: SwiGLU, sums, gates of rows. act.go says what is computed. A team computes a
// row.
// targets: sm_80

#include "gate.cuh"

#define THREADS 256

#define KEEP 4u // vectors of each operand that a thread loads together
#define ROWS 8u // rows of a block, of which some may be dead: gateRows

// Swiglu is what both passes need to know.
struct Swiglu {
    u32 rows, cols, experts;
    u64 segments, weight;
    DEVICE float by(u32 row) const { return weight == 0 ? 1 : get(F32, weight + 4ull * row); }
    // each_row calls f for the live rows of the block that belong to a team.
    template <class F> DEVICE void each_row(const Team &t, F f) const {
        u32 in = threads() / t.size, own = thread() / t.size;
#pragma unroll 1
        for (u64 first = (u64)block() * ROWS; first < rows; first += (u64)blocks() * ROWS) {
            u32 alive = live_rows(segments, experts, (u32)first);
#pragma unroll 1
            for (u32 i = own; i < least((u64)ROWS, rows - first); i += in) {
                if (alive >> i & 1) f((u32)first + i);
            }
        }
    }
};

DEVICE Swiglu unpack(u64 weight, u64 segments, u64 size, u64 experts) {
    return {low(size), high(size), (u32)experts, segments == 0 ? 0 : global(segments), weight == 0 ? 0 : global(weight)};
}

// Rows of bf16 whose vectors are aligned have kernels of their own, because code for all
// formats needs many registers.
KERNEL(THREADS)
stowage_nn_swiglu_wide(u64 dst, u64 src, u64 weight, u64 segments, u64 size, u64 pitches, u64 experts, u64) {
    Matrix y = {global(dst), low(pitches), BF16}, x = {global(src), high(pitches), BF16};
    Swiglu g = unpack(weight, segments, size, experts);
    Team t = line(g.cols, KEEP);
    g.each_row(t, [&](u32 row) INLINE {
        float by = g.by(row), a[STEP], b[STEP];
#pragma unroll 1
        for (u32 first = 0; first < g.cols; first += KEEP * STEP * t.size) {
            Vec as[KEEP], bs[KEEP];
            u32 n = g.cols - first;
            hold(t, x.at(row, first), n, as);
            hold(t, x.at(row, g.cols + first), n, bs);
#pragma unroll
            for (u32 k = 0; k < KEEP; k++) {
                u32 c = (t.member + k * t.size) * STEP;
                if (c >= n) continue;
                widen(as[k], a);
                widen(bs[k], b);
                gate(a, b, by);
                write(y.at(row, first + c), narrowed(a));
            }
        }
    });
}

KERNEL(THREADS)
stowage_nn_swiglu(u64 dst, u64 src, u64 weight, u64 segments, u64 size, u64 pitches, u64 experts, u64 types) {
    Matrix y = {global(dst), low(pitches), bit(types, 0)}, x = {global(src), high(pitches), bit(types, 1)};
    Swiglu g = unpack(weight, segments, size, experts);
    Team t = line(g.cols, KEEP);
    g.each_row(t, [&](u32 row) INLINE {
        float by = g.by(row);
        t.each(g.cols, [&](u32 c, u32 n) {
            float a[STEP], b[STEP];
            load(x.type, x.at(row, c), n, a);
            load(x.type, x.at(row, g.cols + c), n, b);
            gate(a, b, by);
            store(y.type, y.at(row, c), n, a);
        });
    });
}

KERNEL(THREADS)
stowage_nn_swiglu_grad_wide(u64 dsrc, u64 src, u64 ddst, u64 dst, u64 weight, u64 dweight, u64 segments, u64 size, u64 pitches, u64 more,
                            u64 experts, u64) {
    Matrix dx = {global(dsrc), low(pitches), BF16}, x = {global(src), high(pitches), BF16};
    Matrix dy = {global(ddst), low(more), BF16}, y = {global(dst), high(more), BF16};
    Swiglu g = unpack(weight, segments, size, experts);
    Team t = line(g.cols, KEEP);
    g.each_row(t, [&](u32 row) INLINE {
        float by = g.by(row), dot = 0;
#pragma unroll 1
        for (u32 first = 0; first < g.cols; first += KEEP * STEP * t.size) {
            Vec as[KEEP], bs[KEEP], ds[KEEP];
            u32 n = g.cols - first;
            hold(t, x.at(row, first), n, as);
            hold(t, x.at(row, g.cols + first), n, bs);
            hold(t, dy.at(row, first), n, ds);
#pragma unroll
            for (u32 k = 0; k < KEEP; k++) {
                u32 c = (t.member + k * t.size) * STEP;
                if (c >= n) continue;
                Slopes s;
                widen(as[k], s.a);
                widen(bs[k], s.b);
                widen(ds[k], s.d);
                dot += s.compute(by);
                write(dx.at(row, first + c), narrowed(s.d));
                write(dx.at(row, g.cols + first + c), narrowed(s.b));
                if (dst != 0) write(y.at(row, first + c), narrowed(s.a));
            }
        }
        if (dweight == 0) return;
        dot = t.sum(dot);
        if (t.member == 0) set(F32, global(dweight) + 4ull * row, dot);
    });
}

KERNEL(THREADS)
stowage_nn_swiglu_grad(u64 dsrc, u64 src, u64 ddst, u64 dst, u64 weight, u64 dweight, u64 segments, u64 size, u64 pitches, u64 more,
                       u64 experts, u64 types) {
    Matrix dx = {global(dsrc), low(pitches), bit(types, 0)}, x = {global(src), high(pitches), bit(types, 1)};
    Matrix dy = {global(ddst), low(more), bit(types, 2)}, y = {global(dst), high(more), bit(types, 3)};
    Swiglu g = unpack(weight, segments, size, experts);
    Team t = line(g.cols, KEEP);
    g.each_row(t, [&](u32 row) INLINE {
        float by = g.by(row), dot = 0;
        t.each(g.cols, [&](u32 c, u32 n) {
            Slopes s;
            load(x.type, x.at(row, c), n, s.a);
            load(x.type, x.at(row, g.cols + c), n, s.b);
            load(dy.type, dy.at(row, c), n, s.d);
            dot += s.compute(by);
            store(dx.type, dx.at(row, c), n, s.d);
            store(dx.type, dx.at(row, g.cols + c), n, s.b);
            if (dst != 0) store(y.type, y.at(row, c), n, s.a);
        });
        if (dweight == 0) return;
        dot = t.sum(dot);
        if (t.member == 0) set(F32, global(dweight) + 4ull * row, dot);
    });
}

KERNEL(THREADS)
stowage_nn_add(u64 dst, u64 a, u64 b, u64 size, u64 pitches, u64 pitch_b, u64 types) {
    Matrix y = {global(dst), low(pitches), bit(types, 0)}, p = {global(a), high(pitches), bit(types, 1)}, q = {global(b), pitch_b, bit(types, 2)};
    u32 rows = low(size), cols = high(size);
    Team t = team(cols);
#pragma unroll 1
    for (u32 row = t.number; row < rows; row += t.count) {
        t.each(cols, [&](u32 c, u32 n) {
            float v[STEP], w[STEP];
            load(p.type, p.at(row, c), n, v);
            load(q.type, q.at(row, c), n, w);
#pragma unroll
            for (u32 e = 0; e < STEP; e++) v[e] += w[e];
            store(y.type, y.at(row, c), n, v);
        });
    }
}

KERNEL(THREADS)
stowage_nn_gate_rows(u64 dst, u64 src, u64 logit, u64 size, u64 pitches, u64 pitch_logit, u64 types) {
    Matrix y = {global(dst), low(pitches), bit(types, 0)}, x = {global(src), high(pitches), bit(types, 1)}, g = {global(logit), pitch_logit, F32};
    u32 rows = low(size), cols = high(size);
    Team t = team(cols);
#pragma unroll 1
    for (u32 row = t.number; row < rows; row += t.count) {
        float s = sigmoid(get(F32, g.at(row, 0)));
        t.each(cols, [&](u32 c, u32 n) {
            float v[STEP];
            load(x.type, x.at(row, c), n, v);
#pragma unroll
            for (u32 e = 0; e < STEP; e++) v[e] *= s;
            store(y.type, y.at(row, c), n, v);
        });
    }
}

KERNEL(THREADS)
stowage_nn_gate_rows_grad(u64 dsrc, u64 dlogit, u64 ddst, u64 src, u64 logit, u64 size, u64 pitches, u64 more, u64 pitch_logit, u64 types) {
    Matrix dx = {global(dsrc), low(pitches), bit(types, 0)}, dg = {global(dlogit), high(pitches), F32};
    Matrix dy = {global(ddst), low(more), bit(types, 1)}, x = {global(src), high(more), bit(types, 2)}, g = {global(logit), pitch_logit, F32};
    u32 rows = low(size), cols = high(size);
    Team t = team(cols);
#pragma unroll 1
    for (u32 row = t.number; row < rows; row += t.count) {
        float s = sigmoid(get(F32, g.at(row, 0))), dot = 0;
        t.each(cols, [&](u32 c, u32 n) {
            float d[STEP], v[STEP];
            load(dy.type, dy.at(row, c), n, d);
            load(x.type, x.at(row, c), n, v);
#pragma unroll
            for (u32 e = 0; e < STEP; e++) {
                dot += d[e] * v[e];
                d[e] *= s;
            }
            store(dx.type, dx.at(row, c), n, d);
        });
        dot = t.sum(dot);
        if (t.member == 0) set(F32, dg.at(row, 0), dot * (s * (1 - s)));
    }
}
