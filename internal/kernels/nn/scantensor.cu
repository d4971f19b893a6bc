// The scan of Mamba-2 on tensor cores. scan.go says what is computed.
// targets: sm_80

#include "scantensor.cuh"

KERNEL(THREADS, 2)
stowage_nn_scan_tensor_state(u64 states, u64 xbc, u64 dt, u64 a_log, u64 bias, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types) {
    Scan c = unpack(xbc, dt, a_log, 0, bias, seq, heads, groups, pitches, types);
    carry_all<false>(c, global(states), c.xbc, 0, 0);
}

#define RUN 8u // heads of a block: tensorRun
#define STAGE (2 * ROWS_BYTES)
#define SCAN_BYTES (SIDE_BYTES + 2 * STAGE + 2 * sizeof(Steps))

// inside adds what the tokens of a square's columns give to its rows.
DEVICE void inside(float y[8][4], const u32 *cb, const Steps &s, u32 other, const u8 *x) {
    u32 row = 16 * tile() + lane() / 4, col = 16 * other + lane() % 4 * 2, a[4];
    float sum[2] = {s.sum[row], s.sum[row + 8]};
#pragma unroll
    for (u32 e = 0; e < 4; e++) {
        u32 i = row + e % 2 * 8, j = col + e / 2 * 8;
        Both sums = *(const Both *)(s.sum + j), dt = *(const Both *)(s.dt + j);
        float m[2];
        split(cb[e], m);
#pragma unroll
        for (u32 k = 0; k < 2; k++) m[k] = j + k <= i ? m[k] * (power(sum[e % 2] - sums.v[k]) * dt.v[k]) : 0;
        a[e] = pair(m[0], m[1]);
    }
#pragma unroll
    for (u32 p = 0; p < 8; p += 2) {
        u32 r[4];
        right_columns<HEAD>(r, x, 8 * p, 16 * other);
        multiply_two(y + p, a, r);
    }
}

// A block computes a run of heads in a chunk. The next head's numbers are on their way.
KERNEL(THREADS, 2)
stowage_nn_scan_tensor(u64 dst, u64 xbc, u64 dt, u64 a_log, u64 d, u64 bias, u64 states, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types,
                       u64 pitch_y) {
    need(SCAN_BYTES);
    Scan c = unpack(xbc, dt, a_log, d, bias, seq, heads, groups, pitches, types);
    Matrix y = {global(dst), pitch_y, BF16};
    u8 *cs = pool, *stages = pool + SIDE_BYTES;
    Steps *steps = (Steps *)(stages + 2 * STAGE);
#pragma unroll 1
    for (u32 u = block(); u < units(c, RUN); u += blocks()) {
        Unit k = unit(c, u, RUN);
        bool enters = k.chunk > 0;
        auto bring_head = [&](u32 h) INLINE {
            u8 *stage = stages + (h - k.head) % 2 * STAGE;
            bring_tokens<HEAD>(stage, c, c.xbc, k.b, k.chunk, h * c.head, c.head);
            if (enters) bring_state(stage + ROWS_BYTES, c, c.between(global(states), k.b, k.chunk - 1, h));
        };
        float raw[4];
        barrier(); // the unit before is done
        bring_tokens<STATE>(cs, c, c.xbc, k.b, k.chunk, c.col_c(k.g), c.state);
        bring_tokens<STATE>(stages + STAGE, c, c.xbc, k.b, k.chunk, c.col_b(k.g), c.state);
        seal();
        bring_head(k.head);
        seal();
        if (warp() == 0) {
            raw_steps(raw, c, k.b, k.chunk, k.head);
            steps[0].fill(token_steps(raw, c, k.chunk, k.head));
        }
        arrived<1>();
        barrier();
        u32 cb[SQUARES][4];
        make_cb<false>(cb, cs, stages + STAGE);
#pragma unroll 1
        for (u32 h = k.head; h < k.end; h++) {
            arrived<0>();
            barrier();
            u32 turn = (h - k.head) % 2;
            bool more = h + 1 < k.end, next = more && warp() == 0;
            if (more) bring_head(h + 1);
            seal();
            if (next) raw_steps(raw, c, k.b, k.chunk, h + 1);
            float by = c.param(c.d, h);
            u8 *x = stages + turn * STAGE;
            const Steps &s = steps[turn];
            float o[8][4] = {};
            if (enters) through_state<false>(o, s, cs, x + ROWS_BYTES);
#pragma unroll
            for (u32 n = 0; n < SQUARES; n++) {
                if (has_square(n, false)) inside(o, cb[n], s, n, x);
            }
            if (next) steps[!turn].fill(token_steps(raw, c, k.chunk, h + 1));
            barrier(); // x has been read
#pragma unroll
            for (u32 p = 0; p < 16; p++) {
                u32 *at = ahead<HEAD>(x, 16 * tile() + lane() / 4 + p % 2 * 8, p / 2);
                const float *v = o[p / 2] + p % 2 * 2;
                float in[2];
                split(*at, in);
                *at = pair(v[0] + by * in[0], v[1] + by * in[1]);
            }
            warp_barrier();
            deliver_rows(x, 16 * tile(), c, y, k.b, k.chunk, h * c.head);
        }
    }
}
