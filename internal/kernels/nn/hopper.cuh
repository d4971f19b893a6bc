// The words of kernels for Hopper (sm_90a), each of them a machine instruction: barriers in
// shared memory that count arrivals and bytes, copies of boxes of a matrix by the copying
// unit (TMA), products of a whole group of four warps that go on by themselves (wgmma),
// clusters of blocks, and registers that groups of warps give to each other.
//
// Addresses in shared memory are as spot returns them. A box of 64 columns of bf16 has 128
// bytes a row, and lies at a multiple of 1024 bytes; its 16-byte vector v of row r lies at
// place v ^ (r & 7) of the row. A group of four warps holds 64 x n results so: with w =
// warp % 4, g = lane / 4, t = lane % 4, number i of a lane is that of row 16w + g + 8 (i /
// 2 % 2), column 8 (i / 4) + 2t + i % 2. An operand of 64 x 16 in registers is four
// fragments of 16 x 16 as in tensor.cuh, one for each warp.

#pragma once

#include "tensor.cuh"

// Map is a parameter behind the arguments that are eight bytes wide: a tensor map. It has no
// name, because it is never read as a value. map_of returns the address of parameter n of a
// kernel, and is used in that kernel alone.
struct alignas(64) Map {
    u64 words[16];
};
#define map_of(kernel, n)                                                                                 \
    ({                                                                                                    \
        u64 at_;                                                                                          \
        asm("{.reg .b64 q; mov.b64 q, " #kernel "_param_" #n "; cvta.param.u64 %0, q;}" : "=l"(at_));      \
        at_;                                                                                              \
    })
DEVICE void prefetch_map(u64 map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// ---- barriers of eight bytes. Each phase ends when count threads have arrived and all
// bytes that were expected have come. mbar_wait waits for the end of the phase of a parity:
// 0, 1, 0 and so on.

DEVICE void mbar_init(u32 at, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory"); }
DEVICE void mbar_arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }
// mbar_arrive_in arrives at the barrier at the same place of a block of the cluster. It is
// no fence for the cluster: that would wait for all memory of the GPU, some 700 ns.
DEVICE void mbar_arrive_in(u32 at, u32 cta) {
    asm volatile("{.reg .b32 r; mapa.shared::cluster.u32 r, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [r];}" ::"r"(at), "r"(cta)
                 : "memory");
}
// mbar_expect arrives and makes the phase wait for bytes.
DEVICE void mbar_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
DEVICE bool mbar_passed(u32 at, u32 parity) {
    u32 yes;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(yes)
                 : "r"(at), "r"(parity)
                 : "memory");
    return yes != 0;
}
DEVICE void mbar_wait(u32 at, u32 parity) {
    while (!mbar_passed(at, parity)) {
    }
}
// fence_mbar_init makes barriers that were set up known to the cluster and to copies.
// fence_async makes what this thread wrote to shared memory known to copies and wgmma.
DEVICE void fence_mbar_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- clusters

DEVICE u32 cta_in_cluster() {
    u32 v;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(v));
    return v;
}
// All threads of the cluster arrive, and then wait for each other.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// hear reads shared memory of a block of the cluster. That block must have written it before
// all waited for each other, and must not end before this.
DEVICE Vec hear(u32 at, u32 cta) {
    Vec v;
    asm volatile("{.reg .b32 r; mapa.shared::cluster.u32 r, %4, %5; ld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [r];}"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at), "r"(cta)
                 : "memory");
    return v;
}

// tell writes 8 bytes to the place of a block of the cluster that lies like this one, and they count at the
// barrier there that lies like this one. That block must not end before.
DEVICE void tell(u32 at, u64 v, u32 mbar, u32 cta) {
    asm volatile("{.reg .b32 r, b; mapa.shared::cluster.u32 r, %0, %3; mapa.shared::cluster.u32 b, %2, %3; "
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [r], %1, [b];}" ::"r"(at), "l"(v), "r"(mbar), "r"(cta)
                 : "memory");
}

// ---- copies. One thread issues each.

// tma_load copies the box whose first number is (row, col) to dst, and its bytes count at
// mbar. tma_keep does the same, and L2 keeps what it reads for longer than what others read: other blocks read
// it, too. tma_keep_all copies it to that place in all blocks of the cluster that mask has a bit for; the
// bytes count in each.
DEVICE void tma_load(u32 dst, u64 map, u32 mbar, u32 col, u32 row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(dst), "l"(map), "r"(mbar),
                 "r"(col), "r"(row)
                 : "memory");
}
#define KEPT 0x14f0000000000000ull // evict last, as createpolicy makes it for all of what is read
DEVICE void tma_keep(u32 dst, u64 map, u32 mbar, u32 col, u32 row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
                 "l"(map), "r"(mbar), "r"(col), "r"(row), "l"(KEPT)
                 : "memory");
}
DEVICE void tma_keep_all(u32 dst, u64 map, u32 mbar, u32 col, u32 row, u32 mask) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;"
                 ::"r"(dst), "l"(map), "r"(mbar), "r"(col), "r"(row), "h"((u16)mask), "l"(KEPT)
                 : "memory");
}
// tma_store begins to copy a box from shared memory to the matrix. tma_commit ends a group
// of such copies. tma_read waits until all groups of this thread but the last n have read
// shared memory, and tma_done until they have written.
DEVICE void tma_store(u64 map, u32 src, u32 col, u32 row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(src), "r"(col), "r"(row) : "memory");
}
DEVICE void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <u32 n> DEVICE void tma_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(n) : "memory"); }
template <u32 n> DEVICE void tma_done() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(n) : "memory"); }
// bulk_put begins to copy bytes, which follow each other in shared memory, to memory.
// bulk_add begins to add them there as fp32 numbers.
DEVICE void bulk_put(u64 dst, u32 src, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
}
DEVICE void bulk_add(u64 dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
}

// ---- blocks that wait for each other

// publish adds one to a count behind everything that this thread wrote and its copies wrote
// that it has waited for. await_count waits until a count has a value; what was published
// with it is known then, to copies too.
DEVICE void publish(u64 p) { asm volatile("fence.proxy.async; red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory"); }
DEVICE void await_count(u64 p, u32 v) {
    u32 now;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(p) : "memory");
    } while (now != v);
    asm volatile("fence.proxy.async;" ::: "memory");
}

// ---- launches that overlap

// let_next_begin lets the next launch begin, if it was made to begin early, when all blocks have
// called this or ended. One thread of a block calls it, behind a barrier if the next launch reads before it waits. The manual promises that
// memory is known only behind await_before. What the block wrote is known earlier, because the fence
// here puts it into L2 before the next launch can begin: a launch that begins with begun_early reads it
// by read_l2. await_before waits for the end of the launch before, at once if this one did not begin
// early. A launch that does must not end without it.
DEVICE void let_next_begin() { asm volatile("fence.acq_rel.gpu; griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void begun_early() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE u32 read_l2(u64 p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void await_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- memory at a constant distance from an address, which is part of the instruction.

DEVICE void write_far(u64 p, u32 far, Vec v) {
    asm volatile("st.global.v4.u32 [%0+%1], {%2,%3,%4,%5};" ::"l"(p), "n"(far), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// write_below stores if at is below left, put_below as put does, and add_below has memory add four fp32
// numbers, of which subnormal ones may count as zero. They take no branch: stores behind branches follow
// each other so much later that products which little but stores bounds took a seventh longer.
#define BELOW(name, does)                                                                                             \
    DEVICE void name(u64 p, u32 far, int at, int left, Vec v) {                                                       \
        asm volatile("{.reg .pred q; setp.lt.s32 q, %6, %7; @q " does " [%0+%1], {%2,%3,%4,%5};}" ::"l"(p), "n"(far), \
                     "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "n"(at), "r"(left)                                       \
                     : "memory");                                                                                     \
    }
BELOW(write_below, "st.global.v4.u32")
BELOW(put_below, "st.global.cs.v4.u32")
BELOW(add_below, "red.relaxed.gpu.global.add.v4.f32")
DEVICE u32 read_far(u64 p, u32 far) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1+%2];" : "=r"(v) : "l"(p), "n"(far) : "memory");
    return v;
}
DEVICE void read_two(u64 p, u32 far, float *x) {
    asm volatile("ld.global.v2.f32 {%0,%1}, [%2+%3];" : "=f"(x[0]), "=f"(x[1]) : "l"(p), "n"(far) : "memory");
}
// read_two_of reads two numbers if at is below left; else they are zero.
DEVICE void read_two_of(u64 p, u32 far, int at, int left, float *x) {
    asm volatile("{.reg .pred q; setp.lt.s32 q, %4, %5; mov.f32 %0, 0f00000000; mov.f32 %1, 0f00000000; @q ld.global.L2::128B.v2.f32 {%0,%1}, [%2+%3];}"
                 : "=&f"(x[0]), "=&f"(x[1])
                 : "l"(p), "n"(far), "n"(at), "r"(left)
                 : "memory");
}

// ---- numbers

// inverse_root has an error of about 2^-23 times the result.
DEVICE float inverse_root(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- groups of warps

// pause gives the rest of the block about half a microsecond.
DEVICE void pause() { asm volatile("nanosleep.u32 500;" ::: "memory"); }

// barrier_arrive counts at a barrier without waiting for the others.
DEVICE void barrier_arrive(u32 number, u32 members) { asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(members) : "memory"); }

// elect returns true in one lane of a warp.
DEVICE bool elect() {
    u32 yes;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(yes));
    return yes != 0;
}
// All warps of a group of four call these: the group has n registers a thread from then on.
template <u32 n> DEVICE void registers_less() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n)); }
template <u32 n> DEVICE void registers_more() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n)); }

// ---- products

// smem_desc describes an operand in shared memory to wgmma: boxes of 64 columns. If rows of
// the box run along k, stride is the bytes from eight rows to the next eight (1024), and
// the next 16 of k begin 32 bytes further; leading is not used. If they run along m or n
// (turned), stride is the bytes from eight rows of k to the next eight (1024), leading
// those from 64 of m or n to the next 64, and the next 16 of k begin 2048 bytes further.
DEVICE u64 smem_desc(u32 at, u32 leading, u32 stride) {
    return (u64)1 << 62 | (u64)(stride >> 4) << 32 | (u64)(leading >> 4) << 16 | (at & 0x3ffff) >> 4;
}

// wgmma_fence comes before the first product, and after other code has changed operands or
// results in registers. wgmma_commit ends a group of products. wgmma_wait waits until all
// groups but the last n are done. Code reads results behind the wait and pin, which keeps
// the compiler from reading them earlier.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <u32 n> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory"); }
template <u32 count> DEVICE void pin(float *c) {
#pragma unroll
    for (u32 i = 0; i < count; i++) asm volatile("" : "+f"(c[i])::"memory");
}
template <u32 count> DEVICE void pin(u32 *a) {
#pragma unroll
    for (u32 i = 0; i < count; i++) asm volatile("" : "+r"(a[i])::"memory");
}

// The results of wgmma as operands: numbers of them, and registers.
#define TEN(d) "%" #d "0,%" #d "1,%" #d "2,%" #d "3,%" #d "4,%" #d "5,%" #d "6,%" #d "7,%" #d "8,%" #d "9"
#define RESULTS_32 TEN() ",%10,%11,%12,%13,%14,%15"
#define RESULTS_64 TEN() "," TEN(1) "," TEN(2) ",%30,%31"
#define RESULTS_96 TEN() "," TEN(1) "," TEN(2) "," TEN(3) ",%40,%41,%42,%43,%44,%45,%46,%47"
#define RESULTS_128 TEN() "," TEN(1) "," TEN(2) "," TEN(3) "," TEN(4) "," TEN(5) ",%60,%61,%62,%63"
#define RESULTS_144 TEN() "," TEN(1) "," TEN(2) "," TEN(3) "," TEN(4) "," TEN(5) "," TEN(6) ",%70,%71"
#define RESULTS_160 TEN() "," TEN(1) "," TEN(2) "," TEN(3) "," TEN(4) "," TEN(5) "," TEN(6) "," TEN(7)
#define RESULTS_192 TEN() "," TEN(1) "," TEN(2) "," TEN(3) "," TEN(4) "," TEN(5) "," TEN(6) "," TEN(7) "," TEN(8) ",%90,%91,%92,%93,%94,%95"
#define RESULTS_224 TEN() "," TEN(1) "," TEN(2) "," TEN(3) "," TEN(4) "," TEN(5) "," TEN(6) "," TEN(7) "," TEN(8) "," TEN(9) "," TEN(10) ",%110,%111"
#define RESULTS_256 TEN() "," TEN(1) "," TEN(2) "," TEN(3) "," TEN(4) "," TEN(5) "," TEN(6) "," TEN(7) "," TEN(8) "," TEN(9) "," TEN(10) "," TEN(11) ",%120,%121,%122,%123,%124,%125,%126,%127"
#define C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define C16(i) C4(i), C4(i + 4), C4(i + 8), C4(i + 12)
#define C_32 C16(0)
#define C_64 C16(0), C16(16)
#define C_96 C_64, C16(32)
#define C_128 C_96, C16(48)
#define C_144 C_128, C4(64), C4(68)
#define C_160 C_128, C16(64)
#define C_192 C_128, C16(64), C16(80)
#define C_224 C_192, C16(96)
#define C_256 C_224, C16(112)

#define WGMMA_SS(n, a_, b_, keep_, x, y)                                                                             \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #keep_ ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" \
                 RESULTS_##n "}, %" #a_ ", %" #b_ ", p, 1, 1, %" #x ", %" #y ";}"                                    \
                 : C_##n                                                                                             \
                 : "l"(a), "l"(b), "r"(keep), "n"((u32)turn_a), "n"((u32)turn_b)                                               \
                 : "memory")
#define WGMMA_RS(n, a0, a1, a2, a3, b_, keep_, y)                                                                    \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #keep_ ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" \
                 RESULTS_##n "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_ ", p, 1, 1, %" #y ";}"             \
                 : C_##n                                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"((u32)turn_b)                        \
                 : "memory")

// wgmma_ss begins to add the product of 64 x 16 and 16 x n bf16 to c, which has n / 2
// numbers a thread; without keep, c is overwritten. turn_a and turn_b say that rows of the
// boxes run along m and n. wgmma_rs has the left operand in registers; code does not change
// them before the wait.
template <u32 n, bool turn_a, bool turn_b> DEVICE void wgmma_ss(float *c, u64 a, u64 b, u32 keep) {
    static_assert(n == 32 || n == 64 || n == 96 || n == 128 || n == 144 || n == 160 || n == 192 || n == 224 || n == 256, "no such product");
    if constexpr (n == 32) WGMMA_SS(32, 16, 17, 18, 19, 20);
    else if constexpr (n == 64) WGMMA_SS(64, 32, 33, 34, 35, 36);
    else if constexpr (n == 96) WGMMA_SS(96, 48, 49, 50, 51, 52);
    else if constexpr (n == 128) WGMMA_SS(128, 64, 65, 66, 67, 68);
    else if constexpr (n == 144) WGMMA_SS(144, 72, 73, 74, 75, 76);
    else if constexpr (n == 160) WGMMA_SS(160, 80, 81, 82, 83, 84);
    else if constexpr (n == 192) WGMMA_SS(192, 96, 97, 98, 99, 100);
    else if constexpr (n == 224) WGMMA_SS(224, 112, 113, 114, 115, 116);
    else if constexpr (n == 256) WGMMA_SS(256, 128, 129, 130, 131, 132);
}
template <u32 n, bool turn_b> DEVICE void wgmma_rs(float *c, const u32 *a, u64 b, u32 keep) {
    static_assert(n == 64 || n == 96 || n == 128 || n == 192 || n == 256, "no such product");
    if constexpr (n == 64) WGMMA_RS(64, 32, 33, 34, 35, 36, 37, 38);
    else if constexpr (n == 96) WGMMA_RS(96, 48, 49, 50, 51, 52, 53, 54);
    else if constexpr (n == 128) WGMMA_RS(128, 64, 65, 66, 67, 68, 69, 70);
    else if constexpr (n == 192) WGMMA_RS(192, 96, 97, 98, 99, 100, 101, 102);
    else if constexpr (n == 256) WGMMA_RS(256, 128, 129, 130, 131, 132, 133, 134);
}
