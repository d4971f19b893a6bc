// This file owns the tests of further heads that have several layers.

package layer

import (
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
