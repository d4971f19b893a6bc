// The words of prelude.cuh for the host, with a main that runs launches one
// thread after the other. It stands in for the GPU for kernels whose threads do
// not wait for each other, but for what thread 0 of a block has written first.
//
// A case on standard input is u64 words: entry, blocks, threads, bytes of memory,
// a mask of the arguments that are offsets into the memory, 16 arguments; then the
// memory. Standard output gets the memory as the kernel left it.

#pragma once

#include <cstdio>
#include <cstdlib>

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE inline
#define SHARED static
#define KERNEL(...) extern "C" void

static u32 host_thread, host_threads, host_block, host_blocks;

inline u32 thread() { return host_thread; }
inline u32 threads() { return host_threads; }
inline u32 block() { return host_block; }
inline u32 blocks() { return host_blocks; }
inline void __syncthreads() {}

template <class T> inline T least(T a, T b) { return a < b ? a : b; }

inline u64 global(u64 p) { return p; }

struct alignas(16) Vec {
    u32 x, y, z, w;
};

// Memory that the kernel may touch; a GPU would fault, or worse.
static u64 host_from, host_to;

template <class T> inline T *host_at(u64 p) {
    if (p % sizeof(T) != 0 || p < host_from || p + sizeof(T) > host_to) {
        fprintf(stderr, "access of %zu bytes at %llu of %llu\n", sizeof(T), p - host_from, host_to - host_from);
        exit(3);
    }
    return reinterpret_cast<T *>(p);
}

template <class T> inline T fetch(u64 p) { return *host_at<T>(p); }
inline void put(u64 p, Vec v) { *host_at<Vec>(p) = v; }
inline void put(u64 p, u32 v) { *host_at<u32>(p) = v; }
inline void put(u64 p, u8 v) { *host_at<u8>(p) = v; }

typedef void (*Entry)(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64);
extern Entry host_entries[];

int main() {
    u64 head[5], a[16];
    while (fread(head, 8, 5, stdin) == 5 && fread(a, 8, 16, stdin) == 16) {
        u64 size = head[3];
        u8 *memory = static_cast<u8 *>(aligned_alloc(256, (size + 255) / 256 * 256));
        if (fread(memory, 1, size, stdin) != size) return 2;
        host_from = reinterpret_cast<u64>(memory);
        host_to = host_from + size;
        for (u32 i = 0; i < 16; i++) {
            if (head[4] >> i & 1) a[i] += host_from;
        }
        host_blocks = (u32)head[1];
        host_threads = (u32)head[2];
        for (host_block = 0; host_block < host_blocks; host_block++) {
            for (host_thread = 0; host_thread < host_threads; host_thread++) {
                host_entries[head[0]](a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12],
                                      a[13], a[14], a[15]);
            }
        }
        if (fwrite(memory, 1, size, stdout) != size) return 2;
        free(memory);
    }
    return 0;
}
