// This file owns the launches of routing, which chooses the experts of each token and
// their weights. routetwin.go has the twins.

package nn

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// MaxExperts is the most experts, because kernels keep a number of each expert in shared
// memory. MaxTopK is the most experts of a token, because a warp holds its choices.
const (
	MaxExperts = 1024
	MaxTopK    = 32
)

// Routing chooses the TopK experts of each token. Scores are the softmax or, with Sigmoid,
// the sigmoid of Logits (fp32, tokens x experts). It takes the experts with the highest
// score plus Bias, the first of equal ones, and a NaN last. Weights are the scores without
// bias, in the order of choice, times Factor. If Normalise is set, they are divided by
// their sum (plus 1e-20).
type Routing struct {
	Logits    Matrix
	Bias      device.Range // fp32, one an expert, or no memory
	TopK      int          // at most the experts, and MaxTopK
	Sigmoid   bool
	Normalise bool
	Factor    float32

	Scores Matrix       // fp32, tokens x experts: set; may be Logits
	Index  device.Range // uint32 [tokens][TopK]: set
	Weight device.Range // fp32 [tokens][TopK]: set
	// Load is uint32, one for each expert, or no memory. The kernel adds how often the
	// expert was chosen.
	Load device.Range
}

var (
	routeKernel      = device.Kernel{Name: "stowage_nn_route", Image: routeImage, Go: routeTwin}
	routeCountKernel = device.Kernel{Name: "stowage_nn_route_count", Image: routeImage, Go: routeCountTwin}
	routeGradKernel  = device.Kernel{Name: "stowage_nn_route_grad", Image: routeImage, Go: routeGradTwin}
	rebalanceKernel  = device.Kernel{Name: "stowage_nn_rebalance", Image: routeImage, Go: rebalanceTwin}
)

// A warp computes a token.
const (
	routeThreads = 256
	routeTokens  = routeThreads / 32 // of a block
)

// These bits say how a routing is computed, in the word after TopK.
const (
	routeSigmoid = 1 << iota
	routeNormalise
)

// check returns the shape of the routing. It panics if the routing is not valid. The
// backward pass does not use Logits.
func (r *Routing) check() (tokens, experts int) {
	tokens, experts = r.Scores.Rows, r.Scores.Cols
	if r.TopK < 1 || r.TopK > experts || r.TopK > MaxTopK || experts > MaxExperts {
		panic(fmt.Sprintf("nn: expected routing to at most %d of at most %d experts, got %d of %d", MaxTopK, MaxExperts, r.TopK, experts))
	}
	if r.Scores.Type != kernels.F32 {
		panic("nn: expected fp32 scores for routing")
	}
	return tokens, experts
}

// packHow packs what both passes need to know: TopK, then the bits, then Factor.
func (r *Routing) packHow() uint64 {
	v := uint64(r.TopK)
	if r.Sigmoid {
		v |= routeSigmoid << 8
	}
	if r.Normalise {
		v |= routeNormalise << 8
	}
	return v | bits(r.Factor)<<32
}

// needWords returns n numbers of four bytes at the beginning of a range.
func needWords(what string, r device.Range, n int) device.Range {
	if r.Buf == nil || r.Len < 4*memory.Bytes(n) || r.Addr()%4 != 0 {
		panic(fmt.Sprintf("nn: %s: expected %d numbers of four bytes, got %s", what, n, r))
	}
	return r.Slice(0, 4*memory.Bytes(n))
}

// readWords and writeWords append a range of words, or zero if there is no memory.
func readWords(l *device.Launch, what string, r device.Range, n int) {
	if r.Buf == nil {
		l.Arg(0)
		return
	}
	l.Read(needWords(what, r, n))
}

func writeWords(l *device.Launch, what string, r device.Range, n int) {
	if r.Buf == nil {
		l.Arg(0)
		return
	}
	l.Write(needWords(what, r, n))
}

// Route issues a routing.
//
// Arguments of stowage_nn_route: logits, bias or 0, scores, index, weight, load or
// 0, pitches of logits and scores, tokens and experts, then TopK (8 bits), 1 for
// sigmoid and 2 for normalise (8 bits), Factor (high half).
func Route(s device.Stream, r Routing) {
	tokens, experts := r.check()
	r.Logits.shape("the logits of a routing", tokens, experts)
	if r.Logits.Type != kernels.F32 {
		panic("nn: expected fp32 logits for routing")
	}
	l := device.NewLaunch(&routeKernel, (tokens+routeTokens-1)/routeTokens, routeThreads)
	l.Read(r.Logits.used("the logits of a routing"))
	readWords(&l, "the bias of a routing", r.Bias, experts)
	l.Write(r.Scores.used("the scores of a routing"))
	l.Write(needWords("the index of a routing", r.Index, tokens*r.TopK))
	l.Write(needWords("the weights of a routing", r.Weight, tokens*r.TopK))
	writeWords(&l, "the load of a routing", r.Load, experts)
	l.Arg(packPair(r.Logits.pitch(), r.Scores.pitch()))
	l.Arg(packPair(tokens, experts))
	l.Arg(r.packHow())
	s.Launch(l)
}

// RoutingGrad is its backward pass: DLogits (fp32) are set, from Scores, Index and
// DWeight; DLogits may be Scores. If Balance is not zero, the gradient of the
// auxiliary loss
//
//	Balance x experts x sum over experts of (chosen/(tokens TopK)) x mean score
//
// is added to it, with chosen the number of times that the expert was chosen by
// these tokens, which counts as a constant; and Loss (fp32), if it has memory, has
// the loss over Scale added. Scores that are sigmoids count divided by their sum
// over experts (plus 1e-20) there. Balance contains Scale, the factor that all
// gradients have.
type RoutingGrad struct {
	Routing
	DWeight device.Range // fp32 [tokens][TopK]
	DLogits Matrix
	Balance float32
	Scale   float32
	Loss    device.Range
	Scratch device.Range // RouteScratch bytes; no memory will do if Balance is zero
}

// RouteScratch returns the size of the scratch memory of the backward pass. It holds how
// often each expert was chosen, and each token's part of the loss.
func RouteScratch(tokens, experts int) memory.Bytes { return 4 * memory.Bytes(experts+tokens) }

// RouteGrad issues the backward pass of routing. If Balance is not zero, it issues two more
// launches: one counts choices before, and one adds up the parts of the loss at the end.
//
// Arguments of stowage_nn_route_count: index, chosen (uint32, zero before; counts
// are added), pairs and experts.
//
// Arguments of stowage_nn_route_grad: scores, index, dweight, dlogits, chosen or 0,
// parts (fp32, one a token: set to the sum over experts of chosen x score) or 0,
// pitches of scores and dlogits, tokens and experts, how as for stowage_nn_route,
// then the fp32 Balance x experts/(tokens x tokens x TopK).
func RouteGrad(s device.Stream, r RoutingGrad) {
	tokens, experts := r.check()
	r.DLogits.shape("the logits' gradient of a routing", tokens, experts)
	if r.DLogits.Type != kernels.F32 {
		panic("nn: expected an fp32 gradient of the logits of routing")
	}
	index := needWords("the index of a routing", r.Index, tokens*r.TopK)
	// As one product it is exact to fp64, while tokens x tokens alone may exceed 2^32.
	share := float64(experts) / (float64(tokens) * float64(tokens) * float64(r.TopK))
	var chosen, parts device.Range
	if r.Balance != 0 {
		scratch := needWords("the scratch of a routing's gradient", r.Scratch, experts+tokens)
		chosen, parts = scratch.Slice(0, 4*memory.Bytes(experts)), scratch.Slice(4*memory.Bytes(experts), 4*memory.Bytes(tokens))
		s.Fill(chosen, 0)
		l := device.NewLaunch(&routeCountKernel, runsOf(tokens*r.TopK, routeCountRun), routeThreads)
		l.Read(index)
		l.Write(chosen)
		l.Arg(packPair(tokens*r.TopK, experts))
		s.Launch(l)
	}
	l := device.NewLaunch(&routeGradKernel, runsOf(tokens, routeTokens), routeThreads)
	l.Read(r.Scores.used("the scores of a routing"))
	l.Read(index)
	l.Read(needWords("the weights' gradient of a routing", r.DWeight, tokens*r.TopK))
	l.Write(r.DLogits.used("the logits' gradient of a routing"))
	readWords(&l, "the counts of a routing", chosen, experts)
	writeWords(&l, "the parts of a routing's loss", parts, tokens)
	l.Arg(packPair(r.Scores.pitch(), r.DLogits.pitch()))
	l.Arg(packPair(tokens, experts))
	l.Arg(r.packHow())
	l.Arg(bits(float32(float64(r.Balance) * share)))
	s.Launch(l)
	if r.Balance != 0 && r.Loss.Buf != nil {
		if r.Scale == 0 {
			panic("nn: the auxiliary loss of routing needs Scale; set it to the factor that Balance contains")
		}
		AddUp(s, Total{Sum: r.Loss, X: parts, Factor: float32(float64(r.Balance) / float64(r.Scale) * share)})
	}
}

// runsOf returns how many runs of some length n numbers have.
func runsOf(n, run int) int { return (n + run - 1) / run }

// Rebalance raises the bias (fp32) of each expert by Rate if the expert was chosen less
// often than the mean, and lowers it if more often. Then it sets Load (uint32) to zero.
// Both have one number for each expert. Load may hold the numbers of several ranks, which
// then count together.
type Rebalance struct {
	Bias, Load device.Range
	Experts    int // at most MaxExperts
	Ranks      int // zero stands for one
	Rate       float32
}

// UpdateBias issues a rebalance.
//
// Arguments of stowage_nn_rebalance, which is one block: bias, load, experts, Rate,
// ranks.
func UpdateBias(s device.Stream, r Rebalance) {
	if r.Experts < 1 || r.Experts > MaxExperts {
		panic(fmt.Sprintf("nn: expected the bias of 1 to %d experts, got %d", MaxExperts, r.Experts))
	}
	ranks := max(r.Ranks, 1)
	l := device.NewLaunch(&rebalanceKernel, 1, routeThreads)
	l.Write(needWords("the bias of experts", r.Bias, r.Experts))
	l.Write(needWords("the load of experts", r.Load, ranks*r.Experts))
	l.Arg(uint64(r.Experts))
	l.Arg(bits(r.Rate))
	l.Arg(uint64(ranks))
	s.Launch(l)
}
