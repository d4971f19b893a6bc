// The loss on Hopper: cross entropy of rows that a block, or the blocks of a cluster
// together, keep in shared memory, so that memory is read once. loss.go says what is
// computed.
// targets: sm_90a

#include "hopper.cuh"
#include "loss.cuh"

// over_warp returns the sum over a warp.
DEVICE Raised over_warp(Raised r) {
    r.lift(warp_max(r.top));
    r.sum = warp_sum(r.sum);
    return r;
}

// Sums are those of a block's warps, and of the blocks of the cluster, which tell them each other. They
// lie behind the row in shared memory. There are two, in turn: others may still read the sums of the row
// before, and a block that is ahead may tell its next one.
struct alignas(16) Sums {
    Raised of_warp[32], of_block[8];
    u64 told, spare; // a barrier that counts the bytes of of_block
};

// over_cluster returns the sum over all threads of a cluster, which all add in the same
// order. No block waits until what it wrote to memory has arrived, as a barrier of the cluster would.
template <u32 cluster> DEVICE Raised over_cluster(Raised r, Sums *s, u32 turn) {
    s += turn % 2;
    r = over_warp(r);
    if (lane() == 0) s->of_warp[warp()] = r;
    barrier();
    if (cluster == 1 || warp() == 0) r = over_warp(lane() < warps() ? s->of_warp[lane()] : Raised{LOWEST, 0});
    if (cluster == 1) return r;
    u32 told = spot(&s->told);
    if (thread() == 0) mbar_expect(told, cluster * sizeof(Raised));
    if (thread() < cluster) tell(spot(s->of_block + cta_in_cluster()), (u64)bits(r.sum) << 32 | bits(r.top), told, lane());
    mbar_wait(told, turn / 2 % 2);
    return over_warp(lane() < cluster ? s->of_block[lane()] : Raised{LOWEST, 0});
}

// Kept is what a thread has of a block's part of a row: every threads-th vector. It copies its
// own vectors and reads no others, so that no barrier is needed for them.
template <u32 type, u32 threads, u32 keep> struct Kept {
    static constexpr u32 size = type == BF16 ? 2 : 4, n = 16 / size; // of a number, numbers of a vector
    static constexpr u32 bytes = threads * keep * 16;
    const Loss &l;
    u32 column; // of the first vector
    u32 room;   // vectors from the first to the end of the part: vector k is there if k * threads is below

    DEVICE bool has(u32 k) const { return k * threads < room; }
    DEVICE Vec *place(u32 k) const { return reinterpret_cast<Vec *>(pool) + thread() + k * threads; }
    // begin begins to copy vector k of a row, if there is one, as a group.
    DEVICE void begin(u64 from, bool in, u32 k) const {
        if (in && has(k)) bring(spot(place(k)), from + k * threads * 16, 16);
        seal();
    }
    DEVICE void get(u32 k, float *x) const {
        if constexpr (type == BF16) {
            widen(*place(k), x);
        } else {
            numbers(*place(k), x);
        }
    }
    // raise adds the exponentials of vector k and those behind it as they arrive.
    template <u32 k = 0> DEVICE void raise(Raised &r) const {
        arrived<keep - 1 - k>();
        if (has(k)) {
            float x[n];
            get(k, x);
            r.add<n>(x);
        }
        if constexpr (k + 1 < keep) raise<k + 1>(r);
    }
    // own returns the logit of a column, which lies that many columns behind the first in a vector of this thread.
    DEVICE float own(u32 behind) const {
        const Vec *v = place(behind / n / threads);
        if constexpr (type == BF16) return number((u32)reinterpret_cast<const u16 *>(v)[behind % n] << 16);
        else return number(reinterpret_cast<const u32 *>(v)[behind % n]);
    }
    // put writes the gradient of vector k. The target is that many columns behind the first.
    DEVICE void put(u64 to, u32 k, float top, float over, u32 target) const {
        float x[n];
        get(k, x);
#pragma unroll
        for (u32 e = 0; e < n; e++) x[e] = power(__builtin_fmaf(x[e], LOG2E, -top)) * over - (target == k * threads * n + e ? l.scale : 0);
        if (l.dx.type == F32) {
#pragma unroll
            for (u32 e = 0; e < n; e += 4) {
                write(to + (k * threads * n + e) * 4, Vec{bits(x[e]), bits(x[e + 1]), bits(x[e + 2]), bits(x[e + 3])});
            }
        } else if constexpr (n == 8) {
            write(to + k * threads * n * 2, narrowed(x));
        } else {
            write(to + k * threads * n * 2, (u64)join(x + 2) << 32 | join(x));
        }
    }
};

// kept_loss computes rows. With fewer blocks than rows, a thread begins to copy a vector of the
// next row to the place of one whose gradient it has written.
template <u32 type, u32 threads, u32 keep, u32 cluster> DEVICE void kept_loss(const Loss &l) {
    using Part = Kept<type, threads, keep>;
    need(Part::bytes + 2 * sizeof(Sums));
    u32 vectors = l.cols / Part::n, share = (vectors + cluster - 1) / cluster, cta = cluster == 1 ? 0 : cta_in_cluster();
    u32 first = least(cta * share, vectors), count = least(share, vectors - first), rows = blocks() / cluster; // rows at a time
    Part p = {l, (first + thread()) * Part::n, count > thread() ? count - thread() : 0};
    Sums *sums = reinterpret_cast<Sums *>(pool + Part::bytes);
    Matrix x = {l.x.base, l.x.pitch, type};
    if (share > threads * keep) trap();
    if (cluster > 1) {
        if (thread() == 0) {
            mbar_init(spot(&sums[0].told), 1);
            mbar_init(spot(&sums[1].told), 1);
            fence_mbar_init();
        }
        cluster_arrive();
    }
    u64 row = block() / cluster, from = x.at(row, p.column);
#pragma unroll
    for (u32 k = 0; k < keep; k++) p.begin(from, row < l.rows, k);
    if (cluster > 1) cluster_wait(); // the barriers of all blocks are set up
#pragma unroll 1
    for (u32 turn = 0; row < l.rows; row += rows, turn++) {
        u32 target = l.target(row), behind = target - p.column;
        bool has = behind / Part::n < p.room && behind / Part::n % threads == 0;
        Raised r = {LOWEST, 0};
        p.raise(r);
        float own = has ? p.own(behind) : 0;
        r = over_cluster<cluster>(r, sums, turn);
        if (has || (target == NONE && thread() == 0 && cta == 0)) l.finish(row, target, own, r);
        float over = l.over(target, r);
        u64 to = l.dx.at(row, p.column);
        from = x.at(row + rows, p.column);
#pragma unroll
        for (u32 k = 0; k < keep; k++) {
            if (l.dx.base != 0 && p.has(k)) p.put(to, k, r.top, over, behind);
            p.begin(from, row + rows < l.rows, k);
        }
    }
    arrived<0>();
}

#define LOSS(type, name, threads, resident, keep, cluster)                                                                     \
    KERNEL(threads, resident, cluster)                                                                                         \
    stowage_nn_cross_entropy_##name(u64 src, u64 targets, u64 loss, u64 grad, u64 size, u64 pitches, u64 how) { \
        kept_loss<type, threads, keep, cluster>(unpack(src, targets, loss, grad, size, pitches, how));                         \
    }
LOSS(F32, f32_1, 1024, 1, 8, 1)
LOSS(F32, f32_1_long, 1024, 1, 13, 1)
LOSS(F32, f32_4, 512, 3, 8, 4)
LOSS(F32, f32_8, 512, 3, 8, 8)
LOSS(BF16, bf16_1, 512, 3, 8, 1)
LOSS(BF16, bf16_2, 512, 3, 8, 2)
LOSS(BF16, bf16_8_short, 256, 6, 8, 8)
LOSS(BF16, bf16_8, 512, 3, 8, 8)
