// The scan of Mamba-2 on tensor cores. scan.go says what is computed.
// targets: sm_80

#include "scantensor.cuh"

KERNEL(THREADS, 2)
stowage_nn_scan_tensor_state(u64 states, u64 xbc, u64 dt, u64 a_log, u64 bias, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types) {
    Scan c = unpack(xbc, dt, a_log, 0, bias, seq, heads, groups, pitches, types);
    carry_all<false>(c, global(states), c.xbc, 0, 0);
}

#define RUN 8u // heads of a block: tensorRun
#define STAGE (ROWS_BYTES + STATE_BYTES)
#define SCAN_BYTES (CB_BYTES + 2 * STAGE + 2 * sizeof(Steps))

// A block computes a run of heads in a chunk. The next head's numbers are on their way.
KERNEL(THREADS, 2)
stowage_nn_scan_tensor(u64 dst, u64 xbc, u64 dt, u64 a_log, u64 d, u64 bias, u64 states, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types,
                       u64 pitch_y) {
    need(SCAN_BYTES);
    Scan c = unpack(xbc, dt, a_log, d, bias, seq, heads, groups, pitches, types);
    Matrix y = {global(dst), pitch_y, BF16};
    u8 *stages = pool, *cb = pool + 2 * STAGE;
    Steps *steps = (Steps *)(cb + CB_BYTES);
#pragma unroll 1
    for (u32 u = block(); u < units(c, RUN); u += blocks()) {
        Unit k = unit(c, u, RUN);
        bool enters = k.chunk > 0;
        auto bring_head = [&](u32 h) INLINE {
            u8 *stage = stages + (h - k.head) % 2 * STAGE;
            bring_tokens<HEAD>(stage, c, c.xbc, k.b, k.chunk, h * c.head, c.head);
            if (enters) bring_state<STATE>(stage + ROWS_BYTES, c, c.between(global(states), k.b, k.chunk - 1, h), 0);
            seal();
        };
        float raw[4];
        barrier(); // the unit before is done
        bring_tokens<STATE>(stages, c, c.xbc, k.b, k.chunk, c.col_c(k.g), c.state);
        bring_tokens<STATE>(stages + SIDE_BYTES, c, c.xbc, k.b, k.chunk, c.col_b(k.g), c.state);
        seal();
        if (warp() == 0) {
            raw_steps(raw, c, k.b, k.chunk, k.head);
            steps[0].fill(token_steps(raw, c, k.chunk, k.head));
        }
        arrived<0>();
        barrier();
        u32 own[STATE / 16][4];
        load_own(own, stages);
        make_cb<false>(cb, own, stages + SIDE_BYTES);
        barrier(); // B and C have been read
        bring_head(k.head);
#pragma unroll 1
        for (u32 h = k.head; h < k.end; h++) {
            arrived<0>();
            barrier();
            u32 turn = (h - k.head) % 2;
            bool more = h + 1 < k.end, next = more && warp() == 0; // it has the fewest squares
            if (more) bring_head(h + 1);
            if (next) raw_steps(raw, c, k.b, k.chunk, h + 1);
            float by = c.param(c.d, h);
            u8 *x = stages + turn * STAGE;
            float o[8][4] = {};
            if (enters) through_state<false>(o, steps[turn], own, x + ROWS_BYTES);
            through_tokens<false>(o, cb, steps[turn], x);
            if (next) steps[!turn].fill(token_steps(raw, c, k.chunk, h + 1));
            barrier(); // x has been read
#pragma unroll
            for (u32 p = 0; p < 16; p++) {
                u32 *at = ahead<HEAD>(x + cell<HEAD>(16 * tile(), 0), p % 2 * 8, p / 2);
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
