// The kernels of the short convolution over tokens before a scan, and of its backward pass.
// conv.go says what is computed.
// targets: sm_80

#include "conv.cuh"

// Four taps and pairs have paths of their own.
KERNEL(THREADS)
stowage_nn_conv(u64 dst, u64 x, u64 w, u64 bias, u64 size, u64 cols, u64 how, u64 pitch_y) {
    Conv v = unpack(x, w, bias, size, cols, how);
    Matrix y = {global(dst), pitch_y, v.x.type};
    bool fast = v.taps == 4 && pairs(v, v.x) && pairs(v, y);
    if (fast && v.x.type == BF16) forward<Columns<4, 2, 4, BF16>>(v, y);
    else if (fast) forward<Columns<4, 2, 4, F32>>(v, y);
    else forward<Columns<8, 2, 1, ANY>>(v, y);
}

// Four taps, and bf16 in whole vectors. Taps and bias are read by vectors, too, in the second.
KERNEL(THREADS, 8)
stowage_nn_conv_wide(u64 dst, u64 x, u64 w, u64 bias, u64 size, u64 cols, u64 how, u64 pitch_y) {
    forward<Columns<4, WIDE, BATCH, BF16>>(unpack(x, w, bias, size, cols, how), {global(dst), pitch_y, BF16});
}

KERNEL(THREADS, 4)
stowage_nn_conv_ahead(u64 dst, u64 x, u64 w, u64 bias, u64 size, u64 cols, u64 how, u64 pitch_y) {
    forward_ahead<Columns<4, AHEAD_WIDE, AHEAD_BATCH, BF16>>(unpack(x, w, bias, size, cols, how), {global(dst), pitch_y, BF16});
}

KERNEL(THREADS)
stowage_nn_conv_grad(u64 scratch, u64 x, u64 w, u64 bias, u64 size, u64 cols, u64 how, u64 grad, u64 dsrc, u64 pitches, u64 rows) {
    Conv v = unpack(x, w, bias, size, cols, how);
    Matrix dx = {global(dsrc), high(pitches), v.x.type}, dy = {global(grad), low(pitches), v.x.type};
    bool fast = v.taps == 4 && pairs(v, v.x) && pairs(v, dx) && pairs(v, dy);
    if (fast && v.x.type == BF16) backward<Columns<4, 2, 4, BF16>>(v, dx, dy, global(scratch), (u32)rows);
    else if (fast) backward<Columns<4, 2, 4, F32>>(v, dx, dy, global(scratch), (u32)rows);
    else backward<Columns<8, 2, 1, ANY>>(v, dx, dy, global(scratch), (u32)rows);
}

KERNEL(THREADS, 4)
stowage_nn_conv_grad_wide(u64 scratch, u64 x, u64 w, u64 bias, u64 size, u64 cols, u64 how, u64 grad, u64 dsrc, u64 pitches, u64 rows) {
    Conv v = unpack(x, w, bias, size, cols, how);
    backward<Columns<4, GRAD_WIDE, GRAD_BATCH, BF16>>(v, {global(dsrc), high(pitches), BF16}, {global(grad), low(pitches), BF16}, global(scratch), (u32)rows);
}

#define SUM_THREADS 256

KERNEL(SUM_THREADS)
stowage_nn_conv_grad_sum(u64 dw, u64 dbias, u64 scratch, u64 size, u64 pieces, u64 type) {
    add_sums(global(dw), global(dbias), global(scratch), low(size), high(size), (u32)pieces, (u32)type);
}
