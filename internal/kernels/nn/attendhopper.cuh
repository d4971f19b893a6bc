// Attention for Hopper: products by warpgroups from shared memory (wgmma), tiles brought by
// the copy engine (TMA). attendgradhopper.cuh has the backward pass.
//
// Forward, a block has a warpgroup that loads and others that compute, each with 64 queries
// of a head. A block takes tiles of queries in pairs, one with many keys and one with few,
// so that all pairs are equally long. Warpgroups take turns at the tensor cores: while one
// of them multiplies, another one computes exponentials. In a warpgroup the scores of the
// next keys are computed while the weights of the last ones are applied.

#pragma once

#include "attend.cuh"
#include "hopper.cuh"

// Wide is the work of a block of the forward pass: teams warpgroups of 64 queries, and step
// keys at a time in stages. If lazy is set, sums are scaled only if a maximum has changed,
// which gains where there is little to multiply.
template <u32 keys_, u32 values_, u32 teams_, u32 step_, u32 stages_, bool lazy_> struct Wide {
    static constexpr bool lazy = lazy_;
    static constexpr u32 keys = keys_, values = values_, teams = teams_, step = step_, stages = stages_;
    static constexpr u32 rows = 64 * teams, threads = 128 * (teams + 1);
    static constexpr u32 q = 0, k = q + rows * keys * 2, v = k + stages * step * keys * 2, bars = v + stages * step * values * 2;
    static constexpr u32 room = bars + 8 * (2 + 4 * stages);
    // Registers of a thread that loads, and of one that computes.
    static constexpr u32 few = teams == 2 ? 24 : 32, many = teams == 2 ? 240 : 160;
};

// Tensors are columns of 64 numbers, one below the other: that is how the copy engine puts
// them. A row is 128 bytes, and eight rows are a pattern.
#define COLUMN(rows) ((rows) * 128)

DEVICE float max2(float a, float b) { return __builtin_fmaxf(a, b); }

// Ring counts the stages of a ring of buffers.
template <u32 stages> struct Ring {
    u32 at = 0, turn = 0;
    DEVICE void next() {
        if (++at == stages) at = 0, turn ^= 1;
    }
};

// Span is the keys that a tile of queries sees, in steps: from first on, count of them.
struct Span {
    u32 first, count;
    template <class F> DEVICE static Span of(const Work &w, u32 query) {
        u32 from = query + 1 > w.window ? (query + 1 - w.window) / F::step : 0;
        u32 end = least(w.seq, query + F::rows);
        return {from, (end + F::step - 1) / F::step - from};
    }
};

// Tiles enumerates the tiles of a block: of each head the pairs of the i-th last and the
// i-th tile.
template <u32 rows> struct Tiles {
    const Work &w;
    u32 tiles, pairs;
    u64 pair, all;
    bool second = false;
    DEVICE Tiles(const Work &w) : w(w) {
        tiles = (w.seq + rows - 1) / rows;
        pairs = (tiles + 1) / 2;
        pair = block();
        all = (u64)pairs * w.batch * w.heads;
    }
    DEVICE bool there() const { return pair < all; }
    DEVICE u32 head() const { return (u32)(pair / pairs); }
    DEVICE u32 query() const {
        u32 i = (u32)(pair % pairs);
        return (second ? i : tiles - 1 - i) * rows;
    }
    DEVICE void next() {
        u32 i = (u32)(pair % pairs);
        if (!second && i != tiles - 1 - i) {
            second = true;
            return;
        }
        second = false;
        pair += blocks();
    }
};

// begin_scores begins s = q kᵀ.
template <class F> DEVICE void begin_scores(float *s, u32 q, u32 k) {
    pin<F::step / 2>(s);
    wgmma_fence();
#pragma unroll
    for (u32 d = 0; d < F::keys; d += 16) {
        u64 a = smem_desc(q + d / 64 * COLUMN(F::rows) + d % 64 * 2, 16, 1024);
        u64 b = smem_desc(k + d / 64 * COLUMN(F::step) + d % 64 * 2, 16, 1024);
        wgmma_ss<F::step, false, false>(s, a, b, d > 0);
    }
    wgmma_commit();
}

// begin_apply begins o += p v.
template <class F> DEVICE void begin_apply(float *o, u32 *p, u32 v) {
    pin<F::values / 2>(o);
    pin<F::step / 4>(p);
    wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < F::step; k += 16) {
        wgmma_rs<F::values, true>(o, p + k / 4, smem_desc(v + k * 128, COLUMN(F::step), 1024), 1);
    }
    wgmma_commit();
}

// Soft has the maxima and sums of the two rows of a lane.
struct Soft {
    float most[2], sum[2], shrink[2];
};

// weigh turns scores into weights relative to the largest score of a row so far.
template <u32 n> DEVICE void weigh(float *s, Soft &soft, float factor) {
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        float m[4] = {soft.most[i], s[2 * i], s[2 * i + 1], s[4 + 2 * i]};
        m[0] = max2(m[0], s[4 + 2 * i + 1]);
#pragma unroll
        for (u32 c = 2; c < n / 8; c++) {
            m[c % 2 * 2] = max2(m[c % 2 * 2], s[4 * c + 2 * i]);
            m[c % 2 * 2 + 1] = max2(m[c % 2 * 2 + 1], s[4 * c + 2 * i + 1]);
        }
        float most = four(max2(max2(m[0], m[1]), max2(m[2], m[3])), false);
        float base = most == NONE ? 0 : most * factor; // a row may have seen no key yet
        soft.shrink[i] = power(soft.most[i] * factor - base);
        soft.most[i] = most;
        float sum[2] = {soft.sum[i] * soft.shrink[i], 0};
#pragma unroll
        for (u32 c = 0; c < n / 8; c++) {
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
                float &x = s[4 * c + 2 * i + e];
                x = power(__builtin_fmaf(x, factor, -base));
                sum[e] += x;
            }
        }
        soft.sum[i] = sum[0] + sum[1];
    }
}

template <u32 n> DEVICE void round_to(u32 *p, const float *s) {
#pragma unroll
    for (u32 i = 0; i < n / 4; i++) p[i] = pair(s[2 * i], s[2 * i + 1]);
}

template <u32 n> DEVICE void rescale(float *o, const Soft &soft) {
#pragma unroll
    for (u32 i = 0; i < n / 2; i++) o[i] *= soft.shrink[i / 2 % 2];
}

// hide removes the scores of keys from key on that queries from query on do not see.
template <u32 n> DEVICE void hide(float *s, const Work &w, u32 query, u32 key) {
    u32 r = query + warp() % 4 * 16 + lane() / 4, c = key + lane() % 4 * 2;
#pragma unroll
    for (u32 i = 0; i < n / 2; i++) {
        u32 q = r + i / 2 % 2 * 8, k = c + i / 4 * 8 + i % 2;
        if (!(k <= q && q - k < w.window)) s[i] = NONE;
    }
}

template <class F> DEVICE void load_tile(u32 dst, u64 map, u32 bar, u32 rows, u32 width, u32 col, u32 row) {
#pragma unroll
    for (u32 d = 0; d < width; d += 64) tma_load(dst + d / 64 * COLUMN(rows), map, bar, col + d, row);
}

// Bars are the barriers: a tile has come, or is free again.
template <class F> struct Bars {
    u32 q, q_free, k, k_free, v, v_free;
    DEVICE Bars(u32 at) : q(at), q_free(at + 8), k(at + 16), k_free(k + 8 * F::stages), v(k_free + 8 * F::stages), v_free(v + 8 * F::stages) {}
};

template <class F> DEVICE void bring_all(const Work &w, u32 base, u64 map_q, u64 map_k, u64 map_v) {
    Bars<F> bars(base + F::bars);
    Ring<F::stages> k, v;
    u32 turn = 1;
    for (Tiles<F::rows> t(w); t.there(); t.next(), turn ^= 1) {
        u32 head = t.head() % w.heads, from = t.head() / w.heads * w.seq, kv = head / (w.heads / w.kv_heads);
        Span span = Span::of<F>(w, t.query());
        auto bring_k = [&](u32 n) {
            mbar_wait(bars.k_free + 8 * k.at, k.turn ^ 1);
            mbar_expect(bars.k + 8 * k.at, F::step * F::keys * 2);
            load_tile<F>(base + F::k + k.at * F::step * F::keys * 2, map_k, bars.k + 8 * k.at, F::step, F::keys, kv * F::keys, from + (span.first + n) * F::step);
            k.next();
        };
        auto bring_v = [&](u32 n) {
            mbar_wait(bars.v_free + 8 * v.at, v.turn ^ 1);
            mbar_expect(bars.v + 8 * v.at, F::step * F::values * 2);
            load_tile<F>(base + F::v + v.at * F::step * F::values * 2, map_v, bars.v + 8 * v.at, F::step, F::values, kv * F::values, from + (span.first + n) * F::step);
            v.next();
        };
        mbar_wait(bars.q_free, turn);
        mbar_expect(bars.q, F::rows * F::keys * 2);
        load_tile<F>(base + F::q, map_q, bars.q, F::rows, F::keys, head * F::keys, from + t.query());
        bring_k(span.count - 1);
#pragma unroll 1
        for (u32 n = span.count - 1; n > 0; n--) {
            bring_k(n - 1);
            bring_v(n);
        }
        bring_v(0);
    }
}

// store_rows writes this warp's 16 rows of results, through its part of shared memory at
// base, of which columns of 64 numbers lie apart.
template <u32 width> DEVICE void store_rows(u8 *base, u32 apart, const float *x, const float *by, const Matrix &m, u64 row, u32 there, u32 col) {
    u32 l = lane();
#pragma unroll
    for (u32 i = 0; i < width / 4; i++) {
        u32 r = l / 4 + i % 2 * 8, c = i / 2;
        *(u32 *)(base + c / 8 * apart + r * 128 + ((c % 8 ^ (r & 7)) << 4) + l % 4 * 4) = pair(x[2 * i] * by[i % 2], x[2 * i + 1] * by[i % 2]);
    }
    warp_barrier();
    constexpr u32 vectors = width / 8;
#pragma unroll
    for (u32 i = 0; i < vectors / 2; i++) {
        u32 r = (i * 32 + l) / vectors, c = (i * 32 + l) % vectors;
        Vec v = *(const Vec *)(base + c / 8 * apart + r * 128 + ((c % 8 ^ (r & 7)) << 4));
        if (r < there) write(m.at(row + r, col + 8 * c), v);
    }
}

template <class F> DEVICE void attend_tiles(const Work &w, u8 *pool_, u32 base) {
    u32 team = warp() / 4;
    Bars<F> bars(base + F::bars);
    Ring<F::stages> k, v;
    u32 turn = 0, mine = 1 + team, other = 1 + (team + 1) % F::teams;
    float factor = w.scale * LOG2E;
    bool first = lane() == 0;
    if (team == 0) barrier_arrive(1, 256);
    // The last warpgroup passes the turn to the first.
    for (Tiles<F::rows> t(w); t.there(); t.next(), turn ^= 1) {
        u32 head = t.head() % w.heads, sequence = t.head() / w.heads, query = t.query() + 64 * team;
        Span span = Span::of<F>(w, t.query());
        float s[F::step / 2], o[F::values / 2];
        u32 p[F::step / 4];
        Soft soft = {{NONE, NONE}, {0, 0}, {0, 0}};
        u32 q = base + F::q + 64 * 128 * team;
        mbar_wait(bars.q, turn);
        mbar_wait(bars.k + 8 * k.at, k.turn);
#pragma unroll
        for (u32 i = 0; i < F::values / 2; i++) o[i] = 0;
#pragma unroll
        for (u32 i = 0; i < F::step / 2; i++) s[i] = 0;
        begin_scores<F>(s, q, base + F::k + k.at * F::step * F::keys * 2);
        wgmma_wait<0>();
        pin<F::step / 2>(s);
        if (first) mbar_arrive(bars.k_free + 8 * k.at);
        k.next();
        u32 n = span.count - 1;
        hide<F::step>(s, w, query, (span.first + n) * F::step);
        weigh<F::step>(s, soft, factor);
        round_to<F::step>(p, s);
        auto step = [&](bool masked) INLINE {
            mbar_wait(bars.k + 8 * k.at, k.turn);
            barrier(mine, 256);
            begin_scores<F>(s, q, base + F::k + k.at * F::step * F::keys * 2);
            mbar_wait(bars.v + 8 * v.at, v.turn);
            begin_apply<F>(o, p, base + F::v + v.at * F::step * F::values * 2);
            barrier_arrive(other, 256);
            wgmma_wait<1>();
            pin<F::step / 2>(s);
            if (first) mbar_arrive(bars.k_free + 8 * k.at);
            k.next();
            if (masked) hide<F::step>(s, w, query, (span.first + n) * F::step);
            weigh<F::step>(s, soft, factor);
            wgmma_wait<0>();
            pin<F::values / 2>(o);
            if (first) mbar_arrive(bars.v_free + 8 * v.at);
            v.next();
            round_to<F::step>(p, s);
            if (!F::lazy || ballot(soft.shrink[0] != 1 || soft.shrink[1] != 1) != 0) rescale<F::values>(o, soft);
        };
        // The first steps have keys after the first query, the last ones keys before the
        // window of the last.
        auto masked = [&](u32 n) {
            u32 key = (span.first + n) * F::step;
            return key + F::step - 1 > t.query() || t.query() + F::rows - 1 - key >= w.window;
        };
        while (n > 0 && masked(n - 1)) n--, step(true);
        while (n > 0 && !masked(n - 1)) n--, step(false);
        while (n > 0) n--, step(true);
        mbar_wait(bars.v + 8 * v.at, v.turn);
        begin_apply<F>(o, p, base + F::v + v.at * F::step * F::values * 2);
        float over[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            float sum = four(soft.sum[i], true);
            over[i] = 1 / sum;
            u32 row = query + warp() % 4 * 16 + 8 * i + lane() / 4;
            float lse = soft.most[i] * w.scale + natural_log(sum);
            if (lane() % 4 == 0 && row < w.seq) write(w.row(w.lse, sequence, head, row), bits(lse));
        }
        wgmma_wait<0>();
        pin<F::values / 2>(o);
        if (first) mbar_arrive(bars.v_free + 8 * v.at);
        v.next();
        u32 row = query + warp() % 4 * 16;
        u8 *own = pool_ + F::q + 64 * 128 * team + warp() % 4 * 16 * 128;
        store_rows<F::values>(own, COLUMN(F::rows), o, over, w.o, (u64)sequence * w.seq + row, row < w.seq ? w.seq - row : 0, head * F::values);
        fence_async();
        warp_barrier();
        if (first) mbar_arrive(bars.q_free);
    }
}

// attend_wide is the forward pass.
template <class F> DEVICE void attend_wide(const Work &w, u64 map_q, u64 map_k, u64 map_v) {
    u32 at = spot(pool), base = (at + 1023) / 1024 * 1024;
    need(F::room + 1024);
    Bars<F> bars(base + F::bars);
    if (thread() == 0) {
        mbar_init(bars.q, 1);
        mbar_init(bars.q_free, 4 * F::teams);
#pragma unroll
        for (u32 i = 0; i < F::stages; i++) {
            mbar_init(bars.k + 8 * i, 1);
            mbar_init(bars.k_free + 8 * i, 4 * F::teams);
            mbar_init(bars.v + 8 * i, 1);
            mbar_init(bars.v_free + 8 * i, 4 * F::teams);
        }
        fence_mbar_init();
    }
    barrier();
    if (warp() / 4 == F::teams) {
        registers_less<F::few>();
        if (thread() == 128 * F::teams) bring_all<F>(w, base, map_q, map_k, map_v);
        return;
    }
    registers_more<F::many>();
    attend_tiles<F>(w, pool + (base - at), base);
}
