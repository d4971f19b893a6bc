// The optimiser, and the sums of squares for clipping. optim.go says what is computed.
// targets: sm_80

#include "nn.cuh"

#define THREADS 256

KERNEL(THREADS)
stowage_nn_adamw(u64 weights, u64 first, u64 second, u64 grads, u64 param, u64 hyper, u64 norm, u64 n, u64 how) {
    float h[STEP];
    load(F32, global(hyper), STEP, h);
    float lr = h[0], beta1 = h[1], beta2 = h[2], epsilon = h[3], decay = bit(how, 2) ? 0 : h[4], clip = h[7], factor = 1;
    if (clip != 0 && norm != 0) {
        // A norm that is not a number leaves gradients unchanged, like the twin.
        float f = clip / __builtin_sqrtf(get(F32, global(norm)));
        if (f < 1) factor = f;
    }
    u32 type = bit(how, 0), to = bit(how, 1);
#pragma unroll 1
    for (u64 i = STEP * ((u64)block() * threads() + thread()); i < n; i += STEP * (u64)blocks() * threads()) {
        u32 k = (u32)least((u64)STEP, n - i);
        float w[STEP], m[STEP], v[STEP], g[STEP];
        load(F32, global(weights) + 4 * i, k, w);
        load(F32, global(first) + 4 * i, k, m);
        load(F32, global(second) + 4 * i, k, v);
        load(type, global(grads) + size_of(type) * i, k, g);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) {
            g[e] *= factor;
            m[e] = beta1 * m[e] + (1 - beta1) * g[e];
            v[e] = beta2 * v[e] + (1 - beta2) * (g[e] * g[e]);
            w[e] -= lr * (quotient(m[e] * h[5], __builtin_sqrtf(v[e] * h[6]) + epsilon) + decay * w[e]);
        }
        store(F32, global(weights) + 4 * i, k, w);
        store(F32, global(first) + 4 * i, k, m);
        store(F32, global(second) + 4 * i, k, v);
        if (param != 0) store(to, global(param) + size_of(to) * i, k, w);
    }
}

#define AHEAD 4u // steps that a thread loads together

// A block sums a run.
KERNEL(THREADS)
stowage_nn_squares(u64 sums, u64 x, u64 size, u64 types) {
    u64 n = size & ((1ull << 48) - 1), run = size >> 48;
    u32 type = bit(types, 0);
    Team t = teams(threads());
#pragma unroll 1
    for (u64 r = block(); r * run < n; r += blocks()) {
        u64 from = r * run;
        float sum = 0;
        u32 here = (u32)least(run, n - from);
        bool whole = here % (AHEAD * THREADS * STEP) == 0 && (global(x) & 15) == 0;
#pragma unroll 1
        for (u32 c = thread() * STEP; c < here; c += AHEAD * THREADS * STEP) {
            float v[STEP];
            Vec first[AHEAD], second[AHEAD];
#pragma unroll
            for (u32 k = 0; k < AHEAD; k++) {
                u64 p = global(x) + size_of(type) * (from + c + k * THREADS * STEP);
                if (!whole) continue;
                first[k] = read<Vec>(p);
                if (type == F32) second[k] = read<Vec>(p + 16);
            }
#pragma unroll
            for (u32 k = 0; k < AHEAD; k++) {
                u32 at = c + k * THREADS * STEP;
                if (!whole) {
                    load(type, global(x) + size_of(type) * (from + at), at < here ? least(STEP, here - at) : 0, v);
                } else if (type == BF16) {
                    widen(first[k], v);
                } else {
                    numbers(first[k], v);
                    numbers(second[k], v + 4);
                }
#pragma unroll
                for (u32 e = 0; e < STEP; e++) sum += v[e] * v[e];
            }
        }
        sum = t.sum(sum);
        if (t.member == 0) set(F32, global(sums) + 4 * r, sum);
    }
}
