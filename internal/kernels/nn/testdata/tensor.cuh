// The words of tensor.cuh for the host. Copies into shared memory happen when they
// are waited for, in odd blocks at once: both must do. The pool is full of NaNs
// when a block begins, and as large as a launch may ask for.

#pragma once

#include "words.cuh"


inline void need(u32 bytes) {
    if (host_shared < bytes) host_fail("shared memory: asked for, needed", host_shared, bytes);
}

inline u32 spot(const void *p) { return (u32)(static_cast<const u8 *>(p) - pool); }

inline u8 *host_spot(u32 at, u32 bytes = 16) {
    if (at % bytes != 0 || at + bytes > host_shared) host_fail("shared memory: address, size", at, host_shared);
    return pool + at;
}

// Copy is one that is under way.
struct Copy {
    u32 dst, bytes, group;
    u64 src;
    u32 room = 16; // bytes of the place, of which the rest becomes zeros
};
struct Copies {
    u32 count, group;
    Copy of[512];
};
static Copies host_copies[host_most];

inline void host_copy(const Copy &c) {
    u8 *dst = host_spot(c.dst, c.room);
    memset(dst, 0, c.room);
    if (c.src % c.room != 0 || c.bytes > c.room) host_fail("a copy from, of bytes", c.src, c.bytes);
    bool ours = c.src >= host_from && c.src + c.bytes <= host_to;
    if (c.bytes > 0 && !ours) host_fail("a copy from, of memory of", c.src - host_from, host_to - host_from);
    memcpy(dst, reinterpret_cast<u8 *>(c.src), c.bytes);
}

inline void host_bring(u32 dst, u64 src, u32 bytes, u32 room) {
    Copies &all = host_copies[host_thread];
    Copy c = {dst, bytes, all.group, src, room};
    if (block() & 1) {
        host_copy(c);
    } else {
        if (all.count == 512) host_fail("too many copies under way");
        all.of[all.count++] = c;
    }
}
inline void bring(u32 dst, u64 src, u32 bytes) { host_bring(dst, src, bytes, 16); }
template <u32 bytes> inline void bring_few(u32 dst, u64 src) { host_bring(dst, src, bytes, bytes); }
inline void seal() { host_copies[host_thread].group++; }
template <u32 n> inline void arrived() {
    Copies &all = host_copies[host_thread];
    u32 left = 0;
    for (u32 i = 0; i < all.count; i++) {
        if (all.of[i].group + n < all.group) host_copy(all.of[i]);
        else all.of[left++] = all.of[i];
    }
    all.count = left;
}

// host_lanes gives what all lanes of the warp brought along: a place in the pool, or
// numbers.
struct Brought {
    u32 at;
    float x[12];
};
static Brought host_brought[2][host_most];

inline const Brought *host_lanes(const Brought &mine) {
    u32 turn = host_fibre[host_thread].turn ^= 1, t = host_thread;
    host_brought[turn][t] = mine;
    warp_barrier();
    return host_brought[turn] + (t & ~31u);
}

inline u32 host_half(const Brought &row, u32 column) {
    u16 v;
    memcpy(&v, host_spot(row.at) + 2 * column, 2);
    return v;
}
inline void matrices(u32 *r, u32 at) {
    const Brought *all = host_lanes({at, {}});
    u32 l = lane();
    for (u32 i = 0; i < 4; i++) {
        const Brought &row = all[8 * i + l / 4];
        r[i] = host_half(row, l % 4 * 2) | host_half(row, l % 4 * 2 + 1) << 16;
    }
}
inline void crosswise(u32 *r, u32 at) {
    const Brought *all = host_lanes({at, {}});
    u32 l = lane();
    for (u32 i = 0; i < 4; i++) {
        const Brought *row = all + 8 * i + l % 4 * 2;
        r[i] = host_half(row[0], l / 4) | host_half(row[1], l / 4) << 16;
    }
}

inline void host_split(u32 w, float *x) {
    u32 b[2] = {w << 16, w & 0xffff0000};
    memcpy(x, b, 8);
}
inline void multiply(float *c, const u32 *a, const u32 *b) {
    Brought mine;
    for (u32 i = 0; i < 4; i++) host_split(a[i], mine.x + 2 * i);
    for (u32 i = 0; i < 2; i++) host_split(b[i], mine.x + 8 + 2 * i);
    const Brought *all = host_lanes(mine);
    const Brought *row = all + lane() / 4 * 4, *column = all + lane() % 4 * 8;
    for (u32 k = 0; k < 16; k++) {
        u32 part = k % 8 / 2, half = k / 8, e = k % 2;
        float x = row[part].x[4 * half + e], y = row[part].x[4 * half + 2 + e];
        float u = column[part].x[8 + 2 * half + e], v = column[4 + part].x[8 + 2 * half + e];
        c[0] += x * u;
        c[1] += x * v;
        c[2] += y * u;
        c[3] += y * v;
    }
}

inline u32 pair(float low, float high) { return narrow_pair(low, high); }
inline u32 times(u32 a, u32 b) {
    float x[2], y[2];
    host_split(a, x);
    host_split(b, y);
    return pair(x[0] * y[0], x[1] * y[1]);
}
