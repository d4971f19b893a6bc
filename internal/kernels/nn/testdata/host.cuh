// The words of words.cuh and of the prelude for the host, with a main that runs
// launches. It stands in for the GPU: blocks run one after the other (those of a
// cluster side by side), and the threads of a block are fibres that take turns at barriers and wherever lanes
// exchange values. What comes out must not depend on their order.
//
// A case on standard input is u64 words: the bytes of memory, the address that
// arguments take it to have, and the number of launches; for each of those the
// entry, blocks, threads (in the high half dynamic shared memory), 16 arguments, the
// blocks of a cluster (in the high half the number of arguments) and eight tensor maps
// of four words; then the memory. An entry with all bits set stands for a fill: the number of
// blocks is the byte, the first two arguments say from where and how many. Standard
// output gets the memory as the last launch left it.

#pragma once

#include <cmath>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE inline
#define SHARED static
#define KERNEL(...) extern "C" void

[[noreturn]] inline void host_fail(const char *why, u64 a = 0, u64 b = 0) {
    fprintf(stderr, "%s (%llu, %llu)\n", why, a, b);
    exit(3);
}

// A fibre runs until it waits; then the next one has its turn.
struct Fibre {
    jmp_buf at;
    bool begun, done;
    u32 turn; // which of two places it puts a value that lanes exchange
};

static const u32 host_most = 4096, host_stack = 64 << 10;
static Fibre host_fibre[host_most];
static char *host_stacks;
static jmp_buf host_home;
static u32 host_thread, host_threads, host_block, host_blocks, host_shared; // fibre, first block of the cluster
static u32 host_cluster, host_arity; // blocks side by side, arguments
static u64 host_maps[8][4];          // address, columns | rows << 32, pitch, rows of a box
static bool host_moved; // since the round began

inline u32 host_cta() { return host_thread / host_threads; }
inline u32 thread() { return host_thread % host_threads; }
inline u32 threads() { return host_threads; }
inline u32 block() { return host_block + host_cta(); }
inline u32 blocks() { return host_blocks; }
inline u32 lane() { return thread() & 31; }
inline u32 warp() { return thread() >> 5; }
inline u32 warps() { return threads() >> 5; }

struct Gate {
    u32 count;
    u64 opened;
};
static const u32 host_blocks_most = 8, host_room = 227 << 10;
alignas(1024) static u8 host_pools[host_blocks_most][host_room]; // shared memory
static u8 *pool;                                                 // of the block that runs
static Gate host_all[host_blocks_most][16], host_warp[host_most / 32];
static void (*host_tick)(); // what goes on besides threads

// host_yield gives the others a turn.
inline void host_yield() {
    u32 me = host_thread;
    if (_setjmp(host_fibre[me].at) == 0) _longjmp(host_home, 1);
    host_thread = me;
}

inline void host_wait(Gate &g, u32 n) {
    u64 seen = g.opened;
    if (++g.count == n) {
        g.count = 0;
        g.opened++;
        host_moved = true;
        return;
    }
    while (g.opened == seen) host_yield();
}

inline void barrier(u32 number, u32 members) { host_wait(host_all[host_cta()][number], members); }
inline void barrier() { barrier(0, host_threads); }
inline void warp_barrier() { host_wait(host_warp[host_thread / 32], 32); }

static u32 host_slot[2][host_most];

// host_exchange gives the value of a lane of the warp. Two places in turn are
// enough: nobody is two exchanges ahead.
inline u32 host_exchange(u32 v, u32 from) {
    u32 turn = host_fibre[host_thread].turn ^= 1, t = host_thread;
    host_slot[turn][t] = v;
    warp_barrier();
    return host_slot[turn][(t & ~31u) + from];
}
inline u32 from_lane(u32 v, u32 l) { return host_exchange(v, l & 31); }
inline u32 across(u32 v, u32 d) { return host_exchange(v, lane() ^ d); }
inline u32 from_below(u32 v, u32 d) { return host_exchange(v, lane() < d ? lane() : lane() - d); }
// host_which has a bit for every lane of the warp whose value is the one wanted.
inline u32 host_which(u32 v, u32 wanted) {
    u32 turn = host_fibre[host_thread].turn ^= 1, t = host_thread, all = 0;
    host_slot[turn][t] = v;
    warp_barrier();
    for (u32 l = 0; l < 32; l++) all |= (u32)(host_slot[turn][(t & ~31u) + l] == wanted) << l;
    return all;
}
inline u32 ballot(bool yes) { return host_which(yes, 1); }
inline u32 same(u32 v) { return host_which(v, v); }

template <class T> inline T least(T a, T b) { return a < b ? a : b; }

inline u64 global(u64 p) { return p; }
inline void trap() { host_fail("trap", block(), thread()); }

struct alignas(16) Vec {
    u32 x, y, z, w;
};

// Memory that the kernel may touch; a GPU would fault, or worse.
static u64 host_from, host_to;

template <class T> inline T *host_at(u64 p) {
    if (p % sizeof(T) != 0 || p < host_from || p + sizeof(T) > host_to) host_fail("access at, of memory of", p - host_from, host_to - host_from);
    return reinterpret_cast<T *>(p);
}

template <class T> inline T fetch(u64 p) { return *host_at<T>(p); }
template <class T> inline T read(u64 p) { return *host_at<T>(p); }
template <class T> inline T look(u64 p) { return *host_at<T>(p); }
template <class T> inline void put(u64 p, T v) { *host_at<T>(p) = v; }
template <class T> inline void write(u64 p, T v) { *host_at<T>(p) = v; }
inline void bump(u64 p, u32 v) { *host_at<u32>(p) += v; }
inline void tally(u32 *p, u32 v) { *p += v; }

inline float power(float x) { return (float)exp2((double)x); }
inline float logarithm(float x) { return (float)log2((double)x); }
inline float quotient(float a, float b) { return a / b; }
inline float reciprocal(float x) { return 1 / x; }

inline u32 host_narrow(float x) {
    u32 b;
    memcpy(&b, &x, 4);
    return x != x ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
inline u32 narrow_pair(float a, float b) { return host_narrow(a) | host_narrow(b) << 16; }

typedef void (*Entry)(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64);
extern Entry host_entries[];

static Entry host_entry;
static u64 host_args[16];

static void host_main() {
    u64 *a = host_args;
    host_entry(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15]);
    host_fibre[host_thread].done = host_moved = true;
    _longjmp(host_home, 1);
}

// host_resume gives a fibre its turn and comes back when it waits or is done.
static void host_resume(u32 t) {
    if (_setjmp(host_home) != 0) return;
    host_thread = t;
    pool = host_pools[host_cta()];
    if (host_fibre[t].begun) _longjmp(host_fibre[t].at, 1);
    host_fibre[t].begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = host_stacks + (u64)t * host_stack;
    context.uc_stack.ss_size = host_stack;
    context.uc_link = nullptr;
    makecontext(&context, host_main, 0);
    setcontext(&context);
}

// For some rounds only some warps, by chance, have their turns: they get far ahead, so
// that a barrier that is missing shows.
static void host_run_block() {
    memset(host_fibre, 0, sizeof host_fibre);
    memset(host_warp, 0, sizeof host_warp);
    memset(host_all, 0, sizeof host_all);
    for (u32 i = 0; i < host_cluster; i++) memset(host_pools[i], 0xff, host_shared); // NaNs
    static u32 left, i, all, chance = 1, idle, round;
    idle = round = 0;
    do {
        left = 0;
        if (round++ % 16 == 0 || !host_moved) chance = chance * 1664525 + 1013904223;
        host_moved = false;
        if (host_tick != nullptr) host_tick();
        all = host_threads * host_cluster;
        for (i = 0; i < all; i++) {
            u32 t = host_block / host_cluster & 1 ? all - 1 - i : i;
            if (host_fibre[t].done) continue;
            left++;
            if ((chance >> (t / 32 * 7 % 29) & 7) < 4) host_resume(t);
        }
        idle = host_moved ? 0 : idle + 1;
        if (left > 0 && idle > 200) host_fail("threads wait that nobody wakes: block, threads", host_block, left);
    } while (left > 0);
}

int main() {
    u64 head[3];
    host_stacks = static_cast<char *>(malloc((u64)host_most * host_stack));
    while (fread(head, 8, 3, stdin) == 3) {
        u64 size = head[0], (*launches)[52] = static_cast<u64(*)[52]>(malloc(head[2] * 52 * 8));
        u8 *memory = static_cast<u8 *>(aligned_alloc(256, (size + 255) / 256 * 256));
        if (fread(launches, 52 * 8, head[2], stdin) != head[2] || fread(memory, 1, size, stdin) != size) return 2;
        host_from = reinterpret_cast<u64>(memory);
        host_to = host_from + size;
        for (u64 n = 0; n < head[2]; n++) {
            if (launches[n][0] == ~0ull) {
                memset(memory + (launches[n][3] - head[1]), (int)launches[n][1], launches[n][4]);
                continue;
            }
            host_entry = host_entries[launches[n][0]];
            host_blocks = (u32)launches[n][1];
            host_threads = (u32)launches[n][2];
            host_shared = (u32)(launches[n][2] >> 32);
            for (u32 i = 0; i < 16; i++) {
                u64 a = launches[n][3 + i];
                host_args[i] = a - head[1] < size ? a - head[1] + host_from : a;
            }
            host_cluster = (u32)launches[n][19];
            host_arity = (u32)(launches[n][19] >> 32);
            memcpy(host_maps, launches[n] + 20, sizeof host_maps);
            for (auto &m : host_maps) m[0] += host_from - head[1];
            if (host_cluster > host_blocks_most || host_threads * host_cluster > host_most || host_blocks % host_cluster != 0) return 2;
            for (host_block = 0; host_block < host_blocks; host_block += host_cluster) host_run_block();
        }
        if (fwrite(memory, 1, size, stdout) != size) return 2;
        free(memory);
        free(launches);
    }
    return 0;
}
