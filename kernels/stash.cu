// Stash and restore: the live rows of a group's tensors go into pages that the
// kernel takes from the store's free lists, and come back. stash.go describes the
// store and says exactly what is done; this file does it with many blocks.
//
// The unit of work is a chunk of 4 KiB, which lies in one page and in one tensor.
// Warps take chunks in order, from a counter, as they become free. That keeps what
// is under way close together in memory, like the copy kernel's small blocks, and
// costs nothing for rows that are not there: the grid is sized for the machine,
// and a launch whose buffers are mostly empty ends at once.
// targets: sm_80

#include "prelude.cuh"

struct Tier {
    u64 tail, capacity, low, pool, ring, mask, pad[2];
};
struct State {
    u64 head[2], tail[2];
};
struct Control {
    Tier tier[2];
    State state[2];
    u64 decision[2];
    u64 page, bump, generation, pad[3];
    u64 overflows, overflow_id, overflow_asked, overflow_free;
    u64 over_budget, over_id, over_rows, over_limit;
    u64 stale, spilled, stashed, pad2[5];
    u64 ticket[2], pad3[14];
    u64 back, pad4[15];
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
#define CHUNK 4096u
#define OVERFLOWED (~0ull)

#define AT(p, type, field) ((p) + __builtin_offsetof(type, field))

// read and write are for words that other launches write; fresh sees what a
// launch on another stream writes at this moment.
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
    asm volatile("atom.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
    return old;
}
DEVICE u64 swap_if(u64 p, u64 is, u64 then) {
    u64 old;
    asm volatile("atom.global.cas.b64 %0, [%1], %2, %3;" : "=l"(old) : "l"(p), "l"(is), "l"(then) : "memory");
    return old;
}
DEVICE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE void barrier() { asm volatile("bar.sync 0;" ::: "memory"); }

DEVICE u32 lane() { return thread() & 31; }
DEVICE u32 ballot(bool b) {
    u32 v;
    asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, 0xffffffff;}" : "=r"(v) : "r"((u32)b));
    return v;
}
DEVICE u32 from_lane32(u32 v, u32 l) { return __nvvm_shfl_sync_idx_i32(~0u, v, l, 31); }
DEVICE u64 from_lane(u64 v, u32 l) { return (u64)from_lane32((u32)(v >> 32), l) << 32 | from_lane32((u32)v, l); }
DEVICE u64 from_below(u64 v, u32 d) {
    u32 low = __nvvm_shfl_sync_up_i32(~0u, (u32)v, d, 0), high = __nvvm_shfl_sync_up_i32(~0u, (u32)(v >> 32), d, 0);
    return (u64)high << 32 | low;
}

// Group is what a warp knows of the group: lane i holds tensor i, of which there
// are at most 32.
struct Group {
    u64 control, record, set, table;
    u32 shift;     // log2 of a page's bytes
    u64 mem;       // this lane's tensor
    u64 bytes;     // its live bytes
    u32 first;     // the place of its first page; beyond all for lanes without one
    u32 need;      // pages of all tensors, in every lane
};

DEVICE u64 tensor(const Group &g, u32 i) { return g.record + sizeof(Record) + i * sizeof(Tensor); }

// prepare reads the tensors. A stash finds its rows in the set, a restore in the
// record. It reports the rows of this lane's tensor.
template <bool stash> DEVICE u64 prepare(Group &g, u64 control, u64 record, u64 set, u64 &limit) {
    g.control = global(control);
    g.record = global(record);
    g.set = global(set);
    u32 n = (u32)look<u64>(AT(g.record, Record, tensors));
    u64 page = look<u64>(AT(g.control, Control, page));
    u64 t = tensor(g, lane()), asked = 0, rows = 0, row_bytes = 0;
    limit = 0;
    g.mem = g.set;
    if (lane() < n) {
        u64 rows_at = look<u64>(AT(t, Tensor, rows_at));
        limit = look<u64>(AT(t, Tensor, max_rows));
        row_bytes = look<u64>(AT(t, Tensor, row_bytes));
        g.mem = g.set + look<u64>(AT(t, Tensor, offset));
        asked = stash ? look<u64>(g.set + rows_at) : look<u64>(AT(t, Tensor, rows));
        rows = least(asked, limit);
    }
    g.table = tensor(g, n);
    g.shift = 63 - __builtin_clzll(page);
    g.bytes = rows * row_bytes;
    u32 pages = (u32)((g.bytes + page - 1) >> g.shift), sum = pages;
    for (u32 d = 1; d < 32; d *= 2) {
        u32 below = (u32)from_below(sum, d);
        if (lane() >= d) sum += below;
    }
    g.need = from_lane32(sum, 31);
    g.first = lane() < n ? sum - pages : ~0u;
    return asked;
}

// Chunk is one piece of work.
struct Chunk {
    u64 mem;   // in the set
    u32 place; // of its page among the group's
    u32 at;    // in the page
    u32 bytes; // zero if it lies behind the tensor's end
};

DEVICE Chunk chunk(const Group &g, u64 i) {
    Chunk c;
    u64 at = i * CHUNK;
    c.place = (u32)(at >> g.shift);
    c.at = (u32)at & ((1u << g.shift) - 1);
    u32 t = __builtin_popcount(ballot(g.first <= c.place)) - 1;
    u64 mem = from_lane(g.mem, t), bytes = from_lane(g.bytes, t);
    u64 off = ((u64)(c.place - from_lane32(g.first, t)) << g.shift) + c.at;
    c.mem = mem + off;
    c.bytes = off < bytes ? (u32)least((u64)CHUNK, bytes - off) : 0;
    return c;
}

// carry copies a chunk with one warp: eight vectors a lane, all loaded before the
// first is stored.
DEVICE void carry(u64 dst, u64 src, u32 bytes) {
    u32 l = lane();
    if (bytes == CHUNK) {
        Vec v[8];
#pragma unroll
        for (u32 k = 0; k < 8; k++) v[k] = fetch<Vec>(src + 16 * (l + 32 * k));
#pragma unroll
        for (u32 k = 0; k < 8; k++) put(dst + 16 * (l + 32 * k), v[k]);
        return;
    }
    u32 n = bytes / 16;
#pragma unroll 1
    for (u32 k = l; k < n; k += 32) put(dst + 16 * k, fetch<Vec>(src + 16 * k));
    u32 tail = 16 * n + l;
    if (tail < bytes) put(dst + tail, fetch<u8>(src + tail));
}

// address is where a page with a number from a record begins.
DEVICE u64 address(const Group &g, u32 number) {
    u32 host = number >> 31;
    u64 pool = look<u64>(AT(g.control, Control, tier) + host * sizeof(Tier) + __builtin_offsetof(Tier, pool));
    return global(pool) + ((u64)(number & ~HOST_BIT) << g.shift);
}

// next is the chunk that a warp takes after chunk i. The first round is dealt out
// without the counter.
DEVICE u64 next(u64 counter) {
    u64 i = 0;
    if (lane() == 0) i = add(counter, 1);
    return from_lane(i, 0) + (u64)blocks() * (threads() / 32);
}

DEVICE u64 first_chunk() { return (u64)(thread() / 32) * blocks() + block(); }

// free_pages is the number of free pages of a tier for a head and a tail.
DEVICE u64 free_pages(u64 tier, bool bump, u64 head, u64 tail) {
    return bump ? read(AT(tier, Tier, capacity)) - head : tail - head;
}

// take_pages decides how many pages each tier gives, the same in all warps of the
// launch. As long as the device tier has enough by what the launch before saw,
// there is nothing to agree on: the tail only grows. Otherwise the first warp to
// look decides for all.
DEVICE u64 take_pages(const Group &g, const State &s, bool bump, u64 seq) {
    u64 device = AT(g.control, Control, tier), host = device + sizeof(Tier), need = g.need;
    u64 seen = free_pages(device, bump, s.head[0], s.tail[0]);
    if (seen >= need) return need;
    u64 slot = AT(g.control, Control, decision) + 8 * (seq & 1), agreed = 0;
    if (lane() == 0) {
        u64 d = least(need, free_pages(device, bump, s.head[0], fresh(AT(device, Tier, tail))));
        u64 h = least(need - d, free_pages(host, bump, s.head[1], fresh(AT(host, Tier, tail))));
        u64 mine = d + h < need ? OVERFLOWED : (d | h << 32) + 1;
        agreed = swap_if(slot, 0, mine);
        if (agreed == 0) agreed = mine;
    }
    agreed = from_lane(agreed, 0);
    return agreed == OVERFLOWED ? agreed : agreed - 1;
}

// settle writes what the stash leaves behind; one warp of the launch does it.
DEVICE void settle(const Group &g, const State &s, bool bump, u64 seq, u64 taken, u64 asked, u64 limit) {
    u64 c = g.control, r = g.record, t = tensor(g, lane());
    u32 n = (u32)look<u64>(AT(r, Record, tensors));
    if (lane() < n) {
        write(AT(t, Tensor, asked), asked);
        write(AT(t, Tensor, rows), least(asked, limit));
        write(AT(t, Tensor, first), g.first);
    }
    u32 over = ballot(lane() < n && asked > limit);
    u64 over_rows = 0, over_limit = 0;
    if (over != 0) {
        u32 worst = __builtin_ctz(over);
        over_rows = from_lane(asked, worst);
        over_limit = from_lane(limit, worst);
    }
    if (lane() != 0) return;
    write(global(look<u64>(AT(r, Record, need))), g.need);
    u64 id = look<u64>(AT(r, Record, id));
    if (over != 0) {
        u64 count = read(AT(c, Control, over_budget));
        if (count == 0) {
            write(AT(c, Control, over_id), id);
            write(AT(c, Control, over_rows), over_rows);
            write(AT(c, Control, over_limit), over_limit);
        }
        write(AT(c, Control, over_budget), count + __builtin_popcount(over));
    }
    u64 take[2] = {taken & 0xffffffff, taken >> 32};
    write(AT(r, Record, missed), taken == OVERFLOWED);
    if (taken == OVERFLOWED) {
        take[0] = take[1] = 0;
        u64 count = read(AT(c, Control, overflows));
        if (count == 0) {
            u64 free = 0;
            for (u32 i = 0; i < 2; i++) {
                u64 tier = AT(c, Control, tier) + i * sizeof(Tier);
                free += free_pages(tier, bump, s.head[i], fresh(AT(tier, Tier, tail)));
            }
            write(AT(c, Control, overflow_id), id);
            write(AT(c, Control, overflow_asked), g.need);
            write(AT(c, Control, overflow_free), free);
        }
        write(AT(c, Control, overflows), count + 1);
    }
    write(AT(c, Control, stashed), read(AT(c, Control, stashed)) + take[0] + take[1]);
    write(AT(c, Control, spilled), read(AT(c, Control, spilled)) + take[1]);
    u64 then = AT(c, Control, state) + ((seq + 1) & 1) * sizeof(State);
    for (u32 i = 0; i < 2; i++) {
        u64 tier = AT(c, Control, tier) + i * sizeof(Tier), head = s.head[i] + take[i], tail = fresh(AT(tier, Tier, tail));
        u64 low = read(AT(tier, Tier, low));
        write(AT(r, Record, pages) + 8 * i, take[i]);
        write(then + 8 * i, head);
        write(then + 16 + 8 * i, tail);
        write(AT(tier, Tier, low), least(low, free_pages(tier, bump, head, tail)));
    }
    write(AT(c, Control, decision) + 8 * ((seq + 1) & 1), 0);
    write(AT(c, Control, ticket) + 8 * ((seq + 1) & 1), 0);
}

// number is the number of the page at a place among those taken.
DEVICE u32 number(const Group &g, const State &s, bool bump, u64 taken, u32 place) {
    u32 device = (u32)taken, host = place >= device;
    u32 mark = host ? HOST_BIT : 0, at = host ? place - device : place;
    u64 head = host ? s.head[1] : s.head[0];
    if (bump) return (u32)(head + at) | mark;
    u64 tier = AT(g.control, Control, tier) + host * sizeof(Tier);
    u64 ring = global(look<u64>(AT(tier, Tier, ring))), mask = look<u64>(AT(tier, Tier, mask));
    return read32(ring + 4 * ((head + at) & mask)) | mark;
}

KERNEL(256, 4)
stowage_stash(u64 control, u64 record, u64 set, u64 seq) {
    Group g;
    u64 limit, asked = prepare<true>(g, control, record, set, limit);
    u64 now = AT(g.control, Control, state) + (seq & 1) * sizeof(State);
    State s = {{look<u64>(now), look<u64>(now + 8)}, {look<u64>(now + 16), look<u64>(now + 24)}};
    bool bump = look<u64>(AT(g.control, Control, bump)) != 0;
    u64 taken = take_pages(g, s, bump, seq);
    if (block() == 0 && thread() < 32) settle(g, s, bump, seq, taken, asked, limit);
    if (taken == OVERFLOWED) return;
    u64 counter = AT(g.control, Control, ticket) + 8 * (seq & 1);
    u64 chunks = (u64)g.need << (g.shift - 12);
    for (u64 i = first_chunk(); i < chunks; i = next(counter)) {
        Chunk c = chunk(g, i);
        if (c.bytes == 0 && c.at != 0) continue;
        u32 page = number(g, s, bump, taken, c.place);
        if (c.at == 0 && lane() == 0) write32(g.table + 4 * c.place, page);
        carry(address(g, page) + c.at, c.mem, c.bytes);
    }
}

// give_back ends a restore: the last block to finish gives the pages back.
DEVICE void give_back(const Group &g, bool bump, u64 seq) {
    barrier();
    if (thread() != 0) return;
    fence();
    if (add(AT(g.record, Record, arrived), 1) != blocks() - 1) return;
    fence();
    write(AT(g.record, Record, arrived), 0);
    write(AT(g.control, Control, back), 0);
    u64 from = AT(g.control, Control, state) + (seq & 1) * sizeof(State);
    u64 then = AT(g.control, Control, state) + ((seq + 1) & 1) * sizeof(State);
    for (u32 i = 0; i < 2; i++) {
        u64 pages = read(AT(g.record, Record, pages) + 8 * i), tier = AT(g.control, Control, tier) + i * sizeof(Tier);
        write(AT(g.record, Record, pages) + 8 * i, 0);
        if (bump) {
            write(then + 8 * i, read(from + 8 * i) - pages);
            write(then + 16 + 8 * i, read(from + 16 + 8 * i));
        } else {
            publish(AT(tier, Tier, tail), read(AT(tier, Tier, tail)) + pages);
        }
    }
    if (bump) {
        // The next launch, a stash or a restore, counts on clear slots.
        write(AT(g.control, Control, decision) + 8 * ((seq + 1) & 1), 0);
        write(AT(g.control, Control, ticket) + 8 * ((seq + 1) & 1), 0);
    }
}

KERNEL(256, 4)
stowage_restore(u64 control, u64 record, u64 set, u64 seq) {
    Group g;
    u64 limit, rows = prepare<false>(g, control, record, set, limit);
    u32 n = (u32)look<u64>(AT(g.record, Record, tensors));
    bool bump = look<u64>(AT(g.control, Control, bump)) != 0;
    if (block() == 0 && thread() < n) write(g.set + look<u64>(AT(tensor(g, lane()), Tensor, rows_at)), rows);
    u64 chunks = (u64)g.need << (g.shift - 12);
    if (look<u64>(AT(g.record, Record, missed)) != 0) chunks = 0;
    u64 tiers = AT(g.control, Control, tier), device = read(AT(g.record, Record, pages));
    u64 counter = AT(g.control, Control, back);
    for (u64 i = first_chunk(); i < chunks; i = next(counter)) {
        Chunk c = chunk(g, i);
        if (c.bytes == 0 && c.at != 0) continue;
        u32 page = read32(g.table + 4 * c.place), host = page >> 31;
        if (c.at == 0 && lane() == 0 && !bump) {
            u64 tier = tiers + host * sizeof(Tier);
            u64 ring = global(look<u64>(AT(tier, Tier, ring))), mask = look<u64>(AT(tier, Tier, mask));
            u64 place = read(AT(tier, Tier, tail)) + (host ? c.place - device : c.place);
            write32(ring + 4 * (place & mask), page & ~HOST_BIT);
        }
        carry(c.mem, address(g, page) + c.at, c.bytes);
    }
    give_back(g, bump, seq);
}

KERNEL(256)
stowage_stash_reset(u64 control, u64 needs, u64 records, u64 generation, u64 bump) {
    u64 c = global(control), i0 = (u64)block() * threads() + thread(), step = (u64)blocks() * threads();
    for (u32 t = 0; t < 2; t++) {
        u64 tier = AT(c, Control, tier) + t * sizeof(Tier), capacity = read(AT(tier, Tier, capacity));
        u64 ring = global(look<u64>(AT(tier, Tier, ring)));
        if (bump == 0)
            for (u64 i = i0; i < capacity; i += step) write32(ring + 4 * i, (u32)i);
        if (i0 == 0) {
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
    if (i0 != 0) return;
    for (u32 i = 0; i < 16; i++) write(AT(c, Control, overflows) + 8 * i, 0);
    for (u32 i = 0; i < 2; i++) {
        write(AT(c, Control, decision) + 8 * i, 0);
        write(AT(c, Control, ticket) + 8 * i, 0);
    }
    write(AT(c, Control, back), 0);
    write(AT(c, Control, bump), bump);
    if (generation != read(AT(c, Control, generation))) write(AT(c, Control, stale), 1);
}
