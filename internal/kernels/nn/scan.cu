// The scan of Mamba-2. scan.go says what is computed.
// targets: sm_80

#include "scan.cuh"

KERNEL(THREADS)
stowage_nn_scan_state(u64 states, u64 xbc, u64 dt, u64 a_log, u64 bias, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types) {
    SHARED Steps s;
    SHARED Operands o;
    Scan c = unpack(xbc, dt, a_log, 0, bias, seq, heads, groups, pitches, types);
    carry_all<false>(s, o, c, global(states), c.xbc);
}

// A block computes the heads of a group in a chunk.
KERNEL(THREADS)
stowage_nn_scan(u64 dst, u64 xbc, u64 dt, u64 a_log, u64 d, u64 bias, u64 states, u64 seq, u64 heads, u64 groups, u64 pitches, u64 types,
                u64 pitch_y) {
    SHARED Steps s;
    SHARED Operands o;
    SHARED Square cb;
    Scan c = unpack(xbc, dt, a_log, d, bias, seq, heads, groups, pitches, types);
    Matrix y = {global(dst), pitch_y, c.xbc.type};
#pragma unroll 1
    for (u32 u = block(); u < c.batch * c.chunks * c.groups; u += blocks()) {
        u32 g = u % c.groups, chunk = u / c.groups % c.chunks, b = u / c.groups / c.chunks;
        Part bs = part(c, c.xbc, b, chunk, c.col_b(g), c.state), cs = part(c, c.xbc, b, chunk, c.col_c(g), c.state);
        make_cb(o, cb, bs, cs);
        each_head(s, c, b, chunk, g, [&](u32 h, u32 w) INLINE {
            float by = c.param(c.d, h);
#pragma unroll 1
            for (u32 p = 0; p < c.head; p += TILE) {
                Part x = part(c, c.xbc, b, chunk, h * c.head, c.head).from(p), to = part(c, y, b, chunk, h * c.head, c.head).from(p);
                Tile t;
                t.clear();
                if (chunk > 0) {
                    Part in = state(c, c.between(global(states), b, chunk - 1, h));
                    multiply<true, true>(
                        o, t, c.state, [&](u32 i, u32 k) { return cs.at(i, k) * s.start(w, i); }, [&](u32 k, u32 j) { return in.at(p + j, k); });
                }
                multiply<true, false>(
                    o, t, Q, [&](u32 i, u32 k) { return k <= i ? cb[i][k] * s.decay(w, i, k) : 0; },
                    [&](u32 k, u32 j) { return x.at(k, j) * s.dt[w][k]; });
                t.each([&](u32 i, u32 j, float v) { to.put(i, j, v + by * x.at(i, j)); });
            }
        });
    }
}
