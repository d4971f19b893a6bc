// Copy of one run of bytes to another, of any length and alignment.
// targets: sm_80

#include "prelude.cuh"

template <class Load> DEVICE void copy_vectors(u64 dst, u64 n, Load load) {
    auto some = [=](u64 i) { put(dst + 16 * i, load(i)); };
    auto all = [=](u64 i) {
        Vec a = load(i), b = load(i + threads());
        put(dst + 16 * i, a);
        put(dst + 16 * (i + threads()), b);
    };
    each_chunk<2>(n, all, some);
}

DEVICE void copy_bytes(u64 dst, u64 src, u64 n) {
    for (u64 i = thread(); i < n; i += threads()) put(dst + i, fetch<u8>(src + i));
}

KERNEL(128)
stowage_copy(u64 to, u64 from, u64 bytes) {
    u64 dst = global(to), src = global(from), n;
    // The bytes up to the first boundary of dst are copied one by one, and so are those at
    // the end that do not fill a vector.
    u64 head = least((0 - dst) & 15, bytes);
    u32 skew = (u32)(src + head) & 15;
    if (skew == 0) {
        u64 p = src + head;
        n = (bytes - head) / 16;
        copy_vectors(dst + head, n, [=](u64 i) { return fetch<Vec>(p + 16 * i); });
    } else {
        // Every vector is assembled from the two that it lies in. Both must lie inside of
        // the run, so up to one vector more is copied by bytes at each end. Counted from
        // the boundary below the source, vector i ends at 16 i + 32, which must be within
        // reach.
        if (head < skew) head = least(head + 16, bytes);
        u64 p = src + head - skew, reach = bytes - head + skew;
        n = reach < 32 ? 0 : reach / 16 - 1;
        copy_vectors(dst + head, n, [=](u64 i) { return skewed(p + 16 * i, skew); });
    }
    if (block() != 0) return;
    copy_bytes(dst, src, head);
    u64 tail = head + 16 * n;
    copy_bytes(dst + tail, src + tail, bytes - tail);
}
