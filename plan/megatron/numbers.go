// This file owns arithmetic on whole numbers: the nearest one that divides.

package megatron

import (
	"slices"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

func lcm(a, b int) int { return a / gcd(a, b) * b }

// multiple returns the multiple of step nearest to n, and at least step.
func multiple(n, step int) int { return max((n+step/2)/step*step, step) }

// divisor returns the divisor of n nearest to want, and the smaller of two that are equally
// near.
func divisor(n, want int) int {
	best := 1
	for d := 1; d*d <= n; d++ {
		if n%d != 0 {
			continue
		}
		for _, c := range []int{d, n / d} {
			if gap, had := abs(c-want), abs(best-want); gap < had || (gap == had && c < best) {
				best = c
			}
		}
	}
	return best
}

func abs(n int) int { return max(n, -n) }

func hasExperts(m *model.Model) bool {
	return slices.ContainsFunc(m.Layers, func(l model.Layer) bool { return l.MoE != nil })
}

func hasMLA(s *plan.Setup) bool {
	return slices.ContainsFunc(s.Model.Layers, func(l model.Layer) bool { return l.MLA != nil })
}

func mtpLayers(s *plan.Setup) []model.Layer {
	if s.Model.MTP == nil {
		return nil
	}
	return s.Model.MTP.Layers
}

// gatedModel reports whether feed-forward parts are gated, as SwiGLU is.
func gatedModel(m *model.Model) bool {
	p := parts(m)
	return (p.Dense != nil && p.Dense.Gated) || (p.MoE != nil && p.MoE.Gated)
}
