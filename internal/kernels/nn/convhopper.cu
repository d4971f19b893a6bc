// The backward pass of the short convolution on Hopper. conv.go says what is computed. The launch
// that adds up the sums begins early and waits beside the last blocks.
// targets: sm_90a

#include "hopper.cuh"
#include "conv.cuh"

// The next launch finds room only when all blocks have begun.
KERNEL(THREADS, 4)
stowage_nn_conv_grad_late(u64 scratch, u64 x, u64 w, u64 bias, u64 size, u64 cols, u64 how, u64 grad, u64 dsrc, u64 pitches, u64 rows) {
    if (thread() == 0) let_next_begin();
    Conv v = unpack(x, w, bias, size, cols, how);
    backward<Columns<4, GRAD_WIDE, GRAD_BATCH, BF16>, true>(v, {global(dsrc), high(pitches), BF16}, {global(grad), low(pitches), BF16}, global(scratch), (u32)rows);
}

#define SUM_THREADS 256 // convSumThreads

KERNEL(SUM_THREADS)
stowage_nn_conv_grad_sum_early(u64 dw, u64 dbias, u64 scratch, u64 size, u64 pieces, u64 type) {
    await_before();
    add_sums(global(dw), global(dbias), global(scratch), low(size), high(size), (u32)pieces, (u32)type);
}
