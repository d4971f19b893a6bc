// Rows move to experts and back: sorting, regrouping, taking and combining. rows.go says
// what is computed.
// targets: sm_80

#include "nn.cuh"

#define EXPERTS 1024u // MaxExperts
#define NONE (~0u)
#define THREADS 256
#define RUN 4096u // pairs that a block sorts: sortRun
#define WARPS (THREADS / 32)

// count_pairs counts the experts of n pairs. It loads all of them before it counts.
template <u32 n> DEVICE void count_pairs(u32 *count, u64 index, u64 from, u32 apart, u64 end, u32 first, u32 experts) {
    u32 e[n];
    // A number below first wraps around to one that is too large.
#pragma unroll
    for (u32 k = 0; k < n; k++) e[k] = from + k * apart < end ? look<u32>(index + 4 * (from + k * apart)) - first : NONE;
#pragma unroll
    for (u32 k = 0; k < n; k++) {
        if (e[k] < experts) tally(&count[e[k]], 1);
    }
}

KERNEL(THREADS)
stowage_nn_sort_count(u64 index, u64 scratch, u64 pairs, u64 which) {
    SHARED u32 count[EXPERTS];
    u32 first = low(which), experts = high(which);
#pragma unroll 1
    for (u64 from = (u64)block() * RUN; from < pairs; from += (u64)blocks() * RUN) {
#pragma unroll 1
        for (u32 e = thread(); e < experts; e += threads()) count[e] = 0;
        barrier();
        count_pairs<RUN / THREADS>(count, global(index), from + thread(), THREADS, least(from + RUN, pairs), first, experts);
        barrier();
        u64 to = global(scratch) + 4 * (from / RUN) * experts;
#pragma unroll 1
        for (u32 e = thread(); e < experts; e += threads()) write(to + 4 * e, count[e]);
    }
}

// Layout says where the rows of experts lie: in groups that begin at multiples of a slot,
// or one behind the other without slots.
struct Layout {
    u32 experts, group;
    u64 slot, room;
};

SHARED u32 prefix_part[32];

// prefix computes the counts of all earlier experts from the counts of experts. All threads
// of the block call it, and may use both arrays afterwards.
DEVICE void prefix(const u32 *count, u32 *before, u32 experts) {
    u32 sum = 0;
#pragma unroll 1
    for (u32 from = 0; from < experts; from += threads()) {
        u32 e = from + thread(), n = e < experts ? count[e] : 0, up = warp_scan(n);
        if (lane() == 31) prefix_part[warp()] = up;
        barrier();
        u32 at = sum;
#pragma unroll 1
        for (u32 w = 0; w < warps(); w++) {
            if (w < warp()) at += prefix_part[w];
            sum += prefix_part[w];
        }
        if (e < experts) before[e] = at + up - n;
        barrier();
    }
}

// segment computes where an expert's rows begin, and how many fit into its slot and the
// room. at + live of an expert is where the next expert of the group begins.
DEVICE void segment(const Layout &y, const u32 *count, const u32 *before, u32 e, u32 &at, u32 &live) {
    u32 first = y.slot == 0 ? 0 : e - e % y.group;
    u64 start = y.slot == 0 ? 0 : least(e / y.group * y.slot, y.room);
    u64 end = y.slot == 0 ? y.room : least(start + y.slot, y.room);
    u64 from = least(start + (before[e] - before[first]), end);
    at = (u32)from;
    live = (u32)least((u64)count[e], end - from);
}

template <class T> DEVICE T most(T a, T b) { return a > b ? a : b; }

DEVICE u64 across64(u64 v, u32 d) { return (u64)across(high(v), d) << 32 | across(low(v), d); }

// need returns the room that all rows would need. A warp calls it.
DEVICE u64 need(const Layout &y, const u32 *count) {
    u64 end = 0, largest = 0, groups = 0;
    if (y.slot == 0) {
#pragma unroll 1
        for (u32 e = lane(); e < y.experts; e += 32) end += count[e];
#pragma unroll
        for (u32 d = 16; d > 0; d /= 2) end += across64(end, d);
        return end;
    }
    groups = (y.experts + y.group - 1) / y.group;
#pragma unroll 1
    for (u32 g = lane(); g < groups; g += 32) {
        u64 rows = 0;
#pragma unroll 1
        for (u32 e = g * y.group; e < least((g + 1) * y.group, y.experts); e++) rows += count[e];
        if (rows > 0) end = most(end, g * y.slot + rows);
        largest = most(largest, rows);
    }
#pragma unroll
    for (u32 d = 16; d > 0; d /= 2) {
        end = most(end, across64(end, d));
        largest = most(largest, across64(largest, d));
    }
    return largest > y.slot ? groups * largest : end;
}

// This kernel has one block, with a thread for each expert.
KERNEL(1024)
stowage_nn_sort_scan(u64 scratch, u64 seg, u64 count, u64 counts, u64 size, u64 groups, u64 limits) {
    SHARED u32 rows[EXPERTS], before[EXPERTS];
    Layout y = {high(size), low(groups), high(groups), high(limits)};
    u32 runs = low(size), capacity = low(limits), e = thread(), n = 0;
    if (e < y.experts) {
        u64 at = global(scratch) + 4 * e;
        u64 pitch = 4ull * y.experts;
#pragma unroll 1
        for (u32 r = 0; r < runs; r += 8, at += 8 * pitch) {
            u32 here[8];
#pragma unroll
            for (u32 k = 0; k < 8; k++) here[k] = r + k < runs ? read<u32>(at + k * pitch) : 0;
#pragma unroll
            for (u32 k = 0; k < 8; k++) {
                if (r + k < runs) write(at + k * pitch, n);
                n += here[k];
            }
        }
        if (capacity != 0) n = least(n, capacity);
        rows[e] = n;
    }
    prefix(rows, before, y.experts);
    if (e < y.experts) {
        u32 at, live;
        segment(y, rows, before, e, at, live);
        write(global(seg) + 8 * e, at);
        write(global(seg) + 8 * e + 4, live);
        if (counts != 0) write(global(counts) + 4 * e, n);
    }
    if (count != 0 && warp() == 0) {
        u64 all = need(y, rows);
        if (lane() == 0) write(global(count), all);
    }
}

// clear_gaps sets the rows that lie in no segment to None, divided over the grid. Segments
// are in order, so only the last one that begins at or before a row can hold it. start and
// live return the segments.
template <class Start, class Live> DEVICE void clear_gaps(u64 source, u64 room, u32 experts, Start start, Live live) {
#pragma unroll 1
    for (u64 i = (u64)block() * threads() + thread(); i < room; i += (u64)blocks() * threads()) {
        u32 from = 0, to = experts; // the segment is before to, and not before from - 1
#pragma unroll 1
        while (from < to) {
            u32 mid = (from + to) / 2;
            if (start(mid) <= i) {
                from = mid + 1;
            } else {
                to = mid;
            }
        }
        if (from == 0 || i - start(from - 1) >= live(from - 1)) write(source + 4 * i, NONE);
    }
}

// put_pairs places the pairs of a run. Every warp has its share of them, in order, and next
// says how many of each expert lie before.
DEVICE void put_pairs(u64 index, u64 seg, u64 source, u64 place, u64 from, u64 end, u32 first, u32 experts, u32 *next) {
    constexpr u32 share = RUN / WARPS;
#pragma unroll 1
    for (u64 i = from + warp() * share + lane(); i - lane() < least(from + (warp() + 1) * share, end); i += 32) {
        u32 e = i < end ? look<u32>(index + 4 * i) - first : experts;
        u32 like = same(e), row = NONE;
        if (e < experts) {
            u32 n = next[e] + (u32)__builtin_popcount(like & ((1u << lane()) - 1));
            if (n < look<u32>(seg + 8 * e + 4)) {
                row = look<u32>(seg + 8 * e) + n;
                write(source + 4ull * row, (u32)i);
            }
        }
        warp_barrier();
        if (e < experts && like >> lane() == 1) next[e] += (u32)__builtin_popcount(like);
        warp_barrier();
        if (i < end) write(place + 4 * i, row);
    }
}

KERNEL(THREADS)
stowage_nn_sort_rows(u64 index, u64 scratch, u64 seg, u64 source, u64 place, u64 pairs, u64 which, u64 room) {
    SHARED u32 next[WARPS][EXPERTS];
    u32 first = low(which), experts = high(which);
    constexpr u32 share = RUN / WARPS;
#pragma unroll 1
    for (u64 from = (u64)block() * RUN; from < pairs; from += (u64)blocks() * RUN) {
        barrier();
#pragma unroll 1
        for (u32 e = thread(); e < experts; e += threads()) {
#pragma unroll
            for (u32 w = 0; w < WARPS; w++) next[w][e] = 0;
        }
        barrier();
        u64 begin = from + warp() * share, end = least(from + RUN, pairs);
        count_pairs<share / 32>(next[warp()], global(index), begin + lane(), 32, end, first, experts);
        barrier();
#pragma unroll 1
        for (u32 e = thread(); e < experts; e += threads()) {
            u32 n = read<u32>(global(scratch) + 4 * ((from / RUN) * experts + e));
#pragma unroll
            for (u32 w = 0; w < WARPS; w++) {
                u32 here = next[w][e];
                next[w][e] = n;
                n += here;
            }
        }
        barrier();
        put_pairs(global(index), global(seg), global(source), global(place), from, end, first, experts, next[warp()]);
    }
    u64 s = global(seg);
    clear_gaps(
        global(source), room, experts, [=](u32 e) { return look<u32>(s + 8 * e); }, [=](u32 e) { return look<u32>(s + 8 * e + 4); });
}

// Table is what a block computes from the counts of all ranks, for one of them.
struct Table {
    u32 *asked, *came; // of each expert: rows of all ranks, and those that arrived
    u32 *next;         // rows that came from ranks before this one
    u32 *here;         // rows of experts before, of those that came from this rank
};

// add_up computes the table, with a rank a warp at a time. Rows of a rank beyond its part
// did not arrive. Limiting each count to the part first keeps the sums within 32 bits.
DEVICE void add_up(const Table &t, u64 counts, u32 ranks, u32 experts, u32 part, u32 mine) {
    barrier();
#pragma unroll 1
    for (u32 e = thread(); e < experts; e += threads()) t.asked[e] = t.came[e] = t.next[e] = 0;
    barrier();
#pragma unroll 1
    for (u32 p = warp(); p < ranks; p += warps()) {
        u32 sum = 0;
#pragma unroll 1
        for (u32 from = 0; from < experts; from += 32) {
            u32 e = from + lane(), n = e < experts ? look<u32>(counts + 4 * ((u64)p * experts + e)) : 0, cut = least(n, part);
            u32 up = warp_scan(cut), at = least(sum + up - cut, part), rows = least(sum + up, part) - at;
            if (e < experts) {
                tally(&t.asked[e], n);
                tally(&t.came[e], rows);
                if (p < mine) tally(&t.next[e], rows);
                if (p == mine) t.here[e] = at;
            }
            sum = least(sum + from_lane(up, 31), part);
        }
        if (p == mine && lane() == 0) t.here[experts] = sum;
    }
    barrier();
}

// put_part places the rows of a rank. This block has a share of them.
DEVICE void put_part(const Table &t, const u32 *start, const u32 *live, u64 source, u64 place, u32 experts, u32 part, u32 mine, u32 share,
                     u32 shares) {
#pragma unroll 1
    for (u32 i = share * threads() + thread(); i < part; i += shares * threads()) {
        u32 row = NONE;
        u64 at = (u64)mine * part + i;
        if (i < t.here[experts]) {
            u32 from = 0, to = experts - 1; // the last expert whose rows begin at i or before
#pragma unroll 1
            while (from < to) {
                u32 mid = (from + to + 1) / 2;
                if (t.here[mid] <= i) {
                    from = mid;
                } else {
                    to = mid - 1;
                }
            }
            u32 n = t.next[from] + i - t.here[from];
            if (n < live[from]) {
                row = start[from] + n;
                write(source + 4ull * row, (u32)at);
            }
        }
        write(place + 4 * at, row);
    }
}

KERNEL(THREADS)
stowage_nn_regroup(u64 counts, u64 seg, u64 source, u64 place, u64 count, u64 size, u64 parts, u64 room) {
    SHARED u32 asked[EXPERTS], came[EXPERTS], next[EXPERTS], here[EXPERTS + 1], before[EXPERTS], start[EXPERTS], live[EXPERTS];
    u32 ranks = low(size), experts = high(size), part = low(parts);
    Table t = {asked, came, next, here};
    Layout y = {experts, 1, high(parts), room};
    // Blocks are assigned to ranks in turn. Each iteration computes the same segments.
#pragma unroll 1
    for (u32 mine = block() % ranks; mine < ranks; mine += blocks()) {
        add_up(t, global(counts), ranks, experts, part, mine);
        prefix(came, before, experts);
#pragma unroll 1
        for (u32 e = thread(); e < experts; e += threads()) segment(y, came, before, e, start[e], live[e]);
        barrier();
        u32 shares = blocks() <= ranks ? 1 : (blocks() - mine + ranks - 1) / ranks;
        put_part(t, start, live, global(source), global(place), experts, part, mine, block() / ranks, shares);
    }
    clear_gaps(
        global(source), room, experts, [&](u32 e) { return start[e]; }, [&](u32 e) { return live[e]; });
    if (block() != 0) return;
#pragma unroll 1
    for (u32 e = thread(); e < experts; e += threads()) {
        write(global(seg) + 8 * e, start[e]);
        write(global(seg) + 8 * e + 4, live[e]);
    }
    if (count != 0 && warp() == 0) {
        u64 all = need(y, asked);
        if (lane() == 0) write(global(count), all);
    }
}

#define PIECE 2048u // bytes of a row that a warp copies: four vectors a lane
#define SHORT 32u   // one thread copies a whole row up to this size

// copy copies a piece of a row, or clears it if there is nothing to copy. All lanes of a
// warp share it, or one thread does it alone.
DEVICE void copy(u64 dst, u64 src, u32 bytes, u32 size, bool zero, u32 member, u32 members) {
    u32 whole = ((dst | (zero ? 0 : src)) & 15) == 0 ? bytes / 16 : 0;
    Vec v[PIECE / 512];
#pragma unroll
    for (u32 j = 0; j < PIECE / 512; j++) {
        u32 k = member + j * members;
        v[j] = k < whole && !zero ? look<Vec>(src + 16 * k) : Vec{0, 0, 0, 0};
    }
#pragma unroll
    for (u32 j = 0; j < PIECE / 512; j++) {
        u32 k = member + j * members;
        if (k < whole) write(dst + 16 * k, v[j]);
    }
#pragma unroll 1
    for (u32 at = 16 * whole + size * member; at < bytes; at += size * members) {
        if (size == 4) {
            write(dst + at, zero ? 0u : look<u32>(src + at));
        } else {
            write(dst + at, zero ? (u16)0 : read<u16>(src + at));
        }
    }
}

KERNEL(THREADS)
stowage_nn_take_rows(u64 dst, u64 src, u64 source, u64 rows, u64 row, u64 pitch_dst, u64 pitch_src, u64 how) {
    u32 bytes = low(row), size = high(row), pieces = (bytes + PIECE - 1) / PIECE;
    bool brief = bytes <= SHORT, zero = high(how) != 0;
    u64 t = (u64)block() * threads() + thread(), all = (u64)blocks() * threads(), units = (u64)low(rows) * pieces;
    if (!brief) {
        t /= 32;
        all /= 32;
    }
#pragma unroll 1
    for (u64 u = t; u < units; u += all) {
        u64 i = pieces == 1 ? u : units >> 32 == 0 ? (u32)u / pieces : u / pieces;
        u32 from = (u32)(u - i * pieces) * PIECE, n = look<u32>(global(source) + 4 * i);
        if (n == NONE && !zero) continue;
        u32 k = n == NONE ? 0 : n / low(how);
        if (k >= high(rows)) trap();
        copy(global(dst) + i * pitch_dst + from, global(src) + k * pitch_src + from, least(PIECE, bytes - from), size, n == NONE,
             brief ? 0 : lane(), brief ? 1 : 32);
    }
}

#define SPREAD_THREADS 128 // spreadThreads

// A warp reads a piece of a row once and writes it to all its places.
KERNEL(SPREAD_THREADS)
stowage_nn_spread_rows(u64 dst, u64 src, u64 place, u64 rows, u64 row, u64 pitch_dst, u64 pitch_src, u64 every) {
    u32 pieces = (low(row) + PIECE - 1) / PIECE;
    u64 units = (u64)low(rows) * pieces;
#pragma unroll 1
    for (u64 u = ((u64)block() * threads() + thread()) / 32; u < units; u += (u64)blocks() * threads() / 32) {
        u64 i = pieces == 1 ? u : units >> 32 == 0 ? (u32)u / pieces : u / pieces;
        u32 from = (u32)(u - i * pieces) * PIECE, n = least(PIECE, low(row) - from) / 16;
        u64 at = global(src) + i * pitch_src + from;
        u32 to = lane() < every ? look<u32>(global(place) + 4 * (i * every + lane())) : NONE;
        if (to != NONE && to >= high(rows)) trap();
        Vec v[PIECE / 512];
#pragma unroll
        for (u32 j = 0; j < PIECE / 512; j++) {
            if (lane() + j * 32 < n) v[j] = look<Vec>(at + 16 * (lane() + j * 32));
        }
#pragma unroll 1
        for (u32 k = 0; k < every; k++) {
            u32 there = from_lane(to, k);
            if (there == NONE) continue;
            u64 out = global(dst) + there * pitch_dst + from;
#pragma unroll
            for (u32 j = 0; j < PIECE / 512; j++) {
                if (lane() + j * 32 < n) write(out + 16 * (lane() + j * 32), v[j]);
            }
        }
    }
}

#define COMBINE_THREADS 128
#define PART (2 * 32 * STEP) // columns of a row that a warp adds up: two vectors a lane
#define BATCH 2u             // rows that it loads together

// add_step adds a step to a sum. The first is not added to a zero, because that would change
// the sign of a negative zero.
DEVICE void add_step(float *sum, const float *x, bool any) {
#pragma unroll
    for (u32 e = 0; e < STEP; e++) sum[e] = any ? sum[e] + x[e] : x[e];
}

// Rows of bf16 whose vectors are aligned have a kernel of their own, because code for all
// formats needs many registers. A row of the result has at most 32 places, one for each lane.
KERNEL(COMBINE_THREADS, 8)
stowage_nn_combine_rows_wide(u64 dst, u64 src, u64 place, u64 plus, u64 rows, u64 size, u64 pitches, u64 pitch_plus, u64) {
    Matrix d = {global(dst), low(pitches), BF16}, s = {global(src), high(pitches), BF16}, p = {global(plus), pitch_plus, BF16};
    u32 every = high(size), cols = low(size), parts = (cols + PART - 1) / PART;
    u64 units = (u64)low(rows) * parts;
    if (every > 32) trap();
#pragma unroll 1
    for (u64 u = ((u64)block() * threads() + thread()) / 32; u < units; u += (u64)blocks() * threads() / 32) {
        u64 i = parts == 1 ? u : units >> 32 == 0 ? (u32)u / parts : u / parts;
        u32 from = (u32)(u - i * parts) * PART + lane() * STEP;
        u32 mine = lane() < every ? look<u32>(global(place) + 4 * (i * every + lane())) : NONE;
        Vec more[2];
        if (plus != 0) {
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                if (from + j * 32 * STEP < cols) more[j] = read<Vec>(p.at(i, from + j * 32 * STEP));
            }
        }
        if (mine != NONE && mine >= high(rows)) trap();
        float sum[2][STEP], x[STEP];
        bool any = false;
#pragma unroll 1
        for (u32 k = 0; k < every; k += BATCH) {
            Vec v[BATCH][2];
            u32 row[BATCH];
#pragma unroll
            for (u32 b = 0; b < BATCH; b++) {
                row[b] = k + b < every ? from_lane(mine, k + b) : NONE;
                if (row[b] == NONE) continue;
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    if (from + j * 32 * STEP < cols) v[b][j] = read<Vec>(s.at(row[b], from + j * 32 * STEP));
                }
            }
#pragma unroll
            for (u32 b = 0; b < BATCH; b++) {
                if (row[b] == NONE) continue;
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    widen(v[b][j], x);
                    add_step(sum[j], x, any);
                }
                any = true;
            }
        }
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            if (from + j * 32 * STEP >= cols) continue;
            if (plus != 0) {
                widen(more[j], x);
                add_step(sum[j], x, any);
            } else if (!any) {
#pragma unroll
                for (u32 e = 0; e < STEP; e++) sum[j][e] = 0;
            }
            write(d.at(i, from + j * 32 * STEP), narrowed(sum[j]));
        }
    }
}

// each_step calls f for the steps of rows that belong to this thread.
template <class F> DEVICE void each_step(u32 rows, u32 cols, F f) {
    u32 steps = (cols + STEP - 1) / STEP;
    u64 units = (u64)rows * steps;
#pragma unroll 1
    for (u64 u = (u64)block() * threads() + thread(); u < units; u += (u64)blocks() * threads()) {
        u64 i = units >> 32 == 0 ? (u32)u / steps : u / steps;
        f(i, (u32)(u - i * steps) * STEP);
    }
}

KERNEL(COMBINE_THREADS)
stowage_nn_combine_rows(u64 dst, u64 src, u64 place, u64 plus, u64 rows, u64 size, u64 pitches, u64 pitch_plus, u64 types) {
    Matrix d = {global(dst), low(pitches), (u32)types & 255}, s = {global(src), high(pitches), (u32)(types >> 8) & 255};
    Matrix p = {global(plus), pitch_plus, (u32)(types >> 16) & 255};
    u32 cols = low(size), every = high(size);
    each_step(low(rows), cols, [&](u64 i, u32 c) INLINE {
        float sum[STEP] = {}, x[STEP];
        bool any = false;
        u32 n = least(STEP, cols - c);
#pragma unroll 1
        for (u32 k = 0; k < every; k++) {
            u32 row = look<u32>(global(place) + 4 * (i * every + k));
            if (row == NONE) continue;
            if (row >= high(rows)) trap();
            load(s.type, s.at(row, c), n, x);
            add_step(sum, x, any);
            any = true;
        }
        if (plus != 0) {
            load(p.type, p.at(i, c), n, x);
            add_step(sum, x, any);
        }
        store(d.type, d.at(i, c), n, sum);
    });
}
