// This file has what the kernels of the scan on tensor cores share: tiles in shared memory,
// their products, and the decays of a chunk. They compute states up to STATE or twice as many
// numbers in bf16, padded with zeros. Decays and sums are fp32. A factor that is not an input
// is rounded to bf16 before a product. A head of more than HEAD columns is computed as strips
// of HEAD columns, which have nothing to do with each other but that they share the head's
// steps.
//
// A block of eight warps has a chunk of 128 tokens. A warp owns a tile of 16 of them, and
// tokens before or behind them pass by, in squares of 16 x 16.

#pragma once

#define Q 128u // tokens of a chunk: tensorChunk
#define STATE_SIZE 2

#include "attention.cuh"
#include "scanshape.cuh"

#define THREADS 256
#define HEAD 64u
#define STATE 128u
#define WIDE_STATE 256u

// A row of a tile is followed by 16 bytes, so eight rows begin in different banks, and the
// places of a lane differ by constants.
template <u32 width> DEVICE constexpr u32 cell(u32 row, u32 vector) { return row * (2 * width + 16) + 16 * vector; }

#define ROWS_BYTES (Q * (2 * HEAD + 16))       // of a head's columns of a chunk
#define SQUARE_BYTES 512u                      // of 16 x 16 numbers in the lanes of a warp
#define CB_BYTES (36 * SQUARE_BYTES)

// The bytes of a strip of a state, and of B or C of a chunk.
template <u32 wide> DEVICE constexpr u32 state_bytes() { return HEAD * (2 * wide + 16); }
template <u32 wide> DEVICE constexpr u32 side_bytes() { return Q * (2 * wide + 16); }

// tiles_of returns how many tiles of 64 columns a state has, and strips_of how many strips a
// head has. Strips are numbered head by head.
DEVICE u32 tiles_of(const Scan &c) { return (c.state + 63) / 64; }
DEVICE u32 strips_of(const Scan &c) { return c.head > HEAD ? 2 : 1; }

// Strip says which columns of a head a strip has: the first of them, also among those of all
// heads, and how many.
struct Strip {
    u32 h, first, col, cols;
    // between returns the strip's state behind a chunk.
    DEVICE u64 between(const Scan &c, u64 states, u32 b, u32 chunk) const { return c.between(states, b, chunk, h) + 2ull * first * c.state; }
};
DEVICE Strip strip(const Scan &c, u32 s) {
    bool two = c.head > HEAD;
    u32 h = two ? s / 2 : s, first = two ? s % 2 * HEAD : 0;
    return {h, first, h * c.head + first, least(HEAD, c.head - first)};
}

// bring_part begins to copy the rows that are there and cols columns to a tile. The rest is
// zero.
template <u32 width> DEVICE void bring_part(u8 *dst, u64 base, u64 pitch, u32 rows, u32 there, u32 cols) {
    constexpr u32 vectors = width / 8, step = THREADS / vectors;
    u32 first = thread() / vectors, v = thread() % vectors, count = bounded(8 * v, cols, 8);
    u64 src = base + first * pitch + 16 * v;
    u8 *to = dst + cell<width>(first, v);
    if (((base | pitch) & 15) == 0) {
#pragma unroll
        for (u32 r = 0; r < rows; r += step) {
            bool in = first + r < there && count > 0;
            bring(spot(to + cell<width>(r, 0)), in ? src + r * pitch : base, in ? 2 * count : 0);
        }
    } else {
#pragma unroll 1
        for (u32 r = 0; r < rows; r += step) *(Vec *)(to + cell<width>(r, 0)) = collect<BF16>(src + r * pitch, first + r < there ? count : 0);
    }
}

// bring_tokens does it for the tokens of a chunk and the columns of a matrix from col on,
// and bring_state for the columns of the state of a strip from col on.
template <u32 width> DEVICE void bring_tokens(u8 *dst, const Scan &c, const Matrix &m, u32 b, u32 chunk, u32 col, u32 cols) {
    bring_part<width>(dst, m.at((u64)b * c.seq + chunk * Q, col), 2 * m.pitch, Q, c.tokens(chunk), cols);
}
template <u32 width> DEVICE void bring_state(u8 *dst, const Scan &c, const Strip &s, u64 state, u32 col) {
    bring_part<width>(dst, state + 2 * col, 2 * c.state, HEAD, s.cols, least(width, c.state - col));
}

// left_rows and right_rows load 16 x 16 of a tile whose rows run along the sum;
// left_columns and right_columns of one whose columns do.
template <u32 width> DEVICE void left_rows(u32 *r, const u8 *of, u32 m, u32 k) {
    matrices(r, spot(of + cell<width>(lane() & 15, lane() >> 4) + cell<width>(m, k / 8)));
}
template <u32 width> DEVICE void right_rows(u32 *r, const u8 *of, u32 n, u32 k) {
    matrices(r, spot(of + cell<width>((lane() & 7) + (lane() >> 4) * 8, lane() >> 3 & 1) + cell<width>(n, k / 8)));
}
template <u32 width> DEVICE void left_columns(u32 *r, const u8 *of, u32 m, u32 k) {
    crosswise(r, spot(of + cell<width>((lane() & 7) + (lane() >> 4) * 8, lane() >> 3 & 1) + cell<width>(k, m / 8)));
}
template <u32 width> DEVICE void right_columns(u32 *r, const u8 *of, u32 n, u32 k) {
    crosswise(r, spot(of + cell<width>(lane() & 15, lane() >> 4) + cell<width>(k, n / 8)));
}

// multiply_two multiplies 16 x 16 and 16 x 16.
DEVICE void multiply_two(float (*c)[4], const u32 *a, const u32 *b) {
    multiply(c[0], a, b);
    multiply(c[1], a, b + 2);
}

// A lane has columns 2t and 2t + 1 of rows g and g + 8 of a result of 16 x 8. ahead is
// where the pair of row g lies that is run x 8 columns and row rows behind the first.
template <u32 width> DEVICE u32 *ahead(u8 *to, u32 row, u32 run) {
    return (u32 *)(to + cell<width>(lane() / 4, 0) + lane() % 4 * 4 + cell<width>(row, run));
}

DEVICE float quad_sum(float v) {
    v += number(across(bits(v), 1));
    return v + number(across(bits(v), 2));
}

// tile returns the warp's tile of rows. Products under the diagonal of a chunk take 36
// squares: a tile has one with itself and with each tile before it, or behind it. Warps w
// and w + 4, which share a scheduler, have nine together.
DEVICE u32 tile() { return warp() < 4 ? warp() : 11 - warp(); }
DEVICE u32 squares(bool behind) { return behind ? 8 - tile() : tile() + 1; }
DEVICE u32 square_at(bool behind, u32 n) { return behind ? tile() + n : n; }
// square_of returns where the numbers of a lane lie.
DEVICE Vec *square_of(u8 *cb, bool behind, u32 n) {
    u32 count = squares(behind);
    return (Vec *)(cb + (count * (count - 1) / 2 + n) * SQUARE_BYTES) + lane();
}

// Two numbers of neighbouring columns.
struct alignas(8) Both {
    float v[2];
};

// Token has what four tokens of a lane need for a head: dt, and the running sum of the
// logarithms of decays, to base two. Tokens behind the last one do not change the state.
struct Token {
    float dt[4], sum[4];
};

// raw_steps loads the steps of a lane's tokens before the softplus.
DEVICE void raw_steps(float *raw, const Scan &c, u32 b, u32 chunk, u32 h) {
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        u32 i = 4 * lane() + k;
        raw[k] = i < c.tokens(chunk) ? get(BF16, c.dt.at((u64)b * c.seq + chunk * Q + i, h)) : 0;
    }
}

DEVICE Token token_steps(const float *raw, const Scan &c, u32 chunk, u32 h) {
    Token t;
    float a = c.a(h) * LOG2E, bias = c.param(c.bias, h), all = 0;
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        bool in = 4 * lane() + k < c.tokens(chunk);
        t.dt[k] = in ? softplus(raw[k] + bias) : 0;
        t.sum[k] = all += t.dt[k] * a;
    }
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
        float v = number(from_below(bits(all), d));
        if (lane() >= d) all += v;
    }
    float before = number(from_below(bits(all), 1));
#pragma unroll
    for (u32 k = 0; k < 4; k++) t.sum[k] += lane() > 0 ? before : 0;
    return t;
}

// Steps has them for all tokens.
struct alignas(16) Steps {
    float dt[Q], sum[Q];
    // fill is computed by one warp.
    DEVICE void fill(const Token &t) {
        *(Vec *)(dt + 4 * lane()) = {bits(t.dt[0]), bits(t.dt[1]), bits(t.dt[2]), bits(t.dt[3])};
        *(Vec *)(sum + 4 * lane()) = {bits(t.sum[0]), bits(t.sum[1]), bits(t.sum[2]), bits(t.sum[3])};
    }
    DEVICE float start(u32 i) const { return power(sum[i]); }
    DEVICE float end(u32 j) const { return power(sum[Q - 1] - sum[j]); }
};

// put_pair stores two numbers of a row if they are in bounds.
DEVICE void put_pair(u64 row, u32 col, u32 cols, float x, float y) {
    u64 p = row + 2 * col;
    if (col + 1 < cols && (p & 3) == 0) {
        write(p, pair(x, y));
        return;
    }
    if (col < cols) write(p, (u16)pair(x, 0));
    if (col + 1 < cols) write(p + 2, (u16)pair(y, 0));
}

// deliver_rows stores 16 rows of a strip, by one warp.
DEVICE void deliver_rows(const u8 *from, u32 row, const Scan &c, const Matrix &m, u32 b, u32 chunk, const Strip &s) {
    u64 base = m.at((u64)b * c.seq + chunk * Q, s.col), pitch = 2 * m.pitch;
    bool fast = ((base | pitch) & 15) == 0;
#pragma unroll 1
    for (u32 i = 0; i < 4; i++) {
        u32 r = row + 4 * i + lane() / 8, v = lane() % 8, count = r < c.tokens(chunk) ? bounded(8 * v, s.cols, 8) : 0;
        Vec w = *(const Vec *)(from + cell<HEAD>(r, v));
        u64 p = base + r * pitch + 16 * v;
        if (fast && count == 8) {
            write(p, w);
            continue;
        }
#pragma unroll 1
        for (u32 e = 0; e < count; e++) write(p + 2 * e, *(const u16 *)(from + cell<HEAD>(r, v) + 2 * e));
    }
}

// Unit is a chunk of a group, and a run of the strips of the group's heads that a block
// computes. The strips of a head are in one run.
struct Unit {
    u32 b, chunk, g, run, first, end;
};
DEVICE u32 runs_of(const Scan &c, u32 most) { return (c.heads / c.groups * strips_of(c) + most - 1) / most; }
DEVICE Unit unit(const Scan &c, u32 u, u32 most) {
    u32 per = c.heads / c.groups * strips_of(c), runs = runs_of(c, most);
    Unit k = {u / runs / c.groups / c.chunks, u / runs / c.groups % c.chunks, u / runs % c.groups, u % runs, 0, 0};
    k.first = k.g * per + k.run * most;
    k.end = least(k.first + most, (k.g + 1) * per);
    return k;
}
DEVICE u32 units(const Scan &c, u32 most) { return c.batch * c.chunks * c.groups * runs_of(c, most); }

// fill_steps computes the steps of the strips of a run, each warp those of one.
DEVICE void fill_steps(Steps *steps, const Scan &c, const Unit &k) {
    if (k.first + warp() >= k.end) return;
    u32 h = strip(c, k.first + warp()).h;
    float raw[4];
    raw_steps(raw, c, k.b, k.chunk, h);
    steps[warp()].fill(token_steps(raw, c, k.chunk, h));
}

// begin_unit loads the warp's rows of C, or behind, of B, and computes their products with
// those of the other one that its squares have. Both come to room, one after the other if
// states are wide. meanwhile is called while they are on their way.
template <bool behind, u32 wide, class F> DEVICE void begin_unit(u32 own[wide / 16][4], u8 *cb, u8 *room, const Scan &c, const Unit &k, F meanwhile) {
    constexpr bool apart = wide > STATE;
    u8 *others = apart ? room : room + side_bytes<wide>();
    auto bring_side = [&](u8 *to, bool b) INLINE { bring_tokens<wide>(to, c, c.xbc, k.b, k.chunk, b ? c.col_b(k.g) : c.col_c(k.g), c.state); };
    barrier(); // the unit before is done
    bring_side(room, behind);
    if (!apart) bring_side(others, !behind);
    seal();
    meanwhile();
    arrived<0>();
    barrier();
#pragma unroll
    for (u32 i = 0; i < wide / 16; i++) left_rows<wide>(own[i], room, 16 * tile(), 16 * i);
    if (apart) {
        barrier(); // the rows have been read
        bring_side(others, !behind);
        seal();
        arrived<0>();
        barrier();
    }
#pragma unroll 1
    for (u32 n = 0; n < squares(behind); n++) {
        float t[2][4] = {};
#pragma unroll
        for (u32 i = 0; i < wide / 16; i++) {
            u32 r[4];
            right_rows<wide>(r, others, 16 * square_at(behind, n), 16 * i);
            multiply_two(t, own[i], r);
        }
        *square_of(cb, behind, n) = {pair(t[0][0], t[0][1]), pair(t[0][2], t[0][3]), pair(t[1][0], t[1][1]), pair(t[1][2], t[1][3])};
    }
    barrier(); // B and C have been read
}

// Run says how a block keeps the strips of a run: their steps, and tiles of tokens and states
// at a time. There is room for B and C in the place of the tiles.
template <u32 wide> struct Run {
    static constexpr u32 strips = 8; // one a warp: tensorRun
    static constexpr u32 stages = wide > STATE ? 1 : 2, stage = ROWS_BYTES + state_bytes<wide>();
    static constexpr u32 sides = wide > STATE ? side_bytes<wide>() : 2 * side_bytes<wide>();
    static constexpr u32 room = stages * stage > sides ? stages * stage : sides;
    static constexpr u32 bytes = room + CB_BYTES + strips * sizeof(Steps);

    // each calls f for each strip of a run, with its steps, its tokens and its state. bring_strip
    // begins to copy a strip to a place. If there are two stages, the next strip is on its way.
    template <class B, class F> static DEVICE void each(const Unit &k, B bring_strip, F f) {
        bring_strip(k.first, pool);
        seal();
#pragma unroll 1
        for (u32 s = k.first; s < k.end; s++) {
            u32 i = s - k.first;
            arrived<0>();
            barrier();
            if (stages > 1 && s + 1 < k.end) bring_strip(s + 1, pool + (i + 1) % stages * stage);
            seal();
            f(s, ((const Steps *)(pool + room + CB_BYTES))[i], pool + i % stages * stage);
            if (stages > 1 || s + 1 == k.end) continue;
            barrier(); // the strip's tokens and state have been read
            bring_strip(s + 1, pool);
            seal();
        }
    }
};

// through_state computes the product of the warp's rows of B or C and a state, with rows
// scaled: the state decays from the start of the chunk, or towards its end.
template <bool end, u32 wide> DEVICE void through_state(float y[8][4], const Steps &s, const u32 own[wide / 16][4], const u8 *state) {
#pragma unroll
    for (u32 k = 0; k < wide / 16; k++) {
#pragma unroll
        for (u32 p = 0; p < 8; p += 2) {
            u32 r[4];
            right_rows<wide>(r, state, 8 * p, 16 * k);
            multiply_two(y + p, own[k], r);
        }
    }
#pragma unroll
    for (u32 e = 0; e < 2; e++) {
        u32 row = 16 * tile() + lane() / 4 + 8 * e;
        float by = end ? s.end(row) : s.start(row);
#pragma unroll
        for (u32 p = 0; p < 8; p++) y[p][2 * e] *= by, y[p][2 * e + 1] *= by;
    }
}

// through_tokens adds what the tokens of the squares' columns give to the warp's rows: x to
// y, or behind, the gradient of y to that of x.
template <bool behind> DEVICE void through_tokens(float y[8][4], u8 *cb, const Steps &s, const u8 *x) {
    u32 g = lane() / 4, t = lane() % 4 * 2;
    float own[2] = {s.sum[16 * tile() + g], s.sum[16 * tile() + g + 8]};
#pragma unroll 1
    for (u32 n = 0; n < squares(behind); n++) {
        u32 other = 16 * square_at(behind, n), a[4];
        Vec v = *square_of(cb, behind, n);
        u32 in[4] = {v.x, v.y, v.z, v.w};
        float m[4][2];
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            Both sum = *(const Both *)(s.sum + other + t + e / 2 * 8), dt = *(const Both *)(s.dt + other + t + e / 2 * 8);
            split(in[e], m[e]);
#pragma unroll
            for (u32 k = 0; k < 2; k++) m[e][k] *= behind ? power(sum.v[k] - own[e % 2]) : power(own[e % 2] - sum.v[k]) * dt.v[k];
        }
        if (square_at(behind, n) == tile()) {
#pragma unroll
            for (u32 e = 0; e < 8; e++) {
                u32 row = g + e / 2 % 2 * 8, col = t + e / 4 * 8 + e % 2;
                if (behind ? row > col : col > row) m[e / 2][e % 2] = 0;
            }
        }
#pragma unroll
        for (u32 e = 0; e < 4; e++) a[e] = pair(m[e][0], m[e][1]);
#pragma unroll
        for (u32 p = 0; p < 8; p += 2) {
            u32 r[4];
            right_columns<HEAD>(r, x, 8 * p, other);
            multiply_two(y + p, a, r);
        }
    }
}

// carry computes the states between chunks for 64 columns of a strip: the last state
// times the chunk's decay, plus a product of the weighted columns of m and those of B or C.
// If back is set, it runs from the last chunk to the first, and through gets the parts of
// the products of states with their gradients.
struct alignas(16) Weights {
    u32 by[Q / 2]; // pairs
    float all[4];
};
#define CARRY_STAGES 2u
#define CARRY_BYTES (CARRY_STAGES * 2 * ROWS_BYTES + 2 * BATCH * sizeof(Weights))
#define BATCH (THREADS / 32u) // chunks whose weights the warps compute at once

// through_of returns where the parts of the product of a strip lie that a tile has: one of
// each warp.
DEVICE u64 through_of(const Scan &c, u64 through, u32 b, u32 chunk, u32 which, u32 t) {
    return through + 4ull * (THREADS / 32) * ((((u64)b * c.chunks + chunk) * c.heads * strips_of(c) + which) * tiles_of(c) + t);
}

template <bool back>
DEVICE void carry(const Scan &c, u64 states, const Matrix &m, u32 b, u32 which, u32 n, u64 forward, u64 through) {
    Weights *weights = (Weights *)(pool + CARRY_STAGES * 2 * ROWS_BYTES);
    Strip of = strip(c, which);
    u32 h = of.h, g = h / (c.heads / c.groups), steps = c.chunks - 1, l = lane(), row = 16 * (warp() % 4), col = 32 * (warp() / 4);
    auto chunk_of = [&](u32 i) { return back ? c.chunks - 1 - i : i; };
    auto bring_stage = [&](u32 i) INLINE {
        u8 *stage = pool + i % CARRY_STAGES * 2 * ROWS_BYTES;
        bring_tokens<HEAD>(stage, c, m, b, chunk_of(i), of.col, of.cols);
        bring_tokens<HEAD>(stage + ROWS_BYTES, c, c.xbc, b, chunk_of(i), (back ? c.col_c(g) : c.col_b(g)) + n, least(64u, c.state - n));
    };
    // weigh computes the weights of the chunks from i on, each warp those of one.
    auto weigh = [&](u32 i) INLINE {
        i += warp();
        if (i >= steps) return;
        Weights &to = weights[i % (2 * BATCH)];
        float raw[4];
        raw_steps(raw, c, b, chunk_of(i), h);
        Token t = token_steps(raw, c, chunk_of(i), h);
        float all = number(from_lane(bits(t.sum[3]), 31)), by[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++) by[k] = back ? power(t.sum[k]) : t.dt[k] * power(all - t.sum[k]);
        to.by[2 * l] = pair(by[0], by[1]);
        to.by[2 * l + 1] = pair(by[2], by[3]);
        if (l == 0) to.all[0] = power(all);
    };
    float s[4][4] = {};
    barrier(); // the tile before is done
    bring_stage(0);
    seal();
    weigh(0);
#pragma unroll 1
    for (u32 i = 0; i < steps; i++) {
        arrived<0>();
        barrier();
        if (i + 1 < steps) bring_stage(i + 1);
        seal();
        u32 chunk = chunk_of(i), p = row + l / 4, q = n + col + l % 4 * 2;
        u32 old[4][2];
        bool with = back && chunk > 1;
        u64 from = with ? of.between(c, forward, b, chunk - 2) : 0, to = of.between(c, states, b, back ? chunk - 1 : chunk);
        bool whole = ((from | to | 2 * c.state) & 3) == 0 && of.cols == HEAD && n + 64 <= c.state;
        if (with && whole) {
#pragma unroll
            for (u32 e = 0; e < 8; e++) old[e / 2][e % 2] = read<u32>(from + 2 * ((u64)(p + e % 2 * 8) * c.state + q + e / 2 * 8));
        } else if (with) {
#pragma unroll
            for (u32 e = 0; e < 8; e++) {
                u32 r = p + e % 2 * 8, at = q + e / 2 * 8;
                u64 src = from + 2 * ((u64)r * c.state + at);
                bool in = r < of.cols;
                old[e / 2][e % 2] = (in && at < c.state ? read<u16>(src) : 0) | (u32)(in && at + 1 < c.state ? read<u16>(src + 2) : 0) << 16;
            }
        }
        if (i % BATCH == 0) weigh(i + BATCH);
        const u8 *left = pool + i % CARRY_STAGES * 2 * ROWS_BYTES, *right = left + ROWS_BYTES;
        const Weights &by = weights[i % (2 * BATCH)];
        float all = by.all[0];
#pragma unroll
        for (u32 e = 0; e < 16; e++) s[e / 4][e % 4] *= all;
#pragma unroll 4
        for (u32 k = 0; k < Q; k += 16) {
            u32 a[4];
            left_columns<HEAD>(a, left, row, k);
#pragma unroll
            for (u32 e = 0; e < 4; e++) a[e] = times(a[e], by.by[k / 2 + e / 2 * 4 + l % 4]);
#pragma unroll
            for (u32 j = 0; j < 4; j += 2) {
                u32 r[4];
                right_columns<HEAD>(r, right, col + 8 * j, k);
                multiply_two(s + j, a, r);
            }
        }
        float sum = 0;
#pragma unroll
        for (u32 e = 0; e < 8; e++) {
            u32 r = p + e % 2 * 8;
            const float *v = s[e / 2] + e % 2 * 2;
            if (whole) write(to + 2 * ((u64)r * c.state + q + e / 2 * 8), pair(v[0], v[1]));
            else if (r < of.cols) put_pair(to + 2ull * r * c.state, q + e / 2 * 8, c.state, v[0], v[1]);
        }
        if (with) {
#pragma unroll
            for (u32 e = 0; e < 8; e++) {
                float x[2];
                split(old[e / 2][e % 2], x);
                sum += x[0] * s[e / 2][e % 2 * 2] + x[1] * s[e / 2][e % 2 * 2 + 1];
            }
            sum = warp_sum(sum);
            if (l == 0) write(through_of(c, through, b, chunk - 1, which, n / 64) + 4 * warp(), bits(sum));
        }
    }
    arrived<0>();
}

// A block computes 64 columns of a strip's states at a time.
template <bool back> DEVICE void carry_all(const Scan &c, u64 states, const Matrix &m, u64 forward, u64 through) {
    need(CARRY_BYTES);
    u32 tiles = tiles_of(c), strips = c.heads * strips_of(c);
#pragma unroll 1
    for (u32 u = block(); u < c.batch * strips * tiles; u += blocks()) {
        carry<back>(c, states, m, u / tiles / strips, u / tiles % strips, u % tiles * 64, forward, through);
    }
}
