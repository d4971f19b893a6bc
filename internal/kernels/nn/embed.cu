// The embedding and the loss. embed.go says what is computed.
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

// The loss is computed with powers of two: with s the largest logit times log2(e), an
// exponential is 2^(x log2(e) - s).
#define LOG2E 1.44269504f
#define LOWEST (-3.4028235e38f) // stands for no number, so minus infinity adds nothing

struct Loss {
    Matrix x, dx; // dx without memory: no gradient
    u64 targets, losses;
    u32 rows, cols;
    float scale;
};

SHARED float tops[32];

// block_max returns the largest of all threads' numbers.
DEVICE float block_max(float v) {
    v = warp_max(v);
    if (lane() == 0) tops[warp()] = v;
    barrier();
    v = tops[0];
#pragma unroll 1
    for (u32 w = 1; w < warps(); w++) v = larger(v, tops[w]);
    return v;
}

// finish writes the loss of a row from the sum of exponentials, and returns the factor of
// their gradients.
DEVICE float finish(const Loss &l, u32 row, float own, float shift, float sum) {
    if (thread() == 0) set(F32, l.losses + 4ull * row, natural_log(sum) - __builtin_fmaf(own, LOG2E, -shift) * 0.693147181f);
    return l.scale / sum;
}

#define KEEP 8u // vectors of four fp32 that a thread keeps

// Kept is the part of a row of fp32 that a block has in registers.
struct Kept {
    float v[KEEP][4];
    DEVICE u32 column(u32 chunk, u32 k) const { return ((chunk * KEEP + k) * threads() + thread()) * 4; }
    DEVICE void get(u64 row, u32 cols, u32 chunk) {
#pragma unroll
        for (u32 k = 0; k < KEEP; k++) {
            Vec r = {bits(LOWEST), bits(LOWEST), bits(LOWEST), bits(LOWEST)};
            if (column(chunk, k) < cols) r = read<Vec>(row + 4ull * column(chunk, k));
            numbers(r, v[k]);
        }
    }
    DEVICE float most() const {
        float high = LOWEST;
#pragma unroll
        for (u32 k = 0; k < KEEP; k++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) high = larger(high, v[k][e]);
        return high;
    }
    // raise replaces the numbers by their exponentials, and returns the sum.
    DEVICE float raise(float shift) {
        float sum = 0;
#pragma unroll
        for (u32 k = 0; k < KEEP; k++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                v[k][e] = power(__builtin_fmaf(v[k][e], LOG2E, -shift));
                sum += v[k][e];
            }
        return sum;
    }
    // put writes gradients from exponentials.
    DEVICE void put(const Loss &l, u64 row, u32 chunk, u32 target, float over) const {
#pragma unroll
        for (u32 k = 0; k < KEEP; k++) {
            u32 c = column(chunk, k);
            if (c >= l.cols) continue;
            float g[4];
#pragma unroll
            for (u32 e = 0; e < 4; e++) g[e] = v[k][e] * over - (c + e == target ? l.scale : 0);
            if (l.dx.type == BF16) {
                write(row + 2ull * c, (u64)narrow_pair(g[2], g[3]) << 32 | narrow_pair(g[0], g[1]));
            } else {
                write(row + 4ull * c, Vec{bits(g[0]), bits(g[1]), bits(g[2]), bits(g[3])});
            }
        }
    }
};

// wide_loss computes rows of fp32 whose vectors are aligned. The block keeps the last chunk
// of a row in registers, and reads the others again, backwards, because caches still have
// the end. A gradient of bf16 may lie in the second half of a row: what is written there
// has been read.
DEVICE void wide_loss(const Loss &l) {
    Team t = teams(threads());
    u32 chunks = (l.cols + KEEP * 4 * threads() - 1) / (KEEP * 4 * threads());
#pragma unroll 1
    for (u32 row = block(); row < l.rows; row += blocks()) {
        u64 from = l.x.at(row, 0), to = l.dx.at(row, 0);
        u32 target = look<u32>(l.targets + 4ull * row);
        if (target != NONE && target >= l.cols) trap();
        float own = target == NONE ? 0 : number(read<u32>(from + 4ull * target)), most = LOWEST, sum = 0, over = 0, shift = 0;
        Kept x;
#pragma unroll 1
        for (u32 i = 0; i < chunks; i++) {
            x.get(from, l.cols, i);
            if (i + 1 == chunks) break;
            float high = larger(most, x.most());
            sum = sum * power((most - high) * LOG2E) + x.raise(high == LOWEST ? 0 : high * LOG2E);
            most = high;
        }
        float high = larger(most, x.most());
        sum *= power((most - high) * LOG2E);
        most = high;
        high = block_max(high);
        shift = high * LOG2E;
        sum = t.sum(sum * power((most - high) * LOG2E) + x.raise(shift));
        if (target == NONE) {
            if (thread() == 0) set(F32, l.losses + 4ull * row, 0);
        } else {
            over = finish(l, row, own, shift, sum);
        }
        if (l.dx.base == 0) continue;
#pragma unroll 1
        for (u32 i = chunks; i > 0; i--) {
            if (i < chunks) {
                x.get(from, l.cols, i - 1);
                barrier(); // all have read the chunk
                x.raise(shift);
            }
            x.put(l, to, i - 1, target, over);
        }
    }
}

#define AHEAD 4u // numbers that a thread loads together

// any_loss computes rows of any format and reads them twice, the second time backwards,
// like wide_loss.
DEVICE void any_loss(const Loss &l) {
    Team t = teams(threads());
    u32 chunk = AHEAD * threads(), chunks = (l.cols + chunk - 1) / chunk;
#pragma unroll 1
    for (u32 row = block(); row < l.rows; row += blocks()) {
        u32 target = look<u32>(l.targets + 4ull * row);
        if (target != NONE && target >= l.cols) trap();
        float v[AHEAD], own = target == NONE ? 0 : get(l.x.type, l.x.at(row, target)), most = LOWEST, sum = 0;
        auto read_chunk = [&](u32 i) {
#pragma unroll
            for (u32 k = 0; k < AHEAD; k++) {
                u32 c = i * chunk + k * threads() + thread();
                v[k] = c < l.cols ? get(l.x.type, l.x.at(row, c)) : LOWEST;
            }
        };
#pragma unroll 1
        for (u32 i = 0; i < chunks; i++) {
            read_chunk(i);
            float high = most;
#pragma unroll
            for (u32 k = 0; k < AHEAD; k++) high = larger(high, v[k]);
            sum *= power((most - high) * LOG2E);
            most = high;
#pragma unroll
            for (u32 k = 0; k < AHEAD; k++) sum += v[k] == LOWEST ? 0 : power((v[k] - high) * LOG2E);
        }
        float high = block_max(most), shift = high * LOG2E, over = 0;
        sum = t.sum(sum * power((most - high) * LOG2E));
        if (target == NONE) {
            if (thread() == 0) set(F32, l.losses + 4ull * row, 0);
        } else {
            over = finish(l, row, own, shift, sum);
        }
        if (l.dx.base == 0) continue;
#pragma unroll 1
        for (u32 i = chunks; i > 0; i--) {
            read_chunk(i - 1);
            barrier(); // all have read the chunk
#pragma unroll
            for (u32 k = 0; k < AHEAD; k++) {
                u32 c = (i - 1) * chunk + k * threads() + thread();
                if (c >= l.cols) continue;
                float g = target == NONE ? 0 : power(__builtin_fmaf(v[k], LOG2E, -shift)) * over;
                set(l.dx.type, l.dx.at(row, c), g - (c == target ? l.scale : 0));
            }
        }
    }
}

DEVICE Loss unpack(u64 src, u64 targets, u64 loss, u64 grad, u64 size, u64 pitches, u64 how) {
    return {{global(src), low(pitches), bit(how, 0)},
            {grad == 0 ? 0 : global(grad), high(pitches), bit(how, 1)},
            global(targets),
            global(loss),
            low(size),
            high(size),
            number(high(how))};
}

// A block computes a row.
KERNEL(THREADS)
stowage_nn_cross_entropy(u64 src, u64 targets, u64 loss, u64 grad, u64 size, u64 pitches, u64 how) {
    any_loss(unpack(src, targets, loss, grad, size, pitches, how));
}

// Aligned rows of fp32 have a kernel of their own, because code for all formats needs many
// registers.
KERNEL(THREADS)
stowage_nn_cross_entropy_wide(u64 src, u64 targets, u64 loss, u64 grad, u64 size, u64 pitches, u64 how) {
    wide_loss(unpack(src, targets, loss, grad, size, pitches, how));
}

// This kernel has one block.
KERNEL(THREADS)
stowage_nn_total(u64 to, u64 x, u64 n, u64 factor) {
    Team t = teams(threads());
    float sum = 0;
    t.each((u32)n, [&](u32 c, u32 k) {
        float v[STEP];
        load(F32, global(x) + 4ull * c, k, v);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) sum += v[e];
    });
    sum = t.sum(sum);
    if (t.member == 0 && block() == 0) set(F32, global(to), get(F32, global(to)) + number((u32)factor) * sum);
}
