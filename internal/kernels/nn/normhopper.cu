// The backward pass of norms on Hopper. norm.go says what is computed, and normhopper.go for
// which rows. Rows lie ahead in shared memory. Of its last rows a block first adds up the
// weight's gradient. It computes theirs while the next launch, which begins early, adds up the
// sums of all blocks.
// targets: sm_90a

#include "hopper.cuh"
#include "norm.cuh"

#define KEEP 2u // vectors of a row of each operand that a thread has: normGradKeep

// Scales are the factors of dy w and of x in a row's gradient.
struct Scales {
    float r, back;
};

// Numbers are what a thread has of an operand. They stay fp32 while a row is computed: to widen them
// again would take longer.
struct Numbers {
    float v[KEEP][STEP];
    // each calls f for each of them.
    template <class F> static DEVICE void each(F f) {
#pragma unroll
        for (u32 k = 0; k < KEEP; k++)
#pragma unroll
            for (u32 e = 0; e < STEP; e++) f(k, e);
    }
};

// grad_rows computes rows. The teams of all blocks take turns with them. What a thread has beyond
// the columns or rows is zero.
template <bool plus, u32 stages> DEVICE void grad_rows(const Norm &m, const Matrix &dx, const Matrix &x, const Matrix &dy, const Matrix &more, u64 w, u64 scratch) {
    SHARED Scales late[GRAD_THREADS / 32][stages]; // of the last rows of a team
    constexpr u32 operands = plus ? 3 : 2, every = GRAD_THREADS, stage = operands * KEEP * every, ring = stages * stage, room = ring * 16;
    if (threads() != every) trap();
    need(room + every * KEEP * STEP * 4);
    const u32 n = m.n;
    Team t = line(n, KEEP);
    u32 in = every / t.size, own = thread() / t.size, apart = blocks() * in, row = block() * in + own, far = t.size * 16;
    u32 turns = row < m.rows ? (m.rows - row + apart - 1) / apart : 0, early = turns > stages ? turns - stages : 0;
    Walk to(dx, row, t.member * STEP, apart), from[3] = {{x, row, t.member * STEP, apart}, {dy, row, t.member * STEP, apart}, {more, row, t.member * STEP, apart}};
    bool has[KEEP];
#pragma unroll
    for (u32 k = 0; k < KEEP; k++) has[k] = (t.member + k * t.size) * STEP < n;
    Vec *mine = reinterpret_cast<Vec *>(pool) + thread();
    // begin begins to copy the next row to a place, if there is one.
    auto begin = [&](u32 at, bool there) INLINE {
#pragma unroll
        for (u32 i = 0; i < operands; i++) {
#pragma unroll
            for (u32 k = 0; k < KEEP; k++) bring(spot(mine + at + (i * KEEP + k) * every), from[i].at + k * far, there && has[k] ? 16 : 0);
            from[i].next();
        }
        seal();
    };
    u32 at = 0, turn = 0; // the place of the row whose turn it is
    auto next = [&] { at = at + stage == ring ? 0 : at + stage; };
    auto vector = [&](u32 operand, u32 k) INLINE { return mine[at + (operand * KEEP + k) * every]; };
    auto get = [&](u32 operand) INLINE {
        Numbers x;
#pragma unroll
        for (u32 k = 0; k < KEEP; k++) widen(vector(operand, k), x.v[k]);
        return x;
    };
#pragma unroll
    for (u32 s = 0; s < stages; s++) begin(s * stage, s < turns);
    Vec vectors[KEEP];
    hold(t, w, n, vectors);
    Numbers weight;
#pragma unroll
    for (u32 k = 0; k < KEEP; k++) widen(vectors[k], weight.v[k]);
    Weight<KEEP> dw;
    dw.clear();
    const float over = 1 / (float)n;
    // scales returns a row's factors, and adds to the weight's gradient.
    auto scales = [&](const Numbers &x, const Numbers &dy) INLINE {
        Two s = {0, 0};
        Numbers::each([&](u32 k, u32 e) INLINE {
            s.a += x.v[k][e] * x.v[k][e];
            s.b += dy.v[k][e] * weight.v[k][e] * x.v[k][e];
        });
        s = row_sum(t, s, turn);
        float r = inverse_root(s.a * over + m.epsilon);
        Numbers::each([&](u32 k, u32 e) INLINE { dw.v[k][e] += dy.v[k][e] * x.v[k][e] * r; });
        return Scales{r, r * r * r * s.b * over};
    };
    // put_row writes the gradient of a row, with the gradient of the residual if that comes along.
    auto put_row = [&](Numbers &x, const Numbers &dy, Vec(&more)[KEEP], Scales s) INLINE {
        Numbers::each([&](u32 k, u32 e) INLINE { x.v[k][e] = dy.v[k][e] * weight.v[k][e] * s.r - x.v[k][e] * s.back; });
#pragma unroll
        for (u32 k = 0; k < KEEP; k++) {
            if (plus) {
                float b[STEP];
                widen(more[k], b);
#pragma unroll
                for (u32 e = 0; e < STEP; e++) x.v[k][e] += b[e];
            }
            if (has[k]) write(to.at + k * far, narrowed(x.v[k]));
        }
        to.next();
    };
    auto get_more = [&](Vec(&more)[KEEP]) INLINE {
#pragma unroll
        for (u32 k = 0; plus && k < KEEP; k++) {
            more[k] = vector(2, k);
            forget(more[k]);
        }
    };
#pragma unroll 1
    for (; turn < early; turn++) {
        arrived<stages - 1>();
        Numbers x = get(0), dy = get(1);
        Vec more[KEEP];
        get_more(more);
        begin(at, true);
        next();
        put_row(x, dy, more, scales(x, dy));
    }
    const u32 first = at;
#pragma unroll 1
    for (; turn < turns; turn++) {
        arrived<stages - 1>();
        seal();
        Scales s = scales(get(0), get(1));
        if (t.member == 0) late[own][turn - early] = s;
        next();
    }
    // The sums of teams are added up in order.
    float *all = reinterpret_cast<float *>(pool + room);
    dw.each(t, n, [&](u32 c, u32, float *sum) INLINE {
#pragma unroll
        for (u32 e = 0; e < STEP; e += 4) *reinterpret_cast<Vec *>(all + own * n + c + e) = Vec{bits(sum[e]), bits(sum[e + 1]), bits(sum[e + 2]), bits(sum[e + 3])};
    });
    barrier();
#pragma unroll 1
    for (u32 c = thread() * 4; c < n; c += threads() * 4) {
        float sum[4], one[4];
        numbers(*reinterpret_cast<const Vec *>(all + c), sum);
#pragma unroll 1
        for (u32 i = 1; i < in; i++) {
            numbers(*reinterpret_cast<const Vec *>(all + i * n + c), one);
#pragma unroll
            for (u32 e = 0; e < 4; e++) sum[e] += one[e];
        }
        write(scratch + 4 * ((u64)block() * n + c), Vec{bits(sum[0]), bits(sum[1]), bits(sum[2]), bits(sum[3])});
    }
    barrier();
    if (thread() == 0) let_next_begin();
    at = first;
#pragma unroll 1
    for (turn = early; turn < turns; turn++) {
        Numbers x = get(0), dy = get(1);
        Vec more[KEEP];
        get_more(more);
        next();
        put_row(x, dy, more, late[own][turn - early]);
    }
}

#define GRAD(name, plus, stages)                                                                                                                            \
    KERNEL(GRAD_THREADS)                                                                                                                                    \
    stowage_nn_rmsnorm_grad_##name(u64 dx, u64 x, u64 w, u64 dy, u64 more, u64 scratch, u64 size, u64 pitches, u64 pitches_dy, u64 how, u64, u64 parts) {      \
        if (parts != blocks()) trap();                                                                                                                      \
        grad_rows<plus, stages>(unpack(size, how), {global(dx), low(pitches), BF16}, {global(x), high(pitches), BF16}, {global(dy), low(pitches_dy), BF16}, \
                                {plus ? global(more) : 0, high(pitches_dy), BF16}, global(w), global(scratch));                                              \
    }
GRAD(late, false, 5)     // normStages
GRAD(late_plus, true, 3) // normStagesPlus

#define SUM_THREADS 256 // normEarlyThreads

// sum_of_parts is sum_apart for what the launch before wrote, which may not have ended.
DEVICE float sum_of_parts(u64 p, u32 n, u64 apart) {
    constexpr u32 batch = 16;
    float sum = 0;
#pragma unroll 1
    for (u32 i = 0; i < n; i += batch, p += batch * apart) {
        u32 x[batch];
#pragma unroll
        for (u32 k = 0; k < batch; k++) x[k] = i + k < n ? read_l2(p + k * apart) : 0;
#pragma unroll
        for (u32 k = 0; k < batch; k++) {
            if (i + k < n) sum += number(x[k]);
        }
    }
    return sum;
}

// A block adds up the parts of 32 columns, as in norm.cu.
KERNEL(SUM_THREADS)
stowage_nn_rmsnorm_grad_weight_early(u64 dw, u64 scratch, u64 size, u64 types) {
    begun_early();
    add_norm_parts<SUM_THREADS>(global(dw), global(scratch), low(size), high(size), bit(types, 0),
                                [](u64 p, u32 n, u64 apart) INLINE { return sum_of_parts(p, n, apart); });
    await_before();
}
