// Work of known duration and content, which benchmarks run in place of a model.
// stowage_mark reads the clock, stowage_wait lasts until a given time after that, and
// stowage_noise writes bytes whose checksum differs from all others. wait.go has the
// details.
//
// Many blocks write data at full bandwidth, between a mark and its wait. The wait itself is
// one warp, in which one thread reads the clock now and then, so it takes no bandwidth and
// almost no arithmetic from what runs beside it.
// targets: sm_80

#include "prelude.cuh"

#define GOLDEN 0x9e3779b97f4a7c15
#define SLACK 100000 // ns; kernels.waitSlack
#define LATE 2000000 // ns; kernels.waitLate

DEVICE u64 now() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
    return t;
}

DEVICE u64 read(u64 p) {
    u64 v;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

DEVICE void write(u64 p, u64 v) { asm volatile("st.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }

KERNEL(32)
stowage_mark(u64 clock) {
    if (block() != 0 || thread() != 0) return;
    u64 p = global(clock), t = now(), due = read(p), seen = read(p + 8);
    write(p, t >= seen && t - seen < SLACK ? t - least<u64>(seen - due, LATE) : t);
    write(p + 8, t);
}

KERNEL(32)
stowage_wait(u64 clock, u64 ns) {
    if (block() != 0 || thread() != 0) return;
    u64 p = global(clock), t = now(), worked = t - read(p + 8), due = read(p) + (worked > ns ? worked : ns);
    due = least(due, t + ns); // the work began before now, so it ends within ns regardless of the clock
    // A pause is at most twice as long as requested, so the end is at most 0.4 µs late.
    for (; t < due; t = now()) asm volatile("nanosleep.u32 200;" ::: "memory");
    write(p, due);
    write(p + 8, t);
}

DEVICE u64 mix(u64 x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

KERNEL(128)
stowage_noise(u64 to, u64 bytes, u64 seed, u64 salt) {
    u64 dst = global(to), n = bytes / 16, tail = 16 * n;
    u64 base = mix(look<u64>(global(seed)) + salt * GOLDEN);
    auto one = [=](u64 i) {
        u64 a = mix(base + (2 * i + 1) * GOLDEN), b = mix(base + (2 * i + 2) * GOLDEN);
        put(dst + 16 * i, Vec{(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32)});
    };
    auto all = [=](u64 i) {
        one(i);
        one(i + threads());
    };
    each_chunk<2>(n, all, one);
    u32 t = thread();
    if (block() != 0 || t >= bytes - tail) return;
    put(dst + tail + t, (u8)(mix(base + (2 * n + 1 + t / 8) * GOLDEN) >> (t & 7) * 8));
}
