// This file has one tile of 128 x 128 of a matrix product. Tensor cores compute it if both
// operands are bf16, and plain fp32 arithmetic otherwise. Every number of the result is a
// sum over k in order, made by one thread or one warp, so neither the grid nor the place of
// a tile changes a bit.

#pragma once

#include "nn.cuh"
#include "tensor.cuh"

#define TILE 128u

// Job is a product C = op(A) op(B) + plus. Pitches are numbers from a row of memory
// to the next. Types are zero for fp32 and one for bf16.
struct Job {
    u64 a, b, c, plus; // plus may be zero
    u64 pitch_a, pitch_b, pitch_c, pitch_plus;
    u32 m, n, k;
    u32 type_a, type_b, type_c, type_plus;
};

DEVICE u64 bytes(u32 type, u64 n) { return n << (type == BF16 ? 1 : 2); }

// bounded returns how many of the numbers from at on, at most most, lie before end.
DEVICE u32 bounded(u32 at, u32 end, u32 most) { return at >= end ? 0 : least(end - at, most); }

// The results of a tile pass through the pool, so they are stored in whole vectors. cell
// returns the place of one. Runs of eight are permuted among four rows, because otherwise
// the rows that a warp stores at once would lie in the same banks.
#define TILE_BYTES (TILE * TILE * 4)

DEVICE float *cell(u32 row, u32 col) { return (float *)pool + row * TILE + (col ^ (row & 3) * STEP); }

DEVICE void finish(const Job &j, u32 m0, u32 n0) {
    barrier();
#pragma unroll 1
    for (u32 i = thread(); i < TILE * TILE / STEP; i += threads()) {
        u32 row = i / (TILE / STEP), col = i % (TILE / STEP) * STEP;
        u32 count = m0 + row < j.m ? bounded(n0 + col, j.n, STEP) : 0;
        if (count == 0) continue;
        const Vec *from = (const Vec *)cell(row, col);
        Vec v = from[0], w = from[1];
        float x[STEP] = {number(v.x), number(v.y), number(v.z), number(v.w),
                         number(w.x), number(w.y), number(w.z), number(w.w)};
        if (j.plus != 0) {
            float y[STEP];
            load(j.type_plus, j.plus + bytes(j.type_plus, (m0 + row) * j.pitch_plus + n0 + col), count, y);
#pragma unroll
            for (u32 e = 0; e < STEP; e++) x[e] += y[e];
        }
        store(j.type_c, j.c + bytes(j.type_c, (m0 + row) * j.pitch_c + n0 + col), count, x);
    }
}

// ---- bf16 by tensor cores: 4 warps, each 64 x 64

#define TENSOR_THREADS 128u
#define DEPTH 32u // of k, a stage
#define STAGES 4u
#define SIDE (TILE * DEPTH * 2) // bytes of one operand of a stage

// Side is one operand of a product on its way into shared memory. If along is set, a row of
// memory runs along k, and the stage is 128 rows of 64 bytes. Otherwise it runs along m or
// n, and the stage is 32 rows of 256 bytes. Vectors of 16 bytes are permuted within the
// row, so the eight rows of a matrix that is loaded lie in different banks: two rows of 64
// bytes share the 32 banks, and a row of 256 bytes fills them twice.
template <bool along> struct Side {
    static constexpr u32 row_bytes = along ? 2 * DEPTH : 2 * TILE, vectors = row_bytes / 16, step = TENSOR_THREADS / vectors;
    u64 base, pitch;   // of the operand, in bytes
    u32 across, limit; // first row or column of the tile, and the operand's number of them
    u32 k;
    bool fast; // all vectors are aligned

    DEVICE static u32 place(u32 row, u32 vector) {
        return row * row_bytes + ((vector ^ (along ? row >> 1 & 3 : row & 7)) << 4);
    }

    // slow loads a vector number by number.
    DEVICE static void slow(u8 *dst, u64 src, u32 count) {
        u32 w[4] = {0, 0, 0, 0};
#pragma unroll
        for (u32 e = 0; e < 8; e++) {
            if (e < count) w[e / 2] |= (u32)read<u16>(src + 2 * e) << 16 * (e % 2);
        }
        *(Vec *)dst = {w[0], w[1], w[2], w[3]};
    }

    DEVICE void load(u8 *dst, u32 k0) const {
        u32 row = thread() / vectors, vector = thread() % vectors;
        // The column is the same for all rows of a thread.
        u32 column = (along ? k0 : across) + 8 * vector, first = along ? across : k0;
        u32 rows = along ? limit : k, count = bounded(column, along ? k : limit, 8);
        u64 src = base + (first + row) * pitch + 2 * column;
        if (fast) {
#pragma unroll
            for (u32 q = 0; q < 4; q++) {
                bool there = first + row + q * step < rows && count > 0;
                u64 from = there ? src + q * step * pitch : base;
                bring(spot(dst + place(row + q * step, vector)), from, there ? 2 * count : 0);
            }
        } else {
#pragma unroll 1
            for (u32 q = 0; q < 4; q++) {
                u32 there = first + row + q * step < rows ? count : 0;
                slow(dst + place(row + q * step, vector), src + q * step * pitch, there);
            }
        }
    }
};

DEVICE bool aligned(u64 base, u64 pitch) { return ((base | pitch) & 15) == 0; }

// fragments_a loads 16 x 16 of A from row m and k on, fragments_b 16 x 16 of B, which
// are two operands of multiply.
template <bool along> DEVICE void fragments_a(u32 *r, const u8 *side, u32 m, u32 k) {
    u32 l = lane();
    if (along) matrices(r, spot(side + Side<along>::place(m + (l & 15), k / 8 + (l >> 4))));
    else crosswise(r, spot(side + Side<along>::place(k + (l & 7) + (l >> 4) * 8, m / 8 + (l >> 3 & 1))));
}
template <bool along> DEVICE void fragments_b(u32 *r, const u8 *side, u32 n, u32 k) {
    u32 l = lane();
    if (along) matrices(r, spot(side + Side<along>::place(n + (l & 7) + (l >> 4) * 8, k / 8 + (l >> 3 & 1))));
    else crosswise(r, spot(side + Side<along>::place(k + (l & 15), n / 8 + (l >> 4))));
}

// tensor_tile computes the tile whose first number is (m0, n0).
template <bool trans_a, bool trans_b> DEVICE void tensor_tile(const Job &j, u32 m0, u32 n0) {
    constexpr bool along_a = !trans_a, along_b = trans_b;
    Side<along_a> a = {j.a, 2 * j.pitch_a, m0, j.m, j.k, aligned(j.a, 2 * j.pitch_a)};
    Side<along_b> b = {j.b, 2 * j.pitch_b, n0, j.n, j.k, aligned(j.b, 2 * j.pitch_b)};
    u32 m = warp() % 2 * 64, n = warp() / 2 * 64;
    float c[4][8][4] = {};
    int steps = (int)((j.k + DEPTH - 1) / DEPTH);
    barrier(); // the tile before is done with the stages
    // STAGES - 1 tiles of k are loaded while others are used.
#pragma unroll 1
    for (int step = 1 - (int)STAGES; step < steps; step++) {
        if (step >= 0) {
            arrived<STAGES - 2>();
            barrier();
        }
        int next = step + (int)STAGES - 1;
        if (next < steps) {
            u8 *stage = pool + (u32)next % STAGES * 2 * SIDE;
            a.load(stage, (u32)next * DEPTH);
            b.load(stage + SIDE, (u32)next * DEPTH);
        }
        seal();
        if (step < 0) continue;
        const u8 *stage = pool + (u32)step % STAGES * 2 * SIDE;
#pragma unroll
        for (u32 k = 0; k < DEPTH; k += 16) {
            u32 x[4][4], y[4][4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) fragments_a<along_a>(x[i], stage, m + 16 * i, k);
#pragma unroll
            for (u32 i = 0; i < 4; i++) fragments_b<along_b>(y[i], stage + SIDE, n + 16 * i, k);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
#pragma unroll
                for (u32 h = 0; h < 8; h++) multiply(c[i][h], x[i], y[h / 2] + h % 2 * 2);
            }
        }
    }
    arrived<0>();
    barrier();
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
#pragma unroll
        for (u32 h = 0; h < 8; h++) {
            u32 row = m + 16 * i + lane() / 4, col = n + 8 * h + lane() % 4 * 2;
#pragma unroll
            for (u32 e = 0; e < 4; e++) cell(row + e / 2 * 8, col)[e % 2] = c[i][h][e];
        }
    }
    finish(j, m0, n0);
}

// ---- fp32, and mixed types: 256 threads, each 8 x 8 in four parts of 4 x 4

#define PLAIN_THREADS 256u
#define SLICE 16u           // of k, a stage
#define LINE (TILE + 4)     // numbers; four more spread columns over banks
#define SLICES (SLICE * LINE)

struct Four {
    float x[4];
};

// four reads four consecutive numbers. Those from count on are zero.
DEVICE Four four(u64 p, u32 type, u32 count, bool fast) {
    Four v = {{0, 0, 0, 0}};
    if (fast && count == 4) {
        if (type) {
            u64 w = read<u64>(p);
            split((u32)w, v.x);
            split((u32)(w >> 32), v.x + 2);
        } else {
            Vec w = read<Vec>(p);
            v = {{number(w.x), number(w.y), number(w.z), number(w.w)}};
        }
        return v;
    }
#pragma unroll
    for (u32 e = 0; e < 4; e++) {
        if (e < count) v.x[e] = get(type, p + bytes(type, e));
    }
    return v;
}

// Strip is one operand on its way into shared memory, where it lies as k rows of 128
// numbers, however it runs in memory. load reads a stage into registers, and store writes
// it from there. Another stage is used meanwhile.
struct Strip {
    u64 base, pitch;
    u32 type, across, limit, k;
    bool along, fast;

    DEVICE void load(Four *v, u32 k0) const {
        u32 t = thread(), row = along ? t / 4 : t / 32, column = (along ? t % 4 : t % 32) * 4, step = along ? 64 : 8;
        u32 first = along ? across : k0, rows = along ? limit : k;
        column += along ? k0 : across;
        u32 count = bounded(column, along ? k : limit, 4);
#pragma unroll
        for (u32 q = 0; q < 2; q++) {
            u32 at = first + row + q * step;
            v[q] = four(base + bytes(type, at * pitch + column), type, at < rows ? count : 0, fast);
        }
    }

    DEVICE void store(float *dst, const Four *v) const {
        u32 t = thread();
#pragma unroll
        for (u32 q = 0; q < 2; q++) {
            if (along) {
#pragma unroll
                for (u32 e = 0; e < 4; e++) dst[(t % 4 * 4 + e) * LINE + t / 4 + 64 * q] = v[q].x[e];
            } else {
                const float *x = v[q].x;
                *(Vec *)(dst + (t / 32 + 8 * q) * LINE + t % 32 * 4) = {bits(x[0]), bits(x[1]), bits(x[2]), bits(x[3])};
            }
        }
    }
};

DEVICE Strip strip(u64 base, u64 pitch, u32 type, u32 across, u32 limit, u32 k, bool along) {
    return {base, pitch, type, across, limit, k, along, (base | bytes(type, pitch)) % bytes(type, 4) == 0};
}

// eight reads two runs of four numbers, 64 apart.
DEVICE void eight(float *x, const float *p) {
#pragma unroll
    for (u32 q = 0; q < 2; q++) {
        Vec v = *(const Vec *)(p + 64 * q);
        x[4 * q] = number(v.x);
        x[4 * q + 1] = number(v.y);
        x[4 * q + 2] = number(v.z);
        x[4 * q + 3] = number(v.w);
    }
}

DEVICE void plain_tile(const Job &j, bool trans_a, bool trans_b, u32 m0, u32 n0) {
    float *stages = (float *)pool; // two, each of A and of B
    Strip a = strip(j.a, j.pitch_a, j.type_a, m0, j.m, j.k, !trans_a);
    Strip b = strip(j.b, j.pitch_b, j.type_b, n0, j.n, j.k, trans_b);
    u32 x = thread() % 16 * 4, y = thread() / 16 * 4;
    float c[8][8] = {};
    Four va[2], vb[2];
    a.load(va, 0);
    b.load(vb, 0);
    barrier(); // the tile before is done with the stages
    u32 at = 0;
#pragma unroll 1
    for (u32 k0 = 0; k0 < j.k; k0 += SLICE) {
        float *stage = stages + at * 2 * SLICES;
        at ^= 1;
        a.store(stage, va);
        b.store(stage + SLICES, vb);
        // One barrier a stage is enough. A thread that stores into a stage again has passed
        // the barrier of the other stage, and so have all that read this one.
        barrier();
        if (k0 + SLICE < j.k) {
            a.load(va, k0 + SLICE);
            b.load(vb, k0 + SLICE);
        }
#pragma unroll
        for (u32 k = 0; k < SLICE; k++) {
            float p[8], q[8];
            eight(p, stage + k * LINE + y);
            eight(q, stage + SLICES + k * LINE + x);
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
#pragma unroll
                for (u32 h = 0; h < 8; h++) c[i][h] += p[i] * q[h];
            }
        }
    }
    barrier();
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
#pragma unroll
        for (u32 h = 0; h < 8; h++) cell(y + i % 4 + i / 4 * 64, x + h / 4 * 64)[h % 4] = c[i][h];
    }
    finish(j, m0, n0);
}
