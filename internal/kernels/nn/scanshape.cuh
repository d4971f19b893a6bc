// This file has what all kernels of the scan share: its shape, and the softplus. Who includes
// it has defined Q, the tokens of a chunk, and STATE_SIZE, the bytes of a number of a state.

#pragma once

#include "nn.cuh"

struct Scan {
    u32 seq, batch, heads, head, groups, state, chunks;
    Matrix xbc, dt;
    u64 a_log, d, bias;
    u32 params; // type
    DEVICE u32 col_b(u32 g) const { return heads * head + g * state; }
    DEVICE u32 col_c(u32 g) const { return col_b(groups + g); }
    DEVICE u32 tokens(u32 chunk) const { return least(Q, seq - chunk * Q); }
    // between returns the state of a head behind a chunk.
    DEVICE u64 between(u64 states, u32 b, u32 chunk, u32 h) const {
        return states + (u64)STATE_SIZE * head * state * (((u64)b * (chunks - 1) + chunk) * heads + h);
    }
    DEVICE float param(u64 p, u32 h) const { return get(params, p + h * size_of(params)); }
    DEVICE float a(u32 h) const { return -exponential(param(a_log, h)); }
};

DEVICE Scan unpack(u64 xbc, u64 dt, u64 a_log, u64 d, u64 bias, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types) {
    return {
        low(seq),   high(seq),       low(heads), high(heads), low(groups), high(groups), (low(seq) + Q - 1) / Q, {global(xbc), low(pitches), low(types)},
        {global(dt), high(pitches), low(types)}, global(a_log), d == 0 ? 0 : global(d), global(bias), high(types)};
}

// softplus returns log(1 + e^x), also if that is far below one. With s = e/(2 + e), log(1 +
// e) is twice s + s³/3 + s⁵/5 and so on, and s is at most a third.
DEVICE float softplus(float x) {
    float e = exponential(x < 0 ? x : -x), s = quotient(e, 2 + e), t = s * s, sum = 1.0f / 15;
#pragma unroll
    for (u32 k = 7; k > 0; k--) sum = sum * t + 1.0f / (float)(2 * k - 1);
    return (x < 0 ? 0 : x) + 2 * s * sum;
}

// add_chunks adds what the chunks have for ALog, D and DTBias to their gradients. A thread
// sums up one number.
DEVICE void add_chunks(u64 a_log, u64 d, u64 bias, u64 sums, u32 chunks, u32 heads, u32 type) {
#pragma unroll 1
    for (u32 i = block() * threads() + thread(); i < 3 * heads; i += blocks() * threads()) {
        u64 to = global(i < heads ? a_log : i < 2 * heads ? d : bias) + (u64)(i % heads) * size_of(type);
        set(type, to, sum_apart(get(type, to), global(sums) + 4ull * i, chunks, 12ull * heads));
    }
}
