// The backward pass of the scan of Mamba-2 on tensor cores. scan.go says what is computed,
// and scangradtwin.go has the formulas. Beside the gradients of states there are five
// kernels: outside has what passes through states to B and C, pairs what the tokens of a
// chunk do to each other's decays and to C Bᵀ, inputs the gradients of x, steps those of
// steps, and mix adds up the gradients of B and C.
// targets: sm_80

#include "scantensor.cuh"

#define RUN 16u // strips of a block: tensorGradRun

// Scratch says where scratch memory has what: gradients of states; sums for parameters;
// for each chunk and strip, its tokens' products with the state that enters, with the one
// that leaves, by tile, the gradients of decays between tokens, and the products of x with
// du and with dy; parts of the products of states and their gradients, by tile and warp; and for each chunk of a group and each run of
// strips the gradients of C and of B, and the square of Q x Q of that of (C Bᵀ)ᵀ.
struct Scratch {
    u64 grads, sums, edges, through, mix;
};
DEVICE Scratch scratch_of(const Scan &c, u64 p) {
    u64 each = (u64)c.batch * c.chunks * c.heads, states = 2ull * c.batch * (c.chunks - 1) * c.heads * c.head * c.state;
    Scratch s = {p, p + (states + 15) / 16 * 16, 0, 0, 0};
    s.edges = s.sums + (12 * each + 15) / 16 * 16;
    s.through = s.edges + 4ull * Q * (2 * tiles_of(c) + 3) * each * strips_of(c);
    s.mix = s.through + 4ull * (THREADS / 32) * tiles_of(c) * each * strips_of(c);
    return s;
}

// edge_of returns where the products of a strip's tokens with a state lie, by tile: the one
// that enters (which is 0) or that leaves. Behind them (which is 2) are the gradients of
// decays and the products of x.
DEVICE u64 edge_of(const Scan &c, const Scratch &s, const Unit &k, u32 number, u32 which, u32 t) {
    u64 strips = c.heads * strips_of(c), tiles = tiles_of(c);
    return s.edges + 4 * Q * ((((u64)k.b * c.chunks + k.chunk) * strips + number) * (2 * tiles + 3) + which * tiles + t);
}

// mix_of returns where the part of a run lies: the gradient of C (part 0), of B, or of (C
// Bᵀ)ᵀ. side_columns are the columns of the first two.
DEVICE u32 side_columns(const Scan &c) { return 64 * tiles_of(c); }
DEVICE u64 mix_of(const Scan &c, const Scratch &s, const Unit &k, u32 run, u32 part) {
    u64 at = (((u64)k.b * c.chunks + k.chunk) * c.groups + k.g) * runs_of(c, RUN) + run;
    return s.mix + 4 * Q * (at * (2 * side_columns(c) + Q) + part * side_columns(c));
}

// put_square stores a result of 16 x 8 in rows of some columns.
DEVICE void put_square(u64 to, u32 columns, u32 row, u32 col, const float *x) {
#pragma unroll
    for (u32 e = 0; e < 4; e += 2) {
        write(to + 4 * ((row + lane() / 4 + e * 4) * columns + col + lane() % 4 * 2), (u64)bits(x[e]) | (u64)bits(x[e + 1]) << 32);
    }
}

KERNEL(THREADS, 2)
stowage_nn_scan_tensor_grad_state(u64 scratch, u64 xbc, u64 dt, u64 a_log, u64 bias, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types, u64 dy,
                                  u64 pitch_dy, u64 states) {
    Scan c = unpack(xbc, dt, a_log, 0, bias, seq, heads, groups, pitches, types);
    Scratch s = scratch_of(c, global(scratch));
    carry_all<true>(c, s.grads, {global(dy), pitch_dy, BF16}, global(states), s.through);
}

// ---- outside

struct alignas(16) Factors {
    float by[Q];
};
#define HALF_BYTES (HEAD * (2 * 64 + 16)) // of 64 columns of a state
#define OUTSIDE_STAGE (ROWS_BYTES + HALF_BYTES)
#define OUTSIDE_BYTES (ROWS_BYTES + 2 * OUTSIDE_STAGE + RUN * sizeof(Factors))

// side computes, for a run of strips, 64 columns from n on of the gradient of C (side 0) that
// comes from the state that enters, or of that of B (side 1) from the gradient of the state
// that leaves.
DEVICE void side(const Scan &c, const Scratch &z, const Unit &k, u32 which, u32 n, const Matrix &dy, u64 states) {
    u8 *own = pool, *stages = pool + ROWS_BYTES;
    Factors *factors = (Factors *)(stages + 2 * OUTSIDE_STAGE);
    bool there = which == 0 ? k.chunk > 0 : k.chunk + 1 < c.chunks;
    u32 l = lane(), row = 16 * warp() + l / 4;
    auto bring_strip = [&](u32 number) INLINE {
        u8 *stage = stages + (number - k.first) % 2 * OUTSIDE_STAGE;
        Strip of = strip(c, number);
        bring_tokens<HEAD>(stage, c, which == 0 ? dy : c.xbc, k.b, k.chunk, of.col, of.cols);
        bring_state<64>(stage + ROWS_BYTES, c, of, which == 0 ? of.between(c, states, k.b, k.chunk - 1) : of.between(c, z.grads, k.b, k.chunk), n);
    };
    float sum[8][4] = {};
    barrier(); // the unit before is done
    if (there) {
        bring_tokens<64>(own, c, c.xbc, k.b, k.chunk, (which == 0 ? c.col_c(k.g) : c.col_b(k.g)) + n, least(64u, c.state - n));
        bring_strip(k.first);
    }
    seal();
#pragma unroll 1
    for (u32 i = k.first + warp(); i < k.end; i += THREADS / 32) {
        u32 h = strip(c, i).h;
        float raw[4];
        raw_steps(raw, c, k.b, k.chunk, h);
        Token t = token_steps(raw, c, k.chunk, h);
        float all = number(from_lane(bits(t.sum[3]), 31));
#pragma unroll
        for (u32 e = 0; e < 4; e++) factors[i - k.first].by[4 * l + e] = which == 0 ? power(t.sum[e]) : t.dt[e] * power(all - t.sum[e]);
    }
#pragma unroll 1
    for (u32 i = there ? k.first : k.end; i < k.end; i++) {
        arrived<0>();
        barrier();
        if (i + 1 < k.end) bring_strip(i + 1);
        seal();
        const u8 *left = stages + (i - k.first) % 2 * OUTSIDE_STAGE, *right = left + ROWS_BYTES;
        float t[8][4] = {};
#pragma unroll
        for (u32 p = 0; p < HEAD; p += 16) {
            u32 a[4];
            left_rows<HEAD>(a, left + cell<HEAD>(16 * warp(), 0), 0, p);
#pragma unroll
            for (u32 j = 0; j < 8; j += 2) {
                u32 r[4];
                right_columns<64>(r, right, 8 * j, p);
                multiply_two(t + j, a, r);
            }
        }
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            float by = factors[i - k.first].by[row + 8 * e], dot = 0;
#pragma unroll
            for (u32 j = 0; j < 8; j++) {
                float x[2], *v = t[j] + 2 * e, *to = sum[j] + 2 * e;
                split(*ahead<64>(own + cell<64>(16 * warp(), 0), 8 * e, j), x);
                dot += x[0] * v[0] + x[1] * v[1];
                to[0] += by * v[0];
                to[1] += by * v[1];
            }
            dot = quad_sum(dot) * by;
            if (l % 4 == 0) write(edge_of(c, z, k, i, which, n / 64) + 4 * (row + 8 * e), bits(dot));
        }
    }
    arrived<0>();
    u64 to = mix_of(c, z, k, k.run, which);
#pragma unroll
    for (u32 j = 0; j < 8; j++) put_square(to, side_columns(c), 16 * warp(), n + j * 8, sum[j]);
}

KERNEL(THREADS, 2)
stowage_nn_scan_tensor_grad_outside(u64 scratch, u64 xbc, u64 dt, u64 a_log, u64 bias, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types,
                                    u64 dy, u64 pitch_dy, u64 states) {
    need(OUTSIDE_BYTES);
    Scan c = unpack(xbc, dt, a_log, 0, bias, seq, heads, groups, pitches, types);
    Matrix d = {global(dy), pitch_dy, BF16};
    u32 tiles = tiles_of(c);
#pragma unroll 1
    for (u32 u = block(); u < 2 * tiles * units(c, RUN); u += blocks()) {
        side(c, scratch_of(c, global(scratch)), unit(c, u / tiles / 2, RUN), u / tiles % 2, u % tiles * 64, d, states == 0 ? 0 : global(states));
    }
}

// ---- pairs

// Decays has the gradients of the logarithms of decays that begin at a token, and by warp
// those that end there.
struct Decays {
    float rows[Q], columns[8][Q];
};
#define PAIRS_STAGE (2 * ROWS_BYTES)
#define PAIRS_BYTES (2 * PAIRS_STAGE + CB_BYTES + 2 * sizeof(Steps) + sizeof(Decays))

// add_columns adds the sums of the columns of 16 x 16 numbers. A step of the sum over the
// eight lanes of a column halves the columns of a lane, as long as it has two.
DEVICE void add_columns(float *to, const float t[2][4]) {
    bool high = lane() & 16, odd = lane() & 8;
    auto step = [](float a, float b, bool second, u32 d) { return (second ? b : a) + number(across(bits(second ? a : b), d)); };
    float even = step(t[0][0] + t[0][2], t[1][0] + t[1][2], high, 16), other = step(t[0][1] + t[0][3], t[1][1] + t[1][3], high, 16);
    float sum = step(even, other, odd, 8);
    sum += number(across(bits(sum), 4));
    if ((lane() & 4) == 0) to[(high ? 8 : 0) + lane() % 4 * 2 + odd] += sum;
}

// square computes what the tokens of a square do to each other: rows j give to columns i.
DEVICE void square(float dcb[2][4], const Vec &cb, float *rows, float *columns, const Steps &s, u32 other, const u32 x[4][4], const u8 *dy) {
    float t[2][4] = {};
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        u32 r[4];
        right_rows<HEAD>(r, dy, 16 * other, 16 * k);
        multiply_two(t, x[k], r);
    }
    u32 g = lane() / 4, col = lane() % 4 * 2, in[4] = {cb.x, cb.y, cb.z, cb.w};
    const float *sum = s.sum + 16 * tile() + g, *dt = s.dt + 16 * tile() + g;
    bool diagonal = other == tile();
#pragma unroll
    for (u32 e = 0; e < 4; e++) {
        Both sums = *(const Both *)(s.sum + 16 * other + col + e / 2 * 8);
        float b[2];
        split(in[e], b);
#pragma unroll
        for (u32 n = 0; n < 2; n++) {
            u32 j = g + e % 2 * 8, i = col + e / 2 * 8 + n;
            float &v = t[e / 2][e % 2 * 2 + n];
            v *= power(sums.v[n] - sum[e % 2 * 8]) * dt[e % 2 * 8];
            if (diagonal && j > i) v = 0;
            dcb[e / 2][e % 2 * 2 + n] += v;
            v = diagonal && j == i ? 0 : v * b[n];
            rows[e % 2] += v;
        }
    }
    add_columns(columns + 16 * other, t);
}

// run_pairs computes a run of strips.
template <u32 wide> DEVICE void run_pairs(const Scan &c, const Scratch &w, const Unit &k, const Matrix &dy) {
    u8 *cb = pool + 2 * PAIRS_STAGE;
    Steps *steps = (Steps *)(cb + CB_BYTES);
    Decays &z = *(Decays *)(steps + 2);
    float raw[4];
    auto bring_strip = [&](u32 number) INLINE {
        u8 *stage = pool + (number - k.first) % 2 * PAIRS_STAGE;
        Strip of = strip(c, number);
        bring_tokens<HEAD>(stage, c, c.xbc, k.b, k.chunk, of.col, of.cols);
        bring_tokens<HEAD>(stage + ROWS_BYTES, c, dy, k.b, k.chunk, of.col, of.cols);
        seal();
    };
    auto steps_of = [&](u32 number) INLINE { steps[(number - k.first) % 2].fill(token_steps(raw, c, k.chunk, strip(c, number).h)); };
    u32 own[wide / 16][4];
    begin_unit<true, wide>(own, cb, pool, c, k, [&]() INLINE {
        if (warp() != 4) return;
        raw_steps(raw, c, k.b, k.chunk, strip(c, k.first).h);
        steps_of(k.first);
    });
    bring_strip(k.first);
    float dcb[8][2][4] = {};
#pragma unroll 1
    for (u32 i = k.first; i < k.end; i++) {
        arrived<0>();
        barrier();
        u32 turn = (i - k.first) % 2;
        bool more = i + 1 < k.end, next = more && warp() == 4; // it has the fewest squares
        if (more) bring_strip(i + 1);
        if (next) raw_steps(raw, c, k.b, k.chunk, strip(c, i + 1).h);
        const u8 *x = pool + turn * PAIRS_STAGE;
        float rows[2] = {}, *columns = z.columns[warp()];
        u32 a[4][4];
#pragma unroll
        for (u32 p = 0; p < 4; p++) left_rows<HEAD>(a[p], x + cell<HEAD>(16 * tile(), 0), 0, 16 * p);
#pragma unroll
        for (u32 p = 0; p < 4; p++) columns[32 * p + lane()] = 0;
        warp_barrier();
#pragma unroll
        for (u32 n = 0; n < 8; n++) {
            if (n < squares(true)) square(dcb[n], *square_of(cb, true, n), rows, columns, steps[turn], tile() + n, a, x + ROWS_BYTES);
        }
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            float v = quad_sum(rows[e]);
            if (lane() % 4 == 0) z.rows[16 * tile() + lane() / 4 + 8 * e] = v;
        }
        if (next) steps_of(i + 1);
        barrier(); // the sums are complete
        if (thread() < Q) {
            float v = -z.rows[thread()];
#pragma unroll
            for (u32 n = 0; n < 8; n++) v += z.columns[n][thread()];
            write(edge_of(c, w, k, i, 2, 0) + 4 * thread(), bits(v));
        }
    }
    u64 to = mix_of(c, w, k, k.run, 2);
#pragma unroll
    for (u32 n = 0; n < 8; n++) {
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            if (n < squares(true)) put_square(to, Q, 16 * tile(), 16 * (tile() + n) + 8 * e, dcb[n][e]);
        }
    }
}

template <u32 wide> DEVICE void pairs_all(const Scan &c, u64 scratch, u64 dy, u64 pitch_dy) {
    need(PAIRS_BYTES);
#pragma unroll 1
    for (u32 u = block(); u < units(c, RUN); u += blocks()) {
        run_pairs<wide>(c, scratch_of(c, global(scratch)), unit(c, u, RUN), {global(dy), pitch_dy, BF16});
    }
}

// They have the arguments of outside.
KERNEL(THREADS, 2)
stowage_nn_scan_tensor_grad_pairs(u64 scratch, u64 xbc, u64 dt, u64 a_log, u64 bias, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types,
                                  u64 dy, u64 pitch_dy, u64) {
    pairs_all<STATE>(unpack(xbc, dt, a_log, 0, bias, seq, heads, groups, pitches, types), scratch, dy, pitch_dy);
}

KERNEL(THREADS, 1)
stowage_nn_scan_tensor_grad_pairs_wide(u64 scratch, u64 xbc, u64 dt, u64 a_log, u64 bias, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types,
                                       u64 dy, u64 pitch_dy, u64) {
    pairs_all<WIDE_STATE>(unpack(xbc, dt, a_log, 0, bias, seq, heads, groups, pitches, types), scratch, dy, pitch_dy);
}

// ---- inputs


struct Inputs {
    Scan c;
    Scratch z;
    Unit k;
    Matrix dy, dx;
};

// run_inputs computes a run of strips.
template <u32 wide> DEVICE void run_inputs(const Inputs &w) {
    typedef Run<wide> R;
    const Scan &c = w.c;
    const Unit &k = w.k;
    u8 *cb = pool + R::room;
    bool leaves = k.chunk + 1 < c.chunks;
    u32 own[wide / 16][4];
    begin_unit<true, wide>(own, cb, pool, c, k, [&]() INLINE { fill_steps((Steps *)(cb + CB_BYTES), c, k); });
    auto bring_strip = [&](u32 number, u8 *to) INLINE {
        Strip of = strip(c, number);
        bring_tokens<HEAD>(to, c, w.dy, k.b, k.chunk, of.col, of.cols);
        if (leaves) bring_state<wide>(to + ROWS_BYTES, c, of, of.between(c, w.z.grads, k.b, k.chunk), 0);
    };
    R::each(k, bring_strip, [&](u32 number, const Steps &s, u8 *dy) INLINE {
        Strip of = strip(c, number);
        u32 row = 16 * tile() + lane() / 4;
        float by = c.param(c.d, of.h);
        u32 xs[16]; // pairs of x, in the places of those of du
        u64 at = c.xbc.at((u64)k.b * c.seq + k.chunk * Q + row, of.col + lane() % 4 * 2), pitch = 2 * c.xbc.pitch;
        if (((at | pitch) & 3) == 0 && of.cols == HEAD && c.tokens(k.chunk) == Q) {
#pragma unroll
            for (u32 p = 0; p < 16; p++) xs[p] = read<u32>(at + p % 2 * 8 * pitch + p / 2 * 16);
        } else {
#pragma unroll
            for (u32 p = 0; p < 16; p++) {
                u32 col = p / 2 * 8 + lane() % 4 * 2;
                u64 from = at + p % 2 * 8 * pitch + p / 2 * 16;
                bool in = row + p % 2 * 8 < c.tokens(k.chunk);
                xs[p] = (in && col < of.cols ? read<u16>(from) : 0) | (u32)(in && col + 1 < of.cols ? read<u16>(from + 2) : 0) << 16;
            }
        }
        float du[8][4] = {};
        if (leaves) through_state<true, wide>(du, s, own, dy + ROWS_BYTES);
        through_tokens<true>(du, cb, s, dy);
        barrier(); // dy has been read
        float dt[2] = {s.dt[row], s.dt[row + 8]}, x_du[2] = {}, dy_x[2] = {};
#pragma unroll
        for (u32 p = 0; p < 16; p++) {
            u32 *at = ahead<HEAD>(dy + cell<HEAD>(16 * tile(), 0), p % 2 * 8, p / 2);
            const float *g = du[p / 2] + p % 2 * 2;
            float v[2], d[2];
            split(xs[p], v);
            split(*at, d);
            x_du[p % 2] += v[0] * g[0] + v[1] * g[1];
            dy_x[p % 2] += v[0] * d[0] + v[1] * d[1];
            *at = pair(g[0] * dt[p % 2] + by * d[0], g[1] * dt[p % 2] + by * d[1]);
        }
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            float a = quad_sum(x_du[e]), b = quad_sum(dy_x[e]);
            if (lane() % 4 != 0) continue;
            write(edge_of(c, w.z, k, number, 2, 1) + 4 * (row + 8 * e), bits(a));
            write(edge_of(c, w.z, k, number, 2, 2) + 4 * (row + 8 * e), bits(b));
        }
        warp_barrier();
        deliver_rows(dy, 16 * tile(), c, w.dx, k.b, k.chunk, of);
    });
}

constexpr u64 field = (1 << 21) - 1; // of a pitch

template <u32 wide> DEVICE void inputs_all(const Scan &c, u64 scratch, u64 dy, u64 dxbc, u64 pitches) {
    need(Run<wide>::bytes);
#pragma unroll 1
    for (u32 u = block(); u < units(c, Run<wide>::strips); u += blocks()) {
        run_inputs<wide>({c, scratch_of(c, global(scratch)), unit(c, u, Run<wide>::strips), {global(dy), pitches & field, BF16},
                          {global(dxbc), pitches >> 21 & field, BF16}});
    }
}

// The twin also reads states, and writes the gradients of steps.
KERNEL(THREADS, 2)
stowage_nn_scan_tensor_grad(u64 scratch, u64 xbc, u64 dt, u64 a_log, u64 d, u64 bias, u64, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types,
                            u64 dy, u64 dxbc, u64, u64 more) {
    inputs_all<STATE>(unpack(xbc, dt, a_log, d, bias, seq, heads, groups, pitches, types), scratch, dy, dxbc, more);
}

KERNEL(THREADS, 1)
stowage_nn_scan_tensor_grad_wide(u64 scratch, u64 xbc, u64 dt, u64 a_log, u64 d, u64 bias, u64, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types,
                                 u64 dy, u64 dxbc, u64, u64 more) {
    inputs_all<WIDE_STATE>(unpack(xbc, dt, a_log, d, bias, seq, heads, groups, pitches, types), scratch, dy, dxbc, more);
}

// ---- steps

// sum_to returns the sum of the values of the lanes before this one, and all adds this one.
DEVICE float sum_to(float v) {
    float all = v;
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
        float w = number(from_below(bits(all), d));
        if (lane() >= d) all += w;
    }
    float before = number(from_below(bits(all), 1));
    return lane() > 0 ? before : 0;
}

// slope_at returns the slope of the softplus where it is dt, which is 1 - exp(-dt).
DEVICE float slope_at(float dt) { return dt < 0.03f ? dt * (1 - dt / 2 * (1 - dt / 3)) : 1 - exponential(-dt); }

// A warp computes the gradients of the steps of a head in a chunk, and what they add to those
// of the parameters. Each lane has four tokens.
KERNEL(THREADS)
stowage_nn_scan_tensor_grad_steps(u64 scratch, u64 dt, u64 a_log, u64 bias, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types, u64 ddt,
                                  u64 pitch_ddt) {
    Scan c = unpack(dt, dt, a_log, 0, bias, seq, heads, groups, pitches, types);
    Scratch z = scratch_of(c, global(scratch));
    Matrix to = {global(ddt), pitch_ddt, BF16};
    u32 tiles = tiles_of(c), strips = strips_of(c), l = lane();
#pragma unroll 1
    for (u32 u = block() * warps() + warp(); u < c.batch * c.chunks * c.heads; u += blocks() * warps()) {
        u32 h = u % c.heads, chunk = u / c.heads % c.chunks;
        Unit k = {u / c.heads / c.chunks, chunk, 0, 0, 0, 0};
        bool enters = chunk > 0, leaves = chunk + 1 < c.chunks;
        // add_edges adds four numbers from i on of all strips of the head.
        auto add_edges = [&](float *sum, u32 which, u32 t, u32 i) INLINE {
#pragma unroll 1
            for (u32 p = 0; p < strips; p++) {
                float x[4];
                numbers(read<Vec>(edge_of(c, z, k, h * strips + p, which, t) + 4 * i), x);
#pragma unroll
                for (u32 e = 0; e < 4; e++) sum[e] += x[e];
            }
        };
        float raw[4], in[4] = {}, out[4] = {}, x_du[4] = {}, dy_x[4] = {};
        raw_steps(raw, c, k.b, chunk, h);
#pragma unroll 1
        for (u32 t = 0; t < tiles; t++) {
            if (enters) add_edges(in, 0, t, Q - 4 - 4 * l);
            if (leaves) add_edges(out, 1, t, 4 * l);
        }
        add_edges(in, 2, 0, Q - 4 - 4 * l);
        add_edges(x_du, 2, 1, 4 * l);
        add_edges(dy_x, 2, 2, 4 * l);
        float through = 0;
#pragma unroll 1
        for (u32 p = 0; enters && leaves && l < tiles * (THREADS / 32) && p < strips; p++) {
            through += number(read<u32>(through_of(c, z.through, k.b, chunk, h * strips + p, 0) + 4 * l));
        }
        Token s = token_steps(raw, c, chunk, h);
        float v[4], all = 0; // sums from the last token to this one
#pragma unroll
        for (u32 e = 0; e < 4; e++) v[e] = all += in[3 - e];
        all = sum_to(all);
        float before = sum_to(out[0] + out[1] + out[2] + out[3]) + warp_sum(through) * power(number(from_lane(bits(s.sum[3]), 31)));
        float a = c.a(h), da = 0, dd = 0, dbias = 0;
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            u32 i = 4 * l + e;
            // The lane at the other end has the sum from this token on.
            float grad = number(across(bits(all + v[3 - e]), 31)) + before;
            before += out[e];
            da += grad * s.dt[e];
            dd += dy_x[e];
            grad = (x_du[e] + a * grad) * slope_at(s.dt[e]);
            dbias += grad;
            if (i < c.tokens(chunk)) set(BF16, to.at((u64)k.b * c.seq + chunk * Q + i, h), grad);
        }
        da = warp_sum(da);
        dd = warp_sum(dd);
        dbias = warp_sum(dbias);
        u64 sums = z.sums + 4 * (((u64)k.b * c.chunks + chunk) * 3 * c.heads + h);
        if (l != 0) continue;
        write(sums, bits(da * a)); // a = -exp(ALog) is its own derivative
        write(sums + 4ull * c.heads, bits(dd));
        write(sums + 8ull * c.heads, bits(dbias));
    }
}

// A thread sums up one number.
KERNEL(THREADS, 2)
stowage_nn_scan_tensor_grad_sum(u64 a_log, u64 d, u64 bias, u64 sums, u64 chunks, u64 heads, u64 type) {
    add_chunks(a_log, d, bias, sums, (u32)chunks, (u32)heads, (u32)type);
}

// ---- mix

#define MIX_BYTES (side_bytes<Q>() + 2 * ROWS_BYTES)

// A block computes 64 columns of the gradients of B and C of a chunk of a group: the sums
// of the parts of all runs, and the products of the gradient of C Bᵀ with the other one.
// Only the columns themselves are read there, because the gradients may take their place.
KERNEL(THREADS, 2)
stowage_nn_scan_tensor_grad_mix(u64 scratch, u64 xbc, u64 dxbc, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types, u64 pitch_dxbc) {
    need(MIX_BYTES);
    Scan c = unpack(xbc, xbc, xbc, 0, xbc, seq, heads, groups, pitches, types);
    Scratch z = scratch_of(c, global(scratch));
    Matrix dx = {global(dxbc), pitch_dxbc, BF16};
    u32 tiles = tiles_of(c), runs = runs_of(c, RUN);
    u8 *square = pool, *other = pool + side_bytes<Q>(); // C and B
#pragma unroll 1
    for (u32 u = block(); u < c.batch * c.chunks * c.groups * tiles; u += blocks()) {
        u32 n = u % tiles * 64, v = u / tiles, cols = least(64u, c.state - n);
        Unit k = {v / c.groups / c.chunks, v / c.groups % c.chunks, v % c.groups, 0, 0, 0};
        barrier(); // the columns before are done
        bring_tokens<HEAD>(other, c, c.xbc, k.b, k.chunk, c.col_c(k.g) + n, cols);
        bring_tokens<HEAD>(other + ROWS_BYTES, c, c.xbc, k.b, k.chunk, c.col_b(k.g) + n, cols);
        seal();
        // A thread has four numbers of a row, in several rows at once.
        constexpr u32 apart = 4 * THREADS / Q, batch = 4;
        u32 col = thread() % (Q / 4) * 4;
#pragma unroll 1
        for (u32 row = thread() / (Q / 4); row < Q; row += batch * apart) {
            float sum[batch][4] = {};
#pragma unroll 1
            for (u32 r = 0; r < runs; r++) {
                Vec v[batch];
#pragma unroll
                for (u32 i = 0; i < batch; i++) v[i] = read<Vec>(mix_of(c, z, k, r, 2) + 4 * ((row + i * apart) * Q + col));
#pragma unroll
                for (u32 i = 0; i < batch; i++) {
                    sum[i][0] += number(v[i].x), sum[i][1] += number(v[i].y), sum[i][2] += number(v[i].z), sum[i][3] += number(v[i].w);
                }
            }
#pragma unroll
            for (u32 i = 0; i < batch; i++) {
                u32 to_row = row + i * apart;
                bool in = col / 16 >= to_row / 16; // the rest is not there
                u32 *to = (u32 *)(square + cell<Q>(to_row, 0) + 2 * col);
                to[0] = in ? pair(sum[i][0], sum[i][1]) : 0;
                to[1] = in ? pair(sum[i][2], sum[i][3]) : 0;
            }
        }
        arrived<0>();
        barrier();
#pragma unroll 1
        for (u32 which = 0; which < 2; which++) {
            u32 row = 16 * warp() + lane() / 4;
            float s[8][4] = {};
#pragma unroll 1
            for (u32 r = 0; r < runs; r++) {
                u64 from = mix_of(c, z, k, r, which);
#pragma unroll
                for (u32 i = 0; i < 16; i++) {
                    u64 v = read<u64>(from + 4 * ((row + i % 2 * 8) * side_columns(c) + n + i / 2 * 8 + lane() % 4 * 2));
                    float *to = s[i / 2] + i % 2 * 2;
                    to[0] += number(low(v)), to[1] += number(high(v));
                }
            }
            const u8 *with = other + (which == 0 ? ROWS_BYTES : 0); // the gradient of C needs B
#pragma unroll
            for (u32 e = 0; e < Q; e += 16) {
                u32 a[4];
                if (which == 0) left_columns<Q>(a, square, 16 * warp(), e);
                else left_rows<Q>(a, square, 16 * warp(), e);
#pragma unroll
                for (u32 j = 0; j < 8; j += 2) {
                    u32 r[4];
                    right_columns<HEAD>(r, with, 8 * j, e);
                    multiply_two(s + j, a, r);
                }
            }
            u32 first = (which == 0 ? c.col_c(k.g) : c.col_b(k.g));
#pragma unroll
            for (u32 i = 0; i < 16; i++) {
                if (row + i % 2 * 8 >= c.tokens(k.chunk)) continue;
                const float *x = s[i / 2] + i % 2 * 2;
                put_pair(dx.at((u64)k.b * c.seq + k.chunk * Q + row + i % 2 * 8, first), n + i / 2 * 8 + lane() % 4 * 2, c.state, x[0], x[1]);
            }
        }
    }
}
