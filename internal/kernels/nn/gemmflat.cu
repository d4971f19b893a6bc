// Flat products: C = A B + Plus with few columns of A, which is fp32, such as the input
// gradient of a router. They take as long as their memory does. gemm.go describes the
// arguments, gemmflat.go which products are flat.
// targets: sm_80

#include "nn.cuh"

#define THREADS 256
#define ROWS 4u // of a thread
#define HIGH (THREADS / 32 * ROWS)
#define WIDE (32 * STEP)

// A warp computes ROWS x WIDE numbers of C.
KERNEL(THREADS)
stowage_nn_gemm_flat(u64 a, u64 b, u64 c, u64 plus, u64 size, u64 k, u64 pitches, u64 pitches2, u64) {
    Matrix x = {global(a), low(pitches), F32}, w = {global(b), high(pitches), BF16};
    Matrix y = {global(c), low(pitches2), BF16}, p = {plus == 0 ? 0 : global(plus), high(pitches2), BF16};
    u32 m = low(size), n = high(size), wide = (n + WIDE - 1) / WIDE;
#pragma unroll 1
    for (u64 t = block(); t < (u64)((m + HIGH - 1) / HIGH) * wide; t += blocks()) {
        u32 row = (u32)(t / wide) * HIGH + warp() * ROWS, col = (u32)(t % wide) * WIDE + lane() * STEP;
        if (col >= n) continue;
        Vec more[ROWS];
        float sum[ROWS][STEP] = {}, v[STEP];
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            if (plus != 0 && row + r < m) more[r] = read<Vec>(p.at(row + r, col));
        }
#pragma unroll 1
        for (u32 e = 0; e < k; e += 4) {
            Vec weights[4], four[ROWS] = {};
            float f[ROWS][4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) weights[i] = look<Vec>(w.at(e + i, col));
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) {
                if (row + r < m) four[r] = look<Vec>(x.at(row + r, e));
            }
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) numbers(four[r], f[r]);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                widen(weights[i], v);
#pragma unroll
                for (u32 r = 0; r < ROWS; r++)
#pragma unroll
                    for (u32 d = 0; d < STEP; d++) sum[r][d] += f[r][i] * v[d];
            }
        }
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            if (row + r >= m) continue;
            if (plus != 0) {
                widen(more[r], v);
#pragma unroll
                for (u32 d = 0; d < STEP; d++) sum[r][d] += v[d];
            }
            write(y.at(row + r, col), narrowed(sum[r]));
        }
    }
}
