// This file has what kernels of models share: numbers in memory, functions of numbers, sums
// over warps and blocks in a fixed order, and rows that belong to experts.

#pragma once

#include "words.cuh"

// INLINE is for large lambdas. As separate functions they would keep in memory what they
// refer to.
#define INLINE __attribute__((always_inline))

DEVICE float number(u32 bits) { return __builtin_bit_cast(float, bits); }
DEVICE u32 bits(float x) { return __builtin_bit_cast(u32, x); }

// low and high return the two numbers that an argument may hold.
DEVICE u32 low(u64 v) { return (u32)v; }
DEVICE u32 high(u64 v) { return (u32)(v >> 32); }

DEVICE u32 bit(u64 v, u32 i) { return v >> i & 1; }

enum Type { F32, BF16 }; // kernels.Number

DEVICE u32 size_of(u32 type) { return type == BF16 ? 2 : 4; }

DEVICE u32 narrow(float x) { return narrow_pair(x, 0) & 0xffff; }

DEVICE float get(u32 type, u64 p) { return type == BF16 ? number((u32)read<u16>(p) << 16) : number(read<u32>(p)); }

DEVICE void set(u32 type, u64 p, float x) {
    if (type == BF16) {
        write(p, (u16)narrow(x));
    } else {
        write(p, bits(x));
    }
}

// A thread handles STEP numbers at a time: a vector of bf16, or two of fp32.
#define STEP 8u

DEVICE void split(u32 w, float *x) {
    x[0] = number(w << 16);
    x[1] = number(w & 0xffff0000);
}

DEVICE u32 join(const float *x) { return narrow_pair(x[0], x[1]); }

// widen returns the numbers of a vector of bf16, numbers those of a vector of fp32, and
// narrowed the vector of bf16 numbers.
DEVICE void widen(Vec v, float *x) {
    split(v.x, x);
    split(v.y, x + 2);
    split(v.z, x + 4);
    split(v.w, x + 6);
}
DEVICE void numbers(Vec v, float *x) {
    x[0] = number(v.x);
    x[1] = number(v.y);
    x[2] = number(v.z);
    x[3] = number(v.w);
}
DEVICE Vec narrowed(const float *x) { return {join(x), join(x + 2), join(x + 4), join(x + 6)}; }

// load reads n numbers, at most STEP, and fills up with zeros. It reads a whole step at a
// boundary of 16 bytes by vectors.
DEVICE void load(u32 type, u64 p, u32 n, float *x) {
    if (n >= STEP && (p & 15) == 0) {
        Vec v = read<Vec>(p);
        if (type == BF16) {
            widen(v, x);
        } else {
            numbers(v, x);
            numbers(read<Vec>(p + 16), x + 4);
        }
    } else {
#pragma unroll
        for (u32 e = 0; e < STEP; e++) x[e] = e < n ? get(type, p + e * size_of(type)) : 0;
    }
}

DEVICE void store(u32 type, u64 p, u32 n, const float *x) {
    if (n >= STEP && (p & 15) == 0) {
        if (type == BF16) {
            write(p, narrowed(x));
        } else {
            write(p, Vec{bits(x[0]), bits(x[1]), bits(x[2]), bits(x[3])});
            write(p + 16, Vec{bits(x[4]), bits(x[5]), bits(x[6]), bits(x[7])});
        }
    } else {
#pragma unroll
        for (u32 e = 0; e < STEP; e++) {
            if (e < n) set(type, p + e * size_of(type), x[e]);
        }
    }
}

// Matrix says where a matrix lies. Its pitch is in numbers.
struct Matrix {
    u64 base, pitch;
    u32 type;
    DEVICE u64 at(u64 row, u64 col) const { return base + (row * pitch + col) * size_of(type); }
    // wide reports whether the matrix is bf16 and each row begins at a vector.
    DEVICE bool wide() const { return type == BF16 && ((base | 2 * pitch) & 15) == 0; }
};

// exponential returns e^x to about two units in the last place. The error of the product
// with log2(e), times ln(2), is the relative error of the power.
DEVICE float exponential(float x) {
    float t = x * 1.44269504f;
    float rest = __builtin_fmaf(x, 1.44269504f, -t) + x * 1.92596299e-8f;
    float y = power(t);
    return t > -126 && t < 128 ? __builtin_fmaf(y, rest * 0.693147181f, y) : y;
}

DEVICE float sigmoid(float x) { return reciprocal(1 + power(x * -1.44269504f)); }

DEVICE float natural_log(float x) { return logarithm(x) * 0.693147181f; }

// warp_sum returns the sum of a value over a warp, in every lane. Both lanes of a pair add
// the same two numbers, so all lanes have the same bits.
DEVICE float warp_sum(float v) {
#pragma unroll
    for (u32 d = 16; d > 0; d /= 2) v += number(across(bits(v), d));
    return v;
}

DEVICE float larger(float a, float b) { return b > a || b != b ? b : a; }

DEVICE float warp_max(float v) {
#pragma unroll
    for (u32 d = 16; d > 0; d /= 2) v = larger(v, number(across(bits(v), d)));
    return v;
}

// warp_scan returns the sum of the values of the lanes below and of this one.
DEVICE u32 warp_scan(u32 v) {
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
        u32 below = from_below(v, d);
        if (lane() >= d) v += below;
    }
    return v;
}

// Two has two values that are summed together.
struct Two {
    float a, b;
};

SHARED float team_part[2][32];

// Team is the threads that share a row: a warp, several, or the block.
struct Team {
    u32 number, count; // of this team, and of teams in the grid
    u32 member, size;

    // sum returns the sum over all members, in every one of them, warp by warp in order.
    DEVICE Two sum(Two v) const {
        v = {warp_sum(v.a), warp_sum(v.b)};
        if (size == 32) return v;
        u32 first = warp() - member / 32, own = 1 + first / (size / 32); // barrier 0 is the block's
        barrier(own, size);                                              // the sums before have been read
        if (lane() == 0) {
            team_part[0][warp()] = v.a;
            team_part[1][warp()] = v.b;
        }
        barrier(own, size);
        Two sum = {team_part[0][first], team_part[1][first]};
#pragma unroll 1
        for (u32 w = first + 1; w < first + size / 32; w++) {
            sum.a += team_part[0][w];
            sum.b += team_part[1][w];
        }
        return sum;
    }
    DEVICE float sum(float v) const { return sum({v, 0}).a; }

    // each calls f for every step of n columns that belongs to this thread.
    template <class F> DEVICE void each(u32 n, F f) const {
#pragma unroll 1
        for (u32 c = member * STEP; c < n; c += size * STEP) f(c, least(STEP, n - c));
    }
};

// teams returns teams of a size, over the grid.
DEVICE Team teams(u32 size) {
    return {block() * (threads() / size) + thread() / size, blocks() * (threads() / size), thread() % size, size};
}

// A member handles 32 columns in four steps. More columns need a larger team.
#define SHARE 32u

// team returns a team for a number of columns. Its size is a power of two, so teams fill a
// block.
DEVICE Team team(u32 cols) { return teams(cols <= 32 * SHARE ? 32 : least(threads(), cols <= 256 * SHARE ? 256u : 1024u)); }

// line returns a team whose members keep a row in registers, a number of vectors of bf16
// each. The row must not be longer than a block can keep.
DEVICE Team line(u32 cols, u32 vectors) {
    u32 size = 32;
#pragma unroll 1
    while (size < threads() && size * vectors * STEP < cols) size *= 2;
    return teams(size);
}

// hold reads the vectors of a row that belong to this thread. The row is a multiple of
// STEP long. All loads are under way before the first is used.
template <u32 vectors> DEVICE void hold(const Team &t, u64 row, u32 n, Vec (&v)[vectors]) {
#pragma unroll
    for (u32 k = 0; k < vectors; k++) {
        u32 c = (t.member + k * t.size) * STEP;
        if (c < n) {
            v[k] = read<Vec>(row + 2ull * c);
        } else {
            v[k] = {0, 0, 0, 0};
        }
    }
}

// sum_apart adds n numbers that lie apart to a sum, in order. It loads as many as possible
// at once.
DEVICE float sum_apart(float sum, u64 p, u32 n, u64 apart) {
    constexpr u32 batch = 16;
#pragma unroll 1
    for (u32 i = 0; i < n; i += batch, p += batch * apart) {
        float x[batch];
#pragma unroll
        for (u32 k = 0; k < batch; k++) x[k] = i + k < n ? get(F32, p + k * apart) : 0;
#pragma unroll
        for (u32 k = 0; k < batch; k++) {
            if (i + k < n) sum += x[k];
        }
    }
    return sum;
}

// live tells all lanes of a warp whether a row belongs to a segment. Without segments all
// rows do.
DEVICE bool live(u64 segments, u32 experts, u32 row) {
    if (experts == 0) return true;
    bool in = false;
#pragma unroll 1
    for (u32 e = lane(); e < experts; e += 32) in |= row - look<u32>(segments + 8 * e) < look<u32>(segments + 8 * e + 4);
    return ballot(in) != 0;
}

// live_rows returns, to all lanes of a warp, a bit for each of 32 rows from first on that
// belongs to a segment. Without segments all rows do.
DEVICE u32 live_rows(u64 segments, u32 experts, u32 first) {
    if (experts == 0) return ~0u;
    u32 rows = 0;
#pragma unroll 1
    for (u32 e = lane(); e < experts; e += 32) {
        u64 from = look<u32>(segments + 8 * e), to = from + look<u32>(segments + 8 * e + 4), end = first + 32ull;
        if (from < first) from = first;
        if (to > end) to = end;
        if (from < to) rows |= (~0u >> (32 - (u32)(to - from))) << (u32)(from - first);
    }
#pragma unroll
    for (u32 d = 16; d > 0; d /= 2) rows |= across(rows, d);
    return rows;
}
