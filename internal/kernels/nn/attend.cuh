// The kernels of attention, for any shape of tiles. Forward, a block owns queries of
// a head and walks over the keys that they see, with the usual running maximum and
// sum of a row. Backward, one kernel makes the sums of O * DO along rows; one owns
// keys and values and walks over the queries that see them, head after head of those
// that share them; one owns queries and walks over keys. Scores are computed in both,
// so that every result is a sum of one block in order: no atomics, and the same bits
// each time.

#pragma once

#include "attention.cuh"

#define NONE number(0xff800000) // the score of a key that is not seen: minus infinity

// mask removes the scores of own row first + i and passing row at + i that do not belong
// together. If flipped is set, keys own and queries pass.
template <class S, bool flipped>
DEVICE void mask(float s[S::high][S::step / 8][4], const Work &w, u32 first, u32 at, float none) {
    u32 row = first + lane() / 4, col = at + lane() % 4 * 2;
#pragma unroll
    for (u32 i = 0; i < S::high; i++) {
#pragma unroll
        for (u32 n = 0; n < S::step / 8; n++) {
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                u32 r = row + 16 * i + e / 2 * 8, c = col + 8 * n + e % 2;
                if (!(flipped ? w.sees(c, r) : w.sees(r, c))) s[i][n][e] = none;
            }
        }
    }
}

// whole reports whether all of n queries see all of k keys.
DEVICE bool whole(const Work &w, u32 query, u32 n, u32 key, u32 k) {
    return key + k - 1 <= query && query + n <= w.seq && query + n - 1 - key < w.window;
}

DEVICE float four(float v, bool sum) {
#pragma unroll
    for (u32 d = 1; d < 4; d *= 2) {
        float other = number(across(bits(v), d));
        v = sum ? v + other : other > v ? other : v;
    }
    return v;
}

// Rows has the running maxima and sums of a lane's rows.
template <u32 n> struct Rows {
    float most[n], sum[n];
};

// soften turns scores into weights relative to the maximum so far, and scales earlier sums
// to the new maximum.
template <class S>
DEVICE void soften(float s[S::high][S::step / 8][4], float o[S::high][S::values / 8][4], Rows<2 * S::high> &rows, float factor) {
#pragma unroll
    for (u32 i = 0; i < 2 * S::high; i++) {
        constexpr u32 parts = S::step / 8;
        float most = rows.most[i];
#pragma unroll
        for (u32 n = 0; n < parts; n++) {
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
                float x = s[i / 2][n][i % 2 * 2 + e];
                most = x > most ? x : most;
            }
        }
        most = four(most, false);
        // A row that has seen no key yet has no maximum.
        float base = most == NONE ? 0 : most * factor;
        float shrink = power(rows.most[i] * factor - base), sum = rows.sum[i] * shrink;
        rows.most[i] = most;
#pragma unroll
        for (u32 n = 0; n < parts; n++) {
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
                float &x = s[i / 2][n][i % 2 * 2 + e];
                x = power(x * factor - base);
                sum += x;
            }
        }
        rows.sum[i] = sum;
#pragma unroll
        for (u32 n = 0; n < S::values / 8; n++) {
            o[i / 2][n][i % 2 * 2] *= shrink;
            o[i / 2][n][i % 2 * 2 + 1] *= shrink;
        }
    }
}

// attend computes a tile of queries of a head.
template <class S> DEVICE void attend(const Work &w, u32 sequence, u32 head, u32 query) {
    u8 *own = pool, *stages = pool + S::rows * S::keys * S::size;
    u32 kv = head / (w.heads / w.kv_heads), row = warp() * 16 * S::high;
    u32 there = least(w.seq - query, S::rows), end = query + there;
    u64 from = (u64)sequence * w.seq;
    u32 at = query + 1 > w.window ? (query + 1 - w.window) / S::step * S::step : 0;
    auto next = [&](u32 key, u32 number) {
        u8 *stage = stages + number % S::stages * S::stage;
        bring_tile<S, S::step, S::keys>(stage, w.k, from + key, w.seq - key, kv * w.keys, w.keys);
        stage += S::step * S::keys * S::size;
        bring_tile<S, S::step, S::values>(stage, w.v, from + key, w.seq - key, kv * w.values, w.values);
    };
    float o[S::high][S::values / 8][4] = {};
    Rows<2 * S::high> rows;
#pragma unroll
    for (u32 i = 0; i < 2 * S::high; i++) rows.most[i] = NONE, rows.sum[i] = 0;
    float factor = w.scale * LOG2E;
    barrier(); // the tile before has been stored
    bring_tile<S, S::rows, S::keys>(own, w.q, from + query, there, head * w.keys, w.keys);
    next(at, 0);
    seal();
#pragma unroll 1
    for (u32 n = 0; at < end; at += S::step, n++) {
        if (at + S::step < end) next(at + S::step, n + 1);
        seal();
        arrived<1>();
        barrier();
        const u8 *stage = stages + n % S::stages * S::stage;
        float s[S::high][S::step / 8][4] = {};
        scores<S, S::keys>(s, own, row, stage);
        if (!whole(w, query, S::rows, at, S::step)) mask<S, false>(s, w, query + row, at, NONE);
        soften<S>(s, o, rows, factor);
        apply<S, S::values>(o, s, stage + S::step * S::keys * S::size);
        barrier();
    }
#pragma unroll
    for (u32 i = 0; i < 2 * S::high; i++) {
        float sum = four(rows.sum[i], true), over = 1 / sum;
        u32 q = query + row + 8 * i + lane() / 4;
        float lse = rows.most[i] * w.scale + natural_log(sum);
        if (lane() % 4 == 0 && q < w.seq) write(w.row(w.lse, sequence, head, q), bits(lse));
#pragma unroll
        for (u32 n = 0; n < S::values / 8; n++) {
            o[i / 2][n][i % 2 * 2] *= over;
            o[i / 2][n][i % 2 * 2 + 1] *= over;
        }
    }
    deliver<S, S::values>(pool, o, row, w.o, from + query, there, head * w.values, w.values);
}

// forward computes the tiles with most keys first, so that short ones fill the gaps at the
// end.
template <class S> DEVICE void forward(const Work &w) {
    static_assert(S::stages == 2, "what comes next is under way while scores are computed");
    if (w.keys > S::keys || w.values > S::values) trap();
    need(largest(S::rows * S::keys * S::size + S::stages * S::stage, S::rows * S::values * S::size));
    u32 tiles = (w.seq + S::rows - 1) / S::rows, each = w.batch * w.heads;
#pragma unroll 1
    for (u64 t = block(); t < (u64)tiles * each; t += blocks()) {
        u32 head = (u32)(t % each);
        attend<S>(w, head / w.heads, head % w.heads, (tiles - 1 - (u32)(t / each)) * S::rows);
    }
}

// delta has a warp for each row of a head.
DEVICE void delta(const Work &w) {
    u64 count = (u64)w.batch * w.seq * w.heads;
#pragma unroll 1
    for (u64 i = (u64)block() * warps() + warp(); i < count; i += (u64)blocks() * warps()) {
        u64 token = i / w.heads;
        u32 head = (u32)(i % w.heads);
        float sum = 0, x[STEP], y[STEP];
#pragma unroll 1
        for (u32 c = lane() * STEP; c < w.values; c += 32 * STEP) {
            u32 n = least(STEP, w.values - c);
            load(w.o.type, w.o.at(token, head * w.values + c), n, x);
            load(w.d_o.type, w.d_o.at(token, head * w.values + c), n, y);
#pragma unroll
            for (u32 e = 0; e < STEP; e++) sum += x[e] * y[e];
        }
        sum = warp_sum(sum);
        if (lane() == 0) write(w.row(w.delta, (u32)(token / w.seq), head, (u32)(token % w.seq)), bits(sum));
    }
}

// Want says which gradients a block makes.
enum Want { QUERIES = 1, KEYS = 2, VALUES = 4 };

// Passage is what passes by the own rows of a block, in steps. Keys and values pass by
// queries. If flipped is set, queries, output gradients and their LSE and delta pass by
// keys, for all heads of queries that share the head of keys, one after the other.
template <class S, bool flipped> struct Passage {
    static constexpr u32 half = S::step * S::keys * S::size; // of a stage
    const Work &w;
    u32 sequence, head, begin, steps, count;
    u8 *stages;
    float *notes;

    DEVICE Passage(const Work &w, u8 *pool, u32 sequence, u32 head, u32 first) : w(w), sequence(sequence), head(head) {
        stages = pool;
        notes = (float *)(pool + S::stages * S::stage);
        u32 end;
        if (flipped) {
            begin = first;
            end = w.window < w.seq - first ? least(w.seq, first + S::rows - 1 + w.window) : w.seq;
        } else {
            begin = first + 1 > w.window ? (first + 1 - w.window) / S::step * S::step : 0;
            end = least(w.seq, first + S::rows);
        }
        steps = (end - begin + S::step - 1) / S::step;
        count = flipped ? steps * (w.heads / w.kv_heads) : steps;
    }

    DEVICE u32 at(u32 n) const { return begin + n % steps * S::step; }
    DEVICE u8 *stage(u32 n) const { return stages + n % S::stages * S::stage; }
    DEVICE float *note(u32 n) const { return notes + n % S::stages * 2 * S::step; }

    DEVICE void bring(u32 n) const {
        u32 first = at(n), left = w.seq - first;
        u32 group = w.heads / w.kv_heads, query = head * group + n / steps, kv = head / group;
        u64 row = (u64)sequence * w.seq + first;
        if (flipped) {
            bring_tile<S, S::step, S::keys>(stage(n), w.q, row, left, query * w.keys, w.keys);
            bring_tile<S, S::step, S::values>(stage(n) + half, w.d_o, row, left, query * w.values, w.values);
            bring_row<S>(note(n), w.row(w.lse, sequence, query, first), left);
            bring_row<S>(note(n) + S::step, w.row(w.delta, sequence, query, first), left);
        } else {
            bring_tile<S, S::step, S::keys>(stage(n), w.k, row, left, kv * w.keys, w.keys);
            bring_tile<S, S::step, S::values>(stage(n) + half, w.v, row, left, kv * w.values, w.values);
        }
    }
};

// each calls f(i, r, c) for the numbers of a lane: p[i / 4][i % 4] belongs to its row
// r of two, and to column c of the tile.
template <class S, class F> DEVICE void each(F f) {
    u32 c = lane() % 4 * 2;
#pragma unroll
    for (u32 i = 0; i < S::step / 2; i++) f(i, i / 2 % 2, c + i / 4 * 8 + i % 2);
}

// gradients computes a tile of own rows: queries and output gradients of a head if QUERIES
// is wanted, otherwise keys and values.
template <class S, u32 want> DEVICE void gradients(const Work &w, u32 sequence, u32 head, u32 first) {
    constexpr bool flipped = want != QUERIES;
    u8 *own = pool, *other = own + S::rows * S::keys * S::size, *stages = other + S::rows * S::values * S::size;
    Passage<S, flipped> passage(w, stages, sequence, head, first);
    u32 row = warp() * 16, there = least(w.seq - first, S::rows);
    u64 from = (u64)sequence * w.seq + first;
    float d1[1][S::keys / 8][4] = {}, d2[1][S::values / 8][4] = {}, lse[2] = {}, delta[2] = {};
    barrier(); // the tile before has been stored
    bring_tile<S, S::rows, S::keys>(own, flipped ? w.k : w.q, from, there, head * w.keys, w.keys);
    bring_tile<S, S::rows, S::values>(other, flipped ? w.v : w.d_o, from, there, head * w.values, w.values);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 q = first + row + 8 * i + lane() / 4;
        if (flipped || q >= w.seq) continue;
        lse[i] = number(read<u32>(w.row(w.lse, sequence, head, q)));
        delta[i] = number(read<u32>(w.row(w.delta, sequence, head, q)));
    }
    passage.bring(0);
    seal();
#pragma unroll 1
    for (u32 n = 0; n < passage.count; n++) {
        if (S::stages > 1 && n + 1 < passage.count) passage.bring(n + 1);
        seal();
        arrived<S::stages - 1>();
        barrier();
        const u8 *stage = passage.stage(n);
        const float *note = passage.note(n);
        u32 at = passage.at(n);
        float p[1][S::step / 8][4] = {}, s[1][S::step / 8][4] = {};
        scores<S, S::keys>(p, own, row, stage);
        each<S>([&](u32 i, u32 r, u32 c) {
            float &x = p[0][i / 4][i % 4];
            x = power(x * (w.scale * LOG2E) - (flipped ? note[c] : lse[r]) * LOG2E);
        });
        bool all = flipped ? whole(w, at, S::step, first, S::rows) : whole(w, first, S::rows, at, S::step);
        if (!all) mask<S, flipped>(p, w, first + row, at, 0);
        if constexpr ((want & VALUES) != 0) apply<S, S::values>(d2, p, stage + passage.half);
        if constexpr (want != VALUES) {
            scores<S, S::values>(s, other, row, stage + passage.half);
            each<S>([&](u32 i, u32 r, u32 c) {
                float &x = s[0][i / 4][i % 4];
                x = p[0][i / 4][i % 4] * (x - (flipped ? note[S::step + c] : delta[r])) * w.scale;
            });
            apply<S, S::keys>(d1, s, stage);
        }
        barrier();
        if (S::stages == 1 && n + 1 < passage.count) passage.bring(n + 1);
    }
    const Matrix &to = flipped ? w.dk : w.dq;
    if constexpr (want != VALUES) deliver<S, S::keys>(own, d1, row, to, from, there, head * w.keys, w.keys);
    if constexpr ((want & VALUES) != 0) deliver<S, S::values>(other, d2, row, w.dv, from, there, head * w.values, w.values);
}

// backward computes the own rows with most passing ones first. If the gradients of keys and
// values do not fit into registers together, split is set, and two blocks compute one of
// them each.
template <class S, bool queries, bool split> DEVICE void backward(const Work &w) {
    static_assert(S::high == 1, "a warp has 16 rows");
    if (w.keys > S::keys || w.values > S::values) trap();
    need(S::rows * (S::keys + S::values) * S::size + S::stages * (S::stage + 2 * S::step * 4));
    u32 tiles = (w.seq + S::rows - 1) / S::rows, heads = queries ? w.heads : w.kv_heads;
    u32 each = w.batch * heads * (split ? 2 : 1);
#pragma unroll 1
    for (u64 t = block(); t < (u64)tiles * each; t += blocks()) {
        u32 number = (u32)(t / each), head = (u32)(t % each) / (split ? 2 : 1);
        u32 first = (queries ? tiles - 1 - number : number) * S::rows;
        if constexpr (queries) gradients<S, QUERIES>(w, head / heads, head % heads, first);
        else if constexpr (!split) gradients<S, KEYS | VALUES>(w, head / heads, head % heads, first);
        else if (t % 2 == 0) gradients<S, KEYS>(w, head / heads, head % heads, first);
        else gradients<S, VALUES>(w, head / heads, head % heads, first);
    }
}

DEVICE Matrix matrix(u64 base, u64 pitches, u32 number, u32 type) {
    return {global(base), pitches >> 21 * number & 0x1fffff, type};
}

#define FORWARD u64 q, u64 k, u64 v, u64 o, u64 lse, u64 tokens, u64 heads, u64 how, u64 pitches, u64 pitches2
#define BACKWARD FORWARD, u64 pitches3, u64 d_o, u64 dq, u64 dk, u64 dv, u64 delta_

DEVICE Work work(FORWARD) {
    Work w = {};
    u32 type = (u32)(pitches2 >> 63);
    w.q = matrix(q, pitches, 0, type);
    w.k = matrix(k, pitches, 1, type);
    w.v = matrix(v, pitches, 2, type);
    w.o = matrix(o, pitches2, 0, type);
    w.lse = global(lse);
    w.batch = (u32)tokens;
    w.seq = (u32)(tokens >> 32);
    w.heads = (u32)heads & 0xffff;
    w.kv_heads = (u32)heads >> 16;
    w.keys = (u32)(heads >> 32) & 0xffff;
    w.values = (u32)(heads >> 48);
    w.window = (u32)how == 0 ? w.seq : (u32)how;
    w.scale = number((u32)(how >> 32));
    return w;
}

DEVICE Work work(BACKWARD) {
    Work w = work(q, k, v, o, lse, tokens, heads, how, pitches, pitches2);
    w.d_o = matrix(d_o, pitches2, 1, w.q.type);
    w.dq = matrix(dq, pitches2, 2, w.q.type);
    w.dk = matrix(dk, pitches3, 0, w.q.type);
    w.dv = matrix(dv, pitches3, 1, w.q.type);
    w.delta = global(delta_);
    return w;
}

#define ATTEND(name, S) \
    KERNEL(S::threads) name(FORWARD) { forward<S>(work(q, k, v, o, lse, tokens, heads, how, pitches, pitches2)); }

#define GRAD(name, S, queries, split)                                                                               \
    KERNEL(S::threads) name(BACKWARD) {                                                                             \
        backward<S, queries, split>(work(q, k, v, o, lse, tokens, heads, how, pitches, pitches2, pitches3, d_o, dq, \
                                         dk, dv, delta_));                                                          \
    }

#define DELTA(name)                                                                                                \
    KERNEL(128) name(BACKWARD) {                                                                                   \
        delta(work(q, k, v, o, lse, tokens, heads, how, pitches, pitches2, pitches3, d_o, dq, dk, dv, delta_));    \
    }
