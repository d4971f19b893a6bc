// This file owns the tests of further heads that have several layers.

package layer

import (
	"math"
	"testing"

	"github.com/stowage-dev/stowage/plan/model"
)

// The layers of a head have parameters whose names end alike. Each parameter gets its own
// gradient.
func TestGradientsOfHeadsWithSeveralLayers(t *testing.T) {
	dense := model.Layer{Attention: attentionLayer(), Dense: &model.Dense{Width: 20, Gated: true}}
	m := tiny("mtp", dense)
	m.MTP = &model.MTP{Depth: 2, Layers: []model.Layer{dense, {Dense: &model.Dense{Width: 12, Gated: true}}, dense}}
	for _, m.Tied = range []bool{false, true} {
		checkGradients(t, m, rigOptions{})
	}
}

// Each head has a sum of its own for its loss. With weights near zero, every loss is about
// that of a guess.
func TestLossOfEachHead(t *testing.T) {
	dense := model.Layer{Attention: attentionLayer(), Dense: &model.Dense{Width: 20, Gated: true}}
	m := tiny("mtp", dense)
	m.MTP = &model.MTP{Depth: 3, Layers: []model.Layer{dense}}
	r := newRig(t, m, rigOptions{})
	r.step()
	losses, guess := make([]float32, Ahead(m)), math.Log(float64(m.Vocab))
	ok(t, r.s.Download(floats(losses), r.env.Sums.Range))
	if len(losses) != 4 {
		t.Errorf("%d losses of a model with three further heads", len(losses))
	}
	for i, x := range losses {
		if math.Abs(float64(x)-guess) > 0.2*guess {
			t.Errorf("head %d has a loss of %.3f; all have %.3f, and a guess has %.3f", i, x, losses, guess)
		}
	}
}
