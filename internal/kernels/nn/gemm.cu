// Matrix products: dense ones, products over experts and the gradient of experts' weights.
// gemm.cuh has the tile of 128 x 128 that most of them consist of. This file decides which
// tiles there are, and in which order blocks compute them; and it has thin products, which
// would have too few tiles. gemm.go describes the arguments.
// targets: sm_80

#include "gemm.cuh"

#define MOST_EXPERTS 512u
#define TALL 8u

DEVICE u32 tiles(u32 n) { return (n + TILE - 1) / TILE; }

// Tensor and Plain are the two ways to compute a tile.
template <bool trans_a, bool trans_b> struct Tensor {
    static constexpr u32 room = STAGES * 2 * SIDE; // as much as a tile of results
    DEVICE void operator()(const Job &j, u32 m, u32 n) const { tensor_tile<trans_a, trans_b>(j, m, n); }
};
struct Plain {
    static constexpr u32 room = TILE_BYTES; // more than the stages
    bool trans_a, trans_b;
    DEVICE void operator()(const Job &j, u32 m, u32 n) const { plain_tile(j, trans_a, trans_b, m, n); }
};

// nth computes tile t of a product. Tiles follow each other down TALL rows of tiles and
// then to the next column. The few hundred blocks that run at the same time then share rows
// and columns about evenly, and find in L2 what another block has read.
template <class Way> DEVICE void nth(const Job &j, const Way &way, u32 t) {
    u32 across = tiles(j.n), first = t / (TALL * across) * TALL, in = t % (TALL * across);
    u32 high = least(tiles(j.m) - first, TALL);
    way(j, (first + in % high) * TILE, in / high * TILE);
}

template <class Way> DEVICE void dense(const Job &j, const Way &way) {
    need(Way::room);
    u32 count = tiles(j.m) * tiles(j.n);
#pragma unroll 1
    for (u32 t = block(); t < count; t += blocks()) nth(j, way, t);
}

// Experts are the segments, and the distance of an operand from one expert to the next.
struct Experts {
    u64 segments;
    u32 count, rows; // experts, and rows that all of them have room for
    DEVICE u32 first(u32 e) const { return look<u32>(segments + 8 * e); }
    DEVICE u32 size(u32 e) const {
        u32 from = first(e), n = look<u32>(segments + 8 * e + 4);
        if (from > rows || n > rows - from) trap();
        return n;
    }
};

// grouped computes the tiles of all experts' products in one sequence. The host does not
// know their number, so resident blocks compute every blocks()-th. below is the number of
// rows of B's memory for an expert.
template <class Way> DEVICE void grouped(const Job &all, const Experts &experts, u32 below, const Way &way) {
    SHARED u32 ends[MOST_EXPERTS]; // tiles up to the end of an expert's
    need(Way::room);
    u32 across = tiles(all.n);
    if (warp() == 0) {
        u32 before = 0;
#pragma unroll 1
        for (u32 base = 0; base < experts.count; base += 32) {
            u32 e = base + lane(), mine = e < experts.count ? tiles(experts.size(e)) * across : 0;
            u32 end = before + warp_scan(mine);
            if (e < experts.count) ends[e] = end;
            before = from_lane(end, 31);
        }
    }
    barrier();
    u32 count = ends[experts.count - 1];
#pragma unroll 1
    for (u32 t = block(); t < count; t += blocks()) {
        u32 e = 0, most = experts.count - 1; // the first expert that ends behind t
#pragma unroll 1
        while (e < most) {
            u32 middle = (e + most) / 2;
            if (ends[middle] > t) most = middle;
            else e = middle + 1;
        }
        Job j = all;
        u32 first = experts.first(e);
        j.m = experts.size(e);
        j.a += bytes(j.type_a, first * j.pitch_a);
        j.b += bytes(j.type_b, (u64)e * below * j.pitch_b);
        j.c += bytes(j.type_c, first * j.pitch_c);
        nth(j, way, e == 0 ? t : t - ends[e - 1]);
    }
}

// gradient computes the same number of tiles for each expert. Only k differs. The first one
// is added to nothing.
template <class Way> DEVICE void gradient(const Job &all, const Experts &experts, bool first, const Way &way) {
    need(Way::room);
    u32 each = tiles(all.m) * tiles(all.n);
#pragma unroll 1
    for (u64 t = block(); t < (u64)each * experts.count; t += blocks()) {
        u32 e = (u32)(t / each), from = experts.first(e);
        Job j = all;
        j.k = experts.size(e);
        if (j.k == 0 && !first) continue;
        j.a += bytes(j.type_a, from * j.pitch_a);
        j.b += bytes(j.type_b, from * j.pitch_b);
        j.c += bytes(j.type_c, (u64)e * j.m * j.pitch_c);
        j.plus = first ? 0 : j.c;
        j.pitch_plus = j.pitch_c;
        j.type_plus = j.type_c;
        nth(j, way, (u32)(t % each));
    }
}

// A thin product is C = Aᵀ B with few columns of A and long sums, such as the gradient of
// a router. A block computes 8 x 32 numbers of C. Four threads read 32 columns of a row of B,
// and 64 rows are read at once; what the threads of a column have is added in one order.
#define THIN_THREADS 256u
#define THIN_HIGH 8u
#define THIN_WIDE 32u

DEVICE void thin(const Job &j) {
    SHARED float sums[THIN_THREADS / 32][THIN_HIGH][THIN_WIDE];
    constexpr u32 each = THIN_WIDE / STEP, rows = THIN_THREADS / each, ahead = 4;
    u32 high = (j.m + THIN_HIGH - 1) / THIN_HIGH, wide = (j.n + THIN_WIDE - 1) / THIN_WIDE;
    u32 column = thread() % each * STEP, first = thread() / each;
#pragma unroll 1
    for (u32 t = block(); t < high * wide; t += blocks()) {
        u32 m0 = t % high * THIN_HIGH, n0 = t / high * THIN_WIDE;
        u32 height = least(j.m - m0, THIN_HIGH), width = bounded(n0 + column, j.n, STEP);
        bool quick = j.type_a == F32 && j.type_b == BF16 && height == THIN_HIGH && width == STEP && aligned(j.a, 4 * j.pitch_a) && aligned(j.b, 2 * j.pitch_b);
        float c[THIN_HIGH][STEP] = {};
#pragma unroll 1
        for (u32 k0 = first; k0 < j.k; k0 += rows * ahead) {
            float x[ahead][THIN_HIGH], y[ahead][STEP];
            if (quick) {
                // Without branches, all loads are under way at once. Rows behind the last are
                // zero, and read another one instead.
                Vec v[ahead][3];
#pragma unroll
                for (u32 i = 0; i < ahead; i++) {
                    u64 k = k0 + i * rows < j.k ? k0 + i * rows : k0, p = j.a + 4 * (k * j.pitch_a + m0);
                    v[i][0] = read<Vec>(p);
                    v[i][1] = read<Vec>(p + 16);
                    v[i][2] = read<Vec>(j.b + 2 * (k * j.pitch_b + n0 + column));
                }
#pragma unroll
                for (u32 i = 0; i < ahead; i++) {
                    bool in = k0 + i * rows < j.k;
                    u32 w[THIN_HIGH] = {v[i][0].x, v[i][0].y, v[i][0].z, v[i][0].w, v[i][1].x, v[i][1].y, v[i][1].z, v[i][1].w};
                    split(v[i][2].x, y[i]);
                    split(v[i][2].y, y[i] + 2);
                    split(v[i][2].z, y[i] + 4);
                    split(v[i][2].w, y[i] + 6);
#pragma unroll
                    for (u32 e = 0; e < STEP; e++) {
                        x[i][e] = in ? number(w[e]) : 0;
                        y[i][e] = in ? y[i][e] : 0;
                    }
                }
            } else {
#pragma unroll
                for (u32 i = 0; i < ahead; i++) {
                    u64 k = k0 + i * rows;
                    bool in = k < j.k;
                    load(j.type_a, j.a + bytes(j.type_a, k * j.pitch_a + m0), in ? height : 0, x[i]);
                    load(j.type_b, j.b + bytes(j.type_b, k * j.pitch_b + n0 + column), in ? width : 0, y[i]);
                }
            }
#pragma unroll
            for (u32 i = 0; i < ahead; i++) {
#pragma unroll
                for (u32 h = 0; h < THIN_HIGH; h++) {
#pragma unroll
                    for (u32 e = 0; e < STEP; e++) c[h][e] += x[i][h] * y[i][e];
                }
            }
        }
        barrier(); // the sums before have been read
#pragma unroll
        for (u32 h = 0; h < THIN_HIGH; h++) {
#pragma unroll
            for (u32 e = 0; e < STEP; e++) {
#pragma unroll
                for (u32 d = each; d < 32; d *= 2) c[h][e] += number(across(bits(c[h][e]), d));
                if (lane() < each) sums[warp()][h][column + e] = c[h][e];
            }
        }
        barrier();
        u32 h = thread() / THIN_WIDE, w = thread() % THIN_WIDE;
        if (m0 + h < j.m && n0 + w < j.n) {
            float sum = 0;
#pragma unroll
            for (u32 i = 0; i < THIN_THREADS / 32; i++) sum += sums[i][h][w];
            if (j.plus != 0) sum += get(j.type_plus, j.plus + bytes(j.type_plus, (m0 + h) * j.pitch_plus + n0 + w));
            set(j.type_c, j.c + bytes(j.type_c, (m0 + h) * j.pitch_c + n0 + w), sum);
        }
    }
}

#define PRODUCT u64 a, u64 b, u64 c, u64 plus, u64 size, u64 k, u64 pitches, u64 pitches2, u64 how
#define GROUPED u64 a, u64 b, u64 c, u64 segments, u64 size, u64 rows, u64 pitches, u64 pitch_c, u64 how

DEVICE Job job(PRODUCT) {
    auto type = [how](u32 bit) { return how >> bit & 1 ? (u32)BF16 : (u32)F32; };
    return {global(a), global(b), global(c), plus == 0 ? 0 : global(plus),
            (u32)pitches, pitches >> 32, (u32)pitches2, pitches2 >> 32,
            (u32)size, (u32)(size >> 32), (u32)k, type(0), type(1), type(2), type(3)};
}

DEVICE Experts experts_of(u64 segments, u64 rows) { return {global(segments), (u32)(rows >> 32), (u32)rows}; }
DEVICE Plain plain(u64 how) { return {(how >> 4 & 1) != 0, (how >> 5 & 1) != 0}; }

// Two blocks are resident on a multiprocessor: one computes while the other waits.
#define DENSE(name, threads, ...) \
    KERNEL(threads, 2) name(PRODUCT) { dense(job(a, b, c, plus, size, k, pitches, pitches2, how), __VA_ARGS__); }

// A product over experts has n and k, the gradient m and n.
#define EXPERTS(name, threads, trans_b, ...)                                                  \
    KERNEL(threads, 2) name(GROUPED) {                                                        \
        Job j = job(a, b, c, 0, size << 32, size >> 32, pitches, pitch_c, how);               \
        grouped(j, experts_of(segments, rows), trans_b ? j.n : j.k, __VA_ARGS__);             \
    }

#define GRADIENT(name, threads, ...)                                                          \
    KERNEL(threads, 2) name(GROUPED) {                                                        \
        Job j = job(a, b, c, 0, size, 0, pitches, pitch_c, how);                              \
        gradient(j, experts_of(segments, rows), how >> 6 & 1, __VA_ARGS__);                   \
    }

DENSE(stowage_nn_gemm_nn, TENSOR_THREADS, Tensor<false, false>())
DENSE(stowage_nn_gemm_nt, TENSOR_THREADS, Tensor<false, true>())
DENSE(stowage_nn_gemm_tn, TENSOR_THREADS, Tensor<true, false>())
DENSE(stowage_nn_gemm_tt, TENSOR_THREADS, Tensor<true, true>())
DENSE(stowage_nn_gemm_plain, PLAIN_THREADS, plain(how))
KERNEL(THIN_THREADS, 2) stowage_nn_gemm_thin(PRODUCT) { thin(job(a, b, c, plus, size, k, pitches, pitches2, how)); }
EXPERTS(stowage_nn_grouped_nn, TENSOR_THREADS, false, Tensor<false, false>())
EXPERTS(stowage_nn_grouped_nt, TENSOR_THREADS, true, Tensor<false, true>())
EXPERTS(stowage_nn_grouped_plain, PLAIN_THREADS, how >> 5 & 1, plain(how))
GRADIENT(stowage_nn_grouped_grad_tn, TENSOR_THREADS, Tensor<true, false>())
GRADIENT(stowage_nn_grouped_grad_plain, PLAIN_THREADS, Plain{true, false})
