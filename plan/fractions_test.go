// This file owns the tests of offload fractions by pipeline rank.

package plan

import (
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// A rank with its own fraction has the memory that it has if all ranks have that fraction.
// SPEC S6.1
func TestFractionsByRank(t *testing.T) {
	base := deepSeek(t)
	base.Layout.PP, base.Layout.VPP, base.Layout.Stages = 4, 1, nil
	base.Offload.Modules = []string{"expert_fc1", "moe_act"}
	rapid.Check(t, func(t *rapid.T) {
		s := *base
		s.Offload.ByBytes = rapid.Bool().Draw(t, "by bytes")
		for range 4 {
			s.Offload.Fractions = append(s.Offload.Fractions, float64(rapid.IntRange(0, 8).Draw(t, "eighths"))/8)
		}
		p, err := Predict(&s)
		if err != nil {
			t.Fatal(err)
		}
		for r, f := range s.Offload.Fractions {
			one := s
			one.Offload.Fractions, one.Offload.Fraction = nil, f
			if f == 0 {
				one.Offload.Modules = nil
			}
			q, err := Predict(&one)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(p.Ranks[r], q.Ranks[r]) {
				t.Fatalf("rank %d with %g: %+v, alone %+v", r, f, p.Ranks[r].Peak, q.Ranks[r].Peak)
			}
			if x := OffloadShare(p.Setup, r); x < 0 || x > 1 || (x == 0) != (f == 0) && s.Offload.ByBytes {
				t.Fatalf("rank %d with %g moves %g", r, f, x)
			}
		}
	})
}

// PredictRanks gives the figures of a full forecast under any policy, in any order.
func TestPredictRanksAgrees(t *testing.T) {
	base := deepSeek(t)
	base.Layout.PP, base.Layout.VPP, base.Layout.Stages = 4, 2, nil
	for _, compute := range []Format{BF16, FP8} {
		base.Precision.Compute, base.Precision.PlainFirst = compute, 1
		n, err := base.Normalise()
		if err != nil {
			t.Fatal(err)
		}
		predict := PredictRanks(n)
		rapid.Check(t, func(t *rapid.T) {
			s := *n
			s.Offload.ByBytes = true
			if n := rapid.IntRange(0, 8).Draw(t, "eighths"); n > 0 {
				s.Offload.Modules, s.Offload.Fraction = []string{"expert_fc1", "moe_act"}, float64(n)/8
			}
			switch rapid.IntRange(0, 3).Draw(t, "recompute") {
			case 1:
				s.Recompute.Modules = []string{"shared_experts", "layernorm"}
			case 2:
				s.Recompute = Recompute{Full: true, Method: "block", Layers: rapid.IntRange(1, 4).Draw(t, "layers")}
			case 3:
				s.Recompute = Recompute{Full: true, Method: "uniform", Layers: 1}
			}
			full, err := Predict(&s)
			if err != nil {
				t.Fatal(err)
			}
			for r, k := range full.Ranks {
				got, err := predict(r, s.Recompute, s.Offload)
				if err != nil {
					t.Fatal(err)
				}
				if got.Peak != k.Peak || got.Reserved != k.Reserved || got.Host != k.Host || got.Share != OffloadShare(full.Setup, r) || k.Share != got.Share {
					t.Fatalf("rank %d: %+v; the forecast has %+v", r, got, k)
				}
			}
		})
		if _, err := predict(4, Recompute{}, Offload{}); err == nil {
			t.Error("there is no rank 4, and it was predicted")
		}
	}
}

func TestFractionsRefused(t *testing.T) {
	s := deepSeek(t)
	s.Layout.PP, s.Layout.VPP, s.Layout.Stages = 4, 1, nil
	for want, list := range map[string][]float64{
		"2 offload fractions for 4 pipeline ranks": {1, 0.5}, "1.5 of pipeline rank 2 is outside of 0 to 1; the nearest is 1": {1, 0, 1.5, 0},
	} {
		s.Offload.Fractions = list
		if err := s.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v", list, err)
		}
	}
}
