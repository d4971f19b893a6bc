// This file has what kernels of the loss share. Exponentials are powers of two: with t the
// largest logit times log2(e), one is 2^(x log2(e) - t).

#pragma once

#include "nn.cuh"

#define NONE (~0u)
#define LOG2E 1.44269504f
#define NOTHING (-__builtin_inff()) // a number that is not there: its exponential is zero
#define LOWEST (-3.4028235e38f)      // below every top

// Raised is a sum of exponentials. Its top is the largest number times log2(e), which they
// have subtracted.
struct Raised {
    float top, sum;
    // lift changes the sum to one of another top, which is not smaller.
    DEVICE void lift(float higher) {
        sum *= power(top - higher);
        top = higher;
    }
    // add adds the exponentials of numbers, and replaces them.
    template <u32 n> DEVICE void add(float *x) {
        float high = x[0];
#pragma unroll
        for (u32 i = 1; i < n; i++) high = larger(high, x[i]);
        lift(larger(top, high * LOG2E));
#pragma unroll
        for (u32 i = 0; i < n; i++) sum += x[i] = power(__builtin_fmaf(x[i], LOG2E, -top));
    }
};

struct Loss {
    Matrix x, dx; // dx without memory: no gradient
    u64 targets, losses;
    u32 rows, cols;
    float scale;

    DEVICE u32 target(u64 row) const {
        u32 t = look<u32>(targets + 4 * row);
        if (t != NONE && t >= cols) trap();
        return t;
    }
    // own returns the logit of a row's target.
    DEVICE float own(u64 row, u32 target) const { return target == NONE ? 0 : get(x.type, x.at(row, target)); }
    // finish writes the loss of a row.
    DEVICE void finish(u64 row, u32 target, float own, const Raised &r) const {
        float loss = natural_log(r.sum) - __builtin_fmaf(own, LOG2E, -r.top) * 0.693147181f;
        set(F32, losses + 4 * row, target == NONE ? 0 : loss);
    }
    // over returns the factor of exponentials in gradients.
    DEVICE float over(u32 target, const Raised &r) const { return target == NONE ? 0 : scale / r.sum; }
};

DEVICE Loss unpack(u64 src, u64 targets, u64 loss, u64 grad, u64 size, u64 pitches, u64 how) {
    return {{global(src), low(pitches), bit(how, 0)},
            {grad == 0 ? 0 : global(grad), high(pitches), bit(how, 1)},
            global(targets),
            global(loss),
            low(size),
            high(size),
            number(high(how))};
}
