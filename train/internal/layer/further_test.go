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

// Head k reads the tokens that the head before it was to predict, and predicts the next
// ones. So the tokens of row r are the targets of loss r-1 and the input of all that follow,
// and no loss before that depends on them.
func TestTokensOfEachHead(t *testing.T) {
	dense := model.Layer{Attention: attentionLayer(), Dense: &model.Dense{Width: 20, Gated: true}}
	m := tiny("mtp", dense)
	m.MTP = &model.MTP{Depth: 3, Layers: []model.Layer{dense}}
	r := newRig(t, m, rigOptions{})
	for u := range r.chunk.Units { // far from zero, so that every token matters
		for i, p := range r.chunk.Units[u].Params {
			x := p.Values(5, 1)
			for k := range x {
				x[k] *= 8
			}
			r.set(r.chunk.Units[u], i, x)
		}
	}
	losses := func() []float32 {
		r.step()
		x := make([]float32, Ahead(m))
		ok(t, r.s.Download(floats(x), r.env.Sums.Range))
		return x
	}
	before := losses()
	for row := range 1 + Ahead(m) {
		ids := r.tokens.row(row)
		was, other := make([]byte, ids.Len), make([]byte, ids.Len)
		ok(t, r.s.Download(was, ids))
		for i := range other {
			if other[i] = was[i]; i%4 == 0 {
				other[i] = (was[i] + 5) % byte(m.Vocab)
			}
		}
		r.s.Upload(ids, other)
		for i, x := range losses() {
			if changed := x != before[i]; changed != (i >= row-1) {
				t.Errorf("other tokens in row %d: loss %d was %g and is %g", row, i, before[i], x)
			}
		}
		r.s.Upload(ids, was)
	}
}
