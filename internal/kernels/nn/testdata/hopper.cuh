// The words of hopper.cuh for the host. Copies by tensor maps and products of groups of
// warps go on by themselves: in every other cluster they happen at once, and in the others
// copies happen in any order at any time, and products when they are waited for. Both must
// do.

#pragma once

#include "tensor.cuh"

typedef u64 Map;
struct HostMap {
    u64 base, shape, pitch, box;
};
#define map_of(kernel, n) (reinterpret_cast<u64>(host_maps[(n) - host_arity]))
inline void prefetch_map(u64) {}
#define LATE_BLOCKS 2 // blocks of attention's backward pass that begin with the last queries
#define LATE_HEADS 2  // heads of which do so together

inline bool host_eager() { return host_block / host_cluster & 1; }

// ---- barriers

struct HostBar {
    u32 count, left, phase;
    long long bytes;
};
static HostBar host_bars[host_blocks_most][host_room / 8];

inline HostBar &host_bar(u32 at, u32 cta) {
    if (at % 8 != 0 || at + 8 > host_shared || cta >= host_cluster) host_fail("a barrier at, of block", at, cta);
    return host_bars[cta][at / 8];
}
inline void host_settle(HostBar &b) {
    if (b.left > 0 || b.bytes != 0) return;
    b.left = b.count;
    b.phase++;
    host_moved = true;
}
inline void host_arrive(HostBar &b, u32 bytes) {
    if (b.left == 0) host_fail("more threads arrive than a barrier counts", b.count);
    b.left--;
    b.bytes += bytes;
    host_settle(b);
}
inline void mbar_init(u32 at, u32 count) { host_bar(at, host_cta()) = {count, count, 0, 0}; }
inline void mbar_arrive(u32 at) { host_arrive(host_bar(at, host_cta()), 0); }
inline void mbar_arrive_in(u32 at, u32 cta) { host_arrive(host_bar(at, cta), 0); }
inline void mbar_expect(u32 at, u32 bytes) { host_arrive(host_bar(at, host_cta()), bytes); }
inline bool mbar_passed(u32 at, u32 parity) {
    HostBar &b = host_bar(at, host_cta());
    if (b.count == 0) host_fail("a barrier that was not set up", at);
    return (b.phase & 1) != parity;
}
inline void mbar_wait(u32 at, u32 parity) {
    while (!mbar_passed(at, parity)) host_yield();
}
inline void fence_mbar_init() {}
inline void fence_async() {}

// ---- clusters

inline u32 cta_in_cluster() { return host_cta(); }
static Gate host_together;
static u64 host_seen[host_most];
inline void cluster_arrive() {
    host_seen[host_thread] = host_together.opened;
    if (++host_together.count < host_threads * host_cluster) return;
    host_together.count = 0;
    host_together.opened++;
    host_moved = true;
}
inline void cluster_wait() {
    while (host_together.opened == host_seen[host_thread]) host_yield();
}

inline Vec hear(u32 at, u32 cta) {
    if (at % 16 != 0 || at + 16 > host_shared || cta >= host_cluster) host_fail("shared memory at, of block", at, cta);
    Vec v;
    memcpy(&v, host_pools[cta] + at, 16);
    return v;
}

struct HostTold {
    u32 at, bar, cta;
    u64 v;
};
static HostTold host_told[256];
static u32 host_told_count;

inline void host_hear(const HostTold &t) {
    memcpy(host_pools[t.cta] + t.at, &t.v, 8);
    HostBar &bar = host_bar(t.bar, t.cta);
    bar.bytes -= 8;
    host_settle(bar);
    host_moved = true;
}
inline void tell(u32 at, u64 v, u32 bar, u32 cta) {
    if (at % 8 != 0 || at + 8 > host_shared || cta >= host_cluster) host_fail("shared memory at, of block", at, cta);
    if (host_eager()) return host_hear({at, bar, cta, v});
    if (host_told_count == 256) host_fail("too many words under way");
    host_told[host_told_count++] = {at, bar, cta, v};
}

// ---- copies

struct HostBox {
    u32 at, col, row, bar, blocks; // blocks: those that get it, by bits
    const HostMap *map;
};
static HostBox host_boxes[4096];
static u32 host_box_count;

// host_number calls f for every number of a box: its place in shared memory, and its
// address, or zero if it lies outside of the matrix.
template <class F> inline void host_each(const HostBox &b, F f) {
    u32 cols = (u32)b.map->shape, rows = (u32)(b.map->shape >> 32);
    if (b.at % 1024 != 0 || b.at + b.map->box * 128 > host_shared) host_fail("a box at, of shared memory", b.at, host_shared);
    for (u32 r = 0; r < b.map->box; r++) {
        for (u32 c = 0; c < 64; c++) {
            u32 place = b.at + r * 128 + ((c / 8 ^ (r & 7)) * 16) + c % 8 * 2;
            bool in = b.row + r < rows && b.col + c < cols;
            f(place, in ? b.map->base + ((b.row + r) * b.map->pitch + b.col + c) * 2 : 0);
        }
    }
}
inline void host_land(const HostBox &b) {
    for (u32 cta = 0; cta < host_cluster; cta++) {
        if (!(b.blocks >> cta & 1)) continue;
        host_each(b, [&](u32 place, u64 p) { *reinterpret_cast<u16 *>(host_pools[cta] + place) = p == 0 ? (u16)0 : *host_at<u16>(p); });
        HostBar &bar = host_bar(b.bar, cta);
        bar.bytes -= (long long)b.map->box * 128;
        host_settle(bar);
    }
    host_moved = true;
}
// A few copies happen, and blocks hear something, in any order.
inline void host_copies_go_on() {
    static u32 chance = 7;
    for (u32 n = host_told_count; n > 0; n--) {
        chance = chance * 1664525 + 1013904223;
        if (chance >> 30 != 0) continue;
        u32 i = (chance >> 8) % host_told_count;
        HostTold t = host_told[i];
        host_told[i] = host_told[--host_told_count];
        host_hear(t);
    }
    for (u32 n = host_box_count; n > 0; n--) {
        chance = chance * 1664525 + 1013904223;
        if (host_box_count == 0 || chance >> 30 == 0) continue;
        u32 i = (chance >> 8) % host_box_count;
        HostBox b = host_boxes[i];
        host_boxes[i] = host_boxes[--host_box_count];
        host_land(b);
    }
}
static struct HostTick {
    HostTick() { host_tick = host_copies_go_on; }
} host_tick_on;

inline void tma_keep_all(u32 dst, u64 map, u32 mbar, u32 col, u32 row, u32 mask) {
    HostBox b = {dst, col, row, mbar, mask, reinterpret_cast<const HostMap *>(map)};
    if (host_eager()) return host_land(b);
    if (host_box_count == 4096) host_fail("too many copies under way");
    host_boxes[host_box_count++] = b;
}
inline void tma_load(u32 dst, u64 map, u32 mbar, u32 col, u32 row) { tma_keep_all(dst, map, mbar, col, row, 1u << host_cta()); }
inline void tma_keep(u32 dst, u64 map, u32 mbar, u32 col, u32 row) { tma_load(dst, map, mbar, col, row); }

struct HostStores {
    u32 count, group;
    struct {
        HostBox box;
        u32 group;
    } of[64];
};
static HostStores host_stores[host_most];

inline void host_put(const HostBox &b) {
    u8 *from = pool;
    host_each(b, [&](u32 place, u64 p) {
        if (p != 0) *host_at<u16>(p) = *reinterpret_cast<u16 *>(from + place);
    });
}
inline void tma_store(u64 map, u32 src, u32 col, u32 row) {
    HostStores &all = host_stores[host_thread];
    HostBox b = {src, col, row, 0, 0, reinterpret_cast<const HostMap *>(map)};
    if (host_eager()) return host_put(b);
    if (all.count == 64) host_fail("too many stores under way");
    all.of[all.count].box = b;
    all.of[all.count++].group = all.group;
}

// Bulk is a copy or an addition of bytes that is under way.
struct HostBulk {
    u64 dst;
    u32 src, bytes, group;
    bool add;
};
struct HostBulks {
    u32 count;
    HostBulk of[16];
};
static HostBulks host_bulks[host_most];

inline void host_bulk(const HostBulk &b) {
    if (b.dst % 16 != 0 || b.src % 16 != 0 || b.bytes % 16 != 0 || b.src + b.bytes > host_shared) host_fail("a copy of bytes from", b.bytes, b.src);
    for (u32 i = 0; i < b.bytes; i += 4) {
        float x;
        memcpy(&x, pool + b.src + i, 4);
        float *to = host_at<float>(b.dst + i);
        *to = b.add ? *to + x : x;
    }
}
inline void host_begin_bulk(const HostBulk &b) {
    HostBulks &all = host_bulks[host_thread];
    if (host_eager()) return host_bulk(b);
    if (all.count == 16) host_fail("too many copies of bytes under way");
    all.of[all.count++] = b;
}
inline void bulk_put(u64 dst, u32 src, u32 bytes) { host_begin_bulk({dst, src, bytes, host_stores[host_thread].group, false}); }
inline void bulk_add(u64 dst, u32 src, u32 bytes) { host_begin_bulk({dst, src, bytes, host_stores[host_thread].group, true}); }

inline void tma_commit() { host_stores[host_thread].group++; }
template <u32 n> inline void tma_read() {
    HostStores &all = host_stores[host_thread];
    u32 left = 0;
    for (u32 i = 0; i < all.count; i++) {
        if (all.of[i].group + n < all.group) host_put(all.of[i].box);
        else all.of[left++] = all.of[i];
    }
    all.count = left;
    HostBulks &bulks = host_bulks[host_thread];
    left = 0;
    for (u32 i = 0; i < bulks.count; i++) {
        if (bulks.of[i].group + n < all.group) host_bulk(bulks.of[i]);
        else bulks.of[left++] = bulks.of[i];
    }
    bulks.count = left;
}
template <u32 n> inline void tma_done() { tma_read<n>(); }

// ---- blocks that wait for each other. The block of a lower number is done already.

inline void publish(u64 p) { ++*host_at<u32>(p); }
inline void await_count(u64 p, u32 v) {
    while (*host_at<u32>(p) != v) host_yield();
}

// ---- launches that overlap: here they run in order.

inline void let_next_begin() {}
inline void await_before() {}
inline void begun_early() {}
inline u32 read_l2(u64 p) { return *host_at<u32>(p); }

inline void write_far(u64 p, u32 far, Vec v) { *host_at<Vec>(p + far) = v; }
inline void write_below(u64 p, u32 far, int at, int left, Vec v) {
    if (at < left) write_far(p, far, v);
}
inline void put_below(u64 p, u32 far, int at, int left, Vec v) { write_below(p, far, at, left, v); }
inline void add_below(u64 p, u32 far, int at, int left, Vec v) {
    if (at >= left) return;
    host_at<Vec>(p + far);
    const u32 x[4] = {v.x, v.y, v.z, v.w};
    for (u32 i = 0; i < 4; i++) *host_at<float>(p + far + 4 * i) += __builtin_bit_cast(float, x[i]);
}
inline u32 read_far(u64 p, u32 far) { return *host_at<u32>(p + far); }
inline void read_two(u64 p, u32 far, float *x) {
    host_at<u64>(p + far);
    x[0] = *host_at<float>(p + far);
    x[1] = *host_at<float>(p + far + 4);
}
inline void read_two_of(u64 p, u32 far, int at, int left, float *x) {
    x[0] = x[1] = 0;
    if (at < left) read_two(p, far, x);
}

inline float inverse_root(float x) { return 1 / sqrtf(x); }

// ---- groups of warps

inline void pause() { host_yield(); }

inline void barrier_arrive(u32 number, u32 members) {
    Gate &g = host_all[host_cta()][number];
    if (++g.count < members) return;
    g.count = 0;
    g.opened++;
    host_moved = true;
}
inline bool elect() { return lane() == 5; }
template <u32 n> inline void registers_less() {}
template <u32 n> inline void registers_more() {}

// ---- products

inline u64 smem_desc(u32 at, u32 leading, u32 stride) {
    return (u64)1 << 62 | (u64)(stride >> 4) << 32 | (u64)(leading >> 4) << 16 | (at & 0x3ffff) >> 4;
}

// host_operand returns a number of an operand in shared memory: i along m or n, and k.
inline float host_operand(u64 desc, bool turned, u32 i, u32 k) {
    u32 start = (u32)(desc & 0x3fff) << 4, leading = (u32)(desc >> 16 & 0x3fff) << 4, stride = (u32)(desc >> 32 & 0x3fff) << 4;
    u32 at = turned ? start + i / 64 * leading + i % 64 * 2 + k / 8 * stride + k % 8 * 128 : start + i / 8 * stride + i % 8 * 128 + k * 2;
    at ^= (at >> 7 & 7) << 4;
    if (at + 2 > host_shared) host_fail("an operand at, of shared memory", at, host_shared);
    u16 v;
    memcpy(&v, pool + at, 2);
    float x[2];
    host_split(v, x);
    return x[0];
}

// HostProduct is one that is under way: this thread's part of it.
struct HostProduct {
    float *c;
    u32 n, group, keep;
    bool turn_a, turn_b, from_registers;
    u32 a[4];
    u64 left, right;
};
struct HostProducts {
    u32 count, group;
    HostProduct of[128];
};
static HostProducts host_products[host_most];

// The left operand's rows of this thread come from its lanes if it is in registers.
static float host_rows[host_most][2][16];

inline void host_multiply(const HostProduct &p) {
    u32 w = warp() % 4, g = lane() / 4, t = lane() % 4;
    for (u32 h = 0; h < 2; h++) {
        float x[16];
        for (u32 k = 0; k < 16; k++) {
            x[k] = p.from_registers ? host_rows[(host_thread & ~31u) + 4 * g + k % 8 / 2][h][k / 8 * 2 + k % 2]
                                    : host_operand(p.left, p.turn_a, 16 * w + g + 8 * h, k);
        }
        for (u32 j = 0; j < p.n / 4; j++) {
            float &c = p.c[j / 2 * 4 + h * 2 + j % 2], sum = p.keep ? c : 0;
            u32 col = j / 2 * 8 + 2 * t + j % 2;
            for (u32 k = 0; k < 16; k++) sum += x[k] * host_operand(p.right, p.turn_b, col, k);
            c = sum;
        }
    }
}
inline void host_begin(const HostProduct &p) {
    HostProducts &all = host_products[host_thread];
    if (p.from_registers || host_eager()) return host_multiply(p);
    if (all.count == 128) host_fail("too many products under way");
    all.of[all.count] = p;
    all.of[all.count++].group = all.group;
}

inline void wgmma_fence() { warp_barrier(); }
inline void wgmma_commit() { host_products[host_thread].group++; }
template <u32 n> inline void wgmma_wait() {
    HostProducts &all = host_products[host_thread];
    u32 left = 0;
    for (u32 i = 0; i < all.count; i++) {
        if (all.of[i].group + n < all.group) host_multiply(all.of[i]);
        else all.of[left++] = all.of[i];
    }
    all.count = left;
    warp_barrier(); // a warp waits as one
}
template <u32 count> inline void pin(float *) {}
template <u32 count> inline void pin(u32 *) {}

template <u32 n, bool turn_a, bool turn_b> inline void wgmma_ss(float *c, u64 a, u64 b, u32 keep) {
    host_begin({c, n, 0, keep, turn_a, turn_b, false, {}, a, b});
}
// The lanes of a warp exchange their fragments first; the product is made at once.
template <u32 n, bool turn_b> inline void wgmma_rs(float *c, const u32 *a, u64 b, u32 keep) {
    for (HostProducts &all = host_products[host_thread]; all.count > 0; all.count = 0) {
        for (u32 i = 0; i < all.count; i++) host_multiply(all.of[i]); // those before come first
    }
    warp_barrier();
    for (u32 i = 0; i < 4; i++) host_split(a[i], host_rows[host_thread][i % 2] + i / 2 * 2);
    warp_barrier();
    host_begin({c, n, 0, keep, false, turn_b, true, {}, 0, b});
    warp_barrier();
}
