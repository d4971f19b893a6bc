// This file has what norms share: sums over rows, and in backward passes the sums for weights
// that threads keep.

#pragma once

#include "nn.cuh"
#include "tensor.cuh"

#define GRAD_THREADS 512
#define STEPS (SHARE / STEP)

struct Norm {
    u32 rows, runs, n; // rows, norms of a row, columns of a norm
    float epsilon;
    // scale returns one over the root of the mean square.
    DEVICE float scale(float squares) const { return 1 / __builtin_sqrtf(squares / (float)n + epsilon); }
};

DEVICE Norm unpack(u64 size, u64 weight) { return {low(size), high(size) / low(weight), low(weight), number(high(weight))}; }

// forget keeps the compiler from using again what it has computed from vectors. Their numbers
// take twice the registers.
DEVICE void forget(Vec &v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)); }
template <u32 vectors> DEVICE void forget(Vec (&v)[vectors]) {
#pragma unroll
    for (u32 k = 0; k < vectors; k++) forget(v[k]);
}

DEVICE Two plus(Two a, Two b) { return {a.a + b.a, a.b + b.b}; }

// row_sum returns the sum over a team of at least a warp, in all members, warp by warp in order.
// Calls take turns with two places, so that nobody writes what others still read.
DEVICE float row_sum(const Team &t, float v, u32 turn) {
    SHARED float part[2][32];
    v = warp_sum(v);
    if (t.size <= 32) return v;
    u32 first = warp() - t.member / 32, count = t.size / 32;
    if (lane() == 0) part[turn % 2][warp()] = v;
    barrier(1 + first / 2, t.size); // barrier 0 is the block's
    const float *of = part[turn % 2] + first;
    v = 0;
#pragma unroll 1
    for (u32 w = 0; w < count; w += 4) { // at most four are read at once
        float x[4] = {of[w], of[w + 1]};
        if (count > 2) x[2] = of[w + 2], x[3] = of[w + 3];
        v = v + x[0] + x[1] + x[2] + x[3];
    }
    return v;
}

// Of two numbers half of the lanes of a warp add up one, and the others the other.
DEVICE Two row_sum(const Team &t, Two v, u32 turn) {
    SHARED Vec part[2][16]; // of two warps each
    bool second = lane() & 16;
    float own = (second ? v.b : v.a) + number(across(bits(second ? v.a : v.b), 16));
#pragma unroll
    for (u32 d = 8; d > 0; d /= 2) own += number(across(bits(own), d));
    if (t.size <= 32) return {number(from_lane(bits(own), 0)), number(from_lane(bits(own), 16))};
    u32 first = warp() - t.member / 32, count = t.size / 32;
    if (lane() % 16 == 0) reinterpret_cast<float *>(part[turn % 2])[thread() / 16] = own;
    barrier(1 + first / 2, t.size);
    const Vec *of = part[turn % 2] + first / 2;
    v = {0, 0};
    auto add = [&](Vec x) { v = plus(plus(v, Two{number(x.x), number(x.y)}), Two{number(x.z), number(x.w)}); };
#pragma unroll 1
    for (u32 w = 0; w < count / 2; w += 2) { // at most two vectors are read at once
        Vec x = of[w], y = count > 2 ? of[w + 1] : Vec{0, 0, 0, 0};
        add(x);
        if (count > 2) add(y);
    }
    return v;
}

// Walk has the address of what a thread reads or writes in a row, and how far its next row is.
// Computing them from the row would take more registers.
struct Walk {
    u64 at, step;
    DEVICE Walk(const Matrix &m, u64 row, u64 col, u32 rows) : at(m.at(row, col)), step(m.pitch * 2 * rows) {}
    DEVICE void next() { at += step; }
};

// Weight has the sums for a thread's columns of a weight, over the runs of its team: a
// number of steps.
template <u32 steps> struct Weight {
    float v[steps][STEP];
    DEVICE void clear() {
#pragma unroll
        for (u32 k = 0; k < steps; k++)
#pragma unroll
            for (u32 e = 0; e < STEP; e++) v[k][e] = 0;
    }
    // each calls f for every step of n columns that belongs to this thread, with its sums.
    template <class F> DEVICE void each(const Team &t, u32 n, F f) {
        if (n > t.size * steps * STEP) trap();
#pragma unroll
        for (u32 k = 0; k < steps; k++) {
            u32 c = (t.member + k * t.size) * STEP;
            if (c < n) f(c, least(STEP, n - c), v[k]);
        }
    }
    // finish writes the sums over all teams of the block, in the order of teams. Those of a
    // warp are added up first. Shared memory that the launch asks for has room for the sums of
    // all threads, and nothing is on its way there.
    DEVICE void finish(const Team &t, u32 n, u64 to) {
#pragma unroll 1
        for (u32 d = t.size; d < 32; d *= 2)
#pragma unroll
            for (u32 k = 0; k < steps; k++)
#pragma unroll
                for (u32 e = 0; e < STEP; e++) v[k][e] += number(across(bits(v[k][e]), d));
        u32 size = t.size < 32 ? 32 : t.size, in = threads() / size, own = thread() / size;
        if (in == 1) {
            each(t, n, [&](u32 c, u32 m, float *sum) { store(F32, to + 4ull * c, m, sum); });
            barrier(); // row_sum may begin with the first place again
            return;
        }
        need(threads() * steps * STEP * 4);
        float *all = reinterpret_cast<float *>(pool);
        barrier(); // the rows have been read
        if (t.size >= 32 || lane() < t.size) each(t, n, [&](u32 c, u32 m, float *sum) {
            float *at = all + own * n + c;
            if (n % STEP == 0) {
                reinterpret_cast<Vec *>(at)[0] = {bits(sum[0]), bits(sum[1]), bits(sum[2]), bits(sum[3])};
                reinterpret_cast<Vec *>(at)[1] = {bits(sum[4]), bits(sum[5]), bits(sum[6]), bits(sum[7])};
                return;
            }
#pragma unroll
            for (u32 e = 0; e < STEP; e++) {
                if (e < m) at[e] = sum[e];
            }
        });
        barrier();
        u32 wide = n % STEP == 0 && (to & 15) == 0 ? 4 : 1; // columns of a thread
#pragma unroll 1
        for (u32 c = thread() * wide; c < n; c += threads() * wide) {
            float sum[4] = {all[c]}, more[4];
            if (wide == 4) numbers(*reinterpret_cast<const Vec *>(all + c), sum);
#pragma unroll 1
            for (u32 i = 1; i < in; i++) {
                const float *at = all + i * n + c;
                if (wide == 4) {
                    numbers(*reinterpret_cast<const Vec *>(at), more);
#pragma unroll
                    for (u32 e = 0; e < 4; e++) sum[e] += more[e];
                } else {
                    sum[0] += at[0];
                }
            }
            if (wide == 4) {
                write(to + 4ull * c, Vec{bits(sum[0]), bits(sum[1]), bits(sum[2]), bits(sum[3])});
            } else {
                write(to + 4ull * c, bits(sum[0]));
            }
        }
        barrier(); // the sums have been read
    }
};

// add_parts adds what the blocks have written to the gradient of a weight, with a thread
// for each column.
DEVICE void add_parts(u64 dw, u64 parts, u32 count, u32 cols, u32 type) {
#pragma unroll 1
    for (u32 c = block() * threads() + thread(); c < cols; c += blocks() * threads()) {
        u64 to = dw + (u64)c * size_of(type);
        set(type, to, sum_apart(get(type, to), parts + 4ull * c, count, 4ull * cols));
    }
}

// add_norm_parts adds up the parts of 32 columns in a block. Each warp adds some of the parts, in
// order, by a function of the first one's address, their number and how far they are apart, and the
// first warp adds up the sums, in order, to what it has read before.
template <u32 size, class F> DEVICE void add_norm_parts(u64 dw, u64 scratch, u32 parts, u32 cols, u32 type, F sum_of) {
    SHARED float sums[size / 32][32];
    u32 each = (parts + size / 32 - 1) / (size / 32);
    u32 from = least(warp() * each, parts), n = least(each, parts - from);
#pragma unroll 1
    for (u32 c = block() * 32 + lane(); c - lane() < cols; c += blocks() * 32) {
        u64 to = dw + (u64)c * size_of(type);
        float sum = warp() == 0 && c < cols ? get(type, to) : 0;
        if (c < cols) sums[warp()][lane()] = sum_of(scratch + 4ull * from * cols + 4ull * c, n, 4ull * cols);
        barrier();
        if (warp() == 0 && c < cols) {
#pragma unroll
            for (u32 w = 0; w < size / 32; w++) sum += sums[w][lane()];
            set(type, to, sum);
        }
        barrier();
    }
}
