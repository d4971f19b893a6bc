// This file has the short convolution over tokens before a scan, and its backward pass. conv.go
// says what is computed. A thread keeps the taps of some columns and the numbers of the last
// tokens while it walks over its rows, so everything is read about once.

#pragma once

#include "pieces.cuh"
#include "tensor.cuh"

#define THREADS 128
#define ROWS 32u      // rows of a warp in the forward pass: an eighth of convRows

// Columns of a thread in the kernels for bf16, and rows that it loads at once. Registers for
// more of them would leave room for fewer threads. A thread of the kernel that reads ahead has the
// rows of AHEAD batches in shared memory or on their way there, and one of the backward pass those of
// GRAD_DEEP.
#define WIDE 2u
#define BATCH 12u
#define AHEAD_WIDE 8u // convAheadWide
#define AHEAD_BATCH 4u
#define AHEAD 4u
#define GRAD_WIDE 4u
#define GRAD_BATCH 4u
#define GRAD_DEEP 3u

struct Conv {
    u32 rows, seq, cols, taps;
    Matrix x;
    u64 w, bias;
    u32 params; // type
    DEVICE float tap(u32 c, u32 k) const { return get(params, w + ((u64)c * taps + k) * size_of(params)); }
    DEVICE float offset(u32 c) const { return get(params, bias + (u64)c * size_of(params)); }
};

constexpr u32 ANY = 2; // beside the types

DEVICE Conv unpack(u64 x, u64 w, u64 bias, u64 size, u64 cols, u64 how) {
    return {low(size), high(size), low(cols), high(cols), {global(x), low(how), bit(how, 32)}, global(w), global(bias), bit(how, 33)};
}

// Columns is what a thread knows of its columns: the taps by age, and the inputs of the last
// tokens of the sequence by age. Age 0 is this token. If a type is given, there are just as
// many taps as there is room for, and numbers of that type are read and written at once;
// otherwise some ages have no tap, and numbers are of any type.
template <u32 most, u32 wide_, u32 batch_, u32 type> struct Columns {
    static constexpr u32 room = most, wide = wide_, batch = batch_; // rows that are loaded at once
    static constexpr bool fast = type != ANY;
    // A row's numbers as they were loaded.
    struct Raw {
        u32 w[type == BF16 ? wide / 2 : wide];
    };
    u32 col, n, taps;
    float by[most][wide], offset[wide];
    float x[most][wide];

    DEVICE Columns(const Conv &v, u32 c) : col(c), n(least(wide, v.cols - c)), taps(fast ? most : v.taps) {}
    // load_taps reads the taps and the bias of this thread's columns.
    DEVICE void load_taps(const Conv &v) {
#pragma unroll
        for (u32 e = 0; e < wide; e++) {
            offset[e] = e < n ? v.offset(col + e) : 0;
#pragma unroll
            for (u32 a = 0; a < most; a++) by[a][e] = e < n && a < taps ? v.tap(col + e, taps - 1 - a) : 0;
        }
    }
    // load_vectors does the same by vectors, of four taps. Taps and bias begin at multiples of 16
    // bytes.
    DEVICE void load_vectors(const Conv &v) {
        u64 w = v.w + (u64)col * 4 * size_of(v.params), bias = v.bias + (u64)col * size_of(v.params);
#pragma unroll
        for (u32 e = 0; e < wide; e += 4) {
            float x[4][4];
            if (v.params == BF16) {
                Vec a = read<Vec>(w + 8 * e), b = read<Vec>(w + 8 * e + 16);
                u64 o = read<u64>(bias + 2 * e);
                split(a.x, x[0]), split(a.y, x[0] + 2), split(a.z, x[1]), split(a.w, x[1] + 2);
                split(b.x, x[2]), split(b.y, x[2] + 2), split(b.z, x[3]), split(b.w, x[3] + 2);
                split(low(o), offset + e), split(high(o), offset + e + 2);
            } else {
#pragma unroll
                for (u32 i = 0; i < 4; i++) numbers(read<Vec>(w + 16 * (e + i)), x[i]);
                numbers(read<Vec>(bias + 4 * e), offset + e);
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++)
#pragma unroll
                for (u32 a = 0; a < 4; a++) by[a][e + i] = x[i][3 - a];
        }
    }
    // place returns where a row lies, and step how far rows are apart.
    static DEVICE u32 step(const Matrix &m) { return (u32)m.pitch * (fast ? size_of(type) : size_of(m.type)); }
    DEVICE u64 place(const Matrix &m, u32 row) const { return m.base + col * (fast ? size_of(type) : size_of(m.type)) + (u64)row * step(m); }
    DEVICE Raw load_row(const Matrix &m, u64 p) const {
        Raw r;
        if constexpr (!fast) {
#pragma unroll
            for (u32 e = 0; e < wide; e++) r.w[e] = e < n ? bits(get(m.type, p + e * size_of(m.type))) : 0;
        } else if constexpr (sizeof(Raw) == 4) {
            r.w[0] = read<u32>(p);
        } else {
#pragma unroll
            for (u32 e = 0; e < sizeof(Raw) / 8; e++) {
                u64 w = read<u64>(p + 8 * e);
                r.w[2 * e] = low(w), r.w[2 * e + 1] = high(w);
            }
        }
        return r;
    }
    // bring_row begins to copy a row's numbers to shared memory, in which no other thread reads
    // them.
    DEVICE void bring_row(const Matrix &m, u64 p, Raw *to) const {
        if constexpr (fast) bring_few<sizeof(Raw)>(spot(to), p);
        else *to = load_row(m, p);
    }
    static DEVICE void widen_row(const Raw &r, float *to) {
#pragma unroll
        for (u32 e = 0; e < sizeof(Raw) / 4; e++) {
            if constexpr (type == BF16) split(r.w[e], to + 2 * e);
            else to[e] = number(r.w[e]);
        }
    }
    DEVICE void put_row(const Matrix &m, u64 p, const float *from) const {
        if constexpr (!fast) {
#pragma unroll
            for (u32 e = 0; e < wide; e++) {
                if (e < n) set(m.type, p + e * size_of(m.type), from[e]);
            }
        } else if constexpr (sizeof(Raw) == 4) {
            write(p, pair(from[0], from[1]));
        } else if constexpr (wide % 8 == 0 && type == BF16) {
#pragma unroll
            for (u32 e = 0; e < wide; e += 8) write(p + 2 * e, narrowed(from + e));
        } else if constexpr (type == BF16) {
#pragma unroll
            for (u32 e = 0; e < wide; e += 4) write(p + 2 * e, pair(from[e], from[e + 1]) | (u64)pair(from[e + 2], from[e + 3]) << 32);
        } else {
#pragma unroll
            for (u32 e = 0; e < wide; e += 2) write(p + 4 * e, bits(from[e]) | (u64)bits(from[e + 1]) << 32);
        }
    }
    // begin loads the tokens before token t of a sequence, which is a row.
    DEVICE void begin(const Conv &v, u32 row, u32 t) {
        Raw r[most];
#pragma unroll
        for (u32 a = 0; a + 1 < most; a++) r[a] = load_row(v.x, place(v.x, a < t ? row - 1 - a : row));
#pragma unroll
        for (u32 a = 0; a < most; a++) {
            if (a + 1 < most) widen_row(r[a], x[a]);
#pragma unroll
            for (u32 e = 0; e < wide; e++) x[a][e] = a + 1 < taps && a < t ? x[a][e] : 0;
        }
    }
    // pass makes numbers those of the next token.
    DEVICE void pass(const Raw &now) {
#pragma unroll
        for (u32 e = 0; e < wide; e++) {
#pragma unroll
            for (u32 a = most - 1; a > 0; a--) x[a][e] = a >= taps ? 0 : x[a - 1][e];
        }
        widen_row(now, x[0]);
    }
    DEVICE float sum(u32 e) const {
        float s = offset[e];
#pragma unroll
        for (u32 a = most; a > 0; a--) s += by[a - 1][e] * x[a - 1][e];
        return s;
    }
};

// pairs reports whether a matrix has its numbers in pairs that are read at once.
DEVICE bool pairs(const Conv &v, const Matrix &m) {
    return v.cols % 2 == 0 && ((m.base | m.pitch * size_of(m.type)) & (2 * size_of(m.type) - 1)) == 0;
}

// each_piece calls f for the pieces of work of a warp: rows and a thread's first column.
// All threads of the block call it as often.
template <u32 wide, class F> DEVICE void each_piece(const Conv &v, u32 rows, F f) {
    u32 all = rows * THREADS / 32, pieces = (v.rows + all - 1) / all, tiles = (v.cols + 32 * wide - 1) / (32 * wide);
#pragma unroll 1
    for (u64 u = block(); u < (u64)pieces * tiles; u += blocks()) {
        u32 piece = (u32)(u / tiles), row = least(piece * all + warp() * rows, v.rows);
        f(piece, row, least(row + rows, v.rows), (u32)(u % tiles) * 32 * wide + lane() * wide);
    }
}

// each_sequence calls f for the parts of rows that lie in one sequence, with the place in
// the sequence and the row behind its last.
template <class F> DEVICE void each_sequence(const Conv &v, u32 row, u32 end, F f) {
#pragma unroll 1
    while (row < end) {
        u32 t = row % v.seq, last = row - t + v.seq;
        f(row, least(end, last), t, last);
        row = least(end, last);
    }
}

template <class C> DEVICE void forward(const Conv &v, const Matrix &y) {
    each_piece<C::wide>(v, ROWS, [&](u32, u32 from, u32 to, u32 col) INLINE {
        if (col >= v.cols || from >= to) return;
        C k(v, col);
        k.load_taps(v);
        each_sequence(v, from, to, [&](u32 first, u32 end, u32 t, u32) INLINE {
            k.begin(v, first, t);
            typename C::Raw in[C::batch];
            u64 from = k.place(v.x, first), to = k.place(y, first);
            // load_rows loads a batch of rows, of which some are left. Rows behind the last one
            // are that one.
            auto load_rows = [&](u32 left) INLINE {
                if (left > C::batch) {
#pragma unroll
                    for (u32 i = 0; i < C::batch; i++, from += k.step(v.x)) in[i] = k.load_row(v.x, from);
                } else {
#pragma unroll
                    for (u32 i = 0; i < C::batch; i++, from += i < left ? k.step(v.x) : 0) in[i] = k.load_row(v.x, from);
                }
            };
            load_rows(end - first);
#pragma unroll 1
            for (u32 row = first; row < end; row += C::batch) { // the next rows are on their way
                typename C::Raw now[C::batch];
#pragma unroll
                for (u32 i = 0; i < C::batch; i++) now[i] = in[i];
                if (row + C::batch < end) load_rows(end - row - C::batch);
#pragma unroll
                for (u32 i = 0; i < C::batch; i++) {
                    k.pass(now[i]);
                    float out[C::wide];
#pragma unroll
                    for (u32 e = 0; e < C::wide; e++) {
                        float s = k.sum(e);
                        out[e] = s * sigmoid(s);
                    }
                    if (row + i < end) k.put_row(y, to, out);
                    to += k.step(y);
                }
            }
        });
    });
}

// A batch of rows is inside or at an edge, where some rows are not computed.
struct Inside {
    static constexpr bool edge = false;
};
struct Edge {
    static constexpr bool edge = true;
};

// forward_ahead is forward for four taps in whole vectors, which lets rows come to shared memory.
template <class C> DEVICE void forward_ahead(const Conv &v, const Matrix &y) {
    using Raw = typename C::Raw;
    need(AHEAD * C::batch * THREADS * sizeof(Raw));
    // place returns where this thread has a row.
    auto place = [](u32 stage, u32 i) { return reinterpret_cast<Raw *>(pool) + (stage * C::batch + i) * THREADS + thread(); };
    each_piece<C::wide>(v, ROWS, [&](u32, u32 begin, u32 to, u32 col) INLINE {
        if (col >= v.cols) return;
        C k(v, col);
        each_sequence(v, begin, to, [&](u32 first, u32 end, u32 t, u32) INLINE {
            u32 ahead = first; // the row that comes next
            u64 from = k.place(v.x, first), at = k.place(y, first);
            auto bring_rows = [&](u32 stage) INLINE { // behind the last row is that one
                if (ahead + C::batch <= end) {
#pragma unroll
                    for (u32 i = 0; i < C::batch; i++, from += k.step(v.x)) k.bring_row(v.x, from, place(stage, i));
                } else if (ahead < end) {
#pragma unroll
                    for (u32 i = 0; i < C::batch; i++) k.bring_row(v.x, k.place(v.x, least(ahead + i, end - 1)), place(stage, i));
                }
                ahead += C::batch;
                seal();
            };
            // compute computes a batch of rows, all of them unless it is at an edge.
            auto compute = [&](u32 row, u32 stage, auto which) INLINE {
#pragma unroll
                for (u32 i = 0; i < C::batch; i++, at += k.step(y)) {
                    k.pass(*place(stage, i));
                    float out[C::wide];
#pragma unroll
                    for (u32 e = 0; e < C::wide; e++) {
                        float s = k.sum(e);
                        out[e] = s * sigmoid(s);
                    }
                    if (!which.edge || row + i < end) k.put_row(y, at, out);
                }
            };
#pragma unroll
            for (u32 s = 0; s < AHEAD; s++) bring_rows(s);
            if (first == begin) k.load_vectors(v);
            k.begin(v, first, t);
            u32 stage = 0;
#pragma unroll 1
            for (u32 row = first; row < end; row += C::batch) {
                arrived<AHEAD - 1>();
                if (row + C::batch <= end) compute(row, stage, Inside());
                else compute(row, stage, Edge());
                bring_rows(stage);
                stage = stage + 1 == AHEAD ? 0 : stage + 1;
            }
        });
    });
}

SHARED float sums[THREADS / 32 * (4 + 1) * 32 * 4]; // more than for 8 taps of two columns

// finish writes the sums of a block, added up warp by warp: [tap, and then the bias][column].
template <class C> DEVICE void finish(const Conv &v, const C &k, u32 tile, const float dw[C::room][C::wide], const float dbias[C::wide], u64 to) {
    constexpr u32 width = 32 * C::wide;
    u32 count = (k.taps + 1) * width;
    barrier(); // the sums before have been read
#pragma unroll
    for (u32 a = 0; a <= C::room; a++) {
        if (a < C::room && a >= k.taps) continue;
        u32 row = a == C::room ? k.taps : k.taps - 1 - a;
#pragma unroll
        for (u32 e = 0; e < C::wide; e++) sums[warp() * count + row * width + lane() * C::wide + e] = a == C::room ? dbias[e] : dw[a < C::room ? a : 0][e];
    }
    barrier();
#pragma unroll 1
    for (u32 i = thread(); i < count; i += THREADS) {
        u32 row = i / width, at = i % width;
        float sum = sums[i];
#pragma unroll
        for (u32 w = 1; w < THREADS / 32; w++) sum += sums[w * count + i];
        if (tile + at < v.cols) write(to + 4 * ((u64)row * v.cols + tile + at), bits(sum));
    }
}

// backward computes the rows of a warp. The gradient of a token's input needs the slopes of
// taps tokens from it on, so the warp also computes the slopes of the next rows. If taps and bias
// can be read by vectors, they are while the first rows are on their way.
template <class C, bool vectors = false> DEVICE void backward(const Conv &v, const Matrix &dx, const Matrix &dy, u64 scratch, u32 rows) {
    using Raw = typename C::Raw;
    need(GRAD_DEEP * 2 * C::batch * THREADS * sizeof(Raw));
    // place returns where this thread has a row of an operand.
    auto place = [](u32 stage, u32 operand, u32 i) { return reinterpret_cast<Raw *>(pool) + ((stage * 2 + operand) * C::batch + i) * THREADS + thread(); };
    each_piece<C::wide>(v, rows, [&](u32 piece, u32 begin, u32 to, u32 col) INLINE {
        bool has = col < v.cols;
        C k(v, has ? col : 0);
        if (!vectors) k.load_taps(v);
        float dw[C::room][C::wide] = {}, dbias[C::wide] = {};
        each_sequence(v, begin, has ? to : begin, [&](u32 first, u32 stop, u32 t, u32 last) INLINE {
            u32 late = k.taps - 1, end = stop + late, there = least(end, last);
            float ds[C::room][C::wide] = {};
            if (!vectors) k.begin(v, first, t);
            Raw now[C::batch], grad[C::batch];
            auto bring_rows = [&](u32 row, u32 stage) INLINE { // behind the last row is that one
#pragma unroll
                for (u32 i = 0; i < C::batch; i++) {
                    u32 r = least(row + i, there - 1);
                    if (row >= end) continue; // sums are zero times what is there, which must be a number
                    k.bring_row(v.x, k.place(v.x, r), place(stage, 0, i));
                    k.bring_row(dy, k.place(dy, r), place(stage, 1, i));
                }
                seal();
            };
            // compute computes a batch of rows, of which all have slopes, sums and results
            // unless they are at an edge.
            auto compute = [&](u32 row, auto at) INLINE {
#pragma unroll
                for (u32 i = 0; i < C::batch; i++) {
                    k.pass(now[i]);
                    float g[C::wide], out[C::wide];
                    k.widen_row(grad[i], g);
                    bool slopes = !at.edge || row + i < there, sums = !at.edge || row + i < stop;
#pragma unroll
                    for (u32 e = 0; e < C::wide; e++) {
                        float s = k.sum(e), open = sigmoid(s);
#pragma unroll
                        for (u32 a = C::room - 1; a > 0; a--) ds[a][e] = ds[a - 1][e];
                        ds[0][e] = slopes ? g[e] * (open * (s - s * open) + open) : 0;
                        // The slope of age a is multiplied by the tap for an input that is
                        // older by late - a.
                        out[e] = 0;
#pragma unroll
                        for (u32 a = 0; a < C::room; a++) {
                            float by = 0;
#pragma unroll
                            for (u32 o = 0; o < C::room; o++) by = o + a == late ? k.by[o][e] : by;
                            if (a < k.taps) out[e] += by * ds[a][e];
                        }
                        float now = sums ? ds[0][e] : 0;
                        dbias[e] += now;
#pragma unroll
                        for (u32 a = 0; a < C::room; a++) dw[a][e] += now * k.x[a][e];
                    }
                    if (!at.edge || (row + i >= first + late && row + i < end)) k.put_row(dx, k.place(dx, row + i - late), out);
                }
            };
#pragma unroll
            for (u32 s = 0; s < GRAD_DEEP; s++) bring_rows(first + s * C::batch, s);
            if constexpr (vectors) {
                if (first == begin) k.load_vectors(v);
                k.begin(v, first, t);
            }
            u32 stage = 0;
#pragma unroll 1
            for (u32 row = first; row < end; row += C::batch) {
                arrived<GRAD_DEEP - 1>();
#pragma unroll
                for (u32 i = 0; i < C::batch; i++) now[i] = *place(stage, 0, i), grad[i] = *place(stage, 1, i);
                bring_rows(row + GRAD_DEEP * C::batch, stage);
                stage = stage + 1 == GRAD_DEEP ? 0 : stage + 1;
                if (row >= first + late && row + C::batch <= stop) compute(row, Inside());
                else compute(row, Edge());
            }
        });
        finish<C>(v, k, col - lane() * C::wide, dw, dbias, scratch + 4ull * piece * (k.taps + 1) * v.cols);
    });
}

// add_sums adds up the sums of all pieces.
DEVICE void add_sums(u64 dw, u64 dbias, u64 scratch, u32 cols, u32 taps, u32 pieces, u32 type) {
    add_pieces((taps + 1) * cols, scratch, pieces, type, [&](u32 i) {
        u32 k = i / cols, c = i % cols;
        return k == taps ? dbias + (u64)c * size_of(type) : dw + ((u64)c * taps + k) * size_of(type);
    });
}
