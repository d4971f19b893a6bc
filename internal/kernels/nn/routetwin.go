// This file owns the routing kernels in Go.

package nn

import (
	"math"
	"sync/atomic"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/internal/vec"
)

// routeTiny avoids a division by zero if all scores have vanished.
const routeTiny = 1e-20

const (
	// routeWork is about how many scores a run has, for about 50 µs of work.
	routeWork = 16 << 10
	// routeCountRun is how many pairs are counted at a time. A run adds at most MaxExperts
	// numbers to the common counts.
	routeCountRun = 8 << 10
)

// routeShape has the arguments that the launches of both passes share.
type routeShape struct {
	tokens, experts, topK int
	from, to              int // pitches
	sigmoid, normalise    bool
	factor                float32
}

func routeShapeOf(pitches, size, how uint64) routeShape {
	return routeShape{
		tokens: int(uint32(size)), experts: int(size >> 32), topK: int(uint8(how)),
		from: int(uint32(pitches)), to: int(pitches >> 32),
		sigmoid: how>>8&routeSigmoid != 0, normalise: how>>8&routeNormalise != 0,
		factor: math.Float32frombits(uint32(how >> 32)),
	}
}

// run returns how many tokens a goroutine handles at a time.
func (r *routeShape) run() int { return max(1, routeWork/r.experts) }

func routeTwin(l *device.Launch) {
	a := l.Args()
	r := routeShapeOf(a[6], a[7], a[8])
	logits := device.Slice[float32](a[0], (r.tokens-1)*r.from+r.experts)
	scores := device.Slice[float32](a[2], (r.tokens-1)*r.to+r.experts)
	index, weight := device.Slice[uint32](a[3], r.tokens*r.topK), device.Slice[float32](a[4], r.tokens*r.topK)
	var bias []float32
	if a[1] != 0 {
		bias = device.Slice[float32](a[1], r.experts)
	}
	parallel.For(r.tokens, r.run(), func(from, to int) {
		var biased [MaxExperts]float32
		for t := from; t < to; t++ {
			s := scores[t*r.to:][:r.experts]
			if x := logits[t*r.from:][:r.experts]; r.sigmoid {
				vec.Sigmoid(s, x)
			} else {
				routeSoftmax(s, x)
			}
			v := s
			if bias != nil {
				v = biased[:r.experts]
				vec.Add(v, s, bias)
			}
			top := index[t*r.topK:][:r.topK]
			routeTop(top, v)
			r.weigh(weight[t*r.topK:][:r.topK], s, top)
		}
		if a[5] != 0 {
			routeCount(device.Slice[uint32](a[5], r.experts), index[from*r.topK:to*r.topK])
		}
	})
}

func routeSoftmax(to, x []float32) {
	sum := vec.ExpSum(to, x, vec.Max(x))
	vec.Scale(to, to, 1/sum)
}

// routeTop finds the largest numbers of v, in order, and the first of equal ones. A NaN
// counts as minus infinity, so there are always as many as needed.
func routeTop(top []uint32, v []float32) {
	var best [MaxTopK]float32
	n, low := 0, float32(0)
	for e, x := range v {
		if n == len(top) {
			if !(x > low) {
				continue
			}
			n--
		}
		if x != x {
			x = float32(math.Inf(-1))
		}
		at := n
		for ; at > 0 && best[at-1] < x; at-- {
			best[at], top[at] = best[at-1], top[at-1]
		}
		best[at], top[at] = x, uint32(e)
		n++
		low = best[n-1]
	}
}

// weigh computes the weights from the scores that were chosen.
func (r *routeShape) weigh(weight, s []float32, top []uint32) {
	sum := float32(0)
	for k, e := range top {
		weight[k] = s[e]
		sum += s[e]
	}
	sum += routeTiny
	for k := range weight {
		if r.normalise {
			weight[k] /= sum
		}
		weight[k] *= r.factor
	}
}

// routeCount adds how often each expert occurs. The order does not change sums of whole
// numbers. Most are counted locally, because other goroutines add to the same counts.
func routeCount(counts, index []uint32) {
	var near [MaxExperts]uint32
	n := near[:len(counts)]
	for _, e := range index {
		n[e]++
	}
	for e, c := range n {
		if c != 0 {
			atomic.AddUint32(&counts[e], c)
		}
	}
}

func routeCountTwin(l *device.Launch) {
	a := l.Args()
	pairs, experts := int(uint32(a[2])), int(a[2]>>32)
	index, counts := device.Slice[uint32](a[0], pairs), device.Slice[uint32](a[1], experts)
	parallel.For(pairs, routeCountRun, func(from, to int) { routeCount(counts, index[from:to]) })
}

// routeGradTwin works through the chain backwards: from weights to the scores that
// were chosen, from all scores to logits. With g the gradient of a score,
//
//	softmax: dlogit = s (g - sum of s g)
//	sigmoid: dlogit = s (1 - s) g
//
// and the balance adds to g. Let b = Balance x experts/(tokens² TopK), c the times
// an expert was chosen, Z the sum of the scores:
//
//	softmax: b c
//	sigmoid: b (c - sum of c s/Z)/Z, as s/Z is what counts there
func routeGradTwin(l *device.Launch) {
	a := l.Args()
	r := routeGrad{routeShape: routeShapeOf(a[6], a[7], a[8]), balance: math.Float32frombits(uint32(a[9]))}
	scores := device.Slice[float32](a[0], (r.tokens-1)*r.from+r.experts)
	index, dweight := device.Slice[uint32](a[1], r.tokens*r.topK), device.Slice[float32](a[2], r.tokens*r.topK)
	dlogits := device.Slice[float32](a[3], (r.tokens-1)*r.to+r.experts)
	var parts []float32
	if a[4] != 0 {
		r.chosen = make([]float32, r.experts)
		for e, c := range device.Slice[uint32](a[4], r.experts) {
			r.chosen[e] = float32(c)
		}
		parts = device.Slice[float32](a[5], r.tokens)
	}
	parallel.For(r.tokens, r.run(), func(from, to int) {
		var room [MaxExperts]float32
		for t := from; t < to; t++ {
			k := t * r.topK
			part := r.token(dlogits[t*r.to:][:r.experts], scores[t*r.from:][:r.experts], index[k:][:r.topK], dweight[k:][:r.topK], room[:r.experts])
			if parts != nil {
				parts[t] = part
			}
		}
	})
}

type routeGrad struct {
	routeShape
	balance float32
	chosen  []float32 // or nothing
}

// token sets d, which may be s, and returns the token's part of the auxiliary loss.
func (r *routeGrad) token(d, s []float32, top []uint32, dweight, room []float32) (part float32) {
	var kept, dscore [MaxTopK]float32
	for k, e := range top {
		kept[k] = s[e]
	}
	r.unweigh(dscore[:len(top)], kept[:len(top)], dweight)
	if r.sigmoid {
		part = r.sigmoids(d, s, room)
		for k, e := range top {
			d[e] += float32(kept[k] * (1 - kept[k]) * dscore[k])
		}
		return part
	}
	dot := float32(0)
	for k := range top {
		dot += float32(kept[k] * dscore[k])
	}
	if r.chosen == nil {
		vec.Scale(d, s, -dot)
	} else {
		part = vec.Dot(s, r.chosen)
		dot += float32(r.balance * part)
		vec.NormGrad(d, s, r.chosen, s, r.balance, dot)
	}
	for k, e := range top {
		d[e] += float32(kept[k] * dscore[k])
	}
	return part
}

// sigmoids sets d to the gradient of the balance alone. The room is for a row of scores.
func (r *routeGrad) sigmoids(d, s, room []float32) (part float32) {
	if r.chosen == nil {
		clear(d)
		return 0
	}
	sum := vec.Sum(s) + routeTiny
	part = vec.Dot(s, r.chosen) / sum
	b := r.balance / sum
	copy(room, s)
	vec.NormGrad(d, room, r.chosen, room, b, b*part) // s b (chosen - part)
	vec.NormGrad(d, d, room, d, -1, -1)              // times 1 - s
	return part
}

// unweigh computes the gradient of the scores that were chosen.
func (r *routeGrad) unweigh(dscore, kept, dweight []float32) {
	if !r.normalise {
		for k, d := range dweight {
			dscore[k] = d * r.factor
		}
		return
	}
	sum, dot := float32(0), float32(0)
	for _, v := range kept {
		sum += v
	}
	sum += routeTiny
	for k, d := range dweight {
		dot += float32(d * (kept[k] / sum))
	}
	for k, d := range dweight {
		dscore[k] = (d - dot) / sum * r.factor
	}
}

func rebalanceTwin(l *device.Launch) {
	a := l.Args()
	n := int(a[2])
	bias, load, rate := device.Slice[float32](a[0], n), device.Slice[uint32](a[1], n*int(a[4])), math.Float32frombits(uint32(a[3]))
	total := uint64(0)
	for _, c := range load {
		total += uint64(c)
	}
	for e := range bias {
		count := uint64(0)
		for at := e; at < len(load); at += n {
			count += uint64(load[at])
		}
		// Compare with the exact mean: count < total/n.
		switch times := count * uint64(n); {
		case times < total:
			bias[e] += rate
		case times > total:
			bias[e] -= rate
		}
	}
	clear(load)
}
