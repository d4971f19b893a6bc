// This file has the machine instructions that kernels of models use beyond the prelude. All
// PTX is here or in the prelude, so the rest is plain C++, which a test compiles for the
// host.

#pragma once

#include "../prelude.cuh"

typedef unsigned short u16;

DEVICE u32 lane() { return thread() & 31; }
DEVICE u32 warp() { return thread() >> 5; }
DEVICE u32 warps() { return threads() >> 5; }

DEVICE void barrier() { asm volatile("bar.sync 0;" ::: "memory"); }
DEVICE void barrier(u32 number, u32 members) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(members) : "memory"); }
DEVICE void warp_barrier() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

// read and write are for memory that the launch reads again or has written. L1 keeps what
// is read.
template <class T> DEVICE T read(u64 p);

template <> DEVICE Vec read(u64 p) {
    Vec v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

template <> DEVICE u32 read(u64 p) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

template <> DEVICE u16 read(u64 p) {
    u16 v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}

DEVICE void write(u64 p, Vec v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void write(u64 p, u64 v) { asm volatile("st.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE void write(u64 p, u32 v) { asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE void write(u64 p, u16 v) { asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory"); }

// bump adds to a word of global memory, and tally to one of shared memory. Sums of
// whole numbers do not depend on the order.
DEVICE void bump(u64 p, u32 v) { asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE void tally(u32 *p, u32 v) {
    u32 at = (u32)(u64)(__attribute__((address_space(3))) u32 *)p;
    asm volatile("red.relaxed.cta.shared.add.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

// from_lane returns one lane's value in all lanes of a warp. across returns the value of
// the lane whose number differs in the bits of d, and from_below that of the lane d below.
DEVICE u32 from_lane(u32 v, u32 l) { return __nvvm_shfl_sync_idx_i32(~0u, v, l, 31); }
DEVICE u32 across(u32 v, u32 d) { return __nvvm_shfl_sync_bfly_i32(~0u, v, d, 31); }
DEVICE u32 from_below(u32 v, u32 d) { return __nvvm_shfl_sync_up_i32(~0u, v, d, 0); }

// ballot returns a bit for every lane of the warp that says yes.
DEVICE u32 ballot(bool yes) {
    u32 v;
    asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, 0xffffffff;}" : "=r"(v) : "r"((u32)yes));
    return v;
}

// same returns a bit for every lane of the warp with the same value.
DEVICE u32 same(u32 v) {
    u32 m;
    asm volatile("match.any.sync.b32 %0, %1, 0xffffffff;" : "=r"(m) : "r"(v));
    return m;
}

// power and logarithm are to base two, with an error of about 2^-22. quotient has an error
// of two units in the last place.
DEVICE float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float logarithm(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// reciprocal has an error of one unit in the last place, and takes numbers above 2^126 to
// zero.
DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float quotient(float a, float b) {
    float y;
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// narrow_pair rounds two numbers to bf16, the first into the low half. A NaN becomes 0x7fff.
DEVICE u32 narrow_pair(float a, float b) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(b), "f"(a));
    return v;
}
