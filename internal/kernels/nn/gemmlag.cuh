// This file has the gradient of experts' weights that is stored in fp32 and not added to: tiles of
// 128 x 256, of which each of two groups of warps has 128 columns. The groups share A, and each has
// its own stages of B, so that the one may be ahead of the other and stores meanwhile. These tiles
// read a third less than those by turns (Slim), and are stored less evenly. Sums are those of
// gemmhopper.cuh.

#pragma once

#include "gemmhopper.cuh"

// Queue is count places of size bytes in shared memory, which lie one behind the other, and
// their barriers.
template <u32 count, u32 size> struct Queue {
    static constexpr u32 room = count * size, marks = 16 * count;
    u32 base, bars, stage = 0, parity = 0;

    DEVICE u32 at() const { return base + stage * size; }
    DEVICE u8 *memory() const { return pool + (at() - spot(pool)); }
    DEVICE u32 full() const { return bars + 8 * stage; }
    DEVICE u32 empty(u32 s) const { return bars + 8 * (count + s); }
    DEVICE void next() {
        if (++stage == count) {
            stage = 0;
            parity ^= 1;
        }
    }
    // As many warps as givers give a place back.
    DEVICE void setup(u32 givers) const {
        for (u32 s = 0; s < count; s++) {
            mbar_init(bars + 8 * s, 1);
            mbar_init(empty(s), givers);
        }
    }
    // await waits for an empty place, and come for what was brought to it.
    DEVICE void await() const {
        mbar_wait(empty(stage), parity ^ 1);
        mbar_expect(full(), size);
    }
    DEVICE void come() const { mbar_wait(full(), parity); }
};

// Lag is the form: places of A, which both groups use, and of a group's B, and how many stages
// later the second group begins.
struct Lag {
    static constexpr u32 high = 128, wide = 256, part = wide / 2, behind = 4;
    typedef Queue<7, 2 * BOX> A;
    typedef Queue<3, 2 * BOX> B;
    static constexpr u32 data = A::room + 2 * B::room, room = data + A::marks + 2 * B::marks + 16;
    u32 base; // of A, and then of both groups' B, of the barriers, and of a count of pairs

    DEVICE A a() const { return {base, base + data}; }
    DEVICE B b(u32 group) const { return {base + A::room + group * B::room, base + data + A::marks + group * B::marks}; }
    DEVICE u32 ahead() const { return base + room - 16; } // a barrier: the first group is ahead
    DEVICE volatile u32 *brought() const { return (volatile u32 *)(pool + (base - spot(pool)) + room - 8); }
    DEVICE void setup() const {
        a().setup(2 * GROUP / 32);
        for (u32 group = 0; group < 2; group++) b(group).setup(CLUSTER * GROUP / 32);
        mbar_init(ahead(), GROUP / 32);
        *brought() = 0;
        fence_mbar_init();
    }
};

// bring_a and bring_b bring A, and a group's B, of all tiles of this cluster. Both blocks use
// the same B if they share columns; then each brings a half of it to both.
template <class Plan> DEVICE void bring_a(const Lag &form, Plan &plan, u64 map) {
    auto a = form.a();
    prefetch_map(map);
#pragma unroll 1
    for (u32 p = block() / CLUSTER; p < plan.pairs(); p += blocks() / CLUSTER) {
        *form.brought() = p;
        Place at = plan.find(p);
#pragma unroll 1
        for (u32 k = 0; k < at.k; k += 64, a.next()) {
            a.await();
#pragma unroll
            for (u32 i = 0; i < 2; i++) tma_keep(a.at() + i * BOX, map, a.full(), at.a_x + 64 * i, at.a_k + k);
        }
    }
    *form.brought() = plan.pairs();
}
template <class Plan> DEVICE void bring_b(const Lag &form, Plan &plan, u64 map, u32 group) {
    auto b = form.b(group);
    prefetch_map(map);
#pragma unroll 1
    for (u32 p = block() / CLUSTER; p < plan.pairs(); p += blocks() / CLUSTER) {
        Place at = plan.find(p);
#pragma unroll 1
        for (u32 k = 0; k < at.k; k += 64, b.next()) {
            b.await();
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                u32 x = at.b_x + Lag::part * group + 64 * i, y = at.b_k + k;
                if (!at.share_b) tma_keep(b.at() + i * BOX, map, b.full(), x, y);
                else if (i == cta_in_cluster()) tma_keep_all(b.at() + i * BOX, map, b.full(), x, y, 3);
            }
        }
    }
}

// lag computes every tile of this cluster, as persist does.
template <class Plan> DEVICE void lag(Plan &plan, u64 map_a, u64 map_b) {
    Lag form = {(spot(pool) + 1023) / 1024 * 1024};
    need(form.base - spot(pool) + Lag::room + Plan::room);
    if (thread() == 0) form.setup();
    plan.setup((u32 *)(pool + (form.base - spot(pool) + Lag::room)));
    barrier();
    cluster_arrive();
    cluster_wait();
    u32 group = thread() / GROUP;
    if (group == 0) {
        registers_less<40>();
        if (warp() == 0 && elect()) bring_a(form, plan, map_a);
        if ((warp() == 1 || warp() == 2) && elect()) bring_b(form, plan, map_b, warp() - 1);
        if (warp() == 3) plan.idle(block(), blocks(), form.brought());
        warp_barrier();
    } else {
        registers_more<232>();
        group--;
        auto a = form.a();
        auto b = form.b(group);
        u32 steps = 0; // that the first group has multiplied, until the second begins
        if (group == 1) mbar_wait(form.ahead(), 0);
        auto give = [&](u32 of_a, u32 of_b) INLINE {
            if (lane() == 0) mbar_arrive(a.empty(of_a));
            if (lane() < CLUSTER) mbar_arrive_in(b.empty(of_b), lane());
        };
#pragma unroll 1
        for (u32 p = block() / CLUSTER; p < plan.pairs(); p += blocks() / CLUSTER) {
            Place at = plan.find(p);
            u32 column = Lag::part * group, last_a = 0, last_b = 0;
            at.c += (u64)column * size_of(F32);
            at.cols = at.cols > column ? at.cols - column : 0;
            float c[Lag::part];
#pragma unroll 1
            for (u32 k = 0; k < at.k; k += 64) {
                u32 left = at.k - k;
                a.come();
                b.come();
                if (left % 16 != 0 && left < 64) {
                    // Further rows belong to others.
#pragma unroll
                    for (u32 i = 0; i < 2; i++) {
                        blank(a.memory() + i * BOX, left);
                        blank(b.memory() + i * BOX, left);
                    }
                    fence_async();
                    barrier(group + 1, GROUP);
                }
                u64 of_a = smem_desc(a.at(), BOX, 1024), of_b = smem_desc(b.at(), BOX, 1024);
                if (left > 48) multiply_stage<false, false, Lag::part, 2, 4>(of_a, of_b, k, c);
                else if (left > 32) multiply_stage<false, false, Lag::part, 2, 3>(of_a, of_b, k, c);
                else if (left > 16) multiply_stage<false, false, Lag::part, 2, 2>(of_a, of_b, k, c);
                else multiply_stage<false, false, Lag::part, 2, 1>(of_a, of_b, k, c);
                wgmma_wait<1>();
                if (k > 0) give(last_a, last_b);
                last_a = a.stage;
                last_b = b.stage;
                a.next();
                b.next();
                if (group == 0 && lane() == 0 && ++steps == Lag::behind) mbar_arrive(form.ahead());
            }
            wgmma_wait<0>();
            pin<Lag::part>(c);
            give(last_a, last_b);
#pragma unroll
            for (u32 i = 0; i < 2; i++) store_as<Lag::part, false, false, false, true>(at, plan.to, 64 * i, c + i * Lag::part / 2);
        }
        if (group == 0 && lane() == 0 && steps < Lag::behind) mbar_arrive(form.ahead());
    }
    cluster_arrive(); // the other block may still arrive at the barriers of this one
    cluster_wait();
}
