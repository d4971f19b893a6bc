// The loss. loss.go says what is computed.
// targets: sm_80

#include "loss.cuh"

#define THREADS 256

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

// Chunk is a part of a row that a block has in registers: for each thread, a number of
// vectors of so many numbers.
template <u32 vectors, u32 wide> struct Chunk {
    static constexpr u32 all = vectors * wide;
    float v[all];
    DEVICE u32 column(u32 chunk, u32 k) const { return ((chunk * vectors + k) * threads() + thread()) * wide; }
    DEVICE void read(const Loss &l, u64 row, u32 chunk) {
#pragma unroll
        for (u32 k = 0; k < vectors; k++) {
            u32 c = column(chunk, k);
            if constexpr (wide == 4) {
                Vec r = {bits(NOTHING), bits(NOTHING), bits(NOTHING), bits(NOTHING)};
                if (c < l.cols) r = ::read<Vec>(l.x.base + 4 * (row * l.x.pitch + c));
                numbers(r, v + 4 * k);
            } else {
                v[k] = c < l.cols ? get(l.x.type, l.x.at(row, c)) : NOTHING;
            }
        }
    }
    // write writes gradients from exponentials.
    DEVICE void write(const Loss &l, u64 row, u32 chunk, u32 target, float over) const {
#pragma unroll
        for (u32 k = 0; k < vectors; k++) {
            u32 c = column(chunk, k);
            if (c >= l.cols) continue;
            float g[wide];
#pragma unroll
            for (u32 e = 0; e < wide; e++) g[e] = (target == NONE ? 0 : v[k * wide + e] * over) - (c + e == target ? l.scale : 0);
            u64 to = l.dx.at(row, c);
            if constexpr (wide == 1) {
                set(l.dx.type, to, g[0]);
            } else if (l.dx.type == BF16) {
                ::write(to, (u64)join(g + 2) << 32 | join(g));
            } else {
                ::write(to, Vec{bits(g[0]), bits(g[1]), bits(g[2]), bits(g[3])});
            }
        }
    }
};

// losses computes rows. A block keeps the last chunk of a row in registers, and reads the
// others again, backwards, because caches still have the end. A gradient of bf16 may lie in
// the second half of a row: what is written there has been read.
template <class C> DEVICE void losses(const Loss &l) {
    Team t = teams(threads());
    u32 chunks = (l.cols + C::all * threads() - 1) / (C::all * threads());
#pragma unroll 1
    for (u32 row = block(); row < l.rows; row += blocks()) {
        u32 target = l.target(row);
        float own = l.own(row, target);
        Raised r = {LOWEST, 0};
        C x;
#pragma unroll 1
        for (u32 i = 0; i < chunks; i++) {
            x.read(l, row, i);
            r.add<C::all>(x.v);
        }
        Raised all = r;
        all.lift(block_max(r.top));
        all.sum = t.sum(all.sum);
        if (thread() == 0) l.finish(row, target, own, all);
        if (l.dx.base == 0) continue;
        float over = l.over(target, all);
        x.write(l, row, chunks - 1, target, over * power(r.top - all.top));
        r = all; // exponentials have its top from here on
#pragma unroll 1
        for (u32 i = chunks - 1; i > 0; i--) {
            x.read(l, row, i - 1);
            barrier(); // all have read the chunk
            r.add<C::all>(x.v);
            x.write(l, row, i - 1, target, over);
        }
    }
}

#define LOSS u64 src, u64 targets, u64 loss, u64 grad, u64 size, u64 pitches, u64 how

KERNEL(THREADS)
stowage_nn_cross_entropy(LOSS) { losses<Chunk<4, 1>>(unpack(src, targets, loss, grad, size, pitches, how)); }

// Aligned rows of fp32 have a kernel of their own, because code for all formats needs many
// registers.
KERNEL(THREADS)
stowage_nn_cross_entropy_wide(LOSS) { losses<Chunk<8, 4>>(unpack(src, targets, loss, grad, size, pitches, how)); }

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
