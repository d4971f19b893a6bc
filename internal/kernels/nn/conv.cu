// The short convolution over tokens before a scan, and its backward pass. conv.go says what
// is computed. A thread keeps the taps of some columns and the numbers of the last tokens
// while it walks over its rows, so everything is read about once.
// targets: sm_80

#include "nn.cuh"

#define THREADS 128
#define ROWS 32u  // rows of a warp: a quarter of convRows
#define PIECE (ROWS * THREADS / 32)
#define BATCH 4u // rows that are loaded at once

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

// Columns is what a thread knows of its columns: the taps by age, and the inputs of the last
// tokens of the sequence by age. Age 0 is this token. If exact is set, there are just as
// many taps as there is room for; otherwise some ages have none.
template <u32 most, u32 wide_, bool exact> struct Columns {
    static constexpr u32 room = most, wide = wide_;
    u32 col, n, taps;
    float by[most][wide], offset[wide];
    float x[most][wide];

    DEVICE Columns(const Conv &v, u32 c) : col(c), n(least(wide, v.cols - c)), taps(exact ? most : v.taps) {
#pragma unroll
        for (u32 e = 0; e < wide; e++) {
            offset[e] = e < n ? v.offset(c + e) : 0;
#pragma unroll
            for (u32 a = 0; a < most; a++) by[a][e] = e < n && a < taps ? v.tap(c + e, taps - 1 - a) : 0;
        }
    }
    DEVICE void get_row(const Matrix &m, u64 row, float *to) const {
        float step[STEP];
        load(m.type, m.at(row, col), n, step);
#pragma unroll
        for (u32 e = 0; e < wide; e++) to[e] = step[e];
    }
    DEVICE void put_row(const Matrix &m, u64 row, const float *from) const {
        float step[STEP];
#pragma unroll
        for (u32 e = 0; e < STEP; e++) step[e] = e < wide ? from[e] : 0;
        store(m.type, m.at(row, col), n, step);
    }
    // begin loads the tokens before token t of a sequence, which is a row.
    DEVICE void begin(const Conv &v, u64 row, u32 t) {
#pragma unroll
        for (u32 a = 0; a < most; a++) {
#pragma unroll
            for (u32 e = 0; e < wide; e++) x[a][e] = 0;
            if (a + 1 < taps && a < t) get_row(v.x, row - 1 - a, x[a]);
        }
    }
    // pass makes numbers those of token t, and forgets the sequence before it.
    DEVICE void pass(const float *now, u32 t) {
#pragma unroll
        for (u32 e = 0; e < wide; e++) {
#pragma unroll
            for (u32 a = most - 1; a > 0; a--) x[a][e] = t == 0 || a >= taps ? 0 : x[a - 1][e];
            x[0][e] = now[e];
        }
    }
    DEVICE float sum(u32 e) const {
        float s = offset[e];
#pragma unroll
        for (u32 a = most; a > 0; a--) s += by[a - 1][e] * x[a - 1][e];
        return s;
    }
};

// each_piece calls f for the pieces of work of a warp: rows and a thread's first column.
// All threads of the block call it as often.
template <u32 wide, class F> DEVICE void each_piece(const Conv &v, F f) {
    u32 pieces = (v.rows + PIECE - 1) / PIECE, tiles = (v.cols + 32 * wide - 1) / (32 * wide);
#pragma unroll 1
    for (u64 u = block(); u < (u64)pieces * tiles; u += blocks()) {
        u32 piece = (u32)(u / tiles), row = least(piece * PIECE + warp() * ROWS, v.rows);
        f(piece, row, least(row + ROWS, v.rows), (u32)(u % tiles) * 32 * wide + lane() * wide);
    }
}

template <class C> DEVICE void forward(const Conv &v, const Matrix &y) {
    each_piece<C::wide>(v, [&](u32, u32 row, u32 end, u32 col) INLINE {
        if (col >= v.cols || row >= end) return;
        C k(v, col);
        u32 t = row % v.seq;
        k.begin(v, row, t);
#pragma unroll 1
        for (; row < end; row += BATCH) {
            float in[BATCH][C::wide];
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                if (row + i < end) k.get_row(v.x, row + i, in[i]);
            }
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                if (row + i >= end) continue;
                k.pass(in[i], t);
                float out[C::wide];
#pragma unroll
                for (u32 e = 0; e < C::wide; e++) {
                    float s = k.sum(e);
                    out[e] = s * sigmoid(s);
                }
                k.put_row(y, row + i, out);
                t = t + 1 == v.seq ? 0 : t + 1;
            }
        }
    });
}

// Four taps have a path of their own.
KERNEL(THREADS)
stowage_nn_conv(u64 dst, u64 x, u64 w, u64 bias, u64 size, u64 cols, u64 how, u64 pitch_y) {
    Conv v = unpack(x, w, bias, size, cols, how);
    Matrix y = {global(dst), pitch_y, v.x.type};
    if (v.taps == 4) forward<Columns<4, 8, true>>(v, y);
    else forward<Columns<8, 4, false>>(v, y);
}

SHARED float sums[(4 + 1) * 32 * 8];

// finish writes the sums of a block, warp by warp: [tap, and then the bias][column].
template <class C> DEVICE void finish(const Conv &v, const C &k, bool has, float dw[C::room][C::wide], float dbias[C::wide], u64 to) {
    constexpr u32 width = 32 * C::wide;
#pragma unroll 1
    for (u32 turn = 0; turn < warps(); turn++) {
        barrier();
        if (turn != warp() || !has) continue;
#pragma unroll
        for (u32 a = 0; a <= C::room; a++) {
            if (a < C::room && a >= k.taps) continue;
            u32 row = a == C::room ? k.taps : k.taps - 1 - a;
#pragma unroll
            for (u32 e = 0; e < C::wide; e++) {
                float &sum = a == C::room ? dbias[e] : dw[a < C::room ? a : 0][e], &all = sums[a * width + lane() * C::wide + e];
                if (turn > 0) sum += all;
                if (turn + 1 < warps()) all = sum;
                else if (e < k.n) write(to + 4 * ((u64)row * v.cols + k.col + e), bits(sum));
            }
        }
    }
}

// backward computes the rows of a warp. The gradient of a token's input needs the slopes of
// taps tokens from it on, so the warp also computes the slopes of the next rows.
template <class C> DEVICE void backward(const Conv &v, const Matrix &dx, const Matrix &dy, u64 scratch) {
    each_piece<C::wide>(v, [&](u32 piece, u32 from, u32 to, u32 col) INLINE {
        bool has = col < v.cols;
        C k(v, has ? col : 0);
        float dw[C::room][C::wide] = {}, dbias[C::wide] = {}, ds[C::room][C::wide] = {};
        u32 late = k.taps - 1, end = has && from < to ? to + late : from, t = from % v.seq, back = t;
        if (from < end) k.begin(v, from, t);
#pragma unroll 1
        for (u32 row = from; row < end; row += BATCH) {
            float in[BATCH][C::wide], d[BATCH][C::wide];
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
#pragma unroll
                for (u32 e = 0; e < C::wide; e++) in[i][e] = d[i][e] = 0;
                if (row + i >= least(end, v.rows)) continue;
                k.get_row(v.x, row + i, in[i]);
                k.get_row(dy, row + i, d[i]);
            }
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                if (row + i >= end) continue;
                k.pass(in[i], t);
                float out[C::wide];
#pragma unroll
                for (u32 e = 0; e < C::wide; e++) {
                    float s = k.sum(e), open = sigmoid(s), now = d[i][e] * (open * (s * (1 - open) + 1));
#pragma unroll
                    for (u32 a = C::room - 1; a > 0; a--) ds[a][e] = ds[a - 1][e];
                    ds[0][e] = now;
                    out[e] = 0;
                }
                if (row + i < to) {
#pragma unroll
                    for (u32 e = 0; e < C::wide; e++) {
                        dbias[e] += ds[0][e];
#pragma unroll
                        for (u32 a = 0; a < C::room; a++) dw[a][e] += ds[0][e] * k.x[a][e];
                    }
                }
                if (row + i >= from + late) {
                    // The slope of age a is multiplied by the tap for an input that is older
                    // by late - a. Tokens behind the end of the sequence do not count.
                    u32 first = back + late >= v.seq ? back + late - v.seq + 1 : 0;
                    back = back + 1 == v.seq ? 0 : back + 1;
#pragma unroll
                    for (u32 e = 0; e < C::wide; e++)
#pragma unroll
                        for (u32 a = 0; a < C::room; a++) {
                            if (a >= k.taps) continue;
                            float by = 0;
#pragma unroll
                            for (u32 o = 0; o < C::room; o++) by = o == late - a ? k.by[o][e] : by;
                            out[e] += a >= first ? by * ds[a][e] : 0;
                        }
                    k.put_row(dx, row + i - late, out);
                }
                t = t + 1 == v.seq ? 0 : t + 1;
            }
        }
        finish<C>(v, k, has, dw, dbias, scratch + 4ull * piece * (k.taps + 1) * v.cols);
    });
}

KERNEL(THREADS)
stowage_nn_conv_grad(u64 scratch, u64 x, u64 w, u64 bias, u64 size, u64 cols, u64 how, u64 grad, u64 dsrc, u64 pitches) {
    Conv v = unpack(x, w, bias, size, cols, how);
    Matrix dx = {global(dsrc), high(pitches), v.x.type}, dy = {global(grad), low(pitches), v.x.type};
    if (v.taps == 4) backward<Columns<4, 8, true>>(v, dx, dy, global(scratch));
    else backward<Columns<8, 4, false>>(v, dx, dy, global(scratch));
}

// A thread sums up one number over the pieces.
KERNEL(THREADS)
stowage_nn_conv_grad_sum(u64 dw, u64 dbias, u64 scratch, u64 size, u64 pieces, u64 type) {
    u32 cols = low(size), taps = high(size), all = (taps + 1) * cols, kind = (u32)type;
#pragma unroll 1
    for (u32 i = block() * threads() + thread(); i < all; i += blocks() * threads()) {
        u32 k = i / cols, c = i % cols;
        u64 to = k == taps ? global(dbias) + (u64)c * size_of(kind) : global(dw) + ((u64)c * taps + k) * size_of(kind);
        set(kind, to, sum_apart(get(kind, to), global(scratch) + 4ull * i, (u32)pieces, 4ull * all));
    }
}
