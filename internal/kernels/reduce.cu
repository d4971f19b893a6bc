// Element-wise reduction of up to twelve runs of numbers, fp32 or bf16, into one of either
// type. A reduction of one source is a conversion.
//
// Numbers are combined in fp32 in the order of the sources, and rounded once at the end, to
// nearest even. So the grid, the vectors and the device do not change a bit. Every NaN
// becomes the NaN with all bits set except the sign, which the GPU's own additions return
// and other processors' do not.
// targets: sm_80

#include "prelude.cuh"

#define SOURCES 12u
#define BATCH 4u // sources that are loaded together

typedef unsigned short u16;

template <> DEVICE u16 fetch(u64 p) {
    u16 v;
    asm volatile("ld.global.cs.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

DEVICE void put(u64 p, u16 v) { asm volatile("st.global.cs.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory"); }

DEVICE float number(u32 bits) { return __builtin_bit_cast(float, bits); }
DEVICE u32 bits(float x) { return __builtin_bit_cast(u32, x); }

// F32 and BF16 describe how numbers lie in memory. The low half of a word comes first.
struct F32 {
    static constexpr u32 size = 4;
    DEVICE static float get(u64 p) { return number(fetch<u32>(p)); }
    DEVICE static void set(u64 p, float x) { put(p, bits(x)); }
    DEVICE static void unpack(const Vec &v, float *x) {
        x[0] = number(v.x);
        x[1] = number(v.y);
        x[2] = number(v.z);
        x[3] = number(v.w);
    }
    DEVICE static Vec pack(const float *x) { return {bits(x[0]), bits(x[1]), bits(x[2]), bits(x[3])}; }
};

struct BF16 {
    static constexpr u32 size = 2;
    // Adding a little less than half of the last remaining place, or exactly half if that
    // place is odd, makes the cut round to nearest even. It would carry a NaN into the
    // sign.
    DEVICE static u32 narrow(float x) {
        u32 b = bits(x);
        return x != x ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16;
    }
    DEVICE static float get(u64 p) { return number((u32)fetch<u16>(p) << 16); }
    DEVICE static void set(u64 p, float x) { put(p, (u16)narrow(x)); }
    DEVICE static void split(u32 w, float *x) {
        x[0] = number(w << 16);
        x[1] = number(w & 0xffff0000);
    }
    DEVICE static void unpack(const Vec &v, float *x) {
        split(v.x, x);
        split(v.y, x + 2);
        split(v.z, x + 4);
        split(v.w, x + 6);
    }
    DEVICE static u32 join(const float *x) { return narrow(x[0]) | narrow(x[1]) << 16; }
    DEVICE static Vec pack(const float *x) { return {join(x), join(x + 2), join(x + 4), join(x + 6)}; }
};

enum Op { SUM, MEAN, MAX };

struct Job {
    u64 dst, acc, n;
    u32 op, count;
    float over;     // the divisor of a mean
    const u64 *src; // shared by the block, because registers cannot be indexed
};

// combine adds x to the result so far. It keeps the first of equal zeros, and every NaN.
// The operation is the same for all numbers, so they share one branch.
template <u32 n> DEVICE void combine(const Job &j, float *a, const float *x) {
    if (j.op == MAX) {
#pragma unroll
        for (u32 e = 0; e < n; e++) a[e] = x[e] > a[e] || x[e] != x[e] ? x[e] : a[e];
    } else {
#pragma unroll
        for (u32 e = 0; e < n; e++) a[e] += x[e];
    }
}

// finish divides a mean, behind one branch too, and replaces every NaN.
template <u32 n> DEVICE void finish(const Job &j, float *a) {
    if (j.op == MEAN) {
#pragma unroll
        for (u32 e = 0; e < n; e++) a[e] = a[e] / j.over;
    }
#pragma unroll
    for (u32 e = 0; e < n; e++) a[e] = a[e] != a[e] ? number(0x7fffffff) : a[e];
}

template <u32 n> DEVICE void load(u64 p, Vec *v) {
#pragma unroll
    for (u32 k = 0; k < n; k++) v[k] = fetch<Vec>(p + 16 * k);
}

template <class T, u32 n> DEVICE void unpack(const Vec *v, float *x) {
#pragma unroll
    for (u32 k = 0; k < n; k++) T::unpack(v[k], x + 16 / T::size * k);
}

// each is the number of elements of a step: a vector of the narrower type.
template <class In, class Out> constexpr u32 each = 16 / (In::size < Out::size ? In::size : Out::size);

// step reduces the elements from i on. The first operand is not added to a zero, because
// that would change the sign of a negative zero.
template <class In, class Out> DEVICE void step(const Job &j, u64 i) {
    constexpr u32 n = each<In, Out>, ins = n * In::size / 16, outs = n * Out::size / 16, wide = n / 4;
    float a[n], x[n];
    u32 first = 0;
    if (j.acc != 0) {
        Vec v[wide];
        load<wide>(j.acc + 4 * i, v);
        unpack<F32, wide>(v, a);
    } else {
        Vec v[ins];
        load<ins>(j.src[0] + In::size * i, v);
        unpack<In, ins>(v, a);
        first = 1;
    }
#pragma unroll 1
    for (u32 k = first; k < j.count; k += BATCH) {
        Vec v[BATCH][ins];
#pragma unroll
        for (u32 b = 0; b < BATCH; b++) {
            if (k + b < j.count) load<ins>(j.src[k + b] + In::size * i, v[b]);
        }
#pragma unroll
        for (u32 b = 0; b < BATCH; b++) {
            if (k + b >= j.count) break;
            unpack<In, ins>(v[b], x);
            combine<n>(j, a, x);
        }
    }
    finish<n>(j, a);
#pragma unroll
    for (u32 k = 0; k < outs; k++) put(j.dst + Out::size * i + 16 * k, Out::pack(a + 16 / Out::size * k));
}

// single reduces one element.
template <class In, class Out> DEVICE void single(const Job &j, u64 i) {
    u32 first = j.acc == 0;
    float a = first ? In::get(j.src[0] + In::size * i) : F32::get(j.acc + 4 * i);
#pragma unroll 1
    for (u32 k = first; k < j.count; k++) {
        float x = In::get(j.src[k] + In::size * i);
        combine<1>(j, &a, &x);
    }
    finish<1>(j, &a);
    Out::set(j.dst + Out::size * i, a);
}

// reduce uses vectors if all runs reach a boundary of 16 bytes at the same element. It
// reduces the elements before the first vector and behind the last one by one, and all
// elements if the runs are skewed against each other.
template <class In, class Out> DEVICE void reduce(const Job &j) {
    constexpr u32 n = each<In, Out>;
    u64 head = least(((0 - j.dst) & 15) / Out::size, j.n), steps = (j.n - head) / n;
    u64 skew = (j.dst + head * Out::size) | (j.acc == 0 ? 0 : j.acc + head * 4);
#pragma unroll 1
    for (u32 k = 0; k < j.count; k++) skew |= j.src[k] + head * In::size;
    if ((skew & 15) != 0) steps = 0;
    u64 t = (u64)block() * threads() + thread(), all = (u64)blocks() * threads();
#pragma unroll 1
    for (u64 i = t; i < steps; i += all) step<In, Out>(j, head + n * i);
    u64 tail = head + steps * n, rest = head + j.n - tail;
#pragma unroll 1
    for (u64 i = t; i < rest; i += all) single<In, Out>(j, i < head ? i : i - head + tail);
}

#define ENTRY(name, In, Out)                                                                                          \
    KERNEL(128)                                                                                                       \
    name(u64 dst, u64 acc, u64 n, u64 how, u64 a, u64 b, u64 c, u64 d, u64 e, u64 f, u64 g, u64 h, u64 i, u64 k,      \
         u64 l, u64 m) {                                                                                              \
        SHARED u64 src[SOURCES];                                                                                      \
        if (thread() == 0) {                                                                                          \
            u64 all[SOURCES] = {a, b, c, d, e, f, g, h, i, k, l, m};                                                  \
            for (u32 s = 0; s < SOURCES; s++) src[s] = global(all[s]);                                                \
        }                                                                                                             \
        __syncthreads();                                                                                              \
        u32 count = (u32)how >> 8;                                                                                    \
        reduce<In, Out>({global(dst), acc == 0 ? 0 : global(acc), n, (u32)how & 255, count, number(how >> 32), src}); \
    }

ENTRY(stowage_reduce_f32, F32, F32)
ENTRY(stowage_reduce_bf16, BF16, BF16)
ENTRY(stowage_reduce_f32_bf16, F32, BF16)
ENTRY(stowage_reduce_bf16_f32, BF16, F32)
