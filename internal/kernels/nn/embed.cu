// The embedding. embed.go says what is computed.
// targets: sm_80

#include "nn.cuh"

#define NONE (~0u)
#define THREADS 256
#define WARPS (THREADS / 32)

KERNEL(THREADS)
stowage_nn_embed(u64 dst, u64 src, u64 ids, u64 size, u64 pitches, u64 vocab, u64 types) {
    Matrix y = {global(dst), low(pitches), bit(types, 0)}, table = {global(src), high(pitches), bit(types, 1)};
    u32 rows = low(size), cols = high(size);
    Team t = team(cols);
#pragma unroll 1
    for (u32 row = t.number; row < rows; row += t.count) {
        u32 id = look<u32>(global(ids) + 4ull * row);
        if (id >= vocab) trap();
        t.each(cols, [&](u32 c, u32 n) {
            float x[STEP];
            load(table.type, table.at(id, c), n, x);
            store(y.type, y.at(row, c), n, x);
        });
    }
}

#define BATCH 8u // ids that a thread loads together

// each_chunk_of_ids calls f with the ids of a chunk that belong to this thread. Id k is
// THREADS ids behind id k - 1.
template <class F> DEVICE void each_chunk_of_ids(u64 ids, u32 rows, F f) {
#pragma unroll 1
    for (u64 base = 0; base < rows; base += BATCH * THREADS) {
        u32 id[BATCH];
#pragma unroll
        for (u32 k = 0; k < BATCH; k++) {
            u64 i = base + k * THREADS + thread();
            id[k] = i < rows ? look<u32>(ids + 4 * i) : NONE;
        }
        f((u32)base, id);
    }
}

// List is some of a chunk's rows, in order.
struct List {
    u32 (*count)[WARPS]; // of the BATCH rows of ids by warps
    u32 *row;
    u8 *which;
};

// gather lists the rows whose id is one of THREADS from first on, and returns the length of
// the list.
DEVICE u32 gather(const List &l, u32 base, const u32 *id, u32 first) {
    u32 mine[BATCH], sum = 0;
#pragma unroll
    for (u32 k = 0; k < BATCH; k++) {
        mine[k] = ballot(id[k] != NONE && id[k] - first < THREADS);
        if (lane() == 0) l.count[k][warp()] = (u32)__builtin_popcount(mine[k]);
    }
    barrier();
#pragma unroll
    for (u32 k = 0; k < BATCH; k++) {
        u32 at = 0;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            if (w == warp()) at = sum;
            sum += l.count[k][w];
        }
        if (mine[k] >> lane() & 1) {
            at += (u32)__builtin_popcount(mine[k] & ((1u << lane()) - 1));
            l.row[at] = base + k * THREADS + thread();
            l.which[at] = (u8)(id[k] - first);
        }
    }
    barrier();
    return sum;
}

// put_rows puts the rows of a list behind those of the same id. A warp calls it.
DEVICE void put_rows(const List &l, u32 found, u32 *next, u64 order) {
#pragma unroll 1
    for (u32 first = 0; first < found; first += 32) {
        u32 i = first + lane(), w = i < found ? l.which[i] : THREADS, like = same(w);
        u32 before = (u32)__builtin_popcount(like & ((1u << lane()) - 1));
        if (i < found) write(order + 4ull * (next[w] + before), l.row[i]);
        warp_barrier();
        if (i < found && like >> lane() == 1) next[w] += (u32)__builtin_popcount(like);
        warp_barrier();
    }
}

// A block sorts the rows of THREADS ids, one for each thread. It counts the rows with lower
// ids itself.
KERNEL(THREADS)
stowage_nn_embed_sort(u64 ids, u64 scratch, u64 size) {
    SHARED u32 count[THREADS], part[WARPS], lower_ids, counts[BATCH][WARPS], row[BATCH * THREADS];
    SHARED u8 which[BATCH * THREADS];
    u32 rows = low(size), vocab = high(size);
    u64 order = global(scratch), start = order + 4ull * rows, list = global(ids);
    List l = {counts, row, which};
#pragma unroll 1
    for (u64 first = (u64)block() * THREADS; first < vocab; first += (u64)blocks() * THREADS) {
        count[thread()] = 0;
        if (thread() == 0) lower_ids = 0;
        barrier();
        u32 lower = 0, from = (u32)first;
        each_chunk_of_ids(list, rows, [&](u32 base, const u32 *id) {
#pragma unroll
            for (u32 k = 0; k < BATCH; k++) {
                if (base + k * THREADS + thread() >= rows) continue;
                if (id[k] >= vocab) trap();
                if (id[k] < from) lower++;
                if (id[k] - from < THREADS) tally(&count[id[k] - from], 1);
            }
        });
        tally(&lower_ids, lower);
        barrier();
        u32 n = count[thread()], up = warp_scan(n);
        if (lane() == 31) part[warp()] = up;
        barrier();
        u32 next = lower_ids + up - n;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) next += w < warp() ? part[w] : 0;
        if (first + thread() < vocab) write(start + 4 * (first + thread()), next);
        if (first + thread() == vocab - 1) write(start + 4ull * vocab, rows);
        count[thread()] = next;
        each_chunk_of_ids(list, rows, [&](u32 base, const u32 *id) {
            u32 found = gather(l, base, id, from);
            if (warp() == 0) put_rows(l, found, count, order);
        });
        barrier();
    }
}

#define LONG 32u // an id with more rows is added up by a block, and others by a warp
#define TILE (32 * STEP)
#define TOGETHER 4u // rows that a lane loads together

// EmbedGrad is what a launch knows.
struct EmbedGrad {
    Matrix table, dy;
    u64 ids, order, start;
    u32 rows, cols;
    bool wide;
};

// Unit is a place in the order and some columns. If the place is the first of an id, the
// unit adds up the rows of that id, which are those before end.
struct Unit {
    u32 i, c, id, end;
    DEVICE u32 rows() const { return end - i; }
};

DEVICE Unit unit_at(const EmbedGrad &g, u64 u) {
    u32 tile = (u32)(u / g.rows);
    Unit x = {(u32)(u - (u64)tile * g.rows), tile * TILE + lane() * STEP, 0, 0};
    x.id = look<u32>(g.ids + 4ull * look<u32>(g.order + 4ull * x.i));
    x.end = look<u32>(g.start + 4ull * x.id) == x.i ? look<u32>(g.start + 4ull * x.id + 4) : x.i;
    return x;
}

// add_rows adds rows of a unit to a sum: the one in a place, and every so many behind.
DEVICE void add_rows(const EmbedGrad &g, const Unit &x, u32 from, u32 every, float *sum) {
    u32 n = x.c < g.cols ? least(STEP, g.cols - x.c) : 0;
    if (n == 0) return;
#pragma unroll 1
    for (u32 j = from; j < x.end; j += TOGETHER * every) {
        u32 row[TOGETHER];
        Vec v[TOGETHER];
        float y[STEP];
#pragma unroll
        for (u32 k = 0; k < TOGETHER; k++) row[k] = j + k * every < x.end ? look<u32>(g.order + 4ull * (j + k * every)) : NONE;
#pragma unroll
        for (u32 k = 0; k < TOGETHER; k++) {
            if (row[k] != NONE && g.wide) v[k] = read<Vec>(g.dy.at(row[k], x.c));
        }
#pragma unroll
        for (u32 k = 0; k < TOGETHER; k++) {
            if (row[k] == NONE) continue;
            if (g.wide) {
                widen(v[k], y);
            } else {
                load(g.dy.type, g.dy.at(row[k], x.c), n, y);
            }
#pragma unroll
            for (u32 e = 0; e < STEP; e++) sum[e] += y[e];
        }
    }
}

// add_long adds up an id with many rows. Each warp adds every WARPS-th, and the first warp
// adds up the sums, in order. All threads of the block call it.
DEVICE void add_long(const EmbedGrad &g, const Unit &x) {
    SHARED float part[WARPS][TILE];
    float sum[STEP] = {};
    add_rows(g, x, x.i + warp(), WARPS, sum);
#pragma unroll
    for (u32 e = 0; e < STEP; e++) part[warp()][e * 32 + lane()] = sum[e];
    barrier();
    if (warp() == 0 && x.c < g.cols) {
        u32 n = least(STEP, g.cols - x.c);
        load(g.table.type, g.table.at(x.id, x.c), n, sum);
#pragma unroll 1
        for (u32 w = 0; w < WARPS; w++)
#pragma unroll
            for (u32 e = 0; e < STEP; e++) sum[e] += part[w][e * 32 + lane()];
        store(g.table.type, g.table.at(x.id, x.c), n, sum);
    }
    barrier();
}

KERNEL(THREADS, 4)
stowage_nn_embed_grad(u64 dtable, u64 grad, u64 ids, u64 scratch, u64 size, u64 pitches, u64 vocab, u64 types) {
    SHARED u32 many[WARPS];
    EmbedGrad g = {{global(dtable), low(pitches), bit(types, 0)}, {global(grad), high(pitches), bit(types, 1)}, global(ids), global(scratch),
                   global(scratch) + 4ull * low(size), low(size), high(size), false};
    g.wide = g.dy.wide() && g.cols % STEP == 0;
    u64 units = (u64)g.rows * ((g.cols + TILE - 1) / TILE);
    (void)vocab; // the sort has checked the ids
#pragma unroll 1
    for (u64 base = (u64)block() * WARPS; base < units; base += (u64)blocks() * WARPS) {
        Unit x = {};
        if (base + warp() < units) x = unit_at(g, base + warp());
        if (lane() == 0) many[warp()] = x.rows() > LONG;
        if (x.rows() > 0 && x.rows() <= LONG && x.c < g.cols) {
            u32 n = least(STEP, g.cols - x.c);
            float sum[STEP];
            load(g.table.type, g.table.at(x.id, x.c), n, sum);
            add_rows(g, x, x.i, 1, sum);
            store(g.table.type, g.table.at(x.id, x.c), n, sum);
        }
        barrier();
#pragma unroll 1
        for (u32 w = 0; w < WARPS; w++) {
            if (many[w]) add_long(g, unit_at(g, base + w));
        }
        barrier();
    }
}
