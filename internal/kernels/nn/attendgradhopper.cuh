// The backward pass of attention for Hopper. A block owns 128 keys of a head of keys, and
// walks over the queries that see them, of each step all heads of queries that share the
// keys. Two warpgroups have 64 keys each and compute the scores crosswise, keys by queries,
// so that weights and their gradients are in registers as the products for the gradients of
// keys and values need them. They exchange the gradients of scores through shared memory
// for the gradient of queries.
//
// That gradient is a sum over blocks. They add to a matrix in memory one after the other,
// and a count for each tile of queries says whose turn it is. To wait
// for the turn, to add and to tell the next block takes about as long as a step, so two
// threads of a block do it, each for every other step. If there are few blocks, several of
// them share the heads of queries of a tile of keys, and add up the gradients of keys and
// values in order in the same way. So sums have one order for each shape, whatever the
// timing.

#pragma once

#include "attendhopper.cuh"

// Deep is the work of a block of the backward pass: 128 keys, step queries at a time in two
// stages. Shared memory has scores places for gradients of scores and places for those of
// queries. If both is set, there are registers for scores and gradients of weights at once.
// If lean is set, no address stays in a register from step to step.
template <u32 keys_, u32 values_, u32 step_, u32 scores_, u32 places_, bool both_, bool lean_> struct Deep {
    static constexpr bool both = both_, lean = lean_;
    static constexpr u32 keys = keys_, values = values_, step = step_, stages = 2, rows = 128, threads = 384;
    static constexpr u32 scores = scores_, places = places_;
    static constexpr u32 k = 0, v = k + rows * keys * 2, q = v + rows * values * 2, d_o = q + stages * step * keys * 2;
    static constexpr u32 ds = d_o + stages * step * values * 2, dq = ds + scores * rows * step * 2;
    static constexpr u32 notes = dq + places * step * keys * 4, bars = notes + stages * step * 8, room = bars + 8 * 20;
    static constexpr u32 part = step * keys / 256; // numbers of the gradient of queries of a thread
};

// Scratch is what the backward pass keeps in memory behind delta: the gradient of queries in the order
// of registers, counts, and the gradients of keys and values of blocks that share them.
template <class G> struct Scratch {
    u64 dq, turns, shares, dkv;
    u32 steps, tiles;
    DEVICE Scratch(const Work &w) {
        steps = (w.seq + G::step - 1) / G::step;
        tiles = (w.seq + G::rows - 1) / G::rows;
        dq = w.delta + ((u64)w.batch * w.heads * w.seq * 4 + 127) / 128 * 128;
        turns = dq + (u64)w.batch * w.heads * steps * G::step * G::keys * 4;
        shares = turns + (u64)w.batch * w.heads * steps * 4;
        dkv = turns + ((u64)w.batch * (w.heads * steps + w.kv_heads * tiles) * 4 + 127) / 128 * 128;
    }
};

#ifndef LATE_BLOCKS
#define LATE_BLOCKS 264 // two for each multiprocessor
#define LATE_HEADS 16   // with more of them, their queries come from memory for each tile of keys
#endif

// Part is what a block does: some heads of queries, the members, of a tile of keys. Blocks of
// a head of keys follow each other from the last keys on, and begin with the first query that
// sees their keys. So a block is a step behind the one before it and rarely waits, but the
// longest blocks come last. For the last heads it is the other way round: the first keys of
// LATE_HEADS of them come first, and a block begins with the last query. All blocks with
// several members do that: they use the same queries at about the same time then, while all
// queries of all members do not fit into L2. A block waits for those with a lower number
// alone.
struct Part {
    u32 sequence, head, kv, group, groups, tile, begin, steps, members, count;
    bool back;
    template <class G> DEVICE static Part of(const Work &w) {
        u32 tiles = (w.seq + G::rows - 1) / G::rows, each = w.heads / w.kv_heads, heads = w.batch * w.kv_heads;
        Part p;
        p.groups = blocks() / (heads * tiles);
        p.members = each / p.groups;
        u32 late = p.members > 1 ? heads : least(heads, (LATE_BLOCKS + tiles * p.groups - 1) / (tiles * p.groups));
        u32 t = block() / p.groups, head = t / tiles, early = heads - late;
        p.group = block() % p.groups;
        p.tile = tiles - 1 - t % tiles;
        p.back = head >= early;
        if (p.back) {
            t -= early * tiles;
            u32 set = t / (LATE_HEADS * tiles) * LATE_HEADS, of = least(late - set, (u32)LATE_HEADS);
            t -= set * tiles;
            head = early + set + t % of;
            p.tile = t / of;
        }
        p.sequence = head / w.kv_heads;
        p.kv = head % w.kv_heads;
        p.head = p.kv * each + p.group * p.members;
        u32 first = p.tile * G::rows, end = w.window < w.seq - first ? least(w.seq, first + G::rows - 1 + w.window) : w.seq;
        p.begin = first / G::step;
        p.steps = (end + G::step - 1) / G::step - p.begin;
        p.count = p.steps * p.members;
        return p;
    }
    // before returns how many blocks add to the gradient of the queries of a step before this one.
    template <class G> DEVICE u32 before(const Work &w, u32 step) const {
        u32 query = step * G::step;
        if (back) return tile - (query + 1 > w.window ? (query + 1 - w.window) / G::rows : 0);
        return (least(w.seq, query + G::step) - 1) / G::rows - tile;
    }
};

// Walk is where a block is: of each step all members.
struct Walk {
    u32 step, member = 0;
    DEVICE Walk(const Part &p) : step(p.back ? p.begin + p.steps - 1 : p.begin) {}
    DEVICE void next(const Part &p) {
        if (++member < p.members) return;
        member = 0;
        step += p.back ? ~0u : 1;
    }
};

// GradBars are the barriers: a tile has come or is free again, and for each warpgroup and
// each of two steps whether its gradients of queries are there or their place is free.
template <class G> struct GradBars {
    u32 kv, q, q_free, o, o_free, ds, ds_free, dq, dq_free;
    DEVICE GradBars(u32 at)
        : kv(at), q(at + 8), q_free(at + 24), o(at + 40), o_free(at + 56), ds(at + 72), ds_free(at + 88), dq(at + 96), dq_free(at + 128) {}
};

template <class G> DEVICE void bring_grad(const Work &w, const Part &p, u32 base, u64 map_q, u64 map_k, u64 map_v, u64 map_o) {
    GradBars<G> bars(base + G::bars);
    u32 from = p.sequence * w.seq;
    mbar_expect(bars.kv, G::rows * (G::keys + G::values) * 2);
    load_tile<G>(base + G::k, map_k, bars.kv, G::rows, G::keys, p.kv * G::keys, from + p.tile * G::rows);
    load_tile<G>(base + G::v, map_v, bars.kv, G::rows, G::values, p.kv * G::values, from + p.tile * G::rows);
    Ring<G::stages> at;
    Walk walk(p);
#pragma unroll 1
    for (u32 n = 0; n < p.count; n++, at.next(), walk.next(p)) {
        u32 row = from + walk.step * G::step, head = p.head + walk.member;
        mbar_wait(bars.q_free + 8 * at.at, at.turn ^ 1);
        mbar_expect(bars.q + 8 * at.at, G::step * G::keys * 2);
        load_tile<G>(base + G::q + at.at * G::step * G::keys * 2, map_q, bars.q + 8 * at.at, G::step, G::keys, head * G::keys, row);
        mbar_wait(bars.o_free + 8 * at.at, at.turn ^ 1);
        mbar_expect(bars.o + 8 * at.at, G::step * G::values * 2);
        load_tile<G>(base + G::d_o + at.at * G::step * G::values * 2, map_o, bars.o + 8 * at.at, G::step, G::values, head * G::values, row);
    }
}

// bring_notes brings the LSE, to base two, and delta. Queries beyond the last have an LSE
// of infinity, so all their weights are zero.
template <class G> DEVICE void bring_notes(const Work &w, const Part &p, u8 *own, u32 base) {
    GradBars<G> bars(base + G::bars);
    Ring<G::stages> at;
    Walk walk(p);
#pragma unroll 1
    for (u32 n = 0; n < p.count; n++, at.next(), walk.next(p)) {
        float lse[G::step / 32], delta[G::step / 32];
#pragma unroll
        for (u32 i = 0; i < G::step / 32; i++) {
            u32 query = walk.step * G::step + 32 * i + lane(), head = p.head + walk.member;
            bool in = query < w.seq;
            lse[i] = in ? number(read<u32>(w.row(w.lse, p.sequence, head, query))) * LOG2E : -NONE;
            delta[i] = in ? number(read<u32>(w.row(w.delta, p.sequence, head, query))) : 0;
        }
        mbar_wait(bars.q_free + 8 * at.at, at.turn ^ 1);
        float *notes = (float *)(own + G::notes) + at.at * 2 * G::step;
#pragma unroll
        for (u32 i = 0; i < G::step / 32; i++) {
            notes[32 * i + lane()] = lse[i];
            notes[G::step + 32 * i + lane()] = delta[i];
        }
        mbar_arrive(bars.q + 8 * at.at);
    }
}

// add_queries adds the gradients of queries of every other step to memory when it is this
// block's turn.
template <class G> DEVICE void add_queries(const Work &w, const Part &p, u32 base, const Scratch<G> &scratch, u32 mine) {
    GradBars<G> bars(base + G::bars);
    constexpr u32 bytes = G::step * G::keys * 2; // of one warpgroup
    Walk walk(p);
#pragma unroll 1
    for (u32 n = 0; n < p.count; n++, walk.next(p)) {
        if (n % 2 != mine) continue;
        u64 number = (u64)(p.sequence * w.heads + p.head + walk.member) * scratch.steps + walk.step;
        u64 turn = scratch.turns + 4 * number, to = scratch.dq + number * (2 * bytes);
        u32 before = p.before<G>(w, walk.step), place = n % G::places, from = base + G::dq + place * 2 * bytes;
        if (before > 0) await_count(turn, before);
#pragma unroll
        for (u32 team = 0; team < 2; team++) {
            mbar_wait(bars.dq + 16 * mine + 8 * team, n / 2 & 1);
            if (before > 0) bulk_add(to + team * bytes, from + team * bytes, bytes);
            else bulk_put(to + team * bytes, from + team * bytes, bytes);
            tma_commit();
        }
        tma_read<0>();
        mbar_arrive(bars.dq_free + 16 * place);
        mbar_arrive(bars.dq_free + 16 * place + 8);
        tma_done<0>();
        publish(turn);
    }
}

// begin_crosswise begins s = k qᵀ for this warpgroup's 64 keys.
template <u32 rows, u32 step, u32 width> DEVICE void begin_crosswise(float *s, u32 k, u32 q) {
    pin<step / 2>(s);
    wgmma_fence();
#pragma unroll
    for (u32 d = 0; d < width; d += 16) {
        wgmma_ss<step, false, false>(s, smem_desc(k + d / 64 * COLUMN(rows) + d % 64 * 2, 16, 1024),
                                     smem_desc(q + d / 64 * COLUMN(step) + d % 64 * 2, 16, 1024), d > 0);
    }
    wgmma_commit();
}

// begin_sum begins sum += p x, where x has step rows.
template <u32 step, u32 width> DEVICE void begin_sum(float *sum, u32 *p, u32 x) {
    pin<width / 2>(sum);
    pin<step / 4>(p);
    wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < step; k += 16) wgmma_rs<width, true>(sum, p + k / 4, smem_desc(x + k * 128, COLUMN(step), 1024), 1);
    wgmma_commit();
}

// begin_queries begins a part of dq = ds k. A warpgroup has half of the queries if there
// are 128 of them, otherwise half of the columns.
template <class G> DEVICE void begin_queries(float *dq, u32 ds, u32 k, u32 team) {
    pin<G::part>(dq);
    wgmma_fence();
    if constexpr (G::step == 128) ds += team * COLUMN(G::rows);
#pragma unroll
    for (u32 r = 0; r < G::rows; r += 16) {
        u64 a = smem_desc(ds + r * 128, 16, 1024);
        if constexpr (G::step == 128) {
            wgmma_ss<G::keys, true, true>(dq, a, smem_desc(k + r * 128, COLUMN(G::rows), 1024), r > 0);
        } else if constexpr (G::keys == 128) {
            wgmma_ss<64, true, true>(dq, a, smem_desc(k + team * COLUMN(G::rows) + r * 128, COLUMN(G::rows), 1024), r > 0);
        } else {
            wgmma_ss<64, true, true>(dq, a, smem_desc(k + 2 * team * COLUMN(G::rows) + r * 128, COLUMN(G::rows), 1024), r > 0);
            wgmma_ss<32, true, true>(dq + 32, a, smem_desc(k + COLUMN(G::rows) + 64 * team + r * 128, COLUMN(G::rows), 1024), r > 0);
        }
    }
    wgmma_commit();
}

// share adds the gradients of keys or values of the blocks that share them: this thread's n
// numbers at place at. The last block in order keeps the sum.
template <u32 n> DEVICE void share(float *x, u64 at, bool first, bool last) {
    constexpr u32 batch = 32; // numbers that are under way at once
#pragma unroll
    for (u32 i = 0; i < n; i += batch) {
        Vec v[batch / 4];
#pragma unroll
        for (u32 j = 0; j < batch / 4; j++) v[j] = first ? Vec{0, 0, 0, 0} : read<Vec>(at + (u64)(i + 4 * j) * 1024);
#pragma unroll
        for (u32 j = 0; j < batch / 4; j++) {
            float *y = x + i + 4 * j;
            y[0] += number(v[j].x), y[1] += number(v[j].y), y[2] += number(v[j].z), y[3] += number(v[j].w);
            if (!last) write(at + (u64)(i + 4 * j) * 1024, Vec{bits(y[0]), bits(y[1]), bits(y[2]), bits(y[3])});
        }
    }
}

// take_notes loads the numbers of this lane's queries.
template <u32 step> DEVICE void take_notes(float *note, const u8 *notes) {
#pragma unroll
    for (u32 i = 0; i < step / 8; i++) {
        u64 two = *(const u64 *)(notes + i * 32);
        note[2 * i] = number(low(two)), note[2 * i + 1] = number(high(two));
    }
}

// Crosswise is the place of a warpgroup in a step: its keys, and the queries that pass by.
template <class G> struct Crosswise {
    const Work &w;
    const Part &p;
    u8 *own;
    u32 base, team, k, v;
    GradBars<G> bars;
    float factor;
    DEVICE Crosswise(const Work &w, const Part &p, u32 base) : w(w), p(p), own(pool + (base - spot(pool))), base(base), bars(base + G::bars) {
        team = warp() / 4;
        k = base + G::k + team * 64 * 128;
        v = base + G::v + team * 64 * 128;
        factor = w.scale * LOG2E;
    }
    DEVICE u32 q(u32 stage) const { return base + G::q + stage * G::step * G::keys * 2; }
    DEVICE u32 d_o(u32 stage) const { return base + G::d_o + stage * G::step * G::values * 2; }
    DEVICE const u8 *notes(u32 stage) const { return own + G::notes + stage * G::step * 8 + lane() % 4 * 8; }

    // weights turns the scores of a step into weights.
    DEVICE void weights(float *s, u32 step, u32 stage) const {
        float note[G::step / 4];
        take_notes<G::step>(note, notes(stage));
#pragma unroll
        for (u32 i = 0; i < G::step / 2; i++) s[i] = power(__builtin_fmaf(s[i], factor, -note[i / 4 * 2 + i % 2]));
        u32 first = step * G::step, tile = p.tile * G::rows;
        if (first >= tile + G::rows - 1 && first + G::step - 1 - tile < w.window) return;
        u32 key = tile + 64 * team + warp() % 4 * 16 + lane() / 4, query = first + lane() % 4 * 2;
#pragma unroll
        for (u32 i = 0; i < G::step / 2; i++) {
            u32 c = query + i / 4 * 8 + i % 2, r = key + i / 2 % 2 * 8;
            if (!(r <= c && c - r < w.window)) s[i] = 0;
        }
    }

    // grads_of_scores makes gradients of scores of weights and their gradients.
    DEVICE void grads_of_scores(u32 *rds, const u32 *rp, const float *dp, u32 stage) const {
        float note[G::step / 4];
        take_notes<G::step>(note, notes(stage) + G::step * 4);
#pragma unroll
        for (u32 i = 0; i < G::step / 4; i++) {
            float p[2];
            split(rp[i], p);
            rds[i] = pair(p[0] * (dp[2 * i] - note[i / 2 * 2]), p[1] * (dp[2 * i + 1] - note[i / 2 * 2 + 1]));
        }
    }
    // put_scores puts gradients of scores where both warpgroups read them.
    DEVICE void put_scores(const u32 *rds, u32 place) const {
        u32 r = 64 * team + warp() % 4 * 16 + lane() / 4;
        u8 *to = own + G::ds + place * G::rows * G::step * 2 + r * 128 + lane() % 4 * 4;
#pragma unroll
        for (u32 i = 0; i < G::step / 4; i++) {
            u32 c = i / 2;
            *(u32 *)(to + c / 8 * COLUMN(G::rows) + i % 2 * 8 * 128 + ((c % 8 ^ (r & 7)) << 4)) = rds[i];
        }
        fence_async();
        warp_barrier();
        arrive(bars.ds + 8 * place);
    }
    DEVICE void begin_queries(float *dq, u32 place) const {
        ::begin_queries<G>(dq, base + G::ds + place * G::rows * G::step * 2, base + G::k, team);
    }
    // put_queries hands this warpgroup's part of the gradient of queries of step n over to
    // the thread that adds it.
    DEVICE void put_queries(const float *dq, u32 n) const {
        u32 place = n % G::places;
        mbar_wait(bars.dq_free + 16 * place + 8 * team, (n / G::places & 1) ^ 1);
        u8 *to = own + G::dq + (2 * place + team) * G::part * 128 * 4 + thread() % 128 * 16;
#pragma unroll
        for (u32 i = 0; i < G::part; i += 4) *(Vec *)(to + i * 512) = Vec{bits(dq[i]), bits(dq[i + 1]), bits(dq[i + 2]), bits(dq[i + 3])};
        fence_async();
        warp_barrier();
        arrive(bars.dq + 16 * (n % 2) + 8 * team);
    }
    DEVICE void arrive(u32 bar) const {
        if (lane() == 0) mbar_arrive(bar);
    }
};

// grad_steps is all steps of a block. If there are registers, weights are computed while
// tensor cores make gradients of weights, and gradients of queries are handed over while they
// make those of keys. Otherwise a warpgroup has one product after the other, and the other
// one computes meanwhile.
template <class G> DEVICE void grad_steps(const Work &w, const Part &p, u32 base, float *dk, float *dv) {
    Walk walk(p);
#pragma unroll 1
    for (u32 n = 0; n < p.count; n++, walk.next(p)) {
        if constexpr (G::lean) pin<1>(&base);
        Crosswise<G> x(w, p, base);
        const GradBars<G> &bars = x.bars;
        u32 at = n & 1, turn = n / 2 & 1, place = n % G::scores;
        u32 rp[G::step / 4], rds[G::step / 4];
        float s[G::step / 2], dp[G::step / 2], dq[G::part];
        mbar_wait(bars.q + 8 * at, turn);
        begin_crosswise<G::rows, G::step, G::keys>(s, x.k, x.q(at));
        if constexpr (G::both) {
            mbar_wait(bars.o + 8 * at, turn);
            begin_crosswise<G::rows, G::step, G::values>(dp, x.v, x.d_o(at));
        }
        wgmma_wait<G::both>();
        pin<G::step / 2>(s);
        x.weights(s, walk.step, at);
        round_to<G::step>(rp, s);
        pin<G::step / 4>(rp);
        if constexpr (!G::both) {
            mbar_wait(bars.o + 8 * at, turn);
            begin_crosswise<G::rows, G::step, G::values>(dp, x.v, x.d_o(at));
        }
        wgmma_wait<0>();
        pin<G::step / 2>(dp);
        x.grads_of_scores(rds, rp, dp, at);
        if constexpr (!G::both) begin_sum<G::step, G::values>(dv, rp, x.d_o(at));
        if constexpr (G::scores == 1) mbar_wait(bars.ds_free, at ^ 1); // both have read those of the step before
        x.put_scores(rds, place);
        if constexpr (G::both) begin_sum<G::step, G::values>(dv, rp, x.d_o(at));
        if constexpr (!G::both) {
            begin_sum<G::step, G::keys>(dk, rds, x.q(at));
            wgmma_wait<0>();
            pin<G::keys / 2>(dk);
        }
        mbar_wait(bars.ds + 8 * place, n / G::scores & 1);
        x.begin_queries(dq, place);
        if constexpr (G::both) begin_sum<G::step, G::keys>(dk, rds, x.q(at));
        wgmma_wait<G::both>();
        pin<G::part>(dq);
        pin<G::values / 2>(dv);
        x.arrive(bars.o_free + 8 * at);
        if constexpr (G::scores == 1) x.arrive(bars.ds_free);
        x.put_queries(dq, n);
        wgmma_wait<0>();
        pin<G::keys / 2>(dk);
        x.arrive(bars.q_free + 8 * at);
    }
}

template <class G> DEVICE void grad_tiles(const Work &w, const Part &p, u8 *own, u32 base, const Scratch<G> &scratch) {
    u32 team = warp() / 4;
    float dk[G::keys / 2], dv[G::values / 2];
#pragma unroll
    for (u32 i = 0; i < G::keys / 2; i++) dk[i] = 0;
#pragma unroll
    for (u32 i = 0; i < G::values / 2; i++) dv[i] = 0;
    mbar_wait(GradBars<G>(base + G::bars).kv, 0);
    grad_steps<G>(w, p, base, dk, dv);
    bool last = p.group == p.groups - 1;
    if (p.groups > 1) {
        u64 number = (u64)(p.sequence * w.kv_heads + p.kv) * scratch.tiles + p.tile, shares = scratch.shares + 4 * number;
        u64 to = scratch.dkv + number * (G::rows * (G::keys + G::values) * 4) + thread() * 16;
        if (p.group > 0) {
            if (thread() == 0) await_count(shares, p.group);
            barrier(1, 256);
        }
        share<G::keys / 2>(dk, to, p.group == 0, last);
        share<G::values / 2>(dv, to + G::rows * G::keys * 4, p.group == 0, last);
        if (!last) {
            barrier(1, 256);
            if (thread() == 0) publish(shares);
            return;
        }
    }
    u32 row = p.tile * G::rows + 64 * team + warp() % 4 * 16, there = row < w.seq ? w.seq - row : 0;
    u64 to = (u64)p.sequence * w.seq + row;
    u32 place = team * 64 * 128 + warp() % 4 * 16 * 128;
    float plain[2] = {1, 1}, scaled[2] = {w.scale, w.scale};
    store_rows<G::values>(own + G::v + place, COLUMN(G::rows), dv, plain, w.dv, to, there, p.kv * G::values);
    barrier(1, 256); // all have multiplied with the keys
    store_rows<G::keys>(own + G::k + place, COLUMN(G::rows), dk, scaled, w.dk, to, there, p.kv * G::keys);
}

// grad_wide is the backward pass after delta.
template <class G> DEVICE void grad_wide(const Work &w, u64 map_q, u64 map_k, u64 map_v, u64 map_o) {
    u32 at = spot(pool), base = (at + 1023) / 1024 * 1024;
    need(G::room + 1024);
    GradBars<G> bars(base + G::bars);
    Part p = Part::of<G>(w);
    Scratch<G> scratch(w);
    if (thread() == 0) {
        mbar_init(bars.kv, 1);
#pragma unroll
        for (u32 i = 0; i < G::stages; i++) {
            mbar_init(bars.q + 8 * i, 33);
            mbar_init(bars.q_free + 8 * i, 8);
            mbar_init(bars.o + 8 * i, 1);
            mbar_init(bars.o_free + 8 * i, 8);
            mbar_init(bars.ds + 8 * i, 8);
        }
        mbar_init(bars.ds_free, 8);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            mbar_init(bars.dq + 8 * i, 4);
            mbar_init(bars.dq_free + 8 * i, 1);
        }
        fence_mbar_init();
    }
    barrier();
    if (warp() / 4 == 2) {
        registers_less<24>();
        if (thread() == 256) bring_grad<G>(w, p, base, map_q, map_k, map_v, map_o);
        if (warp() == 9) bring_notes<G>(w, p, pool + (base - at), base);
        if (warp() >= 10 && lane() == 0) add_queries<G>(w, p, base, scratch, warp() % 2);
        return;
    }
    registers_more<240>();
    grad_tiles<G>(w, p, pool + (base - at), base, scratch);
}

// delta_wide makes delta, with as many lanes for a row as it has vectors, and sets the
// counts to zero.
template <class G> DEVICE void delta_wide(const Work &w) {
    Scratch<G> scratch(w);
    constexpr u32 lanes = G::values / 8;
    u64 i = (u64)block() * threads() + thread(), all = (u64)blocks() * threads();
#pragma unroll 1
    for (u64 c = i; c < (scratch.dkv - scratch.turns) / 4; c += all) write(scratch.turns + 4 * c, 0u);
    u64 count = (u64)w.batch * w.seq * w.heads * lanes;
#pragma unroll 1
    for (; i < (count + 31) / 32 * 32; i += all) { // whole warps exchange sums
        u64 row = i / lanes, token = row / w.heads;
        u32 head = (u32)(row % w.heads), c = head * G::values + (u32)(i % lanes) * 8;
        float sum = 0;
        if (i < count) {
            float x[STEP], y[STEP];
            load(BF16, w.o.at(token, c), STEP, x);
            load(BF16, w.d_o.at(token, c), STEP, y);
#pragma unroll
            for (u32 e = 0; e < STEP; e++) sum += x[e] * y[e];
        }
#pragma unroll
        for (u32 d = lanes / 2; d > 0; d /= 2) sum += number(across(bits(sum), d));
        if (i % lanes == 0 && i < count) write(w.row(w.delta, (u32)(token / w.seq), head, (u32)(token % w.seq)), bits(sum));
    }
}

// queries_wide rounds the gradient of queries. A block has what a warpgroup made in a step.
template <class G> DEVICE void queries_wide(const Work &w) {
    Scratch<G> scratch(w);
    constexpr u32 each = (G::part * 64 + 2047) / 2048 * 2048; // of a warp
    need(4 * each);
    u32 team = block() % 2, step = block() / 2 % scratch.steps, head = block() / 2 / scratch.steps, mine = thread();
    u64 from = scratch.dq + (u64)block() * (G::part * 128 * 4) + 16 * mine;
    float x[G::part], scaled[2] = {w.scale, w.scale};
#pragma unroll
    for (u32 i = 0; i < G::part; i += 4) {
        Vec v = fetch<Vec>(from + (u64)i * 128 * 4);
        x[i] = number(v.x), x[i + 1] = number(v.y), x[i + 2] = number(v.z), x[i + 3] = number(v.w);
    }
    u32 row = step * G::step + warp() * 16, col = head % w.heads * G::keys;
    if (G::step == 128) row += 64 * team;
    u32 there = row < w.seq ? w.seq - row : 0;
    u64 to = (u64)(head / w.heads) * w.seq + row;
    u8 *own = pool + warp() * each;
    if constexpr (G::step == 128) {
        store_rows<G::keys>(own, 16 * 128, x, scaled, w.dq, to, there, col);
    } else if constexpr (G::keys == 128) {
        store_rows<64>(own, 16 * 128, x, scaled, w.dq, to, there, col + 64 * team);
    } else {
        store_rows<64>(own, 16 * 128, x, scaled, w.dq, to, there, col + 128 * team);
        store_rows<32>(own + 16 * 128, 16 * 128, x + 32, scaled, w.dq, to, there, col + 64 + 32 * team);
    }
}
