// This file has which tiles products on Hopper consist of: dense ones, and products over
// experts.

#pragma once

#include "gemmhopper.cuh"

#define MOST_EXPERTS 512u

DEVICE u64 bytes(u32 type, u64 n) { return n << (type == BF16 ? 1 : 2); }

// Dense is one product.
template <class Form> struct Dense {
    static constexpr u32 room = 0, high = Form::high, wide = Form::wide;
    u64 c, plus;
    u32 m, n, k;
    Target to;

    DEVICE void setup(u32 *) {}
    DEVICE void idle(u32, u32, volatile u32 *) const {}
    DEVICE u32 pairs() const { return pairs_of(pieces(m, high), pieces(n, wide)); }
    DEVICE u32 depth(u32) const { return k; }
    DEVICE Place find(u32 p) const { return at(nth_pair(pieces(m, high), pieces(n, wide), p)); }
    DEVICE Place at(const Spot &s) const {
        u32 m0 = s.m * high, n0 = s.n * wide;
        return {m0, n0, 0, 0, k, m - m0, n0 < n ? n - n0 : 0,
                c + bytes(to.type, m0 * to.pitch + n0), plus == 0 ? 0 : plus + bytes(to.type_plus, m0 * to.pitch_plus + n0), s.share_b};
    }
};

// Experts are the segments, in shared memory: their first rows, their sizes, and the number
// of pairs up to the end of an expert's. Without segments one expert has all rows.
struct Experts {
    static constexpr u32 room = MOST_EXPERTS * 12;
    u64 segments;
    u32 count, rows; // experts, and rows that all of them have room for
    u32 *ends;

    DEVICE u32 &first(u32 e) const { return ends[MOST_EXPERTS + e]; }
    DEVICE u32 &size(u32 e) const { return ends[2 * MOST_EXPERTS + e]; }
    // add_up has each(size of an expert) summed over the experts.
    template <class Each> DEVICE void add_up(u32 *to, Each each) {
        ends = to;
        if (warp() != 0) return;
        u32 before = 0;
#pragma unroll 1
        for (u32 base = 0; base < count; base += 32) {
            u32 e = base + lane(), mine = 0;
            if (e < count) {
                u32 from = segments == 0 ? 0 : look<u32>(segments + 8 * e), n = segments == 0 ? rows : look<u32>(segments + 8 * e + 4);
                if (from > rows || n > rows - from) trap();
                first(e) = from;
                size(e) = n;
                mine = each(n);
            }
            u32 end = before + warp_scan(mine);
            if (e < count) ends[e] = end;
            before = from_lane(end, 31);
        }
    }
    // owner returns the first expert that ends behind p.
    DEVICE u32 owner(u32 p) const {
        u32 e = 0, most = count - 1;
#pragma unroll 1
        while (e < most) {
            u32 middle = (e + most) / 2;
            if (ends[middle] > p) most = middle;
            else e = middle + 1;
        }
        return e;
    }
};

// Grouped is a product over experts. below is the number of rows of B's memory for one.
template <bool trans_b, class Form> struct Grouped {
    static constexpr u32 room = Experts::room, high = Form::high, wide = Form::wide;
    u64 c;
    u32 n, k;
    Target to;
    Experts experts;

    DEVICE void setup(u32 *ends) {
        u32 across = pieces(n, wide);
        experts.add_up(ends, [across](u32 rows) INLINE { return pairs_of(pieces(rows, high), across); });
    }
    DEVICE void idle(u32, u32, volatile u32 *) const {}
    DEVICE u32 pairs() const { return experts.ends[experts.count - 1]; }
    DEVICE u32 depth(u32) const { return k; }
    DEVICE Place find(u32 p) const {
        u32 e = experts.owner(p), first = experts.first(e), m = experts.size(e);
        Spot s = nth_pair(pieces(m, high), pieces(n, wide), e == 0 ? p : p - experts.ends[e - 1]);
        u32 m0 = s.m * high, n0 = s.n * wide;
        return {first + m0, trans_b ? e * n + n0 : n0, 0, trans_b ? 0 : e * k, k, m - m0, n0 < n ? n - n0 : 0,
                c + bytes(to.type, (first + m0) * to.pitch + n0), 0, s.share_b};
    }
};

DEVICE u32 type_of(u64 how, u32 i) { return bit(how, i) ? (u32)BF16 : (u32)F32; }
