// The backward pass of the scan of Mamba-2. scan.go says what is computed, and
// scangradtwin.go has the formulas.
// targets: sm_80

#include "scan.cuh"

KERNEL(THREADS)
stowage_nn_scan_grad_state(u64 grads, u64 xbc, u64 dt, u64 a_log, u64 bias, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types, u64 dy,
                           u64 pitch_dy) {
    SHARED Steps s;
    SHARED Operands o;
    Scan c = unpack(xbc, dt, a_log, 0, bias, seq, heads, groups, pitches, types);
    carry_all<true>(s, o, c, global(grads), {global(dy), pitch_dy, c.xbc.type});
}

// Sums has sums over the tokens of a chunk, for one head.
struct Sums {
    float decay[Q];           // gradients of the logarithms of decays that end at a token, less those that begin there
    float enters[Q];          // a token's product with the entering state
    float leaves[Q];          // a token's product with the leaving state
    float x_du[Q], dy_x[Q];   // products with x
    float behind[Q];          // sums over all tokens from one on
    float part[THREADS / 32][TILE];
};

// add_rows adds the sums of f over the rows of a tile. Half a warp has a row.
template <class F> DEVICE void add_rows(Tile &t, float *to, F f) {
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
        float sum = 0;
#pragma unroll
        for (u32 k = 0; k < 4; k++) sum += f(Tile::row(r), Tile::col(k), t.v[r][k]);
#pragma unroll
        for (u32 d = 8; d > 0; d /= 2) sum += number(across(bits(sum), d));
        if (thread() % 16 == 0) to[Tile::row(r)] += sum;
    }
}

// take_columns subtracts the sums of the columns of a tile.
DEVICE void take_columns(Sums &z, const Tile &t, float *from) {
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        float sum = t.v[0][k] + t.v[1][k] + t.v[2][k] + t.v[3][k];
        sum += number(across(bits(sum), 16));
        if (lane() < 16) z.part[warp()][Tile::col(k)] = sum;
    }
    barrier();
    if (thread() < TILE) {
        float sum = 0;
#pragma unroll
        for (u32 w = 0; w < THREADS / 32; w++) sum += z.part[w][thread()];
        from[thread()] -= sum;
    }
}

// Chunk is a chunk of a group, with everything that a block needs for it.
struct Chunk {
    Scan c;
    Matrix dy, dxbc, ddt, mix; // mix has the gradients of B and C on their way, fp32
    u64 states, grads, sums;
    u32 b, chunk, g;
    Part bs, cs;
    DEVICE Part heads(const Matrix &m, u32 h) const { return part(c, m, b, chunk, h * c.head, c.head); }
    DEVICE bool enters() const { return chunk > 0; }
    DEVICE bool leaves() const { return chunk + 1 < c.chunks; }
    DEVICE Part in(u32 h) const { return state(c, c.between(states, b, chunk - 1, h)); }
    DEVICE Part out(u32 h) const { return state(c, c.between(grads, b, chunk, h)); }
    // db and dc return where the gradients of B and C are summed.
    DEVICE Part db() const { return part(c, mix, b, chunk, g * c.state, c.state); }
    DEVICE Part dc() const { return part(c, mix, b, chunk, (c.groups + g) * c.state, c.state); }
};

// outside begins the gradients of B and C with the part that comes from states, over all
// heads. It runs first, because it reads x, and the gradient of x may lie in the same
// place.
DEVICE void outside(Steps &s, Operands &o, const Chunk &k) {
#pragma unroll 1
    for (u32 n = 0; n < k.c.state; n += TILE) {
        Tile db, dc;
        db.clear();
        dc.clear();
        each_head(s, k.c, k.b, k.chunk, k.g, [&](u32 h, u32 w) INLINE {
            Part x = k.heads(k.c.xbc, h), dy = k.heads(k.dy, h);
            if (k.enters()) {
                Part in = k.in(h).from(n);
                multiply<true, false>(
                    o, dc, k.c.head, [&](u32 i, u32 e) { return dy.at(i, e) * s.start(w, i); }, [&](u32 e, u32 j) { return in.at(e, j); });
            }
            if (k.leaves()) {
                Part out = k.out(h).from(n);
                multiply<true, false>(
                    o, db, k.c.head, [&](u32 i, u32 e) { return x.at(i, e) * s.dt[w][i] * s.end(w, i); },
                    [&](u32 e, u32 j) { return out.at(e, j); });
            }
        });
        Part to_b = k.db().from(n), to_c = k.dc().from(n);
        db.each([&](u32 i, u32 j, float v) { to_b.put(i, j, v); });
        dc.each([&](u32 i, u32 j, float v) { to_c.put(i, j, v); });
    }
}

// mixed ends the gradients of B and C with the part that comes from C Bᵀ, whose gradient is
// dcb.
DEVICE void mixed(Operands &o, const Square &dcb, const Chunk &k) {
#pragma unroll 1
    for (u32 n = 0; n < k.c.state; n += TILE) {
        Tile db, dc;
        Part from_b = k.db().from(n), from_c = k.dc().from(n), bs = k.bs.from(n), cs = k.cs.from(n);
        db.each([&](u32 i, u32 j, float &v) { v = from_b.at(i, j); });
        dc.each([&](u32 i, u32 j, float &v) { v = from_c.at(i, j); });
        multiply<true, false>(
            o, dc, Q, [&](u32 i, u32 e) { return dcb[i][e]; }, [&](u32 e, u32 j) { return bs.at(e, j); });
        multiply<false, false>(
            o, db, Q, [&](u32 i, u32 e) { return dcb[e][i]; }, [&](u32 e, u32 j) { return cs.at(e, j); });
        Part to_b = bs, to_c = cs;
        to_b.m = to_c.m = k.dxbc;
        db.each([&](u32 i, u32 j, float v) { to_b.put(i, j, v); });
        dc.each([&](u32 i, u32 j, float v) { to_c.put(i, j, v); });
    }
}

// inside adds what tokens of the chunk do to each other's decays, and adds to the gradient
// of C Bᵀ.
DEVICE void inside(Steps &s, Operands &o, Sums &z, const Square &cb, const Chunk &k, u32 h, u32 w, Tile &dcb) {
    Part x = k.heads(k.c.xbc, h), dy = k.heads(k.dy, h);
    Tile t;
    t.clear();
    multiply<true, true>(
        o, t, k.c.head, [&](u32 i, u32 e) { return dy.at(i, e); }, [&](u32 e, u32 j) { return x.at(j, e) * s.dt[w][j]; });
#pragma unroll
    for (u32 r = 0; r < 4; r++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            u32 i = Tile::row(r), j = Tile::col(e);
            float v = j <= i ? t.v[r][e] * s.decay(w, i, j) : 0;
            dcb.v[r][e] += v;
            t.v[r][e] = j < i ? v * cb[i][j] : 0;
        }
    add_rows(t, z.decay, [](u32, u32, float v) { return v; });
    take_columns(z, t, z.decay);
}

// inputs computes the gradient of x, and the sums that need it.
DEVICE void inputs(Steps &s, Operands &o, Sums &z, const Square &cb, const Chunk &k, u32 h, u32 w) {
    float by = k.c.param(k.c.d, h);
#pragma unroll 1
    for (u32 p = 0; p < k.c.head; p += TILE) {
        Part x = k.heads(k.c.xbc, h).from(p), dy = k.heads(k.dy, h).from(p), dx = k.heads(k.dxbc, h).from(p);
        Tile t;
        if (k.enters()) {
            Part in = k.in(h);
            t.clear();
            multiply<true, true>(
                o, t, k.c.state, [&](u32 i, u32 e) { return k.cs.at(i, e); }, [&](u32 e, u32 j) { return in.at(p + j, e); });
            add_rows(t, z.enters, [&](u32 i, u32 j, float v) { return v * dy.at(i, j) * s.start(w, i); });
        }
        t.clear();
        if (k.leaves()) {
            Part out = k.out(h);
            multiply<true, true>(
                o, t, k.c.state, [&](u32 i, u32 e) { return k.bs.at(i, e) * s.end(w, i); }, [&](u32 e, u32 j) { return out.at(p + j, e); });
            add_rows(t, z.leaves, [&](u32 i, u32 j, float v) { return v * x.at(i, j) * s.dt[w][i]; });
        }
        multiply<false, false>(
            o, t, Q, [&](u32 i, u32 e) { return e >= i ? cb[e][i] * s.decay(w, e, i) : 0; }, [&](u32 e, u32 j) { return dy.at(e, j); });
        add_rows(t, z.x_du, [&](u32 i, u32 j, float v) { return v * x.at(i, j); });
        add_rows(t, z.dy_x, [&](u32 i, u32 j, float) { return dy.at(i, j) * x.at(i, j); });
        t.each([&](u32 i, u32 j, float v) { dx.put(i, j, v * s.dt[w][i] + by * dy.at(i, j)); });
    }
}

// through computes what passes from state to state.
DEVICE float through(const Chunk &k, u32 h) {
    if (!k.enters() || !k.leaves()) return 0;
    Part in = k.in(h), out = k.out(h);
    float sum = 0;
    Team t = teams(threads());
    t.each(k.c.head * k.c.state, [&](u32 c, u32 n) {
        float a[STEP], b[STEP];
        load(F32, in.m.base + 4ull * c, n, a);
        load(F32, out.m.base + 4ull * c, n, b);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) sum += a[e] * b[e];
    });
    return t.sum(sum);
}

// scan_sums returns the sum of the values of the lanes below and of this one.
DEVICE float scan_sums(float v) {
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
        float below = number(from_below(bits(v), d));
        if (lane() >= d) v += below;
    }
    return v;
}

// finish computes the gradients of steps and the sums for the parameters. One warp does it,
// and each lane has two tokens.
DEVICE void finish(Steps &s, Sums &z, const Chunk &k, u32 h, u32 w, float through) {
    u32 last = Q - 1 - 2 * lane(), i = 2 * lane();
    // These are the sums from the last token on.
    float two = z.decay[last] + z.enters[last], one = two + z.decay[last - 1] + z.enters[last - 1], all = scan_sums(one);
    z.behind[last] = all - one + two;
    z.behind[last - 1] = all;
    warp_barrier();
    // These are the sums up to the token before.
    float before = scan_sums(z.leaves[i] + z.leaves[i + 1]) - z.leaves[i] - z.leaves[i + 1];
    float a = k.c.a(h), da = 0, dd = 0, dbias = 0;
    Part ddt = part(k.c, k.ddt, k.b, k.chunk, h, 1);
#pragma unroll
    for (u32 e = 0; e < 2; e++) {
        float grad = z.behind[i + e] + before + through * s.all(w);
        before += z.leaves[i];
        da += grad * s.dt[w][i + e];
        dd += z.dy_x[i + e];
        grad = (z.x_du[i + e] + a * grad) * s.slope[w][i + e];
        dbias += grad;
        ddt.put(i + e, 0, grad);
    }
    da = warp_sum(da);
    dd = warp_sum(dd);
    dbias = warp_sum(dbias);
    u64 to = k.sums + 4 * (((u64)k.b * k.c.chunks + k.chunk) * 3 * k.c.heads + h);
    if (lane() != 0) return;
    set(F32, to, da * a); // a = -exp(ALog) is its own derivative
    set(F32, to + 4ull * k.c.heads, dd);
    set(F32, to + 8ull * k.c.heads, dbias);
}

// A block computes the heads of a group in a chunk. Behind the gradients of states, scratch
// has the sums for the parameters and then mix.
KERNEL(THREADS)
stowage_nn_scan_grad(u64 scratch, u64 xbc, u64 dt, u64 a_log, u64 d, u64 bias, u64 states, u64 seq, u64 heads, u64 groups, u64 pitches,
                     u64 types, u64 dy, u64 dxbc, u64 ddt, u64 more) {
    SHARED Steps s;
    SHARED Operands o;
    SHARED Square cb;
    SHARED Sums z;
    Scan c = unpack(xbc, dt, a_log, d, bias, seq, heads, groups, pitches, types);
    u64 grads = global(scratch), sums = grads + (4ull * c.batch * (c.chunks - 1) * c.heads * c.head * c.state + 15) / 16 * 16;
    u64 mix = sums + 12ull * c.batch * c.chunks * c.heads;
    constexpr u64 field = (1 << 21) - 1;
#pragma unroll 1
    for (u32 u = block(); u < c.batch * c.chunks * c.groups; u += blocks()) {
        u32 g = u % c.groups, chunk = u / c.groups % c.chunks, b = u / c.groups / c.chunks;
        Chunk k = {
            c,
            {global(dy), more & field, c.xbc.type},
            {global(dxbc), more >> 21 & field, c.xbc.type},
            {global(ddt), more >> 42 & field, c.xbc.type},
            {mix, 2ull * c.groups * c.state, F32},
            states == 0 ? 0 : global(states), grads, sums, b, chunk, g,
            part(c, c.xbc, b, chunk, c.col_b(g), c.state),
            part(c, c.xbc, b, chunk, c.col_c(g), c.state),
        };
        outside(s, o, k);
        make_cb(o, cb, k.bs, k.cs);
        Tile dcb;
        dcb.clear();
        each_head(s, c, b, chunk, g, [&](u32 h, u32 w) INLINE {
            barrier();
            if (thread() < Q) z.decay[thread()] = z.enters[thread()] = z.leaves[thread()] = z.x_du[thread()] = z.dy_x[thread()] = 0;
            inside(s, o, z, cb, k, h, w, dcb);
            inputs(s, o, z, cb, k, h, w);
            float past = through(k, h);
            barrier();
            if (warp() == 0) finish(s, z, k, h, w, past);
        });
        dcb.each([&](u32 i, u32 j, float v) { cb[i][j] = v; });
        barrier();
        mixed(o, cb, k);
    }
}

// A thread sums up one number.
KERNEL(THREADS)
stowage_nn_scan_grad_sum(u64 a_log, u64 d, u64 bias, u64 sums, u64 chunks, u64 heads, u64 type) {
    add_chunks(a_log, d, bias, sums, (u32)chunks, (u32)heads, (u32)type);
}
