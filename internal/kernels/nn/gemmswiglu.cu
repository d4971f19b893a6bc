// Products on Hopper that end with SwiGLU: the product whose result SwiGLU reads, and the one
// whose result is the gradient of what SwiGLU wrote. gemmswiglu.go describes the arguments.
// Results are rounded to bf16 before SwiGLU, as if they had been stored and read again.
// targets: sm_90a

#include "gate.cuh"
#include "gemmplan.cuh"

// Left has the left half of the columns of a form.
template <class Form> struct Left {
    static constexpr u32 high = Form::high, wide = Form::wide / 2;
};

// Halves are tiles of which one half has columns of the left half of B, and the other half
// the same columns of the right half. Plan is for the left halves, and its c is where a
// tile's columns begin in a row.
template <class Plan> struct Halves : Plan {
    DEVICE Place find(u32 p) const {
        Place at = Plan::find(p);
        at.b_x = 2 * at.b_x - (u32)at.c / 2; // an expert has twice the rows
        at.gap = this->n - Plan::wide;
        return at;
    }
};

// Lines are the two rows of a tile that a lane stores, from its first column on.
struct Lines {
    u32 row[2];
    int left[2]; // columns
    u64 skip;    // bytes before the first column
};

DEVICE Lines lines(const Place &at, u32 first) {
    u32 t = lane() % 4, r = first + warp() % 4 * 16 + lane() / 4;
    return {{at.a_x + r, at.a_x + r + 8}, {r < at.rows ? (int)(at.cols - 8 * t) : 0, r + 8 < at.rows ? (int)(at.cols - 8 * t) : 0}, at.c + 16 * t};
}

// eight rounds 32 columns of one of two rows to bf16. Each of the four lanes of a row gets
// eight neighbours.
DEVICE Vec eight(const float *c, u32 h) {
    u32 x[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) x[i] = pair(c[4 * i + 2 * h], c[4 * i + 2 * h + 1]);
    turn(x);
    return {x[0], x[1], x[2], x[3]};
}

DEVICE float weight_of(u64 weight, u32 row, int left) { return weight == 0 || left <= 0 ? 1 : get(F32, weight + 4ull * row); }

// Gated stores SwiGLU's input and its result, unless that has no memory.
struct Gated {
    Matrix x, y;
    u32 cols; // of y
    u64 weight;

    template <u32 wide, bool> DEVICE void store(const Place &at, u32 first, const float *c) const {
        Lines l = lines(at, first);
        u64 to[2], out[2];
        float by[2];
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            by[h] = weight_of(weight, l.row[h], l.left[h]);
            to[h] = x.at(l.row[h], 0) + l.skip;
            out[h] = y.at(l.row[h], 0) + l.skip;
        }
#pragma unroll
        for (u32 part = 0; part < wide / 64; part++) {
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                Vec a = eight(c + 16 * part, h), b = eight(c + wide / 4 + 16 * part, h);
                if (32 * (int)part >= l.left[h]) continue;
                write_far(to[h], 64 * part, a);
                write_far(to[h] + 2 * cols, 64 * part, b);
                if (y.base == 0) continue;
                float p[STEP], q[STEP];
                widen(a, p);
                widen(b, q);
                gate(p, q, by[h]);
                write_far(out[h], 64 * part, narrowed(p));
            }
        }
    }
};

// Sloped stores the gradient of SwiGLU's input and SwiGLU's result, and a part of the sum
// that is the gradient of a row's weight for each tile of the row.
struct Sloped {
    Matrix dx, x, y;
    u32 cols; // of y
    u64 weight, sums;

    template <u32 wide, bool> DEVICE void store(const Place &at, u32 first, const float *c) const {
        constexpr u32 steps = wide / 16, deep = 4; // that are loaded at once
        Lines l = lines(at, first);
        u64 from[2], to[2], out[2];
        float by[2], dot[2] = {0, 0};
        Vec as[deep], bs[deep];
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            by[h] = weight_of(weight, l.row[h], l.left[h]);
            from[h] = x.at(l.row[h], 0) + l.skip;
            to[h] = dx.at(l.row[h], 0) + l.skip;
            out[h] = y.at(l.row[h], 0) + l.skip;
        }
        // Step i is 32 columns of one of the two rows.
        auto fetch = [&](u32 i) INLINE {
            if (i >= steps || 32 * (int)(i / 2) >= l.left[i % 2]) return;
            as[i % deep] = read<Vec>(from[i % 2] + 64 * (i / 2));
            bs[i % deep] = read<Vec>(from[i % 2] + 2 * cols + 64 * (i / 2));
        };
#pragma unroll
        for (u32 i = 0; i + 1 < deep; i++) fetch(i);
#pragma unroll
        for (u32 i = 0; i < steps; i++) {
            u32 part = i / 2, h = i % 2;
            fetch(i + deep - 1);
            Vec d = eight(c + 16 * part, h);
            if (32 * (int)part >= l.left[h]) continue;
            Slopes s;
            widen(as[i % deep], s.a);
            widen(bs[i % deep], s.b);
            widen(d, s.d);
            dot[h] += s.compute(by[h]);
            write_far(to[h], 64 * part, narrowed(s.d));
            write_far(to[h] + 2 * cols, 64 * part, narrowed(s.b));
            write_far(out[h], 64 * part, narrowed(s.a));
        }
        if (sums == 0) return;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            dot[h] += number(across(bits(dot[h]), 1));
            dot[h] += number(across(bits(dot[h]), 2));
            if (lane() % 4 == 0 && l.left[h] > 0) set(F32, sums + 4 * (l.row[h] * (u64)pieces(cols, wide) + (u32)at.c / (2 * wide)), dot[h]);
        }
    }
};

DEVICE u64 maybe(u64 p) { return p == 0 ? 0 : global(p); }
DEVICE Experts experts(u64 segments, u64 rows) { return {maybe(segments), high(rows), low(rows), nullptr}; }

#define SWIGLU(name, Form)                                                                                      \
    KERNEL(FORM_THREADS, 1, CLUSTER)                                                                            \
    name(u64, u64, u64 x, u64 segments, u64 size, u64 rows, u64 pitches, u64 y, u64 weight, Map, Map) {         \
        Halves<Grouped<true, Left<Form>>> plan = {{0, low(size), high(size), {0, 0, BF16, 0}, experts(segments, rows)}}; \
        Gated to = {{global(x), low(pitches), BF16}, {maybe(y), high(pitches), BF16}, low(size), maybe(weight)}; \
        persist<true, true, Form>(plan, to, map_of(name, 9), map_of(name, 10));                                 \
    }

SWIGLU(stowage_nn_hopper_gemm_swiglu, Shared)
SWIGLU(stowage_nn_hopper_gemm_swiglu_slim, Slim)

KERNEL(FORM_THREADS, 1, CLUSTER)
stowage_nn_hopper_gemm_swiglu_grad_slim(u64, u64, u64 dx, u64 segments, u64 size, u64 rows, u64 pitches, u64 pitch, u64 x, u64 y, u64 weight,
                                        u64, u64 sums, Map, Map) {
    Grouped<false, Slim> plan = {0, low(size), high(size), {0, 0, BF16, 0}, experts(segments, rows)};
    Sloped to = {{global(dx), low(pitches), BF16}, {global(x), high(pitches), BF16}, {global(y), pitch, BF16}, low(size), maybe(weight), maybe(sums)};
    persist<true, false, Slim>(plan, to, map_of(stowage_nn_hopper_gemm_swiglu_grad_slim, 13), map_of(stowage_nn_hopper_gemm_swiglu_grad_slim, 14));
}

#define SUM_THREADS 256

// sum_tiles adds up what the tiles of a row have for the gradient of its weight, in order.
KERNEL(SUM_THREADS)
stowage_nn_hopper_sum_tiles(u64 sums, u64 dst, u64 segments, u64 size, u64 experts) {
    u32 row = block() * SUM_THREADS + thread(), tiles = high(size);
    u32 alive = live_rows(maybe(segments), (u32)experts, row - lane());
    if (row >= low(size) || !(alive >> lane() & 1)) return;
    set(F32, global(dst) + 4ull * row, sum_apart(0, global(sums) + 4ull * row * tiles, tiles, 4));
}
