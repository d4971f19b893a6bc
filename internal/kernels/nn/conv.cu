// The short convolution over tokens before a scan, and its backward pass. conv.go says what
// is computed.
// targets: sm_80

#include "nn.cuh"

#define THREADS 256
#define GRAD_THREADS 512
#define TAPS 8u  // at most: maxTaps
#define ROWS 64u // rows of a piece of work: convRows
#define COLS (32 * STEP)

struct Conv {
    u32 rows, seq, cols, taps;
    Matrix x;
    u64 w, bias;
    u32 params; // type
    DEVICE float tap(u32 c, u32 k) const { return get(params, w + ((u64)c * taps + k) * size_of(params)); }
    DEVICE float offset(u32 c) const { return get(params, bias + (u64)c * size_of(params)); }
};

DEVICE Conv unpack(u64 x, u64 w, u64 bias, u64 size, u64 cols, u64 how) {
    return {low(size), high(size), low(cols), high(cols), {global(x), low(how), bit(how, 32)}, global(w), global(bias), bit(how, 33)};
}

struct alignas(16) Step {
    float v[STEP];
};

// A block computes some rows of some columns and keeps their taps. A warp computes a row.
KERNEL(THREADS)
stowage_nn_conv(u64 dst, u64 x, u64 w, u64 bias, u64 size, u64 cols, u64 how, u64 pitch_y) {
    SHARED Step taps[TAPS + 1][COLS / STEP]; // the last one is the bias
    Conv v = unpack(x, w, bias, size, cols, how);
    Matrix y = {global(dst), pitch_y, v.x.type};
    u32 pieces = (v.rows + ROWS - 1) / ROWS, tiles = (v.cols + COLS - 1) / COLS;
#pragma unroll 1
    for (u64 u = block(); u < (u64)pieces * tiles; u += blocks()) {
        u32 from = (u32)(u % tiles) * COLS, row = (u32)(u / tiles) * ROWS, end = least(row + ROWS, v.rows), own = lane() * STEP;
        barrier();
        u32 mine = from + thread();
        if (mine < v.cols) {
#pragma unroll 1
            for (u32 k = 0; k < v.taps; k++) taps[k][thread() / STEP].v[thread() % STEP] = v.tap(mine, k);
            taps[TAPS][thread() / STEP].v[thread() % STEP] = v.offset(mine);
        }
        barrier();
        if (from + own >= v.cols) continue;
        u32 n = least(STEP, v.cols - from - own);
#pragma unroll 1
        for (row += warp(); row < end; row += warps()) {
            float in[STEP];
            Step sum = taps[TAPS][lane()];
            u32 t = row % v.seq, first = t < v.taps - 1 ? v.taps - 1 - t : 0;
#pragma unroll 1
            for (u32 k = first; k < v.taps; k++) {
                Step by = taps[k][lane()];
                load(v.x.type, v.x.at(row + k - (v.taps - 1), from + own), n, in);
#pragma unroll
                for (u32 e = 0; e < STEP; e++) sum.v[e] += by.v[e] * in[e];
            }
#pragma unroll
            for (u32 e = 0; e < STEP; e++) sum.v[e] *= sigmoid(sum.v[e]);
            store(y.type, y.at(row, from + own), n, sum.v);
        }
    }
}

// Column is what a thread knows of its column: the taps, and the numbers of the last tokens
// by age. Age 0 is this token.
struct Column {
    u32 c, taps;
    float by[TAPS], of[TAPS]; // the tap that is used for an input, and for a gradient, of an age
    float offset;
    float x[TAPS], ds[TAPS];
    float dw[TAPS], dbias; // dw by age

    // pass makes a number the newest one.
    DEVICE static void pass(float *v, float now) {
#pragma unroll
        for (u32 a = TAPS - 1; a > 0; a--) v[a] = v[a - 1];
        v[0] = now;
    }
    // slope returns the gradient of the sum of token t of its sequence.
    DEVICE float slope(u32 t, float dy) const {
        float sum = offset;
#pragma unroll
        for (u32 a = 0; a < TAPS; a++) sum += a < taps && a <= t ? by[a] * x[a] : 0;
        float s = sigmoid(sum);
        return dy * (s * (sum * (1 - s) + 1));
    }
    // back returns the gradient of the input of the token taps - 1 before, which is token t
    // of its sequence. Tokens behind the end of the sequence do not count.
    DEVICE float back(u32 t, u32 seq) const {
        float sum = 0;
#pragma unroll
        for (u32 a = 0; a < TAPS; a++) sum += a < taps && t + taps - 1 - a < seq ? of[a] * ds[a] : 0;
        return sum;
    }
};

DEVICE Column column(const Conv &v, u32 c) {
    Column k;
    k.c = c;
    k.taps = v.taps;
    k.offset = v.offset(c);
    k.dbias = 0;
#pragma unroll
    for (u32 a = 0; a < TAPS; a++) {
        k.by[a] = a < v.taps ? v.tap(c, v.taps - 1 - a) : 0;
        k.of[a] = a < v.taps ? v.tap(c, a) : 0;
        k.x[a] = k.ds[a] = k.dw[a] = 0;
    }
    return k;
}

// Rows before the first one are zero, because no sequence has them.
DEVICE float input(const Conv &v, u64 row, u32 back, u32 c) { return row >= back && row - back < v.rows ? get(v.x.type, v.x.at(row - back, c)) : 0; }

// begin loads the tokens before a row.
DEVICE void begin(const Conv &v, Column &k, u64 row) {
#pragma unroll
    for (u32 a = 0; a < TAPS; a++) k.x[a] = a + 1 < k.taps ? input(v, row, a + 1, k.c) : 0;
}

// run computes the rows of a warp. Behind its last row it needs slopes of the next warp's
// first rows. after has them, because that warp may have overwritten their inputs.
DEVICE void run(const Conv &v, Column &k, const Matrix &dx, const Matrix &dy, u64 from, u64 to, const float (*after)[GRAD_THREADS]) {
    constexpr u32 batch = 8;
    u32 late = k.taps - 1;
    begin(v, k, from);
#pragma unroll 1
    for (u64 base = from; base < to + late; base += batch) {
        float in[batch], d[batch];
#pragma unroll
        for (u32 i = 0; i < batch; i++) {
            u64 row = base + i;
            in[i] = row < to ? input(v, row, 0, k.c) : 0;
            d[i] = row < to ? get(dy.type, dy.at(row, k.c)) : 0;
        }
#pragma unroll
        for (u32 i = 0; i < batch; i++) {
            u64 row = base + i;
            if (row >= to + late) continue;
            Column::pass(k.x, in[i]);
            u32 t = (u32)(row % v.seq);
            float ds = row < to ? k.slope(t, d[i]) : after[row - to][thread()];
            Column::pass(k.ds, ds);
            if (row < to) {
                k.dbias += ds;
#pragma unroll
                for (u32 a = 0; a < TAPS; a++) k.dw[a] += a < k.taps && a <= t ? ds * k.x[a] : 0;
            }
            if (row >= from + late) set(dx.type, dx.at(row - late, k.c), k.back((u32)((row - late) % v.seq), v.seq));
        }
    }
}

// A block computes 32 columns, and a warp its share of their rows.
KERNEL(GRAD_THREADS)
stowage_nn_conv_grad(u64 dsrc, u64 x, u64 w, u64 bias, u64 size, u64 cols, u64 how, u64 grad, u64 dw, u64 dbias, u64 pitches, u64 type) {
    SHARED float after[TAPS - 1][GRAD_THREADS], sums[TAPS + 1][GRAD_THREADS];
    Conv v = unpack(x, w, bias, size, cols, how);
    Matrix dx = {global(dsrc), low(pitches), v.x.type}, dy = {global(grad), high(pitches), v.x.type};
    u64 share = (v.rows + warps() - 1) / warps(), from = least(warp() * share, (u64)v.rows), to = least(from + share, (u64)v.rows);
#pragma unroll 1
    for (u32 first = 32 * block(); first < v.cols; first += 32 * blocks()) {
        bool has = first + lane() < v.cols;
        Column k = column(v, has ? first + lane() : first);
        begin(v, k, to);
#pragma unroll
        for (u32 i = 0; i + 1 < TAPS; i++) {
            u64 row = to + i;
            bool real = i + 1 < v.taps && row < v.rows;
            Column::pass(k.x, real ? input(v, row, 0, k.c) : 0);
            after[i][thread()] = real ? k.slope((u32)(row % v.seq), get(dy.type, dy.at(row, k.c))) : 0;
        }
        barrier();
        if (has && from < to) run(v, k, dx, dy, from, to, after);
#pragma unroll
        for (u32 a = 0; a < TAPS; a++) sums[a][thread()] = k.dw[a];
        sums[TAPS][thread()] = k.dbias;
        barrier();
        // A warp sums up one tap, or the bias, for all columns.
#pragma unroll 1
        for (u32 a = warp(); has && a <= TAPS; a += warps()) {
            if (a < TAPS && a >= v.taps) continue;
            u64 at = a == TAPS ? global(dbias) + (u64)k.c * size_of((u32)type)
                               : global(dw) + ((u64)k.c * v.taps + v.taps - 1 - a) * size_of((u32)type);
            float sum = 0;
#pragma unroll 1
            for (u32 i = 0; i < warps(); i++) sum += sums[a][32 * i + lane()];
            set((u32)type, at, get((u32)type, at) + sum);
        }
    }
}
