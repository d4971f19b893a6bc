// Copies between a dense run of bytes and the pages of a pool. Entry k of a table
// of 32-bit page numbers says where bytes [k page, (k+1) page) of the run live;
// of the last page a part may be used.
//
// A thread finds the page of every element it moves by itself, so that pages of
// any size cost the same. Elements are vectors of 16 bytes, or as much less as
// the alignment of the run asks for; pages begin and end at multiples of 16, so
// that no element crosses from one page to the next.
// targets: sm_80

#include "prelude.cuh"

struct Pages {
    u64 run, pool, table;
    u64 live;  // bytes to move
    u64 page;  // bytes of a page
    u64 limit; // pages of the pool
    u64 part;  // bytes that a block moves at a time
};

// Spot is an element of a page: the page's number and the offset in the page, in
// elements. Looking the number up and making an address of it are apart, so that
// the look-ups of a batch are under way together.
struct Spot {
    u32 number, offset;
};

// find looks up the element o elements behind the start of the page of entry k.
DEVICE Spot find(const Pages &p, u64 k, u32 o, u32 page) {
    u32 over = o / page;
    return {look<u32>(p.table + 4 * (k + over)), o - over * page};
}

DEVICE u64 address(const Pages &p, Spot s, u32 width) {
    if (s.number >= p.limit) trap();
    return p.pool + s.number * p.page + (u64)s.offset * width;
}

template <bool scatter, class T> DEVICE void move(const Pages &p) {
    constexpr u32 width = sizeof(T);
    u32 page = (u32)(p.page / width), step = threads(), t = thread();
    u64 n = p.live / width, part = p.part / width;
    for (u64 base = block() * part; base < n; base += blocks() * part) {
        u64 end = least(base + part, n), i = base, k = base / page;
        u32 o = (u32)(base - k * page);
        for (; i + 2 * step <= end; i += 2 * step) {
            u64 c = p.run + (i + t) * width, d = c + step * width;
            Spot first = find(p, k, o + t, page), second = find(p, k, o + t + step, page);
            if (scatter) {
                T x = fetch<T>(c), y = fetch<T>(d);
                put(address(p, first, width), x);
                put(address(p, second, width), y);
            } else {
                u64 a = address(p, first, width), b = address(p, second, width);
                T x = fetch<T>(a), y = fetch<T>(b);
                put(c, x);
                put(d, y);
            }
            o += 2 * step;
            k += o / page;
            o %= page;
        }
#pragma unroll 1
        for (o += t, i += t; i < end; o += step, i += step) {
            u64 a = address(p, find(p, k, o, page), width), c = p.run + i * width;
            put(scatter ? a : c, fetch<T>(scatter ? c : a));
        }
    }
    // What does not fill an element at the end.
    u64 tail = n * width + t;
    if (block() == 0 && tail < p.live) {
        u64 k = tail / p.page, c = p.run + tail;
        u64 a = address(p, find(p, k, (u32)(tail - k * p.page), (u32)p.page), 1);
        put(scatter ? a : c, fetch<u8>(scatter ? c : a));
    }
}

template <bool scatter>
DEVICE void pages(u64 run, u64 pool, u64 table, u64 bytes, u64 count, u64 page, u64 limit, u64 part) {
    Pages p = {global(run), global(pool), global(table), bytes, page, limit, part};
    if (count != 0) p.live = least(bytes, look<u64>(global(count)));
    if ((run & 15) == 0) {
        move<scatter, Vec>(p);
    } else if ((run & 3) == 0) {
        move<scatter, u32>(p);
    } else {
        move<scatter, u8>(p);
    }
}

KERNEL(128)
stowage_scatter_pages(u64 pool, u64 run, u64 table, u64 bytes, u64 count, u64 page, u64 limit, u64 part) {
    pages<true>(run, pool, table, bytes, count, page, limit, part);
}

KERNEL(128)
stowage_gather_pages(u64 run, u64 pool, u64 table, u64 bytes, u64 count, u64 page, u64 limit, u64 part) {
    pages<false>(run, pool, table, bytes, count, page, limit, part);
}
