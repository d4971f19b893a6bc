// Matrix products of bf16 for Hopper: dense ones, products over experts and the gradient of
// experts' weights. gemmhopper.cuh computes tiles, and gemmplan.cuh has which tiles there are
// but for the gradient. The arguments are those of gemm.cu (see gemm.go), and then the tensor
// maps of A and B.
// targets: sm_90a

#include "gemmlag.cuh"
#include "gemmplan.cuh"

#define LONG 1024u  // rows of an expert
#define SQUARE 8u // 66 clusters compute about 8 x 8 or 16 x 4 pairs of tiles at the same time

// Gradient adds to one matrix of m x n for each expert that has rows. The first one stores,
// and other experts' matrices become zero.
template <class Form> struct Gradient {
    static constexpr u32 room = Experts::room, high = Form::high, wide = Form::wide;
    u64 c;
    u32 m, n;
    Target to;
    bool first;
    Experts experts;
    u32 e = 0; // the expert of the last pair

    DEVICE u32 each() const { return pairs_of(pieces(m, high), pieces(n, wide)); }
    DEVICE void setup(u32 *ends) {
        u32 of = each();
        experts.add_up(ends, [of](u32 rows) INLINE { return rows == 0 ? 0 : of; });
    }
    DEVICE u32 pairs() const { return experts.ends[experts.count - 1]; }
    // depth and find are called for pairs in order. depth returns the rows of one.
    DEVICE u32 depth(u32 p) {
#pragma unroll 1
        while (experts.ends[e] <= p) e++;
        return experts.size(e);
    }
    DEVICE Place find(u32 p) {
        u32 k = depth(p), from = experts.first(e);
        u32 rows = pieces(m, high), cols = pieces(n, wide), nth = p - (experts.ends[e] - each());
        // Blocks that run at the same time compute 16 pairs of rows of 4 columns of tiles, which read little together.
        // If few tiles are beside each other, some whole rows of tiles do as well, and are stored nearly in order.
        Spot s = cols > SQUARE ? nth_pair<2 * SQUARE>(rows, cols, nth) : nth_pair<1>(rows, cols, nth);
        u32 m0 = s.m * high, n0 = s.n * wide;
        u64 at = c + bytes(to.type, (e * (u64)m + m0) * to.pitch + n0);
        return {m0, n0, from, from, k, m - m0, n0 < n ? n - n0 : 0, at, first ? 0 : at, s.share_b};
    }
    // idle clears rows, every warps-th of them. It takes as long as the product, so that reads
    // of operands hardly wait for its writes: after half of the pairs were brought, it has
    // cleared half of the rows.
    DEVICE void idle(u32 warp, u32 warps, volatile u32 *brought) const {
        if (!first) return;
        u32 count = n * size_of(to.type), empty = 0, seen = 0;
#pragma unroll 1
        for (u32 e = 0; e < experts.count; e++) empty += experts.size(e) == 0;
#pragma unroll 1
        for (u32 e = 0; e < experts.count; e++) {
            if (experts.size(e) > 0) continue;
            u32 before = seen++ * m;
#pragma unroll 1
            for (u32 row = warp; row < m; row += warps) {
                while ((u64)(before + row) * pairs() > (u64)*brought * m * empty) pause();
                u64 at = c + bytes(to.type, (e * (u64)m + row) * to.pitch);
#pragma unroll 1
                for (u32 i = 16 * lane(); i < count; i += 512) write(at + i, Vec{0, 0, 0, 0});
            }
        }
    }
};

#define PRODUCT u64, u64, u64 c, u64 plus, u64 size, u64 k, u64, u64 pitches, u64 how, Map, Map
#define GROUPED u64, u64, u64 c, u64 segments, u64 size, u64 rows, u64, u64 pitch, u64 how, Map, Map

#define DENSE(name, trans_a, trans_b, Form)                                                                     \
    KERNEL(FORM_THREADS, 1, CLUSTER) name(PRODUCT) {                                                            \
        Dense<Form> plan = {global(c), plus == 0 ? 0 : global(plus), low(size), high(size), (u32)k,             \
                            {low(pitches), high(pitches), type_of(how, 2), type_of(how, 3)}};                   \
        persist<!trans_a, trans_b, Form>(plan, plan.to, map_of(name, 9), map_of(name, 10));                     \
    }

// A cluster computes one tile. Tiles follow each other downwards.
#define HALVED(name, trans_a, trans_b, Form)                                                                    \
    KERNEL(FORM_THREADS, 1, CLUSTER) name(PRODUCT) {                                                            \
        Dense<Form> plan = {global(c), plus == 0 ? 0 : global(plus), low(size), high(size), (u32)k,             \
                            {low(pitches), high(pitches), type_of(how, 2), type_of(how, 3)}};                   \
        u32 tall = pieces(plan.m, Form::high), tile = block() / CLUSTER;                                        \
        halve<!trans_a, trans_b, Form>(plan.at({tile % tall, tile / tall, false}), plan.to, map_of(name, 9), map_of(name, 10)); \
    }

#define EXPERTS(name, trans_b, Form)                                                                            \
    KERNEL(FORM_THREADS, 1, CLUSTER) name(GROUPED) {                                                            \
        Grouped<trans_b, Form> plan = {global(c), low(size), high(size), {pitch, 0, type_of(how, 2), 0},        \
                                       {global(segments), high(rows), low(rows), nullptr}};                     \
        persist<true, trans_b, Form>(plan, plan.to, map_of(name, 9), map_of(name, 10));                         \
    }

#define GRADIENT(name, Form)                                                                                    \
    KERNEL(FORM_THREADS, 1, CLUSTER) name(GROUPED) {                                                            \
        u32 type = type_of(how, 2);                                                                             \
        Gradient<Form> plan = {global(c), low(size), high(size), {pitch, pitch, type, type}, bit(how, 6) != 0,  \
                               {global(segments), high(rows), low(rows), nullptr}, 0};                          \
        persist<false, false, Form>(plan, plan.to, map_of(name, 9), map_of(name, 10));                          \
    }

// Stored stores tiles of a first gradient in fp32.
struct Stored {
    u64 pitch;
    template <u32 wide, bool> DEVICE void store(const Place &at, u32 first, const float *c) const {
        store_as<wide, false, false, false, true>(at, {pitch, 0, F32, F32}, first, c);
    }
};

// long_sums reports whether experts that have rows have LONG or more on average.
DEVICE bool long_sums(const Experts &experts) {
    u32 rows = 0, live = 0;
#pragma unroll 1
    for (u32 e = lane(); e < experts.count; e += 32) {
        u32 n = experts.segments == 0 ? experts.rows : look<u32>(experts.segments + 8 * e + 4);
        rows += n;
        live += n > 0;
    }
    return from_lane(warp_scan(rows), 31) >= LONG * from_lane(warp_scan(live), 31);
}

DENSE(stowage_nn_hopper_gemm_nn, false, false, Shared)
DENSE(stowage_nn_hopper_gemm_nt, false, true, Shared)
DENSE(stowage_nn_hopper_gemm_nn_turns, false, false, Turns)
DENSE(stowage_nn_hopper_gemm_nt_turns, false, true, Turns)
DENSE(stowage_nn_hopper_gemm_tn, true, false, Shared)
DENSE(stowage_nn_hopper_gemm_tn_low, true, false, Low)
HALVED(stowage_nn_hopper_gemm_tn_half, true, false, Half)
DENSE(stowage_nn_hopper_gemm_tn_square, true, false, Square)
DENSE(stowage_nn_hopper_gemm_tn_middle, true, false, Middle)
DENSE(stowage_nn_hopper_gemm_tn_160, true, false, Wide160)
DENSE(stowage_nn_hopper_gemm_tn_224, true, false, Wide224)
EXPERTS(stowage_nn_hopper_grouped_nn, false, Shared)
EXPERTS(stowage_nn_hopper_grouped_nt, true, Shared)
EXPERTS(stowage_nn_hopper_grouped_nn_turns, false, Turns)
EXPERTS(stowage_nn_hopper_grouped_nt_turns, true, Turns)
GRADIENT(stowage_nn_hopper_grouped_grad_tn_low, Low)
DENSE(stowage_nn_hopper_gemm_nn_slim, false, false, Slim)
DENSE(stowage_nn_hopper_gemm_nt_slim, false, true, Slim)
DENSE(stowage_nn_hopper_gemm_nn_square, false, false, Square)
DENSE(stowage_nn_hopper_gemm_nt_square, false, true, Square)
DENSE(stowage_nn_hopper_gemm_nn_middle, false, false, Middle)
DENSE(stowage_nn_hopper_gemm_nt_middle, false, true, Middle)
DENSE(stowage_nn_hopper_gemm_nt_broad, false, true, Broad)
DENSE(stowage_nn_hopper_gemm_nt_narrow, false, true, Narrow)
DENSE(stowage_nn_hopper_gemm_nt_lean, false, true, Lean)

// The first gradient, in fp32. Long sums make up for large tiles, which read less and wait longer for their stores. Both
// ways have the same bits. Without code for what it does not do it takes less time.
KERNEL(FORM_THREADS, 1, CLUSTER) stowage_nn_hopper_grouped_grad_tn_first(u64, u64, u64 c, u64 segments, u64 size, u64 rows, u64, u64 pitch, u64, Map, Map) {
    Experts experts = {global(segments), high(rows), low(rows), nullptr};
    u64 a = map_of(stowage_nn_hopper_grouped_grad_tn_first, 9), b = map_of(stowage_nn_hopper_grouped_grad_tn_first, 10);
    if (long_sums(experts)) {
        Gradient<Lag> plan = {global(c), low(size), high(size), {pitch, pitch, F32, F32}, true, experts, 0};
        lag(plan, a, b);
    } else {
        Gradient<Slim> plan = {global(c), low(size), high(size), {pitch, pitch, F32, F32}, true, experts, 0};
        persist<false, false, Slim>(plan, Stored{pitch}, a, b);
    }
}
