// Columns of latent attention. latent.go says what is computed. A thread computes up to
// eight numbers of a head, or of what heads share.
// targets: sm_80

#include "nn.cuh"

#define THREADS 128

// Work is a launch. The steps of a head are those of its own key, of the shared key and of
// its value.
struct Work {
    Matrix k, v, kv, shared;
    u32 rows, heads, nope, rope, value;
    DEVICE u32 own() const { return (nope + STEP - 1) / STEP; }
    DEVICE u32 turned() const { return (rope + STEP - 1) / STEP; }
    DEVICE u32 valued() const { return (value + STEP - 1) / STEP; }
    DEVICE u32 key(u32 head) const { return head * (nope + rope); }
    DEVICE u32 latent(u32 head) const { return head * (nope + value); }
};

DEVICE Work work(u64 k, u64 v, u64 kv, u64 shared, u64 heads, u64 latent, u64 sizes, u64 rows) {
    u32 type = bit(rows, 63);
    return {{global(k), low(heads), type},
            {global(v), high(heads), type},
            {global(kv), low(latent), type},
            {global(shared), high(latent), type},
            low(rows),
            (u32)(sizes & 0xffff),
            (u32)(sizes >> 16 & 0xffff),
            (u32)(sizes >> 32 & 0xffff),
            (u32)(sizes >> 48)};
}

// move copies up to a step of a run of numbers, from step i on.
DEVICE void move(const Matrix &to, u32 to_col, const Matrix &from, u32 from_col, u64 row, u32 i, u32 run) {
    float x[STEP];
    u32 at = i * STEP, n = least(STEP, run - at);
    load(from.type, from.at(row, from_col + at), n, x);
    store(to.type, to.at(row, to_col + at), n, x);
}

KERNEL(THREADS)
stowage_nn_latent_spread(u64 k, u64 v, u64 kv, u64 shared, u64 heads, u64 latent, u64 sizes, u64 rows) {
    Work w = work(k, v, kv, shared, heads, latent, sizes, rows);
    u32 steps = w.own() + w.turned() + w.valued(), per = w.heads * steps;
    u64 all = (u64)w.rows * per;
#pragma unroll 1
    for (u64 u = (u64)block() * threads() + thread(); u < all; u += (u64)blocks() * threads()) {
        u64 row = u / per;
        u32 in = (u32)(u - row * per), head = in / steps, i = in - head * steps;
        if (i < w.own()) {
            move(w.k, w.key(head), w.kv, w.latent(head), row, i, w.nope);
        } else if (i < w.own() + w.turned()) {
            move(w.k, w.key(head) + w.nope, w.shared, 0, row, i - w.own(), w.rope);
        } else {
            move(w.v, head * w.value, w.kv, w.latent(head) + w.nope, row, i - w.own() - w.turned(), w.value);
        }
    }
}

// total sums a step of the shared numbers over the heads in order.
DEVICE void total(const Work &w, u64 row, u32 i) {
    float sum[STEP] = {}, x[STEP];
    u32 at = i * STEP, n = least(STEP, w.rope - at);
#pragma unroll 1
    for (u32 head = 0; head < w.heads; head++) {
        load(w.k.type, w.k.at(row, w.key(head) + w.nope + at), n, x);
#pragma unroll
        for (u32 e = 0; e < STEP; e++) sum[e] += x[e];
    }
    store(w.shared.type, w.shared.at(row, at), n, sum);
}

KERNEL(THREADS)
stowage_nn_latent_gather(u64 k, u64 v, u64 kv, u64 shared, u64 heads, u64 latent, u64 sizes, u64 rows) {
    Work w = work(k, v, kv, shared, heads, latent, sizes, rows);
    u32 steps = w.own() + w.valued(), per = w.heads * steps + w.turned();
    u64 all = (u64)w.rows * per;
#pragma unroll 1
    for (u64 u = (u64)block() * threads() + thread(); u < all; u += (u64)blocks() * threads()) {
        u64 row = u / per;
        u32 in = (u32)(u - row * per), head = in / steps, i = in - head * steps;
        if (in >= w.heads * steps) {
            total(w, row, in - w.heads * steps);
        } else if (i < w.own()) {
            move(w.kv, w.latent(head), w.k, w.key(head), row, i, w.nope);
        } else {
            move(w.kv, w.latent(head) + w.nope, w.v, head * w.value, row, i - w.own(), w.value);
        }
    }
}
