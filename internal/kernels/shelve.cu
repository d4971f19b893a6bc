// Shelve copies the live rows of a tensor to a berth. The number of rows is in device
// memory. A berth has room for fewer rows than the tensor. Its size is in device memory
// too, so a captured launch finds the size of a berth that has grown. The rest of the berth
// is cleared.
// targets: sm_80

#include "prelude.cuh"

struct Note {
    u64 rows; // the most rows that a launch found since it was cleared
    u64 fits; // rows that the berth holds
};

// A small block that waited for the two numbers before it loads would take twice as long.
// So it loads rows at once, even dead ones, which the tensor has. The grid is made for the
// berth, so few rows are loaded for nothing.
KERNEL(128)
stowage_shelve(u64 to, u64 from, u64 note, u64 rows, u64 bytes, u64 row) {
    u64 dst = global(to), src = global(from), count = global(rows), own = global(note);
    u64 end = bytes / 16, chunk = 2 * threads(), n = 0, room = 0, live = 0;
    auto store = [&](u64 i, Vec v) {
        if (16 * i >= room) return;
        u32 word[] = {v.x, v.y, v.z, v.w};
        u32 some = 16 * i >= live ? 0 : (u32)least(live - 16 * i, (u64)16); // live bytes of this vector
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            u32 keep = some > 4 * k ? least(some - 4 * k, 4u) : 0;
            word[k] &= keep == 4 ? ~0u : (1u << 8 * keep) - 1;
        }
        put(dst + 16 * i, {word[0], word[1], word[2], word[3]});
    };
    u64 base = (u64)block() * chunk;
    do {
        n = look<u64>(count);
        u64 fits = look<u64>(own + __builtin_offsetof(Note, fits));
        u64 i = base + thread(), j = i + threads();
        Vec zero = {0, 0, 0, 0}, a = i < end ? fetch<Vec>(src + 16 * i) : zero, b = j < end ? fetch<Vec>(src + 16 * j) : zero;
        room = fits * row;
        live = least(n, fits) * row;
        if (i < end) store(i, a);
        if (j < end) store(j, b);
        base += (u64)blocks() * chunk;
    } while (base < end && 16 * base < room);
    if (block() != 0) return;
    u64 i = 16 * end + thread(); // the bytes at the tensor's end that do not fill a vector
    if (i < bytes && 16 * end < room) put(dst + i, i < live ? fetch<u8>(src + i) : (u8)0);
    if (thread() != 0) return;
    u64 at = own + __builtin_offsetof(Note, rows), most;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(most) : "l"(at) : "memory");
    if (n > most) asm volatile("st.global.u64 [%0], %1;" ::"l"(at), "l"(n) : "memory");
}
