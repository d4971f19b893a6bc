// This file has the matrix product of bf16 on Hopper. Blocks stay resident, and a cluster
// of two computes two tiles at a time. One warp of each block brings boxes of A and B into
// shared memory, stage after stage; two groups of four warps multiply. The two tiles of a
// cluster share rows or columns, and each block brings half of what both need to both.
//
// Every number of the result is a sum over k in order, 16 at a time, so neither the shape
// nor the place of a tile changes a bit.

#pragma once

#include "hopper.cuh"
#include "nn.cuh"

#define HIGH 128u     // rows of a tile
#define BOX 8192u     // bytes of 64 x 64 numbers
#define CLUSTER 2u    // blocks
#define TALL 8u       // pairs of tiles that follow each other downwards
#define GROUP 128u    // threads of a group of warps
#define FORM_THREADS (3 * GROUP)

// Shared and Turns are two forms of the kernel. Either two groups share a tile of 256
// columns, which reads least; or they take turns with tiles of 128 columns, and one stores
// while the other multiplies.
struct Shared {
    static constexpr u32 wide = 256, stages = 4;
    static constexpr bool turns = false;
};
struct Turns {
    static constexpr u32 wide = 128, stages = 6;
    static constexpr bool turns = true;
};

// Place is a block's tile: where its operands begin in their matrices, and what is stored.
struct Place {
    u32 a_x, b_x;      // along m and along n
    u32 a_k, b_k, k;   // along k, and how many
    u32 rows, cols;    // that are stored, from here on; may be zero, and more than a tile has
    u64 c, plus;       // addresses of the first number
    bool share_b;      // the tiles of the cluster share columns; else rows
};

// Target says how results are stored.
struct Target {
    u64 pitch, pitch_plus; // in numbers
    u32 type, type_plus;
};

DEVICE u32 pieces(u32 n, u32 size) { return (n + size - 1) / size; }

// pairs_of returns how many pairs of tiles a product of high x wide tiles consists of:
// pairs of rows, and if a row is left over, pairs of its columns.
DEVICE u32 pairs_of(u32 high, u32 wide) { return high / 2 * wide + (high & 1) * ((wide + 1) / 2); }

// Spot is a tile's row and column among the tiles of a product.
struct Spot {
    u32 m, n;
    bool share_b;
};

// nth_pair returns the tile of this block in pair p. Pairs follow each other down TALL
// pairs of rows and then to the next column, so that blocks that run at the same time find
// in L2 what others have read.
DEVICE Spot nth_pair(u32 high, u32 wide, u32 p) {
    u32 rank = cta_in_cluster(), most = high / 2;
    if (p >= most * wide) return {high - 1, 2 * (p - most * wide) + rank, false};
    u32 first = p / (TALL * wide) * TALL, in = p % (TALL * wide);
    u32 tall = least(most - first, TALL);
    return {2 * (first + in % tall) + rank, in / tall, true};
}

// Ring is the stages in shared memory and their barriers.
template <class Form> struct Ring {
    static constexpr u32 wide = Form::wide, count = Form::stages;
    static constexpr bool turns = Form::turns;
    static constexpr u32 a_bytes = 2 * BOX, boxes_b = wide / 64, bytes = a_bytes + boxes_b * BOX;
    static constexpr u32 room = count * bytes + 16 * count + 16;
    u32 base, stage, parity;

    DEVICE u32 at() const { return base + stage * bytes; }
    DEVICE u32 full() const { return base + count * bytes + 8 * stage; }
    // The barrier that begins a group's turn.
    DEVICE u32 turn(u32 group) const { return base + count * (bytes + 16) + 8 * group; }
    DEVICE u32 empty(u32 s) const { return base + count * (bytes + 8) + 8 * s; }
    DEVICE void next() {
        if (++stage == count) {
            stage = 0;
            parity ^= 1;
        }
    }
    DEVICE void skip(u32 n) {
        parity ^= (stage + n) / count & 1;
        stage = (stage + n) % count;
    }
    // All warps that multiply, in both blocks, give a stage back.
    DEVICE void setup() {
        for (u32 s = 0; s < count; s++) {
            mbar_init(base + count * bytes + 8 * s, 1);
            mbar_init(empty(s), CLUSTER * (turns ? 1 : 2) * GROUP / 32);
        }
        mbar_init(turn(0), GROUP / 32);
        mbar_init(turn(1), GROUP / 32);
        fence_mbar_init();
    }
    DEVICE void release(u32 s) const {
        if (lane() < CLUSTER) mbar_arrive_in(empty(s), lane());
    }
};

// bring_tile brings the operands of a tile. along says that rows of the boxes run along k.
template <bool along_a, bool along_b, class Ring> DEVICE void bring_tile(Ring &ring, const Place &at, u64 map_a, u64 map_b) {
    u32 rank = cta_in_cluster();
#pragma unroll 1
    for (u32 k = 0; k < at.k; k += 64) {
        mbar_wait(ring.empty(ring.stage), ring.parity ^ 1);
        mbar_expect(ring.full(), Ring::bytes);
        auto a = [&](u32 i, bool all) INLINE {
            u32 x = at.a_x + 64 * i, y = at.a_k + k, to = ring.at() + i * BOX;
            u32 col = along_a ? y : x, row = along_a ? x : y;
            if (all) tma_load_all(to, map_a, ring.full(), col, row, 3);
            else tma_load(to, map_a, ring.full(), col, row);
        };
        auto b = [&](u32 i, bool all) INLINE {
            u32 x = at.b_x + 64 * i, y = at.b_k + k, to = ring.at() + Ring::a_bytes + i * BOX;
            u32 col = along_b ? y : x, row = along_b ? x : y;
            if (all) tma_load_all(to, map_b, ring.full(), col, row, 3);
            else tma_load(to, map_b, ring.full(), col, row);
        };
        if (at.share_b) {
            a(0, false);
            a(1, false);
#pragma unroll
            for (u32 i = 0; i < Ring::boxes_b / 2; i++) b(i + rank * (Ring::boxes_b / 2), true);
        } else {
            a(rank, true);
#pragma unroll
            for (u32 i = 0; i < Ring::boxes_b; i++) b(i, false);
        }
        ring.next();
    }
}

// blank sets the rows of a box from row first on to zero.
DEVICE void blank(u8 *box, u32 first) {
#pragma unroll 1
    for (u32 i = first * 8 + thread() % GROUP; i < BOX / 16; i += GROUP) ((Vec *)box)[i] = {0, 0, 0, 0};
}

// multiply_tile adds up this group's part of a tile: parts times 64 rows from half on.
template <bool along_a, bool along_b, u32 wide, u32 parts, class Ring> DEVICE void multiply_tile(Ring &ring, const Place &at, u32 half, float *c) {
    constexpr u32 step_a = along_a ? 2 : 128, step_b = along_b ? 2 : 128; // 16 of k, in descriptors
    u32 last = 0;
#pragma unroll 1
    for (u32 k = 0; k < at.k; k += 64) {
        mbar_wait(ring.full(), ring.parity);
        if (!along_a && at.k - k < 64) {
            // Further rows belong to others.
            u8 *stage = pool + (ring.at() - spot(pool));
#pragma unroll
            for (u32 h = 0; h < parts; h++) blank(stage + (half + h) * BOX, at.k - k);
#pragma unroll 1
            for (u32 i = 0; i < Ring::boxes_b; i++) blank(stage + Ring::a_bytes + i * BOX, at.k - k);
            fence_async();
            barrier(thread() / GROUP, GROUP);
        }
        u64 a = smem_desc(ring.at() + half * BOX, BOX, 1024), b = smem_desc(ring.at() + Ring::a_bytes, BOX, 1024);
        wgmma_fence();
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
#pragma unroll
            for (u32 h = 0; h < parts; h++) wgmma_ss<wide, !along_a, !along_b>(c + h * wide / 2, a + h * (BOX / 16) + i * step_a, b + i * step_b, k + i);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (k > 0) ring.release(last);
        last = ring.stage;
        ring.next();
    }
    // The other group's turn begins: all stages of this tile have come.
    if (parts == 2 && lane() == 0) mbar_arrive(ring.turn(2 - thread() / GROUP));
    wgmma_wait<0>();
    pin<parts * wide / 2>(c);
    ring.release(last);
}

// swap gives the one of two numbers to the lane whose number differs in the bits of d, and
// the other comes from there.
DEVICE void swap(u32 &x, u32 &y, u32 d) {
    bool odd = (lane() & d) != 0;
    u32 got = across(odd ? x : y, d);
    x = odd ? got : x;
    y = odd ? y : got;
}

// turn exchanges numbers among four lanes: lane t gets x[t] of each of them.
DEVICE void turn(u32 *x) {
    swap(x[0], x[1], 1);
    swap(x[2], x[3], 1);
    swap(x[0], x[2], 2);
    swap(x[1], x[3], 2);
}

// Row is a row of a matrix, as a lane sees it: the address of its first number, and how many
// numbers are left from there. Offsets are constants, so that they need no registers while
// tiles are multiplied.
struct Row {
    u64 at;
    int left;
};

// row_of returns row r of a tile, from column on.
DEVICE Row row_of(u64 first, u64 pitch, u32 type, const Place &at, u32 r, u32 column) {
    return {first + (r * pitch + column) * size_of(type), r < at.rows ? (int)at.cols - (int)column : 0};
}

// read_part reads what is added to 32 columns of results, from column 32 part on: for each
// of four pieces of eight columns two numbers of two rows.
template <bool half> DEVICE void read_part(const Row *rows, u32 part, float *x) {
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u32 piece = 4 * part + i / 2;
        const Row &row = rows[i % 2];
        x[2 * i] = x[2 * i + 1] = 0;
        if (8 * (int)piece >= row.left) continue;
        if (half) split(read_far(row.at, 16 * piece), x + 2 * i);
        else read_two(row.at, 32 * piece, x + 2 * i);
    }
}

// write_part stores them. A lane holds two neighbours of every eight columns; in bf16, the
// four lanes of a row exchange them and store eight neighbours each.
template <bool half, bool add> DEVICE void write_part(const Row *rows, u32 part, const float *y) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        const Row &row = rows[h];
        if (half) {
            u32 x[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) x[i] = pair(y[4 * i + 2 * h], y[4 * i + 2 * h + 1]);
            turn(x);
            if (32 * (int)part < row.left) write_far(row.at, 64 * part, Vec{x[0], x[1], x[2], x[3]});
        } else {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                if (8 * (int)(4 * part + i) >= row.left) continue;
                if (add) add_two(row.at, 32 * (4 * part + i), y[4 * i + 2 * h], y[4 * i + 2 * h + 1]);
                else write_two(row.at, 32 * (4 * part + i), y[4 * i + 2 * h], y[4 * i + 2 * h + 1]);
            }
        }
    }
}

// store_as stores 64 rows of a tile from row first on, in bf16 (half) or fp32. With plus
// it adds what is there in the same type, and with add memory does.
template <u32 wide, bool half, bool plus, bool add> DEVICE void store_as(const Place &at, const Target &to, u32 first, const float *c) {
    constexpr u32 type = half ? BF16 : F32;
    u32 row = first + warp() % 4 * 16 + lane() / 4, t = lane() % 4;
    Row rows[2], more[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        rows[h] = row_of(at.c, to.pitch, type, at, row + 8 * h, (half ? 8 : 2) * t);
        if (plus) more[h] = row_of(at.plus, to.pitch_plus, type, at, row + 8 * h, 2 * t);
    }
    float x[2][16];
    if (plus) read_part<half>(more, 0, x[0]);
#pragma unroll
    for (u32 part = 0; part < wide / 32; part++) {
        float y[16];
        if (plus && part + 1 < wide / 32) read_part<half>(more, part + 1, x[(part + 1) % 2]);
#pragma unroll
        for (u32 i = 0; i < 16; i++) y[i] = plus ? c[16 * part + i] + x[part % 2][i] : c[16 * part + i];
        write_part<half, add>(rows, part, y);
    }
}

// store_tile stores 64 rows of a tile from row first on. If adds is set, results are always
// added to what is there; memory adds fp32, and no thread waits for it.
template <u32 wide, bool adds> DEVICE void store_tile(const Place &at, const Target &to, u32 first, const float *c) {
    if (to.type == BF16) {
        if (at.plus == 0) store_as<wide, true, false, false>(at, to, first, c);
        else store_as<wide, true, true, false>(at, to, first, c);
    } else if (at.plus == 0 || adds) {
        store_as<wide, false, false, adds>(at, to, first, c);
    } else {
        store_as<wide, false, true, false>(at, to, first, c);
    }
}

// warm_tile brings what is added to this group's part of a tile into L2.
template <u32 wide, u32 parts> DEVICE void warm_tile(const Place &at, const Target &to, u32 half) {
    if (at.plus == 0) return;
    u32 size = size_of(to.type_plus), lines = wide * size / 128;
#pragma unroll 1
    for (u32 i = thread() % GROUP; i < parts * 64 * lines; i += GROUP) {
        u32 row = half * 64 + i / lines, col = i % lines * (128 / size);
        if (row < at.rows && col < at.cols) prefetch_l2(at.plus + (row * to.pitch_plus + col) * size);
    }
}

// persist computes every tile of this cluster. plan says how many pairs there are and where
// the tile of this block in a pair is.
template <bool along_a, bool along_b, class Form, class Plan>
DEVICE void persist(Plan &plan, const Target &to, u64 map_a, u64 map_b) {
    constexpr u32 wide = Form::wide;
    constexpr bool turns = Form::turns;
    typedef Ring<Form> Stages;
    u32 base = (spot(pool) + 1023) / 1024 * 1024;
    need(base - spot(pool) + Stages::room + Plan::room);
    Stages ring = {base, 0, 0};
    if (thread() == 0) ring.setup();
    plan.setup((u32 *)(pool + (base - spot(pool) + Stages::room)));
    barrier();
    cluster_arrive();
    cluster_wait();
    u32 pairs = plan.pairs(), group = thread() / GROUP;
    if (group == 0) {
        registers_less<40>();
        if (warp() == 0 && elect()) {
            prefetch_map(map_a);
            prefetch_map(map_b);
#pragma unroll 1
            for (u32 p = block() / CLUSTER; p < pairs; p += blocks() / CLUSTER) bring_tile<along_a, along_b>(ring, plan.find(p), map_a, map_b);
        }
        warp_barrier();
    } else {
        registers_more<232>();
        u32 half = turns ? 0 : group - 1;
        bool mine = !turns || group == 1;
        u32 when = group == 1; // the parity of this group's next turn
#pragma unroll 1
        for (u32 p = block() / CLUSTER; p < pairs; p += blocks() / CLUSTER, mine = !turns || !mine) {
            Place at = plan.find(p);
            if (!mine) {
                ring.skip(pieces(at.k, 64));
                continue;
            }
            if (Plan::adds) warm_tile<wide, turns ? 2 : 1>(at, to, half);
            if (turns) {
                mbar_wait(ring.turn(group - 1), when);
                when ^= 1;
            }
            if (at.rows <= half * 64 || at.cols == 0) {
                // The other group, or the other block, needs the stages.
#pragma unroll 1
                for (u32 k = 0; k < at.k; k += 64) {
                    mbar_wait(ring.full(), ring.parity);
                    ring.release(ring.stage);
                    ring.next();
                }
                if (turns && lane() == 0) mbar_arrive(ring.turn(2 - group));
                continue;
            }
            if constexpr (turns) {
                float c[wide];
                multiply_tile<along_a, along_b, wide, 2>(ring, at, 0, c);
                store_tile<wide, Plan::adds>(at, to, 0, c);
                store_tile<wide, Plan::adds>(at, to, 64, c + wide / 2);
            } else {
                float c[wide / 2];
                multiply_tile<along_a, along_b, wide, 1>(ring, at, half, c);
                store_tile<wide, Plan::adds>(at, to, half * 64, c);
            }
        }
    }
    cluster_arrive(); // the other block may still arrive at the barriers of this one
    cluster_wait();
}
