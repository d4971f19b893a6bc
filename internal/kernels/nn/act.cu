// Activations: SwiGLU, sums, gates of rows. act.go says what is computed. A team computes a
// row.
// targets: sm_80

#include "nn.cuh"

#define THREADS 256

KERNEL(THREADS)
stowage_nn_swiglu(u64 dst, u64 src, u64 weight, u64 segments, u64 size, u64 pitches, u64 experts, u64 types) {
    Matrix y = {global(dst), low(pitches), bit(types, 0)}, x = {global(src), high(pitches), bit(types, 1)};
    u32 rows = low(size), cols = high(size);
    Team t = team(cols);
#pragma unroll 1
    for (u32 row = t.number; row < rows; row += t.count) {
        if (!live(global(segments), (u32)experts, row)) continue;
        float by = weight == 0 ? 1 : get(F32, global(weight) + 4ull * row);
        t.each(cols, [&](u32 c, u32 n) {
            float a[STEP], b[STEP];
            load(x.type, x.at(row, c), n, a);
            load(x.type, x.at(row, cols + c), n, b);
#pragma unroll
            for (u32 e = 0; e < STEP; e++) a[e] = a[e] * sigmoid(a[e]) * b[e] * by;
            store(y.type, y.at(row, c), n, a);
        });
    }
}

KERNEL(THREADS)
stowage_nn_swiglu_grad(u64 dsrc, u64 src, u64 ddst, u64 dst, u64 weight, u64 dweight, u64 segments, u64 size, u64 pitches, u64 more,
                       u64 experts, u64 types) {
    Matrix dx = {global(dsrc), low(pitches), bit(types, 0)}, x = {global(src), high(pitches), bit(types, 1)};
    Matrix dy = {global(ddst), low(more), bit(types, 2)}, y = {global(dst), high(more), bit(types, 3)};
    u32 rows = low(size), cols = high(size);
    Team t = team(cols);
#pragma unroll 1
    for (u32 row = t.number; row < rows; row += t.count) {
        if (!live(global(segments), (u32)experts, row)) continue;
        float by = weight == 0 ? 1 : get(F32, global(weight) + 4ull * row), dot = 0;
        t.each(cols, [&](u32 c, u32 n) {
            float a[STEP], b[STEP], d[STEP], da[STEP];
            load(x.type, x.at(row, c), n, a);
            load(x.type, x.at(row, cols + c), n, b);
            load(dy.type, dy.at(row, c), n, d);
#pragma unroll
            for (u32 e = 0; e < STEP; e++) {
                float s = sigmoid(a[e]), silu = a[e] * s, g = d[e] * by;
                da[e] = g * b[e] * (s * (a[e] * (1 - s) + 1));
                d[e] *= silu * b[e];
                dot += d[e];
                a[e] = silu * b[e] * by; // y
                b[e] = g * silu;
            }
            store(dx.type, dx.at(row, c), n, da);
            store(dx.type, dx.at(row, cols + c), n, b);
            if (dst != 0) store(y.type, y.at(row, c), n, a);
        });
        if (dweight == 0) continue;
        dot = t.sum(dot);
        if (t.member == 0) set(F32, global(dweight) + 4ull * row, dot);
    }
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
