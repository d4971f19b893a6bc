// The words that matrix products and attention have beyond words.cuh, each of them
// a machine instruction: copies into shared memory that go on by themselves,
// matrices of 8 x 8 from there into registers, and products of small matrices.
//
// A lane of a warp holds its part of a matrix as the instructions want it: with g
// = lane/4 and t = lane%4, of 16 x 8 results the numbers (g, 2t), (g, 2t+1), (g+8,
// 2t), (g+8, 2t+1); of 16 x 16 bf16 on the left the pairs that begin at (g, 2t),
// (g+8, 2t), (g, 2t+8), (g+8, 2t+8); of 16 x 8 on the right those that begin at row
// 2t and row 2t+8 of column g.

#pragma once

#include "words.cuh"

extern __attribute__((shared, aligned(128))) u8 pool[]; // as much as the launch asks for

// need traps if the launch requested less shared memory.
DEVICE void need(u32 bytes) {
    u32 there;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(there));
    if (there < bytes) trap();
}

// spot returns the address of a place in shared memory as instructions need it.
DEVICE u32 spot(const void *p) { return (u32)(u64)(__attribute__((address_space(3))) const u8 *)p; }

// bring begins to copy bytes, at most 16, to 16 bytes of shared memory and fills the rest
// with zeros. seal ends a group of copies. arrived waits until all groups of this thread
// but the last n have arrived.
DEVICE void bring(u32 dst, u64 src, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
// bring_few begins to copy 4, 8 or 16 bytes.
template <u32 bytes> DEVICE void bring_few(u32 dst, u64 src) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(dst), "l"(src), "n"(bytes) : "memory");
}
DEVICE void seal() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <u32 n> DEVICE void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory"); }

// matrices loads four matrices of 8 x 8 bf16. Lanes 8i to 8i+7 give the rows of matrix i.
// crosswise transposes them.
DEVICE void matrices(u32 *r, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
DEVICE void crosswise(u32 *r, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

// multiply adds the product of 16 x 16 and 16 x 8 bf16 to 16 x 8 fp32.
DEVICE void multiply(float *c, const u32 *a, const u32 *b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// pair rounds two numbers to bf16, the first into the low half.
DEVICE u32 pair(float low, float high) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

// times multiplies two pairs of bf16. The product has minus zero added, which changes
// nothing: Ampere has no product alone.
DEVICE u32 times(u32 a, u32 b) {
    u32 v;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(0x80008000));
    return v;
}

template <> DEVICE u64 read(u64 p) {
    u64 v;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
