// This file has the parts of the attention kernels: tiles of rows in shared memory,
// products of tiles, and which query sees which key. Tensor cores compute the products of
// bf16, and plain arithmetic those of fp32. Results lie in lanes in the same way, so the
// rest is written once.

#pragma once

#include "nn.cuh"
#include "tensor.cuh"

// Shape is the work of a block: warps x 16 x high own rows stay, and step rows at a time
// pass by, in the given number of stages. Heads are padded with zeros to keys and values
// numbers, which are multiples of a bank line of 128 bytes.
template <u32 type_, u32 keys_, u32 values_, u32 warps_, u32 high_, u32 step_, u32 stages_> struct Shape {
    static constexpr u32 type = type_, keys = keys_, values = values_, high = high_, step = step_, stages = stages_;
    static constexpr u32 warps = warps_, threads = 32 * warps, rows = 16 * high * warps, size = type == BF16 ? 2 : 4;
    static constexpr u32 stage = step * (keys + values) * size;
};

// Work is a launch. window is how many keys a query sees at most.
struct Work {
    Matrix q, k, v, o, d_o, dq, dk, dv;
    u64 lse, delta;
    u32 batch, seq, heads, kv_heads, keys, values, window;
    float scale;
    DEVICE bool sees(u32 query, u32 key) const { return key <= query && query - key < window && query < seq; }
    // A number for each query of a head.
    DEVICE u64 row(u64 of, u32 sequence, u32 head, u32 query) const {
        return of + (((u64)sequence * heads + head) * seq + query) * 4;
    }
};

#define LOG2E 1.44269504f

// place returns where a vector of 16 bytes of a tile lies. The vectors of a row are
// permuted, so the same vector of eight rows is in eight different groups of banks.
template <u32 type, u32 width> DEVICE u32 place(u32 row, u32 vector) {
    return row * width * (type == BF16 ? 2 : 4) + ((vector ^ (row & 7)) << 4);
}

// collect loads count numbers one by one and fills up with zeros.
template <u32 type> DEVICE Vec collect(u64 p, u32 count) {
    u32 w[4] = {0, 0, 0, 0};
#pragma unroll
    for (u32 e = 0; e < (type == BF16 ? 8 : 4); e++) {
        if (e < count) {
            if (type == BF16) w[e / 2] |= (u32)read<u16>(p + 2 * e) << 16 * (e % 2);
            else w[e] = read<u32>(p + 4 * e);
        }
    }
    return {w[0], w[1], w[2], w[3]};
}

DEVICE u32 bounded(u32 at, u32 end, u32 most) { return at >= end ? 0 : least(end - at, most); }

constexpr u32 largest(u32 a, u32 b) { return a > b ? a : b; }

// bring_tile begins to copy a tile: rows from row on, of which there are there, and cols
// columns from col on. The rest is zero. It copies at once if vectors are not aligned.
template <class S, u32 rows, u32 width>
DEVICE void bring_tile(u8 *dst, const Matrix &m, u64 row, u32 there, u32 col, u32 cols) {
    constexpr u32 each = 16 / S::size, vectors = width / each;
    u64 base = m.at(row, col), pitch = m.pitch * S::size;
    bool fast = ((base | pitch) & 15) == 0;
#pragma unroll 1
    for (u32 i = thread(); i < rows * vectors; i += S::threads) {
        u32 r = i / vectors, v = i % vectors, count = r < there ? bounded(v * each, cols, each) : 0;
        u64 src = base + r * pitch + 16 * v;
        u8 *to = dst + place<S::type, width>(r, v);
        if (fast) bring(spot(to), count > 0 ? src : base, count * S::size);
        else *(Vec *)to = collect<S::type>(src, count);
    }
}

// bring_row does the same for consecutive fp32 numbers.
template <class S> DEVICE void bring_row(float *dst, u64 src, u32 there) {
    bool fast = (src & 15) == 0;
#pragma unroll 1
    for (u32 i = 4 * thread(); i < S::step; i += 4 * S::threads) {
        u32 count = bounded(i, there, 4);
        if (fast) bring(spot(dst + i), count > 0 ? src + 4 * i : src, 4 * count);
        else *(Vec *)(dst + i) = collect<F32>(src + 4 * i, count);
    }
}

// scores adds x yᵀ to s. x is a tile of own rows, of which this warp has those from row on.
// y has step rows.
template <class S, u32 width> DEVICE void scores(float s[S::high][S::step / 8][4], const u8 *x, u32 row, const u8 *y) {
    u32 l = lane();
    if constexpr (S::type == BF16) {
#pragma unroll 1
        for (u32 part = 0; part < width / 64; part++) {
#pragma unroll
            for (u32 k = 0; k < 8; k += 2) {
                u32 a[S::high][4];
#pragma unroll
                for (u32 i = 0; i < S::high; i++) {
                    matrices(a[i], spot(x + place<BF16, width>(row + 16 * i + (l & 15), 8 * part + k + (l >> 4))));
                }
#pragma unroll
                for (u32 n = 0; n < S::step; n += 16) {
                    u32 b[4];
                    matrices(b, spot(y + place<BF16, width>(n + (l & 7) + (l >> 4) * 8, 8 * part + k + (l >> 3 & 1))));
#pragma unroll
                    for (u32 i = 0; i < S::high; i++) {
                        multiply(s[i][n / 8], a[i], b);
                        multiply(s[i][n / 8 + 1], a[i], b + 2);
                    }
                }
            }
        }
    } else {
        auto dot = [](float sum, const Vec &a, const Vec &b) {
            sum += number(a.x) * number(b.x);
            sum += number(a.y) * number(b.y);
            sum += number(a.z) * number(b.z);
            return sum + number(a.w) * number(b.w);
        };
#pragma unroll 2
        for (u32 k = 0; k < width / 4; k++) {
            Vec a[S::high][2];
#pragma unroll
            for (u32 i = 0; i < 2 * S::high; i++) {
                a[i / 2][i % 2] = *(const Vec *)(x + place<F32, width>(row + 8 * i + l / 4, k));
            }
#pragma unroll
            for (u32 n = 0; n < S::step / 8; n++) {
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    Vec b = *(const Vec *)(y + place<F32, width>(8 * n + l % 4 * 2 + e, k));
#pragma unroll
                    for (u32 i = 0; i < 2 * S::high; i++) {
                        float &sum = s[i / 2][n][i % 2 * 2 + e];
                        sum = dot(sum, a[i / 2][i % 2], b);
                    }
                }
            }
        }
    }
}

// apply adds p y to o: p has a column for each of y's step rows.
template <class S, u32 width>
DEVICE void apply(float o[S::high][width / 8][4], const float p[S::high][S::step / 8][4], const u8 *y) {
    u32 l = lane();
    if constexpr (S::type == BF16) {
#pragma unroll
        for (u32 k = 0; k < S::step; k += 16) {
            u32 a[S::high][4];
#pragma unroll
            for (u32 i = 0; i < S::high; i++) {
#pragma unroll
                for (u32 e = 0; e < 4; e++) {
                    const float *x = p[i][k / 8 + e / 2] + e % 2 * 2;
                    a[i][e] = pair(x[0], x[1]);
                }
            }
#pragma unroll
            for (u32 n = 0; n < width; n += 16) {
                u32 b[4];
                crosswise(b, spot(y + place<BF16, width>(k + (l & 15), n / 8 + (l >> 4))));
#pragma unroll
                for (u32 i = 0; i < S::high; i++) {
                    multiply(o[i][n / 8], a[i], b);
                    multiply(o[i][n / 8 + 1], a[i], b + 2);
                }
            }
        }
    } else {
        // This handles eight columns at a time and then moves the next ones up, because
        // registers cannot be indexed.
        float q[S::high][S::step / 8][4];
        __builtin_memcpy(q, p, sizeof q);
#pragma unroll 1
        for (u32 part = 0; part < S::step / 8; part++) {
#pragma unroll
            for (u32 c = 0; c < 8; c++) {
                // The four lanes of a row have its columns in turn.
                u32 owner = (l & ~3u) + c / 2;
                float w[2 * S::high];
#pragma unroll
                for (u32 i = 0; i < 2 * S::high; i++) w[i] = number(from_lane(bits(q[i / 2][0][i % 2 * 2 + c % 2]), owner));
#pragma unroll
                for (u32 n = 0; n < width / 8; n++) {
                    const float *b = (const float *)(y + place<F32, width>(8 * part + c, 2 * n + l % 4 / 2) + l % 2 * 8);
                    float b0 = b[0], b1 = b[1];
#pragma unroll
                    for (u32 i = 0; i < 2 * S::high; i++) {
                        o[i / 2][n][i % 2 * 2] += w[i] * b0;
                        o[i / 2][n][i % 2 * 2 + 1] += w[i] * b1;
                    }
                }
            }
#pragma unroll
            for (u32 i = 0; i < S::high; i++) {
#pragma unroll
                for (u32 n = 0; n + 1 < S::step / 8; n++) {
#pragma unroll
                    for (u32 e = 0; e < 4; e++) q[i][n][e] = q[i][n + 1][e];
                }
            }
        }
    }
}

// deliver stores a tile of results, this warp's from row on, through the pool at dst, which
// is free by then.
template <class S, u32 width>
DEVICE void deliver(u8 *dst, const float o[S::high][width / 8][4], u32 row, const Matrix &m, u64 to, u32 there, u32 col,
                    u32 cols) {
    constexpr u32 each = 16 / S::size, vectors = width / each;
    u32 l = lane();
#pragma unroll
    for (u32 i = 0; i < 2 * S::high; i++) {
        u32 r = row + 8 * i + l / 4;
#pragma unroll
        for (u32 n = 0; n < width / 8; n++) {
            float x = o[i / 2][n][i % 2 * 2], y = o[i / 2][n][i % 2 * 2 + 1];
            if (S::type == BF16) {
                *(u32 *)(dst + place<BF16, width>(r, n) + l % 4 * 4) = pair(x, y);
            } else {
                float *p = (float *)(dst + place<F32, width>(r, 2 * n + l % 4 / 2) + l % 2 * 8);
                p[0] = x;
                p[1] = y;
            }
        }
    }
    barrier();
    u64 base = m.at(to, col), pitch = m.pitch * S::size;
    bool fast = ((base | pitch) & 15) == 0;
#pragma unroll 1
    for (u32 i = thread(); i < S::rows * vectors; i += S::threads) {
        u32 r = i / vectors, v = i % vectors, count = r < there ? bounded(v * each, cols, each) : 0;
        Vec w = *(const Vec *)(dst + place<S::type, width>(r, v));
        u64 p = base + r * pitch + 16 * v;
        if (fast && count == each) {
            write(p, w);
            continue;
        }
        u32 all[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (u32 e = 0; e < each; e++) {
            if (e < count) {
                if constexpr (S::type == BF16) write(p + 2 * e, (u16)(all[e / 2] >> 16 * (e % 2)));
                else write(p + 4 * e, all[e]);
            }
        }
    }
}
