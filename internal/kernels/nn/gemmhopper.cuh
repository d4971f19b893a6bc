// This file has the matrix product of bf16 on Hopper. Blocks stay resident, and a cluster
// of two computes two tiles at a time. One warp of each block brings boxes of A and B into
// shared memory, stage after stage; two groups of four warps multiply. The two tiles of a
// cluster share rows or columns, and each block brings half of what both need to both.
//
// Every number of the result is a sum over k in order, 16 at a time, so neither the shape
// nor the place of a tile changes a bit. What a product is added to comes last, or first in
// gradients of weights (Low). Where a matrix has so few tiles that most of the GPU would have
// nothing to do, the blocks of a cluster compute one tile (Half): each adds up one half of k.

#pragma once

#include "hopper.cuh"
#include "nn.cuh"

#define BOX 8192u     // bytes of 64 x 64 numbers
#define CLUSTER 2u    // blocks
#define TALL 8u       // pairs of tiles that follow each other downwards
#define GROUP 128u    // threads of a group of warps
#define FORM_THREADS (3 * GROUP)

// FormOf is a form of the kernel: the rows and columns of a tile, and the stages. Either two groups share
// a tile, which reads least if it has 256 columns: Shared, and others for results that these fit better; columns of
// the last box that are those of the next tile are not used. Or they take turns with smaller tiles, and one stores while the other multiplies: Turns,
// Low and Slim. With begins, sums of fp32 begin with what they are added to, which is read in the other group's turn. box is
// the rows of B in a copy, if these run along k; sharers is the number of blocks that a stage is brought to.
template <u32 high_, u32 wide_, u32 stages_, bool turns_ = false, bool begins_ = false, u32 box_ = 64, u32 sharers_ = CLUSTER> struct FormOf {
    static constexpr u32 high = high_, wide = wide_, box = box_, stages = stages_, sharers = sharers_;
    static constexpr bool turns = turns_, begins = begins_;
};
typedef FormOf<128, 256, 4> Shared;
typedef FormOf<128, 128, 6> Square;
typedef FormOf<128, 192, 5> Middle;
typedef FormOf<128, 160, 5> Wide160;
typedef FormOf<128, 224, 4> Wide224;
typedef FormOf<128, 288, 4, false, false, 144> Broad;
typedef FormOf<128, 144, 6, false, false, 72> Narrow;
typedef FormOf<128, 128, 6, true> Turns;
typedef FormOf<64, 144, 8, true, false, 72> Lean;
typedef FormOf<64, 256, 5, true> Slim;
typedef FormOf<64, 256, 5, true, true> Low;
typedef FormOf<128, 128, 6, false, true, 64, 1> Half;

// Place is a block's tile: where its operands begin in their matrices, and what is stored.
struct Place {
    u32 a_x, b_x;      // along m and along n
    u32 a_k, b_k, k;   // along k, and how many
    u32 rows, cols;    // that are stored, from here on; may be zero, and more than a tile has
    u64 c, plus;       // addresses of the first number
    bool share_b;      // the tiles of the cluster share columns; else rows
    u32 gap = 0;       // along n, between the columns of the left half of a tile and those of the right
};

// Target says how results are stored.
struct Target {
    u64 pitch, pitch_plus; // in numbers
    u32 type, type_plus;
    template <u32 wide, bool begun> DEVICE void store(const Place &at, u32 first, const float *c) const;
};

DEVICE constexpr u32 pieces(u32 n, u32 size) { return (n + size - 1) / size; }

// pairs_of returns how many pairs of tiles a product of high x wide tiles consists of:
// pairs of rows, and if a row is left over, pairs of its columns.
DEVICE u32 pairs_of(u32 high, u32 wide) { return high / 2 * wide + (high & 1) * ((wide + 1) / 2); }

// Spot is a tile's row and column among the tiles of a product.
struct Spot {
    u32 m, n;
    bool share_b;
};

// nth_pair returns the tile of this block in pair p. Pairs follow each other down some pairs of
// rows and then to the next column. With TALL of them, blocks that run at the same time find in
// L2 what others have read. With one, they write memory nearly in order.
template <u32 down = TALL> DEVICE Spot nth_pair(u32 high, u32 wide, u32 p) {
    u32 rank = cta_in_cluster(), most = high / 2;
    if (p >= most * wide) return {high - 1, 2 * (p - most * wide) + rank, false};
    u32 first = p / (down * wide) * down, in = p % (down * wide);
    if (down == 1) return {2 * first + rank, in, true};
    u32 tall = least(most - first, down);
    return {2 * (first + in % tall) + rank, in / tall, true};
}

// Ring is the stages in shared memory and their barriers.
template <class Form> struct Ring {
    static constexpr u32 wide = Form::wide, count = Form::stages, boxes_a = Form::high / 64, sharers = Form::sharers;
    static constexpr bool turns = Form::turns;
    static constexpr u32 a_bytes = boxes_a * BOX, boxes_b = pieces(wide, Form::box), b_bytes = Form::box * 128, bytes = a_bytes + boxes_b * b_bytes;
    static constexpr u32 room = count * bytes + 16 * count + 32;
    u32 base, stage, parity;

    DEVICE u32 at() const { return base + stage * bytes; }
    DEVICE u32 full() const { return base + count * bytes + 8 * stage; }
    // The barrier that begins a group's turn.
    DEVICE u32 turn(u32 group) const { return base + count * (bytes + 16) + 8 * group; }
    // How many pairs of tiles have been brought, for warps that have nothing to bring.
    DEVICE volatile u32 *brought() const { return (volatile u32 *)(pool + (base - spot(pool)) + count * (bytes + 16) + 16); }
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
    // All warps that multiply, in all blocks that share it, give a stage back.
    DEVICE void setup() {
        for (u32 s = 0; s < count; s++) {
            mbar_init(base + count * bytes + 8 * s, 1);
            mbar_init(empty(s), sharers * (turns ? 1 : 2) * GROUP / 32);
        }
        mbar_init(turn(0), GROUP / 32);
        mbar_init(turn(1), GROUP / 32);
        *brought() = 0;
        fence_mbar_init();
    }
    DEVICE void release(u32 s) const {
        if (lane() < sharers) mbar_arrive_in(empty(s), sharers > 1 ? lane() : cta_in_cluster());
    }
};

// bring_tile brings the operands of a tile. along says that rows of the boxes run along k.
template <bool along_a, bool along_b, class Ring> DEVICE void bring_tile(Ring &ring, const Place &at, u64 map_a, u64 map_b) {
    u32 rank = cta_in_cluster();
    // one brings a box to this block, or to all if this is the block that brings it.
    auto one = [&](u64 map, u32 to, u32 col, u32 row, bool all, u32 i) INLINE {
        if (!all || Ring::sharers == 1) tma_keep(ring.at() + to, map, ring.full(), col, row);
        else if (i % CLUSTER == rank) tma_keep_all(ring.at() + to, map, ring.full(), col, row, 3);
    };
#pragma unroll 1
    for (u32 k = 0; k < at.k; k += 64) {
        mbar_wait(ring.empty(ring.stage), ring.parity ^ 1);
        mbar_expect(ring.full(), Ring::bytes);
#pragma unroll
        for (u32 i = 0; i < Ring::boxes_a; i++) {
            u32 x = at.a_x + 64 * i, y = at.a_k + k;
            one(map_a, i * BOX, along_a ? y : x, along_a ? x : y, !at.share_b, i);
        }
#pragma unroll
        for (u32 i = 0; i < Ring::boxes_b; i++) {
            u32 x = at.b_x + Ring::b_bytes / 128 * i + (i < Ring::boxes_b / 2 ? 0 : at.gap), y = at.b_k + k;
            one(map_b, Ring::a_bytes + i * Ring::b_bytes, along_b ? y : x, along_b ? x : y, at.share_b, i);
        }
        ring.next();
    }
}

// blank sets the rows of a box from row first on to the next multiple of 16 to zero.
DEVICE void blank(u8 *box, u32 first) {
#pragma unroll 1
    for (u32 i = first * 8 + thread() % GROUP; i < (first | 15) * 8 + 8; i += GROUP) ((Vec *)box)[i] = {0, 0, 0, 0};
}

// multiply_stage adds the products of slices times 16 of k, of operands that a and b describe.
template <bool along_a, bool along_b, u32 wide, u32 parts, u32 slices> DEVICE void multiply_stage(u64 a, u64 b, u32 keep, float *c) {
    constexpr u32 step_a = along_a ? 2 : 128, step_b = along_b ? 2 : 128; // 16 of k, in descriptors
    constexpr u32 most = wide > 256 ? wide / 2 : wide;                    // columns of an instruction
    wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < slices; i++) {
#pragma unroll
        for (u32 h = 0; h < parts; h++) {
#pragma unroll
            for (u32 n = 0; n < wide; n += most) wgmma_ss<most, !along_a, !along_b>(c + (h * wide + n) / 2, a + h * (BOX / 16) + i * step_a, b + n * 8 + i * step_b, keep + i);
        }
    }
    wgmma_commit();
}

// multiply_tile adds up this group's part of a tile: parts times 64 rows from half on. If
// begun is set, sums begin with what c has.
template <bool along_a, bool along_b, u32 wide, u32 parts, bool begun, class Ring> DEVICE void multiply_tile(Ring &ring, const Place &at, u32 half, float *c) {
    u32 last = 0;
#pragma unroll 1
    for (u32 k = 0; k < at.k; k += 64) {
        mbar_wait(ring.full(), ring.parity);
        u32 left = along_a ? 64 : at.k - k;
        if (left % 16 != 0 && left < 64) {
            // Further rows belong to others.
            u8 *stage = pool + (ring.at() - spot(pool));
#pragma unroll
            for (u32 h = 0; h < parts; h++) blank(stage + (half + h) * BOX, left);
#pragma unroll 1
            for (u32 i = 0; i < Ring::boxes_b; i++) blank(stage + Ring::a_bytes + i * BOX, left);
            fence_async();
            barrier(thread() / GROUP, GROUP);
        }
        u64 a = smem_desc(ring.at() + half * BOX, BOX, 1024), b = smem_desc(ring.at() + Ring::a_bytes, BOX, 1024);
        u32 keep = begun ? 1 : k;
        if (along_a || left > 48) multiply_stage<along_a, along_b, wide, parts, 4>(a, b, keep, c);
        else if (left > 32) multiply_stage<along_a, along_b, wide, parts, 3>(a, b, keep, c);
        else if (left > 16) multiply_stage<along_a, along_b, wide, parts, 2>(a, b, keep, c);
        else multiply_stage<along_a, along_b, wide, parts, 1>(a, b, keep, c);
        wgmma_wait<1>();
        if (k > 0) ring.release(last);
        last = ring.stage;
        ring.next();
    }
    // The other group's turn begins: all stages of this tile have come.
    if (Ring::turns && lane() == 0) mbar_arrive(ring.turn(2 - thread() / GROUP));
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

// begin_tile begins the sums of 64 rows of a tile from row first on with the fp32 numbers
// that they are added to, or with zero. Loads go on while the other group multiplies. No
// other instruction may write to c, or products would wait for each other.
template <u32 wide> DEVICE void begin_tile(const Place &at, const Target &to, u32 first, float *c) {
    u32 row = first + warp() % 4 * 16 + lane() / 4;
    Row rows[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        rows[h] = row_of(at.plus, to.pitch_plus, F32, at, row + 8 * h, 2 * (lane() % 4));
        if (at.plus == 0 || to.type == BF16) rows[h].left = 0;
    }
#pragma unroll
    for (u32 i = 0; i < wide / 4; i++) read_two_of(rows[i % 2].at, 32 * (i / 2), 8 * (i / 2), rows[i % 2].left, c + 2 * i);
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

// write_half stores 32 columns of two rows in bf16. A lane holds two neighbours of every
// eight columns; the four lanes of a row exchange them and store eight neighbours each.
DEVICE void write_half(const Row *rows, u32 part, const float *y) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        u32 x[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) x[i] = pair(y[4 * i + 2 * h], y[4 * i + 2 * h + 1]);
        turn(x);
        write_below(rows[h].at, 64 * part, 32 * (int)part, rows[h].left, Vec{x[0], x[1], x[2], x[3]});
    }
}

// write_whole stores one of the two rows in fp32. Two lanes of a row exchange pairs, so that each has four
// neighbours, and then two rows exchange these, so that a warp stores whole lines of 128 bytes.
// rows has both of the two, and both of eight further down. With add, memory adds them. Caches evict them
// first: they are more than fits, and would take the place of A and B.
template <bool add> DEVICE void write_whole(const Row *rows, u32 part, u32 h, const float *y) {
    u32 x[2][4];
#pragma unroll
    for (u32 q = 0; q < 2; q++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) x[q][i] = bits(y[8 * q + i / 2 * 4 + i % 2 + 2 * h]);
        swap(x[q][0], x[q][2], 1);
        swap(x[q][1], x[q][3], 1);
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) swap(x[0][i], x[1][i], 4);
#pragma unroll
    for (u32 q = 0; q < 2; q++) {
        const Row &row = rows[2 * h + q];
        Vec v = {x[q][0], x[q][1], x[q][2], x[q][3]};
        if (add) add_below(row.at, 128 * part, 32 * (int)part, row.left, v);
        else put_below(row.at, 128 * part, 32 * (int)part, row.left, v);
    }
}

// store_as stores 64 rows of a tile from row first on, in bf16 (half) or fp32. With plus
// it adds what is there in the same type; with add, memory adds fp32 numbers. With eights a warp stores
// eight rows to their end before the next eight.
template <u32 wide, bool half, bool plus, bool add = false, bool eights = false> DEVICE void store_as(Place at, const Target &to, u32 first, const float *c) {
    constexpr u32 type = half ? BF16 : F32, last = pieces(wide, 32), most = eights ? 1 : 2;
    if (wide % 32 != 0) at.cols = least(at.cols, wide);
    u32 g = lane() / 4, t = lane() % 4, row = first + warp() % 4 * 16;
    Row rows[4], more[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        if (plus) more[h] = row_of(at.plus, to.pitch_plus, type, at, row + g + 8 * h, 2 * t);
        if (half) rows[h] = row_of(at.c, to.pitch, type, at, row + g + 8 * h, 8 * t);
#pragma unroll
        for (u32 q = 0; !half && q < 2; q++) rows[2 * h + q] = row_of(at.c, to.pitch, type, at, row + g / 2 * 2 + q + 8 * h, 2 * t + t % 2 * 6 + g % 2 * 16);
    }
#pragma unroll
    for (u32 from = 0; from < 2; from += most) {
        float x[2][16];
        if (plus) read_part<half>(more, 0, x[0]);
#pragma unroll
        for (u32 part = 0; part < last; part++) {
            float y[16];
            if (plus && part + 1 < last) read_part<half>(more, part + 1, x[(part + 1) % 2]);
#pragma unroll
            for (u32 i = 0; i < 16; i++) y[i] = 16 * part + i >= wide / 2 ? 0 : plus ? c[16 * part + i] + x[part % 2][i] : c[16 * part + i];
            if (half) write_half(rows, part, y);
#pragma unroll
            for (u32 h = from; !half && h < from + most; h++) write_whole<add>(rows, part, h, y);
        }
    }
}

// store stores 64 rows of a tile from row first on. If begun is set, sums of fp32 have what
// they are added to.
template <u32 wide, bool begun> DEVICE void Target::store(const Place &at, u32 first, const float *c) const {
    if (type == BF16) {
        if (at.plus == 0) store_as<wide, true, false>(at, *this, first, c);
        else store_as<wide, true, true>(at, *this, first, c);
    } else if (begun || at.plus == 0) {
        store_as<wide, false, false, false, begun>(at, *this, first, c);
    } else if (at.plus == at.c) {
        store_as<wide, false, false, true>(at, *this, first, c);
    } else {
        store_as<wide, false, true>(at, *this, first, c);
    }
}

// halve computes one tile by a cluster. Each block adds up the products of one half of k, and
// both store half of the columns: the sum of what they are added to, of the first half of k and
// of the second.
template <bool along_a, bool along_b, class Form> DEVICE void halve(Place at, const Target &to, u64 map_a, u64 map_b) {
    constexpr u32 wide = Form::wide, part = wide / CLUSTER, apart = 2 * GROUP * 16;
    typedef Ring<Form> Stages;
    u32 base = (spot(pool) + 1023) / 1024 * 1024, rank = cta_in_cluster(), group = thread() / GROUP;
    need(base - spot(pool) + Stages::room);
    Stages ring = {base, 0, 0};
    if (thread() == 0) ring.setup();
    barrier();
    u32 half = pieces(at.k, 128) * 64, from = least(rank * half, at.k);
    at.a_k += from;
    at.b_k += from;
    at.k = least(at.k - from, half);
    u32 mine = base + thread() % (2 * GROUP) * 16; // numbers of this thread, four at a time
    if (group == 0) {
        registers_less<40>();
        if (warp() == 0 && elect()) bring_tile<along_a, along_b>(ring, at, map_a, map_b);
        warp_barrier();
        cluster_arrive();
        cluster_wait();
    } else {
        registers_more<232>();
        float c[wide / 2];
        multiply_tile<along_a, along_b, wide, 1, false>(ring, at, group - 1, c);
        barrier(3, 2 * GROUP); // both groups have read all stages
#pragma unroll
        for (u32 v = 0; v < wide / 8; v++) {
            Vec x = {bits(c[4 * v]), bits(c[4 * v + 1]), bits(c[4 * v + 2]), bits(c[4 * v + 3])};
            *(Vec *)(pool + (mine - spot(pool)) + v * apart) = at.k > 0 ? x : Vec{0, 0, 0, 0};
        }
        cluster_arrive();
        cluster_wait();
        u32 column = rank * part;
        at.c += column * size_of(to.type);
        if (at.plus != 0) at.plus += column * size_of(to.type_plus);
        at.cols = at.cols > column ? at.cols - column : 0;
        float sum[part / 2];
        begin_tile<part>(at, to, (group - 1) * 64, sum);
#pragma unroll
        for (u32 r = 0; r < CLUSTER; r++) {
#pragma unroll
            for (u32 v = 0; v < part / 8; v++) {
                Vec x = hear(mine + (column / 8 + v) * apart, r);
                sum[4 * v] += number(x.x);
                sum[4 * v + 1] += number(x.y);
                sum[4 * v + 2] += number(x.z);
                sum[4 * v + 3] += number(x.w);
            }
        }
        to.store<part, true>(at, (group - 1) * 64, sum);
    }
    cluster_arrive(); // the other block may still read
    cluster_wait();
}

// persist computes every tile of this cluster. plan says how many pairs there are, where
// the tile of this block in a pair is, and what warps do that have nothing to bring. to
// stores tiles.
template <bool along_a, bool along_b, class Form, class Plan, class To>
DEVICE void persist(Plan &plan, const To &to, u64 map_a, u64 map_b) {
    constexpr u32 wide = Form::wide, parts = Form::turns ? Form::high / 64 : 1;
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
    u32 pairs = plan.pairs(), step = blocks() / CLUSTER, group = thread() / GROUP;
    if (group == 0) {
        registers_less<40>();
        if (warp() == 0 && elect()) {
            prefetch_map(map_a);
            prefetch_map(map_b);
#pragma unroll 1
            for (u32 p = block() / CLUSTER; p < pairs; p += step) {
                *ring.brought() = p;
                bring_tile<along_a, along_b>(ring, plan.find(p), map_a, map_b);
            }
            *ring.brought() = pairs;
        }
        if (warp() > 0) plan.idle(block() * 3 + warp() - 1, blocks() * 3, ring.brought());
        warp_barrier();
    } else {
        registers_more<232>();
        u32 half = turns ? 0 : group - 1;
        bool mine = !turns || group == 1;
        u32 when = group == 1; // the parity of this group's next turn
#pragma unroll 1
        for (u32 p = block() / CLUSTER; p < pairs; p += step, mine = !turns || !mine) {
            if (!mine) {
                ring.skip(pieces(plan.depth(p), 64));
                continue;
            }
            Place at = plan.find(p);
            float c[parts * wide / 2];
            if constexpr (Form::begins) {
#pragma unroll
                for (u32 i = 0; i < parts; i++) begin_tile<wide>(at, to, (half + i) * 64, c + i * wide / 2);
            }
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
            multiply_tile<along_a, along_b, wide, parts, Form::begins>(ring, at, half, c);
#pragma unroll
            for (u32 i = 0; i < parts; i++) to.template store<wide, Form::begins>(at, (half + i) * 64, c + i * wide / 2);
        }
    }
    cluster_arrive(); // the other block may still arrive at the barriers of this one
    cluster_wait();
}
