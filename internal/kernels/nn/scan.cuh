// This file has what the scan of Mamba-2 and its backward pass share. scan.go says what is
// computed, and scantwin.go and scangradtwin.go how. Nearly all of it is products of
// matrices, in tiles of 64 x 64. All of it is fp32.

#pragma once

#define Q 64u // tokens of a chunk: plainChunk
#define STATE_SIZE 4

#include "scanshape.cuh"

#define THREADS 256
#define TILE 64u
#define DEEP 16u // numbers of a sum that are in shared memory at a time
#define HEADS (THREADS / 32)

// Steps has what a chunk's tokens need for some heads, one a warp: dt, the slope of the
// softplus, and the running sum of the logarithms of decays. The sum has two parts, so the
// difference of two large sums keeps its digits.
struct Steps {
    float dt[HEADS][Q], slope[HEADS][Q], sum[HEADS][Q], rest[HEADS][Q];
    // decay returns the decay from behind token j to behind token i, i >= j.
    DEVICE float decay(u32 w, u32 i, u32 j) const { return exponential((sum[w][i] - sum[w][j]) + (rest[w][i] - rest[w][j])); }
    DEVICE float start(u32 w, u32 i) const { return exponential(sum[w][i] + rest[w][i]); }
    DEVICE float end(u32 w, u32 j) const { return decay(w, Q - 1, j); }
    DEVICE float all(u32 w) const { return start(w, Q - 1); }
};

DEVICE double below(double v, u32 d) {
    u64 b = __builtin_bit_cast(u64, v);
    b = (u64)from_below(high(b), d) << 32 | from_below(low(b), d);
    return __builtin_bit_cast(double, b);
}

// fill computes the steps of head h + warp() if it is below end. Tokens behind the last one
// do not change the state. The block must wait before and after it.
DEVICE void fill(Steps &s, const Scan &c, u32 b, u32 chunk, u32 h, u32 end) {
    u32 w = warp(), q = c.tokens(chunk);
    if (h + w >= end) return;
    float a = c.a(h + w), bias = c.param(c.bias, h + w);
    double sum[2];
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        u32 i = 2 * lane() + k;
        float raw = i < q ? get(c.dt.type, c.dt.at((u64)b * c.seq + chunk * Q + i, h + w)) + bias : 0;
        s.dt[w][i] = i < q ? softplus(raw) : 0;
        s.slope[w][i] = i < q ? sigmoid(raw) : 0;
        sum[k] = (double)s.dt[w][i] * (double)a + (k == 0 ? 0 : sum[0]);
    }
    double all = sum[1];
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
        double v = below(all, d);
        if (lane() >= d) all += v;
    }
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        double v = all - sum[1] + sum[k];
        s.sum[w][2 * lane() + k] = (float)v;
        s.rest[w][2 * lane() + k] = (float)(v - (double)(float)v);
    }
}

// A thread has four rows and four columns of a tile.
struct Tile {
    float v[4][4];
    DEVICE static u32 row(u32 r) { return thread() / 16 * 4 + r; }
    DEVICE static u32 col(u32 k) { return thread() % 16 * 4 + k; }
    DEVICE void clear() {
#pragma unroll
        for (u32 r = 0; r < 4; r++)
#pragma unroll
            for (u32 k = 0; k < 4; k++) v[r][k] = 0;
    }
    // each calls f with row, column and number.
    template <class F> DEVICE void each(F f) {
#pragma unroll
        for (u32 r = 0; r < 4; r++)
#pragma unroll
            for (u32 k = 0; k < 4; k++) f(row(r), col(k), v[r][k]);
    }
};

// Operands lie in fours, which one access reads.
struct alignas(16) Four {
    float v[4];
};
struct Operands {
    Four a[DEEP][TILE / 4 + 1], b[DEEP][TILE / 4 + 1];
};

// multiply adds a product to a tile: the sum over k < depth, in order, of a(row, k) times
// b(k, column), which are zero beyond their bounds. deep says along which index neighbours
// lie in memory: k, or the row or column. When it returns, all threads have finished
// reading a and b.
template <bool deep_a, bool deep_b, class A, class B> DEVICE void multiply(Operands &o, Tile &t, u32 depth, A a, B b) {
#pragma unroll 1
    for (u32 from = 0; from < depth; from += DEEP) {
        barrier();
#pragma unroll
        for (u32 m = 0; m < TILE * DEEP / THREADS; m++) {
            u32 e = m * THREADS + thread();
            u32 ka = deep_a ? e % DEEP : e / TILE, i = deep_a ? e / DEEP : e % TILE;
            u32 kb = deep_b ? e % DEEP : e / TILE, j = deep_b ? e / DEEP : e % TILE;
            o.a[ka][i / 4].v[i % 4] = from + ka < depth ? a(i, from + ka) : 0;
            o.b[kb][j / 4].v[j % 4] = from + kb < depth ? b(from + kb, j) : 0;
        }
        barrier();
#pragma unroll
        for (u32 k = 0; k < DEEP; k++) {
            Four x = o.a[k][thread() / 16], y = o.b[k][thread() % 16];
#pragma unroll
            for (u32 r = 0; r < 4; r++)
#pragma unroll
                for (u32 c = 0; c < 4; c++) t.v[r][c] += x.v[r] * y.v[c];
        }
    }
}

// Part is the rows of a chunk in a matrix and some of its columns. It is zero beyond both.
struct Part {
    Matrix m;
    u64 row;
    u32 col, rows, cols;
    DEVICE float at(u32 i, u32 j) const { return i < rows && j < cols ? get(m.type, m.at(row + i, col + j)) : 0; }
    DEVICE void put(u32 i, u32 j, float x) const {
        if (i < rows && j < cols) set(m.type, m.at(row + i, col + j), x);
    }
    // from returns the part from a column on.
    DEVICE Part from(u32 c) const { return {m, row, col + c, rows, c < cols ? cols - c : 0}; }
};

DEVICE Part part(const Scan &c, const Matrix &m, u32 b, u32 chunk, u32 col, u32 cols) {
    return {m, (u64)b * c.seq + chunk * Q, col, c.tokens(chunk), cols};
}

// state returns a head's state as a matrix of head x state.
DEVICE Part state(const Scan &c, u64 p) { return {{p, c.state, F32}, 0, 0, c.head, c.state}; }

// carry computes the states between chunks for one tile of a head: the last state times the
// chunk's decay, plus a product of the weighted columns of m and those of n. If back is
// set, it runs from the last chunk to the first.
template <bool back> DEVICE void carry(Steps &s, Operands &o, const Scan &c, u64 states, const Matrix &m, u32 b, u32 h, u32 p, u32 n) {
    u32 g = h / (c.heads / c.groups);
    Tile t;
    t.clear();
#pragma unroll 1
    for (u32 i = 0; i + 1 < c.chunks; i++) {
        u32 chunk = back ? c.chunks - 1 - i : i;
        fill(s, c, b, chunk, h, h + 1);
        barrier();
        float all = s.all(0);
        t.each([&](u32, u32, float &v) { v *= all; });
        Part left = part(c, m, b, chunk, h * c.head, c.head).from(p);
        Part right = part(c, c.xbc, b, chunk, back ? c.col_c(g) : c.col_b(g), c.state).from(n);
        multiply<false, false>(
            o, t, Q, [&](u32 i, u32 k) { return left.at(k, i) * (back ? s.start(0, k) : s.dt[0][k] * s.end(0, k)); },
            [&](u32 k, u32 j) { return right.at(k, j); });
        Part to = state(c, c.between(states, b, back ? chunk - 1 : chunk, h));
        t.each([&](u32 i, u32 j, float v) { to.put(p + i, n + j, v); });
    }
}

// A block computes a tile of a head's states at a time.
template <bool back> DEVICE void carry_all(Steps &s, Operands &o, const Scan &c, u64 states, const Matrix &m) {
    u32 ps = (c.head + TILE - 1) / TILE, ns = (c.state + TILE - 1) / TILE;
#pragma unroll 1
    for (u32 u = block(); u < c.batch * c.heads * ps * ns; u += blocks()) {
        u32 which = u / (ps * ns), tile = u % (ps * ns);
        carry<back>(s, o, c, states, m, which / c.heads, which % c.heads, tile / ns * TILE, tile % ns * TILE);
    }
}

// square is a tile in shared memory: C Bᵀ of a chunk's tokens, or its gradient.
typedef float Square[Q][TILE + 1];

DEVICE void make_cb(Operands &o, Square &cb, const Part &bs, const Part &cs) {
    Tile t;
    t.clear();
    multiply<true, true>(
        o, t, bs.cols, [&](u32 i, u32 k) { return cs.at(i, k); }, [&](u32 k, u32 j) { return bs.at(j, k); });
    t.each([&](u32 i, u32 j, float v) { cb[i][j] = v; });
}

// each_head calls f for the heads of a group, with the warp that has the steps of the head.
template <class F> DEVICE void each_head(Steps &s, const Scan &c, u32 b, u32 chunk, u32 g, F f) {
    u32 per = c.heads / c.groups, end = (g + 1) * per;
#pragma unroll 1
    for (u32 h = g * per; h < end; h += HEADS) {
        barrier();
        fill(s, c, b, chunk, h, end);
        barrier();
#pragma unroll 1
        for (u32 w = 0; w < HEADS && h + w < end; w++) f(h + w, w);
    }
}
