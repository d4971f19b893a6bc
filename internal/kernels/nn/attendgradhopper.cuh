// The backward pass of attention for Hopper. A block owns 128 keys of a head of keys, and
// for one head of queries walks over the queries that see them. Two warpgroups have 64
// keys each and compute the scores crosswise, keys by queries, so that weights and their
// gradients are in registers as the products for the gradients of keys and values need
// them. They exchange the gradients of scores through shared memory for the gradient of
// queries.
//
// That gradient is a sum over blocks. They add to a matrix in memory one after the other,
// and a count for each tile of queries says whose turn it is. Blocks begin in that order,
// so a block is a step behind the one before it and rarely waits. Blocks whose heads of
// queries share keys add up the gradients of these in order in the same way. So sums have
// one order for each shape, whatever the timing.

#pragma once

#include "attendhopper.cuh"

// Deep is the work of a block of the backward pass: 128 keys, step queries at a time.
template <u32 keys_, u32 values_, u32 step_, u32 stages_> struct Deep {
    static constexpr u32 keys = keys_, values = values_, step = step_, stages = stages_, rows = 128, threads = 384;
    static constexpr u32 k = 0, v = k + rows * keys * 2, q = v + rows * values * 2, d_o = q + stages * step * keys * 2;
    static constexpr u32 ds = d_o + stages * step * values * 2, dq = ds + rows * step * 2;
    static constexpr u32 notes = dq + step * keys * 4, bars = notes + stages * step * 8, room = bars + 8 * (7 + 4 * stages);
    static constexpr u32 part = step * keys / 256; // numbers of the gradient of queries of a thread
};

// Scratch is what the backward pass keeps in memory behind delta: the gradient of queries in the order
// of registers, the one of keys and values for heads that share them, and counts.
template <class G> struct Scratch {
    u64 dq, dkv, turns, shares, end;
    u32 steps, tiles;
    DEVICE Scratch(const Work &w) {
        steps = (w.seq + G::step - 1) / G::step;
        tiles = (w.seq + G::rows - 1) / G::rows;
        dq = w.delta + ((u64)w.batch * w.heads * w.seq * 4 + 127) / 128 * 128;
        dkv = dq + (u64)w.batch * w.heads * steps * G::step * G::keys * 4;
        turns = dkv + (w.heads == w.kv_heads ? 0 : (u64)w.batch * w.kv_heads * tiles * G::rows * (G::keys + G::values) * 4);
        shares = turns + (u64)w.batch * w.heads * steps * 4;
        end = shares + (u64)w.batch * w.kv_heads * tiles * 4;
    }
};

#ifndef LATE_BLOCKS
#define LATE_BLOCKS 264 // two for each multiprocessor
#endif

// Part is what a block does. Blocks of a head of keys follow each other from the last keys
// on, and begin with the first query that sees their keys. That keeps the data of few heads
// in use, but the longest blocks come last. So for the last heads it is the other way
// round: the first keys of all of them come first, and a block begins with the last query.
struct Part {
    u32 sequence, head, kv, group, tile, begin, count; // steps
    bool back;
    template <class G> DEVICE static Part of(const Work &w) {
        u32 tiles = (w.seq + G::rows - 1) / G::rows, each = w.heads / w.kv_heads, heads = w.batch * w.kv_heads;
        u32 late = least(heads, (LATE_BLOCKS + tiles * each - 1) / (tiles * each)), early = heads - late;
        Part p;
        u32 t = block() / each, head = t / tiles;
        p.group = block() % each;
        p.tile = tiles - 1 - t % tiles;
        p.back = head >= early;
        if (p.back) {
            t -= early * tiles;
            head = early + t % late;
            p.tile = t / late;
        }
        p.sequence = head / w.kv_heads;
        p.kv = head % w.kv_heads;
        p.head = p.kv * each + p.group;
        u32 first = p.tile * G::rows, end = w.window < w.seq - first ? least(w.seq, first + G::rows - 1 + w.window) : w.seq;
        p.begin = first / G::step;
        p.count = (end + G::step - 1) / G::step - p.begin;
        return p;
    }
    DEVICE u32 step(u32 n) const { return begin + (back ? count - 1 - n : n); }
    // before returns how many blocks add to the gradient of the queries of a step before this one.
    template <class G> DEVICE u32 before(const Work &w, u32 step) const {
        u32 query = step * G::step;
        if (back) return tile - (query + 1 > w.window ? (query + 1 - w.window) / G::rows : 0);
        return (least(w.seq, query + G::step) - 1) / G::rows - tile;
    }
};

template <class G> struct GradBars {
    u32 kv, q, q_free, o, o_free, dq, dq_free, ds;
    DEVICE GradBars(u32 at)
        : kv(at), q(at + 8), q_free(q + 8 * G::stages), o(q_free + 8 * G::stages), o_free(o + 8 * G::stages), dq(o_free + 8 * G::stages), dq_free(dq + 16), ds(dq_free + 16) {}
};

template <class G> DEVICE void bring_grad(const Work &w, const Part &p, u32 base, u64 map_q, u64 map_k, u64 map_v, u64 map_o) {
    GradBars<G> bars(base + G::bars);
    u32 from = p.sequence * w.seq;
    mbar_expect(bars.kv, G::rows * (G::keys + G::values) * 2);
    load_tile<G>(base + G::k, map_k, bars.kv, G::rows, G::keys, p.kv * G::keys, from + p.tile * G::rows);
    load_tile<G>(base + G::v, map_v, bars.kv, G::rows, G::values, p.kv * G::values, from + p.tile * G::rows);
    Ring<G::stages> at;
#pragma unroll 1
    for (u32 n = 0; n < p.count; n++, at.next()) {
        u32 row = from + p.step(n) * G::step;
        mbar_wait(bars.q_free + 8 * at.at, at.turn ^ 1);
        mbar_expect(bars.q + 8 * at.at, G::step * G::keys * 2);
        load_tile<G>(base + G::q + at.at * G::step * G::keys * 2, map_q, bars.q + 8 * at.at, G::step, G::keys, p.head * G::keys, row);
        mbar_wait(bars.o_free + 8 * at.at, at.turn ^ 1);
        mbar_expect(bars.o + 8 * at.at, G::step * G::values * 2);
        load_tile<G>(base + G::d_o + at.at * G::step * G::values * 2, map_o, bars.o + 8 * at.at, G::step, G::values, p.head * G::values, row);
    }
}

// bring_notes brings the LSE, to base two, and delta. Queries beyond the last have an LSE
// of infinity, so all their weights are zero.
template <class G> DEVICE void bring_notes(const Work &w, const Part &p, u8 *own, u32 base) {
    GradBars<G> bars(base + G::bars);
    Ring<G::stages> at;
#pragma unroll 1
    for (u32 n = 0; n < p.count; n++, at.next()) {
        float lse[G::step / 32], delta[G::step / 32];
#pragma unroll
        for (u32 i = 0; i < G::step / 32; i++) {
            u32 query = p.step(n) * G::step + 32 * i + lane();
            bool in = query < w.seq;
            lse[i] = in ? number(read<u32>(w.row(w.lse, p.sequence, p.head, query))) * LOG2E : -NONE;
            delta[i] = in ? number(read<u32>(w.row(w.delta, p.sequence, p.head, query))) : 0;
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

// add_queries adds the gradients of queries to memory when it is this block's turn.
template <class G> DEVICE void add_queries(const Work &w, const Part &p, u32 base, const Scratch<G> &scratch) {
    GradBars<G> bars(base + G::bars);
    constexpr u32 bytes = G::step * G::keys * 2; // of one warpgroup
#pragma unroll 1
    for (u32 n = 0; n < p.count; n++) {
        u32 step = p.step(n);
        u64 number = (u64)(p.sequence * w.heads + p.head) * scratch.steps + step;
        u64 turn = scratch.turns + 4 * number, to = scratch.dq + number * (2 * bytes);
        u32 before = p.before<G>(w, step);
        if (before > 0) await_count(turn, before);
#pragma unroll
        for (u32 team = 0; team < 2; team++) {
            mbar_wait(bars.dq + 8 * team, n & 1);
            if (before > 0) bulk_add(to + team * bytes, base + G::dq + team * bytes, bytes);
            else bulk_put(to + team * bytes, base + G::dq + team * bytes, bytes);
            tma_commit();
        }
        tma_read<0>();
        mbar_arrive(bars.dq_free);
        mbar_arrive(bars.dq_free + 8);
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

// share adds the gradients of keys or values of the heads that share them: this thread's n
// numbers at place at. The last head in order keeps the sum.
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
    DEVICE Crosswise(const Work &w, const Part &p, u8 *own, u32 base) : w(w), p(p), own(own), base(base), bars(base + G::bars) {
        team = warp() / 4;
        k = base + G::k + team * 64 * 128;
        v = base + G::v + team * 64 * 128;
        factor = w.scale * LOG2E;
    }
    DEVICE u32 q(u32 stage) const { return base + G::q + stage * G::step * G::keys * 2; }
    DEVICE u32 d_o(u32 stage) const { return base + G::d_o + stage * G::step * G::values * 2; }
    DEVICE const u8 *notes(u32 stage) const { return own + G::notes + stage * G::step * 8 + lane() % 4 * 8; }

    // weights turns the scores of step n into weights.
    DEVICE void weights(float *s, u32 n, u32 stage) const {
        float note[G::step / 4];
        take_notes<G::step>(note, notes(stage));
#pragma unroll
        for (u32 i = 0; i < G::step / 2; i++) s[i] = power(__builtin_fmaf(s[i], factor, -note[i / 4 * 2 + i % 2]));
        u32 first = p.step(n) * G::step, tile = p.tile * G::rows;
        if (first >= tile + G::rows - 1 && first + G::step - 1 - tile < w.window) return;
        u32 key = tile + 64 * team + warp() % 4 * 16 + lane() / 4, query = first + lane() % 4 * 2;
#pragma unroll
        for (u32 i = 0; i < G::step / 2; i++) {
            u32 c = query + i / 4 * 8 + i % 2, r = key + i / 2 % 2 * 8;
            if (!(r <= c && c - r < w.window)) s[i] = 0;
        }
    }

    // put_scores puts gradients of scores where both warpgroups read them.
    DEVICE void put_scores(const u32 *rds) const {
        u32 r = 64 * team + warp() % 4 * 16 + lane() / 4;
        u8 *to = own + G::ds + r * 128 + lane() % 4 * 4;
#pragma unroll
        for (u32 i = 0; i < G::step / 4; i++) {
            u32 c = i / 2;
            *(u32 *)(to + c / 8 * COLUMN(G::rows) + i % 2 * 8 * 128 + ((c % 8 ^ (r & 7)) << 4)) = rds[i];
        }
    }
    DEVICE void scores_are_there() const {
        fence_async();
        warp_barrier();
        if (lane() == 0) mbar_arrive(bars.ds);
    }
    DEVICE void begin_queries(float *dq) const { ::begin_queries<G>(dq, base + G::ds, base + G::k, team); }

    // put_queries hands this warpgroup's part of the gradient of queries of step n over to
    // the thread that adds it.
    DEVICE void put_queries(const float *dq, u32 n) const {
        mbar_wait(bars.dq_free + 8 * team, (n & 1) ^ 1);
        u8 *to = own + G::dq + team * G::part * 128 * 4 + thread() % 128 * 16;
#pragma unroll
        for (u32 i = 0; i < G::part; i += 4) *(Vec *)(to + i * 512) = Vec{bits(dq[i]), bits(dq[i + 1]), bits(dq[i + 2]), bits(dq[i + 3])};
        fence_async();
        warp_barrier();
        if (lane() == 0) mbar_arrive(bars.dq + 8 * team);
    }
    DEVICE void free_stage(u32 stage) const {
        if (lane() == 0) {
            mbar_arrive(bars.q_free + 8 * stage);
            mbar_arrive(bars.o_free + 8 * stage);
        }
    }
};

// grad_steps is all steps of a block, one product after the other. While one warpgroup
// multiplies, the other one does the rest.
template <class G> DEVICE void grad_steps(const Crosswise<G> &x, float *dk, float *dv) {
    static_assert(G::stages == 2, "stages alternate");
    const GradBars<G> &bars = x.bars;
#pragma unroll 1
    for (u32 n = 0; n < x.p.count; n++) {
        u32 at = n & 1, turn = n / 2 & 1;
        u32 rp[G::step / 4], rds[G::step / 4];
        float s[G::step / 2];
#pragma unroll
        for (u32 i = 0; i < G::step / 2; i++) s[i] = 0;
        mbar_wait(bars.q + 8 * at, turn);
        begin_crosswise<G::rows, G::step, G::keys>(s, x.k, x.q(at));
        wgmma_wait<0>();
        pin<G::step / 2>(s);
        x.weights(s, n, at);
        round_to<G::step>(rp, s);
        pin<G::step / 4>(rp);
        mbar_wait(bars.o + 8 * at, turn);
        begin_crosswise<G::rows, G::step, G::values>(s, x.v, x.d_o(at));
        float note[G::step / 4];
        take_notes<G::step>(note, x.notes(at) + G::step * 4);
        wgmma_wait<0>();
        pin<G::step / 2>(s);
#pragma unroll
        for (u32 i = 0; i < G::step / 4; i++) {
            float p[2];
            split(rp[i], p);
            rds[i] = pair(p[0] * (s[2 * i] - note[i / 2 * 2]), p[1] * (s[2 * i + 1] - note[i / 2 * 2 + 1]));
        }
        begin_sum<G::step, G::values>(dv, rp, x.d_o(at));
        mbar_wait(bars.ds + 8, (n & 1) ^ 1); // both have read the ones before
        x.put_scores(rds);
        begin_sum<G::step, G::keys>(dk, rds, x.q(at));
        x.scores_are_there();
        wgmma_wait<0>();
        pin<G::keys / 2>(dk);
        pin<G::values / 2>(dv);
        x.free_stage(at);
        float dq[G::part];
        mbar_wait(bars.ds, (n & 1));
        x.begin_queries(dq);
        wgmma_wait<0>();
        pin<G::part>(dq);
        if (lane() == 0) mbar_arrive(bars.ds + 8);
        x.put_queries(dq, n);
    }
}

template <class G> DEVICE void grad_tiles(const Work &w, const Part &p, u8 *own, u32 base, const Scratch<G> &scratch) {
    u32 team = warp() / 4;
    Crosswise<G> x(w, p, own, base);
    float dk[G::keys / 2], dv[G::values / 2];
#pragma unroll
    for (u32 i = 0; i < G::keys / 2; i++) dk[i] = 0;
#pragma unroll
    for (u32 i = 0; i < G::values / 2; i++) dv[i] = 0;
    mbar_wait(x.bars.kv, 0);
    grad_steps<G>(x, dk, dv);
    bool last = p.group == w.heads / w.kv_heads - 1;
    if (w.heads != w.kv_heads) {
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
        }
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            mbar_init(bars.dq + 8 * i, 4);
            mbar_init(bars.dq_free + 8 * i, 1);
            mbar_init(bars.ds + 8 * i, 8);
        }
        fence_mbar_init();
    }
    barrier();
    if (warp() / 4 == 2) {
        registers_less<24>();
        if (thread() == 256) bring_grad<G>(w, p, base, map_q, map_k, map_v, map_o);
        if (warp() == 9) bring_notes<G>(w, p, pool + (base - at), base);
        if (thread() == 320) add_queries<G>(w, p, base, scratch);
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
    for (u64 c = i; c < (scratch.end - scratch.turns) / 4; c += all) write(scratch.turns + 4 * c, 0u);
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
