// Checksum of a run of bytes, of any length and alignment, added to a sum.
//
// The run of n bytes is read as words of eight, the least significant byte first. The last
// word is filled up with zeros, and one more word holds n. The checksum is the sum of
// mix(word i + (i+1) golden) over all i, modulo 2^64.
//
// mix is a bijection, so a change of any one word changes the sum, and the place of a word
// counts. The result does not depend on the grid, because addition commutes.
// targets: sm_80

#include "prelude.cuh"

DEVICE u64 mix(u64 x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

DEVICE u64 term(u64 word, u64 i) { return mix(word + (i + 1) * 0x9e3779b97f4a7c15); }

DEVICE u64 term16(Vec v, u64 i) { return term((u64)v.y << 32 | v.x, 2 * i) + term((u64)v.w << 32 | v.z, 2 * i + 1); }

// sum_vectors adds the vectors [first, n). load returns vector i. A kernel that only reads
// is fastest with resident blocks that stride over the run.
template <class Load> DEVICE u64 sum_vectors(u64 first, u64 n, Load load) {
    u64 step = (u64)blocks() * threads(), i = first + (u64)block() * threads() + thread(), sum = 0;
    for (; i + 3 * step < n; i += 4 * step) {
        Vec v[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++) v[k] = load(i + k * step);
#pragma unroll
        for (u32 k = 0; k < 4; k++) sum += term16(v[k], i + k * step);
    }
#pragma unroll 1
    for (; i < n; i += step) sum += term16(load(i), i);
    return sum;
}

// word reads word i of the run byte by byte.
DEVICE u64 word(u64 src, u64 bytes, u64 i) {
    u64 w = 0;
#pragma unroll 1
    for (u64 k = 8 * i; k < least(8 * i + 8, bytes); k++) w |= (u64)fetch<u8>(src + k) << (k & 7) * 8;
    return w;
}

// block_sum returns the sum over the threads of a block, in thread 0.
DEVICE u64 block_sum(u64 sum) {
    SHARED u64 part[32];
#pragma unroll
    for (u32 d = 16; d > 0; d /= 2) sum += from_above(sum, d);
    if (thread() % 32 == 0) part[thread() / 32] = sum;
    __syncthreads();
    if (thread() == 0) {
        for (u32 w = 1; w < threads() / 32; w++) sum += part[w];
    }
    return sum;
}

KERNEL(256)
stowage_checksum(u64 result, u64 from, u64 bytes) {
    u64 src = global(from), n = bytes / 16, first = 0, sum;
    u32 skew = (u32)src & 15;
    if (skew == 0) {
        sum = sum_vectors(0, n, [=](u64 i) { return fetch<Vec>(src + 16 * i); });
    } else {
        // Vector i lies in the two vectors from src - skew + 16 i. Both must lie inside of
        // the run, so the first vector and up to one at the end are read by bytes.
        u64 reach = bytes + skew;
        n = reach < 32 ? 0 : reach / 16 - 1;
        first = least<u64>(1, n);
        sum = sum_vectors(first, n, [=](u64 i) { return skewed(src - skew + 16 * i, skew); });
    }
    // These are the words around the vectors: two in front, up to four behind.
    u64 words = (bytes + 7) / 8, t = (u64)block() * threads() + thread();
    if (t < 2 * first) sum += term(word(src, bytes, t), t);
    if (t < words - 2 * n) sum += term(word(src, bytes, 2 * n + t), 2 * n + t);
    if (t == 0) sum += term(bytes, words);
    sum = block_sum(sum);
    if (thread() == 0) asm volatile("red.global.add.u64 [%0], %1;" ::"l"(global(result)), "l"(sum) : "memory");
}
