// This file owns how a model is divided over pipeline stages if a setup does not say it.

package plan

import "github.com/stowage-dev/stowage/plan/model"

// DefaultStages divides a model over pipeline stages as people do who write layouts by
// hand. It takes the first division that works:
//
//   - the same number of layers in every stage, or fewer in the last, which has the loss
//   - the embedding counted as a layer, and the loss in a stage of its own
//   - the first dense layers of a MoE model in the first stage, with MTP and the loss in
//     stages of their own
//   - as evenly as possible
//
// The layouts of Megatron-Bridge for DeepSeek-V3 are of the first kind for 4, 8 and 16
// stages and of the second for 32.
func DefaultStages(m *model.Model, pp, vpp int) []Stage {
	n := max(pp, 1) * max(vpp, 1)
	layers := len(m.Layers)
	dense := densePrefix(m)
	each := (layers + n - 1) / n
	switch {
	case layers > each*(n-1):
		return fillStages(layers, n, each, each)
	case (layers+1)%(n-1) == 0 && (layers+1)/(n-1) > 1:
		each = (layers + 1) / (n - 1)
		return fillStages(layers, n, each-1, each)
	}
	// This many of the last stages hold no decoder layer.
	for empty := range 3 {
		middle := n - 1 - empty
		if dense > 0 && middle > 0 && (empty < 2 || m.MTP != nil) && (layers-dense)%middle == 0 {
			return withEnds(dense, layers, n, empty)
		}
	}
	sizes := make([]int, n)
	for i := range sizes {
		sizes[i] = (layers*(i+1))/n - layers*i/n
	}
	return staged(sizes, n-1)
}

// densePrefix returns the number of dense layers before the first MoE layer.
func densePrefix(m *model.Model) int {
	for i, l := range m.Layers {
		if l.MoE != nil {
			return i
		}
	}
	return 0
}

// fillStages gives each stage the same number of layers, and the last one the rest.
func fillStages(layers, n, first, each int) []Stage {
	sizes := make([]int, n)
	for i := range sizes {
		sizes[i] = min(each, layers)
		if i == 0 {
			sizes[i] = min(first, layers)
		}
		layers -= sizes[i]
	}
	return staged(sizes, n-1)
}

// withEnds puts the first layers into the first stage and keeps the last stages for the
// ends of the model.
func withEnds(first, layers, n, empty int) []Stage {
	sizes := make([]int, n)
	sizes[0] = first
	for i := 1; i < n-empty; i++ {
		sizes[i] = (layers - first) / (n - 1 - empty)
	}
	mtp := n - 1
	if empty == 2 {
		mtp = n - 2
	}
	return staged(sizes, mtp)
}

// staged returns stages with the given numbers of layers.
func staged(sizes []int, mtp int) []Stage {
	stages := make([]Stage, len(sizes))
	at := 0
	for i, n := range sizes {
		stages[i] = Stage{First: at, Last: at + n, MTP: i == mtp, Loss: i == len(sizes)-1}
		at += n
	}
	stages[0].Embedding = true
	return stages
}
