// Stash copies the live rows of a group's tensors into pages that the kernel takes from the
// store's free lists, and restore copies them back. stash.go describes the store and what
// is done exactly. This file does it with many blocks.
//
// The unit of work is a chunk of 4 KiB, which lies in one page and in one tensor. Warps
// take chunks in order, from counters, as they become free. So the chunks in work lie close
// together in memory, like those of the copy kernel's small blocks, and dead rows cost
// nothing: the grid is sized for the machine, and a launch whose buffers are mostly empty
// ends at once. There are several counters, because a single one limited the speed.
//
// If some pages are in host memory, the first blocks of the grid copy those and the rest
// of the grid copies the others. The first blocks saturate the link. More of them would
// only keep compute from the multiprocessors for as long as the link takes.
// targets: sm_80

#include "prelude.cuh"

#define VECTORS 8u
#define CHUNK (512u * VECTORS)
#define CHUNK_SHIFT (31 - __builtin_clz(CHUNK))
#define RESIDENT 2
#define COUNTERS 16
#define LINK_COUNTERS 4 // of them, for host pages beside device pages
#define LINE 16 // words of a cache line

struct Tier {
    u64 tail, capacity, low, pool, ring, mask, grown, pad;
};
struct State {
    u64 head[2], tail[2];
};
struct Control {
    Tier tier[2];
    State state[2];
    u64 decision[2];
    u64 page, bump, generation, seq, pad[2];
    u64 overflows, overflow_id, overflow_asked, overflow_free;
    u64 over_capacity, over_id, over_rows, over_limit;
    u64 stale, spilled, stashed, pad2[5];
    u64 ticket[2][COUNTERS][LINE];
    u64 back[COUNTERS][LINE];
};
struct Record {
    u64 id, tensors, max_pages, need;
    u64 pages[2], missed, arrived;
};
struct Tensor {
    u64 offset, row_bytes, max_rows, rows_at;
    u64 rows, first, asked, pad;
};

#define HOST_BIT 0x80000000u
#define OVERFLOWED (~0ull)

#define AT(p, type, field) ((p) + __builtin_offsetof(type, field))

// read and write are for words that other launches write. fresh sees what a launch on
// another stream writes at this moment.
DEVICE u64 read(u64 p) {
    u64 v;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u64 fresh(u64 p) {
    u64 v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u32 read32(u64 p) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void write(u64 p, u64 v) { asm volatile("st.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE void write32(u64 p, u32 v) { asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE void publish(u64 p, u64 v) { asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE u64 add(u64 p, u64 v) {
    u64 old;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
    return old;
}
// arrive and swap_if order the earlier work of the thread before the later work of any
// thread that reads the new value. After a barrier this holds for the block's work too.
DEVICE u64 arrive(u64 p) {
    u64 old;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;" : "=l"(old) : "l"(p) : "memory");
    return old;
}
DEVICE u64 swap_if(u64 p, u64 is, u64 then) {
    u64 old;
    asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;" : "=l"(old) : "l"(p), "l"(is), "l"(then) : "memory");
    return old;
}
DEVICE u32 arrive_block(u32 *p) {
    u32 old, at = (u32)(u64)(__attribute__((address_space(3))) u32 *)p;
    asm volatile("atom.acq_rel.cta.shared.add.u32 %0, [%1], 1;" : "=r"(old) : "r"(at) : "memory");
    return old;
}
DEVICE void warp_barrier() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }
DEVICE void barrier() { asm volatile("bar.sync 0;" ::: "memory"); }

// pick chooses by tier with a mask. The compiler would put the pair into memory for
// anything that it can turn into an index.
DEVICE u64 pick(const u64 *pair, u32 tier) { return pair[0] ^ ((pair[0] ^ pair[1]) & (0 - (u64)tier)); }

DEVICE u32 lane() { return thread() & 31; }
DEVICE u32 ballot(bool b) {
    u32 v;
    asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, 0xffffffff;}" : "=r"(v) : "r"((u32)b));
    return v;
}
DEVICE u32 from_lane32(u32 v, u32 l) { return __nvvm_shfl_sync_idx_i32(~0u, v, l, 31); }
DEVICE u64 from_lane(u64 v, u32 l) { return (u64)from_lane32((u32)(v >> 32), l) << 32 | from_lane32((u32)v, l); }

// relaxed reads a word that a launch on another stream may be writing. Something else
// orders the two, such as the end of the launch.
DEVICE u64 relaxed(u64 p) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u32 relaxed32(u64 p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// Shape is what the host knows of a launch, packed into one argument.
struct Shape {
    u32 tensors, shift; // shift is log2 of the size of a page
    bool bump;
    u32 link; // blocks that copy host pages
};

DEVICE Shape unpack(u64 v) { return {(u32)v & 255, (u32)(v >> 8) & 255, (v >> 16 & 1) != 0, (u32)(v >> 24) & 255}; }

// Group is what a warp knows of the group. Lane i holds tensor i, and there are at most 32.
// Everything is read before anything is used.
struct Group {
    Shape shape;
    u64 control, record, set, table;
    u64 pool[2], ring[2], mask[2];
    u64 mem;   // this lane's tensor
    u64 bytes; // its live bytes
    u64 asked, limit;
    u32 first; // the place of its first page; the largest number for lanes without a tensor
    u32 need;  // pages of all tensors, in every lane
};

DEVICE u64 tensor(const Group &g, u32 i) { return g.record + sizeof(Record) + i * sizeof(Tensor); }

// prepare reads the tensors. A stash finds its rows in the set, and a restore in the
// record. The row counts are at the start of the set, in a line of 32 words.
template <bool stash> DEVICE Group prepare(u64 control, u64 record, u64 set, u64 shape) {
    Group g;
    g.shape = unpack(shape);
    g.control = global(control);
    g.record = global(record);
    g.set = global(set);
    u32 n = g.shape.tensors;
    g.table = tensor(g, n);
    u64 t = tensor(g, least(lane(), n - 1)), tiers = AT(g.control, Control, tier);
    u64 offset = look<u64>(AT(t, Tensor, offset)), row_bytes = look<u64>(AT(t, Tensor, row_bytes));
    g.limit = look<u64>(AT(t, Tensor, max_rows));
    u64 rows_at = stash ? look<u64>(AT(t, Tensor, rows_at)) : 0;
    u64 count = stash ? look<u64>(g.set + 8 * lane()) : look<u64>(AT(t, Tensor, rows));
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        g.pool[i] = global(look<u64>(tiers + i * sizeof(Tier) + __builtin_offsetof(Tier, pool)));
        g.ring[i] = global(look<u64>(tiers + i * sizeof(Tier) + __builtin_offsetof(Tier, ring)));
        g.mask[i] = look<u64>(tiers + i * sizeof(Tier) + __builtin_offsetof(Tier, mask));
    }
    g.asked = stash ? from_lane(count, (u32)rows_at / 8) : count;
    g.mem = g.set + offset;
    g.bytes = lane() < n ? least(g.asked, g.limit) * row_bytes : 0;
    u32 pages = (u32)((g.bytes + (1ull << g.shape.shift) - 1) >> g.shape.shift), sum = pages;
#pragma unroll 1 // most groups have few tensors; five rounds cost 0.2 us of a pair
    for (u32 d = 1; d < n; d *= 2) {
        u32 below = __nvvm_shfl_sync_up_i32(~0u, sum, d, 0);
        if (lane() >= d) sum += below;
    }
    g.need = from_lane32(sum, n - 1);
    g.first = lane() < n ? sum - pages : ~0u;
    return g;
}

// Chunk is one piece of work.
struct Chunk {
    u64 mem;    // in the set
    u32 number; // of its page, with the mark of the host tier
    u32 place;  // of its page among the group's
    u32 at;     // in the page
    u32 bytes;  // zero if it lies behind the tensor's end
};

// Work is the part of a launch that a warp takes chunks of, together with other warps:
// pages in one tier, or all pages. A chunk has 512 << fine bytes. A part that is too small
// to give every warp a whole chunk is divided more finely.
struct Work {
    u32 from;           // place of the first page
    u32 chunks, fine;   // number and size of the chunks
    u32 warps, mine;    // number of the warps, and of this warp among them
    u32 counter, count; // counters that they take from
};

// cut returns the work of this warp in a group whose first pages are in device memory, and
// whose others, if any, are in host memory.
DEVICE Work cut(const Group &g, u32 device) {
    u32 link = g.shape.link, per = threads() / 32, all = blocks(), b = block(), pages = g.need;
    Work w = {0, 0, CHUNK_SHIFT - 9, 0, 0, 0, COUNTERS};
    if (device < g.need && all > link) {
        if (b < link) {
            w.from = device;
            w.counter = COUNTERS - LINK_COUNTERS;
            w.count = LINK_COUNTERS;
            pages = g.need - device;
            all = link;
        } else {
            w.count = COUNTERS - LINK_COUNTERS;
            pages = device;
            all -= link;
            b -= link;
        }
    }
    w.warps = all * per;
    w.mine = (thread() / 32) * all + b;
    w.chunks = pages << (g.shape.shift - CHUNK_SHIFT);
    while (w.fine > 0 && w.chunks > 0 && 2 * w.chunks <= w.warps) {
        w.chunks *= 2;
        w.fine--;
    }
    w.count = least(w.count, w.warps); // every counter in use needs a warp that takes from it
    return w;
}

DEVICE Chunk chunk(const Group &g, Work w, u32 i) {
    Chunk c;
    u32 size = 512u << w.fine, per = g.shape.shift - 9 - w.fine;
    c.place = i >> per;
    c.at = (i - (c.place << per)) * size;
    c.place += w.from;
    u32 t = __builtin_popcount(ballot(g.first <= c.place)) - 1;
    u64 mem = from_lane(g.mem, t), bytes = from_lane(g.bytes, t);
    u64 off = ((u64)(c.place - from_lane32(g.first, t)) << g.shape.shift) + c.at;
    c.mem = mem + off;
    c.bytes = off < bytes ? (u32)least((u64)size, bytes - off) : 0;
    return c;
}

// address returns where a page with a number from a record begins.
DEVICE u64 address(const Group &g, u32 number) {
    return pick(g.pool, number >> 31) + ((u64)(number & ~HOST_BIT) << g.shape.shift);
}

// some copies a chunk that is not whole.
DEVICE void some(u64 dst, u64 src, u32 bytes) {
    u32 l = lane(), n = bytes / 16;
#pragma unroll 1
    for (u32 k = l; k < n; k += 32) put(dst + 16 * k, fetch<Vec>(src + 16 * k));
    u32 tail = 16 * n + l;
    if (tail < bytes) put(dst + tail, fetch<u8>(src + tail));
}

// each copies the chunks of this warp's work. The first round is assigned.
// Then a warp requests its next chunk before it loads the current one, and the page of that
// chunk before it stores, so it waits for neither. look_up returns the page number of a
// chunk. known is called for each chunk once its number is known. loaded is called once in
// every warp, after the last known, when the warp reads nothing more: what it must still
// store is in its registers.
template <bool stash, class LookUp, class Known, class Loaded>
DEVICE void each(const Group &g, Work w, u64 counters, LookUp look_up, Known known, Loaded loaded) {
    u32 k = w.mine % w.count;
    u64 counter = counters + (w.counter + k) * LINE * 8;
    if (w.mine >= w.chunks) return loaded();
    Chunk c = chunk(g, w, w.mine);
    c.number = look_up(c.place);
    for (;;) {
        bool more = w.warps < w.chunks;
        u32 ticket = 0;
        if (more && lane() == 0) ticket = (u32)add(counter, 1);
        bool whole = c.bytes == CHUNK;
        Vec v[VECTORS];
        if (whole) {
            u64 src = (stash ? c.mem : address(g, c.number) + c.at) + 16 * lane();
#pragma unroll
            for (u32 n = 0; n < VECTORS; n++) v[n] = fetch<Vec>(src + 512 * n);
        }
        u32 i = w.warps + from_lane32(ticket, 0) * w.count + k;
        more = more && i < w.chunks;
        Chunk then = c;
        if (more) {
            then = chunk(g, w, i);
            then.number = look_up(then.place);
        }
        u64 page = address(g, c.number) + c.at;
        if (!more && c.at == 0 && lane() == 0) known(c);
        u64 dst = stash ? page : c.mem;
        if (!whole) some(dst, stash ? c.mem : page, c.bytes);
        if (!more) loaded();
        if (whole) {
#pragma unroll
            for (u32 n = 0; n < VECTORS; n++) put(dst + 16 * lane() + 512 * n, v[n]);
        }
        if (!more) return;
        if (c.at == 0 && lane() == 0) known(c);
        c = then;
    }
}

// last_warp reports whether this is the warp with the least to do. It settles the launch
// while the others copy.
DEVICE bool last_warp() { return block() == blocks() - 1 && thread() / 32 == threads() / 32 - 1; }

// free_pages returns the number of free pages of a tier for a head and a tail.
DEVICE u64 free_pages(u64 tier, bool bump, u64 head, u64 tail) {
    return bump ? read(AT(tier, Tier, capacity)) - head : tail - head;
}

// take_pages decides how many pages each tier gives. All warps of the launch decide the
// same. If the device tier has enough pages by the tail that the launch before saw, no
// agreement is needed, because the tail only grows. Otherwise the first warp that looks
// decides for all.
DEVICE u64 take_pages(const Group &g, const State &s, u64 seq) {
    u64 device = AT(g.control, Control, tier), host = device + sizeof(Tier), need = g.need;
    bool bump = g.shape.bump;
    if (free_pages(device, bump, s.head[0], s.tail[0]) >= need) return need;
    u64 slot = AT(g.control, Control, decision) + 8 * (seq & 1), agreed = 0;
    if (lane() == 0) {
        u64 d = least(need, free_pages(device, bump, s.head[0], fresh(AT(device, Tier, tail))));
        u64 h = least(need - d, free_pages(host, bump, s.head[1], fresh(AT(host, Tier, tail))));
        u64 mine = d + h < need ? OVERFLOWED : (d | h << 32) + 1;
        agreed = swap_if(slot, 0, mine);
        if (agreed == 0) agreed = mine;
    }
    // After this, the other lanes see what lane 0 has seen of the rings.
    warp_barrier();
    agreed = from_lane(agreed, 0);
    return agreed == OVERFLOWED ? agreed : agreed - 1;
}

// note_over records a group with more rows than its buffer holds.
DEVICE void note_over(const Group &g, u32 over) {
    u32 worst = __builtin_ctz(over);
    u64 rows = from_lane(g.asked, worst), limit = from_lane(g.limit, worst), c = g.control;
    if (lane() != 0) return;
    // A note may run at the same time as a stash.
    if (add(AT(c, Control, over_capacity), __builtin_popcount(over)) == 0) {
        write(AT(c, Control, over_id), read(AT(g.record, Record, id)));
        write(AT(c, Control, over_rows), rows);
        write(AT(c, Control, over_limit), limit);
    }
}

// all_pages returns the number of pages that all rows found would need, in lane 0.
DEVICE u64 all_pages(const Group &g) {
    u64 row_bytes = look<u64>(AT(tensor(g, least(lane(), g.shape.tensors - 1)), Tensor, row_bytes));
    u64 bytes = lane() < g.shape.tensors ? g.asked * row_bytes : 0;
    u64 pages = (bytes + (1ull << g.shape.shift) - 1) >> g.shape.shift;
    for (u32 d = 16; d > 0; d /= 2) pages += from_above(pages, d);
    return pages;
}

// note_overflow records a group that found too few pages.
DEVICE void note_overflow(const Group &g, const State &s) {
    u64 c = g.control, count = read(AT(c, Control, overflows)), free = 0;
    for (u32 i = 0; i < 2; i++) {
        u64 tier = AT(c, Control, tier) + i * sizeof(Tier);
        free += free_pages(tier, g.shape.bump, s.head[i], fresh(AT(tier, Tier, tail)));
    }
    if (count == 0) {
        write(AT(c, Control, overflow_id), read(AT(g.record, Record, id)));
        write(AT(c, Control, overflow_asked), g.need);
        write(AT(c, Control, overflow_free), free);
    }
    write(AT(c, Control, overflows), count + 1);
}

// note records the rows that were found, and reports whether they are too many.
DEVICE bool note(const Group &g) {
    u64 t = tensor(g, lane());
    if (lane() < g.shape.tensors) {
        write(AT(t, Tensor, asked), g.asked);
        write(AT(t, Tensor, rows), least(g.asked, g.limit));
        write(AT(t, Tensor, first), g.first);
    }
    u32 over = ballot(lane() < g.shape.tensors && g.asked > g.limit);
    if (over != 0) note_over(g, over);
    return over != 0;
}

// stale reports whether the step was captured before buffers moved. Records and sets are
// then elsewhere, so the launch must touch nothing.
DEVICE bool stale(u64 control) { return look<u64>(AT(global(control), Control, stale)) != 0; }

KERNEL(32)
stowage_stash_note(u64 control, u64 record, u64 set, u64 shape) {
    if (!stale(control)) note(prepare<true>(control, record, set, shape));
}

// settle writes the results of a stash. One warp of the launch does it.
DEVICE void settle(const Group &g, const State &s, u64 seq, u64 taken) {
    u64 c = g.control, r = g.record, odd = (seq + 1) & 1;
    if (lane() < COUNTERS) write(AT(c, Control, ticket) + 8 * LINE * (odd * COUNTERS + lane()), 0);
    u64 wanted = note(g) ? all_pages(g) : g.need;
    if (lane() != 0) return;
    u64 tier0 = AT(c, Control, tier), tier1 = tier0 + sizeof(Tier);
    u64 need_at = look<u64>(AT(r, Record, need)), stashed = read(AT(c, Control, stashed)), spilled = read(AT(c, Control, spilled));
    u64 tail[2] = {relaxed(AT(tier0, Tier, tail)), relaxed(AT(tier1, Tier, tail))};
    u64 low[2] = {read(AT(tier0, Tier, low)), read(AT(tier1, Tier, low))};
    u64 take[2] = {taken & 0xffffffff, taken >> 32};
    if (taken == OVERFLOWED) {
        take[0] = take[1] = 0;
        note_overflow(g, s);
    }
    write(AT(r, Record, missed), taken == OVERFLOWED);
    write(AT(c, Control, decision) + 8 * odd, 0);
    write(AT(c, Control, seq), seq + 1);
    u64 then = AT(c, Control, state) + odd * sizeof(State);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u64 tier = i == 0 ? tier0 : tier1, head = s.head[i] + take[i];
        write(AT(r, Record, pages) + 8 * i, take[i]);
        write(then + 8 * i, head);
        write(then + 16 + 8 * i, tail[i]);
        write(AT(tier, Tier, low), least(low[i], free_pages(tier, g.shape.bump, head, tail[i])));
    }
    write(global(need_at), wanted);
    write(AT(c, Control, stashed), stashed + take[0] + take[1]);
    write(AT(c, Control, spilled), spilled + take[1]);
}

// number returns the number of the page at a place among those taken.
DEVICE u32 number(const Group &g, const State &s, u64 taken, u32 place) {
    u32 device = (u32)taken, host = place >= device;
    u32 mark = host ? HOST_BIT : 0, at = host ? place - device : place;
    u64 head = pick(s.head, host);
    if (g.shape.bump) return (u32)(head + at) | mark;
    // This does not read through L1, which may hold the line from before a restore wrote to
    // it.
    return relaxed32(pick(g.ring, host) + 4 * ((head + at) & pick(g.mask, host))) | mark;
}

KERNEL(256, RESIDENT)
stowage_stash(u64 control, u64 record, u64 set, u64 seq, u64 shape) {
    u64 now = AT(global(control), Control, state) + (seq & 1) * sizeof(State);
    State s = {{look<u64>(now), look<u64>(now + 8)}, {look<u64>(now + 16), look<u64>(now + 24)}};
    bool old = stale(control);
    Group g = prepare<true>(control, record, set, shape);
    if (old) return;
    u64 taken = take_pages(g, s, seq);
    if (last_warp()) settle(g, s, seq, taken);
    if (taken == OVERFLOWED) return;
    u64 counters = AT(g.control, Control, ticket) + 8 * LINE * COUNTERS * (seq & 1);
    each<true>(
        g, cut(g, (u32)taken), counters, [&](u32 place) { return number(g, s, taken, place); },
        [&](const Chunk &c) { write32(g.table + 4 * c.place, c.number); }, [] {});
}

// leave counts the warps of a restore that will read no page and write no ring any more,
// and reports to all lanes whether this is the last warp of the launch. It comes before the
// warp's last stores, because a release waits for every earlier store, and it need not wait
// for those of the data. Only the last warp of a block counts in global memory.
DEVICE bool leave(const Group &g, u32 *left) {
    warp_barrier();
    u32 last = 0;
    if (lane() == 0 && arrive_block(left) == threads() / 32 - 1) last = arrive(AT(g.record, Record, arrived)) == blocks() - 1;
    last = from_lane32(last, 0);
    warp_barrier();
    return last != 0;
}

// give_back ends a restore: the last warp frees the pages. It has read everything that it
// needs at the beginning. The thread that saw all warps leave moves the tails last.
DEVICE void give_back(const Group &g, u64 seq, const u64 *tail, const u64 *pages) {
    u64 c = g.control, odd = (seq + 1) & 1;
    if (lane() < COUNTERS) {
        write(AT(c, Control, back) + 8 * LINE * lane(), 0);
        // In a stack the next launch of either kind needs cleared slots.
        if (g.shape.bump) write(AT(c, Control, ticket) + 8 * LINE * (odd * COUNTERS + lane()), 0);
    }
    if (lane() != 0) return;
    write(AT(g.record, Record, arrived), 0);
    u64 from = AT(c, Control, state) + (seq & 1) * sizeof(State), then = AT(c, Control, state) + odd * sizeof(State);
    if (g.shape.bump) {
        write(AT(c, Control, decision) + 8 * odd, 0);
        write(AT(c, Control, seq), seq + 1);
    }
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        write(AT(g.record, Record, pages) + 8 * i, 0);
        if (g.shape.bump) {
            write(then + 8 * i, read(from + 8 * i) - pages[i]);
            write(then + 16 + 8 * i, read(from + 16 + 8 * i));
        } else if (pages[i] != 0) {
            publish(AT(c, Control, tier) + i * sizeof(Tier) + __builtin_offsetof(Tier, tail), tail[i] + pages[i]);
        }
    }
}

KERNEL(256, RESIDENT)
stowage_restore(u64 control, u64 record, u64 set, u64 seq, u64 shape) {
    SHARED u32 left;
    if (thread() == 0) left = 0;
    barrier();
    u64 tiers = AT(global(control), Control, tier), r = global(record);
    u64 tail[2] = {read(AT(tiers, Tier, tail)), read(AT(tiers + sizeof(Tier), Tier, tail))};
    u64 pages[2] = {read(AT(r, Record, pages)), read(AT(r, Record, pages) + 8)};
    u64 missed = look<u64>(AT(r, Record, missed));
    bool old = stale(control);
    Group g = prepare<false>(control, record, set, shape);
    if (old) return;
    if (last_warp() && lane() < g.shape.tensors) write(g.set + look<u64>(AT(tensor(g, lane()), Tensor, rows_at)), g.asked);
    // A group without pages has nothing to restore: it overflowed, or was restored before.
    if (missed != 0 || pages[0] + pages[1] != g.need) g.need = 0;
    each<false>(
        g, cut(g, (u32)pages[0]), AT(g.control, Control, back), [&](u32 place) { return read32(g.table + 4 * place); },
        [&](const Chunk &c) {
            if (g.shape.bump) return;
            u32 host = c.number >> 31;
            u64 place = pick(tail, host) + (host ? c.place - pages[0] : c.place);
            write32(pick(g.ring, host) + 4 * (place & pick(g.mask, host)), c.number & ~HOST_BIT);
        },
        [&] {
            if (leave(g, &left)) give_back(g, seq, tail, pages);
        });
}

KERNEL(256)
stowage_stash_reset(u64 control, u64 needs, u64 records, u64 generation, u64 bump) {
    u64 c = global(control), i0 = (u64)block() * threads() + thread(), step = (u64)blocks() * threads();
    for (u32 t = 0; t < 2; t++) {
        u64 tier = AT(c, Control, tier) + t * sizeof(Tier), capacity = read(AT(tier, Tier, grown));
        u64 ring = global(look<u64>(AT(tier, Tier, ring)));
        if (bump == 0)
            for (u64 i = i0; i < capacity; i += step) write32(ring + 4 * i, (u32)i);
        if (i0 == 0) {
            write(AT(tier, Tier, capacity), capacity);
            write(AT(tier, Tier, tail), capacity);
            write(AT(tier, Tier, low), capacity);
            for (u32 s = 0; s < 2; s++) {
                u64 state = AT(c, Control, state) + s * sizeof(State);
                write(state + 8 * t, 0);
                write(state + 16 + 8 * t, capacity);
            }
        }
    }
    for (u64 i = i0; i < records; i += step) write(global(needs) + 8 * i, 0);
    if (i0 < 3 * COUNTERS) write(AT(c, Control, ticket) + 8 * LINE * i0, 0); // back follows ticket
    if (i0 != 0) return;
    for (u32 i = 0; i < 16; i++) write(AT(c, Control, overflows) + 8 * i, 0);
    write(AT(c, Control, decision), 0);
    write(AT(c, Control, decision) + 8, 0);
    write(AT(c, Control, bump), bump);
    write(AT(c, Control, seq), 0);
    if (generation != read(AT(c, Control, generation))) write(AT(c, Control, stale), 1);
}
