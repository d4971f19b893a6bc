// The scan of Mamba-2 on tensor cores. scan.go says what is computed.
// targets: sm_80

#include "scantensor.cuh"

KERNEL(THREADS, 2)
stowage_nn_scan_tensor_state(u64 states, u64 xbc, u64 dt, u64 a_log, u64 bias, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types) {
    Scan c = unpack(xbc, dt, a_log, 0, bias, seq, heads, groups, pitches, types);
    carry_all<false>(c, global(states), c.xbc, 0, 0);
}

// A block computes a run of strips in a chunk.
template <u32 wide> DEVICE void scan_all(const Scan &c, const Matrix &y, u64 states) {
    typedef Run<wide> R;
    need(R::bytes);
    u8 *cb = pool + R::room;
#pragma unroll 1
    for (u32 u = block(); u < units(c, R::strips); u += blocks()) {
        Unit k = unit(c, u, R::strips);
        bool enters = k.chunk > 0;
        u32 own[wide / 16][4];
        begin_unit<false, wide>(own, cb, pool, c, k, [&]() INLINE { fill_steps((Steps *)(cb + CB_BYTES), c, k); });
        auto bring_strip = [&](u32 number, u8 *to) INLINE {
            Strip of = strip(c, number);
            bring_tokens<HEAD>(to, c, c.xbc, k.b, k.chunk, of.col, of.cols);
            if (enters) bring_state<wide>(to + ROWS_BYTES, c, of, of.between(c, states, k.b, k.chunk - 1), 0);
        };
        R::each(k, bring_strip, [&](u32 number, const Steps &s, u8 *x) INLINE {
            Strip of = strip(c, number);
            float by = c.param(c.d, of.h), o[8][4] = {};
            if (enters) through_state<false, wide>(o, s, own, x + ROWS_BYTES);
            through_tokens<false>(o, cb, s, x);
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
            deliver_rows(x, 16 * tile(), c, y, k.b, k.chunk, of);
        });
    }
}

KERNEL(THREADS, 2)
stowage_nn_scan_tensor(u64 dst, u64 xbc, u64 dt, u64 a_log, u64 d, u64 bias, u64 states, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types,
                       u64 pitch_y) {
    scan_all<STATE>(unpack(xbc, dt, a_log, d, bias, seq, heads, groups, pitches, types), {global(dst), pitch_y, BF16}, global(states));
}

KERNEL(THREADS, 1)
stowage_nn_scan_tensor_wide(u64 dst, u64 xbc, u64 dt, u64 a_log, u64 d, u64 bias, u64 states, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types,
                            u64 pitch_y) {
    scan_all<WIDE_STATE>(unpack(xbc, dt, a_log, d, bias, seq, heads, groups, pitches, types), {global(dst), pitch_y, BF16}, global(states));
}
