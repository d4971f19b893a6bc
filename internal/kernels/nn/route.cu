// Routing: which experts a token uses, its backward pass, and the bias that balances
// experts. route.go says what is computed. A warp computes a token. Lane k has the token's
// choice k, and experts k, k + 32 and so on.
// targets: sm_80

#include "nn.cuh"

#define EXPERTS 1024u // MaxExperts
#define THREADS 256
#define TINY 1e-20f // avoids a division by zero if all scores have vanished

// How is what both passes need to know.
struct How {
    u32 tokens, experts, top;
    bool sigmoid, normalise;
    float factor;
};

DEVICE How unpack(u64 size, u64 how) {
    return {low(size), high(size), (u32)how & 255, (how >> 8 & 1) != 0, (how >> 9 & 1) != 0, number(high(how))};
}

// each_token calls f in all lanes of a warp for each of its tokens.
template <class F> DEVICE void each_token(u32 tokens, F f) {
#pragma unroll 1
    for (u32 t = block() * warps() + warp(); t < tokens; t += blocks() * warps()) f(t);
}

// scores computes a token's scores from its logits. They may lie in the same place, because
// a lane reads only what it writes.
DEVICE void scores(const How &h, u64 to, u64 from) {
    if (h.sigmoid) {
#pragma unroll 1
        for (u32 e = lane(); e < h.experts; e += 32) set(F32, to + 4 * e, sigmoid(get(F32, from + 4 * e)));
        return;
    }
    float most = get(F32, from + 4 * least(lane(), h.experts - 1)), sum = 0;
#pragma unroll 1
    for (u32 e = lane() + 32; e < h.experts; e += 32) most = larger(most, get(F32, from + 4 * e));
    most = warp_max(most);
#pragma unroll 1
    for (u32 e = lane(); e < h.experts; e += 32) {
        float v = exponential(get(F32, from + 4 * e) - most);
        set(F32, to + 4 * e, v);
        sum += v;
    }
    float over = 1 / warp_sum(sum);
#pragma unroll 1
    for (u32 e = lane(); e < h.experts; e += 32) set(F32, to + 4 * e, get(F32, to + 4 * e) * over);
}

// Choice is an expert and the value that it is chosen by. The first of equal ones is
// better.
struct Choice {
    float value;
    u32 expert;
    DEVICE bool better(const Choice &o) const { return value > o.value || (value == o.value && expert < o.expert); }
};

// best returns the best of this lane's remaining experts. A NaN marks the others.
DEVICE Choice best(const float *value, u32 experts) {
    Choice c = {-__builtin_inff(), ~0u};
#pragma unroll 1
    for (u32 e = lane(); e < experts; e += 32) {
        Choice o = {value[e], e};
        if (o.better(c)) c = o;
    }
    return c;
}

// choose gives lane k the token's choice k and its weight.
DEVICE void choose(const How &h, float *value, u64 scores, u64 bias, u32 &expert, float &weight) {
#pragma unroll 1
    for (u32 e = lane(); e < h.experts; e += 32) {
        float v = get(F32, scores + 4 * e) + (bias == 0 ? 0 : get(F32, bias + 4 * e));
        value[e] = v != v ? -__builtin_inff() : v;
    }
    Choice mine = best(value, h.experts);
    float sum = 0;
#pragma unroll 1
    for (u32 k = 0; k < h.top; k++) {
        Choice c = mine;
#pragma unroll
        for (u32 d = 16; d > 0; d /= 2) {
            Choice o = {number(across(bits(c.value), d)), across(c.expert, d)};
            if (o.better(c)) c = o;
        }
        float score = 0;
        if (c.expert % 32 == lane()) {
            score = get(F32, scores + 4 * c.expert);
            value[c.expert] = number(~0u);
            mine = best(value, h.experts);
        }
        score = number(from_lane(bits(score), c.expert % 32));
        sum += score;
        if (lane() == k) {
            expert = c.expert;
            weight = score;
        }
    }
    if (h.normalise) weight /= sum + TINY;
    weight *= h.factor;
}

// Count is how often a block's tokens chose each expert.
struct Count {
    u32 *of;
    DEVICE void begin(u32 experts) const {
#pragma unroll 1
        for (u32 e = thread(); e < experts; e += threads()) of[e] = 0;
        barrier();
    }
    DEVICE void end(u32 experts, u64 to) const {
        barrier();
#pragma unroll 1
        for (u32 e = thread(); e < experts; e += threads()) {
            if (of[e] != 0) bump(to + 4 * e, of[e]);
        }
    }
};

KERNEL(THREADS)
stowage_nn_route(u64 logits, u64 bias, u64 score, u64 index, u64 weight, u64 load, u64 pitches, u64 size, u64 how) {
    SHARED float value[THREADS / 32][EXPERTS];
    SHARED u32 chosen[EXPERTS];
    How h = unpack(size, how);
    Count count = {chosen};
    count.begin(h.experts);
    u64 from = global(logits), to = global(score), extra = bias == 0 ? 0 : global(bias);
    each_token(h.tokens, [&](u32 t) {
        u64 at = to + 4ull * t * high(pitches);
        scores(h, at, from + 4ull * t * low(pitches));
        u32 expert = 0;
        float w = 0;
        choose(h, value[warp()], at, extra, expert, w);
        if (lane() < h.top) {
            u64 i = 4 * ((u64)t * h.top + lane());
            write(global(index) + i, expert);
            write(global(weight) + i, bits(w));
            tally(&chosen[expert], 1);
        }
    });
    if (load != 0) count.end(h.experts, global(load));
}

KERNEL(THREADS)
stowage_nn_route_count(u64 index, u64 chosen, u64 size) {
    SHARED u32 near[EXPERTS];
    u32 pairs = low(size), experts = high(size);
    Count count = {near};
    count.begin(experts);
#pragma unroll 1
    for (u32 i = block() * threads() + thread(); i < pairs; i += blocks() * threads()) {
        u32 e = look<u32>(global(index) + 4ull * i);
        if (e >= experts) trap();
        tally(&near[e], 1);
    }
    count.end(experts, global(chosen));
}

// Balance is the gradient of the auxiliary loss.
struct Balance {
    u64 chosen; // counts, or zero
    float by;
    DEVICE float times(u32 e) const { return (float)look<u32>(chosen + 4 * e); }
};

// unweigh gives lane k the gradient of the score of choice k.
DEVICE float unweigh(const How &h, float kept, float dweight) {
    if (!h.normalise) return dweight * h.factor;
    float sum = warp_sum(kept) + TINY;
    float dot = warp_sum(dweight * (kept / sum));
    return (dweight - dot) / sum * h.factor;
}

// sigmoids sets d to the gradient of the balance alone, and returns the token's part of the
// loss.
DEVICE float sigmoids(const How &h, const Balance &b, u64 d, u64 s) {
    float sum = 0, part = 0, by = 0;
    if (b.chosen != 0) {
#pragma unroll 1
        for (u32 e = lane(); e < h.experts; e += 32) {
            float v = get(F32, s + 4 * e);
            sum += v;
            part += v * b.times(e);
        }
        sum = warp_sum(sum) + TINY;
        part = warp_sum(part) / sum;
        by = b.by / sum;
    }
#pragma unroll 1
    for (u32 e = lane(); e < h.experts; e += 32) {
        float v = get(F32, s + 4 * e);
        set(F32, d + 4 * e, b.chosen == 0 ? 0 : v * (1 - v) * by * (b.times(e) - part));
    }
    return part;
}

// softmax does the same. dot is what the choices add to all experts.
DEVICE float softmax(const How &h, const Balance &b, u64 d, u64 s, float dot) {
    float part = 0;
    if (b.chosen != 0) {
#pragma unroll 1
        for (u32 e = lane(); e < h.experts; e += 32) part += get(F32, s + 4 * e) * b.times(e);
        part = warp_sum(part);
        dot += b.by * part;
    }
#pragma unroll 1
    for (u32 e = lane(); e < h.experts; e += 32) {
        set(F32, d + 4 * e, get(F32, s + 4 * e) * ((b.chosen == 0 ? 0 : b.by * b.times(e)) - dot));
    }
    return part;
}

KERNEL(THREADS)
stowage_nn_route_grad(u64 score, u64 index, u64 dweight, u64 dlogits, u64 chosen, u64 parts, u64 pitches, u64 size, u64 how,
                      u64 balance) {
    How h = unpack(size, how);
    Balance b = {chosen == 0 ? 0 : global(chosen), number((u32)balance)};
    each_token(h.tokens, [&](u32 t) {
        u64 s = global(score) + 4ull * t * low(pitches), d = global(dlogits) + 4ull * t * high(pitches);
        bool has = lane() < h.top;
        u64 i = 4 * ((u64)t * h.top + lane());
        u32 e = has ? look<u32>(global(index) + i) : 0;
        if (e >= h.experts) trap();
        float kept = has ? get(F32, s + 4 * e) : 0;
        float dscore = unweigh(h, kept, has ? number(look<u32>(global(dweight) + i)) : 0);
        float slope = kept * (h.sigmoid ? 1 - kept : 1) * dscore;
        // d may be s, because all choices have been read before this, in the sums or here.
        warp_barrier();
        float part = h.sigmoid ? sigmoids(h, b, d, s) : softmax(h, b, d, s, warp_sum(has ? kept * dscore : 0));
        warp_barrier();
        if (has) set(F32, d + 4 * e, get(F32, d + 4 * e) + slope);
        if (parts != 0 && lane() == 0) set(F32, global(parts) + 4ull * t, part);
    });
}

// This kernel has one block. Each thread adds up all counts.
KERNEL(THREADS)
stowage_nn_rebalance(u64 bias, u64 load, u64 experts, u64 rate, u64 ranks) {
    SHARED u64 count[EXPERTS];
    u32 n = (u32)experts;
#pragma unroll 1
    for (u32 e = thread(); e < n; e += threads()) {
        u64 sum = 0;
        for (u32 r = 0; r < (u32)ranks; r++) {
            sum += read<u32>(global(load) + 4 * (r * n + e));
            write(global(load) + 4 * (r * n + e), 0u);
        }
        count[e] = sum;
    }
    barrier();
    u64 total = 0;
#pragma unroll 8
    for (u32 e = 0; e < n; e++) total += count[e];
#pragma unroll 1
    for (u32 e = thread(); e < n; e += threads()) {
        u64 times = count[e] * n, at = global(bias) + 4 * e;
        float step = number((u32)rate);
        if (times != total) set(F32, at, get(F32, at) + (times < total ? step : -step));
    }
}
