// This file has the arithmetic of SwiGLU and of its gradient, a step of numbers at a time.

#pragma once

#include "nn.cuh"

// gate computes y in a from the left half of x in a and the right half in b.
DEVICE void gate(float *a, const float *b, float by) {
#pragma unroll
    for (u32 e = 0; e < STEP; e++) a[e] = a[e] * sigmoid(a[e]) * b[e] * by;
}

// Slopes has a step of SwiGLU's backward pass: in a the left half of x and then y, in b the
// right half and then its gradient, in d the gradient of y and then that of the left half.
struct Slopes {
    float a[STEP], b[STEP], d[STEP];
    // compute returns the step's part of the gradient of the row's weight.
    DEVICE float compute(float by) {
        float dot = 0;
#pragma unroll
        for (u32 e = 0; e < STEP; e++) {
            float s = sigmoid(a[e]), silu = a[e] * s, g = d[e] * by, y = silu * b[e];
            dot += d[e] * y;
            d[e] = g * b[e] * (s * (a[e] * (1 - s) + 1));
            a[e] = y * by;
            b[e] = g * silu;
        }
        return dot;
    }
};
