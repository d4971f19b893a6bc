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
        each_chunk_of_ids(list, rows, [&](u32 base, const u32 *id) {
            u32 found = gather(l, base, id, from);
#pragma unroll 1
            for (u32 i = 0; i < found; i++) {
                if (which[i] == thread()) write(order + 4ull * next++, row[i]);
            }
        });
    }
}

// The first row of an id in the order adds up all rows of that id, THREADS steps of columns
// at a time.
KERNEL(THREADS)
stowage_nn_embed_grad(u64 dtable, u64 grad, u64 ids, u64 scratch, u64 size, u64 pitches, u64 vocab, u64 types) {
    Matrix table = {global(dtable), low(pitches), bit(types, 0)}, dy = {global(grad), high(pitches), bit(types, 1)};
    u32 rows = low(size), cols = high(size), tiles = (cols + STEP * THREADS - 1) / (STEP * THREADS);
    u64 order = global(scratch), start = order + 4ull * rows;
    (void)vocab; // the sort has checked the ids
#pragma unroll 1
    for (u64 u = block(); u < (u64)rows * tiles; u += blocks()) {
        u32 i = (u32)(u / tiles), c = ((u32)(u - (u64)i * tiles) * THREADS + thread()) * STEP;
        u32 id = look<u32>(global(ids) + 4ull * look<u32>(order + 4ull * i));
        if (look<u32>(start + 4ull * id) != i || c >= cols) continue;
        u32 end = look<u32>(start + 4ull * id + 4), n = least(STEP, cols - c);
        constexpr u32 batch = 4;
        float sum[STEP], x[batch][STEP];
        load(table.type, table.at(id, c), n, sum);
#pragma unroll 1
        for (u32 j = i; j < end; j += batch) {
#pragma unroll
            for (u32 k = 0; k < batch; k++) {
                if (j + k < end) load(dy.type, dy.at(look<u32>(order + 4ull * (j + k)), c), n, x[k]);
            }
#pragma unroll
            for (u32 k = 0; k < batch; k++) {
#pragma unroll
                for (u32 e = 0; e < STEP; e++) sum[e] += j + k < end ? x[k][e] : 0;
            }
        }
        store(table.type, table.at(id, c), n, sum);
    }
}

// Spread is the largest number and the sum of the exponentials relative to it.
struct Spread {
    float most, sum;
    // add includes n numbers. The lowest finite number stands for none, so minus infinity
    // adds nothing.
    DEVICE void add(const float *x, u32 n) {
        float high = most;
#pragma unroll
        for (u32 e = 0; e < STEP; e++) high = e < n ? larger(high, x[e]) : high;
        sum *= exponential(most - high);
        most = high;
#pragma unroll
        for (u32 e = 0; e < STEP; e++) sum += e < n ? exponential(x[e] - high) : 0;
    }
};

// A block computes a row: first the sum, then the gradient.
KERNEL(THREADS)
stowage_nn_cross_entropy(u64 src, u64 targets, u64 losses, u64 size, u64 pitch, u64 how) {
    SHARED float tops[WARPS];
    Matrix x = {global(src), low(pitch), bit(how, 0)};
    float scale = number((u32)(pitch >> 32));
    u32 rows = low(size), cols = high(size);
    bool grad = !bit(how, 1);
    Team t = teams(threads());
#pragma unroll 1
    for (u32 row = block(); row < rows; row += blocks()) {
        u32 target = look<u32>(global(targets) + 4ull * row);
        if (target != NONE && target >= cols) trap();
        float v[STEP], loss = 0, over = 0, most = 0;
        if (target != NONE) {
            Spread s = {-3.4028235e38f, 0};
            t.each(cols, [&](u32 c, u32 n) {
                load(x.type, x.at(row, c), n, v);
                s.add(v, n);
            });
            most = warp_max(s.most);
            if (lane() == 0) tops[warp()] = most;
            barrier();
#pragma unroll
            for (u32 w = 0; w < WARPS; w++) most = larger(most, tops[w]);
            float sum = t.sum(s.sum * exponential(s.most - most));
            over = scale / sum;
            loss = natural_log(sum) + (most - get(x.type, x.at(row, target)));
        }
        barrier(); // all have read the target's logit
        if (t.member == 0) set(F32, global(losses) + 4ull * row, loss);
        if (!grad) continue;
        t.each(cols, [&](u32 c, u32 n) {
            load(x.type, x.at(row, c), n, v);
#pragma unroll
            for (u32 e = 0; e < STEP; e++) {
                v[e] = target == NONE ? 0 : exponential(v[e] - most) * over;
                if (c + e == target) v[e] -= scale;
            }
            store(x.type, x.at(row, c), n, v);
        });
    }
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
