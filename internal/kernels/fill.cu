// Fill of a run of bytes, of any length and alignment, with a pattern of four bytes. Byte i
// of the run becomes byte i mod 4 of the pattern, counted from the least significant.
// targets: sm_80

#include "prelude.cuh"

KERNEL(128)
stowage_fill(u64 to, u64 bytes, u64 pattern) {
    u64 dst = global(to), head = least((0 - dst) & 15, bytes), n = (bytes - head) / 16, tail = head + 16 * n;
    u32 low = (u32)pattern;
    // A vector begins head bytes into the pattern. The shift wraps at 32 bits.
    u32 word = funnel(low, low, (u32)head * 8);
    Vec v = {word, word, word, word};
    u64 p = dst + head;
    auto some = [=](u64 i) { put(p + 16 * i, v); };
    auto all = [=](u64 i) {
        put(p + 16 * i, v);
        put(p + 16 * (i + threads()), v);
    };
    each_chunk<2>(n, all, some);
    if (block() != 0) return;
    u32 t = thread();
    if (t < head) put(dst + t, (u8)(low >> (t & 3) * 8));
    if (t < bytes - tail) put(dst + tail + t, (u8)(low >> ((tail + t) & 3) * 8));
}
