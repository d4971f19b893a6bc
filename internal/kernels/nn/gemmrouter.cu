// Products of a router on Hopper: fp32 numbers with bf16 ones, on tensor cores. A number of
// fp32 is the sum of two of bf16 up to 2^-17 of it, which is less than tensor cores lose in
// their sums, and each is multiplied. gemm.go describes the arguments, gemmrouter.go which
// products these are.
// targets: sm_90a

#include "hopper.cuh"
#include "nn.cuh"

#define THREADS 256
#define HIGH 64u // rows of C that a block computes at a time

struct Router {
    Matrix a, b, c, plus;
    u32 m, n, k;
};

#define PRODUCT u64 a, u64 b, u64 c, u64 plus, u64 size, u64 k, u64 pitches, u64 pitches2, u64 how

DEVICE Router router(PRODUCT) {
    return {{global(a), low(pitches), F32},
            {global(b), high(pitches), BF16},
            {global(c), low(pitches2), bit(how, 2)},
            {plus == 0 ? 0 : global(plus), high(pitches2), bit(how, 3)},
            low(size),
            high(size),
            (u32)k};
}

// divide makes two fragments of bf16 of one of fp32, the larger one first.
DEVICE void divide(const float (&x)[8], u32 (&f)[2][4]) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        float had[2];
        f[0][i] = pair(x[2 * i], x[2 * i + 1]);
        split(f[0][i], had);
        f[1][i] = pair(x[2 * i] - had[0], x[2 * i + 1] - had[1]);
    }
}

// fetch_tile begins to copy rows of a matrix to a tile of shared memory: wide numbers of each,
// pitch bytes apart. Rows and columns from the ends on become zero.
DEVICE void fetch_tile(u32 to, u32 pitch, const Matrix &x, u32 row, u32 rows, u32 row_end, u32 col, u32 wide, u32 col_end) {
    u32 n = 16 / size_of(x.type), each = wide / n;
    for (u32 v = thread(); v < rows * each; v += THREADS) {
        u32 r = v / each, c = v % each * n;
        bool in = row + r < row_end && col + c < col_end;
        bring(to + r * pitch + v % each * 16, in ? x.at(row + r, col + c) : x.base, in ? 16 : 0);
    }
}

// ---- the gradient of a router's weights: C = A^T B + Plus with few columns of A. The blocks
// of a cluster share the rows of A and B, and add up what they have in order.

#define CLUSTER 8u
#define STAGES 4u
#define DEEP 64u               // rows of A and B at a time
#define WIDE 64u               // columns of C that a block computes
#define LEFT ((HIGH + 4) * 4)  // bytes of a row of a tile of A: its columns lie in different banks
#define RIGHT ((WIDE + 8) * 2) // of B
#define STAGE (DEEP * (LEFT + RIGHT))

struct Weights {
    const Router &j;
    u32 m0, n0, from, to; // the tile of C, and rows of A and B

    DEVICE void begin(u32 step) const {
        u32 at = spot(pool) + step % STAGES * STAGE, row = from + step * DEEP;
        if (row < to) {
            fetch_tile(at, LEFT, j.a, row, DEEP, to, m0, HIGH, j.m);
            fetch_tile(at + DEEP * LEFT, RIGHT, j.b, row, DEEP, to, n0, WIDE, j.n);
        }
        seal();
    }
    // A warp computes 16 x 32 numbers.
    DEVICE void multiply_step(u32 step, float (&c)[4][4]) const {
        const u8 *at = pool + step % STAGES * STAGE;
        u32 row = warp() / 2 * 16, col = warp() % 2 * 32, g = lane() / 4, t = lane() % 4;
        if (m0 + row >= j.m) return;
        u32 right = spot(at) + DEEP * LEFT + lane() % 16 * RIGHT + (col + lane() / 16 * 8) * 2;
#pragma unroll
        for (u32 k = 0; k < DEEP; k += 16) {
            u32 b[2][4], f[2][4];
            float x[8];
            crosswise(b[0], right + k * RIGHT);
            crosswise(b[1], right + k * RIGHT + 32);
#pragma unroll
            for (u32 e = 0; e < 8; e++) {
                x[e] = *reinterpret_cast<const float *>(at + (k + 2 * t + e % 2 + e / 4 * 8) * LEFT + (row + g + e / 2 % 2 * 8) * 4);
            }
            divide(x, f);
#pragma unroll
            for (u32 term = 2; term > 0; term--)
#pragma unroll
                for (u32 w = 0; w < 4; w++) multiply(c[w], f[term - 1], b[w / 2] + w % 2 * 2);
        }
    }
};

KERNEL(THREADS, 2, CLUSTER)
stowage_nn_gemm_router_tn(PRODUCT) {
    Router j = router(a, b, c, plus, size, k, pitches, pitches2, how);
    need(STAGES * STAGE);
    u32 wide = (j.n + WIDE - 1) / WIDE, each = ((j.k + CLUSTER - 1) / CLUSTER + DEEP - 1) / DEEP * DEEP, cta = cta_in_cluster();
    u32 tile = block() / CLUSTER, from = least(cta * each, j.k);
    Weights w = {j, tile / wide * HIGH, tile % wide * WIDE, from, least(from + each, j.k)};
    u32 steps = (w.to - from + DEEP - 1) / DEEP;
    float sum[4][4] = {};
#pragma unroll
    for (u32 s = 0; s + 1 < STAGES; s++) w.begin(s);
#pragma unroll 1
    for (u32 s = 0; s < steps; s++) {
        arrived<STAGES - 2>();
        barrier(); // all have the step's tiles, and have read those of the step before
        w.begin(s + STAGES - 1);
        w.multiply_step(s, sum);
    }
    arrived<0>();
    barrier();
    // The block's sums, in rows of WIDE numbers.
    float *at = reinterpret_cast<float *>(pool) + (warp() / 2 * 16 + lane() / 4) * WIDE + warp() % 2 * 32 + lane() % 4 * 2;
#pragma unroll
    for (u32 n = 0; n < 4; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) at[i / 2 * 8 * WIDE + 8 * n + i % 2] = sum[n][i];
    cluster_arrive();
    cluster_wait();
    constexpr u32 share = HIGH * WIDE / 4 / CLUSTER;
    u32 v = cta * share + thread(), r = w.m0 + v / (WIDE / 4), n = w.n0 + v % (WIDE / 4) * 4;
    if (thread() < share && r < j.m && n < j.n) {
        float x[4], all[4];
        numbers(hear(spot(pool) + v * 16, 0), all);
#pragma unroll
        for (u32 i = 1; i < CLUSTER; i++) {
            numbers(hear(spot(pool) + v * 16, i), x);
#pragma unroll
            for (u32 e = 0; e < 4; e++) all[e] += x[e];
        }
        if (j.plus.base != 0) {
            numbers(read<Vec>(j.plus.at(r, n)), x);
#pragma unroll
            for (u32 e = 0; e < 4; e++) all[e] += x[e];
        }
        write(j.c.at(r, n), Vec{bits(all[0]), bits(all[1]), bits(all[2]), bits(all[3])});
    }
    cluster_arrive(); // no block ends while another may read its sums
    cluster_wait();
}

// ---- the gradient of a router's input: C = A B + Plus with few columns of A. A block has
// some columns of B, and computes one tile after the other while the next one's rows of A
// and of Plus arrive.

#define BROAD 128u              // columns of C that a block computes
#define EDGE ((BROAD + 8) * 2)  // bytes of a row of a tile of B, Plus and C

KERNEL(THREADS, 2)
stowage_nn_gemm_router_nn(PRODUCT) {
    Router j = router(a, b, c, plus, size, k, pitches, pitches2, how);
    u32 deep = (j.k + 15) / 16 * 16, left = (deep + 8) * 4, stage = HIGH * (left + EDGE);
    u32 wide = (j.n + BROAD - 1) / BROAD, n0 = block() % wide * BROAD, tiles = (j.m + HIGH - 1) / HIGH, apart = blocks() / wide;
    need(deep * EDGE + 2 * stage);
    auto begin = [&](u32 tile, u32 s) INLINE {
        u32 to = spot(pool) + deep * EDGE + s * stage;
        if (tile < tiles) {
            fetch_tile(to, left, j.a, tile * HIGH, HIGH, j.m, 0, deep, j.k);
            if (plus != 0) fetch_tile(to + HIGH * left, EDGE, j.plus, tile * HIGH, HIGH, j.m, n0, BROAD, j.n);
        }
        seal();
    };
    u32 row = warp() / 2 * 16 + lane() / 4, col = warp() % 2 * 64, t = lane() % 4; // a warp computes 16 x 64 numbers
    u32 right = spot(pool) + lane() % 16 * EDGE + (col + lane() / 16 * 8) * 2;
    fetch_tile(spot(pool), EDGE, j.b, 0, deep, j.k, n0, BROAD, j.n);
    begin(block() / wide, 0);
#pragma unroll 1
    for (u32 tile = block() / wide, s = 0; tile < tiles; tile += apart, s ^= 1) {
        begin(tile + apart, s ^ 1);
        arrived<1>();
        barrier();
        const u8 *in = pool + deep * EDGE + s * stage;
        u8 *out = pool + deep * EDGE + s * stage + HIGH * left;
        float sum[8][4] = {};
#pragma unroll 1
        for (u32 k0 = 0; k0 < deep; k0 += 16) {
            float x[8];
            u32 f[2][4];
#pragma unroll
            for (u32 e = 0; e < 8; e++) x[e] = *reinterpret_cast<const float *>(in + (row + e / 2 % 2 * 8) * left + (k0 + 2 * t + e % 2 + e / 4 * 8) * 4);
            divide(x, f);
#pragma unroll
            for (u32 w = 0; w < 8; w += 2) {
                u32 b4[4];
                crosswise(b4, right + k0 * EDGE + 16 * w);
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    multiply(sum[w + e], f[1], b4 + 2 * e);
                    multiply(sum[w + e], f[0], b4 + 2 * e);
                }
            }
        }
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            u32 *at = reinterpret_cast<u32 *>(out + (row + i % 2 * 8) * EDGE + (col + i / 2 * 8 + 2 * t) * 2);
            float more[2] = {0, 0};
            if (plus != 0) split(*at, more);
            *at = pair(sum[i / 2][i % 2 * 2] + more[0], sum[i / 2][i % 2 * 2 + 1] + more[1]);
        }
        barrier();
#pragma unroll
        for (u32 i = 0; i < HIGH * BROAD / 8 / THREADS; i++) {
            u32 v = i * THREADS + thread(), r = v / (BROAD / 8), n = v % (BROAD / 8) * 8;
            if (tile * HIGH + r < j.m && n0 + n < j.n) write(j.c.at(tile * HIGH + r, n0 + n), *reinterpret_cast<const Vec *>(out + r * EDGE + n * 2));
        }
        barrier(); // the tile may be overwritten
    }
    arrived<0>();
}
