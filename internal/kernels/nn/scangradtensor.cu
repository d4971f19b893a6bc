// The backward pass of the scan of Mamba-2 on tensor cores. scan.go says what is computed,
// and scangradtwin.go has the formulas. Beside the gradients of states there are four
// kernels: outside has what passes through states to B and C, pairs what the tokens of a
// chunk do to each other's decays and to C Bᵀ, inputs the gradients of x and of steps, and
// mix adds up the gradients of B and C.
// targets: sm_80

#include "scantensor.cuh"

#define RUN 16u // heads of a block: tensorGradRun
#define EDGES 5u // numbers of a token: two parts of each product with a state, and the rest
#define PARTS 3u // of mix: the gradients of C, of B, and of (C Bᵀ)ᵀ

// Scratch says where scratch memory has what: gradients of states; sums for parameters;
// for each chunk and head, its tokens' products with the state that enters, with the one
// that leaves, and the gradients of decays between tokens; parts of the products of states
// and their gradients, by block and warp; and for each chunk of a group and each run of
// heads squares of Q x Q.
struct Scratch {
    u64 grads, sums, edges, through, mix;
};
DEVICE Scratch scratch_of(const Scan &c, u64 p) {
    u64 each = (u64)c.batch * c.chunks * c.heads, states = 2ull * c.batch * (c.chunks - 1) * c.heads * c.head * c.state;
    Scratch s = {p, p + (states + 15) / 16 * 16, 0, 0, 0};
    s.edges = s.sums + (12 * each + 15) / 16 * 16;
    s.through = s.edges + 4 * EDGES * Q * each;
    s.mix = s.through + 4 * CARRY_PARTS * each;
    return s;
}

DEVICE u64 edge_of(const Scan &c, const Scratch &s, const Unit &k, u32 h, u32 which) {
    return s.edges + 4ull * Q * ((((u64)k.b * c.chunks + k.chunk) * c.heads + h) * EDGES + which);
}
DEVICE u64 mix_of(const Scan &c, const Scratch &s, const Unit &k, u32 runs, u32 run, u32 part) {
    return s.mix + 4ull * Q * Q * (((((u64)k.b * c.chunks + k.chunk) * c.groups + k.g) * runs + run) * PARTS + part);
}
DEVICE u32 runs_of(const Scan &c) { return (c.heads / c.groups + RUN - 1) / RUN; }

// put_square stores a result of 16 x 8 of a square of Q x Q.
DEVICE void put_square(u64 to, u32 row, u32 col, const float *x) {
#pragma unroll
    for (u32 e = 0; e < 4; e += 2) {
        write(to + 4 * ((row + lane() / 4 + e * 4) * Q + col + lane() % 4 * 2), (u64)bits(x[e]) | (u64)bits(x[e + 1]) << 32);
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
#define OUTSIDE_BYTES (ROWS_BYTES + 2 * OUTSIDE_STAGE + 2 * sizeof(Factors))

// side computes, for a run of heads, 64 columns from n on of the gradient of C (side 0) that
// comes from the state that enters, or of that of B (side 1) from the gradient of the state
// that leaves.
DEVICE void side(const Scan &c, const Scratch &z, const Unit &k, u32 which, u32 n, const Matrix &dy, u64 states) {
    u8 *own = pool, *stages = pool + ROWS_BYTES;
    Factors *factors = (Factors *)(stages + 2 * OUTSIDE_STAGE);
    bool there = which == 0 ? k.chunk > 0 : k.chunk + 1 < c.chunks;
    u32 l = lane(), row = 16 * warp() + l / 4;
    auto bring_head = [&](u32 h) INLINE {
        u8 *stage = stages + (h - k.head) % 2 * OUTSIDE_STAGE;
        bring_tokens<HEAD>(stage, c, which == 0 ? dy : c.xbc, k.b, k.chunk, h * c.head, c.head);
        bring_state<64>(stage + ROWS_BYTES, c, which == 0 ? c.between(states, k.b, k.chunk - 1, h) : c.between(z.grads, k.b, k.chunk, h), n);
    };
    float raw[4];
    auto weigh = [&](u32 h) INLINE {
        Token t = token_steps(raw, c, k.chunk, h);
        float all = number(from_lane(bits(t.sum[3]), 31));
#pragma unroll
        for (u32 e = 0; e < 4; e++) factors[(h - k.head) % 2].by[4 * l + e] = which == 0 ? power(t.sum[e]) : t.dt[e] * power(all - t.sum[e]);
    };
    float sum[8][4] = {};
    barrier(); // the unit before is done
    if (there) {
        bring_tokens<64>(own, c, c.xbc, k.b, k.chunk, (which == 0 ? c.col_c(k.g) : c.col_b(k.g)) + n, least(64u, c.state - n));
        bring_head(k.head);
    }
    seal();
    if (warp() == 0) {
        raw_steps(raw, c, k.b, k.chunk, k.head);
        weigh(k.head);
    }
#pragma unroll 1
    for (u32 h = there ? k.head : k.end; h < k.end; h++) {
        arrived<0>();
        barrier();
        bool more = h + 1 < k.end, next = more && warp() == h % 8;
        if (more) bring_head(h + 1);
        seal();
        if (next) raw_steps(raw, c, k.b, k.chunk, h + 1);
        const u8 *left = stages + (h - k.head) % 2 * OUTSIDE_STAGE, *right = left + ROWS_BYTES;
        float t[8][4] = {};
#pragma unroll
        for (u32 i = 0; i < HEAD; i += 16) {
            u32 a[4];
            left_rows<HEAD>(a, left + cell<HEAD>(16 * warp(), 0), 0, i);
#pragma unroll
            for (u32 j = 0; j < 8; j += 2) {
                u32 r[4];
                right_columns<64>(r, right, 8 * j, i);
                multiply_two(t + j, a, r);
            }
        }
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            float by = factors[(h - k.head) % 2].by[row + 8 * e], dot = 0;
#pragma unroll
            for (u32 j = 0; j < 8; j++) {
                float x[2], *v = t[j] + 2 * e, *to = sum[j] + 2 * e;
                split(*ahead<64>(own + cell<64>(16 * warp(), 0), 8 * e, j), x);
                dot += x[0] * v[0] + x[1] * v[1];
                to[0] += by * v[0];
                to[1] += by * v[1];
            }
            dot = quad_sum(dot) * by;
            if (l % 4 == 0) write(edge_of(c, z, k, h, 2 * which + n / 64) + 4 * (row + 8 * e), bits(dot));
        }
        if (next) weigh(h + 1);
    }
    arrived<0>();
    u64 to = mix_of(c, z, k, runs_of(c), k.run, which);
#pragma unroll
    for (u32 j = 0; j < 8; j++) put_square(to, 16 * warp(), n + j * 8, sum[j]);
}

KERNEL(THREADS, 2)
stowage_nn_scan_tensor_grad_outside(u64 scratch, u64 xbc, u64 dt, u64 a_log, u64 bias, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types,
                                    u64 dy, u64 pitch_dy, u64 states) {
    need(OUTSIDE_BYTES);
    Scan c = unpack(xbc, dt, a_log, 0, bias, seq, heads, groups, pitches, types);
    Matrix d = {global(dy), pitch_dy, BF16};
    u32 tiles = (c.state + 63) / 64;
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

// run_pairs computes a run of heads.
DEVICE void run_pairs(const Scan &c, const Scratch &w, const Unit &k, const Matrix &dy) {
    u8 *cb = pool + 2 * PAIRS_STAGE;
    Steps *steps = (Steps *)(cb + CB_BYTES);
    Decays &z = *(Decays *)(steps + 2);
    float raw[4];
    auto bring_head = [&](u32 h) INLINE {
        u8 *stage = pool + (h - k.head) % 2 * PAIRS_STAGE;
        bring_tokens<HEAD>(stage, c, c.xbc, k.b, k.chunk, h * c.head, c.head);
        bring_tokens<HEAD>(stage + ROWS_BYTES, c, dy, k.b, k.chunk, h * c.head, c.head);
        seal();
    };
    barrier(); // the unit before is done
    bring_tokens<STATE>(pool, c, c.xbc, k.b, k.chunk, c.col_b(k.g), c.state);
    bring_tokens<STATE>(pool + SIDE_BYTES, c, c.xbc, k.b, k.chunk, c.col_c(k.g), c.state);
    seal();
    if (warp() == 4) {
        raw_steps(raw, c, k.b, k.chunk, k.head);
        steps[0].fill(token_steps(raw, c, k.chunk, k.head));
    }
    arrived<0>();
    barrier();
    {
        u32 own[STATE / 16][4];
        load_own(own, pool);
        make_cb<true>(cb, own, pool + SIDE_BYTES);
    }
    barrier(); // B and C have been read
    bring_head(k.head);
    float dcb[8][2][4] = {};
#pragma unroll 1
    for (u32 h = k.head; h < k.end; h++) {
        arrived<0>();
        barrier();
        u32 turn = (h - k.head) % 2;
        bool more = h + 1 < k.end, next = more && warp() == 4; // it has the fewest squares
        if (more) bring_head(h + 1);
        if (next) raw_steps(raw, c, k.b, k.chunk, h + 1);
        const u8 *x = pool + turn * PAIRS_STAGE;
        float rows[2] = {}, *columns = z.columns[warp()];
        u32 a[4][4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) left_rows<HEAD>(a[i], x + cell<HEAD>(16 * tile(), 0), 0, 16 * i);
#pragma unroll
        for (u32 i = 0; i < 4; i++) columns[32 * i + lane()] = 0;
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
        if (next) steps[!turn].fill(token_steps(raw, c, k.chunk, h + 1));
        barrier(); // the sums are complete
        if (thread() < Q) {
            float v = -z.rows[thread()];
#pragma unroll
            for (u32 i = 0; i < 8; i++) v += z.columns[i][thread()];
            write(edge_of(c, w, k, h, 4) + 4 * thread(), bits(v));
        }
    }
    u64 to = mix_of(c, w, k, runs_of(c), k.run, 2);
#pragma unroll
    for (u32 n = 0; n < 8; n++) {
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            if (n < squares(true)) put_square(to, 16 * tile(), 16 * (tile() + n) + 8 * e, dcb[n][e]);
        }
    }
}

KERNEL(THREADS, 2)
stowage_nn_scan_tensor_grad_pairs(u64 scratch, u64 xbc, u64 dt, u64 a_log, u64 bias, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types,
                                  u64 dy, u64 pitch_dy, u64) { // has the arguments of outside
    need(PAIRS_BYTES);
    Scan c = unpack(xbc, dt, a_log, 0, bias, seq, heads, groups, pitches, types);
#pragma unroll 1
    for (u32 u = block(); u < units(c, RUN); u += blocks()) {
        run_pairs(c, scratch_of(c, global(scratch)), unit(c, u, RUN), {global(dy), pitch_dy, BF16});
    }
}

// ---- inputs

#define INPUTS_RUN 8u // heads of a block: tensorRun

// Sums has the products of a head's tokens with x.
struct Sums {
    float x_du[Q], dy_x[Q];
};
#define STAGE (ROWS_BYTES + STATE_BYTES)
#define INPUTS_BYTES (2 * STAGE + CB_BYTES + 2 * sizeof(Steps) + sizeof(Sums))

struct Inputs {
    Scan c;
    Scratch z;
    Unit k;
    Matrix dy, dx, ddt;
};

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

// finish computes the gradients of steps and the sums for the parameters. One warp does it,
// and each lane has four tokens. It is a part of the work of the next head.
DEVICE void finish(const Inputs &w, const Sums &z, const Steps &s, u32 h) {
    const Scan &c = w.c;
    bool enters = w.k.chunk > 0, leaves = w.k.chunk + 1 < c.chunks;
    float v[4], out[4], all = 0, through = 0;
    u32 parts = (c.state + 63) / 64;
    auto edge = [&](u32 which, u32 i) INLINE { return number(read<u32>(edge_of(c, w.z, w.k, h, which) + 4 * i)); };
    auto product = [&](bool there, u32 which, u32 i) INLINE { return there ? edge(which, i) + (parts > 1 ? edge(which + 1, i) : 0) : 0; };
#pragma unroll
    for (u32 e = 0; e < 4; e++) {
        u32 i = Q - 1 - 4 * lane() - e;
        v[e] = all += product(enters, 0, i) + edge(4, i);
        out[e] = product(leaves, 2, 4 * lane() + e);
    }
    if (enters && leaves && lane() < parts * 8) {
        u64 at = (((u64)w.k.b * c.chunks + w.k.chunk) * c.heads + h) * CARRY_PARTS + lane();
        through = number(read<u32>(w.z.through + 4 * at));
    }
    through = warp_sum(through);
    all = sum_to(all);
    float before = sum_to(out[0] + out[1] + out[2] + out[3]) + through * s.all();
    float a = c.a(h), da = 0, dd = 0, dbias = 0;
#pragma unroll
    for (u32 e = 0; e < 4; e++) {
        u32 i = 4 * lane() + e;
        // The lane at the other end has the sum from this token on.
        float dt = s.dt[i], grad = number(across(bits(all + v[3 - e]), 31)) + before;
        before += out[e];
        da += grad * dt;
        dd += z.dy_x[i];
        grad = (z.x_du[i] + a * grad) * slope_at(dt);
        dbias += grad;
        if (i < c.tokens(w.k.chunk)) set(BF16, w.ddt.at((u64)w.k.b * c.seq + w.k.chunk * Q + i, h), grad);
    }
    da = warp_sum(da);
    dd = warp_sum(dd);
    dbias = warp_sum(dbias);
    u64 to = w.z.sums + 4 * (((u64)w.k.b * c.chunks + w.k.chunk) * 3 * c.heads + h);
    if (lane() != 0) return;
    write(to, bits(da * a)); // a = -exp(ALog) is its own derivative
    write(to + 4ull * c.heads, bits(dd));
    write(to + 8ull * c.heads, bits(dbias));
}

// run_inputs computes a run of heads.
DEVICE void run_inputs(const Inputs &w) {
    const Scan &c = w.c;
    const Unit &k = w.k;
    u8 *stages = pool, *cb = pool + 2 * STAGE;
    Steps *steps = (Steps *)(cb + CB_BYTES);
    Sums &z = *(Sums *)(steps + 2);
    bool leaves = k.chunk + 1 < c.chunks;
    auto bring_head = [&](u32 h) INLINE {
        u8 *stage = stages + (h - k.head) % 2 * STAGE;
        bring_tokens<HEAD>(stage, c, w.dy, k.b, k.chunk, h * c.head, c.head);
        if (leaves) bring_state<STATE>(stage + ROWS_BYTES, c, c.between(w.z.grads, k.b, k.chunk, h), 0);
        seal();
    };
    float raw[4];
    barrier(); // the unit before is done
    bring_tokens<STATE>(stages, c, c.xbc, k.b, k.chunk, c.col_b(k.g), c.state);
    bring_tokens<STATE>(stages + SIDE_BYTES, c, c.xbc, k.b, k.chunk, c.col_c(k.g), c.state);
    seal();
    if (warp() == 4) {
        raw_steps(raw, c, k.b, k.chunk, k.head);
        steps[0].fill(token_steps(raw, c, k.chunk, k.head));
    }
    arrived<0>();
    barrier();
    u32 own[STATE / 16][4];
    load_own(own, stages);
    make_cb<true>(cb, own, stages + SIDE_BYTES);
    barrier(); // B and C have been read
    bring_head(k.head);
#pragma unroll 1
    for (u32 h = k.head; h < k.end; h++) {
        arrived<0>();
        barrier();
        u32 turn = (h - k.head) % 2, row = 16 * tile() + lane() / 4;
        bool more = h + 1 < k.end, next = more && warp() == 4; // it has the fewest squares
        if (more) bring_head(h + 1);
        if (next) raw_steps(raw, c, k.b, k.chunk, h + 1);
        float by = c.param(c.d, h);
        u32 xs[16]; // pairs of x, in the places of those of du
        u64 at = c.xbc.at((u64)k.b * c.seq + k.chunk * Q + row, h * c.head + lane() % 4 * 2), pitch = 2 * c.xbc.pitch;
        if (((at | pitch) & 3) == 0 && c.head == HEAD && c.tokens(k.chunk) == Q) {
#pragma unroll
            for (u32 p = 0; p < 16; p++) xs[p] = read<u32>(at + p % 2 * 8 * pitch + p / 2 * 16);
        } else {
#pragma unroll
            for (u32 p = 0; p < 16; p++) {
                u32 col = p / 2 * 8 + lane() % 4 * 2;
                u64 from = at + p % 2 * 8 * pitch + p / 2 * 16;
                bool in = row + p % 2 * 8 < c.tokens(k.chunk);
                xs[p] = (in && col < c.head ? read<u16>(from) : 0) | (u32)(in && col + 1 < c.head ? read<u16>(from + 2) : 0) << 16;
            }
        }
        u8 *dy = stages + turn * STAGE;
        const Steps &s = steps[turn];
        float du[8][4] = {};
        if (leaves) through_state<true>(du, s, own, dy + ROWS_BYTES);
        through_tokens<true>(du, cb, s, dy);
        if (next) steps[!turn].fill(token_steps(raw, c, k.chunk, h + 1));
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
            if (lane() % 4 == 0) z.x_du[row + 8 * e] = a, z.dy_x[row + 8 * e] = b;
        }
        warp_barrier();
        deliver_rows(dy, 16 * tile(), c, w.dx, k.b, k.chunk, h * c.head);
        barrier(); // the sums are complete
        if (warp() == 5) finish(w, z, s, h);
    }
}

constexpr u64 field = (1 << 21) - 1; // of a pitch

KERNEL(THREADS, 2)
stowage_nn_scan_tensor_grad(u64 scratch, u64 xbc, u64 dt, u64 a_log, u64 d, u64 bias, u64, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types,
                            u64 dy, u64 dxbc, u64 ddt, u64 more) { // the twin reads states
    need(INPUTS_BYTES);
    Scan c = unpack(xbc, dt, a_log, d, bias, seq, heads, groups, pitches, types);
#pragma unroll 1
    for (u32 u = block(); u < units(c, INPUTS_RUN); u += blocks()) {
        run_inputs({c, scratch_of(c, global(scratch)), unit(c, u, INPUTS_RUN), {global(dy), more & field, BF16},
                    {global(dxbc), more >> 21 & field, BF16}, {global(ddt), more >> 42 & field, BF16}});
    }
}

// A thread sums up one number.
KERNEL(THREADS, 2)
stowage_nn_scan_tensor_grad_sum(u64 a_log, u64 d, u64 bias, u64 sums, u64 chunks, u64 heads, u64 type) {
    add_chunks(a_log, d, bias, sums, (u32)chunks, (u32)heads, (u32)type);
}

// ---- mix

#define MIX_BYTES (SIDE_BYTES + 2 * ROWS_BYTES)

// A block computes 64 columns of the gradients of B and C of a chunk of a group: the sums
// of the parts of all runs, and the products of the gradient of C Bᵀ with the other one.
// Only the columns themselves are read there, because the gradients may take their place.
KERNEL(THREADS, 2)
stowage_nn_scan_tensor_grad_mix(u64 scratch, u64 xbc, u64 dxbc, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types, u64 pitch_dxbc) {
    need(MIX_BYTES);
    Scan c = unpack(xbc, xbc, xbc, 0, xbc, seq, heads, groups, pitches, types);
    Scratch z = scratch_of(c, global(scratch));
    Matrix dx = {global(dxbc), pitch_dxbc, BF16};
    u32 tiles = (c.state + 63) / 64, runs = runs_of(c);
    u8 *square = pool, *other = pool + SIDE_BYTES; // C and B
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
                for (u32 i = 0; i < batch; i++) v[i] = read<Vec>(mix_of(c, z, k, runs, r, 2) + 4 * ((row + i * apart) * Q + col));
#pragma unroll
                for (u32 i = 0; i < batch; i++) {
                    sum[i][0] += number(v[i].x), sum[i][1] += number(v[i].y), sum[i][2] += number(v[i].z), sum[i][3] += number(v[i].w);
                }
            }
#pragma unroll
            for (u32 i = 0; i < batch; i++) {
                u32 to_row = row + i * apart;
                bool in = col / 16 >= to_row / 16; // the rest is not there
                u32 *to = (u32 *)(square + cell<STATE>(to_row, 0) + 2 * col);
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
                u64 from = mix_of(c, z, k, runs, r, which);
#pragma unroll
                for (u32 i = 0; i < 16; i++) {
                    u64 v = read<u64>(from + 4 * ((row + i % 2 * 8) * Q + n + i / 2 * 8 + lane() % 4 * 2));
                    float *to = s[i / 2] + i % 2 * 2;
                    to[0] += number(low(v)), to[1] += number(high(v));
                }
            }
            const u8 *with = other + (which == 0 ? ROWS_BYTES : 0); // the gradient of C needs B
#pragma unroll
            for (u32 e = 0; e < Q; e += 16) {
                u32 a[4];
                if (which == 0) left_columns<STATE>(a, square, 16 * warp(), e);
                else left_rows<STATE>(a, square, 16 * warp(), e);
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
